"""Tensors that lie over several axes of a mesh: the function on the whole batch, whatever lies over what."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import remote_builds as builds
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_builds import need_close

import fzero as fz

P = fz.PartitionSpec
MESHES = [(1, 1), (2, 1), (1, 3), (2, 2), (3, 1), (1, 4)]
AXES = [(), ("a",), ("b",), ("a", "b"), ("b", "a")]
TOKENS_IN = P("dp", "sp"), P("dp"), None
TOKENS_OUT = {"own": P("dp", "sp"), "total": P("dp"), "turned": P("sp", "dp"), "every": P("dp"), "loss": P()}


def pulled_back(fn: Any, cotangent: Any, *arguments: Any) -> tuple[Any, list[Any]]:
    """Outputs, and the cotangents of all tensors among the arguments, with torch alone."""
    leaves, spec = torch_pytree.tree_flatten(arguments)
    real = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in leaves]
    own = [x.clone().requires_grad_() if each else x for x, each in zip(leaves, real, strict=True)]
    out = fn(*torch_pytree.tree_unflatten(own, spec))
    pairs = zip(torch_pytree.tree_leaves(out), torch_pytree.tree_leaves(cotangent), strict=True)
    total: Any = sum((x * ct).sum() for x, ct in pairs)
    wanted = [x for x, each in zip(own, real, strict=True) if each]
    grads = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    found = [next(grads) if each else None for each in real]
    zeros = [torch.zeros_like(x) if each and g is None else g for x, g, each in zip(leaves, found, real, strict=True)]
    return torch_pytree.tree_map(lambda x: x.detach(), out), torch_pytree.tree_unflatten(zeros, spec)


@st.composite
def lying(draw: st.DrawFn, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Which axes the dims of a tensor lie over: no axis twice."""
    first = draw(st.sampled_from(AXES))
    rest = [axes for axes in AXES if not {*axes} & {*first}]
    dims = [first, draw(st.sampled_from(rest)), *[()] * (ndim - 2)]
    return tuple(draw(st.permutations(dims)))


