"""A component as a stage of a pipeline: its microbatches one by one, in a schedule's order."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import remote_builds as builds
import torch
from remote_builds import need_close

import fzero as fz
from fzero.engine.passes import Passes


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 2), (3, 3)])
def test_passes_are_those_of_a_step(ranks: int, stage: int) -> None:
    x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ct = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step, params = builds.built(0, stage=0)
    with fz.remote(functools.partial(builds.built, stage=stage), ranks, "threads") as own:
        state, local = own.init(), step.init(params)

        def run(passes: Any) -> Any:
            outs = [passes.forward(m, (x[m], ("rows",)), (0,)) for m in (0, 1)]
            cts = [passes.backward(1, ct[1])]
            outs += [passes.forward(m, (x[m], ("rows",)), (0,)) for m in (2, 3)]
            cts += [passes.inputs(m, ct[m]) for m in (3, 0)]
            cts.append(passes.inputs(2, ct[2]))
            for m in (0, 3, 2):
                passes.params(m)
            passes.reduce()
            return fz.fetch(outs), fz.fetch(cts), fz.gather(passes.grads(4.0))

        expected, got = run(Passes(step, local, 4)), run(own.passes(state, 4))
        need_close(got[0], expected[0])
        need_close([each[0] for each in got[1]], [each[0] for each in expected[1]])
        need_close(got[2], expected[2])
        out, aux = own.passes(state, 1).outputs(0, (x[0], ("rows",)))
        need_close(fz.fetch(out), expected[0][0][0])
        assert aux is None


def test_an_error_of_one_microbatch_is_that_of_the_grads() -> None:
    with fz.remote(builds.built_trouble, 2, "threads", checked=True, timeout=20) as own:
        x = torch.ones(4, 3, dtype=torch.float64)
        passes = own.passes(own.init(), 2)
        for m in range(2):
            passes.forward(m, (x, "none"), (0,))
        passes.backward(0, x)
        passes.backward(1, torch.ones(1, 1, dtype=torch.float64))
        with pytest.raises(ValueError, match="cotangent of"):
            passes.reduce()
            fz.gather(passes.grads())


def test_both_halves_are_the_whole() -> None:
    with fz.remote(functools.partial(builds.built, stage=3), 2, "threads") as own:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        state = own.init()
        loss, pullback = own.vjp(state, x, ("loss",))
        grads, (ct, _) = pullback(torch.ones_like(loss), retain_graph=True)
        with pytest.raises(RuntimeError, match=r"before pullback\.inputs"):
            pullback.params()
        half, _ = pullback.inputs(torch.ones_like(loss))
        need_close(fz.fetch(half), fz.fetch(ct), rtol=0, atol=0)
        need_close(fz.gather(pullback.params()), fz.gather(grads), rtol=0, atol=0)
