"""How tensors lie over the axes of a mesh: what a user says of the tensors of a tree, and whether ranks can do it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from fzero.base import pytree
from fzero.base.arguments import wrong
from fzero.base.ragged import Ragged

Dims = tuple[tuple[str, ...], ...]  # for each dim the axes that it lies over, the first of them slowest


class PartitionSpec:
    """Which mesh axes each dim of a tensor lies over, as in JAX: for `in_specs` and `out_specs` of `fz.remote`.

    Pieces are as equal as they can be, the first ones larger by one (`torch.tensor_split`). Ranks of an axis that is
    not named have copies.

    Args:
        *dims: for each dim the name of an axis, a tuple of names, or None if it is whole on every rank. Several axes
            count as one, the first of them slowest. Further dims are whole.

    Raises:
        ValueError: an axis is named twice.

    Example:
        >>> fz.PartitionSpec("dp", "sp")  # [batch, tokens, ...]: examples over dp, each one's tokens over sp
        PartitionSpec('dp', 'sp')
    """

    def __init__(self, *dims: str | Sequence[str] | None) -> None:
        out: list[tuple[str, ...]] = []
        for each in dims:
            names = () if each is None else (each,) if isinstance(each, str) else each
            if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
                raise wrong("PartitionSpec", "a dim", each, "the name of a mesh axis, a tuple of names or None")
            out.append(tuple(names))
        self.dims: Dims = tuple(out)
        axes = axes_of(self.dims)
        if twice := next((name for name in axes if axes.count(name) > 1), None):
            raise ValueError(
                f"PartitionSpec: got axis {twice!r} twice in {self}, expected each at most once: its ranks have one "
                "piece each."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionSpec) and self.dims == other.dims

    def __hash__(self) -> int:
        return hash(self.dims)

    def __repr__(self) -> str:
        dims = [None if not names else names[0] if len(names) == 1 else names for names in self.dims]
        return f"PartitionSpec({', '.join(map(repr, dims))})"


def axes_of(dims: Dims) -> tuple[str, ...]:
    """The axes that cut a tensor, in the order in which its pieces are counted."""
    return tuple([name for names in dims for name in names])


def need_specs(in_specs: object, out_specs: object) -> None:
    """Refuses what cannot be specs before any rank is started."""
    if (in_specs is None) != (out_specs is None):
        raise ValueError(
            f"remote: got in_specs={in_specs} and out_specs={out_specs}, expected both or neither: where inputs are "
            "cut over axes of a mesh, only fn knows how its outputs lie."
        )
    if in_specs is not None and (not isinstance(in_specs, (tuple, PartitionSpec)) or isinstance(in_specs, Ragged)):
        expected = "a tuple with a spec for each input, such as (fz.Ragged(...),), or one fz.PartitionSpec for all"
        raise wrong("remote", "in_specs", in_specs, expected)
    for argument, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        for leaf in pytree.leaves(specs):
            if not isinstance(leaf, PartitionSpec):
                raise wrong("remote", argument, leaf, "fz.PartitionSpec and None in the containers of the tensors")


def need_axes(specs: object, known: Sequence[str], cuts: Container[str], argument: str) -> None:
    """Refuses specs of axes that a rank does not know, or over which nothing can lie in pieces.

    Args:
        known: the axes of the mesh.
        cuts: those that the step takes means over or has its leaves cut over.
    """
    for spec in pytree.leaves(specs):
        for name in axes_of(spec.dims):
            if name not in known:
                raise ValueError(
                    f"fz.remote: {argument} has {spec}, and there is no axis {name!r}, only {list(known)}; expected "
                    "axes of the mesh that build returns as its third value: (step, params, mesh)."
                )
            if name not in cuts:
                raise ValueError(
                    f"fz.remote: {argument} has {spec}, and the step neither takes means over axis {name!r} nor has "
                    "its leaves cut over it: ranks that compute with different pieces there would each go on with "
                    f"params of their own. Shard the step over it, too: fz.shard_zero1, 2 or 3, axis=(..., {name!r})."
                )


def dims_by_leaf(specs: object, tree: object, argument: str, what: str) -> list[Dims]:
    """The dims of every leaf of a tree, None counted, by specs that are a prefix of it."""
    try:
        spread = pytree.spread(specs, tree)
    except ValueError as error:
        raise ValueError(
            f"fz.remote: got {argument}={specs}, which is no prefix of the tree of {what} ({error}); expected its "
            "containers, with one fz.PartitionSpec for each tensor or for all of a container."
        ) from None
    return [spec.dims if isinstance(spec, PartitionSpec) else () for spec in spread]


def need_dims(dims: Dims, shape: Sequence[int], what: str) -> Dims:
    """A tensor's dims, one entry for each; refuses more of them than it has."""
    if len(dims) > len(shape):
        raise ValueError(
            f"{what} has shape {tuple(shape)}, and its spec {PartitionSpec(*dims)} is for {len(dims)} dims; expected "
            f"at most {len(shape)}. Say PartitionSpec() of what each rank has whole."
        )
    return (*dims, *((),) * (len(shape) - len(dims)))
