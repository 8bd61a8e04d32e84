"""Functions as people write them: units that change their arguments, read and write objects, return views; weights read
from elsewhere; derivatives inside.

Each case is `make() -> (fn, params, plain)`: `plain(params, *inputs)` is the same in torch alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

import fzero as fz

F64 = torch.float64
Case = tuple[Callable[..., Any], Any, Callable[..., Any]]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X = draw(3, 4)
PARAMS = {"blocks": [{"w": draw(4, 4, seed=i)} for i in range(3)], "head": draw(4, 4, seed=7)}


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without warnings of torch's; ranks that are threads have one list of what is ignored."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def filled(module: Any) -> Any:
    """With the same params on every rank, whatever torch's generator has drawn."""
    for i, param in enumerate(module.parameters()):
        param.data.copy_(0.5 * draw(*param.shape, seed=i))
    return module


def pure(fn: Callable[..., Any]) -> Case:
    """Outside of a step a unit is its function, so that the function is its own reference."""
    return fn, PARAMS, fn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x))


class Net(nn.Module):
    """Blocks in a list, each a unit."""

    block: Any = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = filled(nn.ModuleList(type(self).block() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def of_module(module: nn.Module) -> Case:
    apply, params = fz.functional(module)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return apply(p, x).square().mean()

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, dict(p), (x,)).square().mean()

    return fn, params, plain


# ---- weights read outside their own module


class Codebooks(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.blocks[0].lin.weight.T + self.blocks[1].lin.bias


def a_weight_read_by_the_parent() -> Case:
    return of_module(Codebooks())


def a_weight_that_two_blocks_share() -> Case:
    module = Net()
    module.blocks[2].lin.weight = module.blocks[0].lin.weight
    return of_module(module)


class Sibling(Block):
    other: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x) @ self.other[0].lin.weight)


def a_weight_of_a_sibling() -> Case:
    module = Net()
    module.blocks[1] = filled(Sibling())
    module.blocks[1].other = [module.blocks[0]]
    return of_module(module)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid = filled(nn.Embedding(5, 4, dtype=F64)), filled(nn.Linear(4, 4, dtype=F64))
        self.head = nn.Linear(4, 5, bias=False, dtype=F64)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(3)
        return self.head(torch.tanh(self.mid(self.emb(ids) + x)))


def an_embedding_tied_to_a_head() -> Case:
    return of_module(Tied())


# ---- what a unit passes on by a side effect


class Told(Net):
    class block(Block):
        context: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.lin(x)) * self.context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.context = x.sum()
            x = block(x)
        return x


def an_attribute_that_a_unit_reads() -> Case:
    return of_module(Told())


@dataclasses.dataclass
class Box:
    h: torch.Tensor
    extra: Any = None


def a_dataclass_in_and_out() -> Case:
    unit = fz.unit(lambda q, b: Box(torch.tanh(b.h @ q["w"]), b.extra * 2))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        box = Box(x, x.sum())
        for q in p["blocks"]:
            box = unit(q, box)
        return (box.h * box.extra).sum()

    return pure(fn)


def a_dict_that_the_unit_fills() -> Case:
    def body(q: Any, x: torch.Tensor, seen: dict[str, Any]) -> torch.Tensor:
        h = torch.tanh(x @ q["w"])
        seen["sum"] = seen.get("sum", 0) + h.sum()
        seen.setdefault("all", []).append(h)
        return h

    unit = fz.unit(body)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen: dict[str, Any] = {}
        for q in p["blocks"]:
            x = unit(q, x, seen)
        return (x * seen["sum"]).sum() + sum(h.square().sum() for h in seen["all"])

    return pure(fn)


# ---- in place


