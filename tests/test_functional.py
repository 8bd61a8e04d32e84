"""The private copy of fz.functional: what hooks and closures lead to is mapped, and no call leaves anything behind."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import logging
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

F64 = torch.float64
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 3: fz.shard_zero3}
MODEL: Any = None  # as in a notebook
COUNT = 0


class Block(nn.Module):
    """A linear map with params and a buffer that hooks and closures may read."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.gain, self.shift = nn.Parameter(torch.full((3,), 1.5)), nn.Parameter(torch.full((3,), 0.25))
        self.register_buffer("table", torch.linspace(0.5, 1.0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.lin(x)) + self.table)


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(block() for _ in range(count))
            self.head = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.full((3,), 0.75))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain).square().mean()


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3), dtype=F64)


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in module.named_parameters()}


def by_functional_call(module: nn.Module) -> dict[str, torch.Tensor]:
    return torch.func.grad(lambda p: torch.func.functional_call(module, p, (X,)))(values_of(module))


def by_autograd(module: nn.Module) -> dict[str, torch.Tensor]:
    names, params = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(module(X), params, materialize_grads=True)
    return dict(zip(names, grads, strict=True))


FORMS = [(stage, remat) for stage in SHARDS for remat in (False, True)]


def check(module: nn.Module, want: dict[str, torch.Tensor], forms: Any = FORMS) -> None:
    """The gradient under torch.func, and at every stage, in both forms, twice, here and in ranks that are threads."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    apply, params = fz.functional(module)

    def rank_main(rank: int) -> None:
        assert_trees_close(dict(torch.func.grad(apply)(params, X)), want, rtol=1e-10)
        for stage, remat in forms:
            step = SHARDS[stage](fz.train_step(apply, fz.sgd(0.1)))
            step = fz.remat(step) if remat else step
            state = step.init(params)
            for _ in range(2):
                out, pullback = step.vjp(state, X)
                assert_trees_close(dict(fz.gather(pullback(torch.ones_like(out))[0])), want, rtol=1e-10)

    for _ in range(2):
        assert_trees_close(dict(torch.func.grad(apply)(params, X)), want, rtol=1e-10)
    run_ranks(rank_main, 2)
    assert_trees_equal(dict(module.state_dict()), before)


# ---- what reads the module from a hook or a closure


class Gained:
    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __call__(self, module: Any, inputs: Any, out: Any) -> Any:
        return out * self.owner.gain

    def hook(self, module: Any, inputs: Any, out: Any) -> Any:
        return self(module, inputs, out)


class Slotted:
    __slots__ = ("owner",)

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __call__(self, module: Any, inputs: Any, out: Any) -> Any:
        return out * self.owner.gain


@dataclasses.dataclass
class Box:
    owner: Any


def scaled_by(owner: Any, module: Any, inputs: Any, out: Any) -> Any:
    return out * owner.gain


def scaled_by_a_global(out: Any) -> Any:
    return out * MODEL.gain


def closure(at: Any, owner: Any) -> None:
    at.register_forward_hook(lambda m, i, o: o * owner.gain)


def pre_hook(at: Any, owner: Any) -> None:
    at.register_forward_pre_hook(lambda m, i: (i[0] * owner.gain,))


def pre_hook_with_kwargs(at: Any, owner: Any) -> None:
    at.register_forward_pre_hook(lambda m, i, k: ((i[0] * owner.gain,), k), with_kwargs=True)


def hook_with_kwargs(at: Any, owner: Any) -> None:
    at.register_forward_hook(lambda m, i, k, o: o * owner.gain, with_kwargs=True)


def always_called(at: Any, owner: Any) -> None:
    at.register_forward_hook(lambda m, i, o: o * owner.gain, always_call=True)


def prepended(at: Any, owner: Any) -> None:
    at.register_forward_hook(lambda m, i, o: o + owner.gain)
    at.register_forward_hook(lambda m, i, o: o * owner.gain, prepend=True)


def wrapped_forward(at: Any, owner: Any) -> None:
    old = at.forward
    at.forward = lambda *a: old(*a) * owner.gain


def wrapped_twice(at: Any, owner: Any) -> None:
    wrapped_forward(at, owner)
    at.old = at.forward
    at.forward = types.MethodType(lambda self, x: self.old(x) + owner.shift, at)


def partial(at: Any, owner: Any) -> None:
    at.register_forward_hook(functools.partial(scaled_by, owner))


def bound_method(at: Any, owner: Any) -> None:
    at.register_forward_hook(Gained(owner).hook)


def bound_to_a_submodule(at: Any, owner: Any) -> None:
    at.register_forward_hook(types.MethodType(lambda self, m, i, o: o * self.gain, owner))


def callable_object(at: Any, owner: Any) -> None:
    at.register_forward_hook(Gained(owner))


def callable_with_slots(at: Any, owner: Any) -> None:
    at.register_forward_hook(Slotted(owner))


def list_of_lambdas(at: Any, owner: Any) -> None:
    at.functions = [lambda x: x * owner.gain, {"then": lambda x: x + owner.shift}]
    at.register_forward_hook(lambda m, i, o: m.functions[1]["then"](m.functions[0](o)))


def default_argument(at: Any, owner: Any) -> None:
    at.register_forward_hook(lambda m, i, o, owner=owner: o * owner.gain)


def keyword_default(at: Any, owner: Any) -> None:
    def hook(m: Any, i: Any, o: Any, *, owner: Any = owner) -> Any:
        return o * owner.gain

    at.register_forward_hook(hook)


def nested_closure(at: Any, owner: Any) -> None:
    def outer() -> Any:
        def inner(x: Any) -> Any:
            return x * owner.gain

        return lambda m, i, o: inner(o)

    at.register_forward_hook(outer())


def function_attribute(at: Any, owner: Any) -> None:
    def hook(m: Any, i: Any, o: Any) -> Any:
        return o * hook.owner.gain  # type: ignore[attr-defined]

    hook.owner = owner  # type: ignore[attr-defined]
    at.register_forward_hook(hook)


def dataclass_in_a_closure(at: Any, owner: Any) -> None:
    box = Box([owner])
    at.register_forward_hook(lambda m, i, o: o * box.owner[0].gain)


def default_dict(at: Any, owner: Any) -> None:
    at.made = collections.defaultdict(lambda: owner.gain)
    at.register_forward_hook(lambda m, i, o: o * m.made.default_factory())


def weak_reference(at: Any, owner: Any) -> None:
    reference = weakref.ref(owner)
    at.register_forward_hook(lambda m, i, o: o * reference().gain)  # type: ignore[union-attr]


def weak_proxy(at: Any, owner: Any) -> None:
    proxy = weakref.proxy(owner)
    at.register_forward_hook(lambda m, i, o: o * proxy.gain)


def weak_dict(at: Any, owner: Any) -> None:
    at.owners = weakref.WeakKeyDictionary({at: owner})
    at.register_forward_hook(lambda m, i, o: o * m.owners[m].gain)


def cycle(at: Any, owner: Any) -> None:
    at.parent = [owner]
    at.register_forward_hook(lambda m, i, o: o * m.parent[0].gain)


def weak_parent(at: Any, owner: Any) -> None:
    at.parent = weakref.ref(owner)
    at.register_forward_hook(lambda m, i, o: o * m.parent().gain)


def buffer_by_closure(at: Any, owner: Any) -> None:
    table = owner.get_buffer("table") if hasattr(owner, "table") else owner.gain.detach()
    at.register_forward_hook(lambda m, i, o: o * table * owner.gain)


def global_name(at: Any, owner: Any) -> None:
    global MODEL
    MODEL = owner
    at.register_forward_hook(lambda m, i, o: o * MODEL.gain)


def global_name_in_nested_code(at: Any, owner: Any) -> None:
    global MODEL
    MODEL = owner

    def hook(m: Any, i: Any, o: Any) -> Any:
        return next((lambda x: x * MODEL.gain)(x) for x in (o,))

    at.register_forward_hook(hook)


def global_helper(at: Any, owner: Any) -> None:
    global MODEL
    MODEL = owner
    at.register_forward_hook(lambda m, i, o: scaled_by_a_global(o))


READERS: dict[str, Callable[[Any, Any], None]] = {
    fn.__name__.replace("_", " "): fn
    for fn in (
        closure, pre_hook, pre_hook_with_kwargs, hook_with_kwargs, always_called, prepended, wrapped_forward,
        wrapped_twice, partial, bound_method, bound_to_a_submodule, callable_object, callable_with_slots,
        list_of_lambdas, default_argument, keyword_default, nested_closure, function_attribute, dataclass_in_a_closure,
        default_dict, weak_reference, weak_proxy, weak_dict, cycle, weak_parent, buffer_by_closure, global_name,
        global_name_in_nested_code, global_helper,
    )
}  # fmt: skip


@pytest.mark.parametrize("how", sorted(READERS))
def test_what_reads_the_module_reads_the_copy(how: str) -> None:
    module = Net()
    READERS[how](module.blocks[0].lin, module.blocks[0])
    if how not in ("list of lambdas", "wrapped twice", "global name", "global name in nested code", "global helper"):
        READERS[how](module.head, module)
    check(module, by_functional_call(module))


@pytest.mark.parametrize("how", ["closure", "bound to a submodule", "partial", "global name"])
def test_a_hook_of_a_unit_itself(how: str) -> None:
    module = Net()
    READERS[how](module.blocks[0], module.blocks[0])
    check(module, by_functional_call(module), forms=[(0, False), (1, False)])


@given(data=st.data(), stage=st.sampled_from([0, 1, 3]), remat=st.booleans(), count=st.integers(1, 3))
def test_any_hooks_on_any_modules(data: Any, stage: int, remat: bool, count: int) -> None:
    """In the main thread and in two ranks, against torch.func.functional_call.

    What a unit reads is its own, as long as it is gathered for its call alone; where nothing is, it is anybody's.
    """
    module = Net(count=count)
    gathered = stage == 3 or remat
    some = st.lists(st.sampled_from(sorted(READERS)), min_size=1, max_size=3, unique_by=lambda how: how[:6])
    for how in data.draw(some, label="how"):  # one global name holds one module
        block: Any = module.blocks[data.draw(st.integers(0, count - 1), label="block")]
        at, owner = data.draw(st.sampled_from([(block.lin, block), (block.norm, block)]), label="at")
        if not gathered:
            owner = data.draw(st.sampled_from([block, module.blocks[-1]]), label="owner")
            at = data.draw(st.sampled_from([at, block]), label="at")
        if how == "wrapped forward":
            at = block
        READERS[how](at, owner)
    if data.draw(st.booleans(), label="one block at two paths"):
        module.blocks.append(module.blocks[0])
    check(module, by_functional_call(module), forms=[(stage, remat)])


# ---- a param that is held besides its module: plain autograd differentiates it there


def params_in_a_list(at: Any, owner: Any) -> None:
    at.held = [owner.gain, (owner.shift, 1), {"deep": [owner.gain]}]
    at.register_forward_hook(lambda m, i, o: o * m.held[0] + m.held[1][0] + m.held[2]["deep"][0])


def param_in_a_closure(at: Any, owner: Any) -> None:
    gain = owner.gain
    at.register_forward_hook(lambda m, i, o: o * gain)


def param_as_a_default(at: Any, owner: Any) -> None:
    def hook(m: Any, i: Any, o: Any, gain: Any = owner.gain, *, shift: Any = owner.shift) -> Any:
        return o * gain + shift

    at.register_forward_hook(hook)


def param_in_a_partial(at: Any, owner: Any) -> None:
    at.register_forward_hook(functools.partial(lambda gain, m, i, o: o * gain, owner.gain))


def method_of_a_param(at: Any, owner: Any) -> None:
    at.scale = owner.gain.mul
    at.register_forward_hook(lambda m, i, o: m.scale(o))


def weakly_held_param(at: Any, owner: Any) -> None:
    at.held = weakref.ref(owner.gain)
    at.register_forward_hook(lambda m, i, o: o * m.held())


def param_of_an_object(at: Any, owner: Any) -> None:
    at.box = Box(owner.gain)
    at.register_forward_hook(lambda m, i, o: o * m.box.owner)


def param_by_a_global_name(at: Any, owner: Any) -> None:
    global MODEL
    MODEL = owner.gain
    at.register_forward_hook(lambda m, i, o: o * MODEL)


HOLDERS = {
    fn.__name__.replace("_", " "): fn
    for fn in (
        params_in_a_list, param_in_a_closure, param_as_a_default, param_in_a_partial, method_of_a_param,
        weakly_held_param, param_of_an_object, param_by_a_global_name,
    )
}  # fmt: skip


@pytest.mark.parametrize("how", sorted(HOLDERS))
def test_a_param_that_is_held_besides_its_module(how: str) -> None:
    module = Net()
    HOLDERS[how](module.blocks[0].lin, module.blocks[0])
    want = by_autograd(module)
    assert want["blocks.0.gain"].abs().sum() > 0
    check(module, want)


def test_a_param_of_another_unit_that_is_held_is_refused_by_name() -> None:
    module = Net()
    param_in_a_closure(module.blocks[0].lin, module.blocks[1])
    apply, params = fz.functional(module)

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(apply, fz.sgd(0.1)))
        with pytest.raises(TypeError, match=r"leaf 'blocks\.1\.gain' belongs to unit 'blocks\.1'"):
            step.vjp(step.init(params), X)

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("held", ["a set", "a key"])
def test_a_param_that_is_held_where_nothing_can_be_put(held: str) -> None:
    module = Net()
    module.held = {module.gain} if held == "a set" else {module.gain: 1}
    apply, params = fz.functional(module)
    with pytest.raises(ValueError, match=r"the module, attribute 'held' is a (set|dict) that holds param 'gain'"):
        apply(params, X)


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
    closure(module.blocks[0].lin, module.blocks[0])
    return module


def run_before() -> nn.Module:
    """Attributes still hold what an earlier forward computed from the params."""
    module: Any = Net()

    def forward(x: torch.Tensor, old: Any = module.blocks[0].forward) -> torch.Tensor:
        block = module.blocks[0]
        block.last = old(x)
        return block.last * 2

    module.blocks[0].forward = forward
    module(X)
    assert module.blocks[0].last.grad_fn is not None
    return module


KINDS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": with_parametrization(lambda block: Symmetric()),
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


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_kinds_of_modules(kind: str) -> None:
    module = KINDS[kind]()
    if kind == "furnished":
        closure(module.blocks[0].lin, module.blocks[0])  # type: ignore[index]
    check(module, by_autograd(module))


def test_a_submodule_whose_hook_holds_its_parent() -> None:
    """The parent's other params are constants, as for functional_call of the submodule."""
    parent: Any = Net()
    block = parent.blocks[0]
    block.lin.register_forward_hook(lambda m, i, o: o * parent.gain * parent.blocks[0].gain)

    def loss(p: Any) -> torch.Tensor:
        return torch.func.functional_call(block, p, (X,)).square().sum()

    apply, params = fz.functional(block)
    assert_trees_close(
        dict(torch.func.grad(lambda p: apply(p, X).square().sum())(params)), torch.func.grad(loss)(values_of(block))
    )


