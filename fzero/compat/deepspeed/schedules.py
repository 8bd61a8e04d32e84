"""fz.compat.deepspeed_schedule: DeepSpeed's schedules, as functions of the number of updates."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Mapping

from fzero.base.arguments import need_bool, need_int, need_number, wrong
from fzero.table.optimizer import Schedule

_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
# what each takes, with its defaults; REQUIRED has none
REQUIRED = object()
PARAMS: dict[str, dict[str, object]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP},
    "WarmupDecayLR": {"total_num_steps": REQUIRED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARMUP},
    "WarmupCosineLR": {"total_num_steps": REQUIRED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_WARMUP},
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
_WHO = "compat.deepspeed_schedule"
_COUNTS = ("warmup_num_steps", "total_num_steps", "lr_range_test_step_size")


def deepspeed_schedule(type: str, lr: float | None = None, *, momentum: bool = False, **params: object) -> Schedule:
    """One of DeepSpeed's learning-rate schedules, for the `lr` of an optimizer.

    As in DeepSpeed, the first update has the lowest rate: the k-th one, from 0, has that of iteration k - 1. An update
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
    known = PARAMS[type]
    for name in params:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"{_WHO}: got {name}= for {type}, expected {' or '.join(near or known)}.")
    if missing := [name for name, default in known.items() if default is REQUIRED and name not in params]:
        raise TypeError(f"{_WHO}: {type} needs {missing[0]}=.")
    need_bool(momentum, _WHO, "momentum")
    if lr is not None:
        need_number(lr, _WHO, "lr", "a number or None")
    elif type == "WarmupCosineLR" or (type == "WarmupLR" and params.get("warmup_max_lr") is None):
        raise TypeError(f"{_WHO}: {type} needs lr=, the rate of the optimizer.")
    if momentum and type != "OneCycle":
        raise ValueError(f"{_WHO}: got momentum=True for {type}, expected it for OneCycle alone.")
    numbers = {**known, **{name: value for name, value in params.items() if value is not None}}
    for name, value in numbers.items():
        _need(name, value, known[name])
    return functools.partial(_momentum if momentum else _FUNCTIONS[type], lr, numbers)


def _need(name: str, value: object, default: object) -> None:
    """A parameter is of the kind of its default."""
    if isinstance(default, bool):
        need_bool(value, _WHO, name)
    elif isinstance(default, str):
        if value not in ("log", "linear"):
            raise ValueError(f"{_WHO}: got {name}={value!r}, expected 'log' or 'linear'.")
    elif name in _COUNTS:
        need_int(value, _WHO, name, "a number of updates", least=1)
    elif value is not None:
        need_number(value, _WHO, name)
        if name == "cycle_first_step_size" and value == 0:
            raise ValueError(f"{_WHO}: got {name}=0, expected more than 0 updates.")


Numbers = Mapping[str, float]  # and the word of a warm-up


def _share(p: Numbers, i: int) -> float | None:
    """How much of the warm-up is done at an iteration; None behind it."""
    steps = max(2, p["warmup_num_steps"])
    if i >= steps:
        return None
    return i / steps if p["warmup_type"] == "linear" else math.log(max(i, 0) + 1) / math.log(steps)


def _warmup(lr: float | None, p: Numbers, count: int) -> float:
    """WarmupLR and, where there is a total, WarmupDecayLR."""
    low, top, i = p["warmup_min_lr"], p["warmup_max_lr"], max(0, count - 1)
    top = lr if top is None else top
    assert top is not None
    share = _share(p, i)
    if share is None:
        total, steps = p.get("total_num_steps"), max(2, p["warmup_num_steps"])
        share = 1.0 if total is None else max(0.0, (total - i) / max(1.0, total - steps))
    return low + (top - low) * share


def _cosine(lr: float, p: Numbers, count: int) -> float:
    if count == 0:
        return 0.0
    low, end, i = p["warmup_min_ratio"], p["cos_min_ratio"], count - 1
    if (share := _share(p, i)) is not None:
        return lr * (low + (1 - low) * share)
    steps = max(2, p["warmup_num_steps"])
    progress = min(1.0, (i - steps + 1) / max(1, p["total_num_steps"] - steps))
    return lr * max(0.0, end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)


def _range_test(lr: float | None, p: Numbers, count: int) -> float:
    interval = count / p["lr_range_test_step_size"]
    interval = math.floor(interval) if p["lr_range_test_staircase"] else interval
    return p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * interval)


def _height(p: Numbers, count: int) -> tuple[float, float | None]:
    """How high in the cycle an update is, from 0 to 1, and how far behind it, in steps of its decay."""
    first = float(p["cycle_first_step_size"])
    second = first if p["cycle_second_step_size"] is None else float(p["cycle_second_step_size"])
    total, at = first + second, count % (first + second)
    if count - 1 >= total:
        return 0.0, (count - total) / p["decay_step_size"] if p["decay_step_size"] else None
    stairs = p["cycle_first_stair_count"]
    if at > first and p["cycle_second_stair_count"] is not None:
        stairs = p["cycle_second_stair_count"]
    # stairs are counted before the division, which may end just below one
    over, of = (at, first) if at <= first else (total - at, second)
    return math.floor(over * stairs / of) / stairs if stairs else over / of, 0.0


def _one_cycle(lr: float | None, p: Numbers, count: int) -> float:
    height, behind = _height(p, count)
    rate = p["cycle_min_lr"] + (p["cycle_max_lr"] - p["cycle_min_lr"]) * height
    return rate / (1 + p["decay_lr_rate"] * behind) if behind else rate


def _momentum(lr: float | None, p: Numbers, count: int) -> float:
    if count == 0:  # as DeepSpeed begins
        return p["cycle_min_mom"]
    height, behind = _height(p, count)
    momentum = p["cycle_max_mom"] - (p["cycle_max_mom"] - p["cycle_min_mom"]) * height
    return momentum * (1 + p["decay_mom_rate"] * behind) if behind else momentum


_FUNCTIONS: dict[str, Callable[..., float]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup,
    "WarmupCosineLR": _cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
