"""Torch's own collectives in a function: what communicates a differentiated tensor is refused, and nothing else is."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as torchs
from backwards import with_backward
from hypothesis import given
from hypothesis import strategies as st
from nightly import todays
from torch.distributed import _functional_collectives as functional
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero.engine import run
from fzero.purity import collectives

# torch's own: of plain runs that are wrong, and of deprecated names
pytestmark = [
    pytest.mark.filterwarnings("ignore:c10d.*an autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
Tensor = torch.Tensor
RANKS = 2


Kind = Callable[[Tensor], Tensor]  # of a differentiated tensor of shape (ranks, 3)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _parts(h: Tensor) -> list[Tensor]:
    return [torch.zeros_like(h) for _ in range(dist.get_world_size())]


def _is_first() -> bool:
    return dist.get_rank() == 0


def on_it(call: Callable[[Tensor], object]) -> Kind:
    """A kind that communicates in place."""
    return lambda h: (call(h), h)[1]


def into(call: Callable[[Tensor, Tensor], object]) -> Kind:
    """A kind that communicates into a tensor of its own, which it adds."""

    def kind(h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        call(out, h)
        return h + out

    return kind


# ---- what is refused, beside what programs are drawn of


def all_reduce(h: Tensor) -> Tensor:
    dist.all_reduce(h)
    return h


def all_reduce_copy(h: Tensor) -> Tensor:
    return h + all_reduce(h.clone())


def all_gather(h: Tensor) -> Tensor:
    parts = _parts(h)
    dist.all_gather(parts, h)
    return h + torch.stack(parts).sum(0)


def all_gather_into_tensor(h: Tensor) -> Tensor:
    out = torch.zeros(dist.get_world_size() * len(h), 3, dtype=h.dtype)
    dist.all_gather_into_tensor(out, h.contiguous())
    return h + out[: len(h)]


def _scattered(out: Tensor, h: Tensor) -> None:
    dist.scatter(out, [h * 1 for _ in range(dist.get_world_size())] if _is_first() else None)


def _exchanged(out: Tensor, h: Tensor) -> None:
    other = (dist.get_rank() + 1) % dist.get_world_size()
    for work in [dist.isend(h, other), dist.irecv(out, other)]:
        work.wait()  # type: ignore[union-attr]


def _exchanged_at_once(out: Tensor, h: Tensor) -> None:
    other = (dist.get_rank() + 1) % dist.get_world_size()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, h, other), dist.P2POp(dist.irecv, out, other)]):
        work.wait()


def recorded(x: Tensor) -> Tensor:
    """Sets grad mode, and puts back what autograd has set for it."""
    with torch.enable_grad():
        return x.detach() * 2


# whose forward hides what its derivative knows
hidden: Kind = with_backward(lambda x: x.detach() * 2, lambda grad: grad * 2)
recording: Kind = with_backward(recorded, lambda grad: grad * 2)


def of_one_rank(h: Tensor) -> Tensor:
    return all_reduce_copy(h if dist.get_rank() == dist.get_world_size() - 1 else h.detach()) + h


def caught(h: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        all_reduce(h)
    return h


sent = into(lambda out, h: dist.send(h, 1) if _is_first() else dist.recv(out, 0))  # wrong as the first alone knows
received = on_it(lambda h: dist.send(h.detach(), 1) if _is_first() else dist.recv(h, 0))
broadcast = on_it(lambda h: dist.broadcast(h, 0))
gather = on_it(lambda h: dist.gather(h, _parts(h) if _is_first() else None))
scatter = into(_scattered)
checkpointed: Kind = lambda h: checkpoint(all_reduce_copy, h, use_reentrant=False)  # type: ignore[no-any-return]
of_a_group = on_it(lambda h: _world().allreduce([h]).wait())

# name -> what it is, the operator that is named, the map that is told
REFUSED: dict[str, tuple[Kind, str, str]] = {
    "all_reduce": (all_reduce, "all_reduce", "sum"),
    "all_reduce, later": (on_it(lambda h: dist.all_reduce(h, async_op=True).wait()), "all_reduce", "sum"),  # type: ignore[union-attr]
    "all_reduce of a copy": (all_reduce_copy, "all_reduce", "sum"),
    "all_gather": (all_gather, "all_gather", "gather"),
    "all_gather_into_tensor": (all_gather_into_tensor, "all_gather_single", "gather"),
    "reduce_scatter": (
        into(lambda out, h: dist.reduce_scatter(out[:1], list((h * 1).split(1)))), "reduce_scatter", "reduce_scatter"
    ),
    "reduce_scatter_tensor": (
        into(lambda out, h: dist.reduce_scatter_tensor(out[:1], h.contiguous())),
        "reduce_scatter_single",
        "reduce_scatter",
    ),
    "broadcast": (broadcast, "broadcast", "gather"),
    "reduce": (on_it(lambda h: dist.reduce(h, 0)), "reduce", "sum"),
    "gather": (gather, "gather", "gather"),
    "scatter": (scatter, "scatter", "split"),
    "all_to_all_single": (
        into(lambda out, h: dist.all_to_all_single(out, h.contiguous())), "all_to_all_single", "all_to_all"
    ),
    "send": (sent, "send", "ring_shift"),
    "recv": (received, "recv", "ring_shift"),
    "isend": (into(_exchanged), "isend", "ring_shift"),
    "batch_isend_irecv": (into(_exchanged_at_once), "isend", "ring_shift"),
    "functional broadcast": (
        lambda h: functional.wait_tensor(functional.broadcast(h, 0, _world())), "broadcast", "gather"
    ),
    "functional, in place": (
        lambda h: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce_(h, "sum", _world().group_name)
        ),
        "all_reduce",
        "sum",
    ),
    "functional sum": (
        lambda h: functional.wait_tensor(functional.all_reduce(h, "sum", _world())), "all_reduce", "sum"
    ),
    "torch's sum": (torchs.all_reduce, "all_reduce", "sum"),
    "torch's gather": (lambda h: torch.stack(torchs.all_gather(h)).square().sum(0), "all_gather", "gather"),
    "within a gradient": (
        lambda h: h * torch.func.grad(lambda x: all_reduce(x * 2).square().sum())(h.detach()), "all_reduce", "sum"
    ),
    "checkpointed": (checkpointed, "all_reduce", "sum"),
    "after a function": (lambda h: all_gather(recording(h)), "all_gather", "gather"),
    "of one rank": (of_one_rank, "all_reduce", "sum"),
    "caught": (caught, "all_reduce", "sum"),
}
ALONE = ("send", "recv", "scatter", "of one rank")  # where neither rank knows of the other


# ---- what is not


def own_slice(h: Tensor) -> Tensor:
    parts = _parts(h)
    dist.all_gather(parts, h.detach())
    parts[dist.get_rank()] = h
    return torch.cat(parts)


def number(h: Tensor) -> Tensor:
    count = torch.tensor(len(h))
    dist.all_reduce(count)
    return h / count


def before_a_write(h: Tensor) -> Tensor:
    return all_reduce(torch.zeros_like(h)).add_(h)


def data_beside(h: Tensor) -> Tensor:
    return h + all_reduce(h.data)


def functional_constant(h: Tensor) -> Tensor:
    return h * functional.wait_tensor(functional.all_reduce(h.detach(), "sum", _world()))


# a map of the user's own, with its derivative
summed: Kind = with_backward(lambda x: all_reduce(x.clone()), lambda grad: all_reduce(grad.clone()))
ALLOWED: dict[str, Kind] = {
    "own slice": own_slice,
    "number": number,
    "sent constant": lambda h: sent(h.detach()) + h,
    "before a write": before_a_write,
    "data beside": data_beside,
    "functional constant": functional_constant,
    "summed": summed,
    "scattered constant": lambda h: scatter(h.detach()) + h,
}


# ---- one run of each on two processes

# in a unit, ZeRO stage, recomputed
PLACES = todays([(False, 0, False), (False, 2, False), (True, 0, True), (True, 1, False), (True, 3, True)], of=5)


def _params() -> dict[str, dict[str, Tensor]]:
    return {"m": {"w": torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3)}}


def _input(rank: int) -> Tensor:
    return torch.linspace(0.5, 1.5, 6, dtype=torch.float64).reshape(2, 3) * (rank + 1)


def _body(kind: Callable[[Tensor], Tensor], p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(kind(x @ p["w"])).square().sum()


def _step(kind: Callable[[Tensor], Tensor], unit: bool, stage: int, remat: bool) -> fz.Step:
    body = functools.partial(_body, kind)
    body = fz.unit(body) if unit else body

    def fn(p: dict[str, dict[str, Tensor]], x: Tensor) -> Tensor:
        return body(p["m"], x)

    step = fz.train_step(fn, fz.sgd(0.1), units=["m"] if unit else None)
    step = getattr(fz.transforms, f"shard_zero{stage}")(step) if stage else step
    return fz.transforms.remat(step) if remat else step


def _plain(kind: Callable[[Tensor], Tensor], rank: int, stage: int) -> Tensor:
    """The weights after plain torch's update, of the mean of the ranks' gradients where they are reduced."""
    w = _params()["m"]["w"].requires_grad_()
    (grad,) = torch.autograd.grad(_body(kind, {"w": w}, _input(rank)), w)
    if stage:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return w.detach() - 0.1 * grad


def _outcome(kind: Callable[[Tensor], Tensor], rank: int, place: tuple[bool, int, bool], updates: int) -> str:
    try:
        step = _step(kind, *place)
        state = step.init(_params())
        for _ in range(updates):
            after, _ = step(state, _input(rank))  # type: ignore[misc]
        got = fz.gather(after.params)["m"]["w"]
        torch.testing.assert_close(got, _plain(kind, rank, place[1]), rtol=1e-10, atol=1e-10)
    except (ValueError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "as plain torch"


def _outcomes(rank: int) -> dict[tuple[str, tuple[bool, int, bool]], str]:
    warnings.simplefilter("ignore")
    out = {}
    for place in PLACES:
        for name, (kind, *_) in REFUSED.items():
            if place[1] or name not in ALONE:
                out[name, place] = _outcome(kind, rank, place, 1)
        for name, kind in ALLOWED.items():
            out[name, place] = _outcome(kind, rank, place, 2)
    return out


@pytest.fixture(scope="module")
def outcomes() -> list[dict[tuple[str, tuple[bool, int, bool]], str]]:
    return fz.testing.run_ranks(_outcomes, RANKS, timeout=300.0, backend="processes")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_differentiated_is_refused_on_every_rank(name, outcomes) -> None:
    _, operator, meant = REFUSED[name]
    for own in outcomes:
        for (which, (unit, stage, _)), said in own.items():
            if which == name and (name != "checkpointed" or unit or not stage):  # as torch.func refuses it
                assert said.startswith("ValueError") and f"{operator}'" in said, said
                assert f"fz.parallel.{meant}(" in said, said
                assert re.search(r"test_collectives\.py:\d+, in [\w<]+", said), said


@pytest.mark.parametrize("name", ALLOWED)
def test_constants_are_communicated_as_in_plain_torch(name, outcomes) -> None:
    for own in outcomes:
        assert {said for (which, _), said in own.items() if which == name} == {"as plain torch"}


# ---- any program: refused exactly if torch says that what is communicated requires a gradient


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _constant(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        return a * b


def _written(a: Tensor, b: Tensor) -> Tensor:
    out = a.clone()
    out.view(-1).add_(b.view(-1))
    return out


def _half(a: Tensor, b: Tensor) -> Tensor:
    out = a.detach().clone()
    out[0] = b[1]
    return out


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, b: a * b,
    "detached": lambda a, _: a.detach() * 2,
    "constant": _constant,
    "written": _written,
    "half": _half,
    "hidden": lambda a, _: hidden(a),
    "mapped": lambda a, b: torch.vmap(lambda row, other: row + other)(a, b),
    "gradient": lambda a, b: torch.func.grad(lambda y: (y**3 * b).sum())(a),
    "data": lambda a, b: a.data + b,
    "number": lambda a, b: b * float(a.detach().sum()),
}
COLLECTIVES = (all_reduce, all_gather_into_tensor, all_gather)


def _program(
    operations: Sequence[tuple[str, int, int]], collective: Callable[[Tensor], Tensor], records: bool, said: list[bool]
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of weights and an input, which notes whether what it communicates requires a gradient."""

    def run(w: Tensor, x: Tensor) -> Tensor:
        values = [x @ w, x * 1]
        for name, a, b in operations:
            values.append(OPERATIONS[name](values[a % len(values)], values[b % len(values)]))
        own = values[-1].clone() if collective is all_reduce else values[-1]
        said.append(own.requires_grad and (records or collective is all_reduce))
        with contextlib.nullcontext() if records else torch.no_grad():
            out = collective(own)
        return torch.stack([*values, out]).tanh().sum()

    return run


