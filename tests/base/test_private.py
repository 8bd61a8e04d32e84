"""What fzero uses of torch's private parts, each held against what it should say."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from nightly import in_turns
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fzero.base import hooks, private, texts, thread_state


def seen(fn: Any) -> tuple[Any, torch.Tensor]:
    """What `fn` says of a tensor inside torch.func.vjp under no_grad, and that value's gradient."""
    box = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        box.append(fn(x))
        return x.sum()

    with torch.no_grad():
        pair: Any = torch.func.vjp(traced, torch.ones(2))
        return box[0], pair[1](torch.ones(()))[0]


def test_levels() -> None:
    assert private.level() == 0
    assert seen(lambda x: private.level())[0] == 1
    assert seen(lambda x: private.is_wrapped(x))[0]
    assert not private.is_wrapped(torch.ones(1))


def test_a_value_of_an_outer_level_is_differentiated() -> None:
    def inner(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert private.is_differentiated(x)
        assert private.is_differentiated(y)
        assert not private.is_differentiated(torch.ones(1))
        assert not private.is_differentiated(torch.ones(1, dtype=torch.int64))
        return (x * y).sum()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(inner)(torch.ones(2), x).sum()

    assert torch.func.grad(outer)(torch.ones(2)).tolist() == [1, 1]


def test_a_direct_function_is_the_function() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(factor: float, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            assert private.level() == 0
            return factor * x, x + 1

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.factor = inputs[0]

        @staticmethod
        def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:  # type: ignore[override]
            return None, ctx.factor * first + second

    direct = private.direct(Twice)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            pair: Any = torch.func.vjp(lambda x: direct(3.0, x), torch.ones(2))
            (first, second), pullback = pair
            (ct,) = pullback((torch.ones(2), torch.full((2,), 10.0)))
        assert (first.tolist(), second.tolist(), ct.tolist()) == ([3, 3], [2, 2], [13, 13])
    x = torch.ones(2, requires_grad=True)
    direct(3.0, x)[0].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3]


def test_a_backward_knows_whether_its_graph_is_kept() -> None:
    said = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: said.append(private.keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert said == [True, False]


def test_writes_that_are_no_changes() -> None:
    w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    leaf = w.detach().requires_grad_()
    out = (leaf * x).sum()
    with private.preserve_version([leaf]), torch.no_grad():
        leaf.mul_(3)
    out.backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3]


def test_saved_tensor_hooks_where_functorch_switched_them_off() -> None:
    def hooked(x: torch.Tensor) -> bool:
        refused = hooks.allow()
        works = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        hooks.refuse_again(refused)
        return works

    assert seen(hooked)[0]


def test_a_backward_that_runs_as_soon_as_it_can() -> None:
    """Of two that are ready autograd takes the one that was made last, but for one that was moved ahead."""
    said: list[str] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor, name: str) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.name = inputs[1]
            if ctx.name == "early":
                private.pull_back_early(ctx)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
            said.append(ctx.name)
            return g, None

    def run(x: torch.Tensor) -> torch.Tensor:
        first, early = Note.apply(x, "first"), Note.apply(x, "early")
        return (Note.apply(first, "last") * early).sum()

    x = torch.ones(2, requires_grad=True)
    run(x).backward()
    torch.func.grad(run)(torch.ones(2))
    assert said == ["early", "last", "first"] * 2


def test_holders() -> None:
    x = torch.ones(4)
    assert private.storage_holders(x) == 1
    view = x[:2]
    assert private.storage_holders(x) == 2
    del view
    gc.collect()
    assert private.storage_holders(x) == 1
    mapping = {"x": torch.ones(1)}
    assert private.entry_holders(mapping, "x") == 0
    other = mapping["x"]
    assert private.entry_holders(mapping, "x") == 1
    del other


