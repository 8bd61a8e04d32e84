"""Optimizers of torch's kind as pure transformations: each update is one step of a new one that is given its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import private, pytree
from fzero.base.arguments import wrong
from fzero.base.follow import any_follows
from fzero.optim._whole import whole
from fzero.optim.base import known, rate, zeros_of
from fzero.state.sharded import Sharded
from fzero.table.layout import Key
from fzero.table.needs import need_rate
from fzero.table.optimizer import GradientTransformation, Number, Schedule

Entries = Mapping[str, object]  # name -> what a torch optimizer keeps of a param


class TorchState(NamedTuple):
    """Applied updates; what the optimizer keeps of each element, and its other tensors and numbers, by their names."""

    count: pytree.Count
    trees: dict[str, object]
    others: dict[str, object]


def from_torch(
    optimizer: type[torch.optim.Optimizer], lr: Number | Schedule, **options: object
) -> GradientTransformation:
    """An optimizer of torch.optim, or one in its shape, as a pure transformation: `torch.optim.NAdam`, by its class.

    One that treats elements alone updates slices as they lie. Any other is given whole leaves (`fz.whole`), as is found
    out by a try on a few numbers. It has torch's bits in float32 and float64; states in other dtypes are decoded for
    it. Its state is saved, sharded and placed as that of any other; its names are torch's.

    Args:
        optimizer: the class. It works by `step()` without a closure, and keeps all that it needs in `state[param]`.
        lr: learning rate, or a schedule of the number of applied updates.
        options: its other arguments, for all leaves alike; `fz.partition` has others for some.

    Raises:
        TypeError: no such class, options that it does not take; or torch.func goes through an update: what is written
            in place has no derivative.
        ValueError: it cannot update a tensor by itself.

    Example:
        >>> step = fz.train_step(lambda p: (p["w"] ** 2).sum(), fz.from_torch(torch.optim.RMSprop, 0.1, alpha=0.5))
        >>> state, metrics = step(step.init({"w": torch.ones(2)}))
        >>> fz.gather(state.params)["w"], metrics["lr"]
        (tensor([0.8586, 0.8586]), tensor(0.1000, dtype=torch.float64))
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise wrong("from_torch", "optimizer", optimizer, "a class of torch.optim, such as torch.optim.NAdam")
    need_rate(lr, "from_torch")
    own = _Torch(optimizer, lr, tuple(options.items()))
    with private.below_transforms():
        kept = own.tried()
    if kept is None:
        return whole(GradientTransformation(own.begun, own.of_leaf, None, own.label, own.metrics))
    own = dataclasses.replace(own, names=kept[0], others=kept[1])
    return GradientTransformation(own.init, own.update, None, own.label, own.metrics, blank=True)


