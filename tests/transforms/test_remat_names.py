"""fz.name and fz.remat(save=, offload=): whatever is kept, the bits are those of a step that keeps all."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns
from torch.utils._python_dispatch import TorchDispatchMode

import fzero as fz
from fzero.testing import LiveBytes, assert_trees_close, assert_trees_equal, hazards, run_ranks

F64 = torch.float64
D = 4
NAMES = ("a", "b", "c")
Params = dict[str, torch.Tensor]
# ---- drawn units: each operation takes the newest tensor, another one, and the params


class Cubed(torch.autograd.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out = x.pow(3)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, out = ctx.saved_tensors
        return cotangent * (3 * x * x + 0 * out)


def _in_place(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    out = x * p["s"]
    out[:, :2].mul_(y[:, :2].tanh())
    return out.add_(y)


def _over_again(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    with torch.no_grad():
        out = torch.empty_like(x)
        torch.mul(x, 2.0, out=out)
        out[0] = 1.0
    return out.sigmoid() * x


def _opened(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    scales = torch.empty(D, dtype=x.dtype)
    scales.numpy()[:] = [1.0, 0.5, 0.25, 2.0]  # of which no operation knows
    return x * scales


def _opened_later(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    scales = y.detach() * 0.5
    scales.numpy()[0] = 1.0
    return x * scales + y


def _by_a_thread(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    scales = torch.zeros(D, dtype=x.dtype)
    thread = threading.Thread(target=lambda: scales.fill_(0.25))
    thread.start()
    thread.join()
    return torch.tanh(x) * scales


def _forces(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    energy = (x.sin() @ p["w"]).square().sum()
    (slope,) = torch.autograd.grad(energy, [x], create_graph=True)
    return torch.tanh(slope)


def _of_its_own_generator(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return x * (1 + torch.poisson(y.detach().abs(), generator=generator)).reciprocal()  # which it takes by position


def _branching(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    return torch.tanh(x) if x.detach().sum().item() > 0 else torch.sin(x)


def _sorted(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    values, places = x.sort(dim=-1)
    return values + y.gather(-1, places)


def _complex(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous())
    turned = pairs * torch.view_as_complex(torch.stack([p["s"].cos(), p["s"].sin()])).conj()
    return torch.view_as_real(turned).flatten(-2)


# products that are needed though no derivative asks for them, or in some runs only


def _needed_for_its_shape(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    return y.sin() * ((x @ p["w"]).detach() > 0).nonzero().shape[0] / D


def _needed_at_times(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    h = x @ p["w"]
    return (h if float(x.detach()[0, 0]) > 0 else h.detach()).sin() + y


def _needed_by_a_hook(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    h = x @ p["w"]
    out = h + y
    if float(x.detach()[0, 0]) > 0 and out.requires_grad:
        out.register_hook(lambda g: g * h.detach().cos())
    return out


def _saved_by_hooks(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    h = x @ p["w"]
    with torch.autograd.graph.save_on_cpu():
        return torch.sin(h) + y


def _refusing_zeros(x: torch.Tensor, y: torch.Tensor, p: Params) -> torch.Tensor:
    torch.multinomial((p["w"] @ p["w"]).detach().abs(), 2)
    return x + y


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, Params], torch.Tensor]] = {
    "matmul": lambda x, y, p: torch.tanh(x @ p["w"]),
    "norm": lambda x, y, p: F.layer_norm(x, (D,)),
    "gated": lambda x, y, p: F.silu(x) * torch.sigmoid(y),
    "softmax": lambda x, y, p: torch.softmax(x, -1) + y,
    "attention": lambda x, y, p: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None])[0, 0],
    "views": lambda x, y, p: torch.cat([x.chunk(2, -1)[1], y.t().contiguous().t()[:, :2]], -1) * x,
    "in place": _in_place,
    "over again": _over_again,
    "relu_": lambda x, y, p: (x + y).relu_() * p["s"],
    "cubed": lambda x, y, p: Cubed.apply(torch.tanh(x)) + y,  # type: ignore[operator]
    "branch": _branching,
    "sorted": _sorted,
    "complex": _complex,
    "complex param": lambda x, y, p: torch.view_as_real(
        x.to(torch.complex128) @ torch.view_as_complex(p["w"].view(D, D // 2, 2))
    ).flatten(-2),
    "needed for its shape": _needed_for_its_shape,
    "needed at times": _needed_at_times,
    "needed by a hook": _needed_by_a_hook,
    "saved by hooks": _saved_by_hooks,
    "refusing zeros": _refusing_zeros,
    "read by Python": lambda x, y, p: y.sin() * copy.deepcopy((x @ p["w"]).detach()),
    "mapped": lambda x, y, p: torch.vmap(lambda row: torch.tanh(row @ p["w"]) * row)(x),
    "constant": lambda x, y, p: x * x.detach().abs().amax().clamp(min=1.0).reciprocal() * 2,
    "drops": lambda x, y, p: F.dropout(x, 0.5) + y,
    "attention drops": lambda x, y, p: F.scaled_dot_product_attention(
        x[None, None], y[None, None], x[None, None], dropout_p=0.5
    )[0, 0],
    "chosen": lambda x, y, p: torch.tanh(y) * torch.bernoulli((x @ p["w"]).sigmoid().detach()),
    "noise": lambda x, y, p: x * torch.randn_like(y).tanh(),
    "by a thread": _by_a_thread,
    "forces": _forces,
    "own generator": _of_its_own_generator,
    "opened": _opened,
    "opened later": _opened_later,
    # without states of torch's generator, whose lock threads wait for with the interpreter's while one collects garbage
    "checkpoint": lambda x, y, p: torch.utils.checkpoint.checkpoint(
        lambda z: torch.tanh(z) * z.exp().reciprocal(), x, use_reentrant=False, preserve_rng_state=False
    ),
}
DRAWS = ("drops", "noise", "attention drops", "chosen")
Program = Sequence[tuple[str, int, str]]  # operation, which of the earlier tensors, a name or ""


def body(program: Program, p: Params, x: torch.Tensor) -> torch.Tensor:
    xs = [x, x * p["s"]]
    for operation, place, name in program:
        out = OPERATIONS[operation](xs[-1], xs[place % len(xs)], p)
        xs.append(fz.name(out, name) if name else out)
    return xs[-1] + xs[-2]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    count = draw(st.integers(1, 6))
    names = st.sampled_from(["", *NAMES])
    one = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), names)
    # every name is given somewhere
    return [*[draw(one) for _ in range(count)], *[("matmul", draw(st.integers(0, 9)), name) for name in NAMES]]


def params_of(units: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(units)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=F64) / 2
    return {"blocks": [{"w": draw(D, D), "s": draw(1)[0] + 1} for _ in range(units)], "head": draw(D)}


def loss_of(drawn: Sequence[Program], unit: Any) -> Callable[..., torch.Tensor]:
    blocks = [unit(functools.partial(body, program)) for program in drawn]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for block, p in zip(blocks, params["blocks"], strict=True):
            x = torch.tanh(block(p, x))
        return (x @ params["head"]).square().mean()

    return loss


TRANSFORMS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "zero1": fz.shard_zero1,
    "zero3": fz.shard_zero3,
    "fused": fz.fuse_update,
    "two microbatches": lambda step: fz.accumulate(step, 2),
    "host": lambda step: fz.offload(step, activations="host"),
    "donated": fz.donate,
    "ema": lambda step: fz.ema(step, 0.9),
}
Keep = tuple[tuple[str, ...], tuple[str, ...]]  # save, offload


def trained(rank: int, drawn: Sequence[Program], transforms: Sequence[str], keep: Keep | None) -> Any:
    """Losses and cotangents of three steps, and what the last state holds."""
    step = fz.train_step(loss_of(drawn, fz.unit), fz.adamw(1e-2))
    if keep is not None:
        step = fz.remat(step, "blocks.*", *keep)
    for name in transforms:
        step = TRANSFORMS[name](step)
    state, seen = step.init(params_of(len(drawn))), []
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(D, D, generator=generator, dtype=F64)
        if number == 1 and "two microbatches" not in transforms:
            loss, pullback = step.vjp(state, x)
            first, again = pullback(torch.ones_like(loss), retain_graph=True), pullback(torch.ones_like(loss))
            assert_trees_equal([fz.gather(first[0]), first[1]], [fz.gather(again[0]), again[1]])
            seen.append([loss, fz.gather(first[0]), first[1]])
            del loss, pullback, first, again  # or a donated state would be copied
        state, metrics = step(state, x)
        seen.append(metrics["loss"].clone())
    return seen, fz.gather(state.params)


def run(rank: int, drawn: Sequence[Program], transforms: Sequence[str], keep: Keep, hazard: int | None) -> None:
    around = contextlib.nullcontext() if hazard is None else hazards(hazard)
    with around:
        wanted = trained(rank, drawn, transforms, None)
        for each in (keep, ((), ())):
            assert_trees_equal(trained(rank, drawn, transforms, each), wanted)


keeps = st.permutations(NAMES).flatmap(
    lambda names: st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda cuts: (tuple(names[: min(cuts)]), tuple(names[min(cuts) : max(cuts)]))
    )
)
orders = st.lists(st.sampled_from(sorted(TRANSFORMS)), unique=True, max_size=3).filter(
    lambda names: not {"zero1", "zero3"} <= {*names}
)


@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
@by_day(14)
@given(st.lists(programs(), min_size=1, max_size=2), orders, keeps, st.integers(1, 3))
def test_whatever_is_kept_bits_are_the_same(
    drawn: Sequence[Program], transforms: Sequence[str], keep: Keep, ranks: int
) -> None:
    run_ranks(lambda rank: run(rank, drawn, transforms, keep, None if ranks == 1 else ranks), ranks)


@by_day(12)
@given(st.lists(programs(), min_size=1, max_size=2), keeps)
def test_numbers_are_those_of_plain_torch(drawn: Sequence[Program], keep: Keep) -> None:
    drawn = [[("gated" if name in DRAWS else name, place, kept) for name, place, kept in each] for each in drawn]
    params, x = params_of(len(drawn)), torch.randn(D, D, generator=torch.Generator().manual_seed(0), dtype=F64)
    leaves = {name: leaf.requires_grad_() for name, leaf in zip(*named_leaves(params), strict=True)}
    own = x.clone().requires_grad_()
    wanted = torch.autograd.grad(loss_of(drawn, lambda f: f)(params, own), [*leaves.values(), own])
    step = fz.remat(fz.train_step(loss_of(drawn, fz.unit), fz.sgd(0.1)), "blocks.*", *keep)
    loss, pullback = step.vjp(step.init(params_of(len(drawn))), x)
    grads, cotangents = pullback(torch.ones_like(loss))
    got = dict(zip(*named_leaves(fz.gather(grads)), strict=True))
    assert_trees_close([*[got[name] for name in leaves], cotangents[0]], list(wanted), rtol=1e-10)


def named_leaves(tree: Any) -> tuple[list[str], list[torch.Tensor]]:
    blocks = [(f"{i}.{name}", leaf) for i, block in enumerate(tree["blocks"]) for name, leaf in block.items()]
    named = [*blocks, ("head", tree["head"])]
    return [name for name, _ in named], [leaf for _, leaf in named]


ALL: list[Program] = [
    [(operation, place, NAMES[place % 3]) for place, operation in enumerate(sorted(OPERATIONS)[start::3])]
    for start in range(3)
]


def every_way(rank: int) -> None:
    for transforms in (["zero1", "two microbatches"], ["zero3", "fused", "host"]):
        run(rank, ALL, transforms, (("a",), ("b",)), 3)


@in_turns(8, "on processes, as on threads")
@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
def test_on_processes() -> None:
    run_ranks(every_way, 2, backend="processes")


# ---- what comes by messages


def exchanging(p: Params, x: torch.Tensor) -> torch.Tensor:
    axis = fz.parallel.axis(None, "sp")
    full = fz.parallel.gather(torch.tanh(x @ p["w"]), axis, 0)
    mixed = fz.name(full * full.flip(0), "a")
    total = fz.parallel.sum(torch.sin(mixed).sum(0, keepdim=True), axis)
    return fz.name(x * total.tanh(), "b") * fz.parallel.ring_shift(x.exp(), axis, 1)


def messages(rank: int) -> Any:
    unit = fz.unit(exchanging)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params["blocks"]:
            x = unit(p, x)
        return x.square().mean()

    found = []
    with hazards(1):
        for transform in (
            lambda step: step,
            fz.remat,
            lambda step: fz.remat(step, save=("a",)),
            lambda step: fz.remat(step, save=("b",), offload=("a",)),
        ):
            step = fz.shard_zero3(transform(fz.train_step(loss, fz.sgd(0.1))))
            params = {"blocks": params_of(2)["blocks"]}
            state, x = step.init(params), torch.randn(3, D, generator=torch.Generator().manual_seed(rank), dtype=F64)
            for _ in range(2):
                state, metrics = step(state, x)
            _, pullback = step.vjp(state, x)
            found.append([metrics["loss"], pullback(torch.ones((), dtype=F64))[1], fz.gather(state.params)])
    for each in found[1:]:
        assert_trees_equal(each, found[0])
    return found[0][0]


@in_turns(2)
@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_messages_of_units_that_keep_values(backend: str) -> None:
    run_ranks(messages, 3 if backend == "threads" else 2, backend=backend)


# ---- what is kept, and what runs again


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.calls.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def recomputed(keep: Keep | None) -> tuple[int, int, int]:
    """Matrix products of a forward run and its pullback, sines of the pullback, and bytes that lie between the two."""

    @fz.unit
    def block(p: Params, x: torch.Tensor) -> torch.Tensor:
        first = fz.name(torch.sin(x @ p["w"]), "first")
        second = fz.name(torch.cos(first @ p["w"]), "second")
        return second @ p["w"]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params["blocks"]:
            x = block(p, x)
        return x.sum()

    step = fz.train_step(loss, fz.sgd(0.1))
    step = step if keep is None else fz.remat(step, "blocks.*", *keep)
    state, x = step.init({"blocks": params_of(3)["blocks"]}), torch.randn(1000, D, dtype=F64)
    step.vjp(state, x)[1](torch.ones((), dtype=F64))  # in which units run twice
    with LiveBytes() as live, Count() as forward:
        out, pullback = step.vjp(state, x)
        between = live.now()
    with Count() as back:
        pullback(torch.ones_like(out))
    products = [name for name in (*forward.calls, *back.calls) if name == "aten::mm"]
    return len(products), back.calls.count("aten::sin"), between // (1000 * D * 8)


def test_only_what_is_needed_runs_again() -> None:
    """Three blocks' products: 27 without recomputation, with it three more of each block, then two.

    What lies between is two blocks' inputs, what is kept, and without recomputation the last block's output.
    """
    assert recomputed(None) == (27, 3, 4 * 3 + 2)
    assert recomputed(((), ())) == (36, 6, 2)
    assert recomputed((("first",), ())) == (33, 3, 3 + 2)
    assert recomputed((("second",), ())) == (33, 6, 3 + 2)
    assert recomputed((("first", "second"), ())) == (33, 3, 6 + 2)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_dropout_does_not_run_again(causal: bool) -> None:
    """Which may draw random numbers; a mode is not shown arguments that have their defaults."""

    @fz.unit
    def block(p: Params, x: torch.Tensor) -> torch.Tensor:
        q = x @ p["w"]
        return torch.tanh(fz.name(F.scaled_dot_product_attention(q, q, q, is_causal=causal), "seen"))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return block(params["blocks"][0], x).sum()

    step = fz.remat(fz.train_step(loss, fz.sgd(0.1)), save=("seen",))
    state, x = step.init({"blocks": params_of(1)["blocks"]}), torch.randn(1, 2, 5, D, dtype=F64)
    state, _ = step(state, x)
    with Count() as count:
        step(state, x)
    assert count.calls.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 1


def test_names_stand_in_the_table_and_the_rule() -> None:
    step = fz.remat(fz.train_step(lambda p, x: x, fz.sgd(0.1)), "blocks.*", ("a",), ("b",))
    assert "remat(pattern='blocks.*', save=('a',), offload=('b',))" in str(step)
    row, other = step.rows([("blocks.0.w", (2,), F64), ("head", (2,), F64)])
    assert row.remat and (row.names.save, row.names.offload) == (("a",), ("b",)) and not other.remat
    with pytest.raises(ValueError, match="set twice: by remat\\(save=\\('a',\\)\\) and by remat\\(\\)"):
        fz.remat(fz.remat(fz.train_step(lambda p, x: x, fz.sgd(0.1)), save=("a",)))


def test_a_name_that_nobody_gives_is_refused() -> None:
    drawn = [[("matmul", 0, name) for name in NAMES]]
    step = fz.remat(fz.train_step(loss_of(drawn, fz.unit), fz.sgd(0.1)), "blocks.*", ("a", "d"))
    with pytest.raises(ValueError, match=r"the name 'd' to keep, which no unit gives .* expected one of 'a', 'b', 'c'"):
        step(step.init(params_of(1)), torch.ones(D, D, dtype=F64))


def test_leaves_in_no_unit_are_refused() -> None:
    step = fz.remat(fz.train_step(lambda p, x: body([], p, x).sum(), fz.sgd(0.1)), save=("a",))
    params = params_of(1)["blocks"][0]
    with pytest.raises(ValueError, match="the name 'a' to keep, and its leaves lie in no unit"):
        step(step.init(params), torch.ones(D, D, dtype=F64))


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(fz.name(self.lstm(x)[0], "a"))


def test_a_float_lstm() -> None:
    """Whose kernel makes something else where nothing is recorded."""
    net = torch.nn.Sequential()
    net.blocks = torch.nn.Sequential(Recurrent(), Recurrent())
    apply, params = fz.functional(net)
    found = []
    for transform in (lambda step: step, lambda step: fz.remat(step, "blocks.*", ("a",))):
        step = transform(fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1)))
        state, metrics = step(step.init(params), torch.ones(3, 2, D))
        found.append([metrics["loss"], fz.gather(state.params)])
    assert_trees_equal(*found)


def test_what_is_written_after_it_was_kept_is_computed_again() -> None:
    """Where nothing is recomputed torch refuses it."""
    unit = fz.unit(lambda p, x: fz.name(torch.exp(x * p["s"]), "a"))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        out = unit(params["blocks"][0], x)
        out.mul_(2)
        return out.sum()

    with pytest.raises((RuntimeError, ValueError), match="modified by an inplace operation"):
        stepped(loss, lambda step: step)
    assert_trees_equal(*[stepped(loss, functools.partial(fz.remat, save=keep)) for keep in ((), ("a",))])


def test_what_is_written_is_computed_again_of_products_too() -> None:
    @fz.unit
    def unit(p: Params, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = fz.name(x + x @ p["w"], "a")
        return hidden, torch.tanh(hidden)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        hidden, out = unit(params["blocks"][0], x)
        hidden.mul_(2)
        return hidden.sum() + out.square().sum()

    assert_trees_equal(stepped(loss, lambda step: step), stepped(loss, lambda step: fz.remat(step, "blocks.*", ("a",))))


def stepped(loss: Any, transform: Callable[[fz.Step], fz.Step]) -> Any:
    """The last loss of three updates, and the params."""
    step = transform(fz.train_step(loss, fz.sgd(0.1)))
    state = step.init(params_of(1))
    for _ in range(3):
        state, metrics = step(state, torch.eye(D, dtype=F64))
    return metrics["loss"], fz.gather(state.params)
