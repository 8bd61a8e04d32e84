"""A call leaves the private copy of a module as it found it: what was written to it is undone, buffers are refused."""

from __future__ import annotations

import collections
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fzero import _private
from fzero._private_copy import Stale
from fzero._reach import REGISTRIES, Reach


@dataclass(eq=False)
class _Held:
    """A holder of values (attributes, a container, a closure's cell), and what it held before."""

    path: str
    holder: Any
    registry: str = ""
    before: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.before, self.keys = self.now(), tuple(self.holder) if isinstance(self.holder, dict) else ()

    def now(self) -> tuple[Any, ...]:
        if isinstance(self.holder, dict):
            return tuple(self.holder.values())
        return (self.holder.cell_contents,) if isinstance(self.holder, types.CellType) else tuple(self.holder)

    def restore(self) -> list[str]:
        """Puts back what was there; the names of what was written."""
        now, before = self.now(), self.before
        if isinstance(self.holder, dict):
            keys = tuple(self.holder)
            if keys == self.keys and len(now) == len(before) and all(map(operator.is_, now, before)):
                return []
            old, new = dict(zip(self.keys, before, strict=True)), dict(self.holder)
            self.holder.clear()
            self.holder.update(old)
            return [name for name in {**old, **new} if old.get(name, self) is not new.get(name, self)]
        if len(now) != len(before) or not all(map(operator.is_, now, before)):
            if isinstance(self.holder, types.CellType):
                self.holder.cell_contents = before[0]
            elif isinstance(self.holder, set):
                self.holder.clear()
                self.holder.update(before)
            else:
                self.holder.clear()
                self.holder.extend(before)
        return []


@dataclass(eq=False)
class _Constant:
    """A tensor of the copy that is no param (a buffer, or one in an attribute), and the one that it was copied from."""

    path: str
    label: str
    tensor: torch.Tensor
    source: torch.Tensor
    version: int = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.version, self.address = self.tensor._version, _address(self.tensor)

    def changed(self, thoroughly: bool) -> bool:
        if self.tensor._version != self.version or _address(self.tensor) != self.address:
            return True
        return thoroughly and not _same(self.tensor, self.source)


def _address(tensor: torch.Tensor) -> int:
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # its `.data` was set to what a functorch level computed
        return -1


