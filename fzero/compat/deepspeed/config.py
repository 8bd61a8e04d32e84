"""fz.compat.from_deepspeed: a configuration of DeepSpeed as a step, as fzero's own code, and as a table of its keys."""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fzero.comm import backend
from fzero.comm.backend import Mesh
from fzero.compat.deepspeed.optimizer import optimizer_of
from fzero.compat.deepspeed.reading import WHO, Reading, Row, load
from fzero.compat.deepspeed.sections import batch, devices, memory, monitors, precision
from fzero.table.needs import need_function

HEAD = "import torch\n\nimport fzero as fz"


def from_deepspeed(
    config: str | os.PathLike[str] | Mapping[str, object], fn: Callable[..., object], **auto: object
) -> FromDeepSpeed:
    """Makes a step of a configuration of DeepSpeed.

    `made.step` is the step: `made.step(state, *batch)` is one update, of micro-batch times accumulation examples of
    this rank. `made.report` has a row for each key. `print(made)` shows it, and the same step as code to paste.

    Defaults are those of DeepSpeed 0.19. Keys are read by their DeepSpeed names, deprecated ones too. The world size is
    that of the default process group, or 1 where there is none.

    Args:
        config: a path of a JSON file, or a dict.
        fn: `fn(params, *batch) -> loss`, as for `fz.train_step`.
        auto: values for "auto", by the last part of the key (`lr=1e-3`). If several keys end so, by the whole path
            (`fp16_enabled=True`). Where the configuration has no optimizer, `lr=` and others make AdamW, and
            `optimizer=` takes any. A number for `lr` may be a schedule, unless the configuration has one.

    Returns:
        A `FromDeepSpeed`.

    Raises:
        ValueError, TypeError: keys that fzero does not have, unknown keys with the nearest known one, values out of
            their range, "auto" without a value where numbers depend on it, a contradiction. All of them in one error.

    Example:
        >>> config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        ...           "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}}
        >>> made = fz.compat.from_deepspeed(config, lambda p, x: (p["w"] * x).sum(), lr=1e-3)
        >>> made.report[4]
        Row(key='optimizer.params.lr', value=0.001, verdict='honoured', what='fz.adamw')
        >>> print(made.code)
        import torch
        <BLANKLINE>
        import fzero as fz
        <BLANKLINE>
        optimizer = fz.adamw(0.001, weight_decay=0.0)
        step = fz.train_step(fn, optimizer)
        step = fz.accumulate(step, 2)
        step = fz.shard_zero2(step)
    """
    need_function(fn, WHO)
    tree = load(config)
    ranks = backend.size_of(backend.world()) if backend.initialized() else 1
    read = translated(tree, auto, ranks)
    rows = read.report()
    if refused := [row for row in rows if row.verdict == "refused"]:
        raise ValueError(refusal(refused))
    code = "\n".join([HEAD, "", *read.lines])
    made: dict[str, object] = {"fn": fn, **read.given}
    exec(code, made)  # so that what is printed and what is run cannot differ
    mesh = made.get("mesh")
    assert mesh is None or isinstance(mesh, Mesh)
    return FromDeepSpeed(made["step"], rows, code, read.loop, mesh)


@dataclass(frozen=True, repr=False)
class FromDeepSpeed:
    """What `fz.compat.from_deepspeed` made of a configuration. `print(made)` can be pasted: the table is a comment.

    Attributes:
        step: the step.
        report: a row `(key, value, verdict, what)` for each key. The verdict is "honoured", "no effect" or "refused".
        code: the step as code, which needs your `fn`.
        loop: what the configuration says of logs, as arguments: `fz.loop(made.step, state, batches, **made.loop)`.
        mesh: the mesh of tensor or sequence parallelism, for `fz.parallel.axis(made.mesh, "sp")`. None without.
    """

    step: typing.Any  # fz.Step, which this wing does not know
    report: tuple[Row, ...]
    code: str
    loop: dict[str, object]
    mesh: Mesh | None = None

    def __str__(self) -> str:
        return shown(self.report, self.code, self.loop)

    __repr__ = __str__


def translated(tree: Mapping[str, object], autos: Mapping[str, object], ranks: int, names: bool = False) -> Reading:
    """A configuration that was read, with its code: as arguments for `Reading`."""
    r = Reading(tree, autos, ranks, names)
    devices(r)
    scale = batch(r)
    policy = precision(r)
    optimizer_of(r, scale)
    r.lines += [f"policy = {policy}"] if policy else []
    r.lines.append(f"step = fz.train_step(fn, optimizer{', policy' if policy else ''})")
    memory(r)
    monitors(r)
    return r


def refusal(rows: Sequence[Row]) -> str:
    """All refusals in one text."""
    said = [f"  {row.key}: got {row.value!r}; {row.what}." for row in rows]
    return "\n".join([f"{WHO}: {len(rows)} of the keys cannot be honoured:", *said])


def shown(report: Sequence[Row], code: str, loop: Mapping[str, object], arguments: Sequence[str] = ()) -> str:
    """The table as a comment, and the code, in a function where it has arguments."""
    cells = [("key", "value", "verdict", "what it became")]
    cells += [(row.key, _short(row.value), row.verdict, row.what) for row in report]
    wide = [max([len(row[i]) for row in cells]) for i in range(3)]
    table = ["  ".join([*[cell.ljust(n) for cell, n in zip(row, wide, strict=False)], row[3]]) for row in cells]
    if arguments and code:
        body = code.removeprefix(HEAD).strip().splitlines()
        code = "\n    ".join([f"{HEAD}\n\n\ndef make_step(fn, {', '.join(arguments)}):", *body, "return step"])
    ways = "".join([f", {name}={value!r}" for name, value in loop.items()])
    after = ["", f"# for state, metrics in fz.loop(step, state, batches{ways}):"] if loop and code else []
    return "\n".join([*[f"# {line}" for line in table], "", code, *after]).rstrip()


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 30 else f"{said[:27]}..."
