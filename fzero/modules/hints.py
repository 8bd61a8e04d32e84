"""What a module says of its params: which submodules are units, and for `fz.shard_tensor` uses, heads, its tp_plan."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import NamedTuple

from torch import nn

from fzero.base.patterns import ROOT, unit_of
from fzero.table.rows import Row
from fzero.table.slices import Hint, Use

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_KEYS, _QUERY = ("k_proj", "v_proj"), "q_proj"


class Heads(NamedTuple):
    """A module whose projections have heads."""

    dim: int  # elements of a head
    groups: int  # heads of queries that share one of keys and values
    out: str  # name of the projection of what the heads give


def kind_of(module: nn.Module) -> str:
    """What a module computes with its weight; "" where that is its own affair.

    A class that is derived from one of torch's, with a forward of its own, is another one, but for an embedding: that
    calls `F.embedding`, as by `super().forward(ids) * self.scale`, or is refused where it reads its weight.
    """
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if any(forward is kind.forward for kind in _CONVOLUTIONS):
        return "convolution"
    name = f"{type(module).__module__}.{type(module).__name__}"
    return "transposed" if name == "transformers.pytorch_utils.Conv1D" else ""


def heads_of(module: nn.Module) -> Heads | None:
    """The heads of an attention module as Hugging Face writes them, whose code counts heads by what it is given."""
    dim, groups = getattr(module, "head_dim", None), getattr(module, "num_key_value_groups", 1)
    children = dict(module.named_children())
    if not isinstance(dim, int) or not isinstance(groups, int):
        return None
    if any(kind_of(children[name]) != "linear" if name in children else True for name in (_QUERY, *_KEYS)):
        return None
    query = children[_QUERY]
    assert isinstance(query, nn.Linear)
    width = query.out_features
    others = [n for n, m in children.items() if n not in (_QUERY, *_KEYS) and kind_of(m) == "linear"]
    if not hasattr(module, "num_key_value_groups") and {getattr(children[n], "out_features", 0) for n in _KEYS} != {
        width
    }:
        return None  # its own code says which heads of keys go with which of queries
    outs = [name for name in others if getattr(children[name], "in_features", None) == width]
    return Heads(dim, groups, outs[0]) if len(outs) == 1 and width % (dim * groups) == 0 else None


def hints_of_module(module: nn.Module) -> dict[str, Hint]:
    """Name of a param -> what the module does with it, under each of its names."""
    firsts = {id(param): name for name, param in module.named_parameters()}
    modules = dict(module.named_modules(remove_duplicate=False))
    plan, multiples = _plan_of(modules), dict[str, tuple[int, int]]()
    for path, own in modules.items():
        if (heads := heads_of(own)) is not None:
            before = path + "." if path else ""
            multiples |= dict.fromkeys((before + _QUERY, before + heads.out), (heads.dim * heads.groups, heads.dim))
            multiples |= dict.fromkeys([before + name for name in _KEYS], (heads.dim, 1))
    out: dict[str, list[Use]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        path, _, _own = name.rpartition(".")
        of_module = _found(plan, path)
        style = _found(plan, name) or (of_module if of_module != "moe_tp_experts" else "")
        heads, loose = multiples.get(path, (1, 1)), _is_loose(name, module, modules)
        use = Use(name, kind_of(modules[path]), style, of_module, *heads, loose)
        out.setdefault(firsts[id(param)], []).append(use)
    return {name: tuple(uses) for name, uses in out.items()}


def called_below(module: nn.Module, path: str) -> list[str]:
    """The path itself, or the paths of the modules below it that have a forward."""
    own = module.get_submodule(path)
    if type(own).forward is not nn.Module.forward:
        return [path]
    below = path + "." if path else ""
    return [called for name, _ in own.named_children() for called in called_below(module, below + name)]


def module_units(
    origins: Mapping[str, Row | None], handles: Container[str], aliases: Mapping[str, str], module: nn.Module
) -> dict[str, dict[str, str]]:
    """Module path -> {name below it: name of the leaf}, for every unit that leaves among the params belong to.

    A list of modules is never called itself: where it is a unit, each call of one of its elements gathers it.
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


def _is_loose(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    """Whether nothing that is called has a param in the unit up to its first integer: that of a ParameterList."""
    unit, owner = unit_of(name, None), name.rpartition(".")[0]
    called = called_below(module, unit) if unit in modules else []
    return unit != ROOT and not any(f"{owner}.".startswith(f"{path}.") for path in called)


def _plan_of(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Pattern over names -> style, of all modules that have a tp_plan; that of the outermost comes first."""
    out: dict[str, str] = {}
    for path, module in sorted(modules.items(), key=lambda pair: -pair[0].count(".") - bool(pair[0])):
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping):
            before = path + "." if path else ""
            out |= {before + str(pattern): str(style) for pattern, style in plan.items()}
    return out


def _found(plan: Mapping[str, str], name: str) -> str:
    """The style of a name; stars of patterns are numbers."""
    forms = {re.escape(pattern).replace(r"\*", r"\d+"): style for pattern, style in plan.items()}
    return plan.get(name) or next((style for form, style in forms.items() if re.fullmatch(form, name)), "")
