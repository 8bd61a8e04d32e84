"""What a step carries from one call of its function to the next: from microbatch to microbatch, and in its state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named
from fzero.state.items import CARRY
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec

T = TypeVar("T")


class Carry:
    """The carry of one call, which begins with that of the state; nothing where the step has none.

    Attributes:
        on: whether the step carries anything.
        value: after the runs so far.
    """

    def __init__(self, step: Spec, state: TrainState) -> None:
        self.on = step.carries
        self.begun = self.value = state.extra[CARRY] if self.on else None
        self._count = len(pytree.flatten(self.begun)[0]) if self.on else 0

    def given(self, inputs: Sequence[object]) -> Sequence[object]:
        """The inputs of the next run."""
        return (self.value, *inputs) if self.on else inputs

    def argnums(self, argnums: Collection[int] | None, inputs: Sequence[object]) -> Collection[int] | None:
        """The same inputs' numbers in `given`: the carry is not differentiated."""
        if not self.on:
            return argnums
        own = [i + 1 for i in (range(len(inputs)) if argnums is None else argnums)]
        return frozenset(own) if argnums is None or isinstance(argnums, frozenset) else tuple(own)

    def taken(self, aux: object) -> object:
        """The aux of a run, whose carry is noted for the next one."""
        if not self.on:
            return aux
        assert isinstance(aux, tuple)
        aux, new = aux
        _need_alike(new, self.begun)
        # of its own, as outputs, inputs and what fn closes over are somebody else's
        self.value = pytree.map(torch.clone, new)
        return aux

    def of_inputs(self, cotangents: list[T]) -> list[T]:
        """Those of flat `given` inputs that are the inputs' own."""
        return cotangents[self._count :]

    def beside(self, has_aux: bool, aux: object) -> object:
        """What a verb gives out beside its outputs."""
        return aux if not self.on else (aux, self.value) if has_aux else self.value

    def forget(self) -> None:
        """Holds nothing any more."""
        self.begun = self.value = None

    def kept(self, state: TrainState, skipped: object) -> TrainState:
        """The state after the call: with the new carry, or the old one where the update was skipped."""
        if not self.on:
            return state
        assert isinstance(skipped, torch.Tensor)
        if private.is_wrapper(skipped):  # of the members of a map each has its own
            new = pytree.map(lambda old, own: torch.where(skipped.to(own.device), old, own), self.begun, self.value)
        else:
            new = self.begun if bool(skipped) else self.value
        return state.changed(extra={**state.extra, CARRY: new})


def refuse_carry(step: Spec, who: str) -> None:
    """Refuses a step that carries something where nobody would keep the next one."""
    if step.carries:
        raise TypeError(
            f"{who}: got a step that carries something from call to call (fz.carry), expected one without. Make one "
            "over the same params whose function takes the carry as an input, and give it state.extra['carry']."
        )


def _need_alike(new: object, old: object) -> None:
    (names, leaves, spec), (_, had, expected) = pytree.named_leaves(new), pytree.named_leaves(old)
    if spec != expected:
        raise ValueError(
            f"step: fn's new carry is {named(new)} of structure {spec}, expected that of the one that it was given, "
            f"{expected}. It returns (outputs, new carry), by fz.carry."
        )
    for name, x, y in zip(names, leaves, had, strict=True):
        forms = [(tuple(z.shape), z.dtype) if isinstance(z, torch.Tensor) else type(z) for z in (x, y)]
        if forms[0] != forms[1]:
            raise ValueError(
                f"step: fn's new carry {f'has {named(x)} in {name!r}' if name else f'is {named(x)}'}, expected what is "
                f"like the one that it was given, {named(y)}."
            )