def test_the_transform_that_a_tensor_takes_part_in() -> None:
    """Of whatever level it is, also where others are active inside; a detached one is a constant."""
    one = torch.ones(2)
    said: dict[str, list[str | None]] = {}

    def see(name: str, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            said[name] = [private.transform_of(t) for t in (x, x * 2, x * y.detach(), x.detach(), one, torch.ones(1))]
            return (x * y).sum()

        said[f"{name}, alone"] = [private.transform_of(t) for t in (x, x * 2, x + one, x.detach(), one, torch.ones(1))]
        return torch.func.grad(inner)(torch.ones(2)).sum()

    torch.func.grad(lambda x: see("torch.func.grad", x))(one)
    torch.func.jvp(lambda x: see("torch.func.jvp", x), (one,), (one,))
    with forward_ad.dual_level():
        see("torch.autograd.forward_ad", forward_ad.make_dual(one, one))
    for name, transforms in said.items():
        name = name.removesuffix(", alone")
        assert transforms == [name, name, name, None, None, None], name
    said.clear()
    torch.func.vmap(lambda x: see("torch.func.vmap", x))(torch.ones(2, 2))
    for name, transforms in said.items():
        name = name.removesuffix(", alone")
        assert transforms == [name, name, name, name, None, None], name
    assert private.transform_of(torch.ones(2, requires_grad=True)) is None  # plain autograd is no transform
    assert not private.transforms()
    assert seen(lambda x: private.transforms())[0]


def test_below_all_transforms_tensors_are_plain() -> None:
    def made(x: torch.Tensor) -> torch.Tensor:
        assert private.is_wrapped(torch.ones(1) + 1)
        with private.below_transforms():
            assert private.level() == 0 and not private.is_wrapped(torch.ones(1) + 1)
        assert private.level() == 1 and private.is_wrapped(x.detach())
        assert not private.is_wrapped(private.unwrapped(x.detach()))
        torch.func.vmap(lambda one: seen.append(private.inner(one) is x) or one)(x)
        return (x * x).sum()

    seen: list[bool] = []

    assert torch.func.grad(made)(torch.ones(2)).tolist() == [2, 2]
    assert seen == [True]  # the same object, by which it is known


def test_no_grad_makes_constants_for_the_levels_around_it() -> None:
    """As torch has it; a level that begins inside is not concerned."""
    said: list[str | None] = []

    def outer(x: torch.Tensor, inside: bool, around: bool) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(not inside):
                said.extend([private.transform_of(x), private.transform_of(y)])
                part = x * y
            return (part * y).sum()

        with torch.set_grad_enabled(not around):
            out = torch.func.grad(inner)(torch.ones(2))
        return out.sum()

    def found(inside: bool, around: bool) -> tuple[list[float], list[str | None]]:
        said.clear()
        return torch.func.grad(outer)(torch.full((2,), 3.0), inside, around).tolist(), list(said)

    grad = "torch.func.grad"
    assert found(inside=False, around=False) == ([2, 2], [grad, grad])
    assert found(inside=True, around=False) == ([0, 0], [None, None])
    assert found(inside=False, around=True) == ([0, 0], [None, grad])


def test_an_allocators_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert texts.is_out_of_memory(caught.value)
    assert texts.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not texts.is_out_of_memory(RuntimeError("Connection closed by peer"))


def test_dispatch_modes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not private.dispatch_modes()
    with FakeTensorMode():
        assert private.dispatch_modes() and private.is_fake(torch.ones(()))
        with thread_state.without_dispatch_modes():
            assert not private.dispatch_modes() and torch.ones(()).item() == 1.0
        assert private.dispatch_modes()
    with thread_state.without_dispatch_modes():
        assert torch.ones(()).item() == 1.0


def test_below_a_tensors_level() -> None:
    def look(x: torch.Tensor) -> Any:
        with private.below_transforms():
            inside = private.below(x)
        return inside, private.below(x), private.below(torch.ones(1))

    assert seen(look)[0] == (True, False, False)


def _group_outlives_its_end() -> list[str]:
    """The threads that gloo has left after a step and destroy_process_group."""
    import torch.distributed as dist

    import fzero as fz

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        step = fz.shard_zero3(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        state, _ = step(step.init({"w": torch.ones(3)}), torch.ones(3))
        assert state.step == 1
        del step, state
        dist.destroy_process_group()
    gc.collect()
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


@in_turns(10, "interpreters of their own")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_group_ends_with_destroy_process_group() -> None:
    """torch.func imports a module whose default arguments would keep it; its threads may abort the process at exit."""
    code = "import test_private; assert test_private._group_outlives_its_end() == []"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_function_modes() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    assert private.function_mode() is None
    with Mode() as mode:
        assert private.function_mode() is mode
        with private.without_function_mode():
            torch.ones(2).sum()
        assert mode.seen == 0
        torch.ones(2).sum()
        assert mode.seen


class _Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()


def _checkpointed(x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)  # type: ignore[return-value]


def _ctc(x: torch.Tensor) -> torch.Tensor:
    lengths: Any = [4], [2]  # of tensors it reads no memory
    return torch.nn.functional.ctc_loss(x.expand(4, 1, 2).log_softmax(-1), torch.tensor([[1, 1]]), *lengths)


def _without_its_level(operator: Any) -> None:
    escaped: Any = seen(lambda x: x * 2)[0]
    assert operator(escaped).shape == (2,)
    with private.without_dead_wrappers():
        assert torch.func.grad(lambda y: y.sin().sum())(torch.zeros(2)).tolist() == [1, 1]
        operator(escaped)


def test_a_map_among_the_levels() -> None:
    assert not seen(private.is_mapped)[0]
    maps: list[bool] = []
    torch.func.vmap(lambda x: (maps.append(private.is_mapped(x)), x)[1])(torch.ones(2))
    assert maps == [True]


def _leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def _emptied() -> torch.Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def _writes_a_leaf() -> None:
    torch.ones(2, requires_grad=True).add_(1.0)


def _writes_what_is_captured() -> None:
    captured = torch.ones(2)
    torch.func.vjp(lambda x: captured.add_(x).sum(), torch.ones(2))


def _numpy_of_a_fake() -> None:
    with thread_state.without_values():
        torch.ones(2).numpy()


def _writes_what_is_saved() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.add_(1.0)
    y.sum().backward()


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (texts.SAVED_HOOKS, lambda: seen(_checkpointed)),
        (texts.OLD_FUNCTION, lambda: seen(_Old.apply)),
        (texts.REQUIRES_GRAD, lambda: seen(lambda x: x.detach().requires_grad_())),
        (texts.NO_MEMORY, lambda: seen(_ctc)),
        (texts.BACKWARD, lambda: seen(lambda x: x.sum().backward())),
        (texts.NO_LEAF, lambda: (torch.ones(2, requires_grad=True) * 2).requires_grad_(False)),
        (texts.NO_COPY, lambda: copy.deepcopy(torch.ones(2, requires_grad=True) * 2)),
        (texts.NO_STORAGE, lambda: seen(copy.deepcopy)),
        (texts.NO_NUMPY, _numpy_of_a_fake),
        (texts.SETS_DATA, lambda: seen(lambda x: setattr(x.detach(), "data", x * 2))),
        (texts.RETAIN_GRAD, lambda: seen(lambda x: x.exp().retain_grad())),
        (texts.NOT_USED, lambda: torch.autograd.grad(_leaf().sum(), _leaf())),
        (texts.FREED[0], lambda: _emptied().view(2, 2) @ torch.ones(2, 2)),
        (texts.FREED[1], lambda: _emptied().as_strided((2,), (1,))),
        (texts.NO_STRIDES, lambda: seen(lambda x: x.reshape(1, -1).to_sparse_csr())),
        (texts.NO_STORAGE, lambda: _without_its_level(torch.Tensor.t)),
        (texts.NO_MEMORY, lambda: _without_its_level(torch.sin)),
        (texts.WRITES_LEAF, _writes_a_leaf),
        (texts.WRITES_CAPTURED, _writes_what_is_captured),
        (texts.WRITES_SAVED, _writes_what_is_saved),
    ],
)
def test_what_torch_says_where_it_refuses(text: str, refused: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        refused()
    assert texts.says(caught.value, text)
    assert not texts.says(ValueError(text), text)


def test_what_is_computed_without_autocast() -> None:
    x = torch.ones(2, 2)
    assert isinstance(private.without_autocast(), contextlib.nullcontext)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with private.without_autocast():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


def test_which_node_an_operator_belongs_to() -> None:
    """In the forward the one that was made last, in the pullback the one that runs."""
    seen: list[tuple[str, int]] = []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            node = hooks.node_that_runs()
            number = hooks.next_number() - 1 if node is None else hooks.number_of(node)
            seen.append((str(func), number))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Looks():
        out = x.exp().sin().sum()
    forward = dict(seen)
    seen.clear()
    with Looks():
        out.backward()
    assert hooks.node_that_runs() is None
    assert ("aten.cos.default", forward["aten.sin.default"]) in seen
    assert ("aten.mul.Tensor", forward["aten.exp.default"]) in seen


def test_the_number_of_a_pass() -> None:
    """Another one for each, also for one that begins within another."""
    seen: list[int] = []

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, inner: bool) -> torch.Tensor:  # type: ignore[override]
            ctx.inner = inner
            return x.clone()

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
            seen.append(private.pass_that_runs())
            if ctx.inner:
                with torch.enable_grad():
                    Notes.apply(torch.ones(1, requires_grad=True), False).backward()
                seen.append(private.pass_that_runs())
            return cotangent, None

    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        Notes.apply(Notes.apply(x, True), False).backward()
    assert private.pass_that_runs() == -1 and -1 not in seen
    first, again = seen[:4], seen[4:]
    assert first[0] == first[1] == first[3] and again[0] == again[1] == again[3]
    assert len({*seen}) == 4


