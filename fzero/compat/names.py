"""Leaves that others call otherwise: `names=` of those who read and write their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fzero.base import pytree
from fzero.base.arguments import named, wrong

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
