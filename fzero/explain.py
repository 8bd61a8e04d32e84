"""fz.explain: a step again, with a look at every operation: what is not finite, and where it begins."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_int, wrong
from fzero.base.context import during, proves
from fzero.checkpoint.fill import Everyone
from fzero.comm.axis import Axis
from fzero.comm.divergence import failing
from fzero.engine.batch import Batch, as_grads, grads_of, reduce_whole, scale_of, sum_of
from fzero.explaining.births import Taint, fault_of, is_plain
from fzero.explaining.report import BACKWARD, FORWARD, STATE, UPDATE, Explanation, Fault, Overflow
from fzero.explaining.values import Observed, Values
from fzero.state.beyond import here
from fzero.state.check_state import check_optimizer, check_state
from fzero.state.checks import constants, need_derivatives
from fzero.state.gather import squares_in
from fzero.state.items import CARRY
from fzero.state.sharded import is_sharded
from fzero.state.squares import Norms, moment_norms, norms_by_leaf
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec, need_step
from fzero.update.fused import fuses, update_as_fused
from fzero.update.update import apply_update, with_kept


def explain(
    step: Spec,
    state: TrainState,
    *inputs: object,
    cotangent: object = None,
    rng: int = 0,
    dtype: torch.dtype = torch.float16,
) -> Explanation:
    """Replays a step, and says which operation first made a value that is not finite, and how large everything is.

    Use it after a step with `metrics["skipped"]`: keep the state before it, and the inputs. All ranks call it. It
    gathers, reduces and draws random numbers as the step did, and takes several times as long. Nothing changes in the
    state. Steps that are not explained pay nothing.

    - At fault is an operation whose operands are finite and whose result is not, if that reaches the outputs or a
      gradient. What a function makes and removes again (minus infinity behind a mask, a branch that `torch.where`
      drops) is no fault.
    - Side effects of the function happen once more, such as draws of NumPy or entries of a list.
    - Compiled units run uncompiled. A fused update runs after the pullback.

    Args:
        step: a step of `fz.train_step`. Explain the stages of a pipeline one by one.
        state: the state that the step was given, not the one that it returned.
        *inputs: as in `step(state, *inputs)`, and so are `cotangent` and `rng`.
        cotangent: of the outputs, if they are no scalar loss.
        rng: what the step was given.
        dtype: finite values that this dtype cannot hold are listed as overflows.

    Returns:
        An `Explanation`.

    Raises:
        TypeError: no step or no state; a transform of `torch.func` around it; or the function uses, outside of units,
            what `step.vjp` refuses: an autograd Function without setup_context, saved-tensor hooks,
            `torch.utils.checkpoint`, NumPy on values that depend on params. Put it into a unit.

    Example:
        >>> step = fz.train_step(lambda p, x: (x / p["w"]).mean(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.tensor([1.0, 0.0])})
        >>> report = fz.explain(step, state, torch.ones(3, 2))
        >>> report.fault.op, report.fault.leaf, report.fault.examples
        ('aten.div.Tensor', 'w', (0, 1, 2))
    """
    _need_step(step)
    check_state(step, state, "explain")
    check_optimizer(step, state)
    rng = need_int(rng, "explain", "rng")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise wrong("explain", "dtype", dtype, "a floating dtype, such as torch.float16")
    need_derivatives("fz.explain")
    inputs, cotangent = here((inputs, cotangent))
    state, inputs, cotangent = constants("fz.explain", state=state, inputs=inputs, cotangent=cotangent)
    with failing("fz.explain"), private.of_normal_tensors(), torch.no_grad():
        return _explained(step, state, inputs, cotangent, rng, dtype)


def _need_step(step: object) -> None:
    if not isinstance(step, Spec) and callable(getattr(step, "vjp", None)):
        raise TypeError(
            f"explain: got step={type(step).__name__}, whose values lie in several places; expected a step that "
            "fz.train_step made. Explain its steps one by one, each with its state and what it is given."
        )
    need_step(step, "explain")


def _explained(
    step: Spec, state: TrainState, inputs: Sequence[object], cotangent: object, rng: int, dtype: torch.dtype
) -> Explanation:
    axis, limit, trained = state.params.axis, torch.finfo(dtype).max, state.layout.trainable
    replay = _Replay(step, state, inputs, cotangent, rng, limit)
    grads = with_kept(state, replay.grads)
    norm = squares_in(grads)[0].sqrt()
    if fuses(step):
        new, metrics = update_as_fused(dataclasses.replace(replay.step, fusion=step.fusion), state, grads, replay.loss)
    else:
        new, metrics = apply_update(replay.step, state, replay.grads, None)
    changed = new.params.only(trained).map(torch.sub, state.params.only(trained))
    trees = {"params": state.params, "grads": grads, "updates": changed}
    norms = {name: _numbers(norms_by_leaf(tree)) for name, tree in trees.items()}
    norms |= {name: _numbers(own) for name, own in moment_norms(state.moments).items()}
    every, overflows = _from_all_ranks(axis, replay.faults(norms["grads"]), [*replay.values.large.values()])
    begun = {} if state.grads is None else {"grads": _numbers(norms_by_leaf(state.grads))}
    begun |= {name: own for name, own in norms.items() if name not in ("grads", "updates")}
    faults = [*_in_trees(STATE, state, begun), *_in_extras(step, state), *sorted(every, key=_order)]
    # gradients that are not finite although each rank's part is: as they are summed, or rounded
    faults = faults or _in_trees(BACKWARD, state, {"the sum of the gradients": norms["grads"]})
    if not faults:
        ended = moment_norms(new.moments) | {"params": norms_by_leaf(new.params.only(trained))}
        faults = _in_trees(UPDATE, new, {name: _numbers(own) for name, own in ended.items()})
    if faults and faults[0].phase == BACKWARD and scale_of(step, state) != 1.0:
        unscaled = dataclasses.replace(step, extras=tuple(each for each in step.extras if not each.scale))
        again = _Replay(unscaled, state, inputs, cotangent, rng, limit).grads
        finite = all(map(math.isfinite, _numbers(norms_by_leaf(again)).values()))
        faults = [dataclasses.replace(each, by_scale=finite and each.phase == BACKWARD) for each in faults]
    return Explanation(
        fault=faults[0] if faults else None,
        faults=tuple(faults),
        overflows=tuple(overflows),
        dtype=dtype,
        norms=norms,
        loss=None if replay.loss is None else float(replay.loss),
        grad_norm=float(norm),
        skipped=bool(metrics["skipped"]),
    )


class _Replay:
    """One run of a step up to its gradients (scaled means over ranks) and its loss, with a look at its values."""

    def __init__(
        self, step: Spec, state: TrainState, inputs: Sequence[object], cotangent: object, rng: int, limit: float
    ) -> None:
        rules = tuple([rule for rule in step.rules if rule.column != "compile"])
        self.step = dataclasses.replace(step, rules=rules, donates=False, fusion=None, metrics=())
        self._state, self.values = state, Values(state, limit)
        self._masked, self._sizes = set[int](), step.microbatches.examples(inputs)
        own = dataclasses.replace(self.step, fn=Observed(self.step, self.values))
        batch, total = Batch(own, state, inputs, cotangent, rng), None
        runs, micro = iter(batch), step.microbatches
        with self.values, during(proves, False):  # which look at the values of one run
            for number in range(micro.count):
                self.values.begin(number, self._sizes[number] if self._sizes else None, cotangent)
                run, ct = next(runs)
                self.values.phase = BACKWARD
                pulled, _ = run.pull(ct, into=total)
                self._masked |= {number} if run.mask.masked else set()
                del run
                total = sum_of(total, pulled)
            next(runs, None)
        assert total is not None
        if micro.count > 1:
            reduce_whole(state.params, total)
        self.grads = grads_of(own, state, as_grads(state.layout, total), batch.times)
        self.loss = batch.loss().get("loss")

    def faults(self, grads: Mapping[str, float]) -> list[Fault]:
        """The first fault of each microbatch on this rank."""
        wrong, found = {path for path, norm in grads.items() if not math.isfinite(norm)}, []
        for number in range(self.step.microbatches.count):
            if number in self._masked:
                continue  # what it computes is not added to anything
            pulled = [(path, taint) for at, path, taint in self.values.pulled if at == number and path in wrong]
            forward = fault_of(self.values.left.get(number, Taint()))
            if forward is not None:
                found.append(self._fault(forward))
            elif pulled:
                births = [(birth, path) for path, taint in pulled if (birth := fault_of(taint)) is not None]
                found.append(self._fault(*min(births, key=lambda each: each[0].at)))
        return found

    def _fault(self, made: Fault, leaf: str | None = None) -> Fault:
        first = sum(self._sizes[: made.microbatch]) if self._sizes else 0
        return dataclasses.replace(
            made,
            leaf=made.leaf or leaf,
            examples=tuple([first + number for number in made.examples]),
        )


def _in_trees(phase: str, state: TrainState, trees: Mapping[str, Mapping[str, float]]) -> list[Fault]:
    """The leaves whose values are not finite, by their norms; one that came frozen may hold a mask's infinities."""
    masks = {row.path for row in state.layout.rows if row.frozen} if phase == STATE else ()
    return [
        Fault(
            phase=phase,
            kind="inf" if norm == math.inf else "nan",
            unit=state.layout.key_of[path][0].unit,
            leaf=path,
            source=f"{name} of leaf {path!r}",
        )
        for name, norms in trees.items()
        for path, norm in norms.items()
        if norm != norm or (norm == math.inf and path not in masks)
    ]


