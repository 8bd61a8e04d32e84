"""The private parts of torch that fzero stands on, in one place, each with a test in `tests/base/test_private.py`."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fzero.base import probe

probe.need(probe.NAMES)
_functorch = torch._C._functorch  # type: ignore[attr-defined]
flattened = torch._C._nn.flatten_dense_tensors  # type: ignore[attr-defined]
K = TypeVar("K")


class Context(torch.autograd.function.FunctionCtx):
    """The values that a torch.autograd.Function's `setup_context` keeps for its derivatives."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...


def without_autocast() -> AbstractContextManager[object]:
    """Inside, what is computed has the dtype of what it is computed from."""
    if not torch._C._is_any_autocast_enabled():  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def outside_inference() -> AbstractContextManager[object]:
    """`torch.inference_mode(False)`, which no interrupt leaves half way: that one is code of Python's."""
    return torch._C._InferenceMode(False)  # type: ignore[attr-defined]


def of_normal_tensors() -> AbstractContextManager[object]:
    """Inside, what is made is no inference tensor, so that others may compute with it; grad mode stays otherwise."""
    return outside_inference() if torch.is_inference_mode_enabled() else contextlib.nullcontext()


dispatch_modes_on: Callable[[], int] = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]


def dispatch_modes(*others: str) -> bool:
    """Tells whether a mode is given every operator, as one that traces them is, and does not only look at them.

    Args:
        others: attributes of further modes that do, beside `looks`.
    """
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack  # type: ignore[attr-defined]
    return bool(dispatch_modes_on()) and not all(
        any(getattr(mode, name, False) for name in ("looks", *others)) for mode in stack()
    )


def traces() -> bool:
    """Tells whether operators are traced into a graph, as torch.func.linearize and make_fx do."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # type: ignore[attr-defined]


_shared_level = False  # whether rank threads share a level of forward mode, which then says nothing


def forward_mode() -> bool:
    """Tells whether a level of forward-mode AD is active that somebody asked for."""
    return not _shared_level and torch.autograd.forward_ad._current_level >= 0


@contextlib.contextmanager
def shared_forward_mode() -> Iterator[None]:
    """Inside, threads may call torch.func.jvp at once: of the process's one level none enters or leaves another's."""
    global _shared_level
    from torch._functorch import eager_transforms

    if _shared_level or torch.autograd.forward_ad._current_level >= 0:
        yield
        return
    with torch.autograd.forward_ad.dual_level():
        _shared_level, eager_transforms.JVP_NESTING = True, 1 << 20
        try:
            yield
        finally:
            _shared_level, eager_transforms.JVP_NESTING = False, 0


def level() -> int:
    """Counts how many functorch levels (vjp, jvp, vmap) are active here; 0 for none."""
    return int(_functorch.maybe_current_level() or 0) if _functorch.peek_interpreter_stack() is not None else 0


def pull_back_early(ctx: Context) -> None:
    """Lets autograd run a Function's backward as soon as it can; otherwise what was called first comes last."""
    ctx._set_sequence_nr(1 << 62)


def forget_failed_backward() -> None:
    """Lets go of what a backward that has failed left in this thread's queue: torch keeps it until the next one."""
    if pass_that_runs() != -1 or dispatch_modes():
        return
    with below_transforms(), outside_inference(), torch.enable_grad():
        one = torch.ones((), requires_grad=True, device="cpu")
        torch.autograd.grad(one.clone(), one)


def is_fake(tensor: object) -> bool:
    """Tells whether a tensor of FakeTensorMode: a shape and no values."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # not loaded where nobody made one
    return module is not None and isinstance(tensor, torch.Tensor) and isinstance(unwrapped(tensor), module.FakeTensor)


def direct(function: Any, then: Callable[[Any], object] | None = None) -> Any:
    """`apply` of a Function, quick where no transform is active: torch looks up the arguments' names for each call.

    Args:
        then: is given what it has put out.
    """
    own = {name: staticmethod(getattr(function, name)) for name in ("forward", "setup_context", "backward")}
    quick = type(function.__name__, (torch.autograd.function._SingleLevelFunction,), own)

    def apply(*operands: object) -> Any:
        if not transforms():
            out = quick.apply(*operands)
        else:
            with torch._C.DisableTorchFunction():  # in which what it runs would be unseen by its operands' classes, too
                out = function.apply(*operands)
        if then is not None:
            then(out)
        return out

    apply.plainly = quick.apply  # type: ignore[attr-defined]
    return apply


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Tells whether an active functorch level wraps this tensor; one that has ended leaves wrappers, which are dead."""
    return int(_functorch.maybe_get_level(tensor)) > 0


