"""Values that leave a run of a function by a name: `fz.collect`, and Hugging Face's collector of hidden states."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from fzero.base.arguments import need_str, wrong
from fzero.base.context import during, variable

T = TypeVar("T")
Lists = dict[str, Any]  # name -> a list of what was collected; Hugging Face's has other values beside these
# that of the run that goes on, or of its unit
current: contextvars.ContextVar[Lists | None] = variable("collecting", None)
_HUGGING_FACE = "transformers.utils.output_capturing"


def collect(x: T, name: str) -> T:
    """Lets a value leave the step's function, or a unit, by a name: an auxiliary loss, a statistic of a layer.

    It is differentiable, under every transform. A unit that is recomputed collects it once. A step's metrics have what
    was collected: `metrics["collected"]["aux"]` is a list of all microbatches' values in order, this rank's, detached.
    Outside of a step it does nothing.

    Args:
        x: a tensor.
        name: such as `"aux"`. Several values may have one name.

    Returns:
        `x` itself.

    Raises:
        TypeError: `x` is no tensor, or `name` is no string.

    Example:
        >>> @fz.unit
        ... def block(p, x):
        ...     h = torch.tanh(x @ p["w"])
        ...     fz.collect(h.square().mean(), "aux")
        ...     return h
        >>> def loss(params, x):
        ...     for p in params["blocks"]:
        ...         x = block(p, x)
        ...     return x.sum() + 0.1 * sum(fz.collected("aux"))
        >>> step = fz.train_step(loss, fz.sgd(0.1))
        >>> state = step.init({"blocks": [{"w": torch.eye(2)}]})
        >>> state, metrics = step(state, torch.zeros(1, 2))
    """
    if not isinstance(x, torch.Tensor):
        raise wrong("collect", "x", x, "a tensor")
    need_str(name, "collect", "name", "a name, such as 'aux'")
    own = current.get()
    if own is not None:
        own.setdefault(name, []).append(x)
    return x


def collected(name: str) -> list[torch.Tensor]:
    """What was collected by a name so far in this run of the step's function, in order.

    Args:
        name: as of `fz.collect`.

    Raises:
        RuntimeError: no step's function is running, or one of its units is, which sees its own values only.

    Example:
        >>> def loss(params, x):
        ...     fz.collect(params["w"].square().sum(), "penalty")
        ...     return (params["w"] * x).sum() + sum(fz.collected("penalty"))
        >>> step = fz.train_step(loss, fz.sgd(0.1))
        >>> state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> metrics["collected"]
        {'penalty': [tensor(2.)]}
    """
    need_str(name, "collected", "name", "a name, such as 'aux'")
    own = current.get()
    if own is None:
        raise RuntimeError("collected: no step's function is running here. Call it inside the function of a step.")
    if isinstance(own, OfUnit):
        raise RuntimeError("collected: a unit is running, which sees nothing of others. Call it outside of units.")
    return list(own.get(name, ()))


def _hugging_face() -> contextvars.ContextVar[Lists | None] | None:
    module = sys.modules.get(_HUGGING_FACE)
    return getattr(module, "_active_collector", None)


def open_here() -> tuple[str, ...]:
    """What Hugging Face's collector takes here."""
    if _HUGGING_FACE not in sys.modules:
        return ()
    variable = _hugging_face()
    taken = variable.get() if variable is not None else None
    return tuple(taken) if taken else ()


def run() -> during[Lists | None]:
    """Around a run of a step's function."""
    return during(current, {})


class OfUnit(Lists):
    """The lists of one run of a unit, which sees nothing of others."""


class inside:
    """Around a unit's function while Hugging Face's collector is open, which has lists of its own there, too.

    Attributes:
        begun: how much each list had when the unit was called first, as an empty one takes what a layer is given, too.
    """

    def __init__(self, begun: Mapping[str, int] | None = None) -> None:
        self.begun = begun

    def __enter__(self) -> inside:
        variable = _hugging_face()
        assert variable is not None
        before = variable.get() or {}
        if self.begun is None:
            self.begun = {name: len(values) for name, values in before.items() if isinstance(values, list)}
        self._own: dict[str, Any] = {**before, **{name: [None] * count for name, count in self.begun.items()}}
        self._token = variable.set(self._own)
        return self

    def __exit__(self, *_: object) -> None:
        variable = _hugging_face()
        assert variable is not None
        variable.reset(self._token)

    def taken(self) -> Lists:
        """What was collected inside."""
        return {name: self._own[name][count:] for name, count in (self.begun or {}).items()}


def taken_of(own: Lists, others: inside | None) -> tuple[Lists, Lists] | None:
    """What a unit has collected; None for nothing."""
    theirs = others.taken() if others is not None else {}
    return (dict(own), theirs) if own or any(theirs.values()) else None


def put(taken: tuple[Lists, Lists]) -> None:
    """Adds what a unit has collected to what the function around it has."""
    own = current.get()
    if own is not None:
        for name, values in taken[0].items():
            own.setdefault(name, []).extend(values)
    variable = _hugging_face()
    others = variable.get() if variable is not None else None
    if others is not None:
        for name, values in taken[1].items():
            others[name].extend(values)


def own(note: Callable[[object], None]) -> None:
    """Tells of what has been collected so far in the run that goes on."""
    found = current.get()
    if found:
        note(found)
