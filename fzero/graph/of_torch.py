"""The private parts of torch that traces and compiled graphs stand on; each has a test in `tests/graph/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

Table = Mapping[Any, Callable[..., Any]]  # decompositions of operators
CHECKS = torch.ops.aten._assert_async.default, torch.ops.aten._linalg_check_errors.default  # which torch drops
CASTS = torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default


def grad_levels() -> int:
    """How many derivatives of torch.func are around this, in reverse mode, and maps inside; -1 if others are.

    Nor may a map have other random numbers for each member: what nothing maps would have those of one.
    """
    functorch, grads, maps = torch._C._functorch, 0, 0  # type: ignore[attr-defined]
    for each in functorch.get_interpreter_stack() or ():
        if each.key() == functorch.TransformType.Vmap:
            maps += 1
            if functorch.CVmapInterpreterPtr(each).randomness() == functorch.RandomnessType.Different:
                return -1
        elif each.key() != functorch.TransformType.Grad or maps:
            return -1
        else:
            grads += 1
    return grads


def is_constant(x: torch.Tensor) -> bool:
    """Tells whether a tensor's value is known, as of torch.tensor(...) in a trace."""
    return getattr(x, "constant", None) is not None


def unknown(x: torch.Tensor) -> torch.Tensor:
    """The same value, which a trace does not know."""
    known = getattr(x, "constant", None)
    return x if known is None else torch.full(x.shape, known.item(), dtype=x.dtype, device=x.device)


def traced(fn: Callable[..., object], given: Sequence[torch.Tensor], decompositions: Table) -> torch.fx.GraphModule:
    """The graph of torch's operators that a function calls; of in-place ones those that are not, instead.

    Another graph that is being traced around it sees nothing of it.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    table = {**decompositions, **{target: _of_any_size(decompositions.get(target)) for target in _BY_SIZE}}
    with untraced():
        module = make_fx(fn, decomposition_table=table)(*given)
        if any(_writes(node) for node in module.graph.nodes):
            module = make_fx(torch.func.functionalize(module), decomposition_table=table)(*given)
        return module


# whose derivatives torch computes by a division by the number of elements, also in a trace, in Python
_BY_SIZE = [getattr(torch.ops.aten, f"{name}_loss_backward").default for name in ("mse", "huber", "smooth_l1")]


def _of_any_size(known: Callable[..., object] | None) -> Callable[..., object]:
    """The derivative of a loss, which is empty if a microbatch has no examples."""

    def own(cotangent: torch.Tensor, x: torch.Tensor, *args: object) -> object:
        if not x.numel():
            return torch.zeros_like(x)
        return known(cotangent, x, *args) if known else NotImplemented

    return own


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def untraced() -> AbstractContextManager[object]:
    """Inside, the graph that is being traced around it sees nothing."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def decompositions(backend: str) -> Table:
    """Those that Inductor wants of what it compiles.

    Without those of operators in place, which `traced` replaces: they pick an overload by trial, and print tensors.
    """
    if backend != "inductor":
        return {}
    from torch._inductor.decomposition import select_decomp_table

    own = select_decomp_table().items()
    return {target: made for target, made in own if getattr(made, "__name__", "") != "inplace_op"}


def bernoulli(x: torch.Tensor, p: float) -> torch.Tensor:
    """As the operator in place, which fills in the order of memory."""
    return torch.empty_like(x).bernoulli_(p)


def draw_in_place(graph: torch.fx.Graph) -> None:
    """Has what was drawn in place, as by dropout, be drawn in that order again."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.p):
        source = node.args[0]
        if isinstance(source, torch.fx.Node) and source.target is torch.ops.aten.empty_like.default:
            node.target = bernoulli


def by_inductor(module: torch.fx.GraphModule, given: Sequence[torch.Tensor]) -> Any:
    """A graph compiled by Inductor: `run(list) -> outputs`, which empties the list.

    Args:
        given: inputs without values.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    end = next(iter(module.graph.find_nodes(op="output")))
    end.meta["user_visible_output_idxs"] = list(range(len(end.args[0])))
    # in this thread: a pool of its own has not ended in processes of ranks
    own = {"fallback_random": True, "emulate_precision_casts": True, "compile_threads": 1}
    with config.patch(own), torch.no_grad():
        made = compile_fx_inner(module, list(given))
    return getattr(made, "current_callable", None) or made


def without_pointers() -> AbstractContextManager[object]:
    """Inside, a tensor without values that is asked for its address raises."""
    from torch._functorch import config

    return config.patch(fake_tensor_allow_unsafe_data_ptr_access=False)