def test_a_long_chain_of_modules() -> None:
    """Each holds the next: no recursion is deep enough for all of them."""
    module: Any = Net()
    here = module.blocks[0]
    for _ in range(2000):
        here.following = [nn.Identity()]
        here = here.following[0]
    apply, params = fz.functional(module)
    assert torch.equal(apply(params, X), module(X))


def test_a_global_hook_that_reads_no_module_is_kept() -> None:
    module = Net()
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2 if type(m) is nn.LayerNorm else o)
    try:
        check(module, by_functional_call(module))
    finally:
        handle.remove()


# ---- what is somebody else's stays what it is


def test_a_list_that_a_hook_appends_to_is_the_users() -> None:
    module, seen, counts = Net(), [], {"calls": 0}
    recorder = Gained(seen)
    recorder.hook = lambda m, i, o: seen.append(o.shape)  # type: ignore[method-assign]

    def hook(m: Any, i: Any, o: Any) -> Any:
        seen.append(o.shape)
        counts["calls"] += 1
        return o * module.gain

    module.head.register_forward_hook(hook)
    module.head.register_forward_hook(lambda m, i, o: recorder.hook(m, i, o))
    apply, params = fz.functional(module)
    for _ in range(2):
        apply(params, X)
    assert len(seen) == 4 and counts == {"calls": 2}
    assert module.head._forward_hooks.popitem()[1].__closure__[0].cell_contents is recorder  # type: ignore[index]


