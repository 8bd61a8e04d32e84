"""One module whose leaves are cut over a tensor axis: its forward with the maps between ranks that these need."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fzero.base import private
from fzero.base.context import during, variable
from fzero.comm.axis import Axis
from fzero.engine.compiled import leave_out
from fzero.modules.hints import kind_of
from fzero.modules.places import Absent, full
from fzero.parallel import maps, piece
from fzero.parallel.piece import Piece, whole
from fzero.parallel.types import running_mode
from fzero.parallel.varying import unseen
from fzero.parallel.watched import mark_of, need_level, note, taken
from fzero.state.sliced import in_order
from fzero.table.handle import Function, Handle, Named, Operands
from fzero.table.placements import Cut, Mark
from fzero.table.slices import Slices

Forward = Callable[..., object]
_given: contextvars.ContextVar[Mark | None] = variable("given", None)  # how the input of what runs varies
# the last tensor that a module made each rank's own, which others read too: (it, its version and levels, its copy)
_last: contextvars.ContextVar[list[tuple[torch.Tensor, tuple[int, bool, int], torch.Tensor]]] = variable(
    "last_copied", []
)


class CutLeaf(NamedTuple):
    """A leaf of a module under one of its names: how it is cut, what the module does with it, and its whole shape."""

    name: str
    style: str
    slices: Slices | None
    shape: tuple[int, ...]


class _Apart(Absent):
    """A leaf that is cut, where a conversion takes the place of its module's forward.

    Attributes:
        rows: `F.embedding` of an embedding that calls it in a forward of its own.
    """

    axis: str
    rows: Forward | None

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if func is F.embedding and isinstance(leaf := args[1], _Apart) and leaf.rows is not None:
            return leaf.rows(args[0], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def refusal(self, func: object) -> RuntimeError:
        return RuntimeError(
            f"Leaf {self.path!r} of a module is cut over axis {self.axis!r} by fz.shard_tensor, and is read other than "
            "by torch's own forward of its module, where nothing is known of how ranks exchange values. Let the plan "
            "leave it whole, or call its module."
        )


def fresh(run: Forward) -> Forward:
    """`run`, which knows of no tensor that was copied before it."""

    def call(*args: object, **kwargs: object) -> object:
        with during(_last, []):
            return run(*args, **kwargs)

    return call


class Converted:
    """One module whose leaves are cut.

    Attributes:
        leaves: name -> this rank's slice, while a function of the module runs; empty where the module has them itself.
        then: what is done to its results.
    """

    def __init__(
        self, path: str, module: nn.Module, cut: Sequence[CutLeaf], axis: Axis, sequence: bool
    ) -> None:
        self.path, self.module, self.axis, self.sequence = path, module, axis, sequence
        self.before = path + "." if path else ""
        self.cut = {leaf.name.removeprefix(self.before): leaf for leaf in cut}
        self.leaves: dict[str, object] = {}
        self.then: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.heads: tuple[int, ...] | None = None  # elements that every rank has after that
        self.forward = module.forward
        self.run = self._made()

    def _made(self) -> Forward:
        """The forward with its conversions; its own, where there are none."""
        styles = {leaf.style for leaf in self.cut.values()}
        if styles <= {"copied"}:
            return self._copied if styles else self.forward
        if "experts" in styles:
            return self._experts()
        kind, weight = kind_of(self.module), self.cut.get("weight")
        if kind and weight is not None and weight.slices is not None:
            run = (self._embedding if kind == "embedding" else self._linear)(weight.slices, kind)
            rows = self._looked_up if self.calls else None
            for name, leaf in self.cut.items():
                own = self.module._parameters[name]
                assert own is not None
                apart = _Apart.like(own, path=leaf.name, axis=self.axis.name, rows=rows)
                self.leaves[name] = self.module._parameters[name] = apart  # type: ignore[assignment]
            return run
        own = type(self.module)
        known = isinstance(self.module, (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        if known or own.__module__.startswith("torch.nn."):
            other = " with a forward of its own" if known and not kind else ""
            raise self.refused(f"there are no conversions for what a {own.__name__}{other} does with it")
        return self._known  # what it does with slices is its own affair

    @property
    def outputs(self) -> int | None:
        """The dim of outputs that is cut, from the end; None where they are whole."""
        weight = self.cut.get("weight")
        if self.then is not None:
            return -1
        if weight is None or weight.style != "column":
            return None
        return 1 - len(weight.shape) if isinstance(self.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else -1

    @property
    def calls(self) -> bool:
        """Whether its own forward runs, and calls its conversion where it calls `F.embedding`."""
        return isinstance(self.module, nn.Embedding) and type(self.module).forward is not nn.Embedding.forward

    def refused(self, why: str) -> ValueError:
        leaf = next(iter(self.cut.values()))
        return ValueError(
            f"apply: leaf {leaf.name!r} is cut over axis {self.axis.name!r}, and {why}. Let the plan of "
            "fz.shard_tensor leave it whole, or cut it in a pure function that uses the maps of fz.parallel."
        )

    def install(self) -> None:
        """Puts the conversion into the module."""
        if (self.run == self.forward and self.then is None) or self.calls:
            return

        @functools.wraps(self.forward)
        def forward(*args: object, **kwargs: object) -> object:
            return _run(self, args, kwargs)

        self.module.forward = forward

    # ---- the forwards

    def _linear(self, slices: Slices, kind: str) -> Forward:
        """A linear layer, or a convolution, which is one over its channels."""
        module, shape, outputs = self.module, self.cut["weight"].shape, int(kind == "transposed")
        dim = 1 - len(shape)  # of features or channels, from the end
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            if module.groups != 1:
                raise self.refused(f"its convolution has {module.groups} groups")
            if slices.dim > 1:
                raise self.refused(f"dim {slices.dim} of its weight is no channel")
            if not all(slices.sizes(self.axis.size)):
                raise self.refused(f"its {shape[slices.dim]} channels are fewer than the {self.axis.size} ranks")

        alone = self.axis.size > 1 and sum(slices.sizes(self.axis.size)) in slices.sizes(self.axis.size)

        def compute(input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            weight = _value(self.leaves["weight"])
            if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                return module._conv_forward(input, weight, bias)  # type: ignore[arg-type]
            return F.linear(input, weight.t() if outputs else weight, bias)

        def column(input: torch.Tensor) -> torch.Tensor:
            self._need_whole(input, dim, shape[1 - outputs])
            out = compute(self._shared(input), self._bias(slices))
            return out if self.cut["weight"].style == "column" else self._gathered(out, dim, slices)

        def row(input: torch.Tensor) -> torch.Tensor:
            if alone:
                raise self.refused("one rank has all of its inputs, which it could not tell from a slice of them")
            return self._sum(compute(self._piece(whole(input), dim, slices)), -dim)

        run, bias, ranks = column if slices.dim == outputs else row, self.cut.get("bias"), self.axis.size
        if bias is not None:
            as_outputs = run is column and bias.slices is not None and bias.slices.ranges(ranks) == slices.ranges(ranks)
            if not as_outputs:
                raise self.refused("its bias is cut otherwise than its outputs")
        return run

    def _embedding(self, slices: Slices, _: str) -> Forward:
        module, leaf = self.module, self.cut["weight"]
        assert isinstance(module, nn.Embedding)
        for name, value in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(module, name) != value:
                raise self.refused(f"its embedding has {name}={getattr(module, name)}")

        def features(input: torch.Tensor) -> torch.Tensor:
            self._need_no_slices(input)
            out = F.embedding(input, _value(self.leaves["weight"]), module.padding_idx)
            if leaf.style == "column":
                return out
            out = self._gathered(out, -1, slices)
            return piece.cut(out, self.axis) if self.sequence else out

        if slices.dim == 1:
            return features
        if len(slices.parts) > 1:
            raise self.refused(f"its vocabulary is cut in parts {slices.parts}")
        ((start, size),) = slices.ranges(self.axis.size)[self.axis.rank]
        count, padding = leaf.shape[0], module.padding_idx
        own_padding = padding - start if padding is not None and 0 <= padding - start < size else None

        def rows(input: torch.Tensor) -> torch.Tensor:
            self._need_no_slices(input)
            weight = _value(self.leaves["weight"])
            known = (input >= 0) & (input < count)  # what is not is left to F.embedding, which refuses it
            inside = (input >= start) & (input < start + size)
            place = torch.where(inside, input - start, torch.where(known, 0, -1))
            table = weight if size else weight.new_zeros(1, leaf.shape[1])
            out = F.embedding(place, table, own_padding)
            return self._total(out.masked_fill(~inside.unsqueeze(-1), 0.0))

        return rows

    def _looked_up(self, input: torch.Tensor, padding_idx: int | None = None, **options: object) -> object:
        if padding_idx != self.module.padding_idx or options.get("max_norm") or options.get("scale_grad_by_freq"):
            raise self.refused("its own forward calls F.embedding with other options than the module has")
        return _run(self, (input,), {})

    def _known(self, *args: object, **kwargs: object) -> object:
        for name, leaf in self.cut.items():
            own = self.module._parameters.get(name)
            if leaf.slices is not None and own is not None:
                note(own, Mark(leaf.name, self._cut(leaf.slices, leaf.slices.dim - len(leaf.shape))))
        return self.forward(*args, **kwargs)

    def _copied(self, *args: object, **kwargs: object) -> object:
        own = self.module._parameters
        before = {name: own[name] for name in self.cut}
        try:
            for name, leaf in before.items():
                own[name] = maps.shared(_value(leaf), self.axis)  # type: ignore[assignment]
            return self.forward(*args, **kwargs)
        finally:
            own.update(before)

    def _experts(self) -> Forward:
        whole = [name for name, _ in self.module.named_parameters() if name not in self.cut]
        whole += [name for name, leaf in self.cut.items() if leaf.slices is None]
        if whole:
            raise self.refused(f"its leaf {whole[0]!r} is not, which every rank would add to what it gives")

        def forward(*args: object, **kwargs: object) -> object:
            args = tuple([self._own(x) for x in args])
            out = self.forward(*args, **{name: self._own(x) for name, x in kwargs.items()})
            if not isinstance(out, torch.Tensor):
                raise self.refused(f"it returns a {type(out).__name__} in place of a tensor that could be summed")
            return maps.sum(out, self.axis)

        return forward

    def _own(self, x: object) -> object:
        return maps.shared(_value(x), self.axis) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    # ---- their parts

    def _bias(self, slices: Slices) -> torch.Tensor | None:
        """This rank's slice of the bias of outputs."""
        if "bias" in self.cut:
            return _value(self.leaves["bias"])
        bias = self.module.bias
        return None if bias is None else self._slice(_value(bias), 0, slices)

    def _sum(self, out: torch.Tensor, dims: int) -> torch.Tensor:
        """The sum over ranks, and then the bias, which all have; it belongs to the `dims`-th dim from the end."""
        out, bias = self._total(out) if dims == 1 else maps.sum(out, self.axis), self.module.bias
        return out if bias is None else out + _value(bias).view(-1, *[1] * (dims - 1)).to(out.dtype)

    def _total(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of [..., tokens, features], of which each keeps a piece of the tokens in sequences."""
        return piece.scattered(partial, self.axis) if self.sequence else maps.sum(partial, self.axis)

    def _piece(self, x: torch.Tensor, dim: int, slices: Slices) -> torch.Tensor:
        """This rank's piece of what a row takes, which it is already if a column came before."""
        sizes, count, mark = slices.sizes(self.axis.size), x.shape[dim], _given.get()
        if mark is not None and not mark.source:  # each rank's own of what is whole
            start = sum(sizes[: self.axis.rank])
            return _by_rank(x, dim, slices, self.axis.size).narrow(dim, start, sizes[self.axis.rank])
        if mark is not None:
            if count != sizes[self.axis.rank] or mark.cut not in (None, self._cut(slices, dim)):
                raise self._not_a_piece(x, dim, sizes)
            return x
        if count == sizes[self.axis.rank]:
            return x
        if count != sum(sizes):
            raise self._not_a_piece(x, dim, sizes)
        return self._slice(x, dim, slices)

    def _cut(self, slices: Slices, dim: int) -> Cut:
        """How a tensor is cut that is so along a dim, from the end."""
        by_part = zip(*slices.ranges(self.axis.size), strict=True)
        return Cut(dim, tuple([tuple([size for _, size in part]) for part in by_part]), self.axis.rank)

    def _not_a_piece(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> ValueError:
        return ValueError(
            f"apply: module {self.path!r}, whose inputs are cut over axis {self.axis.name!r}, got a tensor of "
            f"shape {tuple(x.shape)}, expected {sizes[self.axis.rank]} elements in dim {dim}, this rank's, or all "
            f"{sum(sizes)}; and what is cut already as its own leaf is: along that dim, what is fused part by part."
        )

    def _slice(self, x: torch.Tensor, dim: int, slices: Slices) -> torch.Tensor:
        return maps.split(_by_rank(x, dim, slices, self.axis.size), self.axis, dim, slices.sizes(self.axis.size))

    def _gathered(self, x: torch.Tensor, dim: int, slices: Slices) -> torch.Tensor:
        every = maps.gather(x, self.axis, dim, slices.sizes(self.axis.size))
        return every if len(slices.parts) == 1 else in_order(slices.ranges(self.axis.size), every, dim)

    def _need_whole(self, x: torch.Tensor, dim: int, count: int) -> None:
        mark = _given.get()
        if x.shape[dim] != count or (mark is not None and mark.source):
            raise ValueError(
                f"apply: module {self.path!r}, whose outputs are cut over axis {self.axis.name!r}, got a tensor of "
                f"shape {tuple(x.shape)}, expected {count} elements in dim {dim}. If a module before it gives slices, "
                "let a 'row' follow that, or say 'column_gather' of it in the plan of fz.shard_tensor."
            )

    def _need_no_slices(self, x: torch.Tensor) -> None:
        mark = _given.get()
        if mark is not None and mark.source:
            raise ValueError(
                f"apply: module {self.path!r}, which is cut over axis {self.axis.name!r}, got numbers of shape "
                f"{tuple(x.shape)} that come of slices, of {mark.source!r}; expected the same on all ranks. Say "
                f"'column_gather' of {mark.source!r} in the plan of fz.shard_tensor."
            )

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """The input as each rank's own, one copy for all modules that read it: its cotangents are summed once."""
        if _given.get() is not None:  # each rank's own already
            return _value(x)
        if isinstance(x, Piece):
            x.need_level()
        last = _last.get()
        version = private.version(x), torch.is_grad_enabled(), private.level()
        if last and last[0][0] is x and last[0][1] == version:
            return last[0][2]
        out = x.own() if isinstance(x, Piece) else maps.shared(_value(x), self.axis)
        last[:] = [(x, version, out)]
        return out


def _run(own: Converted, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    if running_mode.get() is None and _given.get() is None and own.then is None:
        return own.run(*args, **kwargs)
    need_level(own.path or "it")
    if own.run in (own._copied, own._known):
        return own.run(*args, **kwargs)
    marks = [mark for x in (*args, *kwargs.values()) if (mark := mark_of(x)) is not None]
    with during(_given, taken(own.path, marks)), unseen():
        out = own.run(*args, **kwargs)
        out = out if own.then is None else own.then(out)  # type: ignore[arg-type]
    dim = own.outputs
    if dim is None or not isinstance(out, torch.Tensor):
        return out
    weight = own.cut.get("weight")
    slices = None if weight is None or own.then is not None else weight.slices
    if slices is None:  # heads of keys, as those of the queries
        assert own.heads is not None
        return note(out, Mark(own.path or "it", Cut(dim, (own.heads,), own.axis.rank)))
    return note(out, Mark(own.path or "it", own._cut(slices, dim)))


leave_out(__name__, "_run")


def _value(leaf: object) -> torch.Tensor:
    assert isinstance(leaf, torch.Tensor)
    return full(leaf) if isinstance(leaf, Handle) else whole(leaf)


def _by_rank(x: torch.Tensor, dim: int, slices: Slices, ranks: int) -> torch.Tensor:
    """Elements of a whole dim in the order of ranks' slices."""
    if len(slices.parts) == 1:
        return x
    return torch.cat([x.narrow(dim, *piece) for own in slices.ranges(ranks) for piece in own], dim)