def _same(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the values are the same, as far as there are values; NaN is NaN."""
    if tensor.is_meta or not _address(tensor) or _private.dispatches():
        return True
    with _private.no_levels():
        if torch.equal(tensor, source):
            return True
        return bool(((tensor == source) | (tensor.isnan() & source.isnan())).all())


class Untouched:
    """How the copy was before a call, and the way back to it.

    Args:
        sources: id of a tensor of the copy -> the tensor that it was copied from.
    """

    def __init__(self, module: nn.Module, reach: Reach, sources: Mapping[int, torch.Tensor]) -> None:
        self.depth = 0  # of calls that are running
        self.dirty = False  # whether something ran outside of a call: a unit that is recomputed
        self.broken = False  # whether a tensor was written to: the copy is then made anew
        self.thorough = True  # until a call has passed: what goes past the version counters (.data) does so at once
        registries = {id(getattr(m, name)): name for m in module.modules() for name in REGISTRIES}
        names = {id(buffer): name for name, buffer in module.named_buffers()}
        leading = reach.reaching(reach.owned)
        self._held: list[_Held] = []
        self._constants: list[_Constant] = []
        for number, x in reach.objects.items():
            owner = reach.owner(number)
            if isinstance(x, types.CellType) and number in leading:
                self._held.append(_Held(owner, x))
            if number not in reach.owned or isinstance(x, weakref.ProxyTypes):
                continue
            if isinstance(x, torch.Tensor):
                if number in sources and not isinstance(x, Stale):
                    label = f"its buffer {names[number]!r}" if number in names else f"the tensor of {reach.way(number)}"
                    self._constants.append(_Constant(owner, label, x, sources[number]))
                continue
            if isinstance(x, (list, set, dict, collections.deque)):
                self._held.append(_Held(owner, x, registries.get(number, "")))
            if isinstance(getattr(x, "__dict__", None), dict):
                self._held.append(_Held(owner, vars(x)))
        self._indexed = False

    def _index(self) -> None:
        """What is compared after every call, flat, as most copies are as they were."""
        full = [held for held in self._held if held.before]
        self._empty = [held.holder for held in self._held if not held.before]
        dicts = [held for held in full if isinstance(held.holder, dict)]
        self._dicts, self._sizes = [held.holder for held in dicts], [len(held.before) for held in dicts]
        self._views = [held.holder.values() for held in dicts]
        self._values = [value for held in dicts for value in held.before]
        self._others = [held for held in full if not isinstance(held.holder, dict)]
        self._indexed = True

    def _is(self) -> bool:
        if not self._indexed:
            self._index()
        if any(self._empty) or list(map(len, self._dicts)) != self._sizes:
            return False
        if not all(map(operator.is_, itertools.chain.from_iterable(self._views), self._values)):
            return False
        if any(constant.changed(self.thorough) for constant in self._constants):
            return False
        return all(
            len(now := held.now()) == len(held.before) and all(map(operator.is_, now, held.before))
            for held in self._others
        )

    def part(self, path: str) -> Untouched:
        """The same for what belongs to a submodule."""
        out = object.__new__(Untouched)
        out.depth, out.dirty, out.broken, out.thorough = 0, False, False, False

        def inside(owner: str) -> bool:
            return not path or owner == path or owner.startswith(path + ".")

        out._held = [held for held in self._held if inside(held.path)]
        out._constants = [constant for constant in self._constants if inside(constant.path)]
        out._indexed = False
        return out

    def around(self, run: Callable[..., Any], part: Untouched) -> Callable[..., Any]:
        """A function that leaves a part as it found it where no call is running: where a pullback recomputes a unit."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return run(*args, **kwargs)
            self.dirty = True  # hooks may have written beyond the part
            try:
                return run(*args, **kwargs)
            finally:
                part.restore()
                self.broken = self.broken or part.broken

        return call

    def written(self, attributes: dict[str, Any], name: str) -> None:
        """Takes what was just written to the attributes of a module for how it was before."""
        for held in self._held:
            if held.holder is attributes:
                old = dict(zip(held.keys, held.before, strict=True))
                old[name] = attributes[name]
                held.before, held.keys = tuple(old.values()), tuple(old)
                self._indexed = False

    def enter(self) -> None:
        if self.dirty and not self.depth:
            self.restore()
            self.dirty = False
        self.depth += 1

    def leave(self) -> list[str]:
        """Puts everything back after the outermost call; says which buffers, params and submodules were changed."""
        self.depth -= 1
        return [] if self.depth else self.restore()

    def restore(self) -> list[str]:
        if self._is():
            return []
        said = [constant.label for constant in self._constants if constant.changed(self.thorough)]
        self.broken = self.broken or bool(said)
        for held in self._held:
            names = held.restore()
            if held.registry:
                dots = held.path + "." if held.path else ""
                said += [f"its {REGISTRIES[held.registry]} {dots + name!r}" for name in names]
        return said


def refuse_changes(said: list[str]) -> None:
    if said:
        raise ValueError(
            f"The module changed {said[0]} in its forward (batch norm in training mode changes its buffers); buffers "
            "and what a module consists of are constants of the function. Call module.eval() before fz.functional, "
            "use a layer without running statistics (group norm, layer norm), or take what changes as an argument of "
            "forward and return its next value."
        )


def refuse_in_place(error: RuntimeError, module: nn.Module) -> None:
    """Names the submodule that a functorch level did not let write to its buffer."""
    if "would mutate a captured Tensor" not in str(error):
        return
    paths = {id(child): path for path, child in module.named_modules()}
    place, trace = None, error.__traceback__
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        place = own if id(own) in paths else place
        trace = trace.tb_next
    if place is None:
        return
    dots = paths[id(place)] + "." if paths[id(place)] else ""
    held = {**place._buffers, **{name: x for name, x in vars(place).items() if isinstance(x, torch.Tensor)}}
    names = [repr(dots + name) for name, x in held.items() if x is not None]
    if names:
        refuse_changes([("one of its tensors " if len(names) > 1 else "its buffer ") + ", ".join(names)])
