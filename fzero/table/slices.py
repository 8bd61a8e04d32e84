"""How a leaf is cut over a tensor axis: along which dim, into which pieces; what a plan says, and what comes of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fzero.comm.backend import Mesh
from fzero.comm.known import MeshName, mesh_of, name_of_mesh, need_here

AUTO = "auto"
STYLES = ("column", "column_gather", "row", "vocabulary", "whole")
# what Hugging Face's tp_plan calls them
THEIRS = {
    **dict.fromkeys(("colwise",), "column"),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), "column_gather"),
    **dict.fromkeys(("rowwise",), "row"),
    **dict.fromkeys(("embedding_rowwise", "vocabulary"), "vocabulary"),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "sequence_parallel"), "whole"),
}


@dataclass(frozen=True)
class TensorAxis:
    """The value of the tensor axis column, of all leaves: which mesh axis leaves are cut over."""

    mesh: Mesh | None
    axis: str

    def __deepcopy__(self, memo: object) -> TensorAxis:
        return self  # the same ranks

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self.mesh if self.mesh is None else name_of_mesh(self.mesh), self.axis)


def _again(name: MeshName | None, axis: str) -> TensorAxis:
    if name is None:
        return TensorAxis(None, axis)
    need_here("step", name.groups, name.rank, "Make the step anew there, with a mesh of that run.")
    return TensorAxis(mesh_of(name), axis)


@dataclass(frozen=True)
class Cut:
    """What a plan says of a leaf; made by `fz.parallel.cut`.

    Attributes:
        how: a style (column, row, vocabulary, whole, auto), or a dim.
        parts: sizes of what is fused along the dim (query, key and value; gate and up), each of which is cut by itself.
        multiple: the pieces are whole multiples of this many elements: of a head, say.
    """

    how: str | int
    parts: tuple[int, ...] = ()
    multiple: int = 1

    def __str__(self) -> str:
        more = (f", parts={self.parts}" if self.parts else "") + (
            f", multiple={self.multiple}" if self.multiple > 1 else ""
        )
        return f"{self.how!r}{more}"


class Hint(NamedTuple):
    """What a module says of one of its params.

    Attributes:
        kind: of the module that has it: "linear", "transposed" (a weight [in, out]), "embedding", "convolution", "".
        names: all of its names in the module, of a tied one several.
        style: that of the module's own tp_plan, for `auto`; "" where there is none.
        multiple: elements that belong together along the dim that is cut: those of a head, with what shares its keys.
    """

    kind: str
    names: tuple[str, ...]
    style: str = ""
    multiple: int = 1


class Slices(NamedTuple):
    """How one leaf is cut: each rank has its pieces along `dim`, one after the other."""

    dim: int
    parts: tuple[int, ...]  # sizes along the dim, each cut by itself
    multiple: int
    style: str

    def ranges(self, ranks: int) -> list[list[tuple[int, int]]]:
        """Rank -> the (start, size) of its pieces along the dim."""
        out: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for begin, part in zip(itertools.accumulate((0, *self.parts)), self.parts, strict=False):
            count, more = divmod(part // self.multiple, ranks)
            start = begin
            for rank in range(ranks):
                size = (count + (rank < more)) * self.multiple
                out[rank].append((start, size))
                start += size
        return out

    def sizes(self, ranks: int) -> list[int]:
        """Rank -> the size of its slice along the dim."""
        return [sum(size for _, size in own) for own in self.ranges(ranks)]

    def shape(self, shape: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
        """The shape of a rank's slice of a leaf."""
        return (*shape[: self.dim], self.sizes(ranks)[rank], *shape[self.dim + 1 :])


def slices_of(path: str, shape: Sequence[int], said: Cut, source: str, hint: Hint | None) -> Slices | None:
    """How a leaf is cut, by what its plan says; None where every rank has all of it.

    Raises:
        ValueError: the leaf has no such dim, or its parts or multiples do not fit.
    """
    how, parts, multiple = said.how, said.parts, said.multiple
    if how == AUTO:
        if hint is None or not hint.style:
            return None
        if hint.style not in THEIRS:
            raise ValueError(
                f"{source}: the model's tp_plan has {hint.style!r} for leaf {path!r}, which has no counterpart here; "
                f"expected one of {', '.join(map(repr, THEIRS))}. Say a plan for it in place of 'auto'."
            )
        how = THEIRS[hint.style]
    style, dim = (how, _dim_of(how, len(shape), hint)) if isinstance(how, str) else ("", how)
    if dim is None:
        return None
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{source}: leaf {path!r} has shape {tuple(shape)}, and got dim {dim}; expected one of its dims, from "
            f"{-len(shape)} to {len(shape) - 1}."
        )
    dim %= len(shape)
    if hint is not None and multiple == 1 and style in ("column", "row"):
        multiple = hint.multiple if shape[dim] % hint.multiple == 0 else 1
    parts = parts or (shape[dim],)
    if sum(parts) != shape[dim] or any(part % multiple for part in parts):
        raise ValueError(
            f"{source}: leaf {path!r} has {shape[dim]} elements in dim {dim}, and got parts {parts} in multiples of "
            f"{multiple}; expected parts that add up to {shape[dim]}, each of whole multiples."
        )
    return Slices(dim, tuple(parts), multiple, style)


def _dim_of(style: str, ndim: int, hint: Hint | None) -> int | None:
    """The dim that a style cuts: of weights [out, in], or [in, out] where the module's are."""
    last = hint is not None and hint.kind == "transposed"
    if style == "whole" or ndim == 0:
        return None
    if ndim == 1:  # a bias, whose elements belong to outputs
        return None if style == "row" else 0
    if style == "vocabulary":
        return 0
    return int(last) if style in ("column", "column_gather") else int(not last)
