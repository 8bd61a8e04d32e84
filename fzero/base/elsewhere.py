"""What lies on ranks of its own does itself what verbs ask of states, grads and components: they look here first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Elsewhere:
    """A value, or a component, that does not lie in this process as a step's does."""

    def saved(self, path: str, extra: object) -> None:
        """A state: written as fz.save does."""
        raise TypeError(f"fz.save: got {self!r}, expected a state.")

    def gathered(self) -> Any:
        """Params, grads or moments: the natural tree of full tensors."""
        raise TypeError(f"fz.gather: got {self!r}, expected state.params, grads or state.moments.")

    def norm_with(self, trees: Sequence[object]) -> Any:
        """Grads, of which this is the first of `trees` that lies elsewhere: the norm of all of them."""
        raise TypeError(f"fz.global_norm: got {self!r}, expected grads.")

    def loaded(self, path: str, **options: object) -> Any:
        """A component: the state that fz.load gives."""
        raise TypeError(f"fz.load: got {self!r}, expected a step or a component.")
