"""What a tensor axis' slices meet is looked at in a signature's first run, by itself; later runs go straight."""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.base import private
from fzero.testing import RankError, assert_trees_close, run_ranks

F64, WIDTH, INNER = torch.float64, 8, 12
PLAN = {"*up": "column", "*down": "row"}
Code = Callable[..., torch.Tensor]


class Layer(nn.Module):
    """A column, any code, a row."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code, self.norm = code, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return x + self.down(self.code(self.up(self.norm(x)), x, *more))


class Model(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer(code) for _ in range(2)])

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *more)
        return x


def made(code: Code) -> tuple[Any, Any]:
    torch.manual_seed(0)
    apply, params = fz.functional(Model(code).to(F64))
    return lambda p, x, *more: apply(p, x, *more).square().mean(), params


def stepped(loss: Any, units: bool = False, remat: bool = False, sequence: bool = False) -> fz.Step:
    mesh = init_device_mesh("cpu", (1, torch.distributed.get_world_size()), mesh_dim_names=("dp", "tp"))
    step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1)), PLAN, mesh=mesh, sequence=sequence)
    step = fz.shard_zero3(step, mesh=mesh, axis="dp") if units else step
    return fz.remat(step) if remat else step


def grads(step: fz.Step, state: Any, *inputs: Any) -> Any:
    out, pullback = step.vjp(state, *inputs)
    return out, dict(fz.gather(pullback(torch.ones_like(out))[0]))


class Told:
    """What code says of its runs, by thread; it is nothing that a unit reaches."""

    def __init__(self) -> None:
        self._of: dict[int, list[Any]] = {}

    def clear(self) -> None:
        self._of.clear()

    def __call__(self, what: object) -> None:
        self._of.setdefault(threading.get_ident(), []).append(what)

    def all(self) -> list[Any]:
        return self._of.pop(threading.get_ident(), [])


_TOLD = Told()


def tell(what: object) -> int:
    """How often something was told."""
    told = sys.modules[__name__]._TOLD
    told(what)
    return len(told._of[threading.get_ident()])


def modes() -> list[str]:
    return [type(mode).__name__ for mode in private.function_modes()]


@in_turns(4)
@pytest.mark.parametrize("way", ["module", "units", "remat", "pure", "examples"])
def test_nothing_looks_at_a_second_run(way: str) -> None:
    def code(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        tell(modes())
        return h.tanh()

    loss, params = made(code)
    _TOLD.clear()

    def rank_main(rank: int) -> list[list[list[str]]]:
        step, given_params = stepped(loss, way in ("units", "remat"), way == "remat"), params
        if way == "pure":
            ax = fz.parallel.axis(None, "tp")
            given_params = {"up": torch.ones(4, 6, dtype=F64), "down": torch.ones(6, 4, dtype=F64)}
            fn = lambda p, x: fz.parallel.sum(code(fz.parallel.copy(x, ax) @ p["up"], x) @ p["down"], ax).mean()
            step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"up": 1, "down": 0})
        state, x = step.init(given_params), torch.ones(2, 3, 4 if way == "pure" else WIDTH, dtype=F64)
        found = []
        longer = torch.cat([x, x], 1)
        for batch in (x, x * 2, longer, longer * 2):
            fz.per_example_grads(step, state, batch) if way == "examples" else grads(step, state, batch)
            found.append(_TOLD.all())
        return found

    for first, second, other_shape, again in run_ranks(rank_main, 2):
        assert any(first) and any(other_shape) and not any((*second, *again))


@pytest.mark.parametrize("scales", [(0.9, 0.1), (0.1, 0.9)])
def test_a_branch_by_a_float(scales: tuple[float, ...]) -> None:
    """Of which a form says the type alone: what one branch needs was done in the other one, by numbers of calls."""

    def code(h: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
        if scale > 0.5:
            return torch.mul(torch.mul(h, x[..., :1]), h)
        return torch.mul(torch.mul(h, h), 0.5)

    loss, params = made(code)
    x = torch.randn(2, 3, WIDTH, dtype=F64)

    def rank_main(rank: int) -> list[Any]:
        step = stepped(loss)
        state = step.init(params)
        return [grads(step, state, x, scale)[1] for scale in (*scales, *scales)]

    want = [torch.func.grad(loss)(dict(params), x, scale) for scale in (*scales, *scales)]
    for found in run_ranks(rank_main, 2):
        assert_trees_close(found, want, rtol=1e-10, atol=1e-12)


def gate(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h * torch.sigmoid(x.mean(-1, keepdim=True))


def wide(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h + x[..., :1].expand_as(h) * x[..., 1:2]


def in_attention(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    q, k = h.unflatten(-1, (-1, 2)).transpose(1, 2), x[:, None, :, :2]
    return fz.parallel.attention(q, k, k).transpose(1, 2).flatten(2)


def branches(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h.tanh() * x[..., :1] if x.mean() > 0 else h.sin()


def some_tokens(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = h.tanh()
    for token in (x[0, :, 0] > 0).nonzero()[:, 0].tolist():
        out = out + h[:, token : token + 1] * x[:, token : token + 1, :1]
    return out


CODES: dict[str, Code] = {f.__name__: f for f in (gate, wide, in_attention, branches, some_tokens)} | {
    "tanh": lambda h, x: h.tanh(),
    "twice": lambda h, x: gate(gate(h, x).sin(), h.detach().new_ones(()) * x),
}


@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(CODES)),
    ranks=st.integers(2, 3),
    way=st.sampled_from([(False, False), (True, False), (True, True)]),
    sequence=st.booleans(),
    signs=st.lists(st.sampled_from([-1.0, 1.0]), min_size=2, max_size=4),
    lengths=st.lists(st.integers(3, 4), min_size=4, max_size=4),
)
def test_all_runs_are_those_of_one_process(
    name: str, ranks: int, way: tuple[bool, bool], sequence: bool, signs: list[float], lengths: list[int]
) -> None:
    loss, params = made(CODES[name])
    batches = [
        sign * torch.rand(2, length, WIDTH, dtype=F64) + sign * torch.linspace(0, 1, WIDTH, dtype=F64) / 10
        for sign, length in zip(signs, lengths, strict=False)
    ]
    want = [torch.func.grad_and_value(loss)(dict(params), x)[::-1] for x in batches]

    def rank_main(rank: int) -> Any:
        step = stepped(loss, *way, sequence=sequence)
        state = step.init(params)
        return [grads(step, state, x) for x in batches]

    for found in run_ranks(rank_main, ranks):
        assert_trees_close(found, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["tanh", "gate"])
def test_gradients_of_examples(name: str) -> None:
    loss, params = made(CODES[name])
    x = torch.rand(3, 4, WIDTH, dtype=F64)
    want = [dict(torch.func.grad(loss)(dict(params), each[None])) for each in x]

    def rank_main(rank: int) -> Any:
        step = stepped(loss)
        state = step.init(params)
        return [fz.per_example_grads(step, state, x) for _ in range(2)]

    for runs in run_ranks(rank_main, 2):
        for found in runs:
            for i, each in enumerate(want):
                assert_trees_close({k: v[i] for k, v in found.items()}, each, rtol=1e-10, atol=1e-12)


def test_what_reads_a_value_is_looked_at_in_each_run() -> None:
    code = lambda h, x: h.softmax(-1) if x.mean() > 0 else h.tanh()
    loss, params = made(code)

    def rank_main(rank: int) -> None:
        step = stepped(loss)
        state, x = step.init(params), torch.ones(2, 3, WIDTH, dtype=F64)
        for _ in range(2):
            grads(step, state, -x)
        with pytest.raises(ValueError, match="'softmax' goes over the dim"):
            grads(step, state, x)

    run_ranks(rank_main, 2)


def test_other_inputs_and_refused_runs_are_looked_at_anew() -> None:
    code = lambda h, x, mixes: h.softmax(-1) if mixes else h.tanh()
    loss, params = made(code)

    def rank_main(rank: int) -> None:
        step = stepped(loss)
        state, x = step.init(params), torch.ones(2, 3, WIDTH, dtype=F64)
        for _ in range(2):
            grads(step, state, x, False)
            for _ in range(2):
                with pytest.raises(ValueError, match="'softmax' goes over the dim"):
                    grads(step, state, x, True)

    run_ranks(rank_main, 2)


def test_strict_runs_are_all_looked_at() -> None:
    loss, params = made(lambda h, x: h.softmax(-1) if wrong else h.tanh())
    wrong: list[int] = []

    def rank_main(rank: int) -> None:
        step = stepped(loss)
        state, x = step.init(params), torch.ones(2, 3, WIDTH, dtype=F64)
        grads(step, state, x)
        torch.distributed.barrier()
        wrong.append(rank)
        torch.distributed.barrier()
        grads(step, state, x)  # impure, and not seen
        with fz.testing.strict(), pytest.raises(ValueError, match="'softmax' goes over the dim"):
            grads(step, state, x)

    run_ranks(rank_main, 2)


def test_a_module_that_calls_other_functions_later_is_refused() -> None:
    """Where something is done for slices, which goes by the number of a call. It is checked first, then it runs."""

    def code(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return gate(h, x) if tell("called") < 5 else gate(h, x) * 2.0

    loss, params = made(code)
    _TOLD.clear()

    def rank_main(rank: int) -> None:
        step = stepped(loss)
        state, x = step.init(params), torch.ones(2, 3, WIDTH, dtype=F64)
        grads(step, state, x)
        with pytest.raises(ValueError, match=r"'mul' \d+ times, and called it \d+ times in its first run"):
            grads(step, state, x)

    run_ranks(rank_main, 2)


def twice(rank: int, x: torch.Tensor) -> list[Any]:
    """The gradients of a first run, and of a second one on another thread."""
    loss, params = made(gate)
    step = stepped(loss)
    state, found = step.init(params), list[Any]()
    run = lambda: found.append(grads(step, state, x)[1])
    run()
    apart = threading.Thread(target=run)
    apart.start()
    apart.join()
    return found


def test_another_thread_has_a_copy_of_the_module_of_its_own() -> None:
    x = torch.rand(2, 3, WIDTH, dtype=F64)
    loss, params = made(gate)
    want = torch.func.grad(loss)(dict(params), x)
    for found in run_ranks(functools.partial(twice, x=x), 2, backend="processes"):
        assert_trees_close(found, [want, want], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("remat", [False, True])
def test_each_rank_drops_by_itself_in_every_run(remat: bool) -> None:
    """And a recomputation drops the same: the cotangent of a dropped element is zero."""

    def code(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = F.dropout(torch.ones_like(h), 0.5)
        with torch._C.DisableTorchFunction():  # which is no part of what is computed
            tell(private.unwrapped(out).tolist())
        return h * out

    loss, params = made(code)
    _TOLD.clear()

    def rank_main(rank: int) -> Any:
        step = stepped(loss, True, remat)
        state, x = step.init(params), torch.ones(2, 3, WIDTH, dtype=F64)
        found = []
        for _ in range(3):
            state, _ = step(state, x)
            found.append(_TOLD.all())
        return found

    first, second = run_ranks(rank_main, 2)
    for masks, others, tried in zip(first, second, (1, 0, 0), strict=True):  # units run twice in their first run
        assert len(masks) == 2 * (1 + tried + remat)
        assert not any(map(operator.eq, masks, others))
        if tried:
            assert masks.pop(0) == masks[0] and masks.pop(1) == masks[1]
        if remat:
            assert masks[0] == masks[3] and masks[1] == masks[2]


def shifted(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Of which ranks send a mean by torch.distributed itself."""
    mean = x.detach().mean((0, 1))
    parts = [torch.empty_like(mean) for _ in range(2)]
    torch.distributed.all_gather(parts, mean, group=group)
    tell([private.is_fake(part) for part in parts])
    return x - (parts[0] + parts[1]) / 2


