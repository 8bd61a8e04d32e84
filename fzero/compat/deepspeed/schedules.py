"""fz.compat.deepspeed_schedule: DeepSpeed's schedules, as functions of the number of updates."""

from __future__ import annotations

import difflib
import functools
import math
import typing
from collections.abc import Callable, Mapping

from fzero.base.arguments import need_bool, need_number
from fzero.table.optimizer import Schedule

_WHO = "compat.deepspeed_schedule"
REQUIRED = object()
Given = Mapping[str, typing.Any]  # parameters by their names
_TYPE: dict[str, object] = {"warmup_num_steps": 1000, "warmup_type": "log"}
_WARMUP: dict[str, object] = {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_TYPE}
# what each takes, with its default, or REQUIRED
PARAMS: dict[str, dict[str, object]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {**_WARMUP, "warmup_max_lr": 0.001, "total_num_steps": REQUIRED},
    "WarmupCosineLR": {"total_num_steps": REQUIRED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_TYPE},
    "OneCycle": {
        "cycle_min_lr": REQUIRED, "cycle_max_lr": REQUIRED, "decay_lr_rate": 0.0, "cycle_first_step_size": 2000,
        "cycle_second_step_size": None, "cycle_first_stair_count": 0, "cycle_second_stair_count": None,
        "decay_step_size": 0, "cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}  # fmt: skip


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
    return functools.partial(_FUNCTIONS[type], {"lr": lr, "momentum": momentum, **known, **given})


def _share(p: Given, i: int, steps: int) -> float:
    """How much of a warm-up of so many steps is done at an iteration."""
    return i / steps if p["warmup_type"] == "linear" else math.log(i + 1) / math.log(steps)


def _warmup(p: Given, count: int) -> float:
    low, i, steps, end = p["warmup_min_lr"], max(0, count - 1), max(2, p["warmup_num_steps"]), p.get("total_num_steps")
    top = p["lr"] if p["warmup_max_lr"] is None else p["warmup_max_lr"]
    behind = 1.0 if end is None else max(0.0, (end - i) / max(1.0, end - steps))
    return low + (top - low) * (_share(p, i, steps) if i < steps else behind)


def _cosine(p: Given, count: int) -> float:
    low, end, steps, i = p["warmup_min_ratio"], p["cos_min_ratio"], max(2, p["warmup_num_steps"]), count - 1
    if count == 0:
        return 0.0
    if i < steps:
        return p["lr"] * (low + (1 - low) * _share(p, i, steps))
    progress = min(1.0, (i - steps + 1) / max(1, p["total_num_steps"] - steps))
    return p["lr"] * max(0.0, end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)


def _range_test(p: Given, count: int) -> float:
    interval = count / p["lr_range_test_step_size"]
    interval = math.floor(interval) if p["lr_range_test_staircase"] else interval
    return p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * interval)


def _one_cycle(p: Given, count: int) -> float:
    first, stairs = p["cycle_first_step_size"], p["cycle_first_stair_count"]
    second = first if p["cycle_second_step_size"] is None else p["cycle_second_step_size"]
    over, behind, of = count % (first + second), count - first - second, first
    if over > first:
        over, of = first + second - over, second
        stairs = stairs if p["cycle_second_stair_count"] is None else p["cycle_second_stair_count"]
    # stairs are counted before the division, which may end just below one
    height = 0.0 if behind > 0 else math.floor(over * stairs / of) / stairs if stairs else over / of
    decays = behind / p["decay_step_size"] if behind > 0 and p["decay_step_size"] else 0.0
    if not p["momentum"]:
        low, high = p["cycle_min_lr"], p["cycle_max_lr"]
        return (low + (high - low) * height) / (1 + p["decay_lr_rate"] * decays)
    low, high = p["cycle_min_mom"], p["cycle_max_mom"]
    return low if count == 0 else (high - (high - low) * height) * (1 + p["decay_mom_rate"] * decays)  # as it begins


_FUNCTIONS: dict[str, Callable[[Given, int], float]] = {
    "WarmupLR": _warmup, "WarmupDecayLR": _warmup, "WarmupCosineLR": _cosine, "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}  # fmt: skip
