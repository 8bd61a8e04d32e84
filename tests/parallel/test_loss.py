"""Losses over the ranks of an axis against torch's own in one process: values, derivatives of any order, memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import orders
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns
from reference import adamw_steps

import fzero as fz
from fzero.base.context import averaged, during, in_function
from fzero.testing import LiveBytes, assert_collectives, assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")
F64 = torch.float64
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def plain(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's own, whose classes come second."""
    rows = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), **options)
    return rows.view(targets.shape) if options.get("reduction") == "none" else rows


def derivatives(fn: Loss, logits: torch.Tensor, targets: torch.Tensor, along: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything that a loss of logits owes, in directions `along`."""

    def weighed(logits: torch.Tensor) -> torch.Tensor:
        out = fn(logits, targets)
        return (out * torch.arange(1.0, 1.0 + out.numel(), dtype=out.dtype).view(out.shape)).sum()

    own = {"value": fn(logits, targets), "autograd": _by_autograd(weighed, logits)}
    return orders.derivatives(weighed, logits, along) | own


def _by_autograd(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (once,) = torch.autograd.grad(fn(x), x, create_graph=True)
    return torch.autograd.grad(once.square().sum(), x)[0]


@st.composite
def sizes_of(draw: st.DrawFn, most: int = 5) -> list[int]:
    """The sizes of the slices of one to four ranks, which may have nothing, but not all."""
    sizes = draw(st.lists(st.integers(0, most), min_size=1, max_size=4))
    return sizes if sum(sizes) else [*sizes[:-1], most]


def targets_of(shape: Sequence[int], vocabulary: int, ignore_index: int, seed: int) -> torch.Tensor:
    """Numbers of the vocabulary, and some that are ignored."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(vocabulary, tuple(shape), generator=generator)
    return targets.masked_fill(torch.rand(tuple(shape), generator=generator) < 0.3, ignore_index)


def pieces_of(whole: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return whole.split(list(sizes), -1)


OPTIONS = {
    "reduction": st.sampled_from(["none", "sum", "mean"]),
    "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
    "ignore_index": st.sampled_from([-100, -1, 0, 2]),
}


@given(
    sizes=sizes_of(),
    shape=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 2**31),
    told=st.booleans(),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_it_is_torchs_own(sizes: list[int], shape: list[int], seed: int, told: bool, options: dict[str, Any]) -> None:
    vocabulary = sum(sizes)
    logits, along = (3 * randn(*shape, vocabulary, seed=seed + i) for i in range(2))
    targets = targets_of(shape, vocabulary, options["ignore_index"], seed)
    expected = derivatives(functools.partial(plain, **options), logits, targets, along)

    def rank_main(rank: int) -> dict[str, torch.Tensor]:
        ax = fz.parallel.axis(None, "tp")
        known = None if told else sizes
        fn = functools.partial(fz.parallel.cross_entropy, ax=ax, sizes=known, **options)
        own = (pieces_of(x, sizes)[rank] for x in (logits, along))
        return derivatives(fn, next(own), targets, next(own))

    _compare(run_ranks(rank_main, len(sizes)), expected, sizes)


INVARIANT = ("value", "jvp")


def _compare(ranks: Sequence[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor], sizes: Sequence[int]) -> None:
    for name in set(INVARIANT).intersection(expected):
        assert_trees_equal(*[own[name] for own in ranks])  # the same bits on every rank
    for name, whole in expected.items():
        got = ranks[0][name] if name in INVARIANT else torch.cat([own[name] for own in ranks], -1)
        assert got.shape == whole.shape and got.dtype == whole.dtype, name
        torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-12, equal_nan=True, msg=name)


@given(sizes=sizes_of(3), seed=st.integers(0, 2**31), in_dims=st.sampled_from([(0, 0), (1, 0), (0, None), (None, 1)]))
def test_it_maps(sizes: list[int], seed: int, in_dims: tuple[int | None, int | None]) -> None:
    vocabulary, f = sum(sizes), torch.func
    rows = {None: (2,), 0: (3, 2), 1: (2, 3)}
    logits, targets = (
        randn(*rows[in_dims[0]], vocabulary, seed=seed),
        targets_of(rows[in_dims[1]], vocabulary, -100, seed),
    )

    def mapped(fn: Loss, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        each = {"value": fn, "grad": f.grad(fn), "hvp": lambda x, t: f.jvp(lambda x: f.grad(fn)(x, t), (x,), (x,))[1]}
        return {name: f.vmap(own, in_dims=in_dims)(logits, targets) for name, own in each.items()}

    def rank_main(rank: int) -> dict[str, torch.Tensor]:
        ax = fz.parallel.axis(None, "tp")
        own = pieces_of(logits, sizes)[rank]
        return mapped(lambda x, targets: fz.parallel.cross_entropy(x, targets, ax, sizes=sizes), own)

    _compare(run_ranks(rank_main, len(sizes)), {**mapped(plain, logits)}, sizes)


def test_whole_slices_of_minus_infinity() -> None:
    """As of a vocabulary that is filled up to a multiple."""
    sizes, masked = [3, 2, 2], torch.tensor([False, True, False, False, False, True, True])
    logits, along = randn(4, 7), randn(4, 7, seed=1).masked_fill(masked, 0.0)
    logits = logits.masked_fill(masked, -torch.inf) - 1e4  # which is far below zero
    targets = torch.tensor([0, 2, -100, 4])
    expected = derivatives(plain, logits, targets, along)
    assert all(bool(x.isfinite().all()) for x in expected.values())

    def rank_main(rank: int) -> dict[str, torch.Tensor]:
        ax = fz.parallel.axis(None, "tp")
        own = (pieces_of(x, sizes)[rank] for x in (logits, along))
        return derivatives(functools.partial(fz.parallel.cross_entropy, ax=ax), next(own), targets, next(own))

    _compare(run_ranks(rank_main, 3), expected, sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_16_bits_are_computed_with_in_32(dtype: torch.dtype) -> None:
    logits, targets = randn(5, 9, dtype=dtype), targets_of((5,), 9, -100, 0)
    value, grad = (
        fn(logits.float()) for fn in (lambda x: plain(x, targets), torch.func.grad(lambda x: plain(x, targets)))
    )

    def rank_main(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        ax = fz.parallel.axis(None, "tp")
        fn = functools.partial(fz.parallel.cross_entropy, targets=targets, ax=ax)
        own = fz.parallel.split(logits, ax, 1)
        return fn(own), torch.func.grad(fn)(own)

    ranks = run_ranks(rank_main, 2)
    for loss, own in ranks:
        assert loss.dtype == torch.float32 and own.dtype == dtype
        torch.testing.assert_close(loss, value, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.cat([own for _, own in ranks], 1), grad.to(dtype))


def messages(rank: int, sizes: Sequence[int] | None) -> None:
    ax = fz.parallel.axis(None, "tp")
    logits, targets = randn(4, 3 + rank, seed=rank), torch.tensor([0, 3, 6, -100])
    fn = functools.partial(fz.parallel.cross_entropy, targets=targets, ax=ax, sizes=sizes)
    there = 1 + (sizes is None)
    assert_collectives(lambda: fn(logits), {"exchange": there, "all_reduce": 0})
    with during(in_function, True):  # as in a step; outside of one two numbers tell whether ranks pull back the same
        assert_collectives(lambda: torch.func.grad(fn)(logits), {"exchange": there, "all_reduce": 0})
    assert_collectives(lambda: torch.func.grad(fn)(logits), {"exchange": there + 1, "all_reduce": 0})
    with pytest.raises(ValueError, match="gave its result different cotangents"):
        torch.func.grad(lambda x: fn(x) * (1 + rank))(logits)


@pytest.mark.parametrize("sizes", [None, [3, 4]])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_one_message_there_and_none_back(sizes: Sequence[int] | None, backend: str) -> None:
    run_ranks(functools.partial(messages, sizes=sizes), 2, backend=backend)


ROWS, COLUMNS = 64, 1 << 17


def peak(rank: int, dtype: torch.dtype, ranks: int) -> int:
    ax = fz.parallel.axis(None, "tp")
    logits = torch.zeros(ROWS, COLUMNS // ranks, dtype=dtype)
    targets = torch.zeros(ROWS, dtype=torch.int64)
    with LiveBytes() as live:
        torch.func.grad(lambda x: fz.parallel.cross_entropy(x, targets, ax, sizes=[len(logits[0])] * ranks))(logits)
    return live.peak


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_memory_is_that_of_the_cotangent(dtype: torch.dtype) -> None:
    """And of some rows, in float32 at least."""
    logits, rows = ROWS * COLUMNS * dtype.itemsize, 3 * (1 << 20) * max(4, dtype.itemsize)
    with fz.testing.hazards(None):
        peaks = {ranks: max(run_ranks(functools.partial(peak, dtype=dtype, ranks=ranks), ranks)) for ranks in (1, 4)}
    for ranks, most in peaks.items():
        assert logits / ranks <= most <= 1.01 * logits / ranks + rows, peaks


def test_what_is_refused() -> None:
    logits, targets = torch.zeros(2, 3), torch.tensor([0, 5])

    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "tp")
        loss: Any = functools.partial(fz.parallel.cross_entropy, ax=ax)
        for wrong, match in (
            (lambda: loss(logits.long(), targets), "got logits=a tensor .*int64, expected a floating tensor"),
            (lambda: loss(logits, targets.float()), "got targets=.*float32, expected a tensor of integers"),
            (lambda: loss(logits, targets, ax="tp"), "got ax='tp', expected an axis that fz.parallel.axis"),
            (lambda: loss(logits, targets, ignore_index=None), "got ignore_index=None"),
            (lambda: loss(logits, targets, label_smoothing="0.1"), "got label_smoothing='0.1', expected a number"),
        ):
            with pytest.raises(TypeError, match=f"parallel.cross_entropy: {match}"):
                wrong()
        for wrong, match in (
            (lambda: loss(logits, targets[:1]), r"got targets of shape \(1,\), expected \(2,\)"),
            (
                lambda: loss(logits, targets, reduction="average"),
                "got reduction='average', expected one of 'none', 'sum'",
            ),
            (lambda: loss(logits, targets, label_smoothing=2), "got label_smoothing=2, expected a number from 0 to 1"),
            (lambda: loss(logits, targets + 1), "got target 6, expected numbers from 0 to 5, the whole vocabulary"),
            (lambda: loss(logits, targets - 1), "got target -1, expected numbers from 0 to 5"),
            (lambda: torch.func.vmap(loss)(logits, targets + 1), "got target 6, expected numbers from 0 to 5"),
            (lambda: loss(logits[:, : 3 - rank], targets), "got target 5, expected numbers from 0 to 4"),
            (lambda: loss(logits[: 2 - rank], targets[: 2 - rank]), r"got tensors of shapes \[\(2, 3\), \(1, 3\)\]"),
            (lambda: loss(logits, targets, sizes=[3]), r"got sizes=\[3\], expected 2 of them"),
        ):
            with pytest.raises(ValueError, match=f"parallel.cross_entropy: {match}"):
                wrong()

    run_ranks(rank_main, 2)


# ---- weighted_mean


def mean_of(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values * weights).sum() / weights.sum()


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["floats", "ints", "mask"]),
    averages=st.booleans(),
)
def test_a_mean_over_all_ranks(lengths: list[int], seed: int, kind: str, averages: bool) -> None:
    """Each value is a function of params that all ranks have, and of its own input."""
    params, along = randn(3, seed=seed), randn(3, seed=seed + 1)
    inputs = randn(sum(lengths), 3, seed=seed + 2)
    weights = randn(sum(lengths), seed=seed + 3).abs()
    weights = {"floats": weights, "ints": (3 * weights).long(), "mask": weights > 0.5}[kind]

    def value(params: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ params).sin()

    def whole(params: torch.Tensor) -> torch.Tensor:
        return mean_of(value(params, inputs), weights)

    def rank_main(rank: int) -> Any:
        ax = fz.parallel.axis(None, "sp")
        own = inputs.split(lengths)[rank], weights.split(lengths)[rank]

        def loss(params: torch.Tensor) -> torch.Tensor:
            return fz.parallel.weighted_mean(value(fz.parallel.copy(params, ax), own[0]), own[1], ax)

        if not averages or ax.size == 1:
            return of_params(loss, params, along)
        with during(averaged, (ax,)):  # as a step does, whose gradients are means over the ranks
            found = of_params(loss, params, along)
            return [found[0], found[1], *(fz.parallel.sum(x, ax) / ax.size for x in found[2:])]

    for own in run_ranks(rank_main, len(lengths)):
        for got, expected in zip(own, of_params(whole, params, along), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, equal_nan=True)


def of_params(
    fn: Callable[[torch.Tensor], torch.Tensor], params: torch.Tensor, along: torch.Tensor
) -> list[torch.Tensor]:
    f = torch.func
    return [
        fn(params),
        f.jvp(fn, (params,), (along,))[1],
        f.grad(fn)(params),
        f.jvp(f.grad(fn), (params,), (along,))[1],
    ]


def test_no_weight_at_all_is_nan_as_in_torch() -> None:
    def rank_main(rank: int) -> bool:
        ax = fz.parallel.axis(None, "sp")
        return bool(fz.parallel.weighted_mean(torch.ones(2), torch.zeros(2), ax).isnan())

    assert run_ranks(rank_main, 2) == [True, True]
    assert fz.parallel.weighted_mean(torch.ones(0), torch.ones(0), None).isnan()
    mean = fz.parallel.weighted_mean(torch.full((300,), 1.0, dtype=torch.bfloat16), torch.ones(300), None)
    assert mean.dtype == torch.float32 and mean == 1


def test_what_a_mean_refuses() -> None:
    x = torch.ones(2)
    mean = fz.parallel.weighted_mean
    for wrong, error, match in (
        (lambda: mean(x.long(), x, None), TypeError, "got values=.*int64, expected a floating tensor"),
        (lambda: mean(x, 1.0, None), TypeError, "got weights=1.0, expected a tensor of real numbers"),  # type: ignore[arg-type]
        (lambda: mean(x, x[:1], None), ValueError, r"got values of shape \(2,\) and weights of shape \(1,\)"),
        (lambda: mean(x, x, "sp"), TypeError, "got ax='sp', expected an axis"),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=f"parallel.weighted_mean: {match}"):
            wrong()


# ---- in real steps: an embedding and a head, as little as has a loss of tokens


def model(vocabulary: int) -> dict[str, torch.Tensor]:
    shapes = {"embed": (vocabulary, 5), "body": (5, 5), "head": (vocabulary, 5)}
    return {name: randn(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def hidden_of(p: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    return torch.tanh(p["embed"][tokens] @ p["body"])


def tokens_of(lengths: Sequence[int], vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(sum(lengths)) * 5 % vocabulary
    return tokens, targets_of(tokens.shape, vocabulary, -100, 1)


def train(rank: int, lengths: Sequence[int], shape: tuple[int, ...], stage: int, tp: bool) -> Any:
    """Pieces of a sequence on axes that the step takes means over, the head's vocabulary maybe cut over another one."""
    params = model(7)
    tokens, targets = tokens_of(lengths, 7)
    mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp", "tp"))
    sp, over = fz.parallel.axis(mesh, ("dp", "sp")), fz.parallel.axis(mesh, "tp") if tp else None

    def loss(p: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = hidden_of(p, tokens)
        logits = (fz.parallel.copy(hidden, over) if over else hidden) @ p["head"].T
        each = fz.parallel.cross_entropy(logits, targets, over, reduction="none")
        return fz.parallel.weighted_mean(each, targets != -100, sp)

    step = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.1), fz.adamw(1e-2)))
    step = (fz.shard_zero1, fz.shard_zero2, fz.shard_zero3)[stage - 1](step, mesh=mesh, axis=("dp", "sp"))
    step = fz.shard_tensor(step, {"head": 0}, mesh=mesh, axis="tp") if tp else step
    state = step.init(params)
    own = [x.split(list(lengths))[sp.rank] for x in (tokens, targets)]
    losses = []
    for _ in range(3):
        state, metrics = step(state, *own)
        losses.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    return fz.gather(state.params), losses


@in_turns(7)
@pytest.mark.parametrize(
    ("lengths", "shape", "tp", "backend"),
    [
        ([5, 0, 1, 8], (2, 2, 1), False, "threads"),
        ([3, 9], (1, 2, 2), True, "threads"),
        ([6], (1, 1, 3), True, "threads"),
        ([2, 4, 1], (3, 1, 1), False, "processes"),
        ([3, 9], (1, 2, 2), True, "processes"),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_is_that_of_all_tokens(
    lengths: list[int], shape: tuple[int, ...], tp: bool, backend: str, stage: int
) -> None:
    def plainly(p: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(hidden_of(p, tokens) @ p["head"].T, targets)

    params, losses, norms = adamw_steps(plainly, model(7), [tokens_of(lengths, 7)], 3, max_norm=0.1)
    fn = functools.partial(train, lengths=lengths, shape=shape, stage=stage, tp=tp)
    for got in run_ranks(fn, torch.Size(shape).numel(), backend=backend):
        assert_trees_close(got[0], params, rtol=1e-10)
        torch.testing.assert_close(
            torch.tensor(got[1]), torch.tensor([*zip(losses, norms, strict=True)]), rtol=1e-10, atol=0
        )
