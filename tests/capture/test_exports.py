"""Tensors that are no plain memory: nested ones and sparse ones in compressed form, as units get and put them out.

Those that are computed right are a case of `written_unseen`; here is what is refused, by name and with a remedy.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from units import X, block_of, params_of, refused

import fzero as fz
from fzero.capture.exports import Exports, built
from fzero.testing import run_ranks

SHARDS = {"ZeRO-3": fz.shard_zero3, "remat": fz.remat}
every_shard = pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS.keys())


@pytest.fixture(autouse=True)
def _without_their_beta_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@every_shard
@pytest.mark.parametrize("form", ["csr", "csc", "bsr", "bsc"])
def test_a_unit_puts_out_a_compressed_tensor(form: str, shard: Any) -> None:
    size: Any = ((1, 1),) if form.startswith("b") else ()
    convert: Callable[[Any], Any] = lambda x: getattr(x, f"to_sparse_{form}")(*size)
    fn = block_of(lambda q, x: convert(x @ q["w"]))
    refused(fn, TypeError, r"Unit 'blocks.0' puts out a sparse tensor in compressed form.*Return x.to_sparse", shard)


@every_shard
def test_a_compressed_tensor_outside_of_units(shard: Any) -> None:
    match = r"a sparse tensor in compressed form \(CSR, CSC, BSR, BSC\) outside of units \(in 'fn', test_exports.py"

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return fz.unit(lambda q, x: x @ q["w"])(p["blocks"][0], x).to_sparse_csr().to_dense().mean()

    refused(fn, TypeError, match, shard)


@every_shard
def test_a_compressed_tensor_that_is_differentiated(shard: Any) -> None:
    given = torch.eye(5, dtype=torch.float64).to_sparse_csr().requires_grad_()
    fn = block_of(lambda q, x: torch.tanh(x @ q["w"]) + given.to_dense().sum())
    refused(fn, TypeError, r"in compressed form \(.*\) that is differentiated.*Give it x.to_sparse", shard)


@every_shard
def test_nested_tensors(shard: Any) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    reads = block_of(lambda q, x: x @ q["w"] * rows.to_padded_tensor(0.0).sum())
    refused(reads, TypeError, r"A unit \(in .*\) got or reaches a nested tensor.*make the nested tensor inside", shard)
    makes = block_of(lambda q, x: torch.nested.as_nested_tensor([*(x @ q["w"])]))
    refused(makes, TypeError, "Unit 'blocks.0' puts out a nested tensor.*Return its values and offsets", shard)


@every_shard
@pytest.mark.parametrize("reads", ["memory", "strides"])
def test_what_torch_func_refuses_under_a_second_derivative(reads: str, shard: Any) -> None:
    def of_memory(q: Any, x: torch.Tensor) -> torch.Tensor:
        first, *_ = torch.tensor_split(x @ q["w"], torch.tensor([2]))
        return first.square()

    of_strides = lambda q, x: (x @ q["w"]).to_sparse_csr().to_dense().square()
    unit = fz.unit(of_memory if reads == "memory" else of_strides)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        inner = torch.func.grad(lambda x: unit(p["blocks"][0], x).sum())
        return inner(x).square().sum()

    refused(fn, TypeError, "Unit 'blocks.0' does what torch.func refuses.*in its place that torch.func takes", shard)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_template_keeps_no_tensor() -> None:
    """It lives as long as the call can be pulled back, and with it would live a recomputed unit's graph."""
    exports = Exports("blocks.0", lambda _: False, {})
    template = exports.of(Pair(torch.ones(2), (torch.ones(3), frozenset({torch.ones(4)}))))
    outside, alive = [torch.zeros(x.shape) for x in exports.tensors], [weakref.ref(x) for x in exports.tensors]
    exports.tensors.clear()
    assert [x() for x in alive] == [None] * 3
    made = built(template, outside)
    assert isinstance(made, Pair) and made.first is outside[0] and made.second[0] is outside[1]


@every_shard
def test_constants_that_a_unit_moves_in_a_list_stay_themselves(shard: Any) -> None:
    held = [torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    before = [*held]

    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        held.reverse()
        return torch.tanh(x @ q["w"]) + held[0]

    def rank_main(rank: int) -> None:
        step = shard(fz.train_step(block_of(body), fz.sgd(0.1)))
        step(step.init(params_of()), X)
        assert held[0] is before[0] and held[1] is before[1]  # two blocks, two turns

    run_ranks(rank_main, 1)


@every_shard
def test_the_first_attribute_of_a_dict_is_set_once(shard: Any) -> None:
    class Notes(dict[str, Any]):
        note = 0

    kept, count = Notes(), {"n": 0}

    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        count["n"] += 1
        kept.note = count["n"]
        return torch.tanh(x @ q["w"])

    def rank_main(rank: int) -> None:
        step = shard(fz.train_step(block_of(body), fz.sgd(0.1)))
        step(step.init(params_of()), X)
        assert kept.note == count["n"] == 2

    run_ranks(rank_main, 1)