# the functorch level that wraps a tensor; 0 or less for none, or one that has ended
level_of: Callable[[torch.Tensor], int] = _functorch.maybe_get_level
# whether a functorch level wraps a tensor or did so, where it has ended
is_wrapper: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
# the tensor that one functorch level has wrapped
inner: Callable[[torch.Tensor], torch.Tensor] = _functorch.get_unwrapped


_version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def version(tensor: torch.Tensor) -> int:
    """Counts how often a tensor's memory was written to, below every functorch level; 0 in inference mode."""
    return versions((tensor,))[0]


def versions(tensors: Collection[torch.Tensor]) -> list[int]:
    """Those of several."""
    if _functorch.peek_interpreter_stack() is None:
        try:
            return list(map(_version_of, tensors))
        except RuntimeError:  # one is of inference mode
            pass
    found: list[int] = []
    for tensor in tensors:
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        found.append(0 if tensor.is_inference() else tensor._version)
    return found


def counted(tensor: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """A tensor's memory, whose writes count as those to another one's do, and the other way round."""
    if by.is_inference() or tensor.is_inference():  # which count nothing
        return tensor
    with below_transforms():
        out = unwrapped(by).detach()
        out.data = unwrapped(tensor)  # a wrapper's would be copied as if it were a tensor, and crash
    return out


def detached(x: torch.Tensor) -> torch.Tensor:
    """A tensor's values without a gradient, whose writes count as the tensor's: `x.detach()` in an operator's kernel.

    There autograd is passed already, and what that makes counts by itself.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor below every functorch level."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def is_mapped(tensor: torch.Tensor) -> bool:
    """Tells whether a map is among the functorch levels that a tensor takes part in."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def in_function() -> bool:
    """Tells whether the forward of a torch.autograd.Function runs, which has neither gradients nor tangents."""
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled())


def below(tensor: torch.Tensor) -> bool:
    """Tells whether what runs now runs below the level of this tensor, where its derivative would be lost."""
    return level_of(tensor) > level()


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Tells whether any level needs this tensor's derivative; `requires_grad` shows only that of the outermost one."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    while True:
        wraps, at = _functorch.is_functorch_wrapped_tensor(tensor), _functorch.maybe_get_level(tensor)
        if (at > 0 or not wraps) and (tensor.requires_grad or is_dual(tensor, max(at, 0))):
            return True
        if not wraps:
            return False
        tensor = _functorch.get_unwrapped(tensor)


# inside a backward: whether the running pass will come to a node of the graph
will_run: Callable[[object], bool] = torch._C._will_engine_execute_node  # type: ignore[attr-defined]


def transforms() -> bool:
    """Tells whether any transform is active here: a functorch level, or forward-mode AD."""
    # of forward mode as `forward_mode` says, without a call: every unit asks
    pushed = torch.autograd.forward_ad._current_level >= 0 and not _shared_level
    return pushed or _functorch.peek_interpreter_stack() is not None


def transform_of(tensor: torch.Tensor) -> str | None:
    """The active transform that this tensor takes part in, by its name; None for one that is a constant to all.

    So is one that is wrapped but not differentiated, as of `x.detach()`. Plain autograd is no transform.
    """
    keys, records, mode = {}, {}, torch.is_grad_enabled()
    for each in reversed(_functorch.get_interpreter_stack() or ()):  # from the innermost
        keys[each.level()], records[each.level()] = each.key(), mode
        if each.key() == _functorch.TransformType.Grad:  # a level begins with grad mode on, and notes what was before
            mode = mode and _functorch.CGradInterpreterPtr(each).prevGradMode()
    while is_wrapped(tensor):
        own = int(_functorch.maybe_get_level(tensor))
        if _functorch.is_batchedtensor(tensor):
            return "torch.func.vmap"
        key = keys.get(own)
        if key == _functorch.TransformType.Grad and tensor.requires_grad and records[own]:
            return "torch.func.grad"
        if key == _functorch.TransformType.Jvp and is_dual(tensor, own):
            return "torch.func.jvp"
        tensor = _functorch.get_unwrapped(tensor)
    return "torch.autograd.forward_ad" if is_dual(tensor, 0) else None


