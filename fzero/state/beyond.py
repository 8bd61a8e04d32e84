"""Beyond: states, params and grads of several components, or of one in other processes, for the public functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from fzero.base import pytree


class Elsewhere:
    """A tensor that lies in another component; what is computed here waits for it."""

    def fetched(self) -> torch.Tensor:
        """The whole tensor, waited for: a new one."""
        raise NotImplementedError


def here(tree: Any) -> Any:
    """The tree with tensors in place of those that lie elsewhere, which are waited for."""
    if not any(isinstance(leaf, Elsewhere) for leaf in pytree.leaves(tree)):
        return tree
    return pytree.map(lambda x: x.fetched() if isinstance(x, Elsewhere) else x, tree)


@runtime_checkable
class Measurable(Protocol):
    """Grads or params whose norm is not that of the trees at hand alone; `fz.global_norm` asks them."""

    def squares_by_leaf(self) -> Sequence[torch.Tensor]:
        """The sum of squares of every leaf, over all shards and places: 0-d float64 tensors."""
        ...


@runtime_checkable
class Distant(Protocol):
    """Params, grads or moments that lie on ranks of a component of their own; `fz.gather` asks."""

    def gathered(self, pattern: str | None) -> Any:
        """The natural tree of full tensors, or by path those of the leaves that match a pattern."""
        ...


@runtime_checkable
class Savable(Protocol):
    """A state that writes its own checkpoint; `fz.save` asks it."""

    def save_to(self, path: str, extra: object) -> None:
        """Writes a checkpoint, which is whole and on the disk at the end."""
        ...


@runtime_checkable
class Loadable(Protocol):
    """A component that reads its own checkpoint; `fz.load` asks it."""

    def load_from(self, path: str, options: Mapping[str, Any]) -> Any:
        """The state of a checkpoint."""
        ...
