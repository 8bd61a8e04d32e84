"""torch's own tables of operators and modules, every sample a case that is held to plain torch on two gloo ranks.

Kinds: an operator inside a unit ("inside"), whose outputs leave the unit ("output"), in place ("inplace"), by `fz.hvp`
("hvp"), applied by a parent to another module's weight ("outside"); a module as a unit ("train", "eval"). Each under
ZeRO-3 without remat, with it, and with remat that keeps what has a name in a later unit; each step twice, as the second
run gathers ahead in the order of the first.

Verdicts: "equal"; "refused" by an error of fzero that names the leaf or unit and says what to do; "raw", any other
error; "silent", another number; "apart", ranks that disagree on the verdict; "dead", a process that crashed or hung.
What plain torch itself does not do (no gradient, an error) is no case.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from op_samples import F64, Case, module_cases, modules, operator_cases, operators

import fzero as fz

SCALES = (1.0, 0.5)  # of the loss, one per rank
OPERATORS = ("inside", "output", "inplace", "hvp", "outside")
REMATS = ("", "remat", "remat by name")
BAD = ("raw", "silent", "apart", "dead")

# (kind, operator or module): why its cases are left out
LEFT_OUT = {
    ("hvp", "matrix_exp"): "torch's own second derivative changes by 1 % and more where its direction is scaled by 2",
}

REMEDY = re.compile(
    r"\bfz\.\w|\b(instead|add|build|call|choose|clone|compute|convert|detach|drop|give|initiali[sz]e|keep|leave|make|move|"
    r"pass|put|read|register|replace|return|run|say|set|take|use|wrap|write)\b",
    re.IGNORECASE,
)


# ---- one case


def reference(case: Case, rank: int, moved: bool = False) -> dict[str, Any]:
    """What plain torch says: this rank's loss and cotangents, the mean grads over ranks, the product if asked for.

    Args:
        moved: of params and inputs whose every second element is larger by one unit in the last place.
    """
    nudge = _nudged if moved else torch.clone
    flat, spec = pytree.tree_flatten(case.params)
    losses, found, cotangents, seconds = [], [], [], []
    for scale in SCALES:
        leaves = [nudge(leaf).requires_grad_() for leaf in flat]
        inputs = [torch.tensor(scale, dtype=F64).requires_grad_(), *[nudge(i).requires_grad_() for i in case.inputs]]
        # cloned: what a module changes in place may not be a leaf of autograd
        loss = case.plain(pytree.tree_unflatten(leaves, spec), *[i.clone() for i in inputs])
        grads = torch.autograd.grad(loss, [*leaves, *inputs], allow_unused=True, create_graph=case.hvp)
        grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, [*leaves, *inputs], strict=True)]
        losses.append(loss.detach())
        found.append(grads[: len(leaves)])
        cotangents.append([g.detach() for g in grads[len(leaves) :]])
        seconds.append(leaves)
    means = [torch.stack([g.detach() for g in pair]).mean(0) for pair in zip(*found, strict=True)]
    out = {"loss": losses[rank], "cotangents": cotangents[rank], "grads": pytree.tree_unflatten(means, spec)}
    if case.hvp:
        products = []
        for grads, leaves in zip(found, seconds, strict=True):
            slope = sum((g * v).sum() for g, v in zip(grads, means, strict=True))
            assert isinstance(slope, torch.Tensor)
            second: Any = [None] * len(flat)
            if slope.requires_grad:
                second = torch.autograd.grad(slope, leaves, allow_unused=True)
            products.append([torch.zeros_like(x) if h is None else h for h, x in zip(second, leaves, strict=True)])
        mean = [torch.stack(pair).mean(0) for pair in zip(*products, strict=True)]
        out["product"] = pytree.tree_unflatten(mean, spec)
    return out


def _nudged(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    even = out.view(-1)[::2]
    even.copy_(torch.nextafter(even, torch.full_like(even, torch.inf)))
    return out


def sharded(case: Case, rank: int, remat: str) -> list[dict[str, Any]]:
    """The same from ZeRO-3 on this rank, of two runs; and the params that the state holds after them."""
    fn, params = case.make()
    step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
    step = fz.remat(step, save=("kept",) if remat == "remat by name" else ()) if remat else step
    state = step.init(params)
    x = torch.tensor(SCALES[rank], dtype=F64)
    seen = []
    for _ in range(2):
        inputs = [i.clone() for i in case.inputs]
        loss, pullback = step.vjp(state, x, *inputs)
        grads, cotangents = pullback(torch.ones_like(loss))
        got = {"loss": loss, "cotangents": list(cotangents), "grads": fz.gather(grads)}
        if case.hvp:
            got["product"] = fz.gather(fz.hvp(step, state, grads, x, *inputs))
        seen.append(got)
    seen.append({"params": fz.gather(state.params)})
    return seen


def difference(got: Any, want: Any, rtol: float, moved: Any = None) -> str:
    """Where two trees differ, or "".

    Args:
        rtol: of the leaf's largest finite value.
        moved: what plain torch says of params that differ in the last bit: ten times what that changes is allowed too,
            and 1e-12 of the largest value in the whole tree, which sums that cancel leave behind.
    """
    left, right = pytree.tree_flatten_with_path(got)[0], pytree.tree_flatten_with_path(want)[0]
    others = pytree.tree_leaves(want if moved is None else moved)
    finite_parts = [b[torch.isfinite(b)].abs().max().item() for _, b in right if torch.isfinite(b).any()]
    floor = 0.0 if moved is None else 1e-12 * max(finite_parts, default=0.0)
    if [path for path, _ in left] != [path for path, _ in right]:
        return f"structure: {[pytree.keystr(p) for p, _ in left]}, not {[pytree.keystr(p) for p, _ in right]}"
    for (path, a), (_, b), c in zip(left, right, others, strict=True):
        if a is None or a.shape != b.shape or a.dtype != b.dtype:
            return f"{pytree.keystr(path)}: {a if a is None else (a.dtype, a.shape)}, not {(b.dtype, b.shape)}"
        finite = torch.isfinite(b)
        special = [t[~finite].nan_to_num() for t in (a, b)]
        if not torch.equal(torch.isfinite(a), finite) or not torch.equal(*special):
            return f"{pytree.keystr(path)}: not finite elsewhere"
        if finite.any():
            gap, scale = (a - b)[finite].abs().max().item(), b[finite].abs().max().item()
            noise = (c - b)[finite & torch.isfinite(c)].abs().sum().item()
            if not gap <= max(rtol * scale, 10 * noise, floor):
                return f"{pytree.keystr(path)}: {gap:.3g} of {scale:.3g}"
    return ""


def judge(error: BaseException, case: Case) -> tuple[str, str]:
    """Whether an error is fzero's own, names the leaf or unit, and says what to do."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and Path(fz.__file__).parent in Path(frames[-1].filename).parents
    names = re.search(r"['\"]blocks\.\d", text) or any(f"'{name}'" in text for name in case.params)
    names = names or re.search(r" \(in '[\w<>]+', \S+, line \d+\)", text)  # what has no params is named by its place
    refused = own and isinstance(error, (ValueError, TypeError)) and names and REMEDY.search(str(error))
    return ("refused" if refused else "raw"), text