# ---- hooks before others'


@pytest.mark.parametrize("kind", ["none", "a tensor's", "a node's", "a tensor that keeps its gradient"])
@pytest.mark.parametrize("ours_comes", ["first", "last"])
def test_a_hook_before_others(kind: str, ours_comes: str) -> None:
    x = torch.ones(3, requires_grad=True)
    y, called = x * 2.0, list[str]()
    ours = lambda _: called.append("ours")
    theirs: dict[str, Any] = {
        "none": lambda: None,
        "a tensor's": lambda: [y.register_hook(lambda _, name=name: called.append(name)) for name in "ab"],
        "a node's": lambda: y.grad_fn.register_prehook(lambda _: called.append("a")),  # type: ignore[union-attr]
        "a tensor that keeps its gradient": y.retain_grad,
    }
    handles = None
    if ours_comes == "last":
        handles = theirs[kind]()
    count = hooks.registered()
    hooks.before(y, ours)
    assert hooks.registered() == count  # it counts for none of the user's
    if ours_comes == "first":
        handles = theirs[kind]()
    y.sum().backward(retain_graph=True)
    assert called == ["ours", *{"a tensor's": "ab", "a node's": "a"}.get(kind, "")]
    assert kind != "a tensor that keeps its gradient" or torch.equal(y.grad, torch.ones(3))  # type: ignore[arg-type]
    if kind == "a tensor's":  # which its user may remove
        assert handles is not None
        handles[0].remove()
        called.clear()
        y.sum().backward()
        assert called == ["ours", "b"]