@pytest.fixture(scope="module")
def meshes() -> Iterator[list[Any]]:
    """A component for each mesh; what its tensors lie over is set anew by each example."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                fz.remote(
                    functools.partial(builds.built_on_mesh, sizes=sizes, stage=1 + number % 3),
                    sizes[0] * sizes[1],
                    "threads",
                    f"mesh {sizes}",
                    in_specs=P(),
                    out_specs=P(),
                )
            )
            for number, sizes in enumerate(MESHES)
        ]


class Drawn:
    """A component of drawn specs, and the same function in one process."""

    def __init__(self, data: st.DataObject, meshes: list[Any], linear: bool) -> None:
        self.x, self.y = data.draw(lying(3)), data.draw(lying(2))
        order = tuple(data.draw(st.permutations(range(3))))
        names = [name for axes in {*self.x, *self.y} for name in axes]
        kind = "linear" if linear else "loss" if len({*names}) == len(names) else "tanh"
        self.further = order, kind
        self.there = data.draw(st.sampled_from(meshes))
        out = P(*[self.x[dim] for dim in order]), {"y": P(*self.y)}
        in_specs, out_specs = (P(*self.x), P(*self.y), None, None), (*out, None) if kind == "loss" else out
        group = self.there.group
        group.settings = group.settings._replace(in_specs=in_specs, out_specs=out_specs)
        for link in group.links:
            link.host.part.out_specs = out_specs
        self.state = self.there.init()
        self.params = fz.gather(self.state.params)

    def __call__(self, params: Any, x: Any, y: Any) -> Any:
        return builds.elementwise(params, x, y, *self.further)

    def vjp(self, x: Any, y: Any) -> Any:
        return self.there.vjp(self.state, x, y, *self.further)


def drawn_two(data: st.DataObject, meshes: list[Any], linear: bool) -> tuple[Drawn, Drawn, list[int], list[int]]:
    """Two components, the second of which is given what the first one returns, and shapes of x and y."""
    first = Drawn(data, meshes, linear)
    second = Drawn(data, [each for each in meshes if each is not first.there], linear)
    sizes = [data.draw(st.integers(4, 7)) for _ in range(5)]
    turned = [second.x[first.further[0].index(dim)] for dim in range(3)]
    for _ in range(5):  # dims that lie over the same axes have the same size
        for dims in ((*first.x, *first.y), (*turned, *second.y)):
            for axes in {*dims} - {()}:
                places = [place for place, own in enumerate(dims) if own == axes]
                for place in places:
                    sizes[place] = min(sizes[own] for own in places)
    return first, second, sizes[:3], sizes[3:]


@settings(max_examples=25)
@given(data=st.data())
def test_two_components_over_any_axes(meshes: list[Any], data: st.DataObject) -> None:
    """Outputs, grads and input cotangents of what goes from one to the other are those of one process."""
    first, second, *sizes = drawn_two(data, meshes, linear=False)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x, y = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)

    def both(p1: Any, p2: Any, x: Any, y: Any) -> Any:
        out = first(p1, x, y)
        return (second(p2, out[0], out[1]["y"]), *out[2:])

    out, pull = first.vjp(x, y)
    more, pull_more = second.vjp(out[0], out[1]["y"])
    with torch.no_grad():
        like = both(first.params, second.params, x, y)
    ct = torch_pytree.tree_map(lambda t: torch.randn(t.shape, generator=generator, dtype=t.dtype), like)
    g2, (ct_x, ct_y, *_) = pull_more(ct[0])
    g1, (ct_x, ct_y, *_) = pull((ct_x, {"y": ct_y}, *ct[1:]))
    expected, (by_1, by_2, by_x, by_y) = pulled_back(both, ct, first.params, second.params, x, y)
    need_close((fz.fetch(more), *fz.fetch(out[2:])), expected)
    need_close(fz.fetch((ct_x, ct_y)), (by_x, by_y))
    need_close((fz.gather(g1), fz.gather(g2)), (by_1, by_2))


@settings(max_examples=25)
@given(data=st.data())
def test_the_way_back_is_the_transpose_to_the_last_bit(meshes: list[Any], data: st.DataObject) -> None:
    """<Ax, y> == <x, A'y> for whole numbers."""
    first, second, *sizes = drawn_two(data, meshes, linear=True)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    drawn = lambda like: torch.randint(-3, 4, like, generator=generator, dtype=torch.float64)
    x, y = map(drawn, sizes)
    out, pull = first.vjp(x, y)
    more, pull_more = second.vjp(out[0], out[1]["y"])
    got = torch_pytree.tree_leaves(fz.fetch(more))
    ct = [drawn(each.shape) for each in got]
    _, (ct_x, ct_y, *_) = pull_more((ct[0], {"y": ct[1]}))
    _, (ct_x, ct_y, *_) = pull((ct_x, {"y": ct_y}))
    left: Any = sum((a * b).sum() for a, b in zip(got, ct, strict=True))
    right: Any = sum((a * b).sum() for a, b in zip((x, y), fz.fetch((ct_x, ct_y)), strict=True))
    assert left == right


@pytest.mark.parametrize(
    ("on", "sizes", "stage"),
    [("threads", (2, 2), 3), ("threads", (1, 3), 1), ("threads", (3, 1), 2), ("processes", (1, 2), 1)],
)
def test_tokens_over_ranks_that_exchange_some(on: str, sizes: tuple[int, int], stage: int) -> None:
    """A loss of each rank's own tokens, sums over tokens, all of them: of uneven numbers."""
    build = functools.partial(builds.built_over_tokens, sizes=sizes, stage=stage)
    with fz.remote(build, sizes[0] * sizes[1], on, in_specs=TOKENS_IN, out_specs=TOKENS_OUT) as own:
        generator = torch.Generator().manual_seed(0)
        drawn = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
        state = own.init()
        for rows, tokens in ((5, 7), (4, 6)):
            inputs = drawn(rows, tokens, 3), drawn(rows), drawn(4)
            params = fz.gather(state.params)
            out, pullback = own.vjp(state, *inputs)
            ct = torch_pytree.tree_map(lambda x: drawn(x.shape), builds.over_tokens(params, *inputs))
            grads, cts = pullback(ct)
            expected, (by_params, *by_inputs) = pulled_back(builds.over_tokens, ct, params, *inputs)
            need_close(fz.fetch(out), expected)
            need_close(fz.fetch(own.forward(state, *inputs)), expected)
            need_close(fz.fetch(list(cts)), list(by_inputs))
            need_close(fz.gather(grads), by_params)
            state, _ = own.update(state, grads)


