"""A private copy's first call must not write to its buffers, nor to the tensors and modules that it consists of.

Nor may it read the tensors of the module that it was copied from. Its other attributes are its own affair, as they are
a module's: a counter counts from call to call.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fzero.base import private, pytree, texts
from fzero.base.refusals import noted
from fzero.modules.private_copy import REGISTRIES, Constant

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


def _same(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Tells whether the values are the same, as far as there are values: batch norms write past the version counter."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided
    if not plain or tensor.is_meta or private.dispatch_modes():
        return True
    return torch.equal(tensor, source) or bool(((tensor == source) | (tensor.isnan() & source.isnan())).all())


class Untouched:
    """Refuses a first call that changes the copy, which is of no use then. Later calls are not looked at.

    Args:
        constants: the copy's tensors that are no arguments of its calls.
        originals: `originals_of` the user's module.
        carries: whether buffers are values of each call, and no constants.

    Attributes:
        depth: of calls that are running.
        changed: whether the copy is.
        proven: whether a call has changed nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        constants: Sequence[Constant],
        originals: Originals,
        carries: bool = False,
    ) -> None:
        self._originals, self._carries = originals, carries
        self.depth, self.proven, self.changed = 0, False, False
        # modules' params, buffers and submodules: them, what they are, what is before their names, and what they were
        self._registries: list[tuple[dict[str, object], str, str, dict[str, object]]] = [
            (getattr(own, name), f"its {what}", f"{path}." if path else "", dict(getattr(own, name)))
            for path, own in module.named_modules()
            for name, what in REGISTRIES.items()
        ]
        self._constants = [(constant, constant.tensor._version) for constant in constants]

    @contextlib.contextmanager
    def around_call(self, given: Mapping[str, object]) -> Iterator[None]:
        """Around a call with these params.

        Raises:
            ValueError: it is the first one, and has changed buffers, params or submodules, or reads the original's.
        """
        self.depth += 1
        try:
            with contextlib.nullcontext() if self.depth > 1 or self.proven else Apart(self._originals, given):
                yield
        except RuntimeError as error:
            if texts.says(error, texts.WRITES_CAPTURED) and (labels := self._written(error)):
                raise ValueError(_changed(labels, self._carries)) from error
            raise
        finally:
            self.depth -= 1
            said = [] if self.depth or self.proven else self._changes()
            self.changed = bool(said)
        if said:
            raise ValueError(said[0])
        self.proven = self.proven or not self.depth

    def _written(self, error: RuntimeError) -> str:
        """What the submodule has that a functorch level did not let write to one of its tensors."""
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        own = next((vars(x) for x in reversed(owners) if isinstance(x, nn.Module)), {})
        held = {id(x) for x in (*own.values(), *own.get("_buffers", {}).values())}
        return " or ".join(constant.label for constant, _ in self._constants if id(constant.tensor) in held)

    def _changes(self) -> list[str]:
        """What is to be said of all that a call has changed."""
        with private.below_transforms():
            said = [
                _changed(constant.label, self._carries)
                for constant, version in self._constants
                if constant.tensor._version != version or not _same(constant.tensor, constant.source)
            ]
        for of, what, prefix, before in self._registries:
            for name in {**before, **of}:
                if not _alike(before.get(name, self), of.get(name, self)):
                    label = f"{what} {prefix + name!r}"
                    said.append(_changed(label, self._carries) if name in before else _made(label))
        return said


def _alike(before: object, now: object) -> bool:
    """Tells whether two values are one, also as what torch.func returns of an operation that does nothing."""
    if before is now or not isinstance(now, torch.Tensor) or private.is_mapped(now):
        return before is now
    return private.unwrapped(now) is before  # self.table = self.table.to(x)


def _changed(what: str, carries: bool) -> str:
    if what.startswith("its submodule"):
        return (
            f"The module changed {what} in its forward; what a module consists of is a constant of the function. If "
            "its first forward exchanges it, as for short sequences, call the module once before fz.functional."
        )
    if carries:
        return (
            f"The module changed {what} in its forward; what a module consists of is a constant of the function, but "
            "for the buffers that it has in fz.functional. Make it one of these (register_buffer, with a tensor)."
        )
    return (
        f"The module changed {what} in its forward (batch norm in training mode changes its buffers); buffers "
        "and what a module consists of are constants of the function. Say apply, params, buffers = "
        "fz.functional(module, buffers=True), whose apply takes them and returns the new ones (make a tensor that is "
        "an attribute a buffer first, by self.register_buffer), call module.eval() before fz.functional, or use a "
        "layer without running statistics (group norm, layer norm)."
    )


def _made(what: str) -> str:
    return (
        f"The module made {what} in its forward, expected what it had in fz.functional. Make it in __init__, or call "
        "the module once before fz.functional; what a forward keeps for the next one may be an attribute."
    )
