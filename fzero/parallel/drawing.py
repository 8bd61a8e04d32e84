"""Random numbers in a module whose leaves are cut: each rank's own for what varies between ranks, else the same.

What a column gives varies, and so does what is computed from that, until a row or a gather makes it whole. Dropout and
the like of it draw from a stream of this rank. Where a unit begins nothing is known to vary yet, also when it runs
again; what is not known to vary is drawn alike on all ranks.
"""

from __future__ import annotations

import contextvars
import functools
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fzero.base import pytree
from fzero.base.context import during, variable
from fzero.capture.handle import Function, Named, Operands, writes
from fzero.comm.axis import Axis
from fzero.parallel.randomness import own_stream

_DROPS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
    *(F.scaled_dot_product_attention, F.rrelu, F.gumbel_softmax),
    *(torch.bernoulli, torch.rand_like, torch.randn_like, torch.randint_like, torch.normal, torch.multinomial),
    *(torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_),
    *(torch.Tensor.multinomial, torch.Tensor.random_, torch.Tensor.exponential_),
}


def draws(module: nn.Module) -> bool:
    """Tells whether a module drops something, by its dropout layers and by attributes of such a name."""
    for own in module.modules():
        rates = {name: rate for name, rate in vars(own).items() if "drop" in name.lower() and isinstance(rate, float)}
        if own.training and (any(rates.values()) or (isinstance(own, _DROPS) and own.p > 0)):
            return True
    return False


class _Varying(TorchFunctionMode):
    """Inside, what varies is known."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self._axis = axis
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, tensor: torch.Tensor) -> None:
        self._known[id(tensor)] = weakref.ref(tensor)

    def is_over(self, axis: Axis) -> bool:
        return axis.members == self._axis.members

    def varies(self, x: object) -> bool:
        own = self._known.get(id(x))
        return own is not None and own() is x

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        kwargs = kwargs or {}
        if _running.get() is not self:  # a unit's own, inside, sees to it; or a map
            return func(*args, **kwargs)
        if not any(map(self.varies, pytree.flatten((args, kwargs))[0])):
            return func(*args, **kwargs)
        if func in _RANDOM:
            with own_stream(self._axis), during(_running, None):
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        for x in pytree.flatten((out, args[0]) if writes(func, kwargs) else out)[0]:
            if isinstance(x, torch.Tensor):
                self.note(x)
        return out


_running: contextvars.ContextVar[_Varying | None] = variable("varying", None)


def drawing(run: Function, axis: Axis) -> Function:
    """`run`, a function of a module or of one of its units, which draws so."""

    @functools.wraps(run)
    def call(*args: object, **kwargs: object) -> object:
        mode = _Varying(axis)
        with during(_running, mode), mode:
            return run(*args, **kwargs)

    return call


def unseen() -> during[_Varying | None]:
    """Inside, nothing is noted."""
    return during(_running, None)


def varies(out: torch.Tensor) -> torch.Tensor:
    """Notes that a tensor varies."""
    mode = _running.get()
    if mode is not None:
        mode.note(out)
    return out


def mapped(name: str, ax: Axis, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Notes what a map of `fz.parallel` gave."""
    mode = _running.get()
    if mode is not None and (name not in ("sum", "gather") if mode.is_over(ax) and name != "copy" else mode.varies(x)):
        mode.note(out)
    return out
