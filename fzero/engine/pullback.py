"""The pullback of a unit's call: its params are gathered again, or it runs again, and cotangents are reduced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch

from fzero.base import private
from fzero.base.context import within
from fzero.base.node import Op, Tensors, gradients
from fzero.base.refusals import need_no_strays
from fzero.engine.activations import Inputs, Saved
from fzero.engine.gathered import GatheredOp
from fzero.engine.named import Named
from fzero.engine.signature import Signature
from fzero.engine.traversal import Traversal
from fzero.table.layout import Key

# the kept graph of one first-order run of a unit: its leaves by group, inputs, outputs, and what is around a pullback
Pull = tuple[
    dict[Key, list[torch.Tensor]],
    dict[int, torch.Tensor],
    list[torch.Tensor],
    Callable[[], contextlib.AbstractContextManager[object]] | None,
]


class PulledOp(GatheredOp):
    """A unit's call, as far as its pullback goes; `UnitOp` runs it."""

    traversal: Traversal
    signature: Signature
    keys: tuple[Key, ...]
    number: int
    used = False
    recompute: bool
    unit_fn: Callable[..., object]
    _eager: Callable[..., object]
    _flat: Sequence[object]
    _pull: Pull | None = None
    _inputs: Inputs | None = None  # that lie elsewhere meanwhile
    _saved: Saved | Named | None = None  # what the graph saved, elsewhere, or what is kept of it by name

    def _forward(
        self, tensors: Tensors, wanted: Sequence[int], derived: bool, gather_ahead: Callable[[], None]
    ) -> Tensors:
        raise NotImplementedError

    def restored(self, saved: Tensors) -> Tensors:
        return self._inputs.restored(saved) if self._inputs is not None else saved

    def derived(self, fn: Callable[..., Tensors]) -> Op:
        self.traversal.schedule.note_use(self.keys)
        self.signature.straight = False  # that would hold the params from one derivative to the next
        return super().derived(fn)

    def back(
        self, tensors: Callable[[], Tensors], wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor] | None:
        traversal, schedule = self.traversal, self.traversal.schedule
        with traversal.turn:
            keep = ends = traversal.retain_graph or private.keeps_graph()
            if self.used:
                raise RuntimeError(used_up(f"unit {self.unit!r}"))
            if self.recompute:
                gather_previous = functools.partial(schedule.gather_previous, self)
                with torch.no_grad():
                    self._run_again(tuple([t.detach() for t in tensors()]), wanted, gather_previous)
                keep = False
                if schedule.frees:
                    schedule.finish_reductions()
            elif self._pull is None:
                return None
            else:
                self._refill()
                schedule.gather_previous(self)
            assert self._pull is not None
            leaves, inputs, outputs, surroundings = self._pull
            sizes, flat = list[tuple[Key, int]](), list[torch.Tensor]()
            for key, own in leaves.items():
                sizes.append((key, len(own)))
                flat += own
            flat += inputs.values()
            around = [surroundings()] if surroundings is not None else []
            if keep and self.signature.compiles:
                around = [private.without_donation()]
            run = functools.partial(gradients, outputs, flat, cotangents, keep)
            found = list(within(around, run) if around else run())
            if not self.signature.pulled:
                need_no_strays(f"Unit {self.unit!r}", flat)
                self.signature.pulled = True
            if self._inputs is not None or self._saved is not None:
                self._leave()  # of what does not lead to these outputs
            del flat, run
            # what the unit does not depend on has none: zeros would meet infinite derivatives before it
            out: dict[int, torch.Tensor] = {}
            for i in reversed(inputs):
                if (cotangent := found.pop()) is not None:
                    out[i] = cotangent
            if keep:
                self._empty()
            else:
                self._pull, self._fulls = None, {}
                del outputs, leaves, surroundings
            for key, size in reversed(sizes):
                grads = found[len(found) - size :]
                del found[len(found) - size :]
                shard = traversal.collect(key, grads) if traversal.wants(key) else None
                if shard is not None:
                    out[self.keys.index(key)] = shard
            if not ends:
                self.forget()
            return out

    def _run_again(self, tensors: Tensors, wanted: Sequence[int], gather_ahead: Callable[[], None]) -> None:
        with self.ambient.again():
            self._forward(tensors, wanted, True, gather_ahead)

    def forget(self) -> None:
        """Lets go of the call: an output may lie in an object that it was given, and leads to it by its graph."""
        self.used, self._pull, self._inputs, self._saved = True, None, None, None
        self._flat, self.unit_fn, self._eager = (), _forgotten, _forgotten

    def _leave(self) -> None:
        for activations in (self._inputs, self._saved):
            if activations is not None:
                activations.leave()

    def gather_ahead(self) -> None:
        """Starts to gather what the pullback of this call will need, where the pass that is running comes to it.

        That it still exists says nothing: whether what nobody needs is collected yet may differ between ranks.
        """
        node = self.node() if self.node is not None else None
        if node is None or not private.will_run(node):
            return
        for activations in (self._inputs, self._saved):
            if activations is not None:
                activations.start()
        if self.recompute:
            self.traversal.schedule.gather_ahead(self.keys)
        elif self._pull is not None:
            self._start_refill()

    def fetch_ahead(self) -> None:
        """Starts to bring to the device what the gather of this call will begin with."""
        node = self.node() if self.node is not None else None
        if node is not None and private.will_run(node) and (self.recompute or self._pull is not None):
            self.traversal.schedule.fetch_ahead(self.keys if self.recompute else [*self._fulls])

    def forget_ahead(self) -> None:
        """Leaves what was gathered ahead and not used."""
        self._leave()
        super().forget_ahead()


def _forgotten(*_: object) -> object:
    raise AssertionError("a call that was let go of")


def used_up(what: str) -> str:
    return (
        f"The pullback of {what} was used up by an earlier call, which freed what it kept. "
        "Pass retain_graph=True to every call but the last."
    )
