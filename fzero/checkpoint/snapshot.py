"""What one rank saves of a state: its share of every buffer, taken without a copy, and where it goes in its file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.checkpoint.chunks import bytes_of, digest, on_host, staged
from fzero.checkpoint.contents import Copies, Run, copies_of, runs, share
from fzero.checkpoint.fill import Everyone
from fzero.checkpoint.manifest import CODES, CODES_OF_TENSORS, Kept, Leaf, Piece, as_filed, header_of
from fzero.comm.axis import Axis
from fzero.formats.formats import Format
from fzero.state.items import Item, items_of
from fzero.state.sharded import check_buffers, is_sharded
from fzero.state.sliced import sliced_in
from fzero.state.train_state import TrainState, being_saved
from fzero.stores.away import Buffer, tensor_of
from fzero.table.layout import Key, Layout


class Slice(NamedTuple):
    """A rank's share of one group of one tree: elements [low, high) of it, of a buffer that begins at `base`."""

    item: int
    key: Key
    form: Format
    base: int
    low: int
    high: int


@dataclass(eq=False)
class Snapshot:
    """What one rank saves."""

    layout: Layout
    axis: Axis
    structure: pytree.Spec
    step: int
    seed: int
    extras: tuple[tuple[str, str, bool], ...]
    extra: object
    workers: int  # threads that make checksums
    items: list[Item]  # of the state, which holds its buffers from the call on; listed later, by whoever writes them
    ready: torch.Event | None  # has passed on the device once it has computed all of them
    kept: list[Kept] = field(default_factory=list)  # the state's items, as the manifest has them
    # with the buffers of each, which are let go as they are written
    slices: list[tuple[Slice, list[Buffer]]] = field(default_factory=list)
    # those that are in no tree, by the number of their item, as files have them; all ranks hold them alike, but for a
    # carry, and rank 0 saves them
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    copies: Copies = field(default_factory=Copies)  # the checksums of what other ranks hold, too

    @staticmethod
    def of(state: TrainState, extra: object, workers: int) -> Snapshot:
        """Holds a state's buffers; an update that is donated it meanwhile leaves those alone."""
        params, items = state.params, items_of(state)
        for name, value in items:
            dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
            if isinstance(value, torch.Tensor) and not (dense and value.dtype in CODES_OF_TENSORS):
                raise TypeError(
                    f"state.{name}: got {named(value)}, expected a dense tensor of "
                    f"{', '.join(map(str, CODES_OF_TENSORS))}: no other is kept in a checkpoint."
                )
        snapshot = Snapshot(
            layout=state.layout,
            axis=params.axis,
            structure=params.structure,
            step=state.step,
            seed=state.seed,
            extras=state.signature.extras,
            extra=extra,
            workers=workers,
            items=[Item(name, x.replaced() if is_sharded(x) else x) for name, x in items],
            ready=None
            if (device := params.device).type == "cpu"
            else torch.accelerator.current_stream(device).record_event(),
        )
        being_saved.add(snapshot)
        return snapshot

    def unfold(self) -> None:
        """Lists what is saved."""
        self.items.reverse()
        while self.items:
            number, item = len(self.kept), self.items.pop()
            (name, value), kind, forms, scale = item, item.kind, dict[int, str](), 1.0
            del item
            if is_sharded(value):
                scale = value.scale
                check_buffers("fz.save", f"state.{name}", value)
                self.copies |= copies_of({name: value})
                for key in value.groups:
                    own = value.placed(key)
                    if lost := [part.dtype for part in own.format.parts if part.dtype not in CODES]:
                        raise TypeError(
                            f"state.{name}: the leaf {self.layout.groups[key].slots[0].path!r} is stored as {lost[0]}, "
                            f"expected one of {', '.join(map(str, CODES))}: no other is kept in a checkpoint."
                        )
                    self.slices.append((Slice(number, key, own.format, *share(value, key)), list(own.parts)))
                    forms.update({slot.leaf: str(own.format) for slot in self.layout.groups[key].slots})
                    del own
                value = None
            elif isinstance(value, torch.Tensor):
                self.tensors[number] = as_filed(value)
                value = [CODES_OF_TENSORS[value.dtype], list(value.shape)]
            elif isinstance(value, pytree.Count):
                value = value.said
            self.kept.append(Kept(name, kind, forms, scale, value))

    def shared(self) -> dict[str, str]:
        """What all ranks must hold alike, but for a carry, by its name: numbers, and checksums of tensors."""
        said = {kept.name: f"{kept.kind} {kept.value} {kept.scale}" for kept in self.kept}
        table = [(leaf.path, leaf.shape, leaf.dtype, leaf.row, leaf.sliced) for leaf in self.leaves()]
        formats = [sorted(kept.formats.items()) for kept in self.kept]
        said["layout"] = f"a table with SHA-256 {digest(repr((table, formats)).encode())[:12]}"
        for number, tensor in self.tensors.items():
            said[self.kept[number].name] += f" with SHA-256 {digest(bytes_of(on_host(tensor).reshape(-1)))[:12]}"
        return said

    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(
            Leaf(
                row.path,
                row.shape,
                CODES[row.dtype],
                f"{row.policy} {row.optimizer} unit {row.unit!r} cuts {row.cuts}",
                sliced_in(self.layout, index),
            )
            for index, row in enumerate(self.layout.rows)
        )

    def pieces(self) -> list[tuple[Piece, torch.dtype]]:
        """Where in the file each slice goes, in the order in which they are written; offsets are those of the data."""
        found = list[tuple[Piece, torch.dtype]]()
        for own, _ in self.slices:
            for part, written in runs(self.layout, own.key, own.form, own.low, own.high):
                dtype = own.form.parts[part].dtype
                for run in self._written(written):
                    nbytes, rank = (run.high - run.low) * dtype.itemsize, self.layout.tensor[0]
                    where = own.item, run.leaf, part, run.start, run.stop, 0, nbytes
                    found.append((Piece(*where, rank if self._is_sliced(run.leaf) else 0), dtype))
        for item in self._own_tensors():
            tensor = self.tensors[item]
            found.append((Piece(item, 0, 0, 0, tensor.numel(), 0, tensor.nbytes), tensor.dtype))
        ends = itertools.accumulate([piece.nbytes for piece, _ in found], initial=0)
        return [(piece._replace(offset=offset), dtype) for offset, (piece, dtype) in zip(ends, found, strict=False)]

    def header(self, pieces: list[tuple[Piece, torch.dtype]]) -> bytes:
        """What stands before the data in the file: the names, dtypes and places of its tensors."""
        said: dict[str, object] = {"__metadata__": {"format": "fzero checkpoint"}}
        for piece, dtype in pieces:
            kept = self.kept[piece.item]
            name = kept.name
            if kept.kind not in ("tensor", "count", "number"):
                path, part = self.layout.rows[piece.leaf].path, f" part {piece.part}" if piece.part else ""
                number = f" of slice {piece.rank}" if self._is_sliced(piece.leaf) else ""
                name = f"{name}/{path}[{piece.start}:{piece.stop}]{number}{part}"
            begin, end = piece.offset, piece.offset + piece.nbytes
            shape = [piece.nbytes // dtype.itemsize]
            said[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
        return header_of(said)

    def data(self) -> Iterator[memoryview]:
        """The slices themselves, one after the other; buffers are brought from where they lie, and let go."""
        return map(bytes_of, staged(self._tensors(), self.ready))

    def _tensors(self) -> Iterator[torch.Tensor]:
        self.slices.reverse()
        while self.slices:
            own, buffers = self.slices.pop()
            buffers.reverse()
            for part, found in runs(self.layout, own.key, own.form, own.low, own.high):
                buffer = tensor_of(buffers.pop()).detach()
                first = (own.low - own.base) // own.form.parts[part].every
                for run in self._written(found):
                    yield buffer[first + run.low : first + run.high]
                del buffer
        for number in self._own_tensors():
            yield self.tensors.pop(number).detach().reshape(-1)

    def _written(self, found: list[Run]) -> list[Run]:
        """Those of some runs that this rank saves: of copies on the tensor axis one does, by turns."""
        rank, ranks = self.layout.tensor
        rows = self.layout.rows
        return [run for run in found if rows[run.leaf].slices is not None or run.leaf % ranks == rank]

    def _is_sliced(self, leaf: int) -> bool:
        return sliced_in(self.layout, leaf) is not None

    def _own_tensors(self) -> list[int]:
        """The tensors that this rank saves."""
        return list(self.tensors) if Everyone(self.axis).leads else []
