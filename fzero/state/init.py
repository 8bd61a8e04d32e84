"""From the user's params to a state: the table, the layout, the ranks' agreement, the buffers."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

import torch

from fzero.base import private, pytree, thread_state
from fzero.base.arguments import named
from fzero.base.follow import below_unless
from fzero.base.random import acts_for_main
from fzero.comm.axis import Axis
from fzero.formats.formats import encode
from fzero.state.checks import begins_with, checksums, goes_on, need_derivative
from fzero.state.moments import init_extras, init_moments
from fzero.state.scatter import cut
from fzero.state.sharded import Sharded, part_names, trees_of
from fzero.state.sliced import cuts, held_of, slice_in
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.stores.memories import name_of, put
from fzero.table.layout import Key, Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.rows import Leaf
from fzero.table.spec import Spec


def leaf_specs(params: object) -> tuple[list[Leaf], list[object], pytree.Spec]:
    """(path, shape, dtype) of every leaf, the leaves, the structure; callables are asked without memory."""
    kinds = (Sharded, TrainState, torch.nn.Module)
    for node in pytree.flatten(params, is_leaf=lambda node: isinstance(node, kinds))[0]:
        if isinstance(node, kinds):
            instead = (
                "tensors: apply, params = fz.functional(module)"
                if isinstance(node, torch.nn.Module)
                else "full tensors: fz.gather(state.params), or to change the step of a state, fz.convert(state, step)"
            )
            raise TypeError(f"params: got {named(node)}, expected a pytree of {instead}.")
    names, leaves, structure = pytree.named_leaves(params)
    if not leaves:
        raise ValueError("params: got an empty tree, expected at least one floating tensor.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"params: two leaves have the path {twice!r}; rename a key so that dotted paths are unique.")
    return [_spec(name, leaf) for name, leaf in zip(names, leaves, strict=True)], leaves, structure


def _spec(path: str, leaf: object) -> Leaf:
    """A leaf's path, shape and dtype; one that cannot be trained or sharded is refused by name."""
    if callable(leaf) and not isinstance(leaf, torch.Tensor):
        leaf = _made_without_memory(path, leaf)
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(
            f"params[{path!r}]: got {type(leaf).__name__}, expected a floating tensor (or a callable that makes one). "
            "Keep what is not a tensor out of the params; a class of your own that holds some is registered with "
            "optree (optree.register_pytree_node)."
        )
    if not leaf.is_floating_point():
        raise TypeError(
            f"params[{path!r}]: got dtype {leaf.dtype}, expected a floating dtype. "
            "Pass integer tensors as inputs of the function, or let it close over them; of a complex param hold "
            "torch.view_as_real(w), and take torch.view_as_complex of it in the function."
        )
    if leaf.numel() == 0:
        raise ValueError(
            f"params[{path!r}]: got shape {tuple(leaf.shape)}, which has no elements; expected at least one. "
            "Drop the leaf from the params; of a module make it a buffer."
        )
    return path, tuple(leaf.shape), leaf.dtype


def _need_values(path: str, leaf: object) -> None:
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        raise ValueError(
            f"params[{path!r}]: got a tensor on the meta device, which has no values; expected one with values. Build "
            "the module on the CPU or a GPU, or give callables that make the leaves (lambda: torch.zeros(2)), which "
            "step.init calls unit by unit. fz.plan takes meta tensors."
        )


def _made_without_memory(path: str, make: Callable[..., object]) -> object:
    try:
        with contextlib.suppress(ValueError):  # a builtin that has no signature
            inspect.signature(make).bind()
    except TypeError as error:
        raise TypeError(
            f"params[{path!r}]: got {named(make)}, which cannot be called without arguments ({error}); expected a "
            "floating tensor, or a callable that makes one. If params are what fz.functional returned, take them "
            "apart: apply, params = fz.functional(module)."
        ) from None
    with thread_state.without_values():
        return make()


