"""fz.plot_plan of one plan: every rank that is drawn has its part of a leaf, and all parts are the leaf."""

from __future__ import annotations

import functools
import pickle
import struct
from typing import Any

import exactness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.formatters import DisplayFormatter
from matplotlib import pyplot
from nightly import in_turns

import fzero as fz
from fzero.planning.plot_plan import View, new_axes

STEP = fz.train_step(lambda p, x: x, fz.adamw(1e-3))
PARAMS = {
    "embed": torch.empty(50, 8, device="meta"),
    "blocks": [{"w": torch.empty(8, 12, device="meta"), "b": torch.empty(12, device="meta")} for _ in range(4)],
}
PLAN = {"embed": 0, "blocks.*.w": fz.parallel.cut(1, (8, 2, 2)), "blocks.0.b": 0}
BOTH = fz.shard_zero3(fz.shard_tensor(STEP, PLAN))


@given(
    shape=st.lists(st.integers(1, 12), min_size=0, max_size=4),
    dim=st.integers(0, 3),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    stage=st.integers(0, 3),
    other=st.integers(1, 200),
    at=st.floats(0, 1),
)
def test_pixels_are_the_elements_that_ranks_hold(
    shape: list[int], dim: int, sizes: tuple[int, int], stage: int, other: int, at: float
) -> None:
    params = {"a": torch.empty(other, device="meta"), "w": torch.empty(shape, device="meta")}
    step = STEP
    if dim < len(shape):
        first = int(at * shape[dim])
        step = fz.shard_tensor(STEP, {"w": fz.parallel.cut(dim, (first, shape[dim] - first))})
    plan = fz.plan(exactness.SHARDS[stage](step), params, mesh=dict(zip(("dp", "tp"), sizes, strict=True)))
    (row,) = [row for row in plan.rows if row.path == "w"]
    view = View.of(row.shape, row.slices and row.slices.dim)
    assert view.rows * view.columns == row.numel and 0.2 <= view.height <= 0.8
    elements = torch.arange(row.numel).view(row.shape)
    for rank in range(plan.world_size):
        held = plan.held("w", rank)
        want, numbers = torch.zeros(row.numel, dtype=torch.int64), elements
        if held.dim is not None:
            numbers = torch.cat([elements.narrow(held.dim, *piece) for piece in held.ranges], held.dim)
        want[numbers.reshape(-1)] = 1
        want[numbers.reshape(-1)[held.start : held.stop]] = 2
        assert torch.equal(view.pixels(held, most=max(1, row.numel)).reshape(-1), want)
        small = view.pixels(held, most=2)
        assert small.shape == (min(2, view.rows), min(2, view.columns)) and set(small.unique().tolist()) <= {0, 1, 2}


MESHES = [
    {"dp": 1},
    {"dp": 3},
    {"dp": 40},
    {"dp": 1000},
    {"dp": 4, "tp": 3},
    {"dp": 64, "tp": 8},
    {"dp": 2, "tp": 96},
    {"pp": 2, "dp": 3, "tp": 4},
    {"pp": 8, "dp": 16, "tp": 4},
    {"pp": 2, "sp": 2, "dp": 3, "tp": 4},
]


@in_turns(3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_is_a_cell(mesh: dict[str, int]) -> None:
    step = BOTH if "tp" in mesh else fz.shard_zero3(STEP)
    plan = fz.plan(step, PARAMS, mesh=mesh)
    drawn, last = min(64, plan.world_size), [*mesh][-1]
    axes: Any = fz.plot_plan(plan, leaves="blocks.0.w")
    texts = [text.get_text() for text in axes.texts]
    assert "blocks.0.w" in texts and all(texts.count(str(rank)) == 1 for rank in range(drawn))
    assert f"{last} →" in texts
    assert ("are drawn" in axes.get_title(loc="left")) == (drawn < plan.world_size)
    places = {tuple(image.get_extent()) for image in axes.images}
    assert len(axes.images) == len(places) == drawn
    axes.figure.canvas.draw()


def test_leaves_of_each_kind_of_cut_or_those_that_are_asked_for() -> None:
    plan = fz.plan(BOTH, PARAMS, mesh={"dp": 2, "tp": 2})

    def titles(**chosen: Any) -> list[str]:
        axes: Any = fz.plot_plan(plan, **chosen)
        return [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"]

    assert titles() == ["embed", "blocks.0.w", "blocks.1.b"]
    assert titles(leaves="*.b") == [f"blocks.{number}.b" for number in range(4)]
    assert len(titles(leaves="*")) == 6
    with pytest.raises(ValueError, match=r"got leaves='nothing', expected a pattern that matches some: blocks\.0\.b, "):
        fz.plot_plan(plan, leaves="nothing")
    with pytest.raises(TypeError, match="got leaves='embed', expected None where several plans are drawn"):
        fz.plot_plan({"one": plan}, leaves="embed")
    with pytest.raises(TypeError, match="got axes=3, expected axes of matplotlib or None"):
        fz.plot_plan(plan, 3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_legend_says_what_is_kept(stage: int) -> None:
    plan = fz.plan(exactness.SHARDS[stage](STEP), PARAMS, mesh={"dp": 2})
    axes: Any = fz.plot_plan(plan)
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert (
        words
        == {
            0: ["the rank keeps params, grads and moments of it"],
            1: ["the rank keeps moments of it", "the rank keeps params and grads of it"],
            2: ["the rank keeps grads and moments of it", "the rank keeps params of it"],
            3: ["the rank keeps params, grads and moments of it", "gathered for each use"],
        }[stage]
    )


def test_it_draws_into_axes_that_are_given() -> None:
    axes = new_axes(4, 4)
    assert fz.plot_plan(fz.plan(BOTH, PARAMS, mesh={"dp": 2, "tp": 2}), axes) is axes
    draw = functools.partial(fz.plot_plan, {"one": fz.plan(STEP, PARAMS)})
    assert draw(axes) is axes and draw() is not axes


def test_a_notebook_shows_it_without_pyplot() -> None:
    plan, before = fz.plan(BOTH, PARAMS, mesh={"dp": 2, "tp": 2}), pyplot.get_fignums()  # of other tests
    for axes in (fz.plot_plan(plan), fz.plot_plan({"one": plan}), fz.plot_schedule(fz.schedules.gpipe(2, 2))):
        data, more = DisplayFormatter().format(axes)
        width = more["image/png"]["width"]
        assert struct.unpack(">I", data["image/png"][16:20])[0] == pytest.approx(2 * width, abs=2)
        assert pickle.loads(pickle.dumps(axes))._repr_png_()[1]["width"] == width
        assert pyplot.get_fignums() == before
