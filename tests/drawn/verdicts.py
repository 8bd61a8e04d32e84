"""What a run shows: equal, refused, silent, raw or hang; and the comparison and the look at errors that decide it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch

import fzero

RTOL, FLOOR = 1e-10, 1e-3  # relative to the largest value of a leaf, and to this at least: what cancels leaves noise
BAD = ("silent", "raw", "hang")
KINDS = ("equal", "refused", *BAD, "uncounted")


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        kind: "equal"; "refused" (an error of fzero that says what to do, on every rank); "silent" (other numbers);
            "raw" (any other error, or on some ranks only); "hang"; "uncounted" (plain torch refuses it too).
        reason: a few words, the same for the same cause.
        detail: the whole message, or where the numbers differ.
    """

    kind: str
    reason: str = ""
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.kind in BAD


@dataclass(frozen=True)
class Failure:
    """An error on one rank, as text, so that it travels between processes."""

    type: str
    message: str
    ours: bool  # raised by a statement of fzero
    stopped: bool  # only because another rank stopped
    trace: str


# what the words of a raw error look like, wherever they were raised
RAW = re.compile(
    r"have diverged|'NoneType' object|object has no attribute|Expected all tensors|[Tt]rying to backward through|"
    r"element 0 of tensors|modified by an inplace|unsupported operand|Cannot access data pointer|INTERNAL ASSERT|"
    r"\bmeta\b|positional argument|unhashable|not subscriptable|KeyError|IndexError|out of bounds|vmap: |leaf Variable"
)
NAMES = re.compile(
    r"'[^']+'|\"[^\"]+\"|\b(leaf|unit|input|output|argument|param|buffer|cotangent|state|grads|inputs|loss)\b", re.I
)
SAYS = re.compile(
    r"\b(Pass|Return|Use|Call|Write|Say|Give|Make|Keep|Move|Leave|Clone|Take|Put|Set|Drop|Reduce|Convert|Change|Correct|"
    r"Wrap|Compute|Add|Let|Read|Run|Assign|Replace|Choose|Build|Create|Copy|Detach|Expected|instead)\b",
    re.I,
)
PACKAGE = str(Path(fzero.__file__).parent)


def failure(error: BaseException) -> Failure:
    """An error as it was raised on this rank."""
    import linecache

    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    ours = False
    if last is not None and last.filename.startswith(PACKAGE) and last.lineno is not None:
        ours = linecache.getline(last.filename, last.lineno).lstrip().startswith("raise ")
    kind = type(error).__name__
    trace = "".join(traceback.format_exception(error))[-6000:]
    return Failure(kind, str(error), ours, kind in ("PeerStopped", "SystemExit"), trace)


def of_failures(failures: Sequence[Failure | None]) -> Verdict:
    """The verdict where at least one rank failed."""
    own = [f for f in failures if f is not None and not f.stopped]
    first = own[0] if own else next(f for f in failures if f is not None)
    where = f"\non ranks {[i for i, f in enumerate(failures) if f is not None and not f.stopped]} of {len(failures)}"
    detail = f"{first.type}: {first.message}{where}"
    if not first.ours or not _is_refusal(first):
        return Verdict("raw", f"{first.type}: {shortened(first.message)}", detail + "\n" + first.trace)
    if len(own) < len(failures):
        return Verdict("raw", f"on some ranks only: {shortened(first.message)}", detail + "\n" + first.trace)
    return Verdict("refused", shortened(first.message), detail)


def _is_refusal(f: Failure) -> bool:
    known = f.type in ("TypeError", "ValueError", "RuntimeError", "HandleError")
    return known and not RAW.search(f.message) and bool(NAMES.search(f.message)) and bool(SAYS.search(f.message))


def shortened(message: str) -> str:
    """The first words of a message, without what differs from program to program."""
    text = message.split("\n")[0]
    text = re.sub(r"0x[0-9a-f]+", "...", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'..'", text)
    text = re.sub(r"\(\d[\d, ]*\)|\[[\d, ]*\]", "(..)", text)
    text = re.sub(r"\b(got )(\.?\w+)", r"\1..", text)
    text = re.sub(r"\d+", "N", text)
    return text[:110]


# ---- comparing


def difference(got: Sequence[tuple[str, Any]], want: Sequence[tuple[str, Any]]) -> str | None:
    """The first place where one rank saw something else than the plain run; None where all is equal."""
    for number, ((label, mine), (plain_label, plain)) in enumerate(zip(got, want, strict=False)):
        if label != plain_label:
            return f"order: saw {label!r}, expected {plain_label!r}"
        found = _differs(mine, plain)
        if found:
            return f"{label}: observation {number}, {found}"
    if len(got) != len(want):
        return f"order: saw {len(got)} things, expected {len(want)}"
    return None


def _differs(mine: Any, plain: Any) -> str | None:
    a, spec = optree.tree_flatten(mine, none_is_leaf=True)
    b, other = optree.tree_flatten(plain, none_is_leaf=True)
    if spec != other:
        return f"structure {spec}, expected {other}"
    for place, (x, y) in enumerate(zip(a, b, strict=True)):
        found = _leaf_differs(x, y)
        if found:
            return f"leaf {place}: {found}"
    return None


def _leaf_differs(x: Any, y: Any) -> str | None:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) or type(x) is not type(y):
            return f"{type(x).__name__} {_short(x)}, expected {type(y).__name__} {_short(y)}"
        same = x == y if not hasattr(x, "__dict__") or callable(x) else _differs(vars(x), vars(y)) is None
        return None if same else f"{_short(x)}, expected {_short(y)}"
    if x.shape != y.shape:
        return f"shape {tuple(x.shape)}, expected {tuple(y.shape)}"
    if x.device != y.device:
        return f"on device {x.device}"
    if not x.numel():
        return None
    if x.dtype != y.dtype:
        return f"dtype {x.dtype}, expected {y.dtype}"
    if not x.is_floating_point() and not x.is_complex():
        return None if torch.equal(x, y) else f"{_short(x)}, expected {_short(y)}"
    scale = max(x.abs().max().item(), y.abs().max().item(), FLOOR)
    gap = (x - y).abs().max().item()
    return None if gap <= RTOL * scale else f"off by {gap:.2e}, {gap / scale:.1e} relative"


def _short(value: Any) -> str:
    return repr(value).replace("\n", " ")[:60]


def is_finite(value: Any) -> bool:
    """Whether what the plain run saw is worth comparing with."""
    return all(
        bool(torch.isfinite(leaf).all()) and leaf.abs().max().item() < 1e6
        for leaf in optree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.numel() and (leaf.is_floating_point() or leaf.is_complex())
    )
