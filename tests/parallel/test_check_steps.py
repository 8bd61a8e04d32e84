"""check of steps: what their plans cut is typed; with a conversion left out or made twice they are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import zoo
from checked import CASES, CHANGING, Case, Maps, Tree, changed, whole
from huggingface_models import VIT, llama, mixtral, vit
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, by_day, in_turns
from torch import nn
from torch.nn import functional as F

import fzero as fz
from fzero.comm.backend import Mesh
from fzero.parallel import AxisTypeError

# ---- models of the zoo


TRANSFORMS: dict[str, Callable[[fz.Step, Mesh], fz.Step]] = {
    "zero1": lambda step, mesh: fz.shard_zero1(step, mesh=mesh),
    "zero3": lambda step, mesh: fz.shard_zero3(step, mesh=mesh),
    "remat": lambda step, _: fz.remat(step, "blocks.*"),
    "offload": lambda step, _: fz.offload(step, moments="host"),
    "donate": lambda step, _: fz.donate(step),
    "accumulate": lambda step, _: fz.accumulate(step, 2),
    "fuse": lambda step, _: fz.fuse_update(step),
    "autocast": lambda step, _: fz.autocast(step, torch.bfloat16),
    "compile": lambda step, _: fz.compile(step, "blocks.*"),
    "freeze": lambda step, _: fz.freeze(step, "blocks.0.*"),
}
transforms = st.lists(st.sampled_from(sorted(TRANSFORMS)), max_size=4, unique=True).filter(
    lambda names: not {"zero1", "zero3"} <= set(names)
)


def step_of(fn: Any, plan: Any, mesh: Mesh, names: Sequence[str] = (), after: int = 0) -> fz.Step:
    """The step with transforms, of which so many come before the plan."""
    step = fz.train_step(fn, fz.adamw(1e-3))
    for number, name in enumerate([*names[:after], "plan", *names[after:]]):
        step = fz.shard_tensor(step, plan, mesh=mesh) if number == after else TRANSFORMS[name](step, mesh)
    return step


@by_day(20)
@given(
    planned=zoo.planned(),
    size=st.integers(1, 4),
    place=st.integers(0, 3),
    names=transforms,
    after=st.integers(0, 4),
    number=st.integers(0, 40),
    twice=st.booleans(),
    values=st.booleans(),
)
def test_drawn_models(
    planned: Any, size: int, place: int, names: list[str], after: int, number: int, twice: bool, values: bool
) -> None:
    """Right as they are, whatever rank looks and whatever else is asked of the step; with one change they are not."""
    model, plan = planned
    apply, params = fz.functional(model)
    with fz.testing.fake_mesh({"dp": 2, "tp": size}, place % size + size) as mesh:
        step = step_of(zoo.loss_of(apply), plan, mesh, names, min(after, len(names)))
        call = functools.partial(fz.parallel.check, step, params, *zoo.batches(1)[0], values=values)
        with changed() as calls:
            report = call()
        assert report.outputs == {"": ()}
        assert report.played == ({"tp": size} if values and size > 1 else {})
        if size == 1:
            return
        assert {*calls} <= {*CHANGING}
        assert [each.name for each in report.conversions if not each.transposed] == calls
        number %= len(calls)
        with pytest.raises(AxisTypeError), changed(twice=number) if twice else changed(left_out=number):
            call()


# ---- models of Hugging Face, by their own plans


tied_llama = functools.partial(llama, 2, True)


def loss_of(apply: Any, params: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(apply(params, x).logits.flatten(0, -2), targets.flatten())


@in_turns(5)
@pytest.mark.parametrize(
    ("make", "size", "values"),
    [(tied_llama, 2, True), (tied_llama, 3, False), (vit, 2, False), (vit, 3, True), (mixtral, 3, True)],
)
def test_models_of_hugging_face(make: Callable[[], nn.Module], size: int, values: bool) -> None:
    """Every other conversion is left out or made twice, in turn; nightly both of each."""
    torch.manual_seed(0)
    apply, params = fz.functional(make().eval())
    x = torch.randn(2, 3, 8, 8) if make is vit else torch.randint(0, 17, (2, 6))
    batch = x, torch.zeros(2 if make is vit else (2, 6), dtype=torch.int64)
    with fz.testing.fake_mesh({"dp": 4, "tp": size}, size - 1) as mesh:
        step = step_of(functools.partial(loss_of, apply), VIT if make is vit else "auto", mesh, ["zero3"])
        call = functools.partial(fz.parallel.check, step, params, *batch, values=values)
        with changed() as calls:
            assert call().outputs == {"": ()}
        assert len(calls) > 7
        for number in range(0, len(calls), 1 if NIGHTLY else 2):
            for change in ("left_out", "twice") if NIGHTLY else (("left_out", "twice")[number // 2 % 2],):
                with pytest.raises(AxisTypeError) as caught, changed(**{change: number}):
                    call()
                assert "'tp'" in str(caught.value)


# ---- pure functions


def of_step(case: Case, m: Maps, size: int, rank: int = 0) -> fz.parallel.Report:
    """The report on a step whose plan cuts what the case does; on other axes the inputs are said to vary."""
    with fz.testing.fake_mesh(dict.fromkeys(case.axes, size), rank) as mesh:
        axes = {name: fz.parallel.axis(mesh, name) for name in case.axes}
        params, inputs = whole(case, 0)

        def fn(p: Tree, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            return case.fn(m, *axes.values(), p, x, *more)

        step, plan = fz.train_step(fn, fz.sgd(0.1)), {name: dim for name, (_, dim) in case.cut.items() if name != "x"}
        if plan:
            step = fz.shard_tensor(step, plan, mesh=mesh, axis=case.axes[0])
        varying = {}
        if "x" in case.cut:
            axis, dim = case.cut["x"]
            inputs[0] = inputs[0].chunk(size, dim)[0]
            varying = {"x": {axis: dim}}
        return fz.parallel.check(step, params, *inputs, varying=varying)


@in_turns(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fn.__name__)
def test_pure_functions(case: Case) -> None:
    for size in (1, 2, 4):
        m = Maps()
        assert of_step(case, m, size, size - 1).outputs == {"": ()}
    for number, name in enumerate(m.names):
        if name in CHANGING:
            for change in ("left_out", "twice"):
                with pytest.raises(AxisTypeError):
                    of_step(case, Maps(**{change: number}), 4)


# ---- what else steps are


class Counted(nn.Module):
    """With a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("scale", torch.full((6,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x * self.scale)))


