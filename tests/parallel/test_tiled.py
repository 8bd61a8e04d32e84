"""Tiles of long sequences against the same function of the whole: values, derivatives of any order, memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import todays
from orders import derivatives
from reference import adamw_steps

import fzero as fz
from fzero.testing import LiveBytes, assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")
F64 = torch.float64
Params = dict[str, torch.Tensor]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mlp(x: torch.Tensor, p: Params, *_: object) -> torch.Tensor:
    return torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def mlp_params(width: int = 3, inner: int = 5) -> Params:
    shapes = {"up": (width, inner), "bias": (inner,), "down": (inner, width)}
    return {name: randn(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 7)),
    tiles=st.integers(1, 9),
    dim=st.sampled_from([0, 1, -2, -3]),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_function_of_the_whole(shape: tuple[int, int], tiles: int, dim: int, seed: int) -> None:
    operands, along = ((randn(*shape, 3, seed=seed + i), mlp_params()) for i in range(2))

    def whole(operands: Any) -> torch.Tensor:
        return mlp(*operands).square().sum()

    def in_tiles(operands: Any) -> torch.Tensor:
        return fz.parallel.tiled(mlp, *operands, tiles=tiles, dim=dim).square().sum()

    assert_trees_close(*(derivatives(fn, operands, along) for fn in (in_tiles, whole)), rtol=1e-10, atol=1e-12)
    leaves = [x.clone().requires_grad_() for x in (operands[0], *operands[1].values())]
    again = (leaves[0], dict(zip(operands[1], leaves[1:], strict=True)))
    grads = [torch.autograd.grad(fn(again), leaves) for fn in (in_tiles, whole)]
    assert_trees_close(*grads, rtol=1e-10, atol=1e-12)


@given(tiles=st.integers(1, 4), in_dims=st.sampled_from([(0, None), (1, 0), (None, 0)]), seed=st.integers(0, 2**31))
def test_it_maps(tiles: int, in_dims: tuple[int | None, int | None], seed: int) -> None:
    x = randn(*([4, 3] if in_dims[0] is None else [2, 4, 3] if in_dims[0] == 0 else [4, 2, 3]), seed=seed)
    p = mlp_params() if in_dims[1] is None else {name: torch.stack([x, 2 * x]) for name, x in mlp_params().items()}

    def mapped(fn: Any) -> object:
        f = torch.func
        grads = f.vmap(f.grad(lambda x, p: fn(x, p).square().sum(), argnums=(0, 1)), in_dims=in_dims)(x, p)
        return f.vmap(fn, in_dims=in_dims)(x, p), grads

    in_tiles = functools.partial(fz.parallel.tiled, mlp, tiles=tiles, dim=0)
    assert_trees_close(mapped(in_tiles), mapped(mlp), rtol=1e-10, atol=1e-12)


def test_trees_go_in_and_come_out() -> None:
    def fn(own: dict[str, Any], scale: torch.Tensor, power: int) -> tuple[Any, ...]:
        return {"y": own["x"] ** power * scale, "ids": own["ids"] + 1}, own["x"].sum(-1)

    x, ids = randn(2, 5, 3), torch.arange(10).view(2, 5)
    own = {"x": x, "ids": ids, "nothing": None}
    got = fz.parallel.tiled(fn, own, torch.tensor(2.0, dtype=F64), 3, tiles=2)
    assert_trees_close(got, fn(own, torch.tensor(2.0, dtype=F64), 3))


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(randn(*shape)) for shape in ((3, 8), (8, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.up) @ self.down


class Block(torch.nn.Module):
    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.mlp, self.tiles = Mlp(), tiles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (fz.parallel.tiled(self.mlp, x, tiles=self.tiles) if self.tiles else self.mlp(x))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("remat", [False, True])
def test_a_function_in_a_step(world: int, remat: bool) -> None:
    """Leaves of units are gathered for their tiles."""
    params = {"blocks": [mlp_params(), mlp_params()]}
    batches = [(randn(2, 5, 3, seed=seed),) for seed in range(world)]

    def loss(p: Any, x: torch.Tensor, tiles: int = 2) -> torch.Tensor:
        for own in p["blocks"]:
            x = x + (fz.parallel.tiled(mlp, x, own, tiles=tiles) if tiles else mlp(x, own))
        return x.square().mean()

    def rank_main(rank: int) -> Any:
        step = fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-2)))
        step = fz.remat(step) if remat else step
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, *batches[rank])
        return fz.gather(state.params)

    expected, _, _ = adamw_steps(functools.partial(loss, tiles=0), params, batches, 3)
    for got in run_ranks(rank_main, world):
        assert_trees_close(got, expected, rtol=1e-10)


def test_a_module_is_given_its_params() -> None:
    model, x = Mlp(), randn(2, 5, 3)
    whole, tiles = (
        torch.autograd.grad(fn(x).square().sum(), [*model.parameters()])
        for fn in (model, functools.partial(fz.parallel.tiled, model, tiles=3))
    )
    assert_trees_close(tiles, whole, rtol=1e-10)


def test_a_module_in_a_step() -> None:
    x = randn(2, 5, 3)

    def trained(rank: int, tiles: int) -> Any:
        apply, params = fz.functional(torch.nn.Sequential(Block(tiles), Block(tiles)))
        step = fz.shard_zero3(fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.adamw(1e-2)))
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, x)
        return fz.gather(state.params)

    got, expected = (run_ranks(functools.partial(trained, tiles=tiles), 2) for tiles in (2, 0))
    assert_trees_close(got, expected, rtol=1e-10)


def test_a_module_that_is_a_unit_is_refused() -> None:
    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Mlp()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fz.parallel.tiled(self.blocks[0], x, tiles=2).square().mean()

    def rank_main(rank: int) -> None:
        apply, params = fz.functional(Around())
        step = fz.shard_zero3(fz.train_step(apply, fz.sgd(0.1)))
        with pytest.raises(TypeError, match="call units on the thread that runs the step's function"):
            step(step.init(params), randn(2, 5, 3))

    run_ranks(rank_main, 2)


def test_random_numbers_are_the_same_again() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
        return (x * w) * kept, kept

    def ours(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, kept = fz.parallel.tiled(fn, x, w, tiles=3)
        return y.square().sum(), kept

    x, w = randn(2, 50), randn(1)
    state = torch.get_rng_state()
    grads, kept = torch.func.grad(ours, argnums=(0, 1), has_aux=True)(x, w)
    assert_trees_close(grads, (2 * x * w**2 * kept**2, (2 * x**2 * w * kept**2).sum().view(1)))
    second, _ = torch.func.grad(lambda x: torch.func.grad(ours, has_aux=True)(x, w)[0].sum(), has_aux=False)(x), None
    assert second.isfinite().all() and 0.2 < kept.mean() / 2 < 0.8
    assert len({tuple(tile.flatten().tolist()[:20]) for tile in kept.split(17, 1)}) == 3  # each tile has its own
    torch.set_rng_state(state)
    _, again = ours(x, w)
    assert torch.equal(again, kept)
    assert_trees_equal(fz.parallel.tiled(torch.sin, x, tiles=3), torch.sin(x))


def test_what_fn_closes_over_is_refused() -> None:
    x, w = randn(2, 4, 3), randn(3)
    f = torch.func

    def closes(w: torch.Tensor) -> torch.Tensor:
        return fz.parallel.tiled(lambda x: x * w, x, tiles=2).sum()

    for transform in (f.grad(closes), lambda w: f.jvp(closes, (w,), (w,))):
        with pytest.raises(ValueError, match=r"parallel.tiled: fn closes over a tensor.*Pass it to tiled behind x"):
            transform(w)
    with pytest.raises(ValueError, match=r"parallel.tiled: fn closes over a tensor"):
        f.vmap(f.grad(closes))(torch.stack([w, w]))
    leaf = w.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"parallel.tiled: fn closes over a tensor of shape \(3,\)"):
        closes(leaf)
    with torch.no_grad():
        assert torch.equal(closes(leaf), closes(w))


def test_what_is_refused() -> None:
    x = torch.ones(2, 4, 3)
    tiled: Any = fz.parallel.tiled
    for wrong, error, match in (
        (lambda: tiled(None, x, tiles=2), TypeError, "got fn=None, expected a function"),
        (lambda: tiled(torch.sin, x, tiles=0), ValueError, "got tiles=0, expected at least 1"),
        (lambda: tiled(torch.sin, x, tiles=2, dim=3), ValueError, "got dim=3 of a tensor with 3 dims"),
        (lambda: tiled(torch.sin, 1.0, tiles=2), TypeError, "got x without tensors"),
        (lambda: tiled(lambda own: own[0], (x, x[:, :2]), tiles=2), ValueError, "expected one size in dim 1"),
        (
            lambda: tiled(lambda x: x.mean(1, keepdim=True), x, tiles=2),
            ValueError,
            r"got a result of shape \(2, 1, 3\)",
        ),
        (lambda: tiled(lambda x: x.sum(), x, tiles=2), ValueError, r"got a result of shape \(\) from a tile of size 2"),
        (lambda: tiled(lambda x: (x, 1.0), x, tiles=2), TypeError, "got a result of fn with=1.0"),
    ):
        with pytest.raises(error, match=f"parallel.tiled: .*{match}"):
            wrong()  # type: ignore[no-untyped-call]


# ---- logits and loss


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum),
    shape=st.lists(st.integers(0, 4), max_size=2),
    tiles=st.integers(1, 5),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.2]),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    seed=st.integers(0, 2**31),
)
def test_logits_and_loss(
    sizes: list[int], shape: list[int], tiles: int, bias: bool, smoothing: float, reduction: str, seed: int
) -> None:
    vocabulary, options = sum(sizes), {"label_smoothing": smoothing, "reduction": reduction}
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(vocabulary, tuple(shape), generator=generator)
    targets = targets.masked_fill(torch.rand(tuple(shape), generator=generator) < 0.3, -100)

    def drawn(seed: int) -> Params:
        heads = {
            "weight": randn(vocabulary, 3, seed=seed + 1),
            **({"bias": randn(vocabulary, seed=seed + 2)} if bias else {}),
        }
        return {"hidden": randn(*shape, 3, seed=seed), **heads}

    operands, along = drawn(seed), drawn(seed + 10)
    weights = randn(*shape, seed=seed + 20) if reduction == "none" else torch.tensor(1.0, dtype=F64)

    def whole(p: Params) -> torch.Tensor:
        logits = torch.nn.functional.linear(p["hidden"], p["weight"], p.get("bias")).reshape(-1, vocabulary)
        out = torch.nn.functional.cross_entropy(logits, targets.reshape(-1), **options)
        return ((out.view(shape) if reduction == "none" else out) * weights).sum()

    def slices(p: Params, rank: int) -> Params:
        return {name: x if name == "hidden" else x.split(sizes)[rank] for name, x in p.items()}

    def rank_main(rank: int) -> dict[str, Any]:
        ax = fz.parallel.axis(None, "tp") if len(sizes) > 1 else None

        def in_tiles(p: Params) -> torch.Tensor:
            head = {"weight": p["weight"], "bias": p.get("bias")}
            out = fz.parallel.tiled_cross_entropy(p["hidden"], targets=targets, ax=ax, tiles=tiles, **head, **options)  # type: ignore[arg-type]
            return (out * weights).sum()

        return derivatives(in_tiles, slices(operands, rank), slices(along, rank))

    expected = derivatives(whole, operands, along)
    for rank, got in enumerate(run_ranks(rank_main, len(sizes))):
        own = {name: slices(x, rank) if isinstance(x, dict) else x for name, x in expected.items()}
        for name, value in own.items():
            _compare(got[name], value, name)


def _compare(got: Any, expected: Any, name: str) -> None:
    if isinstance(got, dict):
        for key in got:
            _compare(got[key], expected[key], f"{name}, {key}")
    else:
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11, equal_nan=True, msg=lambda text: name + text)


TOKENS, WIDTH, VOCABULARY = 256, 8, 1 << 11


def peaks(rank: int, tiles: int, ranks: int) -> list[int]:
    """The largest live bytes of a gradient and of a product with the Hessian, beside what they are given."""
    ax = fz.parallel.axis(None, "tp")
    hidden, weight = randn(TOKENS, WIDTH), randn(VOCABULARY // ranks, WIDTH)
    targets, known = torch.zeros(TOKENS, dtype=torch.int64), [VOCABULARY // ranks] * ranks

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fz.parallel.tiled_cross_entropy(hidden, weight, targets, ax, tiles=tiles, sizes=known)

    grad, found = torch.func.grad(loss, argnums=(0, 1)), []
    for fn in (lambda: grad(hidden, weight), lambda: torch.func.jvp(grad, (hidden, weight), (hidden, weight))):
        with LiveBytes() as live:
            fn()
        found.append(live.peak)
    return found


def test_logits_of_one_tile_live() -> None:
    logits, head = TOKENS * VOCABULARY * 8, VOCABULARY * WIDTH * 8
    with fz.testing.hazards(None):
        for tiles, ranks in todays([(1, 1), (8, 1), (8, 2), (16, 4)], of=4):
            for own in run_ranks(functools.partial(peaks, tiles=tiles, ranks=ranks), ranks):
                assert own[0] <= 4.5 * logits / tiles / ranks + 5 * head / ranks, (tiles, ranks, own[0] / logits)
                assert own[1] <= 12 * logits / tiles / ranks + 16 * head / ranks, (tiles, ranks, own[1] / logits)
        assert min(peaks_of(1)) >= logits  # as it is without


def peaks_of(tiles: int) -> Sequence[int]:
    return run_ranks(functools.partial(peaks, tiles=tiles, ranks=1), 1)[0]


def test_intermediates_of_one_tile_live() -> None:
    x, p = randn(1, 512, 4), {"up": randn(4, 512), "bias": randn(512), "down": randn(512, 4)}
    intermediate = 512 * 512 * 8
    found = {}
    for tiles in (1, 8):
        with fz.testing.hazards(None), LiveBytes() as live:
            torch.func.grad(lambda p: fz.parallel.tiled(mlp, x, p, tiles=tiles).square().sum())(p)
        found[tiles] = live.peak
    assert found[1] >= intermediate and found[8] <= found[1] / 4, found


def test_what_the_loss_refuses() -> None:
    hidden, weight, targets = torch.ones(4, 3), torch.ones(5, 3), torch.zeros(4, dtype=torch.int64)
    loss = functools.partial(fz.parallel.tiled_cross_entropy, tiles=2)
    for wrong, error, match in (
        (lambda: loss(hidden.long(), weight, targets), TypeError, "got hidden=.*expected a floating tensor"),
        (lambda: loss(hidden, weight[:, :2], targets), ValueError, r"of shapes \(4, 3\), \(5, 2\), expected"),
        (lambda: loss(hidden, weight, targets, bias=torch.ones(4)), ValueError, r"and bias of shapes .*\(4,\)"),
        (lambda: loss(hidden, weight, targets[:3]), ValueError, r"got targets of shape \(3,\), expected \(4,\)"),
        (lambda: loss(hidden, weight, targets + 5), ValueError, "got target 5, expected numbers from 0 to 4"),
    ):
        with pytest.raises(error, match=f"parallel.tiled_cross_entropy: .*{match}"):
            wrong()  # type: ignore[no-untyped-call]