def is_dual(tensor: torch.Tensor, at: int) -> bool:
    """Tells whether a tensor of a level has a tangent; as the innermost level is asked, those inside are set aside."""
    if torch.autograd.forward_ad._current_level < 0 or _functorch.is_batchedtensor(tensor):
        return False
    if tensor.is_nested or tensor.layout != torch.strided or is_dispatched(type(tensor)):
        return False
    with below_transforms(at), outside_inference(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


@contextlib.contextmanager
def below_transforms(at: int = 0) -> Iterator[None]:
    """Inside, no functorch level above this one is active: what is made there is a plain tensor, with memory."""
    saved = []
    while level() > at:
        saved.append(_functorch.pop_dynamic_layer_stack())
    try:
        yield
    finally:
        while saved:
            _functorch.push_dynamic_layer_stack(saved.pop())


_WRAPPERS = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchGradWrapper)  # type: ignore[attr-defined]


def without_dead_wrappers() -> AbstractContextManager[object]:
    """Inside, an operator on a tensor of a functorch level that is not active raises NO_MEMORY or NO_STORAGE.

    Otherwise functorch takes its value for a constant, without a word.
    """
    return torch._C._ExcludeDispatchKeyGuard(_WRAPPERS)  # type: ignore[attr-defined]


# the number of the pass of autograd that runs on this thread, which no other one has; -1 outside of one
pass_that_runs: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]
# inside a backward: whether the running pass was asked to retain its graph
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
# the innermost functorch level that is active; None where there is none
innermost: Callable[[], object] = _functorch.peek_interpreter_stack


def preserve_version(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """Writes to these tensors do not count as in-place changes of what autograd saved."""
    return torch.autograd._unsafe_preserve_version_counter(tuple([x for x in tensors if not x.is_inference()]))


def storage_holders(tensor: torch.Tensor) -> int:
    """Counts how many tensors share this tensor's storage, this one counted."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # type: ignore[attr-defined]


def entry_holders(mapping: Mapping[K, object], key: K) -> int:
    """Counts how many Python references `mapping[key]` has besides the mapping's own."""
    return sys.getrefcount(mapping[key]) - 2


# the innermost torch function mode, None where there is none; a context in which that sees nothing; all that are on
function_mode: Callable[[], object] = torch.overrides._get_current_function_mode  # type: ignore[attr-defined]
without_function_mode: Callable[[], AbstractContextManager[object]] = torch.overrides._pop_mode_temporarily  # type: ignore[attr-defined]
function_modes: Callable[[], list[object]] = torch.overrides._get_current_function_mode_stack  # type: ignore[attr-defined]


@contextlib.contextmanager
def under_function_modes(modes: Sequence[object]) -> Iterator[None]:
    """Inside, these are the torch function modes that are on, and no others."""
    before = function_modes()
    if [*map(id, before)] == [*map(id, modes)]:
        yield
        return
    _exchange(len(before), modes)
    try:
        yield
    finally:
        _exchange(len(modes), before)


def _exchange(count: int, modes: Sequence[object]) -> None:
    """Takes the innermost torch function modes off, and puts others on."""
    for _ in range(count):
        torch.overrides._pop_mode()  # type: ignore[attr-defined]
    for mode in modes:
        torch.overrides._push_mode(mode)  # type: ignore[attr-defined]


# inside, tensor subclasses are passed to functions as they are
without_subclasses: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def is_dispatched(kind: type) -> bool:
    """Tells whether a class of tensors sees operators, and so may keep its values elsewhere."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def without_donation() -> AbstractContextManager[object]:
    """Graphs that are compiled inside may be pulled back again, and those pulled back inside stay."""
    return torch._functorch.config.patch(donated_buffer=False)  # type: ignore[attr-defined]


def inductor(graph: object, inputs: object) -> object:
    """torch.compile's default compiler, with eager's random numbers, in eager's order.

    Before torch 2.13 `reorder_for_locality` puts what draws into another order, in graphs that are not differentiated.
    """
    from torch._inductor.compile_fx import compile_fx

    patches = {"fallback_random": True} | ({"reorder_for_locality": False} if torch.__version__ < "2.13" else {})
    with without_donation():
        return compile_fx(graph, inputs, config_patches=patches)  # type: ignore[arg-type]


def is_one_of_several(x: torch.Tensor) -> bool:
    """Tells whether a tensor is one of several views that one operation has made, which nobody may write to."""
    own = torch._C._autograd  # type: ignore[attr-defined]
    return x._is_view() and own._get_creation_meta(x) == own.CreationMeta.MULTI_OUTPUT_NODE


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether two tensors begin at the same place of the same memory, also those without values."""
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same and a.storage_offset() == b.storage_offset()
