"""Each impure function of `impure` is refused by name: by a unit in its first run, elsewhere there or by `check_pure`.

At the end of the tests the functions are counted by class, and by what refused them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import by_turns, in_turns
from purity.impure import F64, GLOBAL, IMPURE, NOT_SEEN, Holder, linear, store
from units import forms

import fzero as fz
from fzero.purity import trial
from fzero.testing import assert_trees_equal, run_ranks

X = torch.linspace(-1.0, 1.0, 12, dtype=F64).view(3, 4)
FORMS = forms("plain", "ZeRO-3", "ZeRO-3, remat", "fused") | {"checked": fz.shard_zero3}
CLASS_OF = {(kind, name): body for kind, bodies in IMPURE.items() for name, body in bodies.items()}
OTHER = r"calls .* in one (run|of two runs)|returns other values in a second run"
SAYS = {
    "writes to what it is given": r"writes to|in place|autograd does not see|among its arguments|requires_grad of",
    "writes to what it closes over": rf"that it closes over, by |{OTHER}",
    "keeps what it computes": r"keeps a tensor .*outlives it.*Return it|sets an attribute|raises an error that carries",
    "decided elsewhere": OTHER,
    "returns what cannot be seen": r"returns an object of type|keeps a tensor",
    "acts on a part of a gradient": r"of a tensor that it is given .*A hook is for|keeps a tensor|torch.autograd.back",
}
# in a step's own function: what its first run shows
SHOWN = {
    *[("writes to what it is given", name) for name in IMPURE["writes to what it is given"]],
    *[("writes to what it closes over", name) for name in IMPURE["writes to what it closes over"]],
    ("acts on a part of a gradient", "an inner backward"),
}
# what its second run shows, as no operation does
SHOWN -= {
    ("writes to what it is given", "an input through numpy"),
    ("writes to what it is given", "an input by its address"),
    ("writes to what it closes over", "a constant through numpy"),
}
# what is no effect there: the arguments are the run's own, outputs are the step's, hooks act on the whole gradient
HARMLESS = {
    ("writes to what it is given", "requires_grad_"),
    ("writes to what it is given", "the dict of leaves"),
    ("keeps what it computes", "a leaf"),
    ("keeps what it computes", "an input"),
    *[("returns what cannot be seen", name) for name in IMPURE["returns what cannot be seen"]],
    *[("acts on a part of a gradient", name) for name in IMPURE["acts on a part of a gradient"] if "hook" in name],
}
# what is no effect where units are not sharded, as their leaves and inputs are the caller's own tensors
OWN = {("keeps what it computes", "a leaf"), ("keeps what it computes", "an input")}
OWN |= {("returns what cannot be seen", "a dict by tensors")}
IN_UNITS = [(x, form) for x, form in by_turns(CLASS_OF, FORMS, of=3) if not (x in OWN and form in ("plain", "fused"))]
LINELESS = ("acts on a part of a gradient", "an inner backward")  # torch's engine calls it, on no line of the caller's


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trial, "_WAITS", (0.0, 0.01))  # for other ranks, which let go of what they sent
    yield
    GLOBAL.clear()
    vars(linear).clear()
    Holder.h = None
    os.environ.pop("FZERO_IMPURE", None)


def named(case: object) -> str:
    return case if isinstance(case, str) else ": ".join(case)  # type: ignore[arg-type]


def params_of() -> Any:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, 4, 4, generator=generator, dtype=F64)
    return {"blocks": [{"w": draw(), "b": torch.ones(4, dtype=F64)} for _ in range(2)]}


def function_of(body: Any, of_unit: bool) -> Any:
    """fn(params, x) that runs the body in units, or itself."""
    bound = functools.partial(body, store())
    block = fz.unit(bound)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"] if of_unit else ():
            out = block(q, x)
            x = out if isinstance(out, torch.Tensor) else next(iter(out.values()))
        return (x if of_unit else bound(p["blocks"][0], x)).square().mean()

    return fn


def is_refused(case: tuple[str, str], of_unit: bool, form: str, who: str, checked: bool = False) -> None:
    shares = case[0] == "keeps what it computes"  # one global for ranks that are threads; it is there in a second run

    def rank_main(rank: int) -> None:
        step = FORMS[form](fz.train_step(function_of(CLASS_OF[case], of_unit), fz.sgd(0.1)))
        state, before = step.init(params_of()), step.init(params_of())
        for _ in range(1 if shares else 2):  # nor does it begin to be right
            with pytest.raises((ValueError, TypeError), match=SAYS[case[0]]) as found:
                fz.check_pure(step, state, X.clone()) if checked else step(state, X.clone())
            said = str(found.value)
            assert re.search(who, said), said
            assert case == LINELESS or re.search(r"impure(_listed)?\.py(:\d+|, line \d+)", said), said
        assert_trees_equal(fz.gather(state.params), fz.gather(before.params))

    run_ranks(rank_main, 1 if shares or form == "plain" else 2)


@in_turns(12)
@pytest.mark.parametrize(("case", "form"), IN_UNITS, ids=named)
def test_in_a_unit(case: tuple[str, str], form: str, record_property: Any) -> None:
    kind, name = case
    is_refused(case, True, form, r"^Unit 'blocks\.[01]'|'<lambda>'", form == "checked")
    record_property("counted", ("impure functions that are refused", kind, "in a unit's first run", name))


@in_turns(4)
@pytest.mark.parametrize("case", [case for case in CLASS_OF if case not in HARMLESS], ids=named)
def test_in_the_steps_own_function(case: tuple[str, str], record_property: Any) -> None:
    kind, name = case
    is_refused(case, False, "plain", "(?i)^(step: the function|leaf )", case not in SHOWN)
    how = "in a step's first run" if case in SHOWN else "by fz.check_pure"
    record_property("counted", ("impure functions that are refused", kind, how, name))


@pytest.mark.parametrize("name", NOT_SEEN)
def test_what_the_documentation_says_is_not_seen(name: str, record_property: Any) -> None:
    body, sentence = NOT_SEEN[name]
    assert sentence in (Path(__file__).parents[2] / "docs/sharp-bits.md").read_text()
    step = fz.train_step(function_of(body, True), fz.sgd(0.1))
    step(step.init(params_of()), X.clone())
    record_property("counted", ("impure functions that are not seen", "as documented", "in a unit's first run", name))
