"""fz.compat.deepspeed_schedule: DeepSpeed's schedules, as functions of the number of updates."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable

from fzero.base.arguments import need_bool, need_number, wrong
from fzero.table.optimizer import Schedule

_WHO = "compat.deepspeed_schedule"
REQUIRED = inspect.Parameter.empty
_OURS = ("count", "lr", "momentum")


def deepspeed_schedule(type: str, lr: float | None = None, *, momentum: bool = False, **params: object) -> Schedule:
    """One of DeepSpeed's learning-rate schedules, for the `lr` of an optimizer.

    As in DeepSpeed, the schedule is one update late: the first two updates have the rate that it begins with. An update
    that is skipped does not count.

    Args:
        type: `"WarmupLR"`, `"WarmupDecayLR"`, `"WarmupCosineLR"`, `"OneCycle"` or `"LRRangeTest"`.
        lr: the optimizer's rate. `"WarmupCosineLR"` multiplies it, and `"WarmupLR"` ends with it if there is no
            `warmup_max_lr`.
        momentum: True gives the momentum of `"OneCycle"` instead, for the `b1` of an optimizer.
        params: the schedule's own, with DeepSpeed's names and defaults.

    Returns:
        A function of the number of updates applied so far.

    Raises:
        TypeError: a parameter that the schedule does not have, or that is missing; one of another kind.
        ValueError: another type, or a number out of its range.

    Example:
        >>> schedule = fz.compat.deepspeed_schedule("WarmupLR", 0.1, warmup_num_steps=10, warmup_type="linear")
        >>> schedule(0), schedule(1), schedule(6), schedule(100)
        (0.0, 0.0, 0.05, 0.1)
    """
    if not isinstance(type, str):
        raise wrong(_WHO, "type", type, f"one of {', '.join(map(repr, PARAMS))}")
    if type not in PARAMS:
        raise ValueError(f"{_WHO}: got type={type!r}, expected one of {', '.join(map(repr, PARAMS))}.")
    need_bool(momentum, _WHO, "momentum")
    if momentum and type != "OneCycle":
        raise ValueError(f"{_WHO}: got momentum=True for {type}, expected it for OneCycle alone.")
    known, given = PARAMS[type], {name: value for name, value in params.items() if value is not None}
    if type == "WarmupCosineLR" or (type == "WarmupLR" and "warmup_max_lr" not in given) or lr is not None:
        need_number(lr, _WHO, "lr", "the rate of the optimizer")
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"{_WHO}: got {name}= for {type}, expected {' or '.join(near or known)}.")
        if isinstance(known[name], bool):
            need_bool(value, _WHO, name)
        elif name == "warmup_type":
            if value not in ("log", "linear"):
                raise ValueError(f"{_WHO}: got {name}={value!r}, expected 'log' or 'linear'.")
        elif need_number(value, _WHO, name) == 0 and name.endswith(("num_steps", "first_step_size", "test_step_size")):
            raise ValueError(f"{_WHO}: got {name}=0, expected a number of updates of at least 1.")
    if missing := [name for name, default in known.items() if default is REQUIRED and name not in given]:
        raise TypeError(f"{_WHO}: got no {missing[0]}=, expected it for {type}.")
    more = {"momentum": True} if momentum else {}
    return functools.partial(_FUNCTIONS[type], lr=lr, **given, **more)


def _share(i: int, steps: int, kind: str) -> float | None:
    """How much of the warm-up is done at an iteration; None behind it."""
    if i >= steps:
        return None
    return i / steps if kind == "linear" else math.log(i + 1) / math.log(steps)


def _warmup(
    count: int, *, lr: float | None, warmup_min_lr: float = 0.0, warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000, warmup_type: str = "log", total_num_steps: int | None = None,
) -> float:  # fmt: skip
    steps, i, top = max(2, warmup_num_steps), max(0, count - 1), lr if warmup_max_lr is None else warmup_max_lr
    assert top is not None
    share = _share(i, steps, warmup_type)
    if share is None:
        end = total_num_steps
        share = 1.0 if end is None else max(0.0, (end - i) / max(1.0, end - steps))
    return warmup_min_lr + (top - warmup_min_lr) * share


def _cosine(
    count: int, *, lr: float, total_num_steps: int, warmup_min_ratio: float = 0.0, warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001, warmup_type: str = "log",
) -> float:  # fmt: skip
    steps, i = max(2, warmup_num_steps), count - 1
    if count == 0:
        return 0.0
    if (share := _share(i, steps, warmup_type)) is not None:
        return lr * (warmup_min_ratio + (1 - warmup_min_ratio) * share)
    progress = min(1.0, (i - steps + 1) / max(1, total_num_steps - steps))
    return lr * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def _range_test(
    count: int, *, lr: float | None, lr_range_test_min_lr: float = 1e-3, lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False,
) -> float:  # fmt: skip
    interval = count / lr_range_test_step_size
    interval = math.floor(interval) if lr_range_test_staircase else interval
    return lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)


def _one_cycle(
    count: int, *, lr: float | None, cycle_min_lr: float, cycle_max_lr: float, decay_lr_rate: float = 0.0,
    cycle_first_step_size: float = 2000, cycle_second_step_size: float | None = None, cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None, decay_step_size: float = 0, cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8, cycle_max_mom: float = 0.9, decay_mom_rate: float = 0.0, momentum: bool = False,
) -> float:  # fmt: skip
    first, stairs = cycle_first_step_size, cycle_first_stair_count
    second = first if cycle_second_step_size is None else cycle_second_step_size
    over, behind = count % (first + second), count - first - second
    of = first
    if over > first:
        over, of = first + second - over, second
        stairs = stairs if cycle_second_stair_count is None else cycle_second_stair_count
    # stairs are counted before the division, which may end just below one
    height = 0.0 if behind > 0 else math.floor(over * stairs / of) / stairs if stairs else over / of
    decays = behind / decay_step_size if behind > 0 and decay_step_size else 0.0
    if not momentum:
        return (cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height) / (1 + decay_lr_rate * decays)
    if count == 0:  # as DeepSpeed begins
        return cycle_min_mom
    return (cycle_max_mom - (cycle_max_mom - cycle_min_mom) * height) * (1 + decay_mom_rate * decays)


_FUNCTIONS: dict[str, Callable[..., float]] = {
    "WarmupLR": _warmup, "WarmupDecayLR": functools.partial(_warmup, warmup_max_lr=0.001), "WarmupCosineLR": _cosine,
    "OneCycle": _one_cycle, "LRRangeTest": _range_test,
}  # fmt: skip
# what each takes, with its default, or REQUIRED
PARAMS: dict[str, dict[str, object]] = {
    kind: {name: p.default for name, p in inspect.signature(function).parameters.items() if name not in _OURS}
    for kind, function in _FUNCTIONS.items()
}
PARAMS["WarmupDecayLR"]["total_num_steps"] = REQUIRED
del PARAMS["WarmupLR"]["total_num_steps"]