def init_state(step: Spec, params: object, seed: int, sync: bool) -> TrainState:
    """The state for these params, once the ranks agree on the table and on the values."""
    specs, leaves, structure = leaf_specs(params)
    for (path, *_), leaf in zip(specs, leaves, strict=True):
        _need_values(path, leaf)
    axis = step.axis().of_component(step.name)
    rows = step.rows(specs, frozen_leaves(structure), hints_of(structure))
    layout = Layout.build(rows, axis.size, axis.place_on_tensor)
    if follows := goes_on(leaves):
        need_derivative(step, rows, "step.init", params=params)
        if sync:
            raise TypeError(
                "step.init: got sync=True and params that a transform goes on through, expected sync=False there: what "
                "other ranks hold would have no derivative. Give all ranks the same params."
            )
    empty = Sharded(layout, axis, structure, {}, kind="params")
    with below_unless(follows):
        check_tables(step, layout, axis, f"seed {seed} sync {sync}")
        tree = _filled(empty, specs, leaves, follows, sync)
    with below_unless(follows or (begins := begins_with(step))):
        moments, extras = init_moments(step, tree), init_extras(step, tree)
    if not follows and begins and cuts(tree):
        _refuse_parts(moments, extras)
    return TrainState(tree, None, moments, extras, 0, seed, step.signature)


def _filled(empty: Sharded, specs: Sequence[Leaf], leaves: Sequence[object], follows: bool, sync: bool) -> Sharded:
    """The params of these leaves, once the ranks agree on their values."""
    layout, axis = empty.layout, empty.axis
    buffers: dict[object, Buffer] = {}
    held: dict[Key, Buffer] = {}
    said: list[str] = []
    for key, group in layout.groups.items():
        policy, form = group.row.policy, group.row.policy.param_format
        made = {slot.leaf: _made(leaves[slot.leaf], specs[slot.leaf]) for slot in group.slots}
        for slot in group.slots if sync else ():
            own = made[slot.leaf].detach().clone().contiguous()
            made[slot.leaf] = axis.broadcast(own, f"leaf {slot.path!r}")
        if (axis.ranks > 1 or axis.place_on_tensor[1] > 1) and not sync:
            said += [f"{slot.path} with {checksums(made[slot.leaf])}" for slot in group.slots]
        if follows:
            own = slice_in(empty, key, made, form.dtype)
            if group.row.held:
                held[key] = held_of(empty, key, own, policy.compute, f"init of {key}")
            if group.row.beside:
                buffers[key] = own
            continue
        full, own = cut(empty, key, made, form.dtype)
        del made
        place = functools.partial(put, group.row.params.memory, device=full.device, what=f"the params of {key}")
        if group.row.held:
            held[key] = place(policy.used(encode(form, full)))
        if group.row.beside:
            buffers.update(zip(part_names(form, key), map(place, encode(form, own)), strict=True))
        del full, own
    alike = "Seed every rank alike before building the model"
    if not acts_for_main():
        alike = "Build the model once, outside of ranks that are threads, as these share torch's random numbers"
    axis.check_same("\n".join(said), "The params", f"{alike}, or call init(params, sync=True) to send rank 0's.")
    return empty.replaced(buffers=buffers, held=held)


def _refuse_parts(moments: object, extras: Mapping[str, object]) -> None:
    """Refuses states that begin with what a transform goes on through where ranks have slices of them."""
    for name, tree in {"moments": moments, **{f"extra[{name!r}]": x for name, x in extras.items()}}.items():
        if any(private.is_differentiated(x) for own in trees_of(tree) for x in own.buffers.values()):
            raise TypeError(
                f"step.init: state.{name} begins with a tensor that torch.func differentiates, and each rank has a "
                "slice of the leaves, so that its derivative would be a part of the whole one; expected zeros or the "
                "params, fz.whole(optimizer), which gives an optimizer whole leaves, or a step that is not sharded."
            )


def check_tables(step: Spec, layout: Layout, axis: Axis, more: str) -> None:
    """Raises ValueError on every rank where the ranks make states of different tables."""
    table = "\n".join(
        f"{row.path} {row.shape} {row.policy} {row.optimizer} unit {row.unit!r} gathered for {row.lifetime}, "
        f"autocast {row.autocast}, remat {row.remat}, in {', '.join(map(name_of, row.memories))}"
        + (f", cut {row.slices}" if row.slices is not None else "")
        for row in layout.rows
    )
    axis.check_same(
        f"{[extra.source for extra in step.extras]} {more}\n{table}",
        "The tables (transforms, policy, leaves, seed)",
        "Build the same step from the same params on every rank, and give it the same arguments.",
    )


def _made(leaf: object, spec: Leaf) -> torch.Tensor:
    """The leaf, or what its callable makes now, which must be what it made without memory."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    assert callable(leaf)
    out, (path, shape, dtype) = leaf(), spec
    _need_values(path, out)
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"params[{path!r}]: its callable made {named(out)}; expected shape {shape} and dtype {dtype}.")
    return out