@pytest.mark.parametrize("by", ["y", "x"])
def test_a_hook_on_what_is_written_to_afterwards(by: str) -> None:
    """The node that it was put before stays a part of the graph; a view's does not, but that of its base."""
    x = torch.ones(2, 3, requires_grad=True)
    for view in (False, True):
        called = list[str]()
        whole = x * 2.0
        y = whole.t() if view else whole
        own = y.grad_fn
        hooks.before(whole, lambda _, called=called: called.append("whole"))
        if view:
            hooks.before(y, lambda _, called=called: called.append("view"))
        y.mul_(3.0)
        assert y._backward_hooks is None  # others' are put before the write's node
        y.register_hook(lambda _, called=called: called.append("theirs"))
        if by == "y":
            torch.autograd.grad(y.sum(), y)
            assert called == ["theirs"]
        else:
            (found,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(found, torch.full((2, 3), 6.0)) and called == ["theirs", "whole"]
        assert own is not y.grad_fn


def test_a_hook_is_called_for_what_has_no_cotangent() -> None:
    """As a node after it that brings none; what is before it then runs all the same."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> None:  # type: ignore[override]
            return None

    x, given = torch.ones(3, requires_grad=True), list[object]()
    y = x * 2.0
    hooks.before(y, given.append)
    Nothing.apply(y).sum().backward()
    assert given == [None]


def test_nothing_is_left_of_a_hook() -> None:
    class Owner:
        def hook(self, _: torch.Tensor) -> None: ...

    gc.collect()
    gc.disable()
    try:
        x, owner = torch.ones(3, requires_grad=True), Owner()
        y = x * 2.0
        hooks.before(y, owner.hook)
        out, alive = y.sum(), weakref.ref(owner)
        del owner, y
        out.backward()
        assert alive() is not None  # as long as the graph is
        del out
        assert alive() is None
    finally:
        gc.enable()


def test_traces() -> None:
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.traces())
        return x * 2

    fn(torch.ones(2))
    make_fx(fn)(torch.ones(2))
    with FlopCounterMode(display=False):
        fn(torch.ones(2))
    assert seen == [False, True, False]


def test_the_forward_of_a_function() -> None:
    said = []

    class Says(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            said.append(private.in_function())
            return x.clone()

    Says.apply(torch.ones(1, requires_grad=True))
    with torch.no_grad():
        Says.apply(torch.ones(1))
        said.append(private.in_function())
    assert said == [True, True, False] and not private.in_function()


def test_who_may_write_to_a_view() -> None:
    x = torch.ones(4, 6, requires_grad=True) * 1
    for y in (*x.chunk(2), *x.unbind(), *x.split(1, dim=1)):
        assert private.is_one_of_several(y)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            y.add_(1)
    for y in (x, x.view(24), x[0], x.t(), x.detach(), x.chunk(2)[0] * 1):
        assert not private.is_one_of_several(y)
        y.add_(1)