@given(
    operations=st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), *[st.integers(0, 9)] * 2), min_size=1, max_size=5
    ),
    collective=st.sampled_from(COLLECTIVES),
    records=st.booleans(),
    unit=st.booleans(),
    plain=st.booleans(),
)
def test_a_program_is_refused_if_torch_differentiates_what_it_communicates(
    alone, operations, collective, records, unit, plain
) -> None:
    said: list[bool] = []
    program = _program(operations, collective, records, said)
    w, x = _params()["m"]["w"].requires_grad_(), _input(0)
    try:
        loss = program(w, x)
    except RuntimeError:  # of some collectives torch itself says that they have no derivative
        assert said[0]
    body = fz.unit(lambda p, x: program(p["w"], x)) if unit else lambda p, x: program(p["w"], x)
    step = fz.shard_zero2(fz.train_step(lambda p, x: body(p["m"], x), fz.sgd(0.1), units=["m"] if unit else None))
    with contextlib.nullcontext() if plain else mock.patch.object(run, "_is_at_hand", lambda *_: False):
        state = step.init(_params())
        if said[0]:
            with pytest.raises(ValueError, match="communicates a tensor"):
                step(state, x)
            return
        (grad,) = torch.autograd.grad(loss, w, allow_unused=True)
        for _ in range(2):  # also the run that nobody looks at
            out, pullback = step.vjp(state, x, argnums=())
            torch.testing.assert_close(out, loss.detach(), rtol=1e-10, atol=1e-10)
            got = fz.gather(pullback(torch.ones_like(out))[0])["m"]["w"]
            torch.testing.assert_close(got, torch.zeros_like(w) if grad is None else grad, rtol=1e-10, atol=1e-10)


