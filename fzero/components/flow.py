"""Flow: the values of one call of a pipeline, between the stages that give and those that take them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.components.remote.handle import Value
from fzero.components.remote.pullback import RemotePasses
from fzero.components.wiring import Input, Ports, Wire, Wiring, put_together, taken_apart, wires_of
from fzero.engine.passes import Passes

StagePasses = Passes | RemotePasses  # what a stage does during one call


class _Form(NamedTuple):
    """What a component returned for a microbatch: how it was taken apart, and the structure of each wire's value."""

    ports: Ports
    specs: Mapping[Wire, pytree.Spec]


@contextlib.contextmanager
def in_stage(stage: int, microbatch: int) -> Iterator[None]:
    """Errors of a stage say which it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"In stage {stage} of the pipeline, microbatch {microbatch}.")
        raise


class Flow:
    """The values and cotangents of one call on their way.

    Args:
        passes: component -> its passes, of those that run in this place.
        parts: [microbatch][number of the pipeline's input].
        wanted: the pipeline's inputs to differentiate; None where nothing is, and there will be no pullback.
        keep: what is kept of the last stage's output of a microbatch.

    Attributes:
        outputs, auxes: microbatch -> what the last stage returned.
    """

    def __init__(
        self,
        wires: Wiring,
        passes: Mapping[int, StagePasses],
        parts: Sequence[Sequence[object]],
        wanted: Iterable[int] | None,
        keep: Callable[[int, object], object] = lambda _, output: output,
    ) -> None:
        self.wires, self.passes, self._parts, self._keep = wires, passes, parts, keep
        self._wanted = None if wanted is None else frozenset(wanted)
        self.outputs: dict[int, object] = {}
        self.auxes: dict[int, object] = {}
        self._values: dict[tuple[Wire, int], object] = {}
        self._left: dict[tuple[Wire, int], set[int]] = {}  # stages that have not taken it yet
        self._forms: dict[tuple[int, int], _Form] = {}
        self._cotangents: dict[tuple[Wire, int], dict[int, object]] = {}
        self._of_inputs: dict[tuple[int, int], dict[int, object]] = {}  # (number, microbatch) -> stage -> cotangent

    # ---- forward

    def forward(self, stage: int, microbatch: int) -> None:
        """Runs a stage, and before it what it shares with later ones, on one microbatch."""
        for component in self.wires.shared_at[stage]:
            self._run(component, microbatch, (), ())
        inputs, wanted = [], []
        for place, argument in enumerate(self.wires.arguments[stage]):
            if isinstance(argument, Input):
                inputs.append(self._parts[microbatch][argument.number])
                wanted += [place] if argument.number in (self._wanted or ()) else []
            else:
                inputs.append(self.take(argument, microbatch, stage))
                wanted.append(place)
        self._run(stage, microbatch, inputs, wanted)

    def _run(self, component: int, microbatch: int, inputs: Sequence[object], wanted: Sequence[int]) -> None:
        passes = self.passes[component]
        with in_stage(component, microbatch):
            inputs = self._given(component, tuple(inputs))
            if self._wanted is None:
                output, aux = passes.outputs(microbatch, inputs)
            else:
                output, aux = passes.forward(microbatch, inputs, wanted)
        if component == self.wires.stages - 1:
            self.outputs[microbatch], self.auxes[microbatch] = self._keep(microbatch, output), aux
            return
        items = self.wires.items(component)
        values, ports = taken_apart(output, items, f"stage {component}")
        specs = {}
        for wire in wires_of(component, items):
            value = values[wire.item]
            specs[wire] = pytree.flatten(value)[1]
            self.arrived(wire, microbatch, value, self.wires.users.get(wire, ()))
        self._forms[component, microbatch] = _Form(ports, specs)

    def _given(self, component: int, tree: Any) -> Any:
        """What a component is given: handles as they are where it is on ranks of its own, otherwise their tensors."""
        if isinstance(self.passes[component], RemotePasses):
            return tree
        return pytree.map_leaves(lambda x: x.fetched() if isinstance(x, Value) else x, tree)

    def arrived(self, wire: Wire, microbatch: int, value: object, users: Iterable[int]) -> None:
        """Notes a value for the stages that will take it here."""
        if users:
            self._values[wire, microbatch] = value
            self._left.setdefault((wire, microbatch), set()).update(users)

    def take(self, wire: Wire, microbatch: int, stage: int) -> object:
        """A value for a stage; the last one that takes it leaves nothing behind."""
        key = wire, microbatch
        self._left[key].remove(stage)
        if self._left[key]:
            return self._values[key]
        del self._left[key]
        return self._values.pop(key)

    # ---- backward

    def begin_again(self) -> None:
        """Forgets what an earlier pullback, which may have failed, has left."""
        self._cotangents.clear()
        self._of_inputs.clear()
        for own in self.passes.values():
            own.begin()

    def backward(self, stage: int, microbatch: int, cotangent: object, retain_graph: bool = False) -> None:
        """Pulls a microbatch back through a stage."""
        pull = lambda component, own: self.passes[component].backward(microbatch, own, retain_graph)
        self._back(stage, microbatch, cotangent, pull)

    def early(self, stage: int, microbatch: int, cotangent: object) -> Callable[[], None]:
        """The same in two: what the stage sends back is there first, and what is returned goes on with the gradients,
        in the order of the microbatches."""
        rests: list[Callable[[], None]] = []

        def pull(component: int, own: object) -> tuple[object, ...]:
            passes = self.passes[component]
            assert isinstance(passes, Passes), "a component on ranks of its own sends cotangents itself"
            out, rest = passes.early(microbatch, own)
            rests.append(rest)
            return out

        def rest() -> None:
            with in_stage(stage, microbatch):
                for each in rests:
                    each()

        self._back(stage, microbatch, cotangent, pull)
        return rest

    def inputs(self, stage: int, microbatch: int, cotangent: object, retain_graph: bool = False) -> None:
        """The first half of it: the cotangents of what the stage was given."""
        pull = lambda component, own: self.passes[component].inputs(microbatch, own, retain_graph)
        self._back(stage, microbatch, cotangent, pull)

    def params(self, stage: int, microbatch: int) -> None:
        """The second half: the gradients."""
        with in_stage(stage, microbatch):
            for component in (stage, *self.wires.shared_at[stage]):
                self.passes[component].params(microbatch)

    def _back(
        self, stage: int, microbatch: int, cotangent: object, pull: Callable[[int, object], tuple[object, ...]]
    ) -> None:
        last = stage == self.wires.stages - 1
        with in_stage(stage, microbatch):
            pulled = pull(stage, self._given(stage, cotangent if last else self._cotangent(stage, microbatch)))
        for argument, own in zip(self.wires.arguments[stage], pulled, strict=True):
            if isinstance(argument, Input):
                self._of_inputs.setdefault((argument.number, microbatch), {})[stage] = own
            else:
                self._need_range(stage, own)
                self.came_back(argument, microbatch, stage, own)
        for component in self.wires.shared_at[stage]:
            pull(component, self._given(component, self._cotangent(component, microbatch)))

    def _need_range(self, stage: int, cotangent: object) -> None:
        """Refuses cotangents of float16 between stages whose loss is scaled: unscaled they are out of its range."""
        if getattr(self.passes[stage], "scale", 1.0) == 1.0:
            return
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float16 for x in pytree.leaves(cotangent)):
            raise ValueError(
                f"pipeline: stage {stage} is under fz.loss_scale, and was given float16 by the stage before: "
                "cotangents between stages are not scaled, and would vanish there; expected float32 or bfloat16 "
                "between stages. Return h.float()."
            )

    def came_back(self, wire: Wire, microbatch: int, stage: int, cotangent: object) -> None:
        """Notes the cotangent that a stage has for what it took."""
        self._cotangents.setdefault((wire, microbatch), {})[stage] = cotangent

    def give_back(self, wire: Wire, microbatch: int, stage: int) -> object:
        """A stage's cotangent of what it took, for the place where that came from."""
        return self._cotangents[wire, microbatch].pop(stage)

    def _cotangent(self, component: int, microbatch: int) -> object:
        """Of all that a component returned: the sum over those who took it, the last stage's first."""
        ports, specs = self._forms[component, microbatch]
        values: dict[Any, object] = {}
        for wire, spec in specs.items():
            found = self._cotangents.pop((wire, microbatch), {})
            own = [found[stage] for stage in self.wires.users.get(wire, ()) if found[stage] is not None]
            leaves = [None] * spec.num_leaves
            for tree in own:
                leaves = [_sum(a, b) for a, b in zip(leaves, pytree.flatten(tree)[0], strict=True)]
            values[wire.item] = pytree.unflatten(spec, leaves)
        return put_together(values, self.wires.items(component), ports)

    def of_inputs(self, number: int, microbatch: int) -> list[torch.Tensor | None]:
        """The cotangents of one input's leaves: the sum over the stages that take it, the last one's first."""
        found = self._of_inputs.pop((number, microbatch), {})
        leaves: list[Any] = [None] * len(pytree.flatten(self._parts[microbatch][number])[0])
        for stage in sorted(found, reverse=True):
            if found[stage] is not None:
                leaves = [_sum(a, b) for a, b in zip(leaves, pytree.flatten(found[stage])[0], strict=True)]
        return leaves


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b
