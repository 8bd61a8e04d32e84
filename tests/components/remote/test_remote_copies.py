"""What ranks with the same examples have is the same, or it is said: of outputs, cotangents and grads of every call."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.components.remote.values import apart, digest_of

D = torch.float64
X = torch.arange(6, dtype=D).view(3, 2)
W = torch.arange(1.0, 9.0, dtype=D).view(2, 4)


def of_slices(p: Any, x: torch.Tensor, turn: Any, ax: Any, kind: str) -> Any:
    """Of W each rank of the axis has its columns; `kind` says what is wrong."""
    rank = ax.rank
    s = p["s"] if kind == "params" else fz.parallel.copy(p["s"], ax)
    h = (x if kind == "inputs" else fz.parallel.copy(x, ax)) @ W.tensor_split(ax.size, 1)[rank] * s
    if kind == "softmax":
        return torch.softmax(torch.sin(h), 1)
    if kind == "sign":
        return x.sum(1) * p["s"] * (-1.0) ** rank
    if kind == "argmax":
        return x * p["s"], torch.nn.functional.one_hot(((-1.0) ** rank * h).argmax(1), 2)
    if kind == "later":
        return x.sum(1) * p["s"] * torch.where(turn > 1, 1.0 + rank, 1.0)
    total = fz.parallel.sum(h.sum(1), ax)
    return (total.square().mean() if kind in ("loss", "params") else total) * 1.0


def built(rank: int, kind: str, data: int = 1) -> Any:
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (data, ranks // data), mesh_dim_names=("dp", "tp"))
    fn = functools.partial(of_slices, ax=fz.parallel.axis(mesh, "tp"), kind=kind)
    step = fz.shard_zero1(fz.train_step(fn, fz.sgd(0.1)), mesh=mesh, axis="dp")
    start = torch.tensor([2.0 + (rank if kind == "init" else 0)], dtype=D)
    return step, {"s": start}, fz.parallel.axis(mesh, "dp")


TURN = torch.tensor(1, dtype=torch.int64)


@pytest.mark.parametrize("place", [("threads", 2, 1), ("threads", 4, 2), ("processes", 2, 1)])
def test_what_is_the_same_goes_on(place: Any) -> None:
    on, ranks, data = place
    for kind in ("loss", "rows"):
        with fz.remote(functools.partial(built, kind=kind, data=data), ranks, on, timeout=20) as own:
            state = own.init()
            for _ in range(2):
                out, pull = own.vjp(state, X, TURN)
                grads, (ct, _) = pull(torch.ones_like(out))
                state, _ = own.update(state, grads)
            w, x = torch.tensor([2.0], dtype=D, requires_grad=True), X.clone().requires_grad_()
            total = (x @ W * w).sum(1)
            loss = total.square().mean() if kind == "loss" else total.sum()
            by_x, by_w = torch.autograd.grad(loss, (x, w))
            grads, (ct, _) = own.vjp(own.init(), X, TURN)[1](torch.ones_like(out))
            torch.testing.assert_close((fz.fetch(ct), fz.gather(grads)["s"]), (by_x, by_w))


@in_turns(2)
@pytest.mark.parametrize("on", ["threads", "processes"])
def test_what_differs_is_refused(on: str) -> None:
    def need_refused(use: Any) -> None:
        words = "between (ranks that have the same examples|the ranks of axis 'tp', over which the function has maps)"
        with pytest.raises(ValueError, match=rf"{words}(.|\n)*fz.parallel.copy"):
            fz.fetch(use())

    need_refused(lambda: fz.remote(functools.partial(built, kind="init"), 2, on, timeout=20))
    kinds = ("params", "inputs", "softmax", "sign", "argmax", "later")
    for kind in kinds if on == "threads" else ("params", "inputs", "sign"):
        with fz.remote(functools.partial(built, kind=kind), 2, on, timeout=20) as own:
            state = own.init()
            if kind in ("softmax", "sign", "argmax"):
                need_refused(lambda: own.forward(state, X, TURN))
            elif kind == "later":
                fz.fetch(own.forward(state, X, TURN))
                late = own.forward(state, X, TURN + 1)
                need_refused(lambda: late)
                need_refused(lambda: own.forward(state, late, TURN))
            else:
                out, pull = own.vjp(state, X, TURN)
                grads, (ct, _) = pull(torch.ones_like(out))
                if kind == "inputs":
                    need_refused(lambda: ct)
                    fz.gather(grads)
                else:
                    fz.fetch(ct)
                    need_refused(lambda: fz.gather(grads))
                    need_refused(lambda: own.update(state, grads)[1])
                    need_refused(lambda: own(state, X, TURN)[1])


@given(data=st.data())
def test_digests_tell_tensors_apart(data: st.DataObject) -> None:
    """Of another sign, order or element, however large they are; those that differ by rounding alone are alike."""
    dtype = data.draw(st.sampled_from([torch.float32, D, torch.bfloat16, torch.int64, torch.bool, torch.complex64]))
    size = data.draw(st.sampled_from([1, 2, 7, 1024, 5000, 200_000]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    wide = torch.randn(size, 2, generator=generator, dtype=D)
    x = torch.view_as_complex(wide).to(dtype) if dtype.is_complex else wide[:, 0].mul(5).to(dtype)
    i, j = [int(torch.randint(0, size, (), generator=generator)) for _ in range(2)]
    changed = {"one": x.clone(), "swapped": x.clone(), "turned": x.flip(0), "sign": x.clone()}
    changed["one"][i] = not x[i] if dtype == torch.bool else x[i] * 2 + 1
    changed["swapped"][[i, j]] = x[[j, i]]
    changed["sign"] = ~x if dtype == torch.bool else -x
    assert apart([("x", digest_of(x)), ("x", digest_of(x.clone()))]) is None
    for y in changed.values():
        assert (apart([("x", digest_of(x)), ("x", digest_of(y))]) is None) == y.equal(x), (x, y)
    if dtype in (torch.float32, D):
        near = x * (1 + 4 * torch.finfo(dtype).eps)
        assert apart([("x", digest_of(x)), ("x", digest_of(near))]) is None
    if dtype.is_floating_point:
        assert apart([("x", digest_of(x)), ("x", digest_of(x / 0))]) is not None
