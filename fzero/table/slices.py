"""How a leaf is cut over a tensor axis: along which dim, into which pieces; what a plan says, and what comes of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from fzero.base.arguments import need_int, wrong
from fzero.comm.backend import Mesh
from fzero.comm.known import MeshName, mesh_of, name_of_mesh, need_here

AUTO = "auto"
STYLES = ("column", "column_gather", "row", "vocabulary", "whole", "copied", "experts")
# what Hugging Face's tp_plan calls them
THEIRS = {
    **dict.fromkeys(("colwise", "packed_colwise", "embedding_colwise"), "column"),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), "column_gather"),
    **dict.fromkeys(("rowwise", "packed_rowwise", "rowwise_split_input"), "row"),
    "embedding_rowwise": "vocabulary",
    "replicate": "whole",
    "replicated_with_grad_allreduce": "copied",
    "moe_tp_experts": "experts",
}


class OverMesh:
    """A value of a column that goes over a mesh: a copy is of the same ranks, and a pickle knows them by names."""

    mesh: Mesh | None

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return _unpickled, (type(self), own | {"mesh": self.mesh if self.mesh is None else name_of_mesh(self.mesh)})


def _unpickled(kind: type[OverMesh], own: dict[str, Any]) -> OverMesh:
    """A value over the mesh of this process that it was over; the default process group is any run's."""
    name: MeshName | None = own["mesh"]
    if name is not None:
        instead = "Make the step anew there, with a mesh of that run; one without mesh= is pickled for any run."
        need_here("step", name.groups, name.rank, instead)
    return kind(**own | {"mesh": name if name is None else mesh_of(name)})


@dataclass(frozen=True)
class TensorAxis(OverMesh):
    """The value of the tensor axis column, of all leaves: which mesh axis leaves are cut over."""

    mesh: Mesh | None
    axis: str
    sequence: bool = False  # modules keep pieces of the tokens where nothing is cut

    def of_state(self) -> TensorAxis:
        """What it says of a state, whichever the ranks are."""
        return TensorAxis(None, self.axis)


@dataclass(frozen=True)
class Cut:
    """What a plan says of a leaf; made by `fz.parallel.cut`."""

    how: str | int  # a style, or a dim
    # sizes of what is fused along the dim (query, key and value; gate and up), each of which is cut by itself
    parts: tuple[int, ...] = ()
    multiple: int = 1  # the pieces are whole multiples of this many elements: of a head, say

    def __str__(self) -> str:
        more = (f", parts={self.parts}" if self.parts else "") + (
            f", multiple={self.multiple}" if self.multiple > 1 else ""
        )
        return f"{self.how!r}{more}"


def cut(how: str | int, parts: Sequence[int] = (), multiple: int = 1) -> Cut:
    """Says how `fz.shard_tensor` cuts a leaf, if a style alone does not say it: fused weights, heads.

    Args:
        how: a style ("column", "column_gather", "row", "vocabulary", "whole"), or a dim.
        parts: sizes along the dim of what is fused into one leaf, such as query, key and value. Each part is cut by
            itself, and a rank has its pieces of all parts, one after the other.
        multiple: every piece is a multiple of this many elements along the dim, so that no head is cut in two.

    Returns:
        A value for a plan of `fz.shard_tensor`.

    Raises:
        TypeError, ValueError: not a style, a dim or sizes.

    Example:
        >>> plan = {"qkv": fz.parallel.cut(0, parts=(64, 16, 16), multiple=8)}
        >>> step = fz.shard_tensor(fz.train_step(lambda p, x: x, fz.sgd(0.1)), plan)
        >>> step.rows([("qkv", (96, 64), torch.float32)])[0].slices.sizes(4)
        [32, 32, 16, 16]
    """
    if isinstance(how, str) and how not in (*STYLES, AUTO):
        raise ValueError(f"parallel.cut: got how={how!r}, expected one of {', '.join(map(repr, STYLES))}, or a dim.")
    if not isinstance(how, str):
        how = need_int(how, "parallel.cut", "how", "a style or a dim")
    if not isinstance(parts, (tuple, list)):
        raise wrong("parallel.cut", "parts", parts, "sizes of parts along the dim")
    sizes = [need_int(part, "parallel.cut", "parts", "sizes of parts along the dim", least=0) for part in parts]
    return Cut(how, tuple(sizes), need_int(multiple, "parallel.cut", "multiple", "a number of elements", least=1))


class Use(NamedTuple):
    """One name of a module's param, and what the module there does with it."""

    name: str  # in the whole module; a tied param has several
    # of the module that has it: "linear", "transposed" (a weight [in, out]), "embedding", "convolution", or ""
    kind: str
    style: str = ""  # that of the module's own tp_plan, for `auto`; "" where there is none
    owner: str = ""  # the same of the module that has the param
    # elements that belong together along the dim that is cut: those of a head, with what shares its keys
    multiple: int = 1
    fine: int = 1  # of how many there must be multiples where there are fewer of the others than ranks
    loose: bool = False  # whether no module that is called has it within the unit up to the name's first integer


Hint = tuple[Use, ...]  # what a module says of one of its params


