"""Functions that are not pure, by class: what writes, what keeps, what is decided elsewhere, what nobody sees.

Each is `body(s, p, x)`: `s` is a store of its own, `p` has the leaves `w` [4, 4] and `b` [4], and `x` is [3, 4]. The
classes are those that README listed as carried through steps, and as not seen, before functions had to be pure.
"""

from __future__ import annotations

import collections
import contextvars
import ctypes
import functools
import itertools
import os
import random
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from backwards import with_backward
from torch.utils.dlpack import from_dlpack, to_dlpack

F64 = torch.float64
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("impure", default=None)
GLOBAL: dict[str, Any] = {}


class Holder:
    h: Any = None


class Opaque:
    def __init__(self, h: Any) -> None:
        self.h = h


def store() -> Any:
    """What a function has outside of itself, made anew for each."""

    @functools.lru_cache
    def cached(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def default(x: torch.Tensor, kept: list[Any] = []) -> None:  # noqa: B006
        kept.append(x * 2)

    s = types.SimpleNamespace(
        list=[], table={}, order=collections.deque(), many=[0.0] * 5000, count=0, h=None, cached=cached, default=default
    )
    s.constant, s.row = torch.ones(4, dtype=F64), torch.ones(2, 4, dtype=F64)
    s.numbers, s.own, s.generator = itertools.count(), random.Random(0), torch.Generator()
    s.numpy, s.array, s.weak = np.random.default_rng(0), np.ones(4), weakref.WeakKeyDictionary()
    s.objects, s.holder, s.cycle = np.empty(1, dtype=object), Holder(), itertools.cycle([1.0, 2.0])
    s.rows = iter([torch.ones(4, dtype=F64) * i for i in range(1000)])
    return s


def linear(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def then_given(grad: torch.Tensor, *effects: object) -> torch.Tensor:
    return grad


def then(p: Any, x: torch.Tensor, *effects: object) -> torch.Tensor:
    """A layer, after the effects."""
    return linear(p, x)


def counted(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    s.count += 1
    return linear(p, x) * s.count


def nonlocal_counted() -> Any:
    count = 0

    def body(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return linear(p, x) * count

    return body


def memo(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    if "m" not in s.table:
        s.table["m"] = x.mean()
    return linear(p, x) * s.table["m"]


def running_mean(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    s.h = x.mean() if s.h is None else 0.9 * s.h + 0.1 * x.mean()
    return linear(p, x) - s.h


def by_environment(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    os.environ["FZERO_IMPURE"] = str(float(os.environ.get("FZERO_IMPURE", "1")) + 1)
    return linear(p, x) * float(os.environ["FZERO_IMPURE"])


def another_branch(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    s.count += 1
    return linear(p, x) if s.count % 2 else x @ p["w"] + p["b"]


def raises_a_tensor(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    error = KeyError("stop")
    error.h = x @ p["w"]  # type: ignore[attr-defined]
    raise error


def on_a_thread(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    thread = threading.Thread(target=lambda: s.list.append(torch.tanh(x.detach())))
    thread.start()
    thread.join()
    return linear(p, x)


def in_backward(effect: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    return lambda s, p, x: with_backward(torch.clone, functools.partial(effect, s))(linear(p, x))


def by_pointer(x: torch.Tensor) -> None:
    ctypes.memset(x.data_ptr(), 0, 8)


def swallowed(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        p["w"].mul_(2)
    except Exception:
        pass
    return linear(p, x)


def set_(s: Any, p: Any, x: torch.Tensor) -> torch.Tensor:
    x.data = x.data * 2
    return linear(p, x)


BACKWARD = "In a backward of your own (`Function.backward`, or a hook):"

# class -> name -> function
IMPURE: dict[str, dict[str, Any]] = {
    "writes to what it is given": {
        "an input": lambda s, p, x: linear(p, x.mul_(2.0)),
        "an input as out=": lambda s, p, x: linear(p, torch.mul(x, 2.0, out=x)),
        "a row of an input": lambda s, p, x: then(p, x, x.__setitem__(0, 1.0)),
        "a view of an input": lambda s, p, x: then(p, x, x.t()[0].zero_()),
        "a foreach": lambda s, p, x: then(p, x, torch._foreach_mul_([x], 2.0)),
        "a detached input": lambda s, p, x: then(p, x, x.detach().zero_()),
        "an input's data": lambda s, p, x: then(p, x, x.data.zero_()),
        "an input's data, in another form": lambda s, p, x: then(p, x, setattr(x, "data", x.data.flip(0).flip(0))),
        "an input gets other data": set_,
        "an input's shape": lambda s, p, x: linear(p, x.unsqueeze_(0)[0]),
        "an input through numpy": lambda s, p, x: then(p, x, x.detach().numpy().fill(0.5)),
        "an input through DLPack": lambda s, p, x: then(p, x, from_dlpack(to_dlpack(x.detach())).zero_()),
        "an input's storage": lambda s, p, x: then(p, x, x.untyped_storage().fill_(0)),
        "an input by its address": lambda s, p, x: then(p, x, by_pointer(x)),
        "requires_grad_": lambda s, p, x: then(p, x, x.requires_grad_(not x.requires_grad)),
        "a leaf": lambda s, p, x: then(p, x, p["w"].mul_(0.5)),
        "a leaf, caught": swallowed,
        "a leaf's data": lambda s, p, x: then(p, x, p["w"].data.mul_(0.5)),
        "a detached leaf": lambda s, p, x: then(p, x, p["b"].detach().add_(1.0)),
        "a view of a leaf": lambda s, p, x: then(p, x, p["w"].detach()[0].zero_()),
        "a leaf gets other data": lambda s, p, x: then(p, x, setattr(p["w"], "data", p["w"] * 2)),
        "requires_grad_ of a leaf": lambda s, p, x: then(p, x, p["w"].requires_grad_(False)),
        "the dict of leaves": lambda s, p, x: then(p, x, p.__setitem__("b", p["b"] * 2)),
    },
    "writes to what it closes over": {
        "a constant": lambda s, p, x: linear(p, x) + s.constant.add_(1.0),
        "a constant's data": lambda s, p, x: then(p, x, s.constant.data.add_(1.0)),
        "a view of a constant": lambda s, p, x: then(p, x, s.row[0].add_(1.0)),
        "a constant as out=": lambda s, p, x: then(p, x, torch.mul(s.constant, 2.0, out=s.constant)),
        "running statistics": lambda s, p, x: F.batch_norm(linear(p, x), s.row[0], s.row[1], training=True),
        "a running sum": lambda s, p, x: then(p, x, s.constant.add_(x.detach().sum())),
        "a constant through numpy": lambda s, p, x: then(p, x, s.constant.numpy().__iadd__(1)) * s.constant,
        "a constant through DLPack": lambda s, p, x: then(p, x, from_dlpack(to_dlpack(s.constant)).add_(1)),
    },
    "keeps what it computes": {
        "a list": lambda s, p, x: then(p, x, s.list.append(x @ p["w"])),
        "a dict": lambda s, p, x: then(p, x, s.table.update(h=x * 2)),
        "a deque": lambda s, p, x: then(p, x, s.order.append(p["w"] * 2)),
        "a long list": lambda s, p, x: then(p, x, s.many.append(x * 2)),
        "an attribute": lambda s, p, x: then(p, x, setattr(s, "h", x @ p["w"])),
        "an attribute of a class": lambda s, p, x: then(p, x, setattr(Holder, "h", x @ p["w"])),
        "an attribute of a function": lambda s, p, x: then(p, x, setattr(linear, "h", x @ p["w"])),
        "an attribute of an input": lambda s, p, x: then(p, x, setattr(x, "note", x * 2)),
        "a global": lambda s, p, x: then(p, x, GLOBAL.update(h=x * 2)),
        "a computed name": lambda s, p, x: then(p, x, s.__dict__.update({"h" + str(1): x * 2})),
        "a default": lambda s, p, x: then(p, x, s.default(x)),
        "a context variable": lambda s, p, x: then(p, x, VARIABLE.set(x * 2)),
        "lru_cache": lambda s, p, x: linear(p, s.cached(x)),
        "a memo": memo,
        "a running mean": running_mean,
        "a closure": lambda s, p, x: then(p, x, s.list.append(lambda y=x @ p["w"]: y)),
        "a storage": lambda s, p, x: then(p, x, s.list.append((x @ p["w"]).untyped_storage())),
        "a view": lambda s, p, x: then(p, x, s.list.append((x @ p["w"])[0])),
        "a detached one": lambda s, p, x: then(p, x, s.list.append((x @ p["w"]).detach())),
        "a leaf": lambda s, p, x: then(p, x, s.list.append(p["w"])),
        "an input": lambda s, p, x: then(p, x, s.list.append(x)),
        "an output": lambda s, p, x: s.list.append(linear(p, x)) or s.list[-1],
        "an array of objects": lambda s, p, x: then(p, x, s.objects.__setitem__(0, x * 2)),
        "a cycle": lambda s, p, x: then(p, x, s.list.append([s.list, x * 2])),
        "in an error": raises_a_tensor,
        "an array": lambda s, p, x: then(p, x, s.list.append((x.detach() * 2).numpy())),
    },
    "decided elsewhere": {
        "a counter": counted,
        "a nonlocal": nonlocal_counted(),
        "an iterator": lambda s, p, x: linear(p, x) * next(s.numbers),
        "an iterator of tensors": lambda s, p, x: linear(p, x) * next(s.rows),
        "a cycle": lambda s, p, x: linear(p, x) * next(s.cycle),
        "a long list": lambda s, p, x: (s.many.append(1.0), linear(p, x) * len(s.many))[1],
        "an array": lambda s, p, x: (s.array.__iadd__(1.0), linear(p, x) * float(s.array[0]))[1],
        "another branch": another_branch,
        "an order of entries": lambda s, p, x: linear(p, x).roll(next(s.numbers) % 3, 0),
        "an index": lambda s, p, x: linear(p, x)[[0, next(s.numbers) % 3, 1]],
        "a clock": lambda s, p, x: linear(p, x) * (time.perf_counter_ns() % 1000003),
        "a name": lambda s, p, x: linear(p, x) * (uuid.uuid4().int % 1000003),
        "the system's random numbers": lambda s, p, x: linear(p, x) * int.from_bytes(os.urandom(4)),
        "the environment": by_environment,
        "Python's generator": lambda s, p, x: linear(p, x) * random.random(),
        "its own generator": lambda s, p, x: linear(p, x) * s.own.random(),
        "numpy's generator": lambda s, p, x: linear(p, x) * float(np.random.rand()),
        "its own generator of numpy": lambda s, p, x: linear(p, x) * s.numpy.random(),
        "a tensor of numpy's": lambda s, p, x: linear(p, x) * torch.from_numpy(np.random.rand(4)),
        "its own generator of torch": lambda s, p, x: x + torch.rand(4, dtype=F64, generator=s.generator) * p["b"],
    },
    "returns what cannot be seen": {
        "a generator": lambda s, p, x: (y for y in [linear(p, x)]),
        "a map": lambda s, p, x: map(torch.tanh, [linear(p, x)]),
        "an object": lambda s, p, x: Opaque(linear(p, x)),
        "a closure": lambda s, p, x: (lambda h: lambda y: y * h)(linear(p, x)),
        "a bound method": lambda s, p, x: linear(p, x).add,
        "a dict by tensors": lambda s, p, x: {x: linear(p, x)},
    },
    "acts on a part of a gradient": {
        "a hook on a leaf": lambda s, p, x: then(p, x, p["w"].register_hook(lambda g: g * 2)),
        "a hook on an input": lambda s, p, x: then(p, x, x.requires_grad and x.register_hook(lambda g: g * 2)),
        "a hook after accumulation": lambda s, p, x: then(p, x, p["w"].register_post_accumulate_grad_hook(print)),
        "an inner backward": lambda s, p, x: then(p, x, torch.autograd.backward(linear(p, x).sum())),
    },
}

# name -> function, and what docs/sharp-bits.md says of it
NOT_SEEN: dict[str, tuple[Any, str]] = {
    "numbers in a list": (lambda s, p, x: then(p, x, s.list.append(len(x))), "Numbers that a unit adds up in a list"),
    "a count": (lambda s, p, x: then(p, x, next(s.numbers)), "Numbers that a unit adds up in a list, an object"),
    "a list in a backward": (in_backward(lambda s, g: then_given(g, s.list.append(g * 2))), BACKWARD),
    "Python's generator in a backward": (in_backward(lambda s, g: g * random.random()), BACKWARD),
    "a counter in a backward": (in_backward(lambda s, g: g * next(s.numbers)), BACKWARD),
    "a constant through numpy": (
        lambda s, p, x: then(p, x, s.constant.numpy().__iadd__(1.0)),
        "Writing through numpy, DLPack or storages to tensors that you close over",
    ),
    "a constant's storage": (
        lambda s, p, x: then(p, x, s.constant.untyped_storage().fill_(0)),
        "Writing through numpy, DLPack or storages to tensors that you close over",
    ),
    "on a thread": (on_a_thread, "threads that your function starts"),
    "a version": (lambda s, p, x: linear(p, x) * (1 + p["w"]._version), "Caching by `w._version` of a param"),
}
