"""One run of a unit's function: its arguments are put together, and its result is taken apart and made outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fzero.base import collecting, private, pytree, refusals, texts
from fzero.base.carriers import VALUES, changing, flatten, flatten_first, map_changing
from fzero.base.context import during, in_function
from fzero.base.node import Op
from fzero.base.places import definition_of
from fzero.base.refusals import noted
from fzero.engine.outlets import Recipe, Takes, alike, leaving
from fzero.engine.signature import Signature
from fzero.engine.traversal import Traversal, current, here, known
from fzero.purity.observer import Impure, refusal
from fzero.table.placements import Mark, Notes, hand_on, marks_of, notes


@dataclass(frozen=True)
class _Own:
    """Stands in a result for an object among the arguments, by its number. A leaf of pytrees."""

    number: int


class CalledOp(Op):
    """A unit's call, as far as its function goes."""

    traversal: Traversal
    signature: Signature
    _eager: Callable[..., object]
    _flat: Sequence[object]  # its arguments, flat
    _spec: pytree.Spec
    _takes: Takes | None = None  # how tensors left its first run
    _recipes: Sequence[Recipe] = ()
    _spec_out: pytree.Spec
    _notes: Notes | None  # of what varies over an axis, where the function around it is followed
    _noted: Sequence[Mark | None]  # how its tensors vary
    _marks: Sequence[Mark | None] = ()  # how those of its result do
    _begun: Mapping[str, int] | None = None  # how much Hugging Face's lists had when it ran first

    @property
    def unit(self) -> str:
        return self.signature.unit

    def _called(
        self, fn: Callable[..., object], leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Sequence[object]:
        """The flat result of the function."""
        traversal, signature, known_marks = self.traversal, self.signature, self._notes
        filled, numbers = list(self._flat), dict[int, int]()
        present: dict[tuple[Traversal, int], torch.Tensor] = {}
        if not signature.proven:  # below a level of torch.func a class may show that does not outside
            signature.dressed = signature.dressed or any(type(x) is not torch.Tensor for x in tensors)
        if signature.dressed:
            outer = [self._flat[place] for place in signature.tensors]
            tensors = [alike(x, cast(torch.Tensor, y)) for x, y in zip(tensors, outer, strict=True)]
        if known_marks is not None:
            hand_on(known_marks, self._noted, tensors)
        for place, index in signature.handles:
            filled[place] = x = leaves[index]
            numbers[id(x)], present[traversal, index] = index, x
        for place, x in zip(signature.tensors, tensors, strict=True):
            index = traversal.origins.get(id(filled[place]))
            if index is not None:
                numbers[id(x)] = index
            filled[place] = x
        made: Any = self._spec.unflatten(filled)
        args, kwargs = made
        inner = changing((args, kwargs)) if signature.carriers else []
        own, others = collecting.OfUnit(), collecting.inside(self._begun) if signature.collectors else None
        tokens = current.set(None), here.set(present), known.set((traversal, numbers)), in_function.set(True)
        collected = collecting.current.set(own)
        try:
            if known_marks is None and not signature.collectors:
                result = fn(*args, **kwargs)
            else:
                following = during(notes, known_marks) if known_marks is not None else _NOTHING
                with others or _NOTHING, following:
                    result = fn(*args, **kwargs)
        except Exception as error:
            if not signature.proven and not signature.carriers:  # somebody around may catch it
                need_same_arguments((args, kwargs), filled, self._spec)
            if isinstance(error, RuntimeError):
                raise self._refused(error) from error
            raise
        finally:
            current.reset(tokens[0])
            here.reset(tokens[1])
            known.reset(tokens[2])
            in_function.reset(tokens[3])
            collecting.current.reset(collected)
        if signature.carriers:  # the caller's own are changed as these are
            result = taken_apart(result, inner)
        if others is not None:
            self._begun = others.begun
        taken = collecting.taken_of(own, others) if own or others is not None else None
        if not signature.proven:
            signature.collects = signature.collects or taken is not None
        if signature.collects:
            result = result, taken
        elif taken is not None:
            raise ValueError(
                f"Unit {self.unit!r} collects {next(iter(taken[0] or taken[1]))!r}, which it did not do in its first "
                "run. Decide that by an argument, or collect a zero."
            )
        out, self._spec_out = flatten(result)
        for x in out:
            if type(x) not in signature.returns:
                out, self._spec_out = self._of_new_types(result)
                break
        if not signature.proven and not signature.carriers:
            need_same_arguments((args, kwargs), filled, self._spec)
        if not signature.proven:
            need_made_again(self.unit, fn, self._spec_out, out)
        if known_marks is not None:
            self._marks = marks_of(known_marks, [x for x in out if isinstance(x, torch.Tensor)])
        return out

    def _of_new_types(self, result: object) -> tuple[list[object], pytree.Spec]:
        """A flat result with types that no call under this signature has returned before."""
        out, spec = flatten_first(result)
        signature, types = self.signature, {type(x) for x in out}
        known = signature.opaque.union(VALUES)
        new = [kind for kind in types if not issubclass(kind, torch.Tensor) and kind not in known]
        if signature.proven and new:
            what = f"returns an object of type {' or '.join(kind.__name__ for kind in new)}, as its first run did not"
            instead = "Return what pytrees are made of (a tuple, a list, a dict, a NamedTuple, a dataclass)."
            raise noted(refusal(f"Unit {self.unit!r}", Impure(what, None, instead), definition_of(self._eager)))
        signature.returns |= types
        return out, spec

    def _refused(self, error: RuntimeError) -> Exception:
        """What is said of an error of torch's."""
        if texts.says(error, texts.WRITES_LEAF):
            return ValueError(refusals.writes_leaf(self.unit))
        if texts.says(error, *texts.FREED):
            return ValueError(refusals.freed(f"{self.name}{refusals.place_of(error)}"))
        if texts.says(error, texts.UNDER_HOOKS):
            return TypeError(refusals.under_hooks(self.unit))
        if texts.says(error, *refusals.of_derivatives()):
            return TypeError(refusals.twice(self.unit, error))
        if texts.says(error, texts.OF_ENDED):
            what = "closes over a tensor that was computed inside a torch.func transform, which has ended"
            return refusal(self.name.capitalize(), Impure(what, None, "Give it to the call as an argument."), None)
        return error

    def _refuse_writes(self, fulls: Sequence[torch.Tensor], entered: Sequence[int]) -> None:
        """Says what was written to in place."""
        if private.versions(fulls) != entered[: len(fulls)]:
            raise ValueError(refusals.writes_leaf(self.unit))
        raise ValueError(
            f"Unit {self.unit!r} changes one of its inputs in place, which it did not do in its first run. Write "
            "to a copy: x = x.clone(), or use the operation that is not in place."
        )

    def _let_out(
        self,
        out: Sequence[object],
        leaves: Mapping[int, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        fulls: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        """The tensors that leave the node: as those of its first run did."""
        if self._takes is not None:
            return [out[i].clone() if copied else out[i] for i, copied in self._takes]  # type: ignore[attr-defined]
        outer: Any = list(map(self._flat.__getitem__, self.signature.tensors))
        try:
            put, self._takes, self._recipes = leaving(out, inputs, outer, leaves.values(), fulls, self.signature.grad)
        except Impure as error:
            raise noted(refusal(f"Unit {self.unit!r}", error)) from None
        return put

    def _outside(self, out: Sequence[torch.Tensor], carriers: Sequence[object]) -> object:
        """The call's result, of what its node has put out.

        Args:
            carriers: the objects among its arguments whose content the function may have changed.
        """
        result: list[object] = []
        for recipe in self._recipes:
            result.append(out[recipe] if isinstance(recipe, int) else recipe.outside(out))
        self._recipes = ()
        if (known_marks := self._notes) is not None:
            hand_on(known_marks, self._marks, [x for x in result if isinstance(x, torch.Tensor)])
        made: Any = self._spec_out.unflatten(result)
        if self.signature.collects:
            made, taken = made
            if taken is not None:
                collecting.put(taken)
        return put_together(made, carriers) if carriers else made


def need_made_again(unit: str, fn: object, spec: pytree.Spec, leaves: Sequence[object]) -> None:
    """Refuses what a unit is given or returns if it cannot be made of its parts."""
    try:
        pytree.unflatten(spec, leaves)
    except TypeError as error:
        what = "is given or returns a container that cannot be made again of its parts, such as a NamedTuple"
        instead = "Leave __new__ out, or take a dataclass."
        impure = Impure(f"{what} with a __new__ of its own", None, instead)
        raise noted(refusal(f"Unit {unit!r}", impure, definition_of(fn))) from error


def need_read_again(flat: Sequence[object]) -> None:
    """Refuses an argument that can be read once: a unit runs again."""
    for x in flat:
        if isinstance(x, Iterator):
            raise noted(
                TypeError(
                    f"A unit is given a {type(x).__name__}, which can be read once, and it may run again. "
                    "Give it a list: list(...)."
                )
            )


def taken_apart(result: object, inner: Sequence[object]) -> object:
    """A result beside the objects whose content the function may have changed."""
    return map_changing(lambda x: next((_Own(i) for i, y in enumerate(inner) if x is y), x), result), inner


def put_together(made: Any, carriers: Sequence[object]) -> object:
    """A result; the caller's objects get the content of the function's."""
    for x, new in zip(carriers, made[1], strict=True):
        vars(x).clear()
        vars(x).update(vars(new))
    return pytree.map_leaves(lambda x: carriers[x.number] if isinstance(x, _Own) else x, made[0])


def need_same_arguments(given: object, filled: Sequence[object], spec: pytree.Spec) -> None:
    """Refuses a function that has changed a list or a dict among its arguments."""
    now, own = flatten(given)
    if own != spec or any(x is not y for x, y in zip(now, filled, strict=True)):
        raise noted(
            Impure(
                "changes a list, a dict or another object among its arguments",
                None,
                "Return what is new. An object that is there to be changed, such as a cache, is registered: "
                "fz.register_carrier.",
            )
        )


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