def test_a_count_in_a_closure_is_shared() -> None:
    module, calls = Net(), 0

    def hook(m: Any, i: Any, o: Any) -> Any:
        nonlocal calls
        calls += 1
        return o * module.gain

    module.head.register_forward_hook(hook)
    apply, params = fz.functional(module)
    apply(params, X)
    module(X)
    assert calls == 2


def test_global_names_that_do_not_lead_to_the_module_are_read_when_it_runs(monkeypatch: Any) -> None:
    module: Any = Net()
    monkeypatch.setitem(globals(), "MODEL", module)
    monkeypatch.setitem(globals(), "COUNT", 2)
    module.head.register_forward_hook(lambda m, i, o: o * MODEL.gain * COUNT)
    apply, params = fz.functional(module)
    before = apply(params, X)
    monkeypatch.setitem(globals(), "COUNT", 4)
    assert torch.allclose(apply(params, X), before * 4)


# ---- what cannot be mapped is refused, and where it is


class ByItsName(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * MODEL.gain.sum()


class ByAHelper(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_by_a_global(x).sum()


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


def with_attribute(name: str, make: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module: Any = Net()
        setattr(module, name, make(module))
        return module

    return build


def yielding(module: Any) -> Any:
    while True:
        yield module.gain


def grad_hook() -> nn.Module:
    module = Net()
    module.gain.register_hook(lambda grad: grad * 0)
    return module


def lazy() -> nn.Module:
    module: Any = Net()
    module.blocks[0].later = nn.LazyLinear(3)
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a method by a global name": (
        lambda: named(ByItsName),
        r"the module, the method ByItsName\.forward, the global name 'MODEL' leads to the module itself.*Use self",
    ),
    "a method by a helper": (
        lambda: named(ByAHelper),
        r"the method ByAHelper\.scaled, the global name 'scaled_by_a_global', the global name 'MODEL' leads to",
    ),
    "a method by its closure": (by_its_class, r"the method Local\.forward, closure variable 'net', .*leads to"),
    "a cache": (
        hooked(lambda module: functools.lru_cache(lambda m, i, o: o * module.gain)),
        r"submodule 'blocks\.0\.lin', forward hook .*closure variable 'module'.* leads to the module itself",
    ),
    "a class's attribute": (hooked(of_a_class), r"forward hook .*the global name 'Registry\.owner' leads to"),
    "a hook that assigns global names": (hooked(that_assigns), r"forward hook .*the global name 'MODEL' leads to"),
    "a generator": (with_attribute("made", yielding), r"the module, attribute 'made', local 'module' leads to"),
    "a hook on a gradient": (grad_hook, r"param 'gain' has a hook on its gradient.*step\.update"),
    "a lazy module": (lazy, r"submodule 'blocks\.0\.later' \(LazyLinear\) has a lazy 'weight'.*Call the module once"),
    "a ScriptModule": (
        with_attribute("scripted", lambda module: torch.jit.script(nn.Linear(2, 2))),
        r"submodule 'scripted' is a ScriptModule.*fz\.compile",
    ),
    "a compiled module": (lambda: torch.compile(Net()), r"compiled by torch\.compile.*_orig_mod"),  # type: ignore[dict-item]
    "a DataParallel": (lambda: nn.DataParallel(Net()), r"is a DataParallel.*\.module"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_cannot_be_mapped_is_refused(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ValueError, match=f"(?s)^fz.functional: .*{message}"):
        fz.functional(make())


def test_a_global_hook_that_reads_the_module_is_refused() -> None:
    module = Net()
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * module.gain)
    try:
        with pytest.raises(ValueError, match=r"the hook .*lambda.* of all modules, closure variable 'module'"):
            fz.functional(module)
    finally:
        handle.remove()


def test_what_was_computed_from_params_before_is_refused_where_it_is_read() -> None:
    module: Any = Net()
    module.blocks[0].doubled = module.blocks[0].gain * 2
    module.blocks[0].lin.register_forward_hook(lambda m, i, o: o * module.blocks[0].doubled)
    apply, params = fz.functional(module)
    with pytest.raises(ValueError, match=r"submodule 'blocks\.0', attribute 'doubled' was computed from the module's"):
        apply(params, X)


# ---- no call leaves anything behind


class Changing(Block):
    """A block that writes to itself, in the way that its class attribute says."""

    how = "none"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(3))
        self.plain, self.calls, self.seen, self.made = torch.zeros(3, dtype=F64), 0, [0], {"deep": [0]}
        self.box, self.aux = Box(0), None
        self.extra: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        mean = out.detach().mean(0)
        ema: Any = self.ema
        match self.how:
            case "assigned":
                self.ema = 0.5 * ema + mean
            case "in place":
                ema.mul_(0.5).add_(1.0)
            case "in place, by .data":
                ema.data.mul_(0.5).add_(1.0)
            case "resized":
                ema.resize_(5)
            case "registered":
                self.register_buffer("other", mean)
            case "deleted":
                del self.ema
                return out
            case "an attribute now":
                del self.ema
                self.ema = mean
            case "a param":
                self.register_parameter("other", nn.Parameter(torch.ones(3, dtype=F64)))
            case "a submodule":
                self.extra = nn.Identity()
            case "a tensor in place":
                self.plain.add_(1.0)
                return out + self.plain
            case "attributes":
                self.calls += 1
                self.seen.append(1)
                self.made["deep"].append(1)
                self.made[self.calls] = 1  # type: ignore[index]
                self.box.owner += 1
                self.plain, self.aux = self.plain + mean, out
                self.lin.register_forward_hook(lambda m, i, o: o * 2)
                state = self.calls + len(self.seen) + len(self.made["deep"]) + len(self.made) + self.box.owner
                return out * state + self.plain
            case "raises":
                self.ema, self.calls = mean, self.calls + 1
                raise KeyError(str(self.calls))
        return out + self.ema[:3]


def changing(how: str) -> nn.Module:
    class Here(Changing):
        pass

    Here.how = how
    return Net(Here)


WRITES = {
    "assigned": "its buffer 'blocks.0.ema'",
    "in place": "'blocks.0.ema'",
    "in place, by .data": "'blocks.0.ema'",
    "resized": "'blocks.0.ema'",
    "registered": "its buffer 'blocks.0.other'",
    "deleted": "its buffer 'blocks.0.ema'",
    "an attribute now": "its buffer 'blocks.0.ema'",
    "a param": "its param 'blocks.0.other'",
    "a submodule": "its submodule 'blocks.0.extra'",
    "a tensor in place": "'blocks.0.plain'|attribute 'plain'",
}


def runs(apply: Any, params: Any) -> list[Callable[[], Any]]:
    out: list[Callable[[], Any]] = [lambda: apply(params, X), lambda: torch.func.grad(apply)(params, X)]
    for stage, remat in FORMS:
        step = SHARDS[stage](fz.train_step(apply, fz.sgd(0.1)))
        step = fz.remat(step) if remat else step

        def run(step: Any = step) -> Any:
            loss, pullback = step.vjp(step.init(params), X)
            return fz.gather(pullback(torch.ones_like(loss))[0])

        out.append(run)
    return out


@pytest.mark.parametrize("how", sorted(WRITES))
def test_a_module_that_changes_its_buffers_is_refused(how: str) -> None:
    """By name, also inside a unit that is gathered or rematerialised, every time; and nothing is left of it."""
    module = changing(how)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    apply, params = fz.functional(module)

    def rank_main(rank: int) -> None:
        for run in runs(apply, params):
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"The module changed .*({WRITES[how]}).* in its forward"):
                    run()
        type(module.blocks[0]).how = "none"
        want = by_functional_call(module)
        for run in runs(apply, params)[1:]:
            assert_trees_close(dict(run()), want, rtol=1e-10)
        type(module.blocks[0]).how = how

    run_ranks(rank_main, 1)
    assert_trees_equal(dict(module.state_dict()), before)


