"""fz.scatter: full leaves, equal on all ranks, as each rank's slices of them. The inverse of fz.gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard, TypeVar, cast

import torch

from fzero.base import pages, pytree
from fzero.base.arguments import named
from fzero.base.follow import any_follows
from fzero.comm.axis import Axis
from fzero.formats.formats import Format, Grouped, Plain, encode
from fzero.kernels.onepass import math_dtype
from fzero.state.beyond import Distant, here
from fzero.state.checks import checksums, open_to_transforms
from fzero.state.sharded import Sharded, check_buffers, entries_of, is_item, is_sharded
from fzero.state.sliced import codes_of, held_of, slice_in, slice_of
from fzero.stores.away import Buffer
from fzero.stores.memories import put_again
from fzero.table.layout import Key

Tree = TypeVar("Tree")


def scatter(tree: object, like: Tree) -> Tree:
    """Cuts full leaves into each rank's slices: the inverse of `fz.gather`. All ranks call it, with equal leaves.

    To edit a state: gather, change some leaves, scatter, `state.replace`. (`state.replace` and `step.update` take full
    trees too, and cut them so.)

    Args:
        tree: full leaves of any floating dtype, in the structure given to `init`, or as `{path: leaf}`. They are
            rounded to nearest. Frozen leaves may be left out or None: params then stay as in `like`. Sharded trees,
            counts and numbers in it are taken over as they are. Leave out a carry (`fz.carry`): each rank has its own.
        like: what gives formats, memories and slices: `state.params`, grads, `state.moments`, an entry of
            `state.extra`, or a pytree of such trees.

    Returns:
        A tree in the structure of `like`, without a loss scale.

    Raises:
        TypeError: there is nothing sharded in `like`, or a leaf is no floating tensor.
        ValueError: a leaf has another shape, with its path; the structure differs; or ranks have different leaves.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> state = step.init({"w": torch.ones(3)})
        >>> full = fz.gather(state.params)
        >>> full["w"][0] = 5.0
        >>> fz.gather(state.replace(params=fz.scatter(full, like=state.params)).params)["w"]
        tensor([5., 1., 1.])
    """
    if any(isinstance(node, Distant) for node in pytree.flatten(like, is_leaf=lambda x: isinstance(x, Distant))[0]):
        raise TypeError(
            f"scatter: got like={named(like)}, which lies on the ranks of another component; expected trees of this "
            "process. A state there is changed by its steps, and by fz.load."
        )
    if not any(map(is_item, pytree.flatten(like, is_item)[0])):
        raise TypeError(
            f"scatter: got like={named(like)}, in which no tree is sharded; expected state.params, grads, "
            "state.moments, an entry of state.extra, or a pytree of such trees."
        )
    return cast(Tree, scattered("scatter", "tree", tree, like))


def scattered(
    who: str, name: str, tree: object, like: object, axis: Axis | None = None, drops_frozen: bool = False
) -> object:
    """The same, of what may hold no sharded tree.

    Args:
        who, name: the caller and its argument, for errors.
        axis: over which ranks must agree on what lies in no sharded tree; that of the first one by default.
        drops_frozen: whether leaves that `like` lacks may be there, as gradients of frozen leaves are.
    """
    if tree is like:
        return tree
    tree = here(tree)
    public = f"fz.{who}" if who == "scatter" else who
    with open_to_transforms(public, **{name: tree, "like": like}) as (follows, tree, like):
        return _Scatter(who, name, axis, drops_frozen, follows).of(tree, like)


def cut(
    tree: Sharded, key: Key, leaves: Mapping[int, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A group's full buffer of its whole leaves, and this rank's slice, which may be the same tensor."""
    rows, group, size = tree.layout.rows, tree.layout.groups[key], tree.layout.shard_numel(key)
    own = [slice_of(rows[slot.leaf], *tree.layout.tensor, leaves[slot.leaf].detach()) for slot in group.slots]
    full = group.full_of(own, dtype, own[0].device)
    whole = size == group.numel
    return full, full if whole else pages.copied(full.narrow(0, tree.rank_of(key) * size, size))


class _Leaves(dict[int, torch.Tensor]):
    """Leaf -> its full value, in the place of a sharded tree."""


