"""Whether a state, and grads, are of a step: what a verb receives, before anything is communicated."""

from __future__ import annotations

from fzero.base import private
from fzero.base.arguments import named
from fzero.base.rebound import made_with
from fzero.state.sharded import Sharded, check_buffers, entries_of, trees_of
from fzero.state.train_state import TrainState
from fzero.table.optimizer import GradientTransformation
from fzero.table.rows import FROZEN
from fzero.table.spec import Spec, need_step


def check_state(step: Spec, state: TrainState, who: str = "step") -> None:
    need_step(step, who)
    if not isinstance(state, TrainState):
        raise TypeError(
            f"step: got a state of type {type(state).__name__}, expected what step.init returned.{_instead(state)}"
        )
    layout = state.layout
    if state.is_made_by(step):
        state.params.axis.need_running()
        return
    if state.signature != step.signature:
        raise ValueError(
            f"step: got a state of another step, made with {state.signature}; expected one made with {step.signature}. "
            "Use the state that this step's init returned, or convert it: fz.convert(state, step). (fz.with_fn gives "
            "another function over the same state.)"
        )
    axis, theirs = step.axis(), state.params.axis
    if layout.shards != axis.size:
        raise ValueError(
            f"step: got a state cut into {layout.shards} shards (leaf {layout.rows[0].path!r} and others), "
            f"expected {axis.size}, the size of the sharded axis. Make the state with this "
            "step's init on this process group."
        )
    if axis != theirs:
        raise ValueError(
            f"step: got a state (leaf {layout.rows[0].path!r} and others) that lies on {theirs.place}; expected one on "
            f"{axis.place}, the ranks of this step's mesh. Convert it: fz.convert(state, step); or build the step with "
            "the mesh that the state was made with."
        )
    theirs.need_running()
    for tree in trees_of((state.params, state.moments)):
        kind = "params" if tree.kind == "params" else "moments"
        if tree.layout != layout:
            raise ValueError(
                f"step: the slices of leaf {layout.rows[0].path!r} and others in state.{kind} are of another state's "
                "leaves. Put trees of the same init together."
            )
        check_buffers("step", f"state.{kind}", tree)


def _instead(state: object) -> str:
    """What to write, if a value that is no state was taken from one."""
    if isinstance(state, tuple) and any(isinstance(x, TrainState) for x in state):
        return " A step returns a pair: write state, metrics = step(state, ...)."
    if isinstance(state, Sharded):
        return " Put the tree into a state: step.forward(state.replace(params=state.extra['ema']), ...)."
    return ""


def check_optimizer(step: Spec, state: TrainState) -> None:
    if state.is_made_by(step):
        return
    for group in state.layout.groups.values():
        row = group.row
        ours = step.label(row.path)
        if row.moments is not None and row.optimizer.removeprefix(f"{FROZEN}, ") != ours:
            raise ValueError(
                f"step: leaf {row.path!r} of the state has moments of {row.optimizer!r}, expected those of "
                f"{ours!r}. Make the state with this step's init, or use the optimizer that it was made with."
            )


def check_same_optimizer(who: str, optimizer: GradientTransformation, params: Sharded) -> None:
    """Refuses an optimizer that ranks have made with other numbers, as each updates its slices by its own.

    It is looked at once for a state and those that come of it, also where another one has begun it.
    """
    compared = params.layout.compared
    if any(each is optimizer.update for each in compared) or any(map(private.is_fake, params.entries.values())):
        return
    params.axis.check_same(
        f"one that was made with {made_with(optimizer)}",
        f"{who}: The optimizers",
        "Make it with the same numbers on every rank: each updates its slices by its own.",
    )
    compared.append(optimizer.update)


def check_grads(step: Spec, state: TrainState, grads: object, argument: str = "grads", who: str = "step") -> None:
    """Refuses grads that no pullback over a state of this step made, and first of all such a state."""
    check_state(step, state, who)
    expected = "expected the first value that a pullback of this step returned"
    if not isinstance(grads, Sharded):
        raise TypeError(f"{argument}: got {named(grads)}, {expected}.")
    own = {id(x) for tree in trees_of((state.params, state.moments, state.extra)) for x in entries_of(tree)}
    if not own.isdisjoint(map(id, entries_of(grads))):
        raise TypeError(f"{argument}: got the {grads.kind} of the state itself, {expected}.")
    if grads.layout != state.layout or set(grads.groups) != set(state.layout.trainable):
        ours = {row.path: row for row in state.layout.rows}
        other = next((row.path for row in grads.layout.rows if ours.get(row.path) != row), grads.layout.rows[0].path)
        raise ValueError(
            f"{argument}: got grads of another step (leaf {other!r} differs), expected those of a pullback of this "
            f"step over {len(ours)} leaves. Give each component its own grads."
        )
    mine, theirs = state.params.axis, grads.axis
    if mine.identity != theirs.identity:
        raise ValueError(
            f"{argument}: got those of a pullback over another state, of {theirs.who}; expected those of a state that "
            f"descends from the same init as this one, of {mine.who}. Give each component its own grads. To put "
            "other params into this state, use state.replace(params=...)."
        )


def taken_grads(step: Spec, state: TrainState, grads: object, who: str, argument: str = "grads") -> Sharded:
    """A pullback's grads, or full ones as slices, of the trained leaves only."""
    if isinstance(grads, Sharded):
        if set(grads.groups) > set(grads.layout.trainable):  # those of torch.func.grad by a state's params
            grads = grads.only(grads.layout.trainable)
    elif grads is not None:
        check_state(step, state)
        grads = state.fitting(who, "grads", grads)
    check_grads(step, state, grads, argument)
    return grads  # type: ignore[return-value]
