"""The types of what a step returns, for editors: at run time metrics are a plain dict, and the rest plain tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import torch

State = TypeVar("State", covariant=True)

if TYPE_CHECKING:

    class Metrics(dict[str, torch.Tensor]):
        """0-d tensors by name; "aux" is what the function returned, "leaf_norms" dicts of norms, "collected" lists."""

        @overload
        def __getitem__(self, key: Literal["aux", "leaf_norms", "collected"], /) -> Any: ...
        @overload
        def __getitem__(self, key: str, /) -> torch.Tensor: ...
        def __getitem__(self, key: str, /) -> Any: ...

else:
    Metrics = dict


class Component(Protocol[State]):
    """A component, by the type of its states."""

    @property
    def init(self) -> Callable[..., State]: ...
