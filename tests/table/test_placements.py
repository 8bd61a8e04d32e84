"""Pure functions over a tensor axis are checked before their first run: right ones pass, others are refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.parallel import AxisTypeError
from fzero.testing import RankError, assert_trees_close, recorded_collectives, run_ranks

F64 = torch.float64
Loss = Callable[[Any, torch.Tensor, Any, Any], torch.Tensor]


def own(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x + p["b"]) ** 2).sum()


# (p, x, copy, sum): in one process both maps are the identity
RIGHT: dict[str, Loss] = {
    "sum": lambda p, x, c, s: s((p["w"] ** 2).sum()) + own(p, x),
    "by keywords": lambda p, x, c, s: s((torch.real(input=p["w"]) ** 2).sum()) + own(p, x),
    "as large as a slice": lambda p, x, c, s: (p["w"].new_zeros(()) + own(p, x)) * torch.ones_like(p["w"]).mean(),
    "dtype of a slice": lambda p, x, c, s: own(p, x.to(p["w"]).type_as(p["w"])) + x.view_as(x).sum(),
    "gradients inside": lambda p, x, c, s: inside(p, x, c, s),
    "a copy without derivative": lambda p, x, c, s: own(p, x) * c(p["b"].detach()).abs().mean(),
    "places by a copy": lambda p, x, c, s: p["b"][c(torch.tensor([0, 1]))].sum() + s(p["w"].sum()),
    "masks of what is whole": lambda p, x, c, s: masked(p, x, c, s),
    "into a buffer": lambda p, x, c, s: buffered(p, x, c, s),
    "a pullback of slices": lambda p, x, c, s: pulled(p, x, c) + s(p["w"].sum()) * 0,
    "row by row": lambda p, x, c, s: s(sum((row**2).sum() for row in p["w"])) + own(p, x),
    "a map of functions": lambda p, x, c, s: s(torch.func.vmap(lambda r: (r**2).sum())(p["w"]).sum()) + own(p, x),
}
WRONG: dict[str, Loss] = {
    "no sum": lambda p, x, c, s: (p["w"] ** 2).sum() + own(p, x),
    "a copy": lambda p, x, c, s: ((x + c(p["b"])) ** 2).sum() + s(p["w"].sum()),
    "a copy in vjp": lambda p, x, c, s: torch.func.vjp(lambda z: ((z + c(p["b"])) ** 2).sum(), x)[0] + s(p["w"].sum()),
    "a copy in jvp": lambda p, x, c, s: jvp(p, x, c) + s(p["w"].sum()),
    "a copy in a map": lambda p, x, c, s: (
        torch.func.vmap(lambda r: ((r + c(p["b"])) ** 2).sum())(x).sum() + s(p["w"].sum())
    ),
    "a slice in a map": lambda p, x, c, s: torch.func.vmap(lambda r: (r**2).sum())(p["w"]).sum() + own(p, x),
    "a copy of a copy": lambda p, x, c, s: s(((x + c(c(p["b"]))) ** 2).sum() / 2) + s(p["w"].sum()),
    "pieces of a copy": lambda p, x, c, s: pieces(p, x, c) + s(p["w"].sum()),
    "one of each": lambda p, x, c, s: torch._foreach_mul([p["w"]], [x.sum()])[0].sum() + own(p, x),
    "norms of each": lambda p, x, c, s: norms(p, s) + own(p, x),
    "moments": lambda p, x, c, s: sum(torch.var_mean(p["w"], (0, 1))) + own(p, x),
    "a pullback to slices": lambda p, x, c, s: to_slices(p["w"]).sum() + own(p, x),
    "through a view": lambda p, x, c, s: through_a_view(p, x, c) + s(p["w"].sum()),
    "row by row": lambda p, x, c, s: sum(((row**2).sum() for row in p["w"]), own(p, x)),
}


def inside(p: Any, x: torch.Tensor, c: Any, s: Any) -> torch.Tensor:
    loss = s((torch.tanh(c(x) @ p["w"])).sum()) + own(p, x)
    of_w, of_b = torch.autograd.grad(loss, [p["w"], p["b"]], create_graph=True)
    return loss + (of_b**2).sum() + s((of_w**2).sum())


def masked(p: Any, x: torch.Tensor, c: Any, s: Any) -> torch.Tensor:
    copied = c(x * p["b"])
    mask = (x * p["b"]).abs().sum(-1) > 0.1
    scale = copied.detach().abs().amax()
    return (s(torch.tanh(copied @ p["w"]).sum(-1)) * mask).sum() / mask.sum() / scale


def buffered(p: Any, x: torch.Tensor, c: Any, s: Any) -> torch.Tensor:
    with torch.no_grad():
        buffer = torch.empty(3, p["w"].shape[1], dtype=F64)
        torch.matmul(x, p["w"], out=buffer)
    return own(p, x) + s(p["w"].sum())


def pulled(p: Any, x: torch.Tensor, c: Any) -> torch.Tensor:
    made: Any = torch.func.vjp(lambda z: torch.tanh(c(z) @ p["w"]), x)
    h, pull = made
    return pull(h)[0].square().mean()


def pieces(p: Any, x: torch.Tensor, c: Any) -> torch.Tensor:
    a, b = c(x * p["b"]).split([1, 3], 1)
    return a.square().sum() + b.square().sum()


def to_slices(w: torch.Tensor) -> torch.Tensor:
    made: Any = torch.func.vjp(lambda v: (v**3).sum(), w)
    return made[1](torch.ones((), dtype=F64))[0]


def norms(p: Any, s: Any) -> torch.Tensor:
    of_w, of_b = torch._foreach_norm([p["w"], p["b"]])
    return s(of_w**2) + of_b**2


def jvp(p: Any, x: torch.Tensor, c: Any) -> torch.Tensor:
    f = lambda b: ((x + c(b)) ** 2).sum()
    return torch.func.jvp(f, (p["b"],), (torch.zeros_like(p["b"]),))[0]


def through_a_view(p: Any, x: torch.Tensor, c: Any) -> torch.Tensor:
    y = torch.zeros(1, 4, dtype=F64)
    y[0].copy_(c(p["b"]))
    return ((x + y) ** 2).sum()


PARAMS = {"w": torch.ones(4, 6, dtype=F64), "b": torch.linspace(0, 1, 4, dtype=F64)}
X = torch.linspace(-1, 1, 12, dtype=F64).view(3, 4)


def run(rank: int, loss: Loss, dims: tuple[int, ...] = (2,)) -> Any:
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("tp", "other")[: len(dims)])
    ax = fz.parallel.axis(mesh, "tp")
    fn = lambda p, x: loss(p, x, lambda y: fz.parallel.copy(y, ax), lambda y: fz.parallel.sum(y, ax))
    step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"w": 1}, mesh)
    out, pullback = step.vjp(step.init(PARAMS), X)
    return out, fz.gather(pullback(torch.ones_like(out))[0])


@in_turns(2)
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    whole = lambda p: RIGHT[name](p, X, lambda y: y, lambda y: y)
    want = torch.func.grad(whole)(PARAMS) if name != "gradients inside" else None
    for out, grads in run_ranks(lambda rank: run(rank, RIGHT[name]), 2):
        if want is not None and name not in ("as large as a slice", "written over"):
            assert_trees_close((out, grads), (whole(PARAMS), want), rtol=1e-10)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    refused = r"test_placements\.py:\d+, in .*(A conversion is missing|one conversion too many)"
    with recorded_collectives() as sent, pytest.raises(RankError, match=refused):
        run_ranks(lambda rank: run(rank, WRONG[name]), 2)
    assert not [tag for _, tag, _ in sent if "parallel." in str(tag)]


@pytest.mark.parametrize("way", ["unit", "per example"])
def test_on_other_ways(way: str) -> None:
    """A slice that a unit reads, whose leaves are gathered there; examples one by one."""
    unit = fz.unit(lambda q: (q["w"] ** 2).sum())

    def rank_main(rank: int, right: bool) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ax = fz.parallel.axis(mesh, "tp")
        total = (lambda x: fz.parallel.sum(x, ax)) if right else lambda x: x
        if way == "unit":
            fn = lambda p, x: total(unit(p["l"][0])) + x.sum()
            step = fz.remat(fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"*.w": 1}, mesh))
            state = step.init({"l": [{"w": torch.ones(4, 6, dtype=F64)}]})
            out, pullback = step.vjp(state, X)
            return fz.gather(pullback(torch.ones_like(out))[0])["l"][0]["w"]
        fn = lambda p, x: (total((p["w"] ** 2).sum()) + own(p, x)) / len(x)
        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"w": 1}, mesh)
        return fz.per_example_grads(step, step.init(PARAMS), X)["w"]

    for found in run_ranks(lambda rank: rank_main(rank, True), 2):
        assert_trees_close(found, torch.full(found.shape, 2.0, dtype=F64))
    with pytest.raises(RankError, match=r"of 'p\.(l\.0\.)?w'\)\. A conversion is missing"):
        run_ranks(lambda rank: rank_main(rank, False), 2)


def test_a_sum_over_two_axes() -> None:
    def rank_main(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
        both = fz.parallel.axis(mesh, ("sp", "tp"))
        fn = lambda p, x: fz.parallel.sum((p["w"] ** 2).sum(), both)
        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"w": 1}, mesh, "tp")
        return step.vjp(step.init({"w": PARAMS["w"]}), X)[0]

    assert [x.item() for x in run_ranks(rank_main, 4)] == [48.0] * 4


def test_constants_and_masks_have_values_in_the_check() -> None:
    """A table that is kept, and made in place, is that of the run; a mask of the batch may be read."""

    @functools.lru_cache
    def table(rank: int) -> torch.Tensor:
        made = torch.zeros(4, dtype=F64)
        made[1:] += torch.arange(3.0, dtype=F64)
        return made

    def rank_main(rank: int) -> torch.Tensor:
        ax = fz.parallel.axis(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "tp")

        def fn(p: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            h = x * table(rank) if bool(mask.all()) else x
            return fz.parallel.sum((h @ p["w"]).sum(), ax)

        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"w": 1})
        state, mask = step.init({"w": PARAMS["w"]}), torch.ones(2, dtype=torch.bool)
        found = [step(state, X, mask)[1]["loss"] for _ in range(2)]
        with pytest.raises(AxisTypeError, match=r"of 'p\.w'.*varies between the ranks"):
            fz.with_fn(step, lambda p, x, mask: (x @ p["w"]).sum() if mask.all() else x.sum())(state, X, mask)
        return torch.stack(found)

    want = (X * torch.tensor([0.0, 0.0, 1.0, 2.0], dtype=F64)).sum() * 6
    for found in run_ranks(rank_main, 2):
        assert_trees_close(found, want.expand(2))


def test_what_cannot_be_checked_is_refused() -> None:
    """A function that reads what it computes, when it has run first. One that reads a mask of the batch is checked."""

    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "tp")

        def fn(p: Any, x: torch.Tensor, mask: torch.Tensor, how: str) -> torch.Tensor:
            if how == "values" and (x * p["b"]).sum().item() > 1e9:
                return x.sum()
            if how == "numpy" and (x * p["b"]).detach().numpy().sum() > 1e9:
                return x.sum()
            whole = how == "mask" and bool(mask.all())
            return fz.parallel.sum(p["w"].sum(), ax) if whole else p["w"].sum()

        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"w": 1})
        state = step.init(PARAMS)
        step.vjp(state, X, torch.ones(2, dtype=torch.bool), "mask", argnums=())
        for how in ("values", "numpy"):
            with pytest.raises(TypeError, match=r"slice of leaf 'w' cannot be checked.*test_placements\.py:\d+, in fn"):
                step.vjp(state, X, torch.zeros(2, dtype=torch.bool), how, argnums=())
        with pytest.raises(AxisTypeError, match=r"of 'p\.w'"):  # in a later run
            step.vjp(state, X, torch.zeros(2, dtype=torch.bool), "mask", argnums=())

    run_ranks(rank_main, 2)


class Reads(torch.nn.Module):
    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.up, self.down, self.copies = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4), copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(self.up(x).tanh())
        out = out * 2 if bool((out.detach() > 1e9).any()) else out
        return fz.parallel.copy(out, fz.parallel.axis(None, "tp")) if self.copies else out


@pytest.mark.parametrize("copied", ["", "inside", "outside"])
def test_copies_of_a_module_that_reads_values(copied: str) -> None:
    """Nobody knows what becomes of them: the gradients of a loss that is made of one are added up."""
    apply, params = fz.functional(Reads(copied == "inside").to(F64))

    def rank_main(rank: int) -> torch.Tensor:
        ax = fz.parallel.axis(None, "tp")
        copy = (lambda y: fz.parallel.copy(y, ax)) if copied == "outside" else lambda y: y
        fn = lambda p, x: copy(apply(dict(p), x)).square().mean()
        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"up": "column", "down": "row"})
        state = step.init(params)
        return torch.stack([step(state, X)[1]["loss"] for _ in range(2)])

    if not copied:
        for found in run_ranks(rank_main, 2):
            assert_trees_close(found, Reads.forward(_whole(params), X).square().mean().detach().expand(2))
        return
    words = {"inside": "each rank's own copy and varies", "outside": "call outside of modules in a function that does"}
    with pytest.raises(RankError, match=words[copied]):
        run_ranks(rank_main, 2)


def _whole(params: Any) -> Reads:
    module = Reads(False).to(F64)
    module.load_state_dict(dict(params))
    return module


@pytest.mark.parametrize("right", [True, False])
def test_pieces_of_uneven_sizes_are_checked(right: bool) -> None:
    """Both ranks have as many elements of "a" as of another leaf: only in the run they are told how many there are."""
    sizes = {"a": 5, "b": 6, "c": 4}
    params = {name: torch.linspace(0, 1, size, dtype=F64) for name, size in sizes.items()}

    def loss(p: Any, gather: Any, total: Any) -> torch.Tensor:
        of_each = [(gather(p[name] * 2) * torch.arange(float(size))).sum() for name, size in sizes.items()]
        return torch.stack(of_each).prod() + total(p["a"].sum())

    def rank_main(rank: int) -> Any:
        ax = fz.parallel.axis(None, "tp")
        total = (lambda y: fz.parallel.sum(y, ax)) if right else lambda y: y
        fn = lambda p: loss(p, lambda y: fz.parallel.gather(y, ax, 0), total)
        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"*": 0})
        return fz.gather(step.vjp(step.init(params))[1](torch.ones((), dtype=F64))[0])

    if not right:
        with pytest.raises(RankError, match=r"test_placements\.py:\d+, in .*no rule says.*A conversion is missing"):
            run_ranks(rank_main, 2)
        return
    want = torch.func.grad(lambda p: loss(p, lambda y: y, lambda y: y))(params)
    for found in run_ranks(rank_main, 2):
        assert_trees_close(found, want)
