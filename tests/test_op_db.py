"""torch's own tables of operators and modules on two gloo ranks: equal to plain torch, or refused by name.

A spread of them, and all with `OP_DB=all`, which also prints the table: `OP_DB=all pytest -s tests/test_op_db.py`.
"""

from __future__ import annotations

import collections
import os

import op_cases
import pytest
from nightly import NIGHTLY, in_turns

ALL = os.environ.get("OP_DB") == "all"
# those that return uninitialised memory where one argument is on the meta device and another on the CPU
ALSO = {"outside": ["mm", "bmm", "addmm", "nn.functional.linear", "nn.functional.conv1d", "cdist"]}
# kind: every how many operators or modules, from which on; how many cases that gives at least; what part of the
# operators or modules may be refused
SPREAD = {
    "inside": (72, 0, 12, 0.01),
    "output": (72, 10, 12, 0.01),
    "inplace": (27, 0, 8, 0.01),
    "hvp": (96, 4, 8, 0.01),
    "outside": (108, 6, 10, 1.0),
    "train": (18, 0, 10, 0.25),
    "eval": (18, 2, 10, 0.25),
}


@in_turns(7)
@pytest.mark.timeout(7200 if ALL else 600)
@pytest.mark.parametrize("kind", SPREAD)
def test_op_db(kind: str) -> None:
    stride, first, fewest, part = SPREAD[kind]
    stride = stride * 2 // 3 if NIGHTLY else stride
    names = op_cases.everything(kind)
    names, samples = (names, 3) if ALL else ([*names[first::stride], *ALSO.get(kind, [])], 1)
    found = op_cases.check(kind, names, samples)
    counts = collections.Counter(f.verdict for f in found)
    if ALL:
        print(op_cases.table(found))
    cases = len(found) - counts["no case"]
    assert not any(counts[word] for word in op_cases.BAD), "\n" + op_cases.table(found)
    assert cases >= fewest, f"only {cases} cases:\n" + op_cases.table(found, ["no case"])
    refused = {f.subject for f in found if f.verdict == "refused"}
    assert len(refused) <= max(1, part * len(names)), "\n" + op_cases.table(found)