class InPlace(Net):
    class block(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.ReLU(inplace=True), nn.Linear(4, 4, dtype=F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1)


def a_unit_that_begins_with_relu_in_place() -> Case:
    return of_module(InPlace())


def outputs_that_overlap() -> Case:
    def body(q: Any, x: torch.Tensor) -> Any:
        h = x @ q["w"]
        return h, h[0], h.detach(), h[1:].detach()

    unit = fz.unit(body)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        h, row, same, rest = unit(p["blocks"][0], x)
        row.mul_(2)
        return (h * same).sum() + (rest * h[1:]).sum()

    return pure(fn)


def an_input_that_is_returned_and_changed() -> Case:
    unit = fz.unit(lambda q, x: (x, x[0], q["w"].sum()))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        same, row, total = unit(p["blocks"][0], x)
        row.mul_(3)
        same.add_(1)
        return (x * total).sum()

    return pure(fn)


# ---- values and derivatives


def complex_outputs_beside_real_ones() -> Case:
    def body(q: Any, x: torch.Tensor) -> Any:
        h = x @ q["w"]
        return torch.complex(h, x), h

    unit = fz.unit(body)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        c, r = unit(p["blocks"][0], x)
        return (c.abs() * r).sum() + (c * c).real.sum()

    return pure(fn)


def _chain(p: Any, x: torch.Tensor) -> torch.Tensor:
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))
    for q in p["blocks"]:
        x = unit(q, x)
    return x.square().sum()


def a_gradient_penalty() -> Case:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return _chain(p, x) + torch.func.grad(lambda x: _chain(p, x))(x).square().sum()

    return pure(fn)


def a_penalty_on_one_unit() -> Case:
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda x: unit(p["blocks"][0], x).sum())(x)
        return unit(p["blocks"][1], unit(p["blocks"][0], x)).sum() + slope.square().sum()

    return pure(fn)


def energy_to_forces() -> Case:
    """torch.autograd.grad with create_graph inside the function."""

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x * 1.0 if x.requires_grad else x.detach().requires_grad_() * 1.0
            (force,) = torch.autograd.grad(_chain(p, y), y, create_graph=True)
        return force.square().sum() + _chain(p, x)

    return pure(fn)


def a_sum_over_all_leaves() -> Case:
    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        return _chain(p, x) + sum(leaf.square().sum() for leaf in [p["head"], *[q["w"] for q in p["blocks"]]])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return _chain(p, x) + fz.sum_over(p, lambda leaf: leaf.square().sum())

    return fn, PARAMS, plain


class Checkpointed(Net):
    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[return-value]

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.lin(x))


def a_checkpoint_over_a_modules_own_weights() -> Case:
    fn, params, _ = of_module(Checkpointed())
    return fn, params, of_module(Net())[2]


# ---- what a unit closes over


def _closing(how: str, scale: torch.Tensor, offset: list[torch.Tensor]) -> Callable[..., Any]:
    def both(q: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ q["w"]) * s + offset[0]

    def positional(s: torch.Tensor, q: Any, x: torch.Tensor) -> torch.Tensor:
        return both(q, x, s)

    return {
        "variable": lambda q, x: both(q, x, scale),
        "keyword": functools.partial(both, s=scale),
        "bound": functools.partial(positional, scale),
        "nested": lambda q, x: (lambda y: both(q, y, scale))(x),
        "default": lambda q, x, s=scale: both(q, x, s),
    }[how]


def constants_that_units_close_over() -> Case:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for how in ("variable", "keyword", "bound", "nested", "default"):
            for q in p["blocks"][:2]:
                x = fz.unit(_closing(how, draw(4, seed=8), [draw(4, seed=9)]))(q, x)
        return x.square().mean()

    return pure(fn)


def a_variable_that_changes_after_the_call() -> Case:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = x
        for q in p["blocks"]:
            h = fz.unit(lambda q: torch.tanh(h @ q["w"]) + h.sum())(q)
        return h.square().mean()

    return pure(fn)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:  # type: ignore[override]
        return 2 * cotangent


