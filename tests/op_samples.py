"""torch's own tables of operators and modules as programs: a function of params that fzero trains, and its plain form.

A sample's differentiable tensors are the leaves of a unit; what is complex or sparse is made inside it, of real ones.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

import fzero as fz

F64, RTOL = torch.float64, 1e-10
WIDE = 40  # samples that are looked at, to choose from


# ---- operators


class Call:
    """One sample of an operator: a function of its differentiable tensors, which are stored real and dense."""

    def __init__(self, op: Any, sample: Any) -> None:
        self.op = op
        self.finish = (
            sample.output_process_fn_grad
        )  # drops what has no gradient of its own, such as an eigenvector's sign
        self.flat, self.spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        tensors = [i for i, t in enumerate(self.flat) if isinstance(t, torch.Tensor)]
        self.places = [i for i in tensors if self.flat[i].requires_grad]
        self.others = [i for i in tensors if i not in self.places]
        self.leaves = [_stored(self.flat[i]) for i in self.places]
        self.constants = [self.flat[i] for i in self.others]
        # in place on the first argument, which must be one of the leaves
        self.changes = isinstance(sample.input, torch.Tensor) and self.places[:1] == [0] and not sample.broadcasts_input
        self.seeded, self.rtol = False, RTOL

    def probe(self, inplace: bool) -> None:
        """Notes whether the operator draws random numbers, and how precise its outputs are."""
        before = torch.get_rng_state()
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
            out = [o for o in pytree.tree_leaves(self(self.leaves, self.constants, inplace)) if torch.is_tensor(o)]
            self.seeded = not torch.equal(before, torch.get_rng_state())
            rounded = [torch.finfo(o.dtype).eps for o in out if o.is_floating_point() or o.is_complex()]
            self.rtol = max([RTOL, *[4 * eps for eps in rounded if eps > torch.finfo(F64).eps]])

    def __call__(self, leaves: Sequence[Any], constants: Sequence[Any], inplace: bool = False) -> Any:
        filled = list(self.flat)
        for i, leaf in zip(self.places, leaves, strict=True):
            filled[i] = _restored(leaf, self.flat[i])
        for i, constant in zip(self.others, constants, strict=True):
            filled[i] = constant.clone()  # an operator may write to it, as batch norm does
        if inplace:
            filled[0] = filled[0].clone()
        first, args, kwargs = pytree.tree_unflatten(filled, self.spec)
        with _seed() if self.seeded else contextlib.nullcontext():
            return (self.op.inplace_variant if inplace else self.op)(first, *args, **kwargs)


@contextlib.contextmanager
def _seed(seed: int = 0) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _table(name: str) -> Iterator[None]:
    """Around samples of torch's tables, which are drawn from the global generators: the same on every rank."""
    seed, state = zlib.crc32(name.encode()), random.getstate()
    random.seed(seed)
    try:
        with _seed(seed):
            yield
    finally:
        random.setstate(state)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().clone()


def _restored(leaf: Any, like: torch.Tensor) -> Any:
    if like.is_complex():
        leaf = torch.view_as_complex(leaf)
    return leaf if like.layout == torch.strided else leaf.to_sparse(layout=like.layout)


def _spread(items: Sequence[Any], count: int) -> list[tuple[int, Any]]:
    """At most so many of them, with their numbers: evenly from the first to the last, or the one in the middle."""
    last = len(items) - 1
    chosen = [last // 2] if count == 1 else [round(i * last / (count - 1)) for i in range(count)]
    return [(i, items[i]) for i in dict.fromkeys(chosen)] if items else []


def weigh(tree: Any) -> Any:
    """A number that every element of every output has a part in, and that a second derivative does not lose."""
    total: Any = 0.0
    for out in pytree.tree_leaves(tree):
        if isinstance(out, torch.Tensor):
            dense = out if out.layout == torch.strided else out.to_dense()
            real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
            flat = real.double().reshape(-1)
            weights = torch.arange(1, flat.numel() + 1, dtype=F64).cos()
            total = total + (weights * flat).sum() + 0.25 * (weights * flat * flat).sum()
    return total


def operators() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.full_name: op for op in op_db if op.supports_autograd and _dtype(op)}


def _dtype(op: Any) -> torch.dtype | None:
    """float64, or complex128 where an operator knows nothing else."""
    return next((dtype for dtype in (F64, torch.complex128) if op.supports_dtype(dtype, "cpu")), None)


# ---- programs: (function of (params, *inputs), params, inputs)


