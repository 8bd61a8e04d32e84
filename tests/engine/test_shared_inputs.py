"""Inputs of a unit that share memory, of which it returns views: each view's gradient is that of its own input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from units import F64, params_of

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

X = torch.randn(4, 6, 4, dtype=F64, generator=torch.Generator().manual_seed(2))
FORMS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "remat": fz.remat,
    "ZeRO-3": fz.shard_zero3,
    "offload": lambda step: fz.offload(step, params="host", activations="host"),
}
GIVEN: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "chunks": lambda h: list(h.chunk(3, 1)),
    "rows": lambda h: list(h.unbind(0))[:3],
    "whole and part": lambda h: [h, h[:, :4], h[:, 2:]],
    "part and whole": lambda h: [h[:2], h, h],
    "one detached": lambda h: [h, h.detach(), h.view(h.shape)],
    "two of a transpose": lambda h: [h.mT, h, h[..., 1:]],
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: x,
    "flat": lambda x: x.flatten(),
    "transposed": lambda x: x.transpose(0, -1),
    "a part": lambda x: x[1:],
    "a view of a view": lambda x: x[..., 1:].unsqueeze(0).mT,
    "detached": lambda x: x.detach()[:1],
    "new": lambda x: x * 2,
}


@given(
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(sorted(GIVEN)),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(VIEWS))), min_size=1, max_size=3),
    st.booleans(),
)
def test_views_of_inputs_that_share_memory(form: str, of: str, views: list[tuple[int, str]], whole: bool) -> None:
    def body(p: Any, *given: torch.Tensor) -> Any:
        total = sum((torch.tanh(x.reshape(-1)[:4] @ p["w"]).sum() for x in given), torch.zeros((), dtype=F64))
        return total, [VIEWS[how](given[i]) for i, how in views]

    def fn(unit: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x * p["s"]) if whole else x
        total, out = unit(p["blocks"][0], *GIVEN[of](h))
        return total + sum((i + 1) * y.sin().sum() for i, y in enumerate(out))

    want = torch.func.grad(lambda p, x: fn(body, p, x), argnums=(0, 1))(params_of(), X)

    def rank_main(rank: int) -> Any:
        step = FORMS[form](fz.train_step(lambda p, x: fn(fz.unit(body), p, x), fz.sgd(0.1)))
        state, found = step.init(params_of()), []
        for _ in range(2):
            out, pullback = step.vjp(state, X, argnums=(0,))
            grads, (of_x,) = pullback(torch.ones_like(out))
            found.append((fz.gather(grads), of_x))
        return found

    for got in run_ranks(rank_main, 1)[0]:
        assert_trees_close(got, want, rtol=1e-10)
