"""Names of leaves in others' files: by `names=`, and of tied leaves any of theirs, or several if their values agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named, wrong
from fzero.checkpoint.everyone import Everyone
from fzero.comm.axis import Axis
from fzero.table.module_params import other_names

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
    """The names that files have, by the paths of their leaves; those of no leaf by words that are no leaf's path.

    Args:
        asked: as of `paths_of`.
    """
    paths = {*asked.values()}
    return {asked.get(name, f"{name} (in the files)" if name in paths else name): name for name in there}


def paths_of(who: str, like: object, names: Names | None) -> dict[str, str]:
    """The names of a tree's leaves in the files -> their paths.

    Raises:
        ValueError: two leaves have one name.
    """
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
