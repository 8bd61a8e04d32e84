"""The writing of safetensors files: what lies there stays a whole model until the new one is."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import uuid
from collections.abc import Mapping

import torch

from fzero.checkpoint import files
from fzero.checkpoint.everyone import Everyone
from fzero.checkpoint.manifest import CODES
from fzero.checkpoint.staging import bytes_of, on_host
from fzero.compat.headers import INDEX, SINGLE, index_of, planned
from fzero.compat.models import NAMED
from fzero.compat.names import Names, renamed
from fzero.state.sharded import Sharded, check_buffers
from fzero.state.stream import stream

_MODEL = re.compile(r"model(-([0-9a-f]{12}-)?\d+-of-\d+)?\.safetensors")
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
    """One call of `save_safetensors` on one rank.

    Attributes:
        tensors: name, dtype and shape of each tensor that is written.
    """

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
        self._named = {file.name: file.name for file in self._files}  # as they are planned -> as they will be
        self._index: bytes | None = None
        self._open, self._locked = dict[str, int](), contextlib.ExitStack()

    def begin(self) -> None:
        """The first rank makes the files, as long as they will be."""
        if not self._leads:
            return
        self._folder.make()
        self._locked.enter_context(self._folder.only_writer())
        there = self._tidied()
        if len(self._files) > 1:
            if any(name.endswith(".safetensors") for name in there - {SINGLE}) or INDEX in there:
                self._named = {name: f"model-{self._token}{name.removeprefix('model')}" for name in self._named}
            self._index = index_of(self._files, self._named)
        for file in self._files:
            path = self._unfinished(file.name)
            descriptor = self._open[file.name] = files.create(path)
            with files.naming(path):
                os.posix_fallocate(descriptor, 0, file.nbytes)
                files.write(descriptor, memoryview(file.header), 0)

    def _tidied(self) -> set[str]:
        """The names in the folder, without what saves have left that never ended: nobody else writes here."""
        known, there = _named_by_index(self._folder), {*self._folder.names()}
        for name in sorted(there):
            if _UNFINISHED.fullmatch(name) or (NAMED.fullmatch(name) and known is not None and name not in known):
                self._folder.remove(name)
                there.remove(name)
        return there

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
        """The first rank gives the files their names; at one moment all that reads the folder goes over to them.

        Of one file that is the moment of its renaming, as loaders prefer it to an index. Of several, whose names are
        those of none that lie there, it is that of the index's; or, where there was one file, that of its removal.
        """
        if not self._leads:
            return
        folder, names = self._folder, {*self._named.values()}
        for file in self._files:
            files.rename(self._unfinished(file.name), os.path.join(folder.path, self._named[file.name]))
        files.sync_folder(folder.path)
        if self._index is not None:
            folder.replace(INDEX, self._index)
            names.add(INDEX)
            folder.remove(SINGLE)
            files.sync_folder(folder.path)
        if self._index is not None or SINGLE in names:
            with contextlib.suppress(OSError):  # it is whole; what is left over goes with the next save
                for name in folder.names():
                    if name not in names and (name in (INDEX, f"{INDEX}.new") or _MODEL.fullmatch(name)):
                        folder.remove(name)
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


def _named_by_index(folder: files.Folder) -> set[str] | None:
    """The files that the index of a folder names, none where it has none; None where it cannot be read."""
    try:
        return {str(name) for name in json.loads(folder.read(INDEX))["weight_map"].values()}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
