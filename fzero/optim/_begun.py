"""What leaves' states begin with, by the init of an optimizer on whole leaves; also in a plan, without their values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fzero.base import pytree
from fzero.base.context import of_one_leaf
from fzero.base.random import Seeds, seeded
from fzero.optim._leaf_states import flat
from fzero.table.layout import Slot
from fzero.table.optimizer import GradientTransformation

Begun = tuple[list[object], pytree.Spec]


@contextlib.contextmanager
def of_leaf(what: str, path: str) -> Iterator[None]:
    """Around a function of an optimizer on whole leaves: what it raises tells what it was given."""
    token = of_one_leaf.set(path)
    try:
        yield
    except Exception as error:
        of_trees = " It is given {path: leaf}: one that takes a step's trees is declared elementwise=True."
        error.add_note(
            f"This was in the {what} of leaf {path!r}, by fz.whole.{of_trees * isinstance(error, AttributeError)}"
        )
        raise
    finally:
        of_one_leaf.reset(token)


@dataclass(frozen=True)
class Beginning:
    """Begins the states of leaves, each by itself.

    In a plan leaves lie on the meta device. An init that asks for their values, as a step of torch.optim.Adafactor
    does, is run on zeros instead, one leaf at a time, and only once: `fz.fits` begins states 80 times.
    """

    optimizer: GradientTransformation

    def of(self, slot: Slot, leaf: torch.Tensor) -> Begun:
        """The entries of a leaf's state, and its structure.

        Raises:
            ValueError: an init on the meta device fails, and so it does of zeros.
        """
        if not leaf.is_meta:
            return self._begun(slot, leaf)
        key = slot.path, leaf.shape, leaf.dtype
        if key not in self._of_zeros:
            try:
                return self._begun(slot, leaf)
            except Exception as error:
                self._of_zeros[key] = self._begun_of_zeros(slot, leaf, error)
        entries, spec = self._of_zeros[key]
        return list(entries), spec

    def _begun(self, slot: Slot, leaf: torch.Tensor) -> Begun:
        with seeded(Seeds(0, slot.leaf).next()), of_leaf("init", slot.path):  # the same on every rank
            return flat(self.optimizer.init({slot.path: leaf}))

    def _begun_of_zeros(self, slot: Slot, leaf: torch.Tensor, without: Exception) -> Begun:
        try:
            entries, spec = self._begun(slot, torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu"))
        except Exception as error:
            name = self.optimizer.label(slot.path) if self.optimizer.label else "an optimizer"
            raise ValueError(
                f"whole: the init of {name} fails for leaf {slot.path!r} without values, as fz.plan calls it "
                f"({without}), and for zeros ({error}). Write an init that needs only shapes and dtypes."
            ) from error
        return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in entries], spec

    @functools.cached_property
    def _of_zeros(self) -> dict[tuple[str, torch.Size, torch.dtype], Begun]:
        return {}
