"""fz.compat.from_deepspeed: a configuration of DeepSpeed as a step, as fzero's own code, and as a table of its keys."""

from __future__ import annotations

import functools
import json
import os
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fzero.base import pytree
from fzero.base.arguments import need_path, wrong
from fzero.comm import backend
from fzero.comm.backend import Mesh
from fzero.compat.deepspeed.optimizer import optimizer_of
from fzero.compat.deepspeed.reading import HEAD, Reading, Row
from fzero.compat.deepspeed.sections import batch, devices, logs, memory, precision
from fzero.table.needs import need_function

_WHO = "compat.from_deepspeed"
Config = str | os.PathLike[str] | Mapping[str, object]


def from_deepspeed(config: Config, fn: Callable[..., object], **auto: object) -> FromDeepSpeed:
    """Makes a step of a configuration of DeepSpeed.

    Defaults are those of DeepSpeed 0.19, and deprecated names of keys are known. The number of ranks is that of the
    default process group, or 1 if there is none.

    Args:
        config: the path of a JSON file, or a dict.
        fn: `fn(params, *batch) -> loss`, as for `fz.train_step`.
        auto: values for "auto", by the last part of the key (`lr=1e-3`), or by its path if several keys end alike
            (`fp16_enabled=True`). A number for `lr` may be a schedule. If the configuration has no optimizer, `lr=`
            and others make AdamW, and `optimizer=` is taken as it is.

    Returns:
        `made`, with these attributes. `print(made)` shows the report and the code, which can be pasted.

        - `step`: the step. A call is one update, with micro-batch times accumulation examples of this rank.
        - `report`: a tuple `(key, value, verdict, what)` for each key. The verdict is `"honoured"` or `"no effect"`.
        - `code`: the same step in code.
        - `loop`: what it says of logs, for `fz.loop(made.step, state, batches, **made.loop)`.
        - `mesh`: the mesh of tensor or sequence parallelism, or None.

    Raises:
        ValueError: keys that fzero lacks, unknown keys with the nearest known one, values out of range, "auto" without
            a value if numbers depend on it, contradictions. All are in one error.
        TypeError: an argument of another kind.

    Example:
        >>> config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        ...           "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}}
        >>> made = fz.compat.from_deepspeed(config, lambda p, x: (p["w"] * x).sum(), lr=1e-3)
        >>> tuple(made.report[4])
        ('optimizer.params.lr', 0.001, 'honoured', 'fz.adamw')
        >>> print(made.code)
        import torch
        <BLANKLINE>
        import fzero as fz
        <BLANKLINE>
        optimizer = fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(0.001, weight_decay=0.0))
        step = fz.train_step(fn, optimizer)
        step = fz.accumulate(step, 2)
        step = fz.shard_zero2(step)
    """
    need_function(fn, _WHO)
    read = translated(config, auto, backend.size_of(backend.world()) if backend.initialized() else 1)
    if said := refusals(rows := read.report()):
        raise ValueError(said)
    code, made = "\n".join(read.lines), {"fn": fn, **read.given}
    try:
        exec(code, made)  # what is printed is what is run
    except (ValueError, TypeError, ArithmeticError) as error:
        said = f"{_WHO}: the configuration says the step below, which fzero refuses: {error}\n{code}"
        raise ValueError(said) from error
    return FromDeepSpeed(made["step"], rows, code, read.loop, made.get("mesh"))  # type: ignore[arg-type]


@dataclass(frozen=True, repr=False)
class FromDeepSpeed:
    """What `fz.compat.from_deepspeed` returns, which says what is in it."""

    step: typing.Any  # fz.Step, which this wing does not know
    report: tuple[Row, ...]
    code: str
    loop: dict[str, object]
    mesh: Mesh | None = None

    def __repr__(self) -> str:
        return shown(self.report, self.code, self.loop)


def translated(config: Config, autos: Mapping[str, object], ranks: int, names: bool = False) -> Reading:
    """A configuration that was read, with its code; `names` as for `Reading`."""
    r = Reading(_loaded(config), autos, ranks, names)
    devices(r)
    scale, policy = batch(r), precision(r)
    optimizer_of(r, scale)
    r.lines += [f"policy = {policy}"] if policy else []
    r.lines.append(f"step = fz.train_step(fn, optimizer{', policy' if policy else ''})")
    memory(r)
    logs(r)
    r.lines.insert(0, HEAD)
    return r


def refusals(rows: Sequence[Row]) -> str:
    """All of them in one text, or nothing."""
    said = [f"  {row.key}: got {row.value!r}; {row.what}." for row in rows if row.verdict == "refused"]
    return "\n".join([f"{_WHO}: {len(said)} of the keys cannot be honoured:", *said]) if said else ""


def shown(report: Sequence[Row], code: str, loop: Mapping[str, object], arguments: Sequence[str] = ()) -> str:
    """The table, as a comment, and the code, as a function where it has arguments."""
    cells = [("key", "value", "verdict", "what it became")]
    cells += [(row.key, textwrap.shorten(repr(row.value), 30), row.verdict, row.what) for row in report]
    wide = [max([len(row[i]) for row in cells]) for i in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], wide), row[3]]) for row in cells]
    if arguments:
        body = [*code.removeprefix(HEAD).strip().splitlines(), "return step"]
        code = "\n    ".join([f"{HEAD}\n\ndef make_step(fn, {', '.join(arguments)}):", *body])
    ways = "".join([f", {name}={value!r}" for name, value in loop.items()])
    after = f"\n\n# for state, metrics in fz.loop(step, state, batches{ways}):" if loop else ""
    return "\n".join([*[f"# {line}" for line in lines], "", code]) + after


def _loaded(config: Config) -> Mapping[str, object]:
    if isinstance(config, Mapping):
        return config
    path = need_path(config, _WHO, "config", "the path of a JSON file, or a dict")
    try:
        found = json.loads(Path(path).read_text("utf-8"), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{_WHO}: {path}: got no JSON ({error}), expected ds_config.json.") from None
    if isinstance(found, dict):
        return found
    raise ValueError(f"{_WHO}: {path}: got {type(found).__name__}, expected an object with keys.")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{_WHO}: got a key twice in {[key for key, _ in pairs]}, expected each once.")
    return found


def cast_inputs(fn: Callable[..., object], dtype: torch.dtype) -> Callable[..., object]:
    """A step's function with its floating inputs cast, as DeepSpeed's `fp16.auto_cast` does.

    Args:
        fn: `fn(params, *inputs) -> outputs`. Params are left as they are.
        dtype: what floating tensors in the inputs are cast to.

    Raises:
        TypeError: `fn` is no function, or `dtype` no floating dtype.

    Example:
        >>> fz.compat.cast_inputs(lambda p, x: x * p, torch.float16)(2, torch.ones(1))
        tensor([2.], dtype=torch.float16)
    """
    need_function(fn, "compat.cast_inputs")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise wrong("compat.cast_inputs", "dtype", dtype, "a floating dtype, such as torch.float16")
    return functools.partial(_called, fn, dtype)


def _called(fn: Callable[..., object], dtype: torch.dtype, params: object, *inputs: object) -> object:
    floating = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
    return fn(params, *pytree.map(lambda x: x.to(dtype) if floating(x) else x, inputs))