def _in_extras(step: Spec, state: TrainState) -> list[Fault]:
    """What transforms have added to the state; of what is no tree of leaves only NaN, as infinities may be meant."""
    found = list[Fault]()
    for extra in step.extras:
        own = None if extra.name == CARRY else state.extra[extra.name]  # a carry is an input, and looked at as one
        for name, x in zip(*pytree.named_leaves(own, is_leaf=is_sharded)[:2], strict=True):
            said = f"state.extra[{extra.name!r}]" + (f" ({name})" if name else "")
            if is_sharded(x):
                found += _in_trees(STATE, state, {said: _numbers(norms_by_leaf(x))})
            elif x != x if isinstance(x, float) else isinstance(x, torch.Tensor) and is_plain(x) and x.isnan().any():
                found.append(Fault(phase=STATE, kind="nan", source=said))
    return found


def _order(fault: Fault) -> tuple[int, int, int, int]:
    return fault.microbatch or 0, (FORWARD, BACKWARD).index(fault.phase), fault.at, fault.rank or 0


def _numbers(norms: Norms) -> dict[str, float]:
    """As numbers, which waits for the device once."""
    return dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True)) if norms else {}


def _from_all_ranks(
    axis: Axis, faults: Sequence[Fault], overflows: Sequence[Overflow]
) -> tuple[list[Fault], list[Overflow]]:
    """What all ranks have found; of each unit and phase the largest overflow."""
    own = [[dataclasses.asdict(each) for each in found] for found in (faults, overflows)]
    every, largest = list[Fault](), dict[tuple[str, str], Overflow]()
    for rank, text in enumerate(Everyone(axis).exchange(json.dumps(own), "fz.explain")):
        theirs, large = json.loads(text)
        for said in theirs:  # JSON has lists for tuples
            fields = {name: tuple(x) if isinstance(x, list) else x for name, x in said.items()}
            every.append(Fault(**{**fields, "rank": rank}))
        for one in [Overflow(**{**said, "rank": rank}) for said in large]:
            known = largest.setdefault((one.unit, one.phase), one)
            if one.largest > known.largest:
                largest[one.unit, one.phase] = one
    return every, [*largest.values()]