@dataclass(frozen=True)
class _Torch:
    kind: type[torch.optim.Optimizer]
    lr: Number | Schedule
    options: tuple[tuple[str, object], ...]
    names: tuple[str, ...] = ()  # of what it keeps of each element
    others: tuple[tuple[str, object], ...] = ()  # what else it keeps: a dtype for a 0-d tensor, or a number

    def label(self, path: str) -> str:
        return self.kind.__name__.lower()

    def metrics(self, old: TorchState) -> dict[str, Number]:
        return {"lr": rate(self.lr, old.count.value)}

    def step(
        self, now: float, p: torch.Tensor, g: torch.Tensor, state: Entries | None
    ) -> tuple[torch.Tensor, dict[str, object]]:
        """One step of a new optimizer, and what it keeps then; begun where there is no state."""
        if any_follows((p, g)):
            raise TypeError(
                f"step.update: got torch.optim.{self.kind.__name__}, which writes in place and has no derivative, and "
                "torch.func goes through this update; expected an optimizer of fzero (fz.adamw, fz.sgd, ...), or one "
                "of your own that computes updates by torch's operations."
            )
        with private.below_transforms(), torch.enable_grad():
            param = p.detach().clone().requires_grad_()
            param.grad = g.detach().clone()
            optimizer = self.kind([param], lr=now, **dict(self.options))  # type: ignore[call-arg]
            if state is not None:
                optimizer.state[param] = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in state.items()}
            optimizer.step()
        return param.detach(), dict(optimizer.state[param])

    def tried(self) -> tuple[tuple[str, ...], tuple[tuple[str, object], ...]] | None:
        """What it keeps of each element and otherwise; None where it does not treat elements alone.

        Raises:
            TypeError, ValueError: it cannot be made, or cannot step by itself.
        """
        made = torch.Generator(device="cpu").manual_seed(0)
        p, *grads = torch.randn(3, 4, 6, generator=made, dtype=torch.float64, device="cpu").unbind()
        try:
            together, state = self._through(p, grads)
        except Exception as error:
            raise (TypeError if isinstance(error, TypeError) else ValueError)(
                f"from_torch: got torch.optim.{self.kind.__name__} with {dict(self.options)}, which could not update a "
                f"matrix by step() ({error}); expected one that needs no closure, and options that it takes."
            ) from error
        try:
            apart = torch.stack([self._through(own, [g[i] for g in grads])[0] for i, own in enumerate(p)])
        except (TypeError, ValueError, RuntimeError):  # as it takes matrices only
            return None
        names = tuple([name for name, x in state.items() if isinstance(x, torch.Tensor) and x.shape == p.shape])
        others = {name: x for name, x in state.items() if name not in names}
        if not torch.allclose(together, apart, rtol=1e-12, atol=1e-14) or not all(map(_is_number, others.values())):
            return None
        return names, tuple([(n, x.dtype if isinstance(x, torch.Tensor) else x) for n, x in others.items()])

    def _through(self, p: torch.Tensor, grads: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, object]]:
        state: dict[str, object] | None = None
        for g in grads:
            p, state = self.step(1e-2, p, g, state)
        return p, state or {}

    # ---- whole leaves

    def begun(self, params: Mapping[str, torch.Tensor]) -> TorchState:
        """The structure of a leaf's state, with zeros: the first step begins it."""
        ((path, p),) = params.items()
        zeros = torch.zeros_like(p)
        try:
            _, state = self.step(1e-2, zeros, zeros, None)
        except Exception as error:
            error.add_note(f"This was of leaf {path!r}, by fz.from_torch(torch.optim.{self.kind.__name__}, ...).")
            raise
        kept = {name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for name, x in state.items()}
        return TorchState(pytree.Count(0), {}, kept)

    def of_leaf(
        self, grads: Mapping[str, torch.Tensor], old: TorchState, params: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], TorchState]:
        ((path, g),), (p,) = grads.items(), params.values()
        now, count = known(rate(self.lr, old.count.value)), old.count.value
        stepped, state = self.step(now, p, g, old.others if count else None)
        return {path: stepped - p}, TorchState(pytree.Count(count + 1), {}, state)

    # ---- elements alone

    def init(self, params: object) -> TorchState:
        others = {
            n: torch.zeros((), dtype=x, device="cpu") if isinstance(x, torch.dtype) else x for n, x in self.others
        }
        return TorchState(pytree.Count(0), {name: zeros_of(params) for name in self.names}, others)

    def update(self, grads: object, old: TorchState, params: object) -> tuple[object, TorchState]:
        now = known(rate(self.lr, old.count.value))
        new = pytree.Count(old.count.value + 1)
        if isinstance(grads, Sharded) and isinstance(params, Sharded):
            keys = list(grads.groups)
            leaves = [(params.local(key), grads.local(key)) for key in keys]
            trees = {n: [t.local(key) for key in keys] for n, t in old.trees.items() if isinstance(t, Sharded)}
        else:
            keys, leaves = [], list(zip(*map(pytree.leaves, (params, grads)), strict=True))
            trees = {name: pytree.leaves(tree) for name, tree in old.trees.items()}
        updates, found, others = list[torch.Tensor](), {name: list[torch.Tensor]() for name in self.names}, old.others
        for place, (p, g) in enumerate(leaves):
            own = {name: each[place] for name, each in trees.items()}
            stepped, state = self.step(now, p, g, {**old.others, **own} if old.count.value else None)
            updates.append(stepped - p)
            for name in self.names:
                x = state.pop(name)
                assert isinstance(x, torch.Tensor)
                found[name].append(x)
            others = state  # which is the same of all
        made = {name: self._like(grads, keys, each) for name, each in found.items()}
        return self._like(grads, keys, updates), TorchState(new, made, others)

    @staticmethod
    def _like(grads: object, keys: list[Key], leaves: list[torch.Tensor]) -> object:
        if isinstance(grads, Sharded):
            return grads.with_buffers(dict(zip(keys, leaves, strict=True)))
        return pytree.unflatten(pytree.flatten(grads)[1], leaves)


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, torch.Tensor) and not x.ndim)
