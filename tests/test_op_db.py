"""torch's own tables of operators and modules on two gloo ranks: equal to plain torch, or refused by name.

A spread of them here, and all with `OP_DB=all`, or by `python tests/op_cases.py --all`, which prints the table.
"""

from __future__ import annotations

import collections
import os

import op_cases
import pytest

ALL = os.environ.get("OP_DB") == "all"
# kind: every how many operators or modules, from which on; samples of each; and which part of the cases must be equal
SPREAD = {
    "inside": (8, 0, 1, 0.99),
    "output": (8, 2, 1, 0.99),
    "inplace": (3, 0, 1, 0.99),
    "hvp": (10, 4, 1, 0.99),
    "outside": (12, 6, 1, 0.0),
    "train": (4, 0, 1, 0.9),
    "eval": (4, 2, 1, 0.9),
}


@pytest.mark.timeout(7200 if ALL else 300)
@pytest.mark.parametrize("kind", SPREAD)
def test_op_db(kind: str) -> None:
    stride, first, samples, share = SPREAD[kind]
    names = op_cases.everything(kind)
    found = op_cases.check(kind, names if ALL else names[first::stride], 3 if ALL else samples)
    counts = collections.Counter(f.verdict for f in found)
    cases = len(found) - counts["no case"]
    assert cases > len(names) / stride, "torch's tables have shrunk: too few cases are left"
    assert not any(counts[word] for word in op_cases.BAD), "\n" + op_cases.table(found)
    assert counts["equal"] >= share * cases, "\n" + op_cases.table(found)


@pytest.mark.parametrize("operator", ["mm", "bmm", "addmm", "nn.functional.linear", "nn.functional.conv1d", "cdist"])
def test_an_operator_on_another_modules_weight(operator: str) -> None:
    """Those that return uninitialised memory where one argument is on the meta device and another on the CPU."""
    found = op_cases.check("outside", [operator], 2)
    assert {f.verdict for f in found} <= {"equal", "refused"}, "\n" + op_cases.table(found)
