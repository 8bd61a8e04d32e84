"""TrainState: the immutable pytree that a step takes and returns."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fzero.base import pytree
from fzero.base.arguments import wrong
from fzero.base.display import counted, folded, in_bytes
from fzero.formats.formats import Plain
from fzero.state.placing import placed
from fzero.state.scatter import scattered
from fzero.state.sharded import Sharded, is_sharded, map_trees, trees_of
from fzero.table.layout import Layout
from fzero.table.spec import Signature

_taking = threading.Lock()
being_saved: weakref.WeakSet[object] = weakref.WeakSet()  # snapshots, which hold buffers until they are written


class TrainState:
    """Params, grads and moments as this rank's flat buffers, which are its only leaves for optree and torch.

    Immutable: `replace` gives a new one. A state that was donated is dead and says which step took it.

    Attributes:
        params: `Sharded`; `state.params["blocks.0.attn.weight"]` is this rank's slice of a leaf.
        grads: what `add_grads` kept, or None.
        moments: the optimizer's state, whose trees are `Sharded`.
        step: how many updates were applied.
        extra: what transforms add, by name: `state.extra["loss_scale"]`.
        seed: of everything random in this run.
    """

    __slots__ = (
        "_dead",
        "_extra",
        "_grads",
        "_moments",
        "_overwritten",
        "_params",
        "_rest",
        "seed",
        "signature",
        "step",
    )

    def __init__(
        self,
        params: Sharded,
        grads: Sharded | None,
        moments: object,
        extra: Mapping[str, object],
        step: int,
        seed: int,
        signature: Signature,
    ) -> None:
        trees = (params, grads, moments, dict(extra))  # in new shells: one state's end is not another's
        self._params, self._grads, self._moments, self._extra = map_trees(lambda tree: tree.replaced(), trees)
        self.step, self.seed, self.signature = step, seed, signature
        self._dead: str | None = None
        self._overwritten: str | None = None

    def _read(self, value: Any) -> Any:
        if self._dead:
            raise RuntimeError(self._dead)
        return value

    @property
    def params(self) -> Sharded:
        return self._read(self._params)

    @property
    def grads(self) -> Sharded | None:
        return self._read(self._grads)

    @property
    def moments(self) -> Any:
        return self._read(self._moments)

    @property
    def extra(self) -> Mapping[str, Any]:
        return self._read(self._extra)

    @property
    def layout(self) -> Layout:
        return self.params.layout

    def replace(self, **changes: Any) -> TrainState:
        """A new state with some fields changed.

        Args:
            params, grads, moments: trees that are sharded like the state's, whose buffers are shared and not copied; or
                full leaves, equal on all ranks, as `fz.gather` returns them (`fz.scatter`). Frozen leaves may be left
                out, and leaves that a sharded tree lacks, as an average of the trained ones does, stay as they are.
            extra: all entries, such as `{**state.extra, name: value}`, each of either kind.
            step: a number of applied updates. The optimizer's own counts are in `moments`.
            seed, signature: of the state.

        Raises:
            TypeError, ValueError: a field that there is not, or a tree that does not fit, with the leaf's path.
        """
        unknown = set(changes) - set(_FIELDS)
        if unknown:
            raise TypeError(f"TrainState.replace: got {sorted(unknown)}, expected some of {', '.join(_FIELDS)}")
        for name, value in changes.items():
            kinds, expected = _FIELDS[name]
            if not isinstance(value, kinds) or (kinds is int and isinstance(value, bool)):
                raise wrong("TrainState.replace", name, value, expected)
        if "extra" in changes and set(changes["extra"]) != set(self.extra):
            raise ValueError(
                f"TrainState.replace: got extra={sorted(changes['extra'])}, expected {sorted(self.extra)}, what the "
                "transforms of its step keep."
            )
        if changes.get("step", 0) < 0:
            raise ValueError(f"TrainState.replace: got step={changes['step']}, expected at least 0.")
        for name in ("params", "moments", "grads"):
            if name in changes and (name, changes[name]) != ("grads", None):
                changes[name] = self.fitting("TrainState.replace", name, changes[name])
        if "extra" in changes:
            changes["extra"] = {name: self._entry(name, value) for name, value in changes["extra"].items()}
        return self.changed(**changes)

    def changed(self, **changes: Any) -> TrainState:
        """The same of values that fit, as those of an update do."""
        return TrainState(**{name: getattr(self, name) for name in _FIELDS} | changes)

    def fitting(self, who: str, name: str, tree: object) -> object:
        """A tree for a field, its full leaves as slices where the state's lie."""
        like = getattr(self, name)
        if name == "grads":
            like = like or self._like_grads()
            own = scattered(who, name, tree, like, drops_frozen=True)
            assert is_sharded(own)
            return placed(own, "grads")
        return scattered(who, name, tree, like, self.params.axis)

    def _like_grads(self) -> Sharded:
        """Grads of this state, without memory."""
        rows, params = self.layout.groups, self.params
        own = {key: (params.layout.shard_numel(key), rows[key].row.policy.reduce) for key in params.layout.trainable}
        zero = torch.zeros((), device=params.device)
        buffers = {key: zero.to(dtype).expand(numel) for key, (numel, dtype) in own.items()}
        return params.with_buffers(buffers, 1.0)

    def _entry(self, name: str, value: object) -> object:
        old = self.extra[name]
        nodes = pytree.flatten(old, is_leaf=is_sharded)[0]
        own = any(map(pytree.is_tensor, nodes)) and not any(map(is_sharded, nodes))  # each rank's, as a carry is
        if value is old or own:
            return value
        return scattered("TrainState.replace", f"extra[{name!r}]", value, old, self.params.axis)

    @contextlib.contextmanager
    def donated(self) -> Iterator[TrainState]:
        """Around an update that may overwrite it: the same state for that update alone.

        Anybody else is told so meanwhile, and for ever: except where the update failed before it wrote anything.
        """
        number = self.step + 1
        own = object.__new__(TrainState)
        with _taking:  # one of two threads
            parts = self._read((self._params, self._grads, self._moments, self._extra))
            own._params, own._grads, own._moments, own._extra = map_trees(lambda tree: tree.alias(), parts)
            own.step, own.seed, own.signature = self.step, self.seed, self.signature
            own._dead = own._overwritten = None
            self._close(
                f"This state is donated to the step that is applying update {number}, which may overwrite it "
                "meanwhile. Wait for the state that step returns, or leave fz.donate out to use both."
            )
        why: str | None = (
            f"This state was donated to the step that applied update {number}; its buffers now belong to the state "
            "that step returned. Use that one, or leave fz.donate out to keep old states."
        )
        try:
            yield own
        except BaseException:
            why = own._overwritten
            raise
        finally:
            self.kill(why) if why else self._close(None)

    def overwritten(self, why: str) -> None:
        """Notes that the update that it was donated to overwrites it: if that fails, it stays dead, and says `why`."""
        self._overwritten = why

    def _close(self, why: str | None) -> None:
        """Refuses any use with `why`, until it is None."""
        for tree in trees_of((self._params, self._grads, self._moments, self._extra)):
            tree.close(why)
        self._dead = why

    def kill(self, why: str) -> None:
        """Marks the state and its trees as taken; any later use raises `why`."""
        for tree in trees_of((self._params, self._grads, self._moments, self._extra)):
            tree.kill(why)
        self._params = self._grads = self._moments = self._extra = None  # type: ignore[assignment]
        self._dead = why

    def __repr__(self) -> str:
        if self._dead:
            return f"TrainState(dead: {self._dead})"
        return f"TrainState(step={self.step}, {counted(len(self.layout.rows), 'leaf')}, {self.params.axis})"

    def _repr_html_(self) -> str:
        """Of what is known without reading a value."""
        if self._dead:
            return folded(repr(self), (), ())
        params, layout, axis = self.params, self.layout, self.params.axis
        trees = {"params": params, "grads": self.grads, "moments": self.moments, "extra": dict(self.extra)}
        sizes = {name: sum(map(_nbytes, trees_of(own))) for name, own in trees.items()}
        keys = {key: layout.pieces(key, params.rank_of(key)) for key in layout.groups}
        stored = {slot.leaf: (params.format(key), stop - start) for key in keys for slot, start, stop in keys[key]}
        rows = [
            (row.path, "×".join(map(str, row.shape)) or "scalar", Plain(row.dtype), stored[i][0], f"{stored[i][1]:,}")
            for i, row in enumerate(layout.rows)
        ]
        notes = "bytes on this rank: " + ", ".join([f"{name} {in_bytes(size)}" for name, size in sizes.items() if size])
        title = f"TrainState: step {self.step}, {counted(len(rows), 'leaf')}, rank {axis.rank} of {axis.size}"
        return folded(title, ("leaf", "shape", "dtype", "stored as", "elements here"), rows, notes)


