"""fz.functional over modules of many kinds, and what it refuses by name."""

from __future__ import annotations

import enum
import functools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from hooked import Block, Net, X, by_autograd, by_functional_call, check, partial, values_of
from nightly import in_turns
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

MODEL: Any = None  # as in a notebook
COUNT = 0


# ---- modules of all kinds


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


class ByGain(nn.Module):
    """A parametrization that reads another module."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.owner[0].gain


class CopiesItself(Block):
    def __deepcopy__(self, memo: Any) -> Any:
        return self


class CannotBeCopied(Block):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of it")


class NeedsArguments(Block):
    def __new__(cls, name: str = "") -> Any:
        assert name
        return super().__new__(cls)

    def __init__(self, name: str) -> None:
        super().__init__()


class Mode(enum.Enum):
    ON = 1


MISSING = object()


class Furnished(Block):
    """With attributes that cannot be copied, or must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.logger, self.generator = threading.Lock(), logging.getLogger("test"), torch.Generator()
        self.mode, self.missing, self.function = Mode.ON, MISSING, torch.tanh
        self.group = (torch.Size((1, 2)), torch.float32, torch.device("cpu"), slice(1), range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.mode is Mode.ON and self.missing is MISSING
        with self.lock:
            return self.function(super().forward(x))


def old_style(method: Callable[[nn.Linear], Any], run: bool = False) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            method(module.blocks[0].lin)  # type: ignore[arg-type]
        module.eval()
        if run:
            module(X)
        return module

    return make


def with_parametrization(make: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = Net()
        block: Any = module.blocks[0]
        parametrize.register_parametrization(block.lin, "weight", make(block))
        return module

    return build


def tied() -> nn.Module:
    module: Any = Net()
    module.blocks[0].shift = module.blocks[0].gain
    partial(module.blocks[0].lin, module.blocks[0])
    return module


def run_before() -> nn.Module:
    """Attributes still hold what an earlier forward computed from the params."""
    module: Any = Net()

    def forward(module: Any, old: Any, x: torch.Tensor) -> torch.Tensor:
        out = old(x)
        if module.keeps:
            module.blocks[0].last = out
        return out * 2

    module.blocks[0].forward, module.keeps = functools.partial(forward, module, module.blocks[0].forward), True
    module(X)
    module.keeps = False
    assert module.blocks[0].last.grad_fn is not None
    return module


KINDS: dict[str, Callable[[], nn.Module]] = {
    "parametrized": with_parametrization(lambda block: Symmetric()),
    "parametrized by another": with_parametrization(ByGain),
    "weight_norm, parametrized": old_style(parametrizations.weight_norm),
    "weight_norm, old": old_style(nn.utils.weight_norm),
    "weight_norm, old, after a run": old_style(nn.utils.weight_norm, run=True),
    "spectral_norm, parametrized": old_style(parametrizations.spectral_norm),
    "spectral_norm, old": old_style(nn.utils.spectral_norm),
    "orthogonal": old_style(parametrizations.orthogonal),
    "pruned": old_style(lambda linear: torch.nn.utils.prune.l1_unstructured(linear, "weight", 0.3)),
    "pruned, after a run": old_style(
        lambda linear: torch.nn.utils.prune.l1_unstructured(linear, "weight", 0.3), run=True
    ),
    "a __deepcopy__ that returns itself": lambda: Net(CopiesItself),
    "a __deepcopy__ that raises": lambda: Net(CannotBeCopied),
    "a __new__ with arguments": lambda: Net(lambda: NeedsArguments("it")),
    "furnished": lambda: Net(Furnished),
    "tied": tied,
    "run before": run_before,
    "traced by torch.fx": lambda: torch.fx.symbolic_trace(Net()),
}


@in_turns(11)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_kinds_of_modules(kind: str) -> None:
    module = KINDS[kind]()
    if kind == "furnished":
        partial(module.blocks[0].lin, module.blocks[0])  # type: ignore[index]
    check(module, by_autograd(module))


def test_a_submodule_whose_hook_holds_its_parent() -> None:
    """The parent's other params are constants, as for functional_call of the submodule."""
    parent: Any = Net()
    block = parent.blocks[0]
    block.lin.register_forward_hook(
        functools.partial(lambda parent, m, i, o: o * parent.gain * parent.blocks[0].gain, parent)
    )

    def loss(p: Any) -> torch.Tensor:
        return torch.func.functional_call(block, p, (X,)).square().sum()

    apply, params = fz.functional(block)
    assert_trees_close(
        dict(torch.func.grad(lambda p: apply(p, X).square().sum())(params)), torch.func.grad(loss)(values_of(block))
    )


def test_a_global_hook_that_reads_no_module_is_kept() -> None:
    module = Net()
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2 if type(m) is nn.LayerNorm else o)
    try:
        check(module, by_functional_call(module))
    finally:
        handle.remove()


# ---- what is refused, and where it is


class ByItsName(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * MODEL.gain.sum()


class ByAHelper(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_by_a_global(x).sum()


def scaled_by_a_global(out: Any) -> Any:
    return out * MODEL.gain


def named(cls: type[Net]) -> Net:
    global MODEL
    MODEL = cls()
    return MODEL


def by_its_class() -> nn.Module:
    class Local(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * net.gain.sum()

    net = Local()
    return net


def hooked(hook: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module: Any = Net()
        module.blocks[0].lin.register_forward_hook(hook(module))
        return module

    return make


class Registry:
    owner: Any = None


def of_a_class(module: Any) -> Any:
    Registry.owner = module
    return lambda m, i, o: o * Registry.owner.gain


def that_assigns(module: Any) -> Any:
    global MODEL
    MODEL = module

    def hook(m: Any, i: Any, o: Any) -> Any:
        global COUNT
        COUNT += 1
        return o * MODEL.gain

    return hook


def by_a_proxy(module: Any) -> Any:
    owner = weakref.proxy(module)
    return lambda m, i, o: o * owner.gain


def scripted() -> nn.Module:
    module: Any = Net()
    module.scripted = torch.jit.script(nn.Linear(2, 2))
    return module


def grad_hook() -> nn.Module:
    module = Net()
    module.gain.register_hook(lambda grad: grad * 0)
    return module


def lazy() -> nn.Module:
    module: Any = Net()
    module.blocks[0].later = nn.LazyLinear(3)
    return module


def keyed(kind: Callable[[list[Any]], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module: Any = Net()
        module.table = [kind([module.blocks[0].lin.weight])]
        return module

    return make


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a hook on a gradient": (grad_hook, r"param 'gain' has a hook on its gradient.*step\.update"),
    "a lazy module": (lazy, r"submodule 'blocks\.0\.later' \(LazyLinear\) has a lazy 'weight'.*Call the module once"),
    "a ScriptModule": (scripted, r"submodule 'scripted' is a ScriptModule.*fz\.compile"),
    "a compiled module": (lambda: torch.compile(Net()), r"compiled by torch\.compile.*_orig_mod"),  # type: ignore[dict-item]
    "a dict of params": (keyed(dict.fromkeys), r"attribute 'table' .* param 'blocks\.0\.lin\.weight' itself.*its name"),
    "a set of params": (keyed(set), r"attribute 'table' .* param 'blocks\.0\.lin\.weight' itself.*its name"),
    "a DataParallel": (lambda: nn.DataParallel(Net()), r"is a DataParallel.*\.module"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("what", sorted(REFUSED))
def test_kinds_that_are_refused(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ValueError, match=f"(?s)^fz.functional: .*{message}"):
        fz.functional(make())


BY_NAME: dict[str, Callable[[], nn.Module]] = {
    "a method by a global name": lambda: named(ByItsName),
    "a method by a helper": lambda: named(ByAHelper),
    "a method by its closure": by_its_class,
    "a class's attribute": hooked(of_a_class),
    "a hook that assigns global names": hooked(that_assigns),
    "a hook by a proxy": hooked(by_a_proxy),
}


@in_turns(14)
@pytest.mark.parametrize("way", ["torch.func", "zero3", "compiled"])
@pytest.mark.parametrize("what", sorted(BY_NAME))
def test_what_a_first_call_reads_of_the_original_is_refused(what: str, way: str) -> None:
    """In a unit by the proof of its first run, which names the line."""
    module = BY_NAME[what]()
    apply, params = fz.functional(module)

    def on(rank: int) -> None:
        step = fz.train_step(apply, fz.sgd(0.1))
        step = fz.shard_zero3(step) if way == "zero3" else fz.compile(step)
        with pytest.raises(
            ValueError, match=r"its param '\S+' as the module had it|Unit 'blocks\.0' closes over.*private_copy"
        ):
            torch.func.grad(apply)(params, X) if way == "torch.func" else step(step.init(params), X)

    run_ranks(on, 1)


def test_the_modules_own_params_may_be_given() -> None:
    module = Net()
    apply, _ = fz.functional(module)
    assert torch.equal(apply(dict(module.named_parameters()), X), module(X))


def test_a_global_hook_that_reads_the_module_is_refused() -> None:
    module = Net()
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * module.gain)
    apply, params = fz.functional(module)
    try:
        with pytest.raises(ValueError, match="leads to its param 'gain'"):
            apply(params, X)
    finally:
        handle.remove()


@pytest.mark.parametrize("what", ["buffer", "attribute"])
def test_what_was_computed_from_params_before_is_refused_where_it_is_read(what: str) -> None:
    module: Any = Net()
    block = module.blocks[0]
    set_ = block.register_buffer if what == "buffer" else functools.partial(setattr, block)
    set_("doubled", block.gain * 2)
    block.register_forward_hook(lambda m, i, o: o * m.doubled)
    apply, params = fz.functional(module)
    with pytest.raises(ValueError, match=rf"submodule 'blocks\.0', {what} 'doubled' was computed from params"):
        apply(params, X)
