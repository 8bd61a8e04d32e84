"""fz.testing.strict: not only first runs are proven."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

from fzero.base.context import during, variable

_strict: contextvars.ContextVar[bool] = variable("strict", False)
is_strict: Callable[[], bool] = _strict.get


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """A context in which every run of a step's function and of its units is proven to be pure.

    Outside of it, a first run is. Use it in tests.

    Args:
        enabled: False switches it off inside another one.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> with fz.testing.strict():
        ...     state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> metrics["loss"]
        tensor(2.)
    """
    with during(_strict, enabled):
        yield