def test_a_whole_step_of_a_loss_over_tokens() -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["w"]).square().mean()

    def build(rank: int) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        return (
            fz.shard_zero2(fz.train_step(fn, fz.sgd(0.5)), mesh, axis=("dp", "sp")),
            {"w": builds.weights()["in"]},
            mesh,
        )

    x = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = fz.train_step(fn, fz.sgd(0.5))
    with fz.remote(build, 4, "threads", in_specs=P("dp", "sp"), out_specs=P()) as own:
        state, local = own.init(), plain.init({"w": builds.weights()["in"]})
        for _ in range(3):
            state, metrics = own(state, x)
            local, expected = plain(local, x)
            need_close(fz.fetch(metrics), dict(expected))
        need_close(fz.gather(state.params), fz.gather(local.params))


def test_components_with_and_without_specs_read_one_another() -> None:
    build = functools.partial(builds.built_over_tokens, sizes=(1, 2))
    text = functools.partial(builds.built_mapped, seed=1)
    x = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts, ones = torch.tensor([2, 1, 0, 1]), torch.ones(4, dtype=torch.float64)
    with (
        fz.remote(text, 3, "threads") as plain,
        fz.remote(build, 2, "threads", in_specs=TOKENS_IN, out_specs=TOKENS_OUT) as own,
    ):
        state, weights = own.init(), fz.gather(plain.init().params)
        first, pull_first = plain.vjp(plain.init(), x, counts)
        out, pull = own.vjp(state, first, ones, ones)
        cts = dict.fromkeys(TOKENS_OUT)
        _, (ct, *_) = pull({**cts, "own": torch.ones_like(out["own"]), "loss": torch.ones_like(out["loss"])})
        _, (ct, _) = pull_first(ct)

        def both(x: torch.Tensor) -> torch.Tensor:
            made = builds.over_tokens(fz.gather(state.params), builds.mapped(weights, x, counts), ones, ones)
            return made["own"].sum() + made["loss"]

        need_close(fz.fetch(ct), torch.func.grad(both)(x))


# ---- mistakes


def started(
    in_specs: Any, out_specs: Any, sizes: tuple[int, int] = (2, 1), third: bool = True, axis: Any = ("dp", "sp")
) -> Any:
    def build(rank: int) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "sp"))
        step = fz.shard_zero1(fz.train_step(lambda p, x: x * p["w"], fz.sgd(0.1)), mesh, axis=axis)
        return (step, {"w": builds.ONES}, mesh)[: 3 if third else 2]

    return fz.remote(build, sizes[0] * sizes[1], "threads", in_specs=in_specs, out_specs=out_specs)


