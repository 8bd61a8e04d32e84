"""Others' files as the origin of a state: names of their leaves; words for moments, torch's, which DeepSpeed has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import torch

from fzero.base import pytree
from fzero.base.arguments import named, wrong
from fzero.checkpoint.fill import Everyone, Files
from fzero.comm.axis import Axis
from fzero.formats.formats import ALIGN, Format, Plain, zeros
from fzero.state.items import Item
from fzero.state.origin import TREES
from fzero.table.module_params import other_names
from fzero.table.rows import Leaf

Names = Callable[[str], str]


def need_names(names: object, like: object, who: str) -> None:
    """Refuses names that no paths are given for."""
    if names is not None and (like is None or not callable(names)):
        raise wrong(who, "names", names, "a function of a path, beside a like= whose paths it takes")


def renamed(names: Names, path: str) -> str:
    """What a leaf is called in the files."""
    try:
        out = names(path)
    except Exception as error:
        raise ValueError(f"names({path!r}): got {error!r}, expected a str: the leaf's name in the files.") from error
    if not isinstance(out, str):
        raise TypeError(f"names({path!r}): got {named(out)}, expected a str: the leaf's name in the files.")
    return out


def by_path(asked: Mapping[str, str], there: Iterable[str]) -> dict[str, str]:
    """The names that files have, by the paths of their leaves; those of no leaf by words that are no leaf's path."""
    paths = {*asked.values()}
    return {asked.get(name, f"{name} (in the files)" if name in paths else name): name for name in there}


def paths_of(who: str, like: object, names: Names | None) -> dict[str, str]:
    """The names of a tree's leaves in the files -> their paths."""
    out = dict[str, str]()
    for path in pytree.named_leaves(like)[0]:
        name = path if names is None else renamed(names, path)
        if name in out:
            raise ValueError(
                f"{who}: names gives leaf {path!r} and leaf {out[name]!r} one name, {name!r}; expected a name for each."
            )
        out[name] = path
    return out


class Tie(NamedTuple):
    """Two names that a file has of one leaf."""

    path: str
    first: str
    second: str


def ties_of(like: object) -> dict[str, str]:
    """The further names of a tree's tied leaves -> their paths."""
    paths, _, structure = pytree.named_leaves(like)
    return other_names(structure, paths)


def untied(names: Mapping[str, str], ties: Mapping[str, str]) -> tuple[dict[str, str], list[Tie]]:
    """The names that a file has, by the paths of leaves; and those that are further names of leaves which it has.

    Args:
        names: path, or a further name of a leaf -> name in the file.
        ties: as of `ties_of`.
    """
    out, also = {path: name for path, name in names.items() if path not in ties}, list[Tie]()
    for path, name in names.items():
        if path in ties and (first := out.setdefault(ties[path], name)) != name:
            also.append(Tie(ties[path], first, name))
    return out, also