def _nbytes(tree: Sharded) -> int:
    return sum(x.numel() * x.dtype.itemsize for own in (tree.entries, tree.held_entries) for x in own.values())


_FIELDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "params": (object, "params of a step, such as state.params"),
    "grads": (object, "grads of a step or None"),
    "moments": (object, "moments of a step"),
    "extra": (Mapping, "a dict, such as {**state.extra, name: value}"),
    "step": (int, "a number of applied updates"),
    "seed": (int, "an int"),
    "signature": (Signature, "that of a step"),
}


def _flatten(state: TrainState) -> tuple[tuple[object, ...], pytree.Unseen]:
    # numbers are no leaves of a state, nor is None, which torch's pytrees would take for one
    held = [state.moments, state.extra]
    like = getattr(state, "_rest", None)
    rest = pytree.Split(held, _is_child, is_leaf=is_sharded, like=like)
    (trees,), rest.leaves = rest.leaves, []
    kept = () if state.grads is None else (state.grads,)
    unseen = pytree.Unseen((state.step, state.seed, state.signature, rest))
    return (state.params, tuple(trees), *kept), unseen


def _is_child(node: object) -> bool:
    return is_sharded(node) or pytree.is_tensor(node)


def _unflatten(unseen: pytree.Unseen, children: tuple[Any, ...]) -> TrainState:
    state = object.__new__(TrainState)
    state._params, trees, *kept = children
    state._grads = kept[0] if kept else None
    state.step, state.seed, state.signature, rest = unseen.value
    state._moments, state._extra = rest.join(trees)
    if not all(map(_is_child, trees)):  # it holds a map's dims, say, and has as many leaves as it had of tensors
        state._rest = rest
    state._dead = state._overwritten = None
    return state


pytree.register(TrainState, _flatten, _unflatten)
