"""The writing of safetensors files: one file that lies there stays whole until the new one is."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import uuid
from collections.abc import Mapping

import torch

from fzero.checkpoint import files
from fzero.checkpoint.chunks import bytes_of, on_host
from fzero.checkpoint.fill import Everyone
from fzero.checkpoint.manifest import CODES
from fzero.compat.opened import INDEX, SINGLE, index_of, planned
from fzero.compat.trees import Names, renamed
from fzero.state.gather import stream
from fzero.state.sharded import Sharded, check_buffers

_PEFT = re.compile(
    r"(.*\.)?base_layer\..*|(.*\.)?prompt_encoder\.[^.]+\.embedding\.weight|.*\.adaption_prompt"
)  # of peft
_ADAPTED = (
    "fz.save_safetensors: got {!r}, a leaf of a model of peft, for the folder {}; expected the names of the model that "
    "it wraps: from_pretrained takes random weights for all others. Save the adapter: gather what trains, with "
    "names = [name for name, p in model.named_parameters() if p.requires_grad] and "
    "trained = fz.gather(state.params, '|'.join(names), to=0), and on rank 0 put it into the model, "
    "model.load_state_dict(trained, strict=False), before model.save_pretrained(folder). Or save the merged model, by "
    "the same of fz.gather(state.params, to=0), and model.merge_and_unload().save_pretrained(folder). What only "
    "fz.load_safetensors reads may be one file: 'folder/state.safetensors'."
)
_UNFINISHED = re.compile(r"\..*\.safetensors\.[0-9a-f]{12}")


class Export:
    """One call of `save_safetensors` on one rank."""

    def __init__(
        self,
        target: str,
        tree: Sharded,
        names: Names | None,
        also: Mapping[str, torch.Tensor],
        dtype: torch.dtype | None,
        most: int,
    ) -> None:
        path, single = os.path.split(target) if target.endswith(".safetensors") else (target, None)
        self._folder = files.Folder(path)
        self._tree, self._dtype, self._also, self._token = tree, dtype, dict(also), uuid.uuid4().hex[:12]
        check_buffers("fz.save_safetensors", "the tree", tree)
        self._names = {path: path if names is None else renamed(names, path) for path in tree}
        own = {path: dtype or tree.format(tree.layout.key_of[path][0]).dtype for path in tree}
        rows = [row for row in tree.layout.rows if row.path in own]
        # name, dtype and shape of each tensor that is written
        self.tensors = [(self._names[row.path], own[row.path], row.shape) for row in rows]
        self.tensors += [(name, x.dtype, tuple(x.shape)) for name, x in also.items()]
        counts = collections.Counter(name for name, _, _ in self.tensors)
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise ValueError(
                f"fz.save_safetensors: got two tensors of the name {twice!r}, also counted; expected one of each."
            )
        for name, form, _ in self.tensors:
            _check(name, form)
            if single is None and _PEFT.fullmatch(name):
                raise ValueError(_ADAPTED.format(name, path))
        self._files = planned(path, single, self.tensors, most)
        self._places = {own.name: own for file in self._files for own in file.entries}
        self._leads = Everyone(tree.axis).leads
        self._in_folder = single is None
        self._open, self._locked = dict[str, int](), contextlib.ExitStack()

    def begin(self) -> None:
        """The first rank makes the files, as long as they will be."""
        if not self._leads:
            return
        self._folder.make()
        self._locked.enter_context(self._folder.only_writer())
        there = self._folder.names()
        for name in filter(_UNFINISHED.fullmatch, there):  # of saves that never ended
            self._folder.remove(name)
        taken = [name for name in (INDEX, SINGLE)[: len(self._files)] if name in there]
        if taken and self._in_folder:
            raise FileExistsError(
                f"fz.save_safetensors: {self._folder.path} has a model of several files, or is to have one, and got "
                f"{taken[0]} there; expected a folder without a model: one file takes the place of another at one "
                "moment, several do not. Save into a new folder, or remove this model before."
            )
        for file in self._files:
            path = self._unfinished(file.name)
            descriptor = self._open[file.name] = files.create(path)
            with files.naming(path):
                os.posix_fallocate(descriptor, 0, file.nbytes)
                files.write(descriptor, memoryview(file.header), 0)

    @torch.no_grad()
    def write(self) -> None:
        """The first rank writes the leaves that all take out of their slices."""
        for path, leaf in stream(self._tree, self._dtype):
            if self._leads:
                self._put(self._names[path], leaf)
        for name, x in self._also.items() if self._leads else ():
            self._put(name, x)
        for name, descriptor in self._open.items():
            with files.naming(self._unfinished(name)):
                files.sync(descriptor)

    def _put(self, name: str, values: torch.Tensor) -> None:
        place = self._places[name]
        file = os.path.basename(place.file)
        with files.naming(self._unfinished(file)):
            files.write(self._open[file], bytes_of(on_host(values.reshape(-1))), place.offset)

    def end(self) -> None:
        """The first rank gives the files their names; with the one file, or the index, the model is there."""
        if not self._leads:
            return
        for file in self._files:
            files.rename(self._unfinished(file.name), os.path.join(self._folder.path, file.name))
        files.sync_folder(self._folder.path)
        if len(self._files) > 1:
            self._folder.replace(INDEX, index_of(self._files))
        self._locked.close()

    def leave(self) -> None:
        """Closes the files; those that have no name yet go. The rest of a save that failed goes with the next one."""
        for descriptor in self._open.values():
            os.close(descriptor)
        with contextlib.suppress(OSError):
            for name in self._open:
                self._folder.remove(os.path.basename(self._unfinished(name)))
        with contextlib.suppress(OSError):
            self._locked.close()

    def _unfinished(self, name: str) -> str:
        return os.path.join(self._folder.path, f".{name}.{self._token}")


def _check(name: str, dtype: torch.dtype) -> None:
    """Refuses a tensor that the format has no words for."""
    if dtype not in CODES:
        raise TypeError(
            f"fz.save_safetensors: tensor {name!r} is {dtype}, expected one of "
            f"{', '.join(str(own).removeprefix('torch.') for own in CODES)}. Convert it, or leave it out."
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"fz.save_safetensors: got a tensor named {name!r}, expected a name in UTF-8: {error}."
        ) from None
    if name == "__metadata__":
        raise ValueError(
            f"fz.save_safetensors: got a tensor named {name!r}, which the format keeps for metadata. Give it another "
            "name with names=."
        )
