"""Which submodules of a module are units of the running step, by the leaves of it that stand for their params."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import nn

from fzero.base.patterns import ROOT
from fzero.modules.hints import called_below
from fzero.table.rows import Row


def module_units(
    origins: Mapping[str, Row | None], handles: Container[str], aliases: Mapping[str, str], module: nn.Module
) -> dict[str, dict[str, str]]:
    """Module path -> {name below it: name of the leaf}, for every unit that leaves among the params belong to.

    A list of modules is never called itself: where it is a unit, each call of one of its elements gathers it.

    Args:
        origins: of each param its leaf of the step that is running.
        handles: those that are handles.
    """
    modules = {name for name, _ in module.named_modules()}
    paths: dict[str, str] = {}
    for name, row in origins.items():
        if row is None or row.unit == ROOT:
            continue
        full, unit = row.path, row.unit
        prefix = full.removesuffix(name)
        named = full.endswith(name)
        path = unit.removeprefix(prefix) if unit.startswith(prefix) else ROOT
        if named and path in modules:
            paths[unit] = path
        elif name in handles:
            if path in modules:
                raise ValueError(
                    f"apply: leaf {full!r} of unit {unit!r} stands for the module's param {name!r}, which is not that "
                    "unit's. Give each param under its own name; to exchange layers, exchange their tensors before "
                    "init, or what the module calls."
                )
            raise ValueError(
                f"apply: leaf {full!r} belongs to unit {unit!r}, but the module has no submodule {unit!r} to gather it "
                f"in (it has {', '.join(sorted(modules - {ROOT})[:8])}). Say units= in train_step as paths of modules, "
                "or keep the module's names in the params, and their type, which dict(params) does not."
            )
    out: dict[str, dict[str, str]] = {}
    for path in [called for unit in paths.values() for called in called_below(module, unit)]:
        below = path + "." if path else ""
        out[path] = {name.removeprefix(below): leaf for name, leaf in aliases.items() if name.startswith(below)}
    return out