def sends(rank: int, way: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group, ax = mesh.get_group("dp"), fz.parallel.axis(mesh, "dp")

    def code(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if way == "torch":
            return h + shifted(x, group).sum(-1, keepdim=True)
        return h + fz.parallel.gather(x.detach().mean((0, 1))[None], ax, 0).mean()

    apply, params = fz.functional(Model(code).to(F64))
    step = fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1))
    step = fz.shard_zero3(fz.shard_tensor(step, PLAN, mesh=mesh, axis="tp"), mesh=mesh, axis="dp")
    generator = torch.Generator().manual_seed(0)
    params = {key: torch.randn(x.shape, generator=generator, dtype=F64) for key, x in params.items()}
    state = step.init(params)
    for _ in range(2):
        state, metrics = step(state, torch.full((1, 3, WIDTH), 1.0 + rank // 2, dtype=F64))
        assert metrics["loss"].isfinite()
    assert not any(any(said) for said in sys.modules[__name__]._TOLD.all())


@in_turns(4)
@pytest.mark.parametrize("way", ["torch", "ours"])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_what_looks_ahead_sends_nothing(way: str, backend: Any) -> None:
    run_ranks(functools.partial(sends, way=way), 4, backend=backend, timeout=60.0)


def test_what_a_transform_takes_gradients_by_meets_slices() -> None:
    """An input of `step.forward`, or what the function is made with: without a copy its gradient is a summand."""
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(*shape, generator=generator) for name, shape in {"up": (4, 6), "down": (6, 4)}.items()}
    x = torch.randn(3, 4, generator=generator)

    def main(rank: int, case: str, copies: bool) -> torch.Tensor:
        ax = fz.parallel.axis(None, "tp")
        copy = (lambda x: fz.parallel.copy(x, ax)) if copies else (lambda x: x)

        def loss_of(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            always = lambda x: fz.parallel.copy(x, ax)
            here, there = (always, copy) if case == "made with" else (copy, always)
            fn = lambda p, x: fz.parallel.sum(torch.tanh(here(x) @ p["up"] * there(c)) @ p["down"], ax).sum()
            step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"up": 1, "down": 0})
            return step.forward(step.init(params), x)

        return torch.func.grad(loss_of, case == "made with")(x, torch.tensor(1.3))

    for case in ("made with", "input"):
        want = run_ranks(functools.partial(main, case=case, copies=True), 1)[0]
        for got in run_ranks(functools.partial(main, case=case, copies=True), 2):
            assert_trees_close(got, want, rtol=1e-4, atol=1e-6)
        with pytest.raises(RankError, match="AxisTypeError"):
            run_ranks(functools.partial(main, case=case, copies=False), 2)
