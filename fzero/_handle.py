"""What stands for a leaf of a unit where that unit is not running: it knows its unit, and its values cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fzero import _tree

if TYPE_CHECKING:
    from fzero._traversal import Traversal


class HandleError(AttributeError, TypeError):
    """A leaf of a unit was used where it is not gathered. An AttributeError too, so that `hasattr` answers False."""


class Handle:
    """A leaf of a unit, outside that unit: its shape, dtype and device can be read, its values cannot."""

    __slots__ = ("index", "key", "primal", "traversal")

    def __init__(self, traversal: Traversal, key: str, index: int, primal: torch.Tensor) -> None:
        self.traversal, self.key, self.index, self.primal = traversal, key, index, primal

    @property
    def path(self) -> str:
        return self.traversal.layout.rows[self.index].path

    @property
    def unit(self) -> str:
        return self.traversal.layout.rows[self.index].unit

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.traversal.layout.rows[self.index].shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.traversal.uses[self.key].compute

    @property
    def device(self) -> torch.device:
        return self.primal.device

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def _refuse(self, what: str) -> HandleError:
        return HandleError(
            f"{what}: leaf {self.path!r} belongs to unit {self.unit!r} and is gathered only inside that unit's call. "
            "Pass it to a function wrapped in fz.unit (or let fz.functional call the module), say other units= in "
            "train_step, or differentiate with fz.hvp instead of torch.func over the params."
        )

    def __getattr__(self, name: str) -> Any:
        raise self._refuse(f"got .{name}")

    def __repr__(self) -> str:
        return f"Handle({self.path!r} of unit {self.unit!r}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handle = next(leaf for leaf in _tree.flatten((args, kwargs or {}))[0] if isinstance(leaf, Handle))
        raise handle._refuse(f"got torch function {getattr(func, '__name__', func)!r}")


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: Handle, *_: Any) -> Any:
        raise self._refuse(f"got {name}")

    return method


for _name in (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv floordiv mod matmul rmatmul pow rpow neg abs getitem "
    "setitem len iter contains bool float int index lt le gt ge array"
).split():
    setattr(Handle, f"__{_name}__", _refusing(f"__{_name}__"))
