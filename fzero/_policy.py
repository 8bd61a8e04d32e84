"""Dtypes by leaf: what each kind of state is stored in, computed in and reduced in."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_COLUMNS = ("param", "grad", "moment", "compute", "reduce")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Policy:
    """The dtypes of a leaf's state. `None` keeps the leaf's own dtype, so float64 stays float64.

    Args:
        param: dtype of the stored params.
        grad: dtype of the reduced grads.
        moment: dtype of the optimizer's moments.
        compute: dtype that the params are gathered and used in; `None` takes `autocast`'s dtype
            where that transform applies, otherwise the stored one.
        reduce: dtype that gradients travel and are summed in; `None` takes the wider of
            `grad` and `compute`.
        rounding: how a result is rounded to the stored dtype; "nearest" is what there is so far.

    Example:
        >>> import torch, fzero as fz
        >>> fz.Policy(param=torch.float32, compute=torch.bfloat16).compute
        torch.bfloat16
    """

    param: torch.dtype | None = None
    grad: torch.dtype | None = None
    moment: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        for column in _COLUMNS:
            dtype = getattr(self, column)
            if dtype is not None and dtype not in _FLOATS:
                raise ValueError(
                    f"Policy({column}=...): got {dtype!r}, expected None or one of "
                    f"{', '.join(map(str, _FLOATS))}. Name a floating dtype that states can be kept in."
                )
        if self.rounding != "nearest":
            raise ValueError(
                f"Policy(rounding=...): got {self.rounding!r}, expected 'nearest'. "
                "Other roundings are not in this version; keep rounding='nearest'."
            )

    @staticmethod
    def bf16_states() -> Policy:
        """Params, grads and moments in bfloat16, rounded to nearest: 6 bytes per parameter, and 2 for its grad.

        Example:
            >>> fz.Policy.bf16_states().moment
            torch.bfloat16
        """
        bf16 = torch.bfloat16
        return Policy(param=bf16, grad=bf16, moment=bf16, compute=bf16)

    @staticmethod
    def by_path(policies: Mapping[str, Policy]) -> ByPath:
        """A policy per pattern over leaf paths (fnmatch, alternatives separated by `|`); the first match wins.

        Example:
            >>> by = fz.Policy.by_path({"*norm*": fz.Policy(), "*": fz.Policy.bf16_states()})
            >>> by.of("blocks.0.norm.weight").param is None
            True
        """
        if not policies:
            raise ValueError("Policy.by_path: got no patterns; give at least {'*': fz.Policy()}.")
        return ByPath(tuple(policies.items()))

    def of(self, path: str) -> Policy:
        """The policy of the leaf at `path`: this one."""
        return self

    def resolve(self, own: torch.dtype, autocast: torch.dtype | None) -> Policy:
        """Every column filled in for a leaf whose own dtype is `own`."""
        param = self.param or own
        grad = self.grad or own
        compute = self.compute or autocast or param
        reduce = self.reduce or torch.promote_types(grad, compute)
        return dataclasses.replace(
            self, param=param, grad=grad, moment=self.moment or own, compute=compute, reduce=reduce
        )


@dataclass(frozen=True)
class ByPath:
    """What `Policy.by_path` makes: patterns in order, the first match wins."""

    policies: tuple[tuple[str, Policy], ...]

    def of(self, path: str) -> Policy:
        for pattern, policy in self.policies:
            if matches(pattern, path):
                return policy
        return Policy()

    def unmatched(self, paths: list[str]) -> list[str]:
        """Patterns that no leaf's path matches."""
        return [pattern for pattern, _ in self.policies if not any(matches(pattern, path) for path in paths)]


def matches(pattern: str, path: str) -> bool:
    """Whether `path` matches `pattern`: fnmatch, alternatives separated by `|`.

    Example:
        >>> matches("*norm*|*bias", "head.bias")
        True
    """
    return any(fnmatch.fnmatchcase(path, part) for part in pattern.split("|"))


def unmatched(pattern: str, paths: Sequence[str]) -> list[str]:
    """The alternatives of a pattern that match no path: a typo in one would otherwise hide behind the others."""
    return [part for part in pattern.split("|") if not any(fnmatch.fnmatchcase(path, part) for path in paths)]
