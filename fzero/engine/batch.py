"""A call of a step over its microbatches: their runs one after the other, and what they return put together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fzero.base import pytree
from fzero.base.arguments import need_bool
from fzero.base.follow import any_follows, follows, is_transformed
from fzero.comm.linear import meaned
from fzero.engine.alike import need_alike, scalars_in
from fzero.engine.carry import Carry
from fzero.engine.function import sums_whole
from fzero.engine.outcome import NO_FIRST_HALF, scalar_loss
from fzero.engine.run import Run, run_of
from fzero.engine.used import first_use, need_used
from fzero.engine.weighing import counted
from fzero.state.beyond import here
from fzero.state.checks import need_derivatives
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer, tensor_of
from fzero.stores.memories import put_again
from fzero.table.counting import Counts
from fzero.table.layout import Key, Layout
from fzero.table.microbatch import mean_of, parts_of
from fzero.table.spec import Spec

Sums = dict[Key, Buffer]  # which may be offloaded


def seed_of(state: TrainState, rng: int, microbatch: int) -> tuple[int, ...]:
    """The seed of everything random in one run."""
    return (state.seed, state.step, state.params.axis.data_rank, microbatch, rng)


def sum_of(total: Sums | None, grads: Sums) -> Sums:
    """total + grads, written into total where it exists; grads may lack what was added to it before."""
    if total is None:
        return grads
    for key in grads:
        old, new = tensor_of(total[key]), tensor_of(grads[key])
        total[key] = put_again(total[key], old + new if any_follows((old, new)) or old.requires_grad else old.add_(new))
    return total


def by_input(spec: pytree.Spec, flat: Sequence[torch.Tensor | None]) -> tuple[object, ...]:
    """A cotangent for each input, of those of the flat inputs; None where it was not differentiated."""
    trees = pytree.unflatten(spec, flat)
    return tuple(tree if any(leaf is not None for leaf in pytree.flatten(tree)[0]) else None for tree in trees)


def reduce_whole(params: Sharded, total: Sums) -> None:
    """Reduces those of some sums over microbatches that were left unreduced, as no rank keeps a slice of them."""
    for key in [key for key in total if sums_whole(params, key)]:
        mean = params.axis_of(key).reduce_scatter(tensor_of(total[key]), key)
        total[key] = put_again(total[key], mean)


def as_grads(layout: Layout, sums: Mapping[Key, Buffer]) -> Sums:
    """Sums in the dtypes that grads are kept in."""
    out: Sums = {}
    for key, total in sums.items():
        dtype = layout.groups[key].row.policy.grad
        out[key] = total if total.dtype == dtype else put_again(total, tensor_of(total).to(dtype))
    return out


def mean_grads(like: Sharded, sums: Mapping[Key, Buffer], times: float) -> Sharded:
    """Sums as grads; `times` is by what they are divided."""
    if times != 1.0:
        sums = {key: put_again(x, tensor_of(x) / times) for key, x in sums.items()}
    return like.with_buffers(as_grads(like.layout, sums))


def scale_of(step: Spec, state: TrainState) -> float:
    """The factor of cotangents inside the pullback."""
    return math.prod(extra.factor(state.extra[extra.name]) for extra in step.extras)


def grads_of(step: Spec, state: TrainState, buffers: Mapping[Key, Buffer], times: float = 1.0) -> Sharded:
    """Scaled sums of gradients as a tree like the params; `times` is by what to divide them too."""
    params = state.params
    return Sharded(params.layout, params.axis, params.structure, buffers, None, scale_of(step, state) * times)


class Batch:
    """The microbatches of one call, each of which is pulled back before the next one runs.

    Iterating yields `(run, cotangent)`: a forward, and what is to be pulled back through it.

    Args:
        cotangent: of the outputs of all microbatches; None for a scalar loss, whose cotangent is 1.
        fused: the last one's pullback will update the params. The others' cotangents stay full and unreduced, where
            no rank keeps a slice of them; so do all of a step that is not fused.

    Attributes:
        times: by what to divide the sum of the gradients.
        followed: whether a transform may go on through this call: each microbatch's cotangents are reduced then.
        counts: what microbatches count, once the first of them runs.
    """

    def __init__(
        self, step: Spec, state: TrainState, inputs: Sequence[object], cotangent: object, rng: int, fused: bool = False
    ) -> None:
        self._step, self._state, self._inputs, self._cotangent = step, state, inputs, cotangent
        self._rng, self._fused, self._axis = rng, fused, state.params.axis
        self._losses: list[torch.Tensor] = []
        self._scalars: list[torch.Tensor] = []  # of other outputs
        self._auxes: list[object] = []
        self._collected: dict[str, list[torch.Tensor]] = {}
        self.times: float = 1.0
        self.followed, self.counts = is_transformed(), Counts()
        self._used = None if self.followed else first_use(self._axis)
        self._carry = Carry(step, state)

    def __iter__(self) -> Iterator[tuple[Run, object]]:
        step, state, micro = self._step, self._state, self._step.microbatches
        several, cotangent = micro.count > 1, self._cotangent
        pieces: Sequence[object] = ()
        parts, self.counts = counted(micro, state, self._inputs)
        counts = self.counts
        for i, part in enumerate(parts):
            last = self._fused and i == micro.count - 1
            seed, scale = seed_of(state, self._rng, i), scale_of(step, state)
            unreduced = several and not last and not self.followed
            given = self._carry.given(part)
            run = run_of(
                *(step, state, given, (), seed, scale),
                unreduced=unreduced,
                fused=last,
                partial=several,
                mask=counts.mask(i),
            )
            outputs, run.outputs = run.outputs, None
            alone = isinstance(outputs, torch.Tensor) and outputs.ndim == 0 and outputs.is_floating_point()
            if cotangent is None or alone:
                self._losses.append(scalar_loss(outputs))
            else:
                self._scalars += scalars_in(outputs)
            if not pieces:
                if cotangent is None:
                    cotangent = torch.ones_like(mean_of([outputs]) if several or counts.factors else outputs)
                elif several or counts.factors:
                    run.check_structure(cotangent)
                likely = micro.parts_like(parts_of(outputs), counts.sizes)
                pieces, self.times = micro.split_cotangent(cotangent, likely, counts.factors)
            self._auxes.append(self._carry.taken(run.aux))
            run.aux = None
            for name, own in run.collected.items():
                self._collected.setdefault(name, []).extend(own)
            del outputs, given
            if self._used is not None:
                run.note_use(self._used)
            yield run, pieces[i]
            del run

    def loss(self) -> dict[str, torch.Tensor]:
        """The metric "loss", the mean over microbatches and ranks, where the outputs are one."""
        if not self._losses:
            scalars, self._scalars = self._scalars, []
            need_alike(self._axis, scalars, "step")
            return {}
        loss = mean_of(self._losses, self.counts.factors)
        loss = meaned(self._axis, loss) if follows(loss) else self._axis.mean(loss, "the loss")
        if self._axis.tensor is not None:
            need_alike(self._axis, scalars_in(loss), "step", "a loss")  # whose mean all have, so that all fail
        return {"loss": loss}

    def need_used(self, grads: Sharded | None = None, run: Run | None = None) -> None:
        """Refuses a first update that uses no leaf, once all microbatches but a last run are pulled back."""
        if self._used is not None:
            if run is not None:
                run.note_reached(self._used)
            need_used(self._state, self._used, grads)

    def aux(self) -> dict[str, object]:
        """The metric "aux", where the step has one, and "collected", where something was."""
        merged = lambda: self._step.microbatches.merge(self._auxes, "aux", self.counts.of_rank)
        collected: dict[str, object] = {"collected": self._collected} if self._collected else {}
        return {"aux": merged(), **collected} if self._step.has_aux else collected

    def kept(self, new: TrainState, metrics: Mapping[str, object]) -> TrainState:
        """The state after an update, with what the step carries."""
        return self._carry.kept(new, metrics["skipped"])


class Pullback:
    """The pullback that `step.vjp` returns: it maps a cotangent of the outputs to grads and input cotangents.

    Call it: `grads, input_cotangents = pullback(cotangent)`. Or in two halves: `pullback.inputs(cotangent)` now, for
    those who wait for the input cotangents, and `pullback.params()` later. The products that give gradients of the
    weights of linear layers, about half of the work, are in the second half of an unsharded step. No product is done
    twice.

    All ranks of the step call it, in the same order. A pullback holds activations until it is called or dropped.

    Source:
        In two halves: zero bubble pipelines, Qi et al. 2023, arXiv 2401.10241.
    """

    def __init__(
        self, step: Spec, state: TrainState, inputs: Sequence[object], argnums: Sequence[int] | None, rng: int
    ) -> None:
        self._micro = step.microbatches
        several, scale = self._micro.count > 1, scale_of(step, state)
        self._runs, self._auxes, self._carry, self._has_aux = list[Any](), [], Carry(step, state), step.has_aux
        parts, self._counts = counted(self._micro, state, inputs)
        for i, part in enumerate(parts):
            given, own = self._carry.given(part), self._carry.argnums(argnums, part)
            seed, mask = seed_of(state, rng, i), self._counts.mask(i)
            run = run_of(
                *(step, state, given, own, seed, scale),
                unreduced=False,
                alone=not several,
                partial=several,
                mask=mask,
                halves=True,
            )
            self._auxes.append(self._carry.taken(run.aux))
            run.aux = None
            self._runs.append(run)
        self._parts = [parts_of(run.outputs) for run in self._runs]
        self._inputs = inputs if several else ()
        self._spec = pytree.flatten(tuple(inputs))[1]
        self._scalars = scalars_in([run.outputs for run in self._runs])
        self._times: float | None = None  # of a first half: by what to divide what the second will bring
        self._like = grads_of(step, state, {})  # not the state itself: a used pullback holds nothing of it

    def taken(self) -> tuple[object, object]:
        """Hands out the outputs and the aux of all microbatches, and keeps neither."""
        outputs, auxes = [run.outputs for run in self._runs], self._auxes
        for run in self._runs:
            run.outputs = None
        aux = self._carry.beside(self._has_aux, self._micro.merge(auxes, "aux", self._counts.of_rank))
        self._auxes = []
        self._carry.forget()
        return self._micro.merge(outputs, factors=self._counts.factors), aux

    def __call__(
        self, cotangent: object, retain_graph: bool = False, create_graph: bool = False
    ) -> tuple[Sharded, tuple[Any, ...]]:
        """Pulls a cotangent of the outputs back.

        Args:
            cotangent: in the structure, shapes and dtypes of the outputs. None for an output counts as zero.
            retain_graph: True keeps what is needed to call again. False frees it.
            create_graph: True makes the results differentiable.

        Returns:
            `(grads, input_cotangents)`. Grads are a `Sharded` like the params at every ZeRO stage, means over the data
            ranks. Input cotangents are a tuple, one for each input of this rank, None for an input that was not
            differentiated.

        Raises:
            ValueError: the cotangent does not fit the outputs.
            RuntimeError: an earlier call has used the pullback up. Pass `retain_graph=True` to every call but the last.
        """
        need_bool(retain_graph, "pullback", "retain_graph")
        need_bool(create_graph, "pullback", "create_graph")
        need_derivatives("pullback")
        pieces, times = self._pieces(cotangent)
        total: Sums | None = None
        pulled = []
        for run, piece in zip(self._runs, pieces, strict=True):
            grads, cotangents = run.pull(piece, retain_graph, create_graph)
            total = sum_of(total, grads)
            pulled.append(self._carry.of_inputs(cotangents))
        self._compare()
        flat = self._flat(pulled, times)
        return self._grads(total, times), by_input(self._spec, flat)

    def inputs(self, cotangent: object, retain_graph: bool = False) -> tuple[Any, ...]:
        """The first half of a pullback: the input cotangents, the same bits as a call returns.

        What the second half needs is kept: of a linear layer its input and the cotangent of its output. All else is
        pulled back now, and its grads are kept: weights that are used more than once, convolutions, what is sharded,
        units that are recomputed or compiled, and whatever a transform of `torch.func` differentiates around this. The
        halves of several pullbacks may alternate, in the same order on all ranks.

        Args:
            cotangent: as for a call. You may write to its tensors afterwards.
            retain_graph: True keeps what is needed to pull back again, in halves or by a call.

        Returns:
            A tuple with one cotangent for each input, None for an input that was not differentiated.

        Raises:
            RuntimeError: an earlier call or first half has used the pullback up.

        Example:
            >>> step = fz.train_step(lambda p, x: x @ p["w"], fz.sgd(0.1))
            >>> state = step.init({"w": torch.ones(2, 2)})
            >>> out, pullback = step.vjp(state, torch.ones(1, 2))
            >>> pullback.inputs(torch.ones_like(out))
            (tensor([[2., 2.]]),)
            >>> fz.gather(pullback.params())
            {'w': tensor([[1., 1.],
                    [1., 1.]])}
        """
        need_bool(retain_graph, "pullback.inputs", "retain_graph")
        need_derivatives("pullback")
        pieces, times = self._pieces(cotangent)
        pairs = zip(self._runs, pieces, strict=True)
        pulled = [self._carry.of_inputs(run.pull_inputs(piece, retain_graph)) for run, piece in pairs]
        self._compare()
        flat = self._flat(pulled, times)
        self._times = times
        return by_input(self._spec, flat)

    def params(self) -> Sharded:
        """The second half of a pullback: the grads, the same bits as a call returns.

        Returns:
            Grads for the cotangent of the first half, as a call returns them.

        Raises:
            RuntimeError: there is no first half, or its second half has been called already. Call `inputs` first.
        """
        need_derivatives("pullback")
        times, self._times = self._times, None
        if times is None:
            raise RuntimeError(NO_FIRST_HALF)
        total: Sums | None = None
        for run in self._runs:
            total = sum_of(total, run.pull_params())
        return self._grads(total, times)

    def _pieces(self, cotangent: object) -> tuple[list[object], float]:
        """The cotangent of each microbatch, and by what to divide what it is pulled back to."""
        cotangent = here(cotangent)
        if self._micro.count > 1 or self._counts.factors:
            self._runs[0].check_structure(cotangent)
        pieces = self._micro.split_cotangent(cotangent, self._parts, self._counts.factors)
        self._runs[0].need_graph()
        self._times = None  # a second half that did not come
        return pieces

    def _compare(self) -> None:
        """Refuses scalar outputs that differ between tensor ranks, once."""
        scalars, self._scalars = self._scalars, []
        need_alike(self._like.axis, scalars, "pullback")

    def _flat(self, pulled: Sequence[Sequence[torch.Tensor | None]], times: float) -> list[torch.Tensor | None]:
        flat = self._micro.merge_inputs(self._inputs, pulled)
        return flat if times == 1.0 else [None if x is None else x / times for x in flat]

    def _grads(self, total: Sums | None, times: float) -> Sharded:
        assert total is not None
        return mean_grads(self._like, total, times)