def verdict(case: Case, want: dict[str, Any], rank: int, remat: str) -> tuple[str, str]:
    try:
        *runs, after = sharded(case, rank, remat)
    except Exception as error:
        return judge(error, case)
    for number, got in enumerate(runs):
        gap = difference(got, want, case.rtol)
        if gap:  # an ill-conditioned operator tells nothing that plain torch would not lose in the last bit
            gap = difference(got, want, case.rtol, reference(case, rank, moved=True))
        if gap:
            return "silent", f"run {number + 1}, {gap}"
    gap = difference(after["params"], case.params, 0.0)
    return ("silent", f"the state changed, {gap}") if gap else ("equal", "")


# ---- jobs: as many cases as fit into some seconds, on a rank


@dataclass(frozen=True)
class Found:
    """A case and what was seen of it."""

    kind: str
    subject: str
    case: str
    verdict: str
    text: str = ""


def _table(kind: str) -> dict[str, Any]:
    return operators() if kind in OPERATORS else modules()


def subjects(rank: int, kind: str) -> list[str]:
    """The names of the operators or modules that a kind has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sorted(name for name in _table(kind) if (kind, name) not in LEFT_OUT)


def job(rank: int, kind: str, names: list[str], samples: int, start: tuple[int, int], log: str, budget: float) -> Any:
    """The cases from `start` (a subject's number, a case's number) on, and where the next job starts.

    Ends after some seconds, and after a case that failed, as what it left under way belongs to this process group.
    """
    others = torch.distributed.new_group()  # verdicts never meet what a failed case has sent
    began, out = time.monotonic(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = _table(kind)
        for number in range(start[0], len(names)):
            subject = names[number]
            make = operator_cases if kind in OPERATORS else module_cases
            cases = itertools.product(make(kind, known[subject], samples), REMATS)
            first = start[1] if number == start[0] else 0
            for place, (case, remat) in enumerate(itertools.islice(cases, first, None), first):
                named = case.name + (f", {remat}" if remat else "")
                if rank == 0:
                    Path(log).write_text(json.dumps([number, place, subject, named]))
                try:
                    want = reference(case, rank)
                except Exception as error:
                    out.append(Found(kind, subject, named, "no case", f"{type(error).__name__}: {error}"))
                    continue
                mine = verdict(case, want, rank, remat)
                both: list[Any] = [None, None]
                torch.distributed.all_gather_object(both, (*mine, time.monotonic() - began), group=others)
                one, other = both[0], both[1]
                word = one[0] if one[0] == other[0] else "apart"
                text = one[1] if word != "apart" else f"{one[0]} and {other[0]}: {one[1]} / {other[1]}"
                out.append(Found(kind, subject, named, word, text))
                if one[2] > budget or word not in ("equal", "refused"):
                    return out, (number, place + 1)
    return out, None


def everything(kind: str) -> list[str]:
    """`subjects`, asked in another process: to import torch's tables changes flags of torch for good."""
    return fz.testing.run_ranks(functools.partial(subjects, kind=kind), 2, backend="processes")[0]


