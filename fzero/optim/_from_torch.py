"""Optimizers of torch's kind as pure transformations: each update is one step of a new one that is given its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named, wrong
from fzero.base.follow import any_follows
from fzero.optim._whole import whole
from fzero.optim.base import Rated, known, rate
from fzero.table.needs import need_rate
from fzero.table.optimizer import GradientTransformation, Number, Schedule

# what steps of torch's classes, and of those that derive from them, note of warnings and checks
_FLAGS = ("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured")
Entries = Mapping[str, object]  # name -> what a torch optimizer keeps of a param


class TorchState(NamedTuple):
    """State of `fz.from_torch` for one leaf: number of applied updates, and what the torch optimizer keeps, by name."""

    count: pytree.Count
    kept: dict[str, object]


def from_torch(
    optimizer: type[torch.optim.Optimizer], lr: Number | Schedule, **options: object
) -> GradientTransformation:
    """Turns an optimizer class of torch into a pure transformation.

    Give the class, such as `torch.optim.NAdam`, and its arguments. It may be one of `torch.optim` or one in that shape.
    It computes as in torch, in float32 or float64. Its state has torch's names, and is sharded, saved and offloaded as
    any other.

    - It gets whole leaves, as with `fz.whole`.
    - A param that the function does not use has a gradient of zeros, so weight decay or momentum may move it. torch
      skips a param whose `grad` is None. Use `fz.freeze(step, pattern)` to keep it.

    Args:
        optimizer: the class. It steps without a closure, treats each leaf by itself, and keeps all that it needs in
            `state[param]` from its first step on: fzero makes it anew for each step of each leaf.
        lr: learning rate, or a schedule: a function of the number of updates applied so far.
        options: other arguments of the class, the same for all leaves. Use `fz.partition` for groups of leaves.

    Raises:
        TypeError: not such a class, or options that it does not take. Also when torch.func differentiates through an
            update: it writes in place and has no derivative.
        ValueError: the optimizer cannot update a leaf, as it needs a closure. In a step, it changes a number or a flag
            in an attribute or a param group, or state of another param. A tensor or a list that it keeps elsewhere,
            and other leaves that it goes by, are not seen.

    Example:
        >>> step = fz.train_step(lambda p: (p["w"] ** 2).sum(), fz.from_torch(torch.optim.RMSprop, 0.1, alpha=0.5))
        >>> state, metrics = step(step.init({"w": torch.ones(2)}))
        >>> fz.gather(state.params)["w"], metrics["lr"]
        (tensor([0.8586, 0.8586]), tensor(0.1000, dtype=torch.float64))
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise wrong("from_torch", "optimizer", optimizer, "a class of torch.optim, such as torch.optim.NAdam")
    need_rate(lr, "from_torch")
    own = _Torch(optimizer, lr, tuple(sorted(options.items())))
    if optimizer.__module__.startswith("torch."):  # others may take leaves of some shapes alone
        own.begun({"a matrix": torch.ones(4, 6, dtype=torch.float64, device="cpu")})
    return whole(GradientTransformation(own.begun, own.update, None, own.label, own.metrics))


@dataclass(frozen=True)
class _Torch(Rated):
    kind: type[torch.optim.Optimizer]
    lr: Number | Schedule
    options: tuple[tuple[str, object], ...]

    def label(self, path: str) -> str:
        return self.kind.__name__.lower()

    def step(
        self, now: float, p: torch.Tensor, g: torch.Tensor, state: Entries | None
    ) -> tuple[torch.Tensor, dict[str, object]]:
        """One step of a new optimizer, and what it keeps then; begun where there is no state."""
        if any_follows((p, g)):
            raise TypeError(
                f"step.update: got {self._name()}, which writes in place and has no derivative, and torch.func "
                "differentiates through this update; expected an optimizer that has one. Use one of fzero (fz.adamw, "
                "fz.sgd, ...), or one of your own that is made of torch's operations."
            )
        with private.below_transforms(), torch.enable_grad():
            param = p.detach().clone().requires_grad_()
            param.grad = g.detach().to(param.dtype, copy=True)
            optimizer = self.kind([param], lr=now, **dict(self.options))  # type: ignore[call-arg]
            if state is not None:
                optimizer.state[param] = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in state.items()}
            before = _numbers(optimizer)
            optimizer.step()
            kept, after = dict(optimizer.state[param]), _numbers(optimizer)
        lost = [name for name, x in after.items() if before.get(name) != x]
        lost += [f"optimizer.state[{named(key)}]" for key in optimizer.state if key is not param]
        if lost:
            raise ValueError(
                f"from_torch: got {self._name()}, which changes {lost[0]} in a step. It is made anew for each step of "
                "each leaf, so it must keep everything in state[param]."
            )
        return param.detach(), kept

    def _name(self) -> str:
        module = self.kind.__module__
        return f"{'torch.optim' if module.startswith('torch.') else module}.{self.kind.__qualname__}"

    def begun(self, params: Mapping[str, torch.Tensor]) -> TorchState:
        """The structure of a leaf's state, with zeros: the first step begins it."""
        ((path, p),) = params.items()
        zeros = torch.zeros_like(p)
        try:
            _, state = self.step(1e-2, zeros, zeros, None)
        except Exception as error:
            raise (TypeError if isinstance(error, TypeError) else ValueError)(
                f"from_torch: got {self._name()} with {dict(self.options)}, which could not update leaf {path!r} by "
                f"step() ({error}); expected one that needs no closure, and options that it takes."
            ) from error
        kept = {name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for name, x in state.items()}
        return TorchState(pytree.Count(0), kept)

    def update(
        self, grads: Mapping[str, torch.Tensor], old: TorchState, params: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], TorchState]:
        ((path, g),), (p,) = grads.items(), params.values()
        now = known(rate(self.lr, old.count.value))
        stepped, kept = self.step(now, p, g, old.kept if old.count.own()(path) else None)
        return {path: stepped - p}, TorchState(old.count.next(), kept)


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The numbers and flags that an optimizer holds besides its state, by where."""
    own = {f"its attribute {k!r}": x for k, x in vars(optimizer).items() if k not in _FLAGS}
    every = {**{f"param_groups[0][{k!r}]": x for k, x in optimizer.param_groups[0].items()}, **own}
    return {k: x for k, x in every.items() if isinstance(x, (int, float))}