def test_attributes_are_after_a_call_what_they_were_before() -> None:
    """A call is a function: the second is the first again; what a forward writes to attributes is its own affair."""
    module = changing("attributes")
    fresh = copy.deepcopy(module)
    want = torch.func.grad(lambda p: torch.func.functional_call(fresh, p, (X,)))(values_of(module))
    apply, params = fz.functional(module)

    def rank_main(rank: int) -> None:
        for run in runs(apply, params)[1:]:
            for _ in range(2):
                assert_trees_close(dict(run()), want, rtol=1e-10)

    run_ranks(rank_main, 1)
    block: Any = module.blocks[0]
    assert block.calls == 0 and block.seen == [0] and block.aux is None and not block.lin._forward_hooks


def test_an_exception_leaves_nothing_behind() -> None:
    module = changing("raises")
    apply, params = fz.functional(module)

    def rank_main(rank: int) -> None:
        for run in runs(apply, params):
            for _ in range(2):
                with pytest.raises(KeyError, match="'1'"):
                    run()

    run_ranks(rank_main, 1)
    type(module.blocks[0]).how = "none"
    assert torch.equal(apply(params, X), module(X))


def test_the_users_changes_of_the_module_do_not_reach_the_function() -> None:
    module: Any = Net()
    apply, params = fz.functional(module)
    want = apply({name: value.clone() for name, value in params.items()}, X)
    kept = {name: value.clone() for name, value in params.items()}
    module.blocks[0].table.zero_()
    module.gain.data.zero_()
    module.blocks[0].register_forward_hook(lambda m, i, o: o * 0)
    assert torch.equal(apply(kept, X), want)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(apply(kept, X)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], want)


def test_a_module_at_work_inside_inference_mode() -> None:
    module = Net()
    apply, params = fz.functional(module)
    with torch.inference_mode():
        first = apply(params, X)
    assert torch.equal(first, module(X))
    assert_trees_close(dict(torch.func.grad(apply)(params, X)), by_functional_call(module))
