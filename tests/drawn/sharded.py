"""A program in fzero, on one rank of a process group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import optree
import torch
from exactness import SHARDS
from memories import DISK, HOST
from torch import nn

import fzero as fz
from drawn import actions, optimizers
from drawn.language import Program
from drawn.plain import frozen_pattern, is_real
from drawn.prelude import namespace
from fzero.engine import activations

SOME = "blocks.*"  # leaves that every program has
TRANSFORMS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "remat": fz.remat,
    "remat of some": lambda step: fz.remat(step, pattern=SOME),
    "sharding of some": lambda step: step,  # see below
    "donate": fz.donate,
    "fuse_update": fz.fuse_update,
    "loss_scale": lambda step: fz.loss_scale(step, 8.0),
    "accumulate": lambda step: fz.accumulate(step, 2),
}


OFFLOADS = {
    f"{kind}= {name}{some}": functools.partial(fz.offload, **{kind: memory}, **({"pattern": SOME} if some else {}))
    for kind in ("params", "grads", "moments", "activations")
    for name, memory in (("host", HOST), ("disk", DISK))
    for some in ("", " of some")
}
TRANSFORMS |= OFFLOADS
activations.LEAST = 1  # or what programs save would all be too small to be put away


class Sharded:
    """`actions.Component` of one rank.

    Args:
        cotangents: what `step(state, *inputs, cotangent=)` is given, by number, as only who ran it knows the outputs.
    """

    def __init__(
        self, program: Program, code: CodeType, counted: bool, rank: int, cotangents: Mapping[int, Any]
    ) -> None:
        self.program, self.counted, self.rank, self.seen = program, counted, rank, []
        self.cotangents = cotangents
        made: list[Any] = []

        def functional(module: nn.Module) -> Callable[..., Any]:
            apply, params = fz.functional(module)
            made.append(params)
            return apply

        names = namespace(program.seed, fz.unit, functional, fz.sum_over)
        exec(code, names)
        step = fz.train_step(
            names["fn"], optimizers.of_fzero(program.optimizer), units=program.units, has_aux=program.form == "aux"
        )
        for name in program.transforms:
            pattern = frozen_pattern(program)
            step = fz.freeze(step, pattern) if name == "freeze" and pattern else TRANSFORMS[name](step)
        some = {"pattern": SOME} if "sharding of some" in program.transforms and program.stage else {}
        self._step = SHARDS[program.stage](step, **some)
        self.start: Any = self._step.init(made[0] if made else names["params"])

    def see(self, label: str, value: Any) -> None:
        self.seen.append((label, optree.tree_map(_copied, value, none_is_leaf=True)))

    def _inputs(self, call: int) -> list[Any]:
        return actions.inputs(self.program.seed, call, self.rank, self.counted)

    def _cotangents(self, outputs: Any, number: int) -> Any:
        flat, spec = optree.tree_flatten(outputs, none_is_leaf=True)
        found = [
            actions.cotangent(self.program.seed, number, self.rank, place, o) if is_real(o) else None
            for place, o in enumerate(flat)
        ]
        return optree.tree_unflatten(spec, found)

    def _grads(self, label: str, grads: fz.Sharded) -> fz.Sharded:
        """Notes the gathered leaves, without the frozen ones."""
        self.see(label, [leaf for leaf in optree.tree_leaves(fz.gather(grads))])
        return grads

    # ---- the component

    def forward(self, state: Any, call: int) -> None:
        out = self._step.forward(state, *self._inputs(call))
        out, aux = out if self.program.form == "aux" else (out, None)
        self.see("outputs of forward", out)
        self.see("aux of forward", aux)
        both: Any = (out, aux)
        with torch.no_grad():
            for leaf in optree.tree_leaves(both):  # what a caller does to an output is no business of the state
                if is_real(leaf):
                    leaf.zero_()

    def vjp(self, state: Any, call: int, argnums: Any) -> Callable[[int, bool], Any]:
        found = self._step.vjp(state, *self._inputs(call), argnums=argnums)
        outputs, pullback = found[:2]
        self.see("outputs", outputs)
        self.see("aux", found[2] if self.program.form == "aux" else None)

        def pull(number: int, retain: bool) -> Any:
            grads, cotangents = pullback(self._cotangents(outputs, number), retain_graph=retain)
            self._grads("grads", grads)
            self.see("input cotangents", tuple(cotangents))
            return grads

        return pull

    def update(self, state: Any, grads: Any) -> Any:
        state, metrics = self._step.update(state, grads)
        self.see("grad_norm", metrics["grad_norm"])
        return state

    def add_grads(self, state: Any, grads: Any) -> Any:
        return self._step.add_grads(state, grads)

    def step(self, state: Any, call: int, number: int) -> Any:
        given = self._inputs(call)
        if self.program.form == "outputs":
            state, metrics = self._step(state, *given, cotangent=self.cotangents[number])
        else:
            state, metrics = self._step(state, *given)
            self.see("loss", metrics["loss"])
        self.see("aux", metrics.get("aux"))
        self.see("grad_norm", metrics["grad_norm"])
        return state

    def tape(self, state: Any, calls: list[int], number: int, wrt_inputs: bool) -> Any:
        outputs, real, cots, given = [], [], [], []
        with fz.tape(self._step, state) as model:
            for call in calls:
                inputs = self._inputs(call)
                given.append(inputs[0].requires_grad_(wrt_inputs))
                out = model(*inputs)
                out = out[0] if self.program.form == "aux" else out
                outputs.append(out)
                flat = optree.tree_flatten(out, none_is_leaf=True)[0]
                for place, o in enumerate(flat):
                    ct = actions.cotangent(self.program.seed, number, self.rank, place, o) if is_real(o) else None
                    if ct is not None and o.requires_grad:
                        real.append(o)
                        cots.append(ct)
            torch.autograd.backward(real, cots)
            grads = model.grads()
        self.see("outputs of tape", outputs)
        self.see("input cotangents", [x.grad for x in given])
        return self._grads("grads", grads)

    def hvp(self, state: Any, grads: Any, call: int) -> None:
        self._grads("hvp", fz.hvp(self._step, state, grads, *self._inputs(call)))

    def examples(self, state: Any, call: int) -> None:
        found = fz.per_example_grads(self._step, state, *self._inputs(call))
        self.see("per-example grads", [leaf for leaf in optree.tree_leaves(found)])

    def params(self, state: Any) -> None:
        self.see("params", optree.tree_leaves(fz.gather(state.params)))


def _copied(leaf: Any) -> Any:
    """Something that can be compared later and sent to another process; a handle, say, as text."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf if leaf is None or isinstance(leaf, (str, int, float, complex)) else repr(leaf)
