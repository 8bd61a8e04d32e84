"""Updates that pause at their exchanges: when each goes on, what fails, and what a fused update keeps meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_turns, in_turns

import fzero as fz
from fzero.optim._paused import Running, finished, run_all, together
from fzero.testing import run_ranks
from fzero.update.fused import _Grads
from fzero.update.writing import Writing

UNITS = 8


class Told:
    """Updates of some groups that note what they do; each of their exchanges brings its number."""

    def __init__(self, fails: tuple[int, int] | None = None) -> None:
        self.events: list[tuple[str, int, int]] = []
        self._fails = fails

    def update(self, group: int, exchanges: int) -> Any:
        for number in range(exchanges):
            self.events.append(("starts", group, number))
            arrived = yield self._wait(group, number)
            assert arrived == (group, number)
            if (group, number) == self._fails:
                raise ArithmeticError("no such matrix")
        self.events.append(("ends", group, exchanges))
        return group

    def _wait(self, group: int, number: int) -> Callable[[], Any]:
        def wait() -> Any:
            self.events.append(("waits", group, number))
            return group, number

        return wait


groups = st.lists(st.integers(0, 3), max_size=8)


@given(exchanges=groups, ahead=st.integers(1, 3))
def test_each_goes_on_once_so_many_more_have_begun(exchanges: list[int], ahead: int) -> None:
    told, running, begun = Told(), Running(ahead), 0
    since = dict[tuple[int, int], int]()

    def check(events: list[tuple[str, int, int]]) -> Iterator[tuple[int, int]]:
        """Notes when exchanges start; gives those that are waited for."""
        for what, group, number in events:
            if what == "starts":
                since[group, number] = begun
            elif what == "waits":
                yield group, number

    for group, count in enumerate(exchanges):
        place = len(told.events)
        running.begin(told.update(group, count))
        waited = list(check(told.events[place:]))
        due = (
            sorted([each for each, at in since.items() if at == begun - ahead], key=list(since).index) if count else []
        )
        assert waited == due  # in the order in which they were started
        begun += count > 0
    running.finish()
    assert not running.waits
    starts, waits, ends = ([event for event in told.events if event[0] == what] for what in ("starts", "waits", "ends"))
    assert len(starts) == len(waits) == sum(exchanges) and len(ends) == len(exchanges)
    assert [event[1:] for event in starts] == [event[1:] for event in waits]


@given(exchanges=groups, ahead=st.integers(1, 3))
def test_all_return_what_each_alone_does(exchanges: list[int], ahead: int) -> None:
    made = lambda: [Told().update(*each) for each in enumerate(exchanges)]
    assert run_all(made(), ahead) == finished(together(made(), ahead)) == [*range(len(exchanges))]


@given(exchanges=groups.filter(any), ahead=st.integers(1, 3), data=st.data())
def test_where_one_fails_all_others_are_waited_for(exchanges: list[int], ahead: int, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([group for group, count in enumerate(exchanges) if count]))
    told = Told((group, data.draw(st.integers(0, exchanges[group] - 1))))
    with pytest.raises(ArithmeticError, match="no such matrix"):
        run_all([told.update(*each) for each in enumerate(exchanges)], ahead)
    starts, waits = (sorted(event[1:] for event in told.events if event[0] == what) for what in ("starts", "waits"))
    assert starts == waits


@fz.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w"])


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    for each in p["blocks"]:
        x = block(each, x)
    return x.square().mean()


OPTIMIZERS: dict[str, Any] = {
    "muon": lambda: fz.muon(1e-2),
    "whole": lambda: fz.whole(fz.adamw(1e-2)),
    "adafactor": fz.adafactor,
    "clipped": lambda: fz.chain(fz.clip_by_global_norm(0.1), fz.whole(fz.adamw(1e-2))),
    "partition": lambda: fz.partition({"*.7.*": fz.adamw(1e-2), "*": fz.whole(fz.adamw(1e-2))}),
    "in front": lambda: fz.chain(fz.whole(fz.adamw(1e-2)), fz.sgd(-0.5)),
    "in front of itself": lambda: fz.chain(fz.whole(fz.adamw(1e-2)), fz.sgd(0.1, 0.9), fz.whole(fz.adamw(1e-2))),
    "muon in front": lambda: fz.chain(fz.muon(1e-2), fz.adamw(1e-2)),
    "rows clipped": lambda: fz.chain(fz.clip_by_global_norm(0.1), fz.adaptive_clip(0.1), fz.adamw(1e-2)),
    "partition in front": lambda: fz.chain(
        fz.partition({"*.7.*": fz.clip_by_value(0.1), "*": fz.whole(fz.adamw(1e-2))}), fz.sgd(-0.5)
    ),
    "chain in front": lambda: fz.chain(fz.chain(fz.clip_by_value(0.1), fz.whole(fz.adamw(1e-2))), fz.sgd(-0.5)),
}
AT_ONCE = ("in front", "in front of itself", "muon in front", "rows clipped", "partition in front", "chain in front")


@in_turns(2)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.filterwarnings("ignore:fz.offload")
def test_as_many_units_wait_as_an_optimizer_says(optimizer: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which `fz.plan` counts, as what they have brought stays there meanwhile."""
    opened, most = set[Any](), 0
    opens, closes = Writing.open, Writing.close

    def noted_open(own: Writing, keys: Any) -> Any:
        nonlocal most
        opened.update(keys if own.kind == "params" else ())
        most = max(most, len(opened))
        return opens(own, keys)

    def noted_close(own: Writing, keys: Any) -> None:
        opened.difference_update(keys if own.kind == "params" else ())
        closes(own, keys)

    monkeypatch.setattr(Writing, "open", noted_open)
    monkeypatch.setattr(Writing, "close", noted_close)
    step = fz.train_step(loss, OPTIMIZERS[optimizer]())
    step = fz.fuse_update(step) if fuse else fz.offload(step, params="host")
    step(step.init({"blocks": [{"w": torch.eye(16)} for _ in range(UNITS)]}), torch.ones(4, 16))
    assert most == (UNITS if optimizer in AT_ONCE else 1 + step.optimizer.exchanges) and not opened


