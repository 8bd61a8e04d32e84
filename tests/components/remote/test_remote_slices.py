"""Features that lie over a tensor axis: from a layer that is cut by columns to one that is cut by rows."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import remote_builds as builds
import torch
from nightly import in_turns
from test_remote_dims import P, need_close, pulled_back

import fzero as fz

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
COLUMNS, ROWS = {"up": 1}, {"down": 0}


def layer(fn: Any, plan: dict[str, int], sizes: tuple[int, int], in_specs: Any, out_specs: Any) -> Any:
    build = functools.partial(builds.built_layer, fn=fn, plan=plan, sizes=sizes)
    return fz.remote(build, sizes[0] * sizes[1], "threads", in_specs=in_specs, out_specs=out_specs)


@in_turns(2)
@pytest.mark.parametrize("sizes", [((1, 2), (1, 2)), ((2, 2), (1, 3)), ((1, 3), (2, 1)), ((3, 1), (2, 2))])
def test_features_go_from_columns_to_rows(sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Nobody has all of them; outputs, grads and input cotangents are those of one process."""
    with (
        layer(builds.columns, COLUMNS, sizes[0], P("dp"), P("dp", "tp")) as first,
        layer(builds.rows, ROWS, sizes[1], P("dp", "tp"), P("dp")) as second,
    ):
        states = first.init(), second.init()
        params = [dict(fz.gather(state.params)) for state in states]
        hidden, pull = first.vjp(states[0], X)
        out, pull_more = second.vjp(states[1], hidden)
        ct = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        g2, (ct_hidden,) = pull_more(ct)
        g1, (ct_x,) = pull(ct_hidden)
        both = lambda p1, p2, x: builds.rows(p2, builds.columns(p1, x))
        expected, cts = pulled_back(both, ct, *params, X)
        by_1, by_2, by_x = cts
        need_close(fz.fetch(out), expected)
        need_close(fz.fetch(hidden), builds.columns(params[0], X))
        need_close(fz.fetch(ct_x), by_x)
        need_close((dict(fz.gather(g1)), dict(fz.gather(g2))), (by_1, by_2))
        assert second.update(states[1], g2)[1]["skipped"].item() is False


def test_a_loss_behind_rows_has_the_weights_of_its_examples() -> None:
    """Uneven over both axes; what lies over the tensor axis has no say in them."""
    hidden = torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss = lambda p, x, ax=None: builds.rows(p, x, ax).square().mean()
    with layer(loss, ROWS, (2, 2), P("dp", "tp"), P()) as own:
        state = own.init()
        out, pullback = own.vjp(state, hidden)
        grads, (ct,) = pullback(torch.ones_like(out))
        expected, cts = pulled_back(loss, torch.ones((), dtype=torch.float64), dict(fz.gather(state.params)), hidden)
        need_close(fz.fetch(out), expected)
        need_close((dict(fz.gather(grads)), fz.fetch(ct)), tuple(cts))


def test_what_each_rank_makes_of_its_own_features_is_refused() -> None:
    """A scalar of a rank's features, a copy of what varies, and grads of whole leaves that differ."""
    hidden = torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    cases: list[tuple[Any, Any, str]] = [
        (lambda p, x, ax: (x * p["gain"]).square().mean(), P(), "varies between the ranks of axis 'tp'"),
        (lambda p, x, ax: fz.parallel.copy(x, ax) * p["gain"], P("dp"), "varies between the ranks"),
    ]
    for fn, out_specs, words in cases:
        with layer(fn, ROWS, (1, 2), P("dp", "tp"), out_specs) as own:
            with pytest.raises(ValueError, match=words):
                own.vjp(fz.fetch(own.init()), hidden)
    by_rank = lambda p, x, ax: (p["gain"] * (1.0 + torch.distributed.get_rank())).expand(x.shape)
    with layer(by_rank, ROWS, (1, 2), P("dp", "tp"), P("dp", "tp")) as own:
        state = own.init()
        out, pullback = own.vjp(state, hidden)
        grads, _ = pullback(fz.fetch(out))
        with pytest.raises(ValueError, match="differ"):
            fz.gather(grads)
        with pytest.raises(ValueError, match="differ"):
            fz.fetch(own.update(state, grads)[1])
