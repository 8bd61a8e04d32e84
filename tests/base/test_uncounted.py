"""Operators that write and count it nowhere: which ones, who is told, and that nobody else is met."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nightly import at_length
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.base import uncounted
from fzero.base.uncounted import look_for_more, told

own = torch.library.Library("fzero_uncounted", "DEF")
own.define("double(Tensor x, Tensor(a!) y) -> Tensor")


def _double(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    np.multiply(y.numpy(), 2, out=y.numpy())
    return x + 1


own.impl("double", _double, "CPU")
OBSERVED = torch.ones(1), torch.zeros(1, dtype=torch.int32)  # a scale and a zero point
SGD: dict[str, Any] = {
    **dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0),
    **{"lr": 0.1, "nesterov": False, "maximize": False, "is_first_step": True},
}
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
# calls with x[5, 4] that write to a mean and a variance, [4] each
WRITE: dict[str, Call] = {
    "batch_norm": lambda x, a, b: F.batch_norm(x, a, b, training=True),
    "native": lambda x, a, b: torch.native_batch_norm(x, None, None, a, b, True, 0.1, 1e-5),
    "module": lambda x, a, b: _norm(a, b)(x),
    "legit": lambda x, a, b: torch.ops.aten._native_batch_norm_legit(x, None, None, a, b, True, 0.1, 1e-5),
    "with update": lambda x, a, b: torch.ops.aten._batch_norm_with_update(x, None, None, a, b, 0.1, 1e-5),
    "stats": lambda x, a, b: torch.batch_norm_update_stats(x, a, b, 0.1),
    "instance_norm": lambda x, a, b: F.instance_norm(x.t()[None], a, b),
    "observer": lambda x, a, b: torch.fused_moving_avg_obs_fake_quant(
        *(x, torch.ones(1), torch.ones(1), a[:1], b[:1], *OBSERVED, 0.1, 0, 255, -1, False, False)
    ),
    "optimizer": lambda x, a, b: torch._fused_sgd_([a, b], [x[0], x[1]], [], **SGD),
    "a user's": lambda x, a, b: (torch.ops.fzero_uncounted.double(x, a), torch.ops.fzero_uncounted.double(x, b)),
}
NOT: dict[str, Call] = {
    "evaluation": lambda x, a, b: F.batch_norm(x, a, b),
    "without statistics": lambda x, a, b: F.batch_norm(x, None, None, training=True),
    "counted": lambda x, a, b: (a.mul_(2), torch._foreach_add_([b], 1.0), torch.add(a, b, out=a)),
}


def _norm(mean: torch.Tensor, variance: torch.Tensor) -> torch.nn.Module:
    norm = torch.nn.BatchNorm1d(4, affine=False)
    norm.running_mean, norm.running_var = mean, variance
    return norm


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.arange(20.0).view(5, 4), torch.zeros(4), torch.ones(4)


class Told(Exception):
    pass


@pytest.fixture(autouse=True)
def _looked() -> None:
    look_for_more()


def refuse(of: torch.Tensor) -> Callable[[str, torch.Tensor], None]:
    def tell(operator: str, x: torch.Tensor) -> None:
        if x.data_ptr() == of.data_ptr():
            raise Told(operator)

    return tell


@pytest.mark.parametrize("call", WRITE.values(), ids=WRITE.keys())
def test_is_told_before_it_is_done(call: Call) -> None:
    x, a, b = operands()
    for of, name in ((a, "first"), (b, "second")):
        with pytest.raises(Told), told(refuse(of)):
            call(x, a, b)
        if name == "first":
            assert torch.equal(a, torch.zeros(4)) and torch.equal(b, torch.ones(4))
    call(x, a, b)  # outside nobody is


@pytest.mark.parametrize("call", NOT.values(), ids=NOT.keys())
def test_nobody_is_told_of_what_writes_nothing_or_counts_it(call: Call) -> None:
    seen = list[str]()
    with told(lambda operator, _: seen.append(operator)):
        call(*operands())
    assert not seen


@pytest.mark.parametrize("call", WRITE.values(), ids=WRITE.keys())
def test_what_is_computed_is_the_same(call: Call) -> None:
    inside, outside = operands(), operands()
    call(*outside)
    with told(lambda *_: None):
        call(*inside)
    assert all(map(torch.equal, inside, outside))


def test_regions_around_it_are_told_too_and_threads_beside_it_are_not() -> None:
    seen = list[str]()
    thread = threading.Thread(target=lambda: WRITE["batch_norm"](*operands()))
    with told(lambda *_: seen.append("outer")):
        with told(lambda *_: seen.append("inner")):
            WRITE["batch_norm"](*operands())
            thread.start()
            thread.join()
        WRITE["batch_norm"](*operands())
    assert seen == ["inner", "outer"] * 2 + ["outer"] * 2


def test_a_backward_is_within() -> None:
    x, a, b = operands()
    y = x.requires_grad_() * 1
    y.register_hook(lambda _: (F.batch_norm(torch.ones(5, 4), a, b, training=True), None)[1])
    with pytest.raises(Told), told(refuse(a)):
        y.sum().backward()
    assert torch.equal(a, torch.zeros(4))


def test_nothing_else_is_met_and_nothing_is_left() -> None:
    """No kernel of Python's for other operators, under modes as without; and no region is held when it has ended."""
    names = list[str]()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    region = told(lambda *_: None)
    alive = weakref.ref(tell := region._tell)
    with region:
        with Mode():
            torch.nn.functional.dropout(torch.ones(3), 0.5).cos().sum()
    assert "aten.cos.default" in names and uncounted._current() is None
    del region, tell
    gc.collect()
    assert alive() is None


@at_length  # as it compiles
def test_operators_that_run_functions_pass() -> None:
    with told(lambda *_: None):
        (found,) = torch.cond(torch.tensor(True), lambda x: (x.sin(),), lambda x: (x.cos(),), (torch.ones(2),))
    assert torch.equal(found, torch.ones(2).sin())


def test_operators_that_are_defined_later_are_found() -> None:
    own.define("triple(Tensor(a!) y) -> ()")
    own.impl("triple", lambda y: None, "CPU")
    look_for_more()
    _, a, _ = operands()
    with pytest.raises(Told), told(refuse(a)):
        torch.ops.fzero_uncounted.triple(a)


@at_length
@pytest.mark.filterwarnings("ignore")
def test_every_operator_of_torchs_that_writes_and_does_not_count_is_known() -> None:
    """By what torch's own samples show: those whose arguments change, and whose versions do not."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 12):
            given = [x for x in (sample.input, *sample.args) if isinstance(x, torch.Tensor)]
            given = [x for x in given if x.layout == torch.strided]
            before, versions, seen = [x.clone() for x in given], [x._version for x in given], set[int]()
            with told(lambda _, x, seen=seen: seen.add(x.data_ptr())):
                info.op(sample.input, *sample.args, **sample.kwargs)
            for x, was, version in zip(given, before, versions, strict=True):
                unseen = not torch.equal(x.nan_to_num(), was.nan_to_num()) and x._version == version
                assert not unseen or x.data_ptr() in seen, info.name
