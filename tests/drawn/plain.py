"""A program in plain torch: one process holds the inputs of all ranks and knows torch.func and autograd, nothing else.

Modules are called by torch.func.functional_call on the real module, one for each rank, as side effects stay with it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import optree
import torch
import torch.utils.checkpoint
from torch import nn

from drawn import actions, optimizers
from drawn.language import Program
from drawn.prelude import namespace

Flat = list[torch.Tensor]


@dataclass(frozen=True)
class State:
    leaves: Flat
    moments: Any = None
    kept: Flat | None = None
    count: int = 0


def is_real(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def paths_of(tree: Any) -> list[str]:
    return [".".join(str(part) for part in path) for path in optree.tree_paths(tree)]


class Plain:
    """`actions.Component` over all ranks: what differs between ranks is noted as a list with one entry for each.

    torch.utils.checkpoint, which torch.func refuses, is a plain call: programs have it in units alone.
    """

    def __init__(self, program: Program, code: CodeType, counted: bool) -> None:
        self.program, self.counted, self.seen = program, counted, []
        self.fns: list[Callable[..., Any]] = []
        params: Any = None
        without_grad: set[str] = set()
        for _ in range(program.world):
            modules: list[nn.Module] = []

            def functional(module: nn.Module, modules: list[nn.Module] = modules) -> Callable[..., Any]:
                modules.append(module)
                return lambda p, *inputs: torch.func.functional_call(module, p, inputs)

            names = namespace(program.seed, lambda fn: fn, functional, _sum_over)
            names["checkpoint"] = lambda fn, *args, use_reentrant: fn(*args)
            exec(code, names)
            self.fns.append(names["fn"])
            if modules:
                params = {name: p.detach() for name, p in modules[0].named_parameters()}
                without_grad = {name for name, p in modules[0].named_parameters() if not p.requires_grad}
            else:
                params = names["params"]
        leaves, self.spec = optree.tree_flatten(params)
        self.paths = paths_of(params)
        pattern = frozen_pattern(program)
        self.trained = [
            i
            for i, path in enumerate(self.paths)
            if path not in without_grad and not (pattern and fnmatch.fnmatchcase(path, pattern))
        ]
        self.start = State([leaf.clone() for leaf in leaves])
        self.cotangents: list[dict[int, Any]] = [
            {} for _ in range(program.world)
        ]  # of `step`, for each rank, by number

    # ---- one rank's function

    def _inputs(self, call: int, rank: int) -> list[Any]:
        return actions.inputs(self.program.seed, call, rank, self.counted)

    def _call(self, rank: int, leaves: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
        out = self.fns[rank](optree.tree_unflatten(self.spec, leaves), *inputs)
        return out if self.program.form == "aux" else (out, None)

    def _split(self, leaves: Flat) -> tuple[Flat, Callable[[Flat], Flat]]:
        """Copies of the trained leaves, and the way back to all: frozen ones are constants."""
        copies = [leaf.clone() for leaf in leaves]

        def filled(trained: Flat) -> Flat:
            found = dict(zip(self.trained, trained, strict=True))
            return [found.get(i, copy) for i, copy in enumerate(copies)]

        return [copies[i] for i in self.trained], filled

    def _loss(self, rank: int, filled: Callable[[Flat], Flat], inputs: Sequence[Any]) -> Callable[[Flat], torch.Tensor]:
        return lambda trained: self._call(rank, filled(trained), inputs)[0]

    def _differentiated(self, rank: int, leaves: Flat, call: int, wanted: Sequence[int]) -> _Run:
        inputs = self._inputs(call, rank)
        trained, filled = self._split(leaves)
        box: dict[str, Any] = {}

        def function(trained: Flat, given: Flat) -> Any:
            arguments = list(inputs)
            for place, value in zip(wanted, given, strict=True):
                arguments[place] = value
            out, aux = self._call(rank, filled(trained), arguments)
            both: Any = (out, aux)
            flat, box["spec"] = optree.tree_flatten(both, none_is_leaf=True)
            count = len(optree.tree_flatten(out, none_is_leaf=True)[0])
            box["real"] = [i for i in range(count) if is_real(flat[i])]
            box["rest"] = [i for i, o in enumerate(flat) if isinstance(o, torch.Tensor) and i not in box["real"]]
            box["flat"] = [None if isinstance(o, torch.Tensor) else o for o in flat]
            return tuple(flat[i] for i in box["real"]), tuple(flat[i] for i in box["rest"])

        given = [inputs[i] for i in wanted]
        real, pull, rest = torch.func.vjp(function, trained, given, has_aux=True)  # type: ignore[misc]
        flat = box["flat"]
        for i, o in [*zip(box["real"], real, strict=True), *zip(box["rest"], rest, strict=True)]:
            flat[i] = o.detach()
        out, aux = optree.tree_unflatten(box["spec"], flat)
        return _Run(out, aux, [flat[i] for i in box["real"]], box["real"], pull)

    # ---- the component

    def _mean(self, grads: Sequence[Flat]) -> Flat:
        """Over ranks. Those of F.embedding(sparse=True) are sparse."""
        dense = ([g.to_dense() if g.layout != torch.strided else g for g in of] for of in grads)
        return [torch.stack(parts).mean(0) for parts in zip(*dense, strict=True)]

    def _cotangents(self, run: _Run, rank: int, number: int) -> list[torch.Tensor]:
        found = [
            actions.cotangent(self.program.seed, number, rank, place, o)
            for place, o in zip(run.places, run.real, strict=True)
        ]
        return [torch.zeros_like(o) if ct is None else ct for ct, o in zip(found, run.real, strict=True)]

    def _keep_cotangents(self, run: _Run, rank: int, number: int) -> None:
        flat, spec = optree.tree_flatten(run.out, none_is_leaf=True)
        kept: list[Any] = [None] * len(flat)
        for place, o in zip(run.places, run.real, strict=True):
            kept[place] = actions.cotangent(self.program.seed, number, rank, place, o)
        self.cotangents[rank][number] = optree.tree_unflatten(spec, kept)

    def see(self, label: str, value: Any) -> None:
        self.seen.append((label, value))

    def forward(self, state: State, call: int) -> None:
        found = []
        for rank in range(self.program.world):
            with torch.no_grad():
                found.append(self._call(rank, [leaf.clone() for leaf in state.leaves], self._inputs(call, rank)))
        self.see("outputs of forward", [out for out, _ in found])
        self.see("aux of forward", [aux for _, aux in found])

    def vjp(self, state: State, call: int, argnums: Any) -> Callable[[int, bool], Flat]:
        wanted = [0, 1] if argnums is None else [argnums] if isinstance(argnums, int) else list(argnums)
        runs = [self._differentiated(rank, state.leaves, call, wanted) for rank in range(self.program.world)]
        self.see("outputs", [run.out for run in runs])
        self.see("aux", [run.aux for run in runs])

        def pull(number: int, retain: bool) -> Flat:
            pulled = [
                run.pull(tuple(self._cotangents(run, rank, number)), retain_graph=True) for rank, run in enumerate(runs)
            ]
            grads = self._mean([g for g, _ in pulled])
            self.see("grads", grads)
            cots = [dict(zip(wanted, given, strict=True)) for _, given in pulled]
            count = 4 if self.counted else 3
            self.see("input cotangents", [tuple(cot.get(i) for i in range(count)) for cot in cots])
            return grads

        return pull

    def update(self, state: State, grads: Flat) -> State:
        if state.kept is not None:
            grads = [a + b for a, b in zip(state.kept, grads, strict=True)]
        self.see("grad_norm", optimizers.norm(grads))
        leaves = list(state.leaves)
        new, moments = optimizers.update(
            self.program.optimizer, [leaves[i] for i in self.trained], grads, state.moments, state.count + 1
        )
        for i, leaf in zip(self.trained, new, strict=True):
            leaves[i] = leaf
        return State(leaves, moments, None, state.count + 1)

    def add_grads(self, state: State, grads: Flat) -> State:
        kept = grads if state.kept is None else [a + b for a, b in zip(state.kept, grads, strict=True)]
        return replace(state, kept=kept)

    def step(self, state: State, call: int, number: int) -> State:
        runs = [self._differentiated(rank, state.leaves, call, ()) for rank in range(self.program.world)]
        scalar = self.program.form != "outputs"
        pulled = []
        for rank, run in enumerate(runs):
            cotangents = [torch.ones_like(run.real[0])] if scalar else self._cotangents(run, rank, number)
            if not scalar:
                self._keep_cotangents(run, rank, number)
            pulled.append(run.pull(tuple(cotangents), retain_graph=True)[0])
        if scalar:
            self.see("loss", torch.stack([run.real[0] for run in runs]).mean())
        self.see("aux", [run.aux for run in runs])
        return self.update(state, self._mean(pulled))

    def tape(self, state: State, calls: list[int], number: int, wrt_inputs: bool) -> Flat:
        total, inputs_grads, outputs = [], [], []
        for rank in range(self.program.world):
            trained, filled = self._split(state.leaves)
            trained = [leaf.requires_grad_() for leaf in trained]
            real, cots, given = [], [], []
            for call in calls:
                inputs = self._inputs(call, rank)
                given.append(inputs[0].requires_grad_(wrt_inputs))
                out, _ = self._call(rank, filled(trained), inputs)
                outputs.append(optree.tree_map(_detached, out, none_is_leaf=True))
                flat = optree.tree_flatten(out, none_is_leaf=True)[0]
                pairs = [
                    (o, actions.cotangent(self.program.seed, number, rank, i, o))
                    for i, o in enumerate(flat)
                    if is_real(o)
                ]
                real += [o for o, ct in pairs if o.requires_grad and ct is not None]
                cots += [ct for o, ct in pairs if o.requires_grad and ct is not None]
            torch.autograd.backward(real, cots)
            total.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in trained])
            inputs_grads.append([x.grad for x in given])
        world = self.program.world
        self.see("outputs of tape", [outputs[i * len(calls) : (i + 1) * len(calls)] for i in range(world)])
        self.see("input cotangents", inputs_grads)
        grads = self._mean(total)
        self.see("grads", grads)
        return grads

    def hvp(self, state: State, grads: Flat, call: int) -> None:
        found = []
        for rank in range(self.program.world):
            trained, filled = self._split(state.leaves)
            loss = self._loss(rank, filled, self._inputs(call, rank))
            found.append(torch.func.vjp(torch.func.grad(loss), trained)[1](grads)[0])  # type: ignore[misc]
        self.see("hvp", self._mean(found))

    def examples(self, state: State, call: int) -> None:
        found = []
        for rank in range(self.program.world):
            trained, filled = self._split(state.leaves)

            def loss(trained: Flat, *example: torch.Tensor, rank: int = rank, filled: Any = filled) -> torch.Tensor:
                return self._loss(rank, filled, [x[None] for x in example])(trained)

            mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0), randomness="different")
            found.append(list(mapped(trained, *self._inputs(call, rank))))
        self.see("per-example grads", found)

    def params(self, state: State) -> None:
        self.see("params", list(state.leaves))


@dataclass
class _Run:
    out: Any
    aux: Any
    real: Flat
    places: list[int]
    pull: Callable[..., Any]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _sum_over(params: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return torch.stack([fn(leaf) for leaf in optree.tree_leaves(params)]).sum()


def frozen_pattern(program: Program) -> str | None:
    """What `fz.freeze` freezes where it is among the transforms."""
    return ("emb*", "blocks.0.*", "*.b")[program.seed % 3] if "freeze" in program.transforms else None
