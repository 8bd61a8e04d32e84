"""Masking: what a run of weight 0 adds to gradients, whichever way they go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from fzero.base import private, pytree
from fzero.base.follow import follows, nothing_of
from fzero.base.rebound import rebound
from fzero.comm.linear import passed
from fzero.table.counting import Mask

Back = Callable[[torch.Tensor], torch.Tensor]


def kept(mask: Mask, cotangent: torch.Tensor) -> torch.Tensor:
    """A cotangent, or zeros where a run adds nothing, whatever it is."""
    return nothing_of(cotangent) if mask.masked else cotangent


def is_given(cotangents: Iterable[torch.Tensor]) -> bool:
    """Tells whether cotangents of a run's outputs are not zero, as that of a loss of weight 0 is."""
    with private.below_transforms():
        return any([bool((private.unwrapped(x) != 0).any()) for x in cotangents])


def masked_call(mask: Mask, fn: Callable[..., object], tree: object, inputs: Sequence[object]) -> object:
    """A call of the function, to whose inputs and closure a transform around the run sends what the mask lets through.

    Params have the mask where they are gathered.
    """
    guard = _guard(functools.partial(kept, mask))
    return rebound(fn, guard)(tree, *[pytree.map_leaves(guard, x) for x in inputs])


def noting(mask: Mask, outputs: object) -> object:
    """Outputs whose cotangents the mask is told of, before they are pulled back any further."""

    def back(cotangent: torch.Tensor) -> torch.Tensor:
        mask.given = mask.given | is_given([cotangent])
        return cotangent

    return pytree.map_leaves(_guard(back), outputs)


def _guard(back: Back) -> Callable[[object], object]:
    """Sends the cotangents of what a transform goes on through by a function."""
    return lambda x: passed(back, x) if isinstance(x, torch.Tensor) and follows(x) else x