# ---- beside a step's call


def _all_reduced(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return all_reduce(x @ p["w"]).square().sum()


def _twice(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ p["w"]).square().sum()


def test_what_is_not_differentiated_runs(alone) -> None:
    step = fz.train_step(_all_reduced, fz.sgd(0.1))
    state, x = step.init({"w": torch.ones(3, 3)}), torch.ones(2, 3)
    assert step.forward(state, x).item() == 54
    frozen = fz.freeze(fz.train_step(lambda p, x: _all_reduced(p["a"], x) * p["b"]["w"].sum(), fz.sgd(0.1)), "a.*")
    out, _ = frozen.vjp(frozen.init({"a": {"w": torch.ones(3, 3)}, "b": {"w": torch.ones(2)}}), x, argnums=())
    assert out.item() == 108


@pytest.mark.parametrize("unit", [False, True])
def test_a_method_of_a_group_is_refused_whatever_it_is_given(alone, unit) -> None:
    for kind in (of_a_group, lambda h: h + of_a_group(h.detach())):
        step = _step(kind, unit, 2, False)
        with pytest.raises(ValueError, match=r"the method 'allreduce_' of a process group .*test_collectives\.py:\d+"):
            step(step.init(_params()), _input(0))


def test_every_verb_refuses(alone) -> None:
    x, params = torch.ones(2, 3), {"w": torch.ones(3, 3)}
    step = fz.train_step(_all_reduced, fz.sgd(0.1))
    state = step.init(params)
    _, pullback = fz.train_step(_twice, fz.sgd(0.1)).vjp(state, x)
    grads = pullback(torch.tensor(1.0))[0]

    def taped() -> None:
        with fz.tape(step, state) as model:
            model(x).backward()

    verbs: dict[str, Callable[[], object]] = {
        "step": lambda: step(state, x),
        "vjp": lambda: step.vjp(state, x),
        "accumulate": lambda: fz.accumulate(step, 2)(fz.accumulate(step, 2).init(params), x),
        "tape": taped,
        "hvp": lambda: fz.hvp(step, state, grads, x),
        "around": lambda: torch.func.grad(lambda y: step.forward(state, y))(x),
        "scan": lambda: fz.scan(step, state, x[None]),
    }
    for verb, call in verbs.items():
        with pytest.raises(ValueError, match=r"communicates a tensor .*all_reduce"):
            call()
            pytest.fail(verb)


@pytest.mark.parametrize("unit", [False, True])
def test_forward_mode_refuses_the_same(alone, unit) -> None:
    x = _input(0)
    for kind, refused in ((own_slice, False), (functional_constant, False), (all_gather, True)):
        step = _step(kind, unit, 3, unit)
        state = step.init(_params())
        forward = lambda y: step.forward(state, y)
        if refused:
            with pytest.raises(ValueError, match="communicates a tensor"):
                torch.func.jvp(forward, (x,), (x,))
            continue
        plain = torch.func.jvp(lambda y: _body(kind, _params()["m"], y), (x,), (x,))
        torch.testing.assert_close(torch.func.jvp(forward, (x,), (x,)), plain, rtol=1e-10, atol=1e-10)


def test_an_input_that_is_differentiated_is_refused_alone(alone) -> None:
    def fn(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (all_reduce(x * 1) @ p["w"] * y).sum()

    step = fz.train_step(fn, fz.sgd(0.1))
    state, x, y = step.init({"w": torch.ones(3, 3)}), torch.ones(2, 3), torch.ones(3)
    assert step.vjp(state, x, y, argnums=(1,))[0].item() == 18
    with pytest.raises(ValueError, match="communicates a tensor"):
        step.vjp(state, x, y, argnums=(0,))


def test_a_unit_that_a_later_run_calls_first_is_looked_at(alone) -> None:
    inner, branches = fz.unit(lambda p, x: all_reduce(x @ p["w"])), [False, True]

    def fn(p: dict[str, dict[str, Tensor]], x: Tensor, branch: bool) -> Tensor:
        h = x @ p["a"]["w"]
        return (inner(p["b"], h) if branch else h).sum()

    step = fz.remat(fz.train_step(fn, fz.sgd(0.1), units=["b"]))
    state = step.init({"a": {"w": torch.ones(3, 3)}, "b": {"w": torch.ones(3, 3)}})
    state, _ = step(state, torch.ones(2, 3), branches[0])
    with pytest.raises(ValueError, match="Unit 'b' communicates a tensor"):
        step(state, torch.ones(2, 3), branches[1])


def test_reentrant_checkpoints_hide_what_is_constant(alone) -> None:
    def fn(p: dict[str, Tensor], x: Tensor, reentrant: bool) -> Tensor:
        own = lambda w: (x @ w) * all_reduce((x @ w).detach())
        return checkpoint(own, p["w"], use_reentrant=reentrant).sum()  # type: ignore[no-any-return]

    step = fz.train_step(fn, fz.sgd(0.1))
    state = step.init({"w": torch.ones(3, 3)})
    with pytest.raises(ValueError, match="use_reentrant=False"):
        step(state, torch.ones(2, 3), True)
    step(state, torch.ones(2, 3), False)


def test_later_runs_are_not_looked_at(alone) -> None:
    seen: list[int] = []

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        seen.append(len(_python_dispatch._get_current_dispatch_mode_stack()))
        return (x @ p["w"]).sum()

    step = fz.train_step(fn, fz.sgd(0.1))
    state = step.init({"w": torch.ones(3, 3)})
    for _ in range(3):
        state, _ = step(state, torch.ones(2, 3))
    assert seen == [1, 0, 0]
    seen.clear()
    unit = fz.unit(lambda p, x: fn(p, x).square())
    acting = fz.remat(fz.train_step(lambda p, x: unit(p["m"], x) + 0 * fn({"w": x.T}, x), fz.sgd(0.1), units=["m"]))
    with fz.tape(acting, acting.init({"m": {"w": torch.ones(3, 3)}})) as model:  # whose functions are, for leaks
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
    assert seen[-3:] == [0, 0, 0]


THREADS: tuple[Kind, ...] = (all_reduce, of_one_rank, all_gather, broadcast, gather, scatter, checkpointed)
GOOD: tuple[Kind, ...] = (own_slice, data_beside, functional_constant, summed)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.* is deprecated:FutureWarning")
@pytest.mark.parametrize("unit", [False, True])
def test_functions_are_found_by_their_forward(alone, unit, monkeypatch: pytest.MonkeyPatch) -> None:
    """As since torch 2.14, whose `apply` is in C."""
    monkeypatch.setattr(collectives, "_APPLY", None)
    for name in ("torch's sum", "torch's gather", "after a function", "checkpointed")[: None if unit else 3]:
        said = _outcome(REFUSED[name][0], 0, (unit, 1, False), 1)
        assert "communicates a tensor" in said and f"fz.parallel.{REFUSED[name][2]}(" in said, (name, said)
    for name in ("data beside", "summed"):
        assert _outcome(ALLOWED[name], 0, (unit, 1, False), 2) == "as plain torch"


@pytest.mark.parametrize("unit", [False, True])
def test_on_ranks_that_are_threads(unit) -> None:
    """Of which torch's groups are Python's, without an operator behind."""
    kinds = [kind for kind in (*THREADS, *GOOD) if unit or kind is not checkpointed]
    ranks = fz.testing.run_ranks(
        lambda rank: [_outcome(kind, rank, (unit, 2, False), 1) for kind in kinds], RANKS, checked=False
    )
    for own in ranks:
        for kind, said in zip(kinds, own, strict=True):
            assert ("communicates a tensor" in said) if kind in THREADS else said == "as plain torch", said


def test_all_ranks_refuse_what_one_does_in_microbatches() -> None:
    def refused(rank: int) -> str:
        step = fz.accumulate(_step(of_one_rank, False, 1, False), 2)
        with pytest.raises(ValueError, match="communicates a tensor") as error:
            step(step.init(_params()), _input(rank))
        return str(error.value)

    one, other = fz.testing.run_ranks(refused, RANKS, timeout=10.0)
    assert one.endswith(other) and one.startswith("Rank 1 has refused")
