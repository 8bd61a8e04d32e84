"""Values that lie on a component's ranks, as the controlling process has them: it waits for them where it reads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, Protocol, Self

import torch

from fzero.base.arguments import named
from fzero.checkpoint.save import as_json
from fzero.components.remote.group import Group
from fzero.components.remote.layout import Layout
from fzero.components.remote.link import Arguments
from fzero.components.remote.pull import Leaf
from fzero.components.remote.wire import unpacked
from fzero.state.beyond import Elsewhere


class Owner(Protocol):
    """A component, as what it has made asks it: see `RemoteComponent`."""

    name: str
    group: Group

    def made(self, verb: str, arguments: Arguments, given: Any = None) -> Made: ...

    def called(
        self, verb: str, objects: Arguments, options: Arguments, given: Any, kind: object = None
    ) -> tuple[Made, Any]: ...


class Made:
    """What one call makes: as long as anybody holds a part of it, its ranks know the call."""

    def __init__(self, component: Owner, call: int) -> None:
        self.component, self.call = component, call
        weakref.finalize(self, component.group.forget, call, -1).atexit = False

    def trees(self) -> Any:
        """What the call has returned, without the tensors, waited for."""
        return self.component.group.trees(self.call)


class Away:
    """A part of what a call makes, which its ranks keep for as long as this lives.

    Args:
        whole: whether it is all of its place, and not a part of what another one keeps.
    """

    def __init__(self, made: Made, place: int, whole: bool = True) -> None:
        self.made, self.place = made, place
        if whole:
            weakref.finalize(self, made.component.group.forget, made.call, place).atexit = False

    def __copy__(self) -> Self:
        return self  # what it stands for never changes, and lies there until the last of its handles dies

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def component(self) -> Owner:
        return self.made.component

    @property
    def name(self) -> tuple[int, int]:
        return self.made.call, self.place


class Value(Elsewhere):
    """A tensor that lies elsewhere. Its shape, dtype and values are waited for where they are read.

    `torch.ones_like`, `zeros_like` and `full_like` of it are such values too, at once, and computed where they are
    needed. A sum waits for the tensors and is one. For anything else `fz.fetch` gives the tensor.
    """

    def leaf(self) -> Leaf:
        """What is sent of it."""
        raise NotImplementedError

    def held(self) -> list[Away]:
        """What must lie where it does for as long as this is needed."""
        raise NotImplementedError

    def layout(self) -> Layout:
        """Its layout, waited for."""
        raise NotImplementedError

    def fetched(self) -> torch.Tensor:
        """The whole tensor, waited for: a new one."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layout().shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.layout().dtype

    @property
    def device(self) -> torch.device:
        return torch.device(self.layout().device)

    @property
    def ndim(self) -> int:
        return len(self.layout().shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def detach(self) -> Self:
        return self

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def item(self) -> Any:
        """Its number, of one that has one element; waited for."""
        return self.fetched().item()

    def __add__(self, other: object) -> torch.Tensor:
        return self.fetched() + other if isinstance(other, (Value, torch.Tensor)) else NotImplemented

    def __radd__(self, other: object) -> torch.Tensor:
        return other + self.fetched() if isinstance(other, torch.Tensor) else NotImplemented

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.fetched())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    __hash__ = object.__hash__  # of the handle: it is a key of dicts, and a leaf of trees

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Value, torch.Tensor, Number)) or hasattr(other, "__array__"):
            raise TypeError(
                f"==: got {self!r} and {named(other)}; expected tensors: what a handle stands for lies in another "
                "component. Compare its value: fz.fetch(handle) == ..., or float(handle) == ..., and handles by `is`."
            )
        return NotImplemented

    @classmethod
    def __torch_function__(
        cls, fn: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = dict(kwargs or {})
        numbers = {torch.ones_like: 1, torch.zeros_like: 0}
        if (fn in numbers or fn is torch.full_like) and set(own) <= {"dtype", "fill_value"} and args:
            number = numbers[fn] if fn in numbers else own.get("fill_value", args[1] if len(args) > 1 else None)
            if isinstance(args[0], Value) and isinstance(number, (bool, int, float, complex)):
                return Fill(args[0], number, own.get("dtype"))
        raise TypeError(
            f"torch.{getattr(fn, '__name__', fn)}: got a handle of a value that lies in another component, expected "
            "tensors. fz.fetch(handle) waits for it and gives the tensor; of functions of handles there are ones_like, "
            "zeros_like and full_like, with dtype= alone."
        )


class Handle(Value, Away):
    """A tensor that a call of a component makes and that stays there, until the last handle of it dies."""

    def __init__(self, made: Made, place: int) -> None:
        super().__init__(made, place)
        self._layout: Layout | None = None

    def leaf(self) -> Leaf:
        return "value", self.component.group.settings.identity, self.name

    def held(self) -> list[Away]:
        return [self]

    def layout(self) -> Layout:
        if self._layout is None:
            self._layout = self.component.group.layout_of(self.name)
        return self._layout

    def fetched(self) -> torch.Tensor:
        return self.component.group.fetched(self.leaf())

    def __repr__(self) -> str:
        return f"Handle({self.component.name!r}, call {self.made.call}, tensor {self.place})"


class Fill(Value):
    """A tensor of one number, of the shape of another value."""

    def __init__(self, like: Value, number: complex, dtype: torch.dtype | None) -> None:
        while isinstance(like, Fill):
            like, dtype = like.like, dtype or like.kind
        if not isinstance(like, Handle):
            raise TypeError(f"torch.full_like: got {like!r}, expected the handle of an output, or fz.fetch of this.")
        self.like, self.number, self.kind = like, number, dtype

    def leaf(self) -> Leaf:
        return "fill", *self.like.leaf()[1:], self.number, self.kind

    def held(self) -> list[Away]:
        return [self.like]

    def layout(self) -> Layout:
        layout = self.like.layout()
        return layout._replace(dtype=self.kind or layout.dtype, device="cpu")

    def fetched(self) -> torch.Tensor:
        layout = self.layout()
        return torch.full(layout.shape, self.number, dtype=layout.dtype, device="cpu")

    def __repr__(self) -> str:
        return f"Fill({self.number} like {self.like!r})"


class RemoteTree(Away):
    """Params, grads or moments that lie on a component's ranks.

    Attributes:
        what: of a state it is; "" for grads that a pullback returned.
    """

    def __init__(self, made: Made, place: int, what: str = "", state: Away | None = None) -> None:
        super().__init__(made, place, state is None)
        self.what, self._state = what, state

    def gathered(self, pattern: str | None) -> Any:
        options = {"what": self.what, "pattern": pattern}
        made = self.component.made("gather", {"objects": {"tree": self}, "options": options})
        (skeleton,) = made.trees()
        return unpacked(skeleton, [Handle(made, place).fetched() for place in range(1, skeleton.places + 1)])

    def squares_by_leaf(self) -> Sequence[torch.Tensor]:
        return squares_on(self).fetched().unbind()

    def __repr__(self) -> str:
        return f"RemoteTree({self.what or 'grads'} of {self.component.name!r}, call {self.made.call})"


def absolute(path: str) -> str:
    """A path for ranks that have other working folders."""
    return path if "://" in path else os.path.abspath(path)


def squares_on(node: RemoteTree, state: RemoteState | None = None) -> Handle:
    """The sums of squares of the leaves of grads, and of those that a state keeps with them, as a handle."""
    objects = {"tree": node, **({"state": state} if state is not None else {})}
    return Handle(node.component.made("squares", {"objects": objects, "options": {"what": node.what}}), 1)


class RemoteState(Away):
    """A training state that lies on a component's ranks."""

    @property
    def params(self) -> RemoteTree:
        return self._tree("params")

    @property
    def grads(self) -> RemoteTree:
        return self._tree("grads")

    @property
    def moments(self) -> RemoteTree:
        return self._tree("moments")

    def _tree(self, what: str) -> RemoteTree:
        return RemoteTree(self.made, self.place, what, self)

    @property
    def step(self) -> int:
        """How many updates were applied; waited for."""
        return self._looked_at()["step"]

    @property
    def seed(self) -> int:
        """Of everything random in the run; waited for."""
        return self._looked_at()["seed"]

    def _looked_at(self) -> dict[str, int]:
        return dict(self.component.made("look", {"objects": {"state": self}}).trees())

    def save_to(self, path: str, extra: object) -> None:
        options = {"path": absolute(path), "extra": as_json(extra, "fz.save: extra")}
        self.component.made("save", {"objects": {"state": self}, "options": options}).trees()

    def __repr__(self) -> str:
        return f"RemoteState({self.component.name!r}, call {self.made.call})"