@in_turns(3)
@pytest.mark.parametrize(("ranks", "optimizer"), by_turns([1, 3], sorted(OPTIMIZERS.keys() - {*AT_ONCE})))
def test_gradients_go_while_units_are_pulled_back(ranks: int, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a unit that is delivered, of one whose slices are on their way, and of none more. Small ones are together."""
    delivered = {rank: list[weakref.ref[torch.UntypedStorage]]() for rank in range(ranks)}
    most, of = dict.fromkeys(delivered, 0), _Grads.of

    def noted(own: _Grads, shards: Any) -> Any:
        grads, rank = of(own, shards), own.state.params.axis.rank
        delivered[rank] += [weakref.ref(grads.local(key).untyped_storage()) for key in shards]
        most[rank] = max(most[rank], sum(each() is not None for each in delivered[rank]))
        return grads

    monkeypatch.setattr(_Grads, "of", noted)

    def rank_main(rank: int) -> None:
        step = fz.fuse_update(fz.shard_zero3(fz.train_step(loss, OPTIMIZERS[optimizer]())) if ranks > 1 else made())
        step(step.init({"blocks": [{"w": torch.eye(512)} for _ in range(UNITS)]}), torch.ones(4, 512))

    def made() -> Any:
        return fz.train_step(loss, OPTIMIZERS[optimizer]())

    with fz.testing.hazards(None):  # which keep what is given back, to poison it
        run_ranks(rank_main, ranks) if ranks > 1 else rank_main(0)
    assert {len(own) for own in delivered.values()} == {UNITS * (2 if optimizer == "clipped" else 1)}
    assert max(most.values()) <= 2, most