class Gained(Net):
    """The root's own param is read around its blocks by a hook, and inside by a wrapped forward and lambdas."""

    class block(Block):
        more: Any = ()

        def forward(self, x: torch.Tensor, shift: Any = 0.0) -> torch.Tensor:
            x = torch.tanh(self.lin(x)) + shift
            for fn in self.more:
                x = fn(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(draw(4, seed=9))
        self.blocks[0].register_forward_hook(lambda m, i, o: o * self.gain)
        forward = self.blocks[1].forward
        self.blocks[1].forward = lambda x, shift: forward(x, shift) * (1 + 0.1 * self.gain)
        self.blocks[2].more = [lambda h: h + Doubled.apply(self.gain), lambda h: h * self.gain.detach()]  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.gain)
        return x + Doubled.apply(self.gain)  # type: ignore[operator]


def a_param_of_the_root_that_blocks_read() -> Case:
    return of_module(Gained())


# ---- what leaves a unit


def what_is_detached_inside() -> Case:
    unit = fz.unit(lambda q, x: (torch.tanh(x @ q["w"]), x.detach(), q["w"].detach()))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        total: Any = 0.0
        for q in p["blocks"]:
            x, before, weight = unit(q, x)
            total = total + (x - before).square().sum() + (x @ weight).sum()
        return total

    return pure(fn)


def _viewing(q: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        view = x[:, 1:]
    h = torch.tanh(x @ q["w"])
    return h, view, h[1:].detach()


def views_without_gradients() -> Case:
    unit = fz.unit(_viewing)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        total: Any = 0.0
        for q in p["blocks"]:
            x, view, rest = unit(q, x)
            total = total + (x[:, 1:] * view).sum() + (x[1:] * rest).sum()
        return total

    return pure(fn)


def _transformed(q: Any, x: torch.Tensor) -> Any:
    h = torch.fft.fft(x @ q["w"])
    return h, h.conj(), h.real, h.imag, x.view(torch.int64)


def complex_views_of_one_output() -> Case:
    unit = fz.unit(_transformed)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            h, conjugate, real, imaginary, bits = unit(q, x)
            x = torch.tanh((h * conjugate).real / 10 + real - 0.5 * imaginary) * (bits == bits)
        return x.square().sum()

    return pure(fn)


# ---- what changes between a call and its second run


class Switched(Net):
    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.lin(x)) if self.training else torch.sin(self.lin(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks.eval()
        clean = super().forward(x)
        self.blocks.train()
        return super().forward(2 * x) - clean


def training_that_the_parent_switches() -> Case:
    return of_module(Switched())


def named(*makes: Callable[[], Case]) -> dict[str, Callable[[], Case]]:
    return {make.__name__.replace("_", " "): make for make in makes}


CAPTURES = r"closes over a tensor of shape .* that is differentiated .*Give it to the call as an argument"
ANOTHERS = rf"({CAPTURES}|read inside another unit, which is not given it.*Pass it)"
WRITES = r"writes to an input in place, by .*Write to a copy"
CHANGES = r"changes a list, a dict or another object among its arguments .*Return what is new"


def refusals(*pairs: tuple[Callable[[], Case], str]) -> dict[str, tuple[Callable[[], Case], str]]:
    return {make.__name__.replace("_", " "): (make, match) for make, match in pairs}


CASES = named(
    a_weight_read_by_the_parent,
    a_weight_that_two_blocks_share,
    an_embedding_tied_to_a_head,
    a_dataclass_in_and_out,
    outputs_that_overlap,
    an_input_that_is_returned_and_changed,
    complex_outputs_beside_real_ones,
    a_gradient_penalty,
    a_penalty_on_one_unit,
    energy_to_forces,
    a_sum_over_all_leaves,
    a_checkpoint_over_a_modules_own_weights,
    constants_that_units_close_over,
    what_is_detached_inside,
    views_without_gradients,
    complex_views_of_one_output,
    training_that_the_parent_switches,
)
# not pure, each in its own way -> what the refusal says
REFUSED = refusals(
    (a_weight_of_a_sibling, ANOTHERS),
    (an_attribute_that_a_unit_reads, CAPTURES),
    (a_dict_that_the_unit_fills, CHANGES),
    (a_unit_that_begins_with_relu_in_place, WRITES),
    (a_variable_that_changes_after_the_call, CAPTURES),
    (a_param_of_the_root_that_blocks_read, ANOTHERS),
)