PLAN = {"up": "column", "down": "row"}


def squares(apply: Any, params: Any, x: torch.Tensor) -> torch.Tensor:
    return apply(params, x).square().mean()


def test_a_dry_run_leaves_all_as_it_was() -> None:
    """On ranks that there are it sends nothing, and a step that runs afterwards is that of one process."""
    torch.manual_seed(0)
    apply, params = fz.functional(Counted())
    x = torch.randn(3, 6)

    def rank_main(rank: int) -> Any:
        step = step_of(functools.partial(squares, apply), PLAN, meshed(2))
        before = [leaf.clone() for leaf in (*params.values(), x)]
        with fz.testing.recorded_collectives() as sent:
            report = fz.parallel.check(step, params, x)
        assert not sent and [each.name for each in report.conversions] == ["copy", "sum", "sum", "copy"]
        assert all(map(torch.equal, before, (*params.values(), x)))
        state = step.init(params)
        with fz.testing.recorded_collectives() as sent:
            loss, pullback = step.vjp(state, x)
            pullback(torch.ones(()))
        parts = [size for operation, tag, size in sent if "parallel" in str(tag)]
        assert (len(parts), sum(parts)) == (report.messages("tp"), report.sent("tp"))
        return loss

    expected = squares(apply, params, x)
    for loss in fz.testing.run_ranks(rank_main, 2):
        assert torch.allclose(loss, expected)


def meshed(size: int) -> Mesh:
    return torch.distributed.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def report_of(fn: Any, params: Any, *batch: Any, size: int = 2, edit: Any = None, **more: Any) -> fz.parallel.Report:
    """The report on a step of Counted's plan."""
    with fz.testing.fake_mesh({"dp": 2, "tp": size}) as mesh:
        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1), has_aux=more.pop("has_aux", False)), PLAN, mesh=mesh)
        return fz.parallel.check(step if edit is None else edit(step), params, *batch, **more)


