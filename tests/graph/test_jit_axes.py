"""Steps of fz.jit over tensor and sequence axes, whose messages are operators of the graph: the step without it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")
F64, D, V = torch.float64, 8, 11


class Block(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.attention = nn.Linear(D, 3 * D), nn.Linear(D, D), attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = [each.unflatten(-1, (4, -1)).transpose(1, 2) for each in fz.name(self.qkv(x), "qkv").chunk(3, -1)]
        return x + F.dropout(self.out(self.attention(q, k, v).transpose(1, 2).flatten(2)), 0.2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.2))


class Model(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(V, D), nn.ModuleList([block(), block()]), nn.Linear(D, V)
        self.to(F64)
        generator = torch.Generator().manual_seed(0)
        for x in self.parameters():
            nn.init.normal_(x, std=0.3, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compare(step: fz.Step, params: Any, batches: Any, backend: str = "graph") -> fz.Step:
    """Some updates and evaluations with and without a graph."""
    fast = fz.jit(step, backend=backend)
    same = assert_trees_equal if backend == "graph" else functools.partial(assert_trees_close, rtol=1e-10)
    states = [step.init(params), step.init(params)]
    for batch in batches:
        (states[0], want), (states[1], got) = step(states[0], *batch), fast(states[1], *batch)
        same({**got}, {**want})
        same(fast.forward(states[1], *batch), step.forward(states[0], *batch))
    same(fz.gather(states[1].params), fz.gather(states[0].params))
    return fast


def mesh_of(*sizes: int) -> Any:
    return torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))


@in_turns(5, "steps over axes")
@settings(max_examples=4)
@given(
    blocks=zoo.drawn_blocks, stage=st.integers(0, 3), sequence=st.booleans(), remat=st.booleans(), data=st.booleans()
)
def test_drawn_models_on_slices(blocks: Any, stage: int, sequence: bool, remat: bool, data: bool) -> None:
    def main(rank: int) -> None:
        mesh, model = mesh_of(2 if data and stage else 1, 2), zoo.made(blocks, False)
        apply, params = fz.functional(model)
        plan = {**model.plan([True] * len(blocks)), "embedding": "vocabulary"}
        step = fz.shard_tensor(fz.train_step(zoo.loss_of(apply), fz.adamw(1e-2)), plan, mesh=mesh, sequence=sequence)
        step = getattr(fz, f"shard_zero{stage}")(step, mesh=mesh) if stage else step
        compare(fz.remat(step) if remat else step, params, [zoo.batches(2)[rank // 2]] * 3)

    run_ranks(main, 4 if data and stage else 2)


Made = tuple[fz.Step, Any, Any]  # params, and batches


def sliced(zero: bool = True) -> Made:
    """Megatron's cuts, dropout of slices, and a loss of slices of the vocabulary."""
    mesh = mesh_of(1, 2)
    ax, (apply, params) = fz.parallel.axis(mesh, "tp"), fz.functional(Model(Mlp))
    plan = {"*.up": "column", "*.down": "row", "embedding": "vocabulary", "head": "column"}

    def loss(p: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return fz.parallel.cross_entropy(apply(p, tokens), targets, ax)

    step = fz.shard_tensor(fz.train_step(loss, fz.adamw(1e-2)), plan, mesh=mesh)
    batches = torch.randint(0, V, (3, 2, 2, 6), generator=torch.Generator().manual_seed(1))
    return fz.remat(fz.shard_zero3(step, mesh=mesh)) if zero else step, params, batches


def parted(rank: int, backend: str = "graph") -> None:
    assert compare(*sliced(), backend).traces == 2  # a step, and a forward


def cut(kind: str, tokens: int = 9) -> Made:
    """Attention over pieces of a sequence, and a mean over the tokens of all ranks."""
    ax = fz.parallel.axis(None, "sp")
    plain = fz.parallel.attention
    attention = {
        "ring": lambda: fz.parallel.ring(ax, is_causal=True),
        "zigzag": lambda: fz.parallel.ring(ax, order="zigzag", window=4),
        "ulysses": lambda: fz.parallel.ulysses(plain, ax, is_causal=True),
        "chunks": lambda: fz.parallel.ulysses(plain, ax, 2, is_causal=True),
    }[kind]()
    apply, params = fz.functional(Model(lambda: Block(attention)))

    def loss(p: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(apply(p, tokens).flatten(0, 1), targets.flatten(), reduction="none")
        return fz.parallel.weighted_mean(losses, (targets.flatten() >= 0).double(), ax)

    step = fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-2)), axis="sp")
    batches, order = [], kind if kind == "zigzag" else "contiguous"
    for whole in torch.randint(0, V, (3, 2, tokens), generator=torch.Generator().manual_seed(1)):
        own = fz.parallel.shard_sequence({"input_ids": whole, "labels": whole}, ax, order=order)
        batches.append((own["input_ids"], own["shift_labels"]))
    return step, params, batches


def along(rank: int, kind: str, remat: bool = False) -> None:
    step, *given = cut(kind)
    names = ("qkv",) if kind == "ring" else ()
    compare(fz.remat(step, save=names) if remat else step, *given)


@in_turns(5, "steps over axes")
@pytest.mark.parametrize(("kind", "remat"), [("ring", True), ("zigzag", False), ("ulysses", False), ("chunks", True)])
def test_attention_over_a_cut_sequence(kind: str, remat: bool) -> None:
    run_ranks(functools.partial(along, kind=kind, remat=remat), 2)


