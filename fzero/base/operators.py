"""What an operator of torch does with its operands: what it reads, writes, makes and draws from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from fzero.base import intercept, private, pytree, random

Operator: TypeAlias = torch._ops.OpOverload
Function = Callable[..., object]
Drawing = tuple[torch.Generator, torch.Tensor]  # a generator, and its state
# which read of their operands no more than shapes
_SHAPES_ONLY = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided new_zeros "
    "new_ones new_full".split()
)
_BLANK = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())
# which write all of a tensor, whatever was there
_OVERWRITES = frozenset("copy_ fill_ zero_ bernoulli_ uniform_ normal_ random_ exponential_ log_normal_".split())
# which write to statistics, and whose schemas do not say so
_STATISTICS = frozenset(
    "native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_update_stats batch_norm_gather_stats "
    "batch_norm_gather_stats_with_counts instance_norm _native_batch_norm_legit _batch_norm_with_update".split()
)
_SWITCHES = ("training", "use_input_stats")
_UNTRACKED = frozenset("set_ resize_ resize_as_ _resize_output_ set_data".split())  # give a tensor another memory


class Kind(NamedTuple):
    """One operator.

    Attributes:
        known: whether it does no more than its schema says, so that it may be run again.
        writes_unsaid: whether it may write to any operand.
        targets: positions and names of the operands that it writes to.
        draws: whether it draws random numbers, of `generator` where it is given one.
        chances: positions and names of what it draws with; where one of them is 0 it draws nothing.
        overwrites: whether it reads nothing of what it writes to.
        switches: positions and names of arguments without which it writes nothing.
        shapes_only, blank: whether it reads no values, and makes none.
    """

    known: bool
    writes_unsaid: bool = False
    targets: tuple[tuple[int, str], ...] = ()
    draws: bool = False
    generator: tuple[tuple[int, str], ...] = ()
    chances: tuple[tuple[int, str], ...] = ()
    overwrites: bool = False
    shapes_only: bool = False
    blank: bool = False
    switches: tuple[tuple[int, str], ...] = ()

    def drawing(self, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Tells whether it draws random numbers, called with these."""
        chances = _given(self.chances, args, kwargs)
        return self.draws and not any(isinstance(x, (int, float)) and x == 0 for x in chances)

    def written(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
        """The tensors among the operands that it writes to."""
        if not self.targets or any(switch is False for switch in _given(self.switches, args, kwargs)):
            return []
        return pytree.tensors_in(*_given(self.targets, args, kwargs))


@functools.cache
def kind_of(func: Function) -> Kind:
    if not isinstance(func, torch._ops.OpOverload):
        return Kind(False)
    arguments = func._schema.arguments
    targets = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    name = func._schema.name.rpartition("::")[2]
    if name in _STATISTICS:
        targets += [(i, a.name) for i, a in enumerate(arguments) if a.name in ("running_mean", "running_var")]
    return Kind(
        func.namespace in ("aten", "prims") and name not in _UNTRACKED,
        func.namespace in ("c10d", "_c10d_functional") or name in _UNTRACKED,
        tuple(targets),
        torch.Tag.nondeterministic_seeded in func.tags,
        tuple([(i, a.name) for i, a in enumerate(arguments) if a.name == "generator"]),
        tuple([(i, a.name) for i, a in enumerate(arguments) if a.name in ("dropout_p", "dropout")]),
        name in _OVERWRITES or any(argument == "out" for _, argument in targets),
        name in _SHAPES_ONLY,
        name in _BLANK,
        tuple([(i, a.name) for i, a in enumerate(arguments) if name in _STATISTICS and a.name in _SWITCHES]),
    )


def _given(places: Iterable[tuple[int, str]], args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in places]


def drawing_of(
    kind: Kind, operands: Sequence[torch.Tensor], args: Sequence[object], kwargs: Mapping[str, object]
) -> Drawing | None:
    """The generator that an operator draws from, and its state; None where it is shared with other threads."""
    generator = next(iter(_given(kind.generator, args, kwargs)), None)
    if not isinstance(generator, torch.Generator):
        if not intercept.acts_for_main():
            return None
        device = operands[0].device if operands else torch.device(str(kwargs.get("device") or "cpu"))
        if device.type not in ("cpu", "cuda"):
            return None
        generator = intercept.default_generator(device)
    return generator, generator.get_state()


def redrawn(
    function: Function, drawing: Drawing | None, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Calls an operator that draws again what it drew. Generators are left as they are, and others' threads alone."""
    if drawing is None:
        return function(*args, **kwargs)
    generator, state = drawing
    if any(x is generator for x in (*args, *kwargs.values())):
        own = torch.Generator(generator.device).set_state(state)
        args = [own if x is generator else x for x in args]
        return function(*args, **{name: own if x is generator else x for name, x in kwargs.items()})
    if not intercept.acts_for_main():  # whose default generator that is
        with random.seeded(0, {generator.device: state}):
            return function(*args, **kwargs)
    before = generator.get_state()
    generator.set_state(state)
    try:
        return function(*args, **kwargs)
    finally:
        generator.set_state(before)


def is_plain(x: torch.Tensor) -> bool:
    """Tells whether a tensor is a view of one storage, and nothing else."""
    if x.layout != torch.strided or x.is_quantized or x.is_mkldnn:
        return False
    if type(x) not in (torch.Tensor, torch.nn.Parameter) and not private.is_fake(x):
        return False
    return not is_zero(x)


def is_zero(x: torch.Tensor) -> bool:
    """Tells whether a tensor is zero and has no memory, as tangents of what does not depend on the input."""
    return bool(torch._is_zerotensor(x))  # type: ignore[attr-defined]
