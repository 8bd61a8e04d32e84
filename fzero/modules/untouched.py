"""A private copy's first call must not write to its buffers, nor to the tensors and modules that it consists of.

Its other attributes are its own affair, as they are a module's: a counter counts from call to call.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from fzero.base import private, texts
from fzero.base.thread_state import without_dispatch_modes
from fzero.modules.holdings import REGISTRIES, Holdings
from fzero.modules.private_copy import Stale


class _Constant:
    """A tensor of the copy that is no param (a buffer, or one in an attribute), and the one that it was copied from."""

    def __init__(self, label: str, tensor: torch.Tensor, source: torch.Tensor) -> None:
        self.label, self.tensor, self.source, self.state = label, tensor, source, _state(tensor)

    def put_back(self) -> None:
        with torch.no_grad():
            if _address(self.tensor):
                self.tensor.data = self.source.detach().clone()
            else:
                self.tensor.copy_(self.source)
        self.state = _state(self.tensor)

    def changed(self) -> bool:
        return _state(self.tensor) != self.state or not _same(self.tensor, self.source)


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, _address(tensor)


def _address(tensor: torch.Tensor) -> int:
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # its `.data` was set to what a functorch level computed
        return -1


def _same(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Tells whether the values are the same, as far as there are values; NaN is NaN."""
    if tensor.is_meta or not _address(tensor) or private.dispatch_modes():
        return True
    with private.below_transforms():
        if torch.equal(tensor, source):
            return True
        return bool(((tensor == source) | (tensor.isnan() & source.isnan())).all())


class _Registry:
    """A module's params, buffers or submodules, and what they were."""

    def __init__(self, of: dict[str, object], module: nn.Module, what: str, prefix: str) -> None:
        self.of, self.module, self.what, self.prefix, self.before = of, module, what, prefix, dict(of)

    def is_as_it_was(self) -> bool:
        same = [*self.of] == [*self.before]
        return same and all(map(operator.is_, self.of.values(), self.before.values()))


class Untouched:
    """Refuses a first call that changes the copy, and puts back what it has changed. Later calls are not looked at.

    Args:
        sources: id of a tensor of the copy -> the tensor that it was copied from.
        carries: whether buffers are values of each call, and no constants.

    Attributes:
        depth: of calls that are running.
    """

    def __init__(
        self, module: nn.Module, holdings: Holdings, sources: Mapping[int, torch.Tensor], carries: bool = False
    ) -> None:
        self.module, self._carries = module, carries
        self.depth, self._proven = 0, False
        names = {id(buffer): name for name, buffer in module.named_buffers()}
        self._registries = [
            _Registry(getattr(own, name), own, f"its {what}", f"{path}." if path else "")
            for path, own in module.named_modules()
            for name, what in REGISTRIES.items()
        ]
        self._constants: list[_Constant] = []
        for number, x in holdings.objects.items():
            if (
                number in holdings.owned
                and isinstance(x, torch.Tensor)
                and number in sources
                and not isinstance(x, Stale)
            ):
                own = names.get(number)
                if carries and own is not None and x.layout not in texts.COMPRESSED:
                    continue
                label = f"the tensor of {holdings.way(number)}" if own is None else f"its buffer {own!r}"
                self._constants.append(_Constant(label, x, sources[number]))

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        """Around a call.

        Raises:
            ValueError: it is the first one, and has changed buffers, params or submodules.
        """
        self.depth += 1
        try:
            yield
        except RuntimeError as error:
            _refuse_in_place(error, self.module, self._carries)
            raise
        finally:
            self.depth -= 1
            said = [] if self.depth or self._proven else self._restore()
        if said:
            raise ValueError(said[0])
        self._proven = self._proven or not self.depth

    def _restore(self) -> list[str]:
        """Puts back what a call has changed, and returns what is to be said of all of it."""
        written = [constant for constant in self._constants if constant.changed()]
        said = [_changed(constant.label, self._carries) for constant in written]
        with private.below_transforms(), without_dispatch_modes():
            for constant in written:
                constant.put_back()
        for registry in self._registries:
            if not registry.is_as_it_was():
                before, now = registry.before, dict(registry.of)
                what, prefix, module = registry.what, registry.prefix, registry.module
                registry.of.clear()
                registry.of.update(before)
                names = [name for name in {**before, **now} if not _alike(before.get(name, self), now.get(name, self))]
                labels = {name: f"{what} {prefix + name!r}" for name in names}
                said += [_changed(x, self._carries) if n in before else _made(x) for n, x in labels.items()]
                for name in names:  # which an attribute would hide
                    vars(module).pop(name, None)
        return said


def _alike(before: object, now: object) -> bool:
    """Tells whether two values are one, also as what torch.func returns of an operation that does nothing."""
    if before is now or not isinstance(now, torch.Tensor) or private.is_mapped(now):
        return before is now
    return private.unwrapped(now) is before  # self.table = self.table.to(x)


def _changed(what: str, carries: bool) -> str:
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


def _refuse_in_place(error: RuntimeError, module: nn.Module, carries: bool) -> None:
    """Names the submodule that a functorch level did not let write to its buffer."""
    if not texts.says(error, texts.WRITES_CAPTURED):
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
        what = ("one of its tensors " if len(names) > 1 else "its buffer ") + ", ".join(names)
        raise ValueError(_changed(what, carries))