def test_params_without_values() -> None:
    """Meta tensors, fake ones, and callables that make them; sizes that no machine holds."""
    with torch.device("meta"):
        model = Counted()
        model.up, model.down = nn.Linear(6, 1 << 40), nn.Linear(1 << 40, 6)
    apply, params = fz.functional(model)
    report = report_of(functools.partial(squares, apply), params, torch.empty(1, 6, device="meta"), size=8)
    assert report.sent("tp") == 2 * 7 * 6 * 4
    apply, params = fz.functional(Counted())
    makers = {name: functools.partial(torch.zeros, leaf.shape) for name, leaf in params.items()}
    assert report_of(functools.partial(squares, apply), makers, torch.empty(1, 6)).messages() == 2
    with pytest.raises(TypeError, match="has not"):
        report_of(lambda p, x: x, {k: v.to("meta") for k, v in params.items()}, torch.empty(1, 6), values=True)


def test_frozen_leaves_need_no_copy() -> None:
    """Where nothing is differentiated by a whole leaf, ranks may compute different things with it."""

    def fn(p: Tree, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ p["up"]) * p["scale"]
        return (h @ p["down"]).sum()

    with fz.testing.fake_mesh({"tp": 2}) as mesh:
        ax = fz.parallel.axis(mesh, "tp")
        loss = lambda p, x: fz.parallel.sum(fn(p, fz.parallel.copy(x, ax)), ax)
        step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1)), {"up": 1, "down": 0}, mesh=mesh)
        params = {"up": torch.ones(4, 6), "down": torch.ones(6, 4), "scale": torch.ones(())}
        with pytest.raises(AxisTypeError, match=r"'p\.scale'"):
            fz.parallel.check(step, params, torch.ones(2, 4))
        assert fz.parallel.check(fz.freeze(step, "scale"), params, torch.ones(2, 4)).outputs == {"": ()}


def test_aux_dtypes_and_microbatches() -> None:
    apply, params = fz.functional(Counted())
    x = torch.empty(4, 6)

    def fn(p: Any, x: torch.Tensor) -> Any:
        assert x.shape[0] == 2
        out = apply(p, x)
        return out.float().square().mean(), {"out": out}

    edit = lambda step: fz.autocast(fz.accumulate(step, 2), torch.bfloat16)
    report = report_of(fn, params, x, has_aux=True, edit=edit)
    assert report.outputs == {"0": (), "1.out": ()}
    assert report.sent("tp") == 12 * 2 + 12 * 4  # the sum in bfloat16, and the cotangent of the module's input
    with pytest.raises(TypeError, match="got no pair"):
        report_of(lambda p, x: apply(p, x).sum(), params, x, has_aux=True)


def test_what_a_step_is_refused_for() -> None:
    apply, params = fz.functional(Counted())
    loss, x = functools.partial(squares, apply), torch.empty(2, 6)
    step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1)), PLAN)
    with pytest.raises(RuntimeError, match=r"no process group.*fake_mesh"):
        fz.parallel.check(step, params, x)
    with pytest.raises(TypeError, match="its params and a batch"):
        fz.parallel.check(step)
    with pytest.raises(ValueError, match="matches no leaf"):
        report_of(loss, {"w": torch.ones(2)}, x)
    with pytest.raises(ValueError, match="varying with 'nothing'"):
        report_of(loss, params, x, varying={"nothing": "tp"})
    with pytest.raises(TypeError, match="missing 1 required"):
        report_of(loss, params)


def test_a_tensor_that_a_function_cuts_itself_is_a_whole_one() -> None:
    """A step without a plan: all leaves are whole."""
    with fz.testing.fake_mesh({"dp": 2, "tp": 2}) as mesh:
        ax = fz.parallel.axis(mesh, "tp")

        def fn(cuts: bool, p: Tree, x: torch.Tensor) -> torch.Tensor:
            own = fz.parallel.split(p["w"], ax, 1) if cuts else p["w"]
            return fz.parallel.sum((fz.parallel.copy(x, ax) @ own).sum(), ax)

        params, x = {"w": torch.ones(4, 4)}, torch.ones(2, 4)
        report = fz.parallel.check(
            fz.shard_zero3(fz.train_step(functools.partial(fn, True), fz.sgd(0.1)), mesh=mesh), params, x
        )
        assert report.outputs == {"": ()}
        with pytest.raises(AxisTypeError, match=r"'p\.w'"):
            fz.parallel.check(fz.train_step(functools.partial(fn, False), fz.sgd(0.1)), params, x)
