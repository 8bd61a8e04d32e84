"""A context variable with another value inside a block."""

from __future__ import annotations

import contextvars
from typing import Generic, TypeVar

T = TypeVar("T")


class during(Generic[T]):
    """Inside, a context variable has this value."""

    def __init__(self, variable: contextvars.ContextVar[T], value: T) -> None:
        self.variable, self.value = variable, value

    def __enter__(self) -> None:
        self.token = self.variable.set(self.value)

    def __exit__(self, *_: object) -> None:
        self.variable.reset(self.token)