def need_same_values(
    place: str,
    ties: Iterable[Tie],
    form: Callable[[str], tuple[tuple[int, ...], object]],
    read: Callable[[str, int, int], torch.Tensor],
    axis: Axis,
) -> None:
    """Refuses two names of a leaf that have different values. Each rank compares its share of them.

    Args:
        form: a name's shape and dtype.
        read: the elements [start, stop) of a name.
    """
    everyone = Everyone(axis)
    for path, first, second in ties:
        one, other = form(first), form(second)
        numel = torch.Size(one[0]).numel()
        start, stop = (numel * rank // everyone.count for rank in (everyone.number, everyone.number + 1))
        if one != other:
            got = f"{one[1]} of shape {one[0]} and {other[1]} of shape {other[0]}"
        elif start == stop or torch.equal(*[read(name, start, stop).view(torch.uint8) for name in (first, second)]):
            continue
        else:
            got = "different values"
        raise ValueError(
            f"{place}: leaf {path!r} is tied, and got {got} by its names {first!r} and {second!r}; expected the same "
            "by both. If the saved model is not tied, give params that are not tied as like=. Otherwise remove the "
            "wrong one from the files."
        )


N = TypeVar("N")  # what stands for a tensor in the files
WORDS = {
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    "largest": "max_exp_avg_sq",
    "momentum": "momentum_buffer",
    "count": "step",
}


class Others(Files, Generic[N]):
    """Files of another library as the origin of a state."""

    extras = ()
    params: dict[str, N]  # paths of leaves -> their tensors in the files
    moments: Mapping[str, Mapping[str, N]] = MappingProxyType({})  # what others call them -> these by the same paths
    without = "optim=None"  # the argument that begins the moments anew
    else_said = ""  # what else may help where one is missing

    def form(self, tensor: N) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and the dtype of a tensor."""
        raise NotImplementedError

    def stored(self, path: str, tensor: N) -> Format:
        """What a leaf is stored as; refuses what no state can have."""
        return Plain(self.form(tensor)[1])

    def fill(self, tensor: N, start: int, stop: int, out: torch.Tensor) -> None:
        """Fills a flat tensor with elements [start, stop) of one in the files."""
        raise NotImplementedError

    def lacks(self) -> str:
        """What to say where there are no moments, and the step has some."""
        raise NotImplementedError

    @property
    def leaves(self) -> list[Leaf]:
        return [(path, *self.form(tensor)) for path, tensor in self.params.items()]

    def structure(self) -> pytree.Spec:
        return pytree.flatten(dict.fromkeys(self.params, 0))[1]

    def meet(self, moments: Sequence[Item]) -> None:
        if not self.moments and any(item.kind in TREES for item in moments):
            raise ValueError(f"{self.place}: {self.lacks()}")
        self.kinds = {"params": "params", **kinds_of(moments, self.moments.keys() - {"step"})}

    def _by_path(self, name: str) -> Mapping[str, N]:
        """Those of a tree, by the paths of leaves."""
        return self.params if name == "params" else self.moments[word_of(name)]

    def format(self, name: str, path: str) -> Format | None:
        if path in (tensors := self._by_path(name)):
            return self.stored(path, tensors[path])
        if name == "params":
            return None
        raise ValueError(
            f"{self.place}: leaf {path!r} has no {word_of(name)}, and other leaves have one. Every leaf with moments "
            f"in the step needs it. {self.else_said}Otherwise freeze the leaf without moments, or say {self.without} "
            "to begin the moments anew."
        )

    def read(
        self, name: str, path: str, start: int, stop: int, into: Sequence[torch.Tensor] | None, rank: int = 0
    ) -> Sequence[torch.Tensor]:
        form = self.format(name, path)
        assert form is not None
        out = into or zeros(form, -(-(stop - start) // ALIGN) * ALIGN, "cpu")
        if start < stop:
            self.fill(self._by_path(name)[path], start, stop, out[0][: stop - start])
        return out


def word_of(item: str) -> str:
    """What others call an item of the moments: "moments.1.mu" is an `exp_avg`."""
    own = item.rpartition(".")[2]
    return WORDS.get(own, own)


def one_count(place: str, counts: Mapping[str, int], other: int, anew: str) -> int:
    """How many updates all leaves have seen; `other` where none says it."""
    if len({*counts.values()}) > 1:
        first, last = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        raise ValueError(
            f"{place}: leaf {first!r} has seen {counts[first]} updates, leaf {last!r} {counts[last]}; expected one "
            f"count for all. Say {anew} to begin the moments anew."
        )
    return next(iter(counts.values()), other)


def kinds_of(moments: Sequence[Item], words: Collection[str]) -> dict[str, str]:
    """The kinds of those items that others' files have, and of what no item stands for.

    Args:
        words: what the files have of each leaf, without `step`.
    """
    kinds = {item.name: item.kind for item in moments if item.kind not in TREES or word_of(item.name) in words}
    met = {word_of(name) for name, kind in kinds.items() if kind in TREES}
    return {**kinds, **{f"moments.{word}": "values" for word in words if word not in met}}