class _Scatter:
    """One call: all is checked, then compared among ranks, and then cut, so that an error is one on every rank."""

    def __init__(self, who: str, name: str, axis: Axis | None, drops_frozen: bool, follows: bool) -> None:
        self._who, self._name, self._axis = who, name, axis
        self._drops_frozen, self._follows = drops_frozen, follows
        self._said: list[str] = []
        self._axes: list[Axis] = []  # over which there are others

    def of(self, tree: object, like: object) -> object:
        names, nodes, spec = pytree.named_leaves(like, is_item)
        wheres = [f"{self._name}.{name}".removesuffix(".") for name in names]
        trees, found, error = [node for node in nodes if is_sharded(node)], list[object](), None
        axes = dict.fromkeys([node.axis for node in trees] + ([self._axis] if self._axis is not None else []))
        self._axes = [axis for axis in axes if axis.ranks > 1 or axis.place_on_tensor[1] > 1]
        full = True  # whether there are full leaves, which ranks compare
        try:
            given = self._subtrees(tree, spec)
            full = not trees or any(is_sharded(y) and not is_sharded(x) for x, y in zip(given, nodes, strict=True))
            found += map(self._checked, wheres, given, nodes)
        except Exception as caught:
            error = caught
        for axis in self._axes if full else ():
            what, advice = f"The full leaves given to {self._who}", "Give all ranks the same, as fz.gather does."
            axis.check_same("\n".join(self._said) if error is None else str(error), what, advice)
        if error is not None:
            raise error
        for place, (own, node) in enumerate(zip(found, nodes, strict=True)):
            found[place] = self._cut(own, node) if isinstance(own, _Leaves) else own
        return pytree.unflatten(spec, found)

    def _subtrees(self, tree: object, spec: pytree.Spec) -> list[object]:
        try:
            return spec.flatten_up_to(tree)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(
                f"{self._who}: got {self._name}={named(tree)}, expected the structure of the state's (like), as "
                f"fz.gather gives it. ({str(error).partition('; value')[0]})"
            ) from None

    def _checked(self, where: str, own: object, like: object) -> object:
        """What stands in a place: a sharded tree, full leaves, a count, a number, or a tensor that all ranks have."""
        if is_sharded(like):
            return self._fitting(where, own, like) if is_sharded(own) else self._leaves(where, own, like)
        fits = isinstance(own, type(like)) or (isinstance(own, (int, float)) and isinstance(like, (int, float)))
        if isinstance(like, torch.Tensor) and isinstance(own, torch.Tensor):
            fits = own.shape == like.shape
        if not fits:
            raise ValueError(f"{self._who}: got {where}={named(own)}, expected {named(like)}, as in the state.")
        counts = [dict(each.paused).keys() for each in (own, like) if isinstance(each, pytree.Count)]
        if counts and counts[0] != counts[1]:
            raise ValueError(
                f"{self._who}: got {where}={own}, expected the frozen leaves of {like}, as in the state. To freeze or "
                "thaw leaves that have moments, call fz.convert(state, step)."
            )
        self._note(where, own)
        if isinstance(own, torch.Tensor) and isinstance(like, torch.Tensor):
            return own.to(like.device, like.dtype, copy=True)
        return own

    def _note(self, where: str, own: object) -> None:
        if self._axes:
            self._said.append(f"{where} with {checksums(own) if isinstance(own, torch.Tensor) else repr(own)}")

    def _fitting(self, where: str, own: Sharded, like: Sharded) -> Sharded:
        """A sharded tree in the place of another one; what it lacks of frozen leaves is the other's."""
        layout = like.layout
        if own.layout != layout or own.axis != like.axis:
            what = "ranks" if own.layout == layout else "leaves"
            raise ValueError(
                f"{self._who}: the slices of leaf {layout.rows[0].path!r} and others in {where} are of another state's "
                f"{what}. Give trees of states of the same step, or full leaves, as fz.gather returns."
            )
        missing = [key for key in like.groups if key not in own.groups]
        lost = next((key for key in missing if not layout.groups[key].row.frozen), None)
        if lost is not None:
            path = layout.groups[lost].slots[0].path
            raise ValueError(f"{self._who}: {where} lacks leaf {path!r}, which is trained.")
        if not _is_stacked(like):
            check_buffers(self._who, where, own)
        if set(own.groups) > set(like.groups):
            own = own.only(like.groups)
        if not missing:
            return own
        alike = own.kind == like.kind  # otherwise these are values, and may be codes there
        rest = like.only(missing).entries if alike else {key: like.local(key) for key in missing}
        return own.replaced(buffers=own.entries | rest)

    def _leaves(self, where: str, tree: object, like: Sharded) -> _Leaves:
        """What a natural tree has of each leaf."""
        layout, groups = like.layout, set(like.groups)
        if _is_stacked(like):
            raise ValueError(
                f"{self._who}: got full leaves for {where} of a stacked state, expected a tree that is sharded like "
                "it. Put them into each of fz.unstack(state), and fz.stack these."
            )
        names, leaves, _ = pytree.named_leaves(tree, is_sharded)
        given = dict(zip(names, leaves, strict=True))
        if not names or ("" in given and "" not in layout.key_of) or any(map(is_sharded, leaves)):
            raise TypeError(f"{self._who}: got {where}={named(tree)}, expected full leaves, or a tree sharded like it.")
        if unknown := [name for name in names if name not in layout.key_of]:
            got = f"{self._who}: got a leaf {unknown[0]!r} in {where}"
            raise ValueError(f"{got}, expected those of the state: {', '.join(layout.key_of)}.")
        out = _Leaves()
        for index, row in enumerate(layout.rows):
            own, known = given.get(row.path), layout.key_of[row.path][0] in groups
            what = f"{self._who}: {where}[{row.path!r}]"
            if own is None:
                if known and not row.frozen:
                    raise ValueError(f"{what} is missing, expected a tensor of shape {row.shape}, as it is trained.")
            elif not known and self._drops_frozen and row.frozen:
                continue
            elif not known:
                raise ValueError(f"{what}: got {named(own)}, expected None: there is none of this leaf in the state.")
            elif not _is_whole(own):
                expected = f"a floating tensor of shape {row.shape}, dense and whole on this rank"
                raise TypeError(f"{what}: got {named(own)}, expected {expected}.")
            elif tuple(own.shape) != row.shape:
                raise ValueError(f"{what}: got {named(own)}, expected shape {row.shape}.")
            else:
                out[index] = own
                self._note(f"{where} {row.path}", own)
        for key in groups:
            absent, there = ([s.path for s in layout.groups[key].slots if (s.leaf in out) == is_in] for is_in in (0, 1))
            if absent and there:
                raise ValueError(
                    f"{self._who}: {where} has leaf {there[0]!r} and lacks {absent[0]!r}, which is frozen too and lies "
                    "beside it. Give all of them or none."
                )
        return out

    def _cut(self, leaves: _Leaves, like: Sharded) -> Sharded:
        buffers, held = dict[object, Buffer](), dict[Key, Buffer]()
        stale = set(like.stale)
        for key in like.groups:
            slots, names = like.layout.groups[key].slots, like.names(key)
            made = {slot.leaf: leaves[slot.leaf].to(like.device) for slot in slots if slot.leaf in leaves}
            if not made:  # frozen, and left out
                buffers |= {name: like.entries[name] for name in names if name in like.entries}
                held |= {key: like.held_entries[key]} if key in like.held_entries else {}
                continue
            parts, full = self._parts(like, key, made)
            stale.discard(key)
            if key in like.held_entries:
                held[key] = put_again(like.held_entries[key], full)
            pairs = zip(names, parts, strict=True)
            buffers |= {name: put_again(like.entries[name], part) for name, part in pairs if name in like.entries}
        return like.replaced(buffers=buffers, held=held, scale=1.0, stale=frozenset(stale))

    def _parts(
        self, like: Sharded, key: Key, leaves: Mapping[int, torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """The parts of this rank's slice, and the full buffer that is computed with."""
        row, form = like.layout.groups[key].row, like.placed(key).format
        wider = any(x.dtype.itemsize > form.dtype.itemsize for x in leaves.values())
        if like.kind == "values" and (wider or like.scale != 1.0):  # 16 bits may hold values only with their scale
            form = Plain(math_dtype(form.dtype))
        if self._follows and any_follows(leaves.values()):
            return self._followed(like, key, leaves, form)
        if isinstance(form, Grouped):
            for slot in like.layout.groups[key].slots:
                x = leaves[slot.leaf]
                if not x.isfinite().all() or (not getattr(form, "signed", True) and bool((x < 0).any())):
                    raise ValueError(
                        f"{self._who}: got {named(x)} for leaf {slot.path!r}, with a value that {form} codes cannot "
                        "hold, as it is not finite, or a negative second moment; expected others: its neighbours "
                        "would change, too."
                    )
        full, own = cut(like, key, leaves, form.dtype)
        return codes_of(form, own), row.policy.used(encode(form, full)) if key in like.held_entries else full

    def _followed(
        self, like: Sharded, key: Key, leaves: Mapping[int, torch.Tensor], form: Format
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """The same as differentiable functions of the leaves."""
        row = like.layout.groups[key].row
        if not form.plain or form.rounds or row.policy.gather is not None:
            raise TypeError(
                f"{self._who}: got leaf {row.path!r} that a transform of torch.func goes on through, and it is stored "
                f"as {form}, which has no derivative; expected plain dtypes there."
            )
        own = slice_in(like, key, leaves, form.dtype)
        tag = f"{self._who} of {key}"
        return [own], held_of(like, key, own, row.policy.compute, tag) if key in like.held_entries else own


def _is_stacked(tree: Sharded) -> bool:
    return any(isinstance(x, torch.Tensor) and x.ndim > 1 for x in entries_of(tree))


def _is_whole(x: object) -> TypeGuard[torch.Tensor]:
    dense = isinstance(x, torch.Tensor) and x.is_floating_point() and x.layout == torch.strided and not x.is_meta
    return dense and not hasattr(x, "full_tensor")  # as a DTensor has
