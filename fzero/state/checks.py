"""Checks of the values that a verb receives, before anything is communicated.

Some cannot be transformed: what torch.func differentiates or maps, they would take for a constant.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from fzero.base import private, pytree
from fzero.base.context import in_differentiated, jitting
from fzero.base.follow import below_unless, is_transformed, tangents_of
from fzero.base.rebound import holds_others, tensors_held, tensors_reached
from fzero.base.refusals import place_of
from fzero.comm.axis import Axis
from fzero.state.sharded import entries_of, is_sharded
from fzero.stores.disk import Disk
from fzero.table.layout import Layout
from fzero.table.rows import Row
from fzero.table.spec import Spec


class _State(Protocol):
    @property
    def layout(self) -> Layout: ...


def constants(who: str, **arguments: object) -> list[Any]:
    """The arguments with tensors as they are to everybody: none may take part in a transform around this call."""
    if not is_transformed():
        return list(arguments.values())
    out = []
    for argument, tree in arguments.items():
        tensors = list(_named_tensors(tree))
        for name, tensor in tensors:
            _refuse_transformed(who, f"{argument} ({name})" if name else argument, tensor)
        wrapped = any(private.is_wrapped(tensor) for _, tensor in tensors)
        out.append(pytree.map(lambda x: private.unwrapped(x) if pytree.is_tensor(x) else x, tree) if wrapped else tree)
    return out


@contextlib.contextmanager
def open_to_transforms(who: str, **arguments: object) -> Iterator[Any]:
    """Around what a transform may go on through: gives whether one does, and the arguments, else constants."""
    follows = goes_on(*arguments.values())
    given = list(arguments.values()) if follows else constants(who, **arguments)
    with private.of_normal_tensors(), below_unless(follows):
        yield follows, *given


def goes_on(*trees: object) -> bool:
    """Tells whether a transform, or the pullback of the step whose function runs, goes on through some arguments."""
    if not is_transformed():
        return False
    _refuse_traces()
    seen = (transform_of(tensor) for tree in trees for tensor in _tensors(tree))
    return jitting.get() is not None or any(transform is not None for transform in seen)


def _refuse_traces() -> None:
    if private.traces() and jitting.get() is None:
        raise TypeError(
            f"fzero: got a call{place_of()} that is traced into a graph (torch.func.linearize, make_fx, or fz.jit of a "
            "step whose function runs another step), expected one of values, as what ranks exchange and what is "
            "written in place is no part of such a graph. Take torch.func.jvp; fz.jit(lambda state, x: step(state, x)) "
            "goes through steps within steps."
        )


def follows_step(step: Spec, state: _State, who: str, **arguments: object) -> bool:
    """Tells whether a transform goes on through a verb's arguments or its step's optimizer; refused where it cannot."""
    if not is_transformed():
        return False
    own = (step.optimizer, step.extras)
    given = {"state": state, "optimizer": tensors_reached(own), **arguments}
    if goes_on(*given.values()):
        need_derivative(step, state.layout.rows, who, **given)
        return True
    # one of the user's own may come to tensors in ways that are not seen
    return torch.is_grad_enabled() and not _without_derivative(step, state.layout.rows) and holds_others(own)


def begins_with(step: Spec) -> bool:
    """Tells whether a transform may go on through what a step's optimizer and transforms begin their states with."""
    if not is_transformed():
        return False
    own = (step.optimizer, step.extras)
    return goes_on(tensors_reached(own)) or (torch.is_grad_enabled() and holds_others(own))


def need_derivative(step: Spec, rows: Sequence[Row], who: str, **arguments: object) -> None:
    """Refuses a step that has none, where a transform goes on through some arguments."""
    if why := _without_derivative(step, rows):
        taking = (
            f"{f'{argument} ({name})' if name else argument} that {transform if jitting.get() is None else 'fz.jit'} "
            "transforms"
            for argument, tree in arguments.items()
            for name, tensor in _named_tensors(tree)
            if (transform := transform_of(tensor)) is not None
        )
        got = next(taking, "what a transform goes on through")
        raise TypeError(
            f"{who}: got {got}, and {why[0]}, which has no derivative and cannot be mapped; expected a step without it "
            f"under torch.func or in a function of fz.jit. {why[1]}"
        )


def can_follow_here(step: Spec, state: _State, *trees: object) -> bool:
    """Tells whether a transform may go on through a run of this step's function, and nothing in the step is in its way.

    What it closes over may be hidden; but inside torch.no_grad() only what is seen to be mapped, or pushed forward, is
    no constant.
    """
    if not is_transformed() or _without_derivative(step, state.layout.rows):
        return False
    _refuse_traces()
    if torch.is_grad_enabled():
        return True
    return goes_on(state, tensors_held(step.fn), tensors_held(step.optimizer), *trees)


