"""What cannot be traced, as an error that names the line."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from fzero.base.private import is_fake
from fzero.base.rebound import tensors_reached
from fzero.base.refusals import is_ours, place_of
from fzero.comm.backend import COLLECTIVES
from fzero.comm.divergence import silent
from fzero.graph import of_torch
from fzero.graph.trace import OWN_GENERATOR, draws

one_at_a_time = threading.RLock()  # torch's tracer is one for all threads; no rank waits for another in a trace
COMMUNICATES = (
    "jit: the function exchanges values between ranks by torch.distributed or a synchronised batch norm, which graphs "
    "do not take. Take the maps of fz.parallel, or leave jit out."
)
CHECKPOINTS = (
    "jit: the function uses torch.utils.checkpoint or saved-tensor hooks, which run in the pullback and are no part of "
    "a graph. Take fz.remat(step), which recomputes units, or leave jit out."
)
# what runs the user's functions and modules, and decides by no value of a step's
_RUNS = ("torch", *[f"fzero.{name}" for name in ("graph", "base", "engine", "modules", "functional", "parallel")])
_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Around a trace: what is no part of a graph is refused, and what cannot be traced is named."""
    try:
        with (
            one_at_a_time,
            of_torch.without_pointers(),
            silent(),
            torch.autograd.graph.disable_saved_tensors_hooks(CHECKPOINTS),
        ):
            yield
    except Exception as error:
        name = type(error).__name__
        if name in _VALUES and (own := _own_module(error)):
            raise ValueError(
                f"jit: a step that the function calls{place_of(error)} decides by a value that changes from update to "
                f"update, such as a count ({own}), and the graph of a function has none. Take fz.jit(step), or another "
                "optimizer or transform."
            ) from error
        if name in _VALUES:
            operator = getattr(error, "func", "an operator")
            what = (
                "makes a tensor whose shape depends on values"
                if name == "DynamicOutputShapeException"
                else "asks for the value of a tensor"
            )
            raise ValueError(
                f"jit: the function{place_of(error)} {what} ({operator}), and a graph has none. Write torch.where(...) "
                "in the place of a branch or a mask, and leave .item() and float(...) out; a number that shapes depend "
                "on is a static argument (static_argnums=)."
            ) from error
        if CHECKPOINTS in str(error):
            raise ValueError(CHECKPOINTS) from error
        if is_ours(error) and type(error) is NotImplementedError:
            raise ValueError(COMMUNICATES) from error
        if is_ours(error):
            raise
        if "torch._C.Generator" in str(error):  # torch 2.11 has none in a graph
            raise ValueError(OWN_GENERATOR) from error
        if "a leaf Variable that requires grad is being used in an in-place" in str(error):
            raise ValueError(
                f"jit: the function{place_of(error)} writes to one of its inputs, which a graph leaves as they are. "
                "Write to a clone(), or return the new value."
            ) from error
        raise ValueError(
            f"jit: the function{place_of(error)} cannot be traced: {type(error).__name__}: {error} In a trace tensors "
            "have no values and no memory. Leave that line to torch's operators, or out of the function; a number of "
            "Python that it takes is a static argument (static_argnums=)."
        ) from error


def _own_module(error: BaseException) -> str:
    """The module of fzero that asked for a value; nothing where a function of the user's did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    last = next((name for name in reversed(names) if not name.startswith(_RUNS)), "")
    return last if last.startswith("fzero.") else ""


def need_plain(nodes: Iterable[Node]) -> None:
    """Refuses operators that mean something else in a graph."""
    for node in nodes:
        if getattr(node.target, "namespace", None) in COLLECTIVES:
            raise ValueError(COMMUNICATES)
        if any(isinstance(x, torch.Generator) for x in (*node.args, *node.kwargs.values())):
            raise ValueError(OWN_GENERATOR)
        if "mkldnn_rnn" in str(node.target):
            raise ValueError(
                "jit: the function runs an RNN of torch.nn by oneDNN, which no graph takes. Turn that off around it: "
                "with torch.backends.mkldnn.flags(enabled=False): ..."
            )


def need_open(result: Iterable[object]) -> None:
    """Refuses leaves of a result that hide tensors of the trace: nothing would give them values in a run."""
    for x in result:
        if not isinstance(x, torch.Tensor) and any(map(is_fake, tensors_reached(x))):
            raise ValueError(
                f"jit: the function returns a {type(x).__name__} that holds tensors and is no pytree, "
                "which a graph cannot fill. Return the tensors, in dicts, lists, tuples or NamedTuples, or register "
                "the class with optree.register_pytree_node."
            )


def need_streams(nodes: Iterable[Node]) -> None:
    """Refuses random numbers that a function draws outside of steps."""
    streams = 0
    for node in nodes:
        streams += node.meta["effect"].streams if "effect" in node.meta else 0
        if not streams and draws(node):
            raise ValueError(
                f"jit: the function draws random numbers ({node.target}) outside of steps, from torch's default "
                "generator, which a graph would leave as it is. Give the noise as an input, or draw in a step's "
                "function, whose seed is the state's."
            )
