"""What fz.explain says: where values first are not finite, which are too large for a dtype, and the norms of leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

STATE, FORWARD, BACKWARD, UPDATE = "state", "forward", "backward", "update"  # phases


@dataclass(frozen=True)
class Fault:
    """Where values first are not finite.

    Attributes:
        phase: "state" (they came with it), "forward", "backward" or "update".
        kind: "nan" or "inf".
        unit: the path of the unit, "" for what lies outside of units; None where it is not known.
        op: the operator of torch that made them, such as "aten.div.Tensor"; "" where they came as they are.
        pulled: in the backward, the operator of the forward whose pullback it is.
        place: "file:line, in function: `code`" of the caller's line that calls it.
        leaf: the path of the leaf concerned: that came so, that the operator takes, or whose gradient or update is the
            first that is not finite; None for none.
        source: what came so: a leaf, an input; "" where an operator made it.
        rank, microbatch: where it was; None for what all have. Ranks are counted along the data axes, those of a tensor
            axis one after another.
        examples: numbers along the dim of examples, in this rank's batch.
        count, shape, dtype: how many values of what was made are not finite, and of what.
        operands: what the operator took, in words.
        by_scale: whether it is the loss scale's: without it the gradients are finite.
        given: whether somebody wanted it so, an infinite number that the code names or a mask of minus infinity, or the
            engine has made it, as of memory that nobody has written to yet: no fault but where there is no other.
        at: its number among the operations of its rank.
    """

    phase: str
    kind: str
    unit: str | None = None
    op: str = ""
    pulled: str = ""
    place: str = ""
    leaf: str | None = None
    source: str = ""
    rank: int | None = None
    microbatch: int | None = None
    examples: tuple[int, ...] = ()
    count: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    operands: tuple[str, ...] = ()
    by_scale: bool = False
    given: bool = False
    at: int = 0

    def __str__(self) -> str:
        what = {"nan": "NaN", "inf": "an infinity"}[self.kind]
        unit = "" if self.unit is None else f" in unit {self.unit!r}" if self.unit else " outside of units"
        made = f"{what} of {self.op}" if self.op else f"{what} in {self.source}"
        if self.phase == STATE:
            return f"first not finite: {made}{unit}, with which the state came"
        lines = [f"first not finite: {made}{unit}, in the {self.phase}"]
        lines += [f"pulling back {self.pulled}"] if self.pulled else []
        lines += [f"at {self.place}"] if self.place else []
        lines += [f"leaf {self.leaf!r}"] if self.leaf and self.op else []
        if self.rank is not None:
            where = f"rank {self.rank}, microbatch {self.microbatch}"
            lines.append(f"{where}, {_listed(self.examples)}" if self.examples else where)
        if self.count:
            lines.append(f"{self.count} of {math.prod(self.shape)} values, {self.dtype}{list(self.shape)}")
        lines += [f"of {', '.join(self.operands)}"] if self.operands else []
        lines += ["by the loss scale: without it all gradients are finite"] if self.by_scale else []
        return "\n  ".join(lines)


@dataclass(frozen=True)
class Overflow:
    """Values of a unit, finite, that are beyond what a dtype can hold.

    Attributes:
        unit: its path; "" for what lies outside of units.
        phase: "forward" or "backward".
        largest: the magnitude.
        op, place, rank: of the operation that made it.
    """

    unit: str
    phase: str
    largest: float
    op: str
    place: str
    rank: int = 0

    def __str__(self) -> str:
        unit = f"unit {self.unit!r}" if self.unit else "outside of units"
        return f"{unit}, {self.phase}: {self.largest:.4g} of {self.op}" + (f" at {self.place}" if self.place else "")


@dataclass(frozen=True)
class Explanation:
    """What `fz.explain` found in a step, the same on all ranks. `print` it for a report.

    Attributes:
        fault: the first value that is not finite, in the order of the program and the earliest microbatch first. None
            if all is finite. Among its fields: `phase` ("state", "forward", "backward", "update"), `kind` ("nan",
            "inf"), `unit`, `op`, `place` (the line of your code), `leaf`, `rank`, `microbatch`, `examples`, `shape`.
        faults: the first fault of each rank, and those that all ranks have.
        overflows: finite values beyond what `dtype` can hold, each with unit, phase, size, operation and line.
        dtype: the dtype that was asked about.
        norms: `{"params" | "grads" | "updates" | name of a moment: {leaf path: norm over all shards}}`. Params and
            moments are those before the update. An update is what it adds to a leaf.
        loss: the mean over microbatches and ranks. None if the outputs are no scalar.
        grad_norm: the norm of the mean gradient.
        skipped: True if the step skips its update.
    """

    fault: Fault | None
    faults: tuple[Fault, ...]
    overflows: tuple[Overflow, ...]
    dtype: torch.dtype
    norms: Mapping[str, Mapping[str, float]] = field(hash=False)
    loss: float | None
    grad_norm: float
    skipped: bool

    def __str__(self) -> str:
        lines = [str(self.fault or "all values are finite")]
        loss = "" if self.loss is None else f"loss {self.loss:.6g}, "
        lines.append(f"{loss}gradient norm {self.grad_norm:.4g}" + (", update skipped" if self.skipped else ""))
        if self.overflows:
            lines += [f"beyond {torch.finfo(self.dtype).max:.4g}, the largest of {self.dtype}:"]
            lines += [f"  {each}" for each in self.overflows]
        names = list(self.norms)
        paths = list(self.norms["params"])
        wide = max(map(len, (*paths, "leaf")))
        lines.append("  ".join(("leaf".ljust(wide), *[name.rjust(10) for name in names])))
        for path in paths:
            norms = [self.norms[name].get(path) for name in names]
            lines.append("  ".join((path.ljust(wide), *[("" if x is None else f"{x:.4g}").rjust(10) for x in norms])))
        return "\n".join(lines)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(examples: Sequence[int]) -> str:
    """Numbers of examples in words, of many the first."""
    some = ", ".join(map(str, examples[:8])) + (", ..." if len(examples) > 8 else "")
    return f"example {some}" if len(examples) == 1 else f"{len(examples)} examples: {some}"
