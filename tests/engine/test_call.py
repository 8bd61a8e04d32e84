"""apply is a function: a buffer that is changed is refused, and no call leaves anything behind in the private copy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooked import F64, FORMS, SHARDS, Block, Net, X, by_functional_call
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

# ---- no call leaves anything behind


class Changing(Block):
    """A block that writes to itself, in the way that its class attribute says."""

    how = "none"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(3))
        self.plain, self.calls = torch.zeros(3, dtype=F64), 0
        self.extra: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        mean = out.detach().mean(0)
        ema: Any = self.ema
        match self.how:
            case "assigned":
                self.ema = 0.5 * ema + mean
            case "in place":
                ema.mul_(0.5).add_(1.0)
            case "in place, by .data":
                ema.data.mul_(0.5).add_(1.0)
            case "resized":
                ema.resize_(5)
            case "registered":
                self.register_buffer("other", mean)
            case "an attribute now":
                del self.ema
                self.ema = mean
            case "a param":
                self.register_parameter("other", nn.Parameter(torch.ones(3, dtype=F64)))
            case "a submodule":
                self.extra = nn.Identity()
            case "a tensor in place":
                self.plain.add_(1.0)
                return out + self.plain
            case "raises":
                self.ema, self.calls = mean, self.calls + 1
                raise KeyError(str(self.calls))
        return out + self.ema[:3]


def changing(how: str) -> Any:
    class Here(Changing):
        pass

    Here.how = how
    return Net(Here)


WRITES = {
    "assigned": "its buffer 'blocks.0.ema'",
    "in place": "'blocks.0.ema'",
    "in place, by .data": "'blocks.0.ema'",
    "resized": "'blocks.0.ema'",
    "registered": "its buffer 'blocks.0.other'",
    "an attribute now": "its buffer 'blocks.0.ema'",
    "a param": "its param 'blocks.0.other'",
    "a submodule": "its submodule 'blocks.0.extra'",
    "a tensor in place": "'blocks.0.plain'|attribute 'plain'",
}


def runs(apply: Any, params: Any) -> list[Callable[[], Any]]:
    out: list[Callable[[], Any]] = [lambda: apply(params, X), lambda: torch.func.grad(apply)(params, X)]
    for stage, remat in FORMS:
        step = SHARDS[stage](fz.train_step(apply, fz.sgd(0.1)))
        step = fz.remat(step) if remat else step

        def run(step: Any = step) -> Any:
            loss, pullback = step.vjp(step.init(params), X)
            return fz.gather(pullback(torch.ones_like(loss))[0])

        out.append(run)
    return out


@in_turns(4)
@pytest.mark.parametrize("how", sorted(WRITES))
def test_a_module_that_changes_its_buffers_is_refused(how: str) -> None:
    """By name, also inside a unit that is gathered or rematerialised, every time; and nothing is left of it."""
    module: Any = changing(how)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    apply, params = fz.functional(module)
    by_name = rf"[Tt]he module (changed|made|writes to) .*({WRITES[how]})"
    match = rf"{by_name}|Unit 'blocks.0' (writes to|keeps) a tensor of shape .*test_call.py"

    def rank_main(rank: int) -> None:
        for run in runs(apply, params):
            for _ in range(2):
                with pytest.raises(ValueError, match=match):
                    run()
        type(module.blocks[0]).how = "none"
        want = by_functional_call(module)
        for run in runs(apply, params)[1:]:
            assert_trees_close(dict(run()), want, rtol=1e-10)
        type(module.blocks[0]).how = how

    run_ranks(rank_main, 1)
    assert_trees_equal(dict(module.state_dict()), before)


def test_an_exception_leaves_nothing_behind() -> None:
    """But for attributes, which are as the forward left them."""
    module: Any = changing("raises")
    apply, params = fz.functional(module)

    def rank_main(rank: int) -> None:
        for run in runs(apply, params):
            for _ in range(2):
                with pytest.raises(KeyError):
                    run()

    run_ranks(rank_main, 1)
    type(module.blocks[0]).how = "none"
    assert torch.equal(apply(params, X), module(X))


def test_the_users_changes_of_the_module_do_not_reach_the_function() -> None:
    module: Any = Net()
    apply, params = fz.functional(module)
    want = apply({name: value.clone() for name, value in params.items()}, X)
    kept = {name: value.clone() for name, value in params.items()}
    module.blocks[0].table.zero_()
    module.gain.data.zero_()
    module.blocks[0].register_forward_hook(lambda m, i, o: o * 0)
    assert torch.equal(apply(kept, X), want)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(apply(kept, X)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], want)


def test_a_module_at_work_inside_inference_mode() -> None:
    module = Net()
    apply, params = fz.functional(module)
    with torch.inference_mode():
        first = apply(params, X)
    assert torch.equal(first, module(X))
    assert_trees_close(dict(torch.func.grad(apply)(params, X)), by_functional_call(module))


def test_ranks_may_give_a_unit_its_leaves_in_other_orders() -> None:
    weights = {"w": torch.ones(4, 4, dtype=torch.float64), "n": torch.ones(4), "m": torch.ones(4, dtype=torch.float16)}
    unit = fz.unit(lambda p, x: torch.tanh(x @ p["w"] * p["n"] * p["m"]))

    def main(rank: int) -> torch.Tensor:
        names = sorted(weights, reverse=bool(rank))
        loss = lambda p, x: unit({name: p["blocks"][0][name] for name in names}, x).square().mean()
        step = fz.shard_zero3(fz.train_step(loss, fz.sgd(0.1)))
        state, _ = step(step.init({"blocks": [weights]}), torch.ones(3, 4, dtype=torch.float64))
        return step(state, torch.ones(3, 4, dtype=torch.float64))[1]["loss"]

    assert_trees_close(run_ranks(main, 2), run_ranks(main, 1) * 2)