def check(kind: str, names: list[str], samples: int, patience: float = 60.0) -> list[Found]:
    """All cases of a kind, on two processes.

    Args:
        names: of operators or modules.
        samples: of each, at most.
        patience: seconds that one collective may take.
    """
    run = functools.partial(fz.testing.run_ranks, world_size=2, backend="processes", timeout=patience)
    found: list[Found] = []
    start: Any = (0, 0)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "case"
        while start is not None and names:
            log.write_text("null")
            arguments = {"kind": kind, "names": names, "samples": samples, "start": start, "log": str(log)}
            try:
                some, start = run(functools.partial(job, **arguments, budget=patience / 3))[0]
                found += some
            except fz.testing.RankError as error:
                last = json.loads(log.read_text())
                if last is None:
                    raise
                found.append(Found(kind, last[2], last[3], "dead", str(error).strip().splitlines()[-1]))
                start = (last[0], last[1] + 1)
    return found


# ---- the table


def table(found: Sequence[Found], listed: Sequence[str] = ("refused", *BAD)) -> str:
    """Verdicts by kind, then what is not equal: a line a kind of message, with the operators or modules."""
    words = ("equal", "refused", *BAD, "no case")
    lines = ["kind      " + "".join(f"{word:>9}" for word in words)]
    for kind in dict.fromkeys(f.kind for f in found):
        counts = collections.Counter(f.verdict for f in found if f.kind == kind)
        lines.append(f"{kind:<10}" + "".join(f"{counts[word]:>9}" for word in words))
    classes: dict[tuple[str, str, str], list[Found]] = {}
    for f in found:
        if f.verdict in listed:
            message = re.sub(r"'[^']*'|\d[\d.e+-]*", "_", f.text.splitlines()[0])[:160] if f.text else ""
            classes.setdefault((f.kind, f.verdict, message if f.verdict != "silent" else ""), []).append(f)
    for (kind, word, _), members in sorted(classes.items(), key=lambda pair: (pair[0][:2], -len(pair[1]))):
        one = members[0]
        lines.append(f"\n{kind}, {word}: {len(members)} cases, such as {one.subject}, {one.case}: {one.text[:400]}")
        lines.append("  " + ", ".join(dict.fromkeys(f.subject for f in members)))
    return "\n".join(lines)
