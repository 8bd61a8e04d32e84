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
from fzero.base.display import counted
from fzero.state.placing import placed
from fzero.state.scatter import scattered
from fzero.state.sharded import Sharded, is_sharded, map_trees, trees_of
from fzero.table.layout import Layout
from fzero.table.spec import Signature

_taking = threading.Lock()
being_saved: weakref.WeakSet[object] = weakref.WeakSet()  # snapshots, which hold buffers until they are written


class TrainState:
    """What a step takes and returns: params, moments and more, as this rank's flat buffers. `step.init` makes it.

    It is immutable: `replace` gives a new one. It is also a pytree of tensors for optree and torch. With `fz.donate`, a
    state that was passed to a step is dead, and says which update took it.

    Attributes:
        params: a `Sharded`. `state.params["blocks.0.attn.weight"]` is this rank's slice of a leaf.
        grads: the grads that `step.add_grads` has kept, a `Sharded`, or None.
        moments: the optimizer's state. Its trees are `Sharded`.
        extra: what transforms keep, by name: `state.extra["loss_scale"]`, `state.extra["ema"]`.
        step: the number of applied updates. Skipped ones do not count.
        seed: seeds everything random in this run.
        layout: which leaf lies where in which buffer, a `Layout`.
        signature: what a step must share to take this state.
    """

    __slots__ = (
        "_dead",
        "_extra",
        "_grads",
        "_made_by",
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

    def __getstate__(self) -> object:
        """What is pickled, and copied: all but the step that has made it."""
        own = [name for name in self.__slots__ if name != "_made_by" and hasattr(self, name)]
        return None, {name: getattr(self, name) for name in own}

    def made_by(self, step: object) -> TrainState:
        """The same, which needs no check that it is of this step."""
        self._made_by = weakref.ref(step)  # which may hold a model
        return self

    def is_made_by(self, step: object) -> bool:
        made_by = getattr(self, "_made_by", None)
        return made_by is not None and made_by() is step

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
            params: a sharded tree, whose buffers are shared and not copied. Or full leaves, equal on all ranks, as
                `fz.gather` returns them. Frozen leaves may be left out. Leaves that a sharded tree lacks stay as they
                are: an `fz.ema` has the trained ones only.
            grads: the same for kept grads. None drops them.
            moments: the same for the optimizer's state, with its counts.
            extra: all entries, each sharded or full: `{**state.extra, name: value}`.
            step: a number of applied updates. The optimizer has its own counts, in `moments`.
            seed: another seed.
            signature: the signature of another state.

        Returns:
            The new state.

        Raises:
            TypeError: there is no such field, or it takes something else.
            ValueError: a tree does not fit, with the leaf's path; or an entry of `extra` is missing.

        Example:
            >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
            >>> state = step.init({"w": torch.ones(2)})
            >>> state.replace(params={"w": torch.zeros(2)}).params["w"]
            tensor([0., 0.])
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
        """`replace` without checks, for values that fit."""
        return TrainState(**{name: getattr(self, name) for name in _FIELDS} | changes)

    def fitting(self, who: str, name: str, tree: object) -> object:
        """A tree for a field: full leaves become slices, where the state's slices lie."""
        like = getattr(self, name)
        if name == "grads":
            like = like or grads_like(self.params)
            own = scattered(who, name, tree, like, drops_frozen=True)
            assert is_sharded(own)
            return placed(own, "grads")
        return scattered(who, name, tree, like, self.params.axis)

    def _entry(self, name: str, value: object) -> object:
        old = self.extra[name]
        nodes = pytree.flatten(old, is_leaf=is_sharded)[0]
        own = any(map(pytree.is_tensor, nodes)) and not any(map(is_sharded, nodes))  # each rank's, as a carry is
        if value is old or own:
            return value
        return scattered("TrainState.replace", f"extra[{name!r}]", value, old, self.params.axis)

    @contextlib.contextmanager
    def donated(self) -> Iterator[TrainState]:
        """A context for an update that may overwrite this state: inside, only the state that it yields can be used.

        Afterwards this state is dead, unless the update failed before it wrote anything. Trees that were taken of it
        before can still be read while the update overwrites them: do not.
        """
        number = self.step + 1
        own = object.__new__(TrainState)
        with _taking:  # one of two threads
            own._params, own._grads, own._moments, own._extra = self.params, self._grads, self._moments, self._extra
            own.step, own.seed, own.signature = self.step, self.seed, self.signature
            own._dead = own._overwritten = None
            self._dead = (
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
            self._dead = why  # at no time none, or another thread would be given the state, too
            if why:
                self.kill(why)

    def overwritten(self, why: str) -> None:
        """Notes that an update has begun to overwrite this state. If it fails, the state stays dead."""
        self._overwritten = why

    def kill(self, why: str) -> None:
        """Marks the state and its trees as taken. Later uses raise an error with the text `why`."""
        for tree in trees_of((self._params, self._grads, self._moments, self._extra)):
            tree.kill(why)
        self._params = self._grads = self._moments = self._extra = None  # type: ignore[assignment]
        self._dead = why

    def __repr__(self) -> str:
        if self._dead:
            return f"TrainState(dead: {self._dead})"
        return f"TrainState(step={self.step}, {counted(len(self.layout.rows), 'leaf')}, {self.params.axis})"


def grads_like(params: Sharded) -> Sharded:
    """Zero grads of these params, without memory."""
    layout, zero = params.layout, torch.zeros((), device=params.device)
    dtypes = {key: layout.groups[key].row.policy.reduce for key in layout.trainable}
    return params.with_buffers({key: zero.to(own).expand(layout.shard_numel(key)) for key, own in dtypes.items()}, 1.0)


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
