"""fz.jit: a step, or a function of states and tensors, as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from fzero.base.arguments import need_bool, wrong
from fzero.graph.jit import Function, Jit
from fzero.kernels.build import compiler
from fzero.step import Step

S = TypeVar("S", bound=Step)
BACKENDS = "inductor", "graph"


@overload
def jit(step: S, backend: str | None = None, fallback: bool = False, static_argnums: int | Sequence[int] = ()) -> S: ...
@overload
def jit(
    step: Callable[..., Any],
    backend: str | None = None,
    fallback: bool = False,
    static_argnums: int | Sequence[int] = (),
) -> Function: ...
def jit(step: Any, backend: str | None = None, fallback: bool = False, static_argnums: int | Sequence[int] = ()) -> Any:
    """Traces a step, or a function of states and tensors, and runs it as one graph, as JAX's `jit` does.

    **A step** stays a step: other transforms go around it, in any order, with the same numbers, and it takes the states
    of the step without `jit`. Each distinct unit is compiled once, forward and pullback. Gathers and reductions are
    nodes between the units' regions. The first call of a verb runs without a graph, which proves that the function is
    pure. Later ones run the graph. Under a transform of `torch.func` the step runs as its operators.

    **A function** may call `train_step`, transforms, `init` and steps, and may be one that `torch.func` made:
    `fz.jit(torch.func.grad(after_training))`, `fz.jit(torch.vmap(step))`. It becomes one graph, in which steps that are
    alike share one region; under `vmap`, `jvp` and second derivatives they are unrolled. Its states may lie on several
    ranks, also over tensor and sequence axes, which call it together. Its steps draw the random numbers that they draw
    without `jit`.

    - Each set of shapes, dtypes, devices and static values is traced once. `traces` counts them.
    - Numbers of Python among the inputs, rates and counts of updates are inputs of the graph: another value traces
      nothing. An input in `static_argnums` is part of the signature. So is what is no tensor, int or float: a bool, a
      complex number, a string, None.
    - No value decides anything. A branch by a value, `.item()` or a shape by values is refused with your line.
    - A tensor that the function closes over is an input of the graph. Write nothing to it.

    Args:
        step: a step, or `f(*args)`: trees of states, tensors and values in and out.
        backend: `"inductor"` fuses operators. It needs a C++ compiler on CPU, and rounds differently in the last bits.
            `"graph"` runs torch's operators one by one: the bits of the step without `jit`. None takes Inductor if
            there is a compiler.
        fallback: True runs a function that cannot be traced without a graph, with one warning.
        static_argnums: numbers of the inputs, counted without the state for a step, that are static. A tensor in one
            of them is refused.

    Returns:
        A step, or a function with the arguments of `f`. Both have `traces`, `graph(*args)` (a
        `torch.fx.GraphModule`) and `lower(*args)`, which traces and compiles ahead of time.

    Raises:
        ValueError: an unknown backend; in a call, what a graph does not take, with what to do: `fz.offload`, pipelines,
            `fz.tape`; in a function random numbers that are drawn outside of steps, and weights of microbatches.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).square().sum(), fz.sgd(0.1))
        >>> fast = fz.jit(step, backend="graph")
        >>> state = fast.init({"w": torch.ones(2)})
        >>> for _ in range(3):
        ...     state, metrics = fast(state, torch.ones(2))
        >>> round(metrics["loss"].item(), 4), fast.traces
        (0.8192, 1)
    """
    need_bool(fallback, "jit", "fallback")
    if backend not in (None, *BACKENDS):
        raise wrong("jit", "backend", backend, "'inductor', 'graph' or None")
    given: object = static_argnums
    static = (given,) if type(given) is int else tuple(given) if isinstance(given, (tuple, list)) else (-1,)
    if not all(type(i) is int and i >= 0 for i in static):
        raise wrong("jit", "static_argnums", static_argnums, "numbers of inputs, from 0")
    backend = backend or ("inductor" if compiler() else "graph")
    if isinstance(step, Step):
        return step.with_header("graphs", Jit(backend, static, fallback), "jit")
    if not callable(step):
        raise wrong("jit", "step", step, "a step, or a function of states and tensors")
    return Function(step, backend, fallback, static)
