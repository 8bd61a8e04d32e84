"""Hypothesis strategies: pytrees of params, policies, orders of transforms, pipeline schedules. Needs hypothesis.

Leaves are made from a drawn seed, so that examples stay small and shrink well; the global generators are not touched.
"""

from __future__ import annotations

import functools
import graphlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

import fzero as fz
from fzero.schedules import Kind, Schedule, Task
from fzero.stores.memories import Memory

Transform = Callable[[fz.Step], fz.Step]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def leaves(draw: st.DrawFn, dtype: torch.dtype = torch.float64, max_dim: int = 9) -> torch.Tensor:
    """A floating tensor with zero to three dims of odd and even sizes."""
    shape = draw(st.lists(st.integers(1, max_dim), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def pytrees(draw: st.DrawFn, dtype: torch.dtype = torch.float64, max_leaves: int = 8) -> Any:
    """A nested dict, list or tuple of floating tensors, with at least one of them."""
    keys = st.sampled_from(["w", "bias", "norm", "head", "blocks"])
    tree = st.recursive(
        leaves(dtype),
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=max_leaves,
    )
    return {"root": draw(tree)}


def policies() -> st.SearchStrategy[fz.Policy]:
    """Policies with every mix of storage dtypes."""
    dtype = st.sampled_from([None, *FLOATS])
    return st.builds(fz.Policy, param=dtype, grad=dtype, moment=dtype, compute=dtype, reduce=dtype)


def transforms(
    stages: Sequence[int] = (0, 1, 2, 3),
    count: int = 2,
    patterns: Sequence[str] = (),
    memories: Sequence[Memory] = ("host",),
) -> st.SearchStrategy[list[tuple[str, Transform]]]:
    """Named transforms in some order. None of them changes the numbers of a float64 step.

    Args:
        stages: ZeRO stages to draw from. At most one shards a leaf; 0 is none.
        count: microbatches of `fz.accumulate`.
        patterns: of leaves of whole units, no leaf in two. A transform may take some of them, and each may be sharded
            in its own way; at least one is, unless `stages` has 0.
        memories: for `fz.offload`: "host", `fz.Disk(path)`. Empty: state stays on the device.
    """
    shards: dict[int, Callable[..., fz.Step]] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
    whole: list[tuple[str, Transform]] = [
        ("donate", fz.donate),
        ("accumulate", lambda step: fz.accumulate(step, count)),
        ("loss_scale", lambda step: fz.loss_scale(step, 64.0)),
        ("fuse_update", fz.fuse_update),
    ]
    said: dict[str, Callable[..., fz.Step]] = {
        "remat": fz.remat,
        "autocast": lambda step, pattern: fz.autocast(step, pattern=pattern),
    }

    @st.composite
    def draw_all(draw: st.DrawFn) -> list[tuple[str, Transform]]:
        chosen = draw(st.lists(st.sampled_from(whole), unique_by=lambda pair: pair[0]))
        for name in draw(st.lists(st.sampled_from(sorted(said)), unique=True)):
            for pattern in draw(st.one_of(st.just(["*"]), st.lists(st.sampled_from(patterns or ["*"]), unique=True))):
                transform = functools.partial(said[name], pattern=pattern)
                chosen.append((f"{name}({pattern})", transform))
        kinds = st.sampled_from(("params", "grads", "moments", "activations"))
        for kind in draw(st.lists(kinds, unique=True)) if memories else ():
            for pattern in draw(st.one_of(st.just(["*"]), st.lists(st.sampled_from(patterns or ["*"]), unique=True))):
                memory = draw(st.sampled_from(memories))
                transform = functools.partial(fz.offload, pattern=pattern, **{kind: memory})
                chosen.append((f"offload({kind}={memory!r}, {pattern})", transform))
        cuts = dict.fromkeys(draw(st.sampled_from([("*",), tuple(patterns)])) or ("*",), 0)
        for pattern in cuts:
            cuts[pattern] = draw(st.sampled_from([*stages, 0] if len(cuts) > 1 else stages))
        if 0 not in stages and not any(cuts.values()):
            cuts[next(iter(cuts))] = draw(st.sampled_from(stages))
        for pattern, stage in cuts.items():
            if stage:
                chosen.append((f"shard_zero{stage}({pattern})", functools.partial(shards[stage], pattern=pattern)))
        return draw(st.permutations(chosen))

    return draw_all()


def apply(step: fz.Step, chosen: Sequence[tuple[str, Transform]]) -> fz.Step:
    """The step with these transforms, in this order."""
    for _, transform in chosen:
        step = transform(step)
    return step


def schedules(
    stages: int = 4, microbatches: int = 8, edges: Sequence[tuple[int, int]] = ()
) -> st.SearchStrategy[Schedule]:
    """Legal pipeline schedules, with places, order of tasks and halves of backward drawn at random.

    They have all their messages, or none.

    Args:
        stages: largest number of stages.
        microbatches: largest number of microbatches.
        edges: pairs of stages, beside neighbours, with messages between them.
    """

    @st.composite
    def draw_one(draw: st.DrawFn) -> Schedule:
        count, parts = draw(st.integers(1, stages)), draw(st.integers(1, microbatches))
        places = draw(st.integers(1, count))
        more = draw(st.lists(st.integers(0, places - 1), min_size=count - places, max_size=count - places))
        homes = draw(st.permutations([*range(places), *more]))
        halves = draw(st.sampled_from([0.0, 0.5, 1.0]))  # the share of pullbacks that come in two
        messages = draw(st.booleans())
        generator = random.Random(draw(st.integers(0, 2**31)))
        cells = [(stage, part) for stage in range(count) for part in range(parts)]
        halved = {cell for cell in cells if generator.random() < halves}
        present = {(stage, stage + 1) for stage in range(count - 1)} | {edge for edge in edges if max(edge) < count}
        schedule = _in_any_order(generator, homes, parts, halved, sorted(present))
        return schedule.with_messages(present) if messages else schedule

    return draw_one()


def _in_any_order(
    generator: random.Random,
    homes: Sequence[int],
    microbatches: int,
    halved: set[tuple[int, int]],
    edges: Sequence[tuple[int, int]],
) -> Schedule:
    """A schedule of stages at these places."""
    graph = graphlib.TopologicalSorter[Task]()
    for task, needed in _needs(homes, microbatches, halved, edges):
        graph.add(task, *needed)
    graph.prepare()
    places: list[list[Task]] = [[] for _ in set(homes)]
    ready: list[Task] = []
    while graph.is_active():
        ready += sorted(graph.get_ready(), key=repr)
        task = ready.pop(generator.randrange(len(ready)))
        places[homes[task.stage]].append(task)
        graph.done(task)
    return Schedule("drawn", len(homes), microbatches, places)


def _needs(
    homes: Sequence[int], microbatches: int, halved: set[tuple[int, int]], edges: Sequence[tuple[int, int]]
) -> Iterator[tuple[Task, list[Task]]]:
    """Each task with others that come before it."""
    for part in range(microbatches):
        forward = [Task(Kind.FORWARD, stage, part) for stage in range(len(homes))]
        back = [
            Task(Kind.INPUTS if (task.stage, part) in halved else Kind.BACKWARD, task.stage, part) for task in forward
        ]
        for first, then in zip(forward, back, strict=True):
            yield then, [first]
            if then.kind is Kind.INPUTS:
                yield then._replace(kind=Kind.PARAMS), [then]
        for source, target in edges:
            for made, needed in ((forward[source], forward[target]), (back[target], back[source])):
                yield needed, [made]