class Slices(NamedTuple):
    """How one leaf is cut: each rank has its pieces along `dim`, one after the other."""

    dim: int
    parts: tuple[int, ...]  # sizes along the dim, each cut by itself
    multiple: int = 1
    fine: int = 1  # the multiple where there are fewer of the others than ranks

    def ranges(self, ranks: int) -> list[list[tuple[int, int]]]:
        """Rank -> the (start, size) of its pieces along the dim."""
        out: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for begin, part in zip(itertools.accumulate((0, *self.parts)), self.parts, strict=False):
            unit = self.multiple if part // self.multiple >= ranks else self.fine
            count, more = divmod(part // unit, ranks)
            start = begin
            for rank in range(ranks):
                size = (count + (rank < more)) * unit
                out[rank].append((start, size))
                start += size
        return out

    def sizes(self, ranks: int) -> list[int]:
        """Rank -> the size of its slice along the dim."""
        return [sum(size for _, size in own) for own in self.ranges(ranks)]

    def shape(self, shape: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
        """The shape of a rank's slice of a leaf."""
        return (*shape[: self.dim], self.sizes(ranks)[rank], *shape[self.dim + 1 :])


class Said(NamedTuple):
    """What a plan says of one name of a leaf, and which rule does."""

    cut: Cut
    source: str
    experts: bool = False


Styles = tuple[tuple[str, str], ...]  # name of a leaf -> what the module there does with it


def slices_of(
    path: str, shape: Sequence[int], said: Mapping[str, Said], uses: Sequence[Use]
) -> tuple[Slices | None, Styles]:
    """How a leaf is cut, None where every rank has all of it; and the style of each of its names."""
    found: dict[str, tuple[str, Slices | None, str]] = {}
    for use in uses:
        if (own := said.get(use.name)) is not None and (style := _style_of(path, use, own)) is not None:
            found[use.name] = (style, _cut(path, shape, use, own, style), own.source)
    if not found:
        return None, ()
    (_, slices, source), *others = found.values()
    for _, other, by in others:
        if other != slices:
            raise ValueError(
                f"leaf {path!r} is tied, and got two cuts, {_in_words(slices)} by {source} and {_in_words(other)} by "
                f"{by}; expected one for all of its names."
            )
    styles = {name: style for name, (style, _, _) in found.items()}
    for use in uses:  # a dim is said of it, or it is tied to one that is cut
        if slices is not None and not styles.get(use.name):
            styles[use.name] = style_of_dim(use.kind, slices.dim, len(shape), tied=use.name not in styles)
    owners = [use.owner for use in uses if use.name in said and said[use.name].cut.how == AUTO]
    if any(own.experts for own in said.values()) or any(THEIRS.get(owner) == "experts" for owner in owners):
        styles = dict.fromkeys(styles, "experts")
    return slices, tuple(sorted(styles.items()))


def _in_words(slices: Slices | None) -> str:
    return "whole" if slices is None else f"dim {slices.dim} in parts {slices.parts}"


def _style_of(path: str, use: Use, said: Said) -> str | None:
    """The style of one name, "" where a dim is said, and None where nothing is."""
    how = said.cut.how
    if how != AUTO:
        return how if isinstance(how, str) else ""
    if use.style and use.style not in THEIRS:
        raise ValueError(
            f"{said.source}: the model's tp_plan has {use.style!r} for leaf {path!r}, which has no counterpart here; "
            f"expected one of {', '.join(map(repr, THEIRS))}. Say a plan for it beside 'auto': "
            f"{{'*': 'auto', {path!r}: 'whole'}}."
        )
    return THEIRS.get(use.style)


def _cut(path: str, shape: Sequence[int], use: Use, said: Said, style: str) -> Slices | None:
    parts, multiple, fine = said.cut.parts, said.cut.multiple, said.cut.multiple
    dim = _dim_of(style, len(shape), use.kind) if style else said.cut.how
    if dim is None:
        return None
    assert isinstance(dim, int)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{said.source}: leaf {path!r} has shape {tuple(shape)}, and got dim {dim}; expected one of its dims, from "
            f"{-len(shape)} to {len(shape) - 1}."
        )
    dim %= len(shape)
    if use.multiple > 1 and multiple == 1 and shape[dim] % use.multiple == 0 and not parts:
        multiple, fine = use.multiple, use.fine
    packed = said.cut.how == AUTO and use.style.startswith("packed")
    parts = parts or ((shape[dim] // 2,) * 2 if packed else (shape[dim],))
    if sum(parts) != shape[dim] or any(part % multiple for part in parts):
        raise ValueError(
            f"{said.source}: leaf {path!r} has {shape[dim]} elements in dim {dim}, and got parts {parts} in multiples "
            f"of {multiple}; expected parts that add up to {shape[dim]}, each of whole multiples."
        )
    return Slices(dim, tuple(parts), multiple, fine)


def _dim_of(style: str, ndim: int, kind: str) -> int | None:
    """The dim that a style cuts: of weights [out, in], of several [..., out, in], or [in, out] where theirs are."""
    if style in ("whole", "copied", "experts") or ndim == 0:
        return None
    if ndim == 1:  # a bias, whose elements belong to outputs
        return None if style == "row" else 0
    if style == "vocabulary":
        return 0
    outputs, inputs = (1, 0) if kind in ("transposed", "embedding") else (0, 1)
    if kind == "" and ndim > 2:
        outputs, inputs = ndim - 2, ndim - 1
    return outputs if style in ("column", "column_gather") else inputs


def style_of_dim(kind: str, dim: int, ndim: int, tied: bool) -> str:
    """What a module does with a leaf that is cut along a dim.

    Args:
        tied: the plan names it elsewhere.
    """
    if kind == "embedding" and dim == 0:
        return "vocabulary"
    if dim == _dim_of("row", ndim, kind) and ndim > 1:
        return "row"
    return "column_gather" if tied or kind == "embedding" else "column"