def test_specs_that_cannot_be_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="axis 'dp' twice"):
        P("dp", ("sp", "dp"))
    with pytest.raises(TypeError, match="a dim"):
        P(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both or neither"):
        started(P("dp"), None)
    for no_tuple in (["dp"], fz.Ragged(P("dp"), P("dp"))):  # a NamedTuple of two inputs' specs, too
        with pytest.raises(TypeError, match="in_specs"):
            started(no_tuple, P())
    with pytest.raises(TypeError, match="out_specs"):
        started(P("dp"), ("dp",))
    with pytest.raises(ValueError, match=r"out_specs has PartitionSpec\('ep'\), and there is no axis 'ep'"):
        started(P("dp"), P("ep"))
    with pytest.raises(ValueError, match=r"no axis 'dp'.*third value"):
        started(P("dp", "sp"), P("dp"), third=False)
    with pytest.raises(ValueError, match="takes means over axis 'sp'"):
        started(P("dp", "sp"), P("dp", "sp"), sizes=(1, 2), axis="dp")
    assert repr(P("dp", None, ("a", "b"))) == "PartitionSpec('dp', None, ('a', 'b'))"
    assert {P(("dp",)): 1}[P("dp")] == 1


def test_tensors_that_do_not_fit_their_specs_are_refused() -> None:
    x = torch.ones(4, 3, dtype=torch.float64)
    with started((P("dp"),), P("dp")) as own:
        state = own.init()
        out = own.forward(state, x)
        with pytest.raises(ValueError, match="no prefix of the tree of inputs"):
            own.forward(state, x, x)
        with started(P("dp", "sp", None), P("dp")) as other:
            with pytest.raises(ValueError, match=r"shape \(4, 3\).*3 dims"):
                other.forward(other.init(), x)
            with pytest.raises(ValueError, match=r"shape \(4, 3\).*3 dims"):
                other.forward(other.init(), out)
    for specs, words in ((P("dp", None, None), "3 dims"), ((P("dp"), P()), "no prefix of the tree of outputs")):
        with started(P("dp"), specs) as own:
            with pytest.raises(ValueError, match=words):
                own.forward(own.init(), x)


def returned(fn: Any, in_specs: Any, out_specs: Any, *inputs: Any) -> Any:
    """What a function of the rank's place on a mesh of 2 x 2 returns."""

    def build(rank: int) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        own = functools.partial(fn, tuple(mesh.get_coordinate() or ()))
        return fz.shard_zero1(fz.train_step(own, fz.sgd(0.1)), mesh, axis=("dp", "sp")), {"w": builds.ONES}, mesh

    with fz.remote(build, 4, "threads", in_specs=in_specs, out_specs=out_specs) as own:
        return fz.fetch(own.forward(own.init(), *inputs))


def test_outputs_that_are_pieces_of_nothing_are_refused() -> None:
    x = torch.ones(4, 4, dtype=torch.float64)
    uneven = lambda place, p, x: x[:, : 1 + place[0]]
    with pytest.raises(ValueError, match="expected the same but for the dims"):
        returned(uneven, P("dp", "sp"), P("dp", "sp"), x)
    with pytest.raises(ValueError, match="differs between ranks"):
        returned(lambda place, p, x: x + place[1], P("dp"), P("dp"), x)
    with pytest.raises(ValueError, match="differs between ranks"):
        returned(lambda place, p, x: x + place[0], P(), P(), x)
    dtypes = [torch.float64, torch.float32]
    with pytest.raises(ValueError, match="float32"):
        returned(lambda place, p, x: x.to(dtypes[place[1]]), P("dp", "sp"), P("dp", "sp"), x)
    ragged = lambda place, p, x: x[: 1 + place[1], : 1 + place[0]]
    assert returned(ragged, P("sp", "dp"), P("sp", "dp"), x).shape == (3, 3)


def test_a_scalar_whose_weights_are_not_known_is_refused() -> None:
    fn = lambda place, p, x, y: x.mean() + 0 * y.sum()
    x, y = torch.arange(4.0, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert returned(fn, (P(("dp", "sp")), P("dp")), P(), x, y) == x.mean()
    with pytest.raises(ValueError, match="overlap"):
        returned(fn, (P(("dp", "sp")), P("dp")), P(), torch.cat([x, y]), y)
    with pytest.raises(ValueError, match=r"dim 0 of tensor 0.*\(4,\).*dim 0 of tensor 1.*\(2,\).*'dp'"):
        returned(fn, (P("dp"), P("dp")), P(), x, y)


def test_meshes_that_are_not_those_of_the_step_are_refused() -> None:
    def build(rank: int) -> Any:
        init = torch.distributed.init_device_mesh
        mesh, other = (init("cpu", sizes, mesh_dim_names=("dp", "sp")) for sizes in ((2, 1), (1, 2)))
        return fz.shard_zero1(fz.train_step(lambda p, x: x * p["w"], fz.sgd(0.1)), mesh), {"w": builds.ONES}, other

    with pytest.raises(ValueError, match="expected the mesh that the step is sharded over"):
        fz.remote(build, 2, "threads")