@in_turns(5, "steps over axes")
def test_slices() -> None:
    run_ranks(parted, 2)


# ---- functions of states


def updates(step: fz.Step, state: fz.TrainState, *batch: torch.Tensor) -> Any:
    losses = []
    for _ in range(5):
        state, metrics = step(state, *batch)
        losses.append(metrics["loss"])
    return losses, state


def pulled(step: fz.Step, state: fz.TrainState, *batch: torch.Tensor) -> Any:
    out, pullback = step.vjp(state, *batch)
    grads, _ = pullback(torch.ones_like(out))
    return fz.gather(grads), step.update(state, grads)[0]


def scanned(step: fz.Step, state: fz.TrainState, *batch: torch.Tensor) -> Any:
    state, metrics = fz.scan(step, state, tuple(torch.stack([x, x.flip(0)]) for x in batch))
    return metrics["loss"], state


def by_state(step: fz.Step, state: fz.TrainState, *batch: torch.Tensor) -> Any:
    after = lambda state: step.forward(step(state, *batch)[0], *batch)
    return dict(torch.func.grad(after)(state).params), state


def evaluation(step: fz.Step, state: fz.TrainState, *batch: torch.Tensor) -> Any:
    return step.forward(state, *batch), state


FUNCTIONS = {"evaluation": evaluation, "updates": updates, "vjp": pulled, "scan": scanned, "gradient": by_state}
KINDS = ["slices", "slices in zero3", "ring", "zigzag", "ulysses"]


def compare_function(rank: int, name: str, kind: str, backend: str = "graph") -> None:
    step, params, batches = sliced(kind == "slices in zero3") if kind.startswith("slices") else cut(kind)
    fn = functools.partial(FUNCTIONS[name], step)
    fast, state = fz.jit(fn, backend=backend), step.init(params)
    for batch in batches:
        (got, new), (want, other) = fast(state, *batch), fn(state, *batch)
        same = name == "evaluation" and backend == "graph"
        assert_trees_equal(got, want) if same else assert_trees_close(got, want, rtol=1e-10)
        assert_trees_close(fz.gather(new.params), fz.gather(other.params), rtol=1e-10)
        state = new
    assert fast.traces == 1


@in_turns(25)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, kind: str) -> None:
    run_ranks(functools.partial(compare_function, name=name, kind=kind), 2, timeout=300)


def test_a_function_without_a_state() -> None:
    def main(rank: int) -> None:
        ax = fz.parallel.axis(None, "sp")

        def total(x: torch.Tensor) -> torch.Tensor:
            with fz.parallel.own_stream(ax):
                return fz.parallel.sum(fz.parallel.gather(x, ax, 0, own=True).square().sum() * (1 + ax.rank), ax)

        fast = fz.jit(torch.func.grad(total), backend="graph")
        for rows in (2 + rank, 2 + rank, 5):
            x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(rank))
            assert_trees_equal(fast(x), torch.func.grad(total)(x))

    run_ranks(main, 2)


ON_PROCESSES: dict[str, Any] = {
    "step": lambda rank: parted(rank, "inductor"),
    "step, ring": lambda rank: along(rank, "ring"),
    "updates": lambda rank: compare_function(rank, "updates", "slices", "graph"),
    "gradient": lambda rank: compare_function(rank, "gradient", "slices", "graph"),
    "gradient by Inductor": lambda rank: compare_function(rank, "gradient", "slices", "inductor"),
}


def on_processes(rank: int, case: str) -> None:
    with fz.testing.hazards(seed=rank):
        ON_PROCESSES[case](rank)


@in_turns(4)
@pytest.mark.parametrize("case", [case for case in ON_PROCESSES if "Inductor" not in case])
def test_on_processes(case: str) -> None:
    run_ranks(functools.partial(on_processes, case=case), 2, backend="processes", timeout=240)


@in_turns(12, "compiled by torch")
def test_a_gradient_by_inductor_on_processes() -> None:
    test_on_processes("gradient by Inductor")


def test_sizes_that_change_are_refused_on_every_rank() -> None:
    def main(rank: int) -> None:
        ax = fz.parallel.axis(None, "sp")
        step = fz.train_step(lambda p, x: (fz.parallel.gather(x, ax, 0) * p["w"]).sum(), fz.sgd(0.1))
        step = fz.shard_zero2(step, axis="sp")
        of_function = fz.jit(lambda state, x: step(state, x), backend="graph")
        for fast in (fz.jit(step, backend="graph"), of_function):
            state = step.init({"w": torch.ones(2)})
            for rows in (2 + rank, 2 + rank, 4, 4):  # uneven as in the first run, then even
                state, _ = fast(state, torch.ones(rows, 2))
            with pytest.raises(ValueError, match=r"pieces of other .* got \[\(2, 4, 2\), \(2, 5, 2\)\], expected"):
                fast(state, torch.ones(4 + rank, 2))
            before = torch.random.get_rng_state()
            torch.rand(())
            assert not torch.equal(before, torch.random.get_rng_state())  # not from a stream of the run that failed

    run_ranks(main, 2)


def test_messages_by_torch_distributed_are_refused() -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.detach().sum()
        torch.distributed.all_reduce(total)
        return (x * p["w"]).sum() + total

    with fz.testing.fake_mesh({"dp": 2}):
        fast = fz.jit(fz.shard_zero2(fz.train_step(fn, fz.sgd(0.1))), backend="graph")
        with pytest.raises(ValueError, match=r"by torch\.distributed"):
            fast.lower(fast.init({"w": torch.ones(2)}), torch.ones(2))