@dataclass
class Case:
    """A program in two forms: over plain tensors, and as one trains it with fzero."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], Any]]
    plain: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...] = ()
    hvp: bool = False
    rtol: float = RTOL


def _unit_case(name: str, kind: str, call: Call, number: int) -> Case:
    leaves = {f"w{i}": leaf for i, leaf in enumerate(call.leaves)}
    params = {"blocks": [leaves, {"s": torch.tensor(1.25, dtype=F64)}]}
    inplace = kind == "inplace"
    leaves_unit = kind == "output" or (inplace and number % 2)

    def body(p: Any, constants: Any, x: torch.Tensor) -> Any:
        out = call(list(p.values()), constants, inplace)
        return out if leaves_unit else x * weigh(call.finish(out))

    def program(unit: Any) -> Callable[..., Any]:
        first, last = unit(body), unit(lambda p, y: fz.name(y, "kept") * p["s"])

        def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
            out = first(params["blocks"][0], call.constants, x)
            return last(params["blocks"][1], x * weigh(call.finish(out)) if leaves_unit else out)

        return fn

    return Case(name, lambda: (program(fz.unit), params), program(lambda f: f), params, (), kind == "hvp", call.rtol)


class Child(nn.Module):
    """Some weights, used here and by whoever reads them from outside."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for i, weight in enumerate(weights):
            self.register_parameter("weight" if i == 0 else f"weight{i}", nn.Parameter(weight.clone()))
        self.gain = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fz.name(x, "kept") * self.gain + sum(0.5 * weight.sum() for weight in self.parameters())


class Outside(nn.Module):
    """Applies an operator to the weight of a child, from outside that child."""

    def __init__(self, call: Call, inside: Sequence[int]) -> None:
        super().__init__()
        self.inside, self.run = list(inside), lambda leaves: call.finish(call(leaves, call.constants))
        self.blocks = nn.ModuleList([Child([call.leaves[i] for i in inside]), Child([])])
        for i, leaf in enumerate(call.leaves):
            if i not in self.inside:
                self.register_parameter(f"leaf{i}", nn.Parameter(leaf.clone()))
        self.count = len(call.leaves)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        below = [name for name, _ in self.blocks[0].named_parameters() if name != "gain"]
        leaves = [
            getattr(self.blocks[0], below[self.inside.index(i)]) if i in self.inside else getattr(self, f"leaf{i}")
            for i in range(self.count)
        ]
        return self.blocks[1](x * weigh(self.run(leaves)) + self.blocks[0](x))


def _module_case(name: str, module: nn.Module, inputs: tuple[Any, ...] = (), rtol: float = RTOL) -> Case:
    params = {key: p.detach().clone() for key, p in module.named_parameters() if not nn.parameter.is_lazy(p)}
    own = copy.deepcopy(module)

    def plain(params: Any, *inputs: Any) -> Any:
        return torch.func.functional_call(own, params, inputs)

    return Case(name, lambda: fz.functional(module), plain, params, inputs, False, rtol)


def operator_cases(kind: str, op: Any, samples: int) -> Iterator[Case]:
    if (kind == "inplace" and op.inplace_variant is None) or (kind == "hvp" and not op.supports_gradgrad):
        return
    with _table(op.full_name):
        # not op.sample_inputs, which looks through the stack at every sample for the test that asks
        drawn = itertools.islice(op.sample_inputs_func(op, torch.device("cpu"), _dtype(op), True), WIDE)
        calls = [call for call in (Call(op, sample) for sample in drawn) if call.places]
        calls = [call for call in calls if all(leaf.numel() for leaf in call.leaves)]  # a leaf has elements
    if kind == "inplace":
        calls = [call for call in calls if call.changes]
    for number, call in _spread(calls, samples):
        call.probe(kind == "inplace")
        if kind != "outside":
            yield _unit_case(f"sample {number}", kind, call, number)
            continue
        last = len(call.leaves) - 1
        for inside in [[0], [last], list(range(last + 1))][: 1 if last == 0 else 3]:
            named = f"sample {number}, argument {' and '.join(map(str, inside))} of the child"
            yield _module_case(named, Outside(call, inside), rtol=call.rtol)


# ---- modules


def modules() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db if F64 in info.dtypes}


class Seeded(nn.Module):
    """A module that draws the same numbers at every call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _seed():
            return self.module(*args, **kwargs)


class Parent(nn.Module):
    """A module as the first element of a ModuleList, called with these of its arguments as inputs."""

    def __init__(self, module: nn.Module, flat: Sequence[Any], spec: Any, places: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([module, Child([])])
        self.fill = lambda inputs: pytree.tree_unflatten(
            [inputs[places.index(i)] if i in places else leaf for i, leaf in enumerate(flat)], spec
        )

    def forward(self, x: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        args, kwargs = self.fill(inputs)
        return self.blocks[1](x * weigh(self.blocks[0](*args, **kwargs)))


def module_cases(kind: str, info: Any, samples: int) -> Iterator[Case]:
    training = kind == "train"
    with _table(info.name):
        drawn = info.module_inputs_func(info, device="cpu", dtype=F64, requires_grad=True, training=training)
        drawn = [given for given in drawn if given.forward_input is not None]
    for number, given in _spread(drawn, samples):
        with _table(info.name):
            module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
        module = module.to(F64).train(training)
        arguments = (given.forward_input.args, given.forward_input.kwargs)
        flat, spec = pytree.tree_flatten(arguments)
        places = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.requires_grad]
        inputs = tuple(_stored(flat[i]) for i in places)
        before = torch.get_rng_state()
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
            args, kwargs = copy.deepcopy(arguments)
            copy.deepcopy(module)(*args, **kwargs)
            if not torch.equal(before, torch.get_rng_state()):
                module = Seeded(module)
        yield _module_case(f"input {number}", Parent(module, flat, spec, places), inputs)
