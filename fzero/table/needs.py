"""Checks of the functions, rates and optimizers that a public function is given."""

from __future__ import annotations

import torch

from fzero.base import private
from fzero.base.arguments import need_number, wrong
from fzero.base.context import in_differentiated, jitting
from fzero.base.rebound import is_others
from fzero.table.optimizer import GradientTransformation
from fzero.table.spec import Spec

_OF_UPDATE = ("fused", "paused", "combine")  # what a step runs of fzero's own for an update


def is_component(value: object) -> bool:
    """True for what can be called and was not meant to be: a step, a module, a class."""
    return isinstance(value, (Spec, torch.nn.Module, type))


def need_function(fn: object, who: str) -> None:
    """A pure function; neither a module with params of its own nor a step."""
    if isinstance(fn, torch.nn.Module) and any(True for _ in fn.parameters()):
        raise wrong(who, "fn", fn, "a function fn(params, *inputs): apply, params = fz.functional(module) makes one")
    if not callable(fn) or isinstance(fn, Spec):
        raise wrong(who, "fn", fn, "a function fn(params, *inputs)")


def need_rate(lr: object, who: str, least: float = 0.0) -> None:
    """A learning rate: a number, a 0-d tensor, or a schedule."""
    expected = "a number, a 0-d floating tensor, or a schedule: a function of the number of applied updates"
    if is_component(lr):
        raise wrong(who, "lr", lr, expected)
    if isinstance(lr, torch.Tensor) or not callable(lr):
        need_scalar(lr, who, "lr", expected)
        refused = [x for x in numbers_in(lr) if not x >= least]
        if refused:
            raise ValueError(f"{who}: got lr={refused[0]}, expected a number of at least 0.")


def need_scalar(value: object, who: str, argument: str, expected: str = "a number or a 0-d floating tensor") -> None:
    """A number, or a 0-d tensor, which a transform may go on through, but not plain autograd."""
    if not isinstance(value, torch.Tensor):
        need_number(value, who, argument, expected)
        return
    if value.ndim or not value.is_floating_point():
        raise wrong(who, argument, value, expected)
    if value.requires_grad and not private.transforms() and not in_differentiated():
        raise TypeError(
            f"{who}: got {argument}=a tensor that plain autograd differentiates, expected one that it does not: no "
            "gradient of loss.backward() flows into an update. Differentiate the whole by torch.func.grad, or pass "
            f"{argument}.detach()."
        )


def numbers_in(value: object) -> list[float]:
    """The numbers that a number or a 0-d tensor is, several where it is mapped over."""
    if not isinstance(value, torch.Tensor):
        return [value]  # type: ignore[list-item] - checked before
    if jitting.get() is not None:
        return []
    with private.below_transforms():
        return private.unwrapped(value).detach().double().view(-1).tolist()


def need_optimizer(optimizer: object, who: str, argument: str = "optimizer") -> None:
    if isinstance(optimizer, (list, dict)) or type(optimizer) is tuple:
        expected = (
            "one GradientTransformation: fz.chain(a, b) applies several one after the other, "
            "fz.partition({pattern: a, '*': b}) gives each leaf its own"
        )
        raise wrong(who, argument, optimizer, expected)
    if not isinstance(optimizer, GradientTransformation):
        expected = (
            "a GradientTransformation such as fz.adamw(1e-3); optimizers of torch's kind hold state of their own, and "
            "are given by their class: fz.from_torch(torch.optim.NAdam, 1e-3)"
        )
        raise wrong(who, argument, optimizer, expected)
    for name in ("init", "update"):
        if not callable(getattr(optimizer, name)):
            raise wrong(who, f"{argument}.{name}", getattr(optimizer, name), "a function")
    own = getattr(optimizer.update, "__self__", None)
    for name in () if is_others(optimizer.update) else _OF_UPDATE:
        fn = getattr(optimizer, name)
        if fn is not None and getattr(fn, "__self__", None) is not own:
            raise ValueError(
                f"{who}: got {argument}={optimizer.label('w') if optimizer.label else 'one'} with another update than "
                f"its own, which {argument}.{name} would run in its place. Expected both of one: say "
                "fz.GradientTransformation(init, update), with what is taken over of the other."
            )
