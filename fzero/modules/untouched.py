"""A private copy's first call must not write to its buffers, nor to the tensors and modules that it consists of.

Nor may it read the tensors of the module that it was copied from. Its other attributes are its own affair, as they are
a module's: a counter counts from call to call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fzero.base import private, pytree, texts
from fzero.base.refusals import noted
from fzero.modules.private_copy import REGISTRIES, Constant
from fzero.purity.observer import looking_at, memory_of

Originals = Mapping[int, tuple[str, weakref.ref[torch.Tensor]]]


def originals_of(module: nn.Module) -> Originals:
    """Id of a param or buffer of a module -> its name, and itself as long as somebody holds it."""
    held = ("param", module.named_parameters()), ("buffer", module.named_buffers())
    return {id(x): (f"{what} {name!r}", weakref.ref(x)) for what, named in held for name, x in named}


class Apart(TorchFunctionMode):
    """Refuses operations on the original's tensors, which code comes to by a global name or a class."""

    def __init__(self, originals: Originals, given: Mapping[str, object]) -> None:
        super().__init__()
        self._originals, self._given = originals, {id(x) for x in given.values()}

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        named: dict[str, object] = kwargs if isinstance(kwargs, dict) else {}
        out = func(*args, **named)
        for x in pytree.tensors_in(*args, *named.values()) if pytree.tensors_in(out) else ():
            name, original = self._originals.get(id(x), ("", lambda: None))
            if original() is x and id(x) not in self._given:
                raise noted(
                    ValueError(
                        f"apply: code that the module runs leads to its {name} as the module had it, by a global name "
                        "or a class, so that its gradient would be lost. Use self, or the module that a hook is given, "
                        "in its place."
                    )
                )
        return out


class Untouched:
    """Refuses a first call that changes the copy, which is of no use then. Later calls are not looked at.

    Args:
        constants: the copy's tensors that are no arguments of its calls.
        originals: `originals_of` the user's module.

    Attributes:
        depth: of calls that are running.
        changed: whether the copy is.
        proven: whether a call has changed nothing.
    """

    def __init__(self, module: nn.Module, constants: Sequence[Constant], originals: Originals) -> None:
        self._originals = originals
        self.depth, self.proven, self.changed = 0, False, False
        # modules' params, buffers and submodules: them, what they are, what is before their names, and what they were
        self._registries: list[tuple[dict[str, object], str, str, dict[str, object]]] = [
            (getattr(own, name), f"its {what}", f"{path}." if path else "", dict(getattr(own, name)))
            for path, own in module.named_modules()
            for name, what in REGISTRIES.items()
        ]
        self._labels = {memory_of(constant.tensor): constant.label for constant in constants}

    @contextlib.contextmanager
    def around_call(self, given: Mapping[str, object]) -> Iterator[None]:
        """Around a call with these params; refuses the first one if it changes the copy, or reads the original."""
        self.depth += 1
        first = self.depth == 1 and not self.proven
        try:
            with self._looked_at(given) if first else contextlib.nullcontext():
                yield
        except RuntimeError as error:
            if texts.says(error, texts.WRITES_CAPTURED):
                raise ValueError(_changed("one of its buffers")) from error
            raise
        finally:
            self.depth -= 1
            said = self._changes() if first else []
            self.changed = bool(said)
        if said:
            raise ValueError(said[0])
        self.proven = self.proven or first

    @contextlib.contextmanager
    def _looked_at(self, given: Mapping[str, object]) -> Iterator[None]:
        with looking_at("apply: the module", {}) as look, Apart(self._originals, given):
            look.labels |= self._labels
            yield

    def _changes(self) -> list[str]:
        """What is to be said of what a call has put elsewhere."""
        said = []
        for of, what, prefix, before in self._registries:
            for name in {**before, **of}:
                if not _alike(before.get(name, self), of.get(name, self)):
                    label = f"{what} {prefix + name!r}"
                    said.append(_changed(label) if name in before else _made(label))
        return said


def _alike(before: object, now: object) -> bool:
    """Tells whether two values are one, also as what torch.func returns of an operation that does nothing."""
    if before is now or not isinstance(now, torch.Tensor) or private.is_mapped(now):
        return before is now
    return private.unwrapped(now) is before  # self.table = self.table.to(x)


def _changed(what: str) -> str:
    if what.startswith("its submodule"):
        return (
            f"The module changed {what} in its forward; what a module consists of is a constant of the function. If "
            "its first forward exchanges it, as for short sequences, call the module once before fz.functional."
        )
    return (
        f"The module changed {what} in its forward; buffers and what a module consists of are constants of the "
        "function. Say apply, params, buffers = fz.functional(module, buffers=True), whose apply takes them and "
        "returns the new ones (make a tensor that is an attribute a buffer first, by self.register_buffer), call "
        "module.eval() before fz.functional, or use a layer without running statistics (group norm, layer norm)."
    )


def _made(what: str) -> str:
    return (
        f"The module made {what} in its forward, expected what it had in fz.functional. Make it in __init__, or call "
        "the module once before fz.functional; what a forward keeps for the next one may be an attribute."
    )