def _without_derivative(step: Spec, rows: Sequence[Row]) -> tuple[str, str] | None:
    """What of a step and its states has no derivative, and what to do; None where all has one."""
    if step.donates:
        return "the step donates its states (fz.donate)", "Leave fz.donate out."
    if jitting.get() is not None and any(extra.scale and extra.update for extra in step.extras):
        return "the step's loss scale changes (fz.loss_scale)", "Take fz.jit(step), or leave fz.loss_scale out."
    for row in rows:
        policy, leaf = row.policy, f"leaf {row.path!r}"
        coded = not policy.param_format.plain or isinstance(policy.moment, str)
        if coded or policy.rounding != "nearest":
            what = "encoded" if coded else "rounded stochastically"
            return f"the states of {leaf} are {what} ({policy})", (
                "Derivatives go through a step whose states are floats, rounded to nearest: say fz.Policy(), or "
                "fz.Policy(param=torch.bfloat16, ...), and bring the state there by fz.convert."
            )
        if policy.gather is not None:
            return f"{leaf} is gathered in 8 bits ({policy})", "Leave gather='8-bit' out."
        if any(isinstance(memory, Disk) for memory in row.memories):
            return f"states of {leaf} lie on a disk (fz.offload)", "Leave fz.Disk out; 'host' has derivatives."
    return None


def transform_of(tensor: torch.Tensor) -> str | None:
    """What goes on through a tensor here, in words."""
    transform = private.transform_of(tensor)
    if transform is None and in_differentiated() and tensor.requires_grad:
        return "the pullback of the step whose function runs"
    return transform


def _refuse_transformed(who: str, argument: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor that a transform differentiates or maps."""
    transform = transform_of(tensor)
    if transform is not None:
        instead = (
            "Call it outside of vmap, with the whole batch; for every example's gradient, call fz.per_example_grads."
            if transform == "torch.func.vmap"
            else "Take gradients with step.vjp, by params and by inputs, and second derivatives with fz.hvp; pass "
            "x.detach() where no gradient is wanted."
        )
        raise TypeError(
            f"{who}: got {argument} that {transform} transforms, expected tensors that are constants to it: {who} "
            f"cannot be transformed, and its result would have no derivative. {instead}"
        )


def need_derivatives(who: str) -> None:
    """Refuses torch.inference_mode(), under which torch notes only a part of what is differentiated."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{who}: got a call inside torch.inference_mode(), expected one outside of it, as it differentiates. Leave "
            "that mode for it (with torch.inference_mode(False): ...), or say torch.no_grad() in its place."
        )


def refuse_captured(who: str, fn: object) -> None:
    """Refuses the same in what a function closes over, in its closure, its defaults, or bound by functools.partial."""
    for value in tensors_held(fn) if is_transformed() else ():
        _refuse_transformed(who, f"fn, which closes over a tensor of shape {tuple(value.shape)},", value)


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    """The tensors of a tree, those that its buffers are among them."""
    for node in pytree.flatten(tree, is_leaf=is_sharded)[0]:
        yield from [x for x in (entries_of(node) if is_sharded(node) else (node,)) if isinstance(x, torch.Tensor)]


def _named_tensors(tree: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree, each with its path, or that of a leaf that its buffer holds."""
    for name, node in zip(*pytree.named_leaves(tree, is_leaf=is_sharded)[:2], strict=True):
        for key in node.groups if is_sharded(node) else ():
            name = f"leaf {node.layout.groups[key].slots[0].path!r}"
            entries = (*node.placed(key).parts, node.held_entries.get(key))
            yield from [(name, x) for x in entries if isinstance(x, torch.Tensor)]
        if isinstance(node, torch.Tensor):
            yield name, node


# ---- checksums, by which ranks find out whether they have the same values


def checksum(leaf: torch.Tensor) -> int:
    if private.is_fake(leaf) or jitting.get() is not None:
        return 0
    with private.below_transforms():
        data = private.unwrapped(leaf).detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()
    return zlib.crc32(data)  # type: ignore[arg-type]


def checksums(x: torch.Tensor) -> str:
    tangents = "".join(f", a tangent with checksum {checksum(tangent + 0.0)}" for tangent in tangents_of(x))
    return f"checksum {checksum(x)}{tangents}"


def check_values(axis: Axis, tensors: Iterable[torch.Tensor], what: str, advice: str) -> None:
    """Raises ValueError on every rank where the ranks have other tensors."""
    said = [f"a tensor of shape {tuple(x.shape)} with {checksums(x)}" for x in tensors]
    axis.check_same("\n".join(said), what, advice)
