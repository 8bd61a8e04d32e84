"""Checks of the functions, rates and optimizers that a public function is given."""

from __future__ import annotations

import torch

from fzero.base import private
from fzero.base.arguments import need_number, wrong
from fzero.table.optimizer import GradientTransformation
from fzero.table.spec import Spec


def is_component(value: object) -> bool:
    """True for what can be called and was not meant to be: a step, a module, a class."""
    return isinstance(value, (Spec, torch.nn.Module, type))


def need_function(fn: object, who: str) -> None:
    """A pure function; neither a module with params of its own nor a step."""
    if isinstance(fn, torch.nn.Module) and any(True for _ in fn.parameters()):
        raise wrong(who, "fn", fn, "a function fn(params, *inputs): apply, params = fz.functional(module) makes one")
    if not callable(fn) or isinstance(fn, Spec):
        raise wrong(who, "fn", fn, "a function fn(params, *inputs)")


def need_rate(lr: object, who: str) -> None:
    """A learning rate: a number, a 0-d tensor, or a schedule."""
    expected = "a number, or a schedule: a function of the number of applied updates"
    if isinstance(lr, torch.Tensor):
        if lr.ndim or not lr.is_floating_point():
            raise wrong(who, "lr", lr, expected)
        if private.is_differentiated(lr):
            raise TypeError(
                f"{who}: got lr=a tensor that is differentiated, expected a number: no gradient flows into an update. "
                "Pass lr.detach()."
            )
    elif not callable(lr):
        need_number(lr, who, "lr", expected)
    elif is_component(lr):
        raise wrong(who, "lr", lr, expected)


def need_optimizer(optimizer: object, who: str, argument: str = "optimizer") -> None:
    if not isinstance(optimizer, GradientTransformation):
        expected = "a GradientTransformation such as fz.adamw(1e-3); torch.optim's optimizers hold state of their own"
        raise wrong(who, argument, optimizer, expected)
    for name in ("init", "update"):
        if not callable(getattr(optimizer, name)):
            raise wrong(who, f"{argument}.{name}", getattr(optimizer, name), "a function")
