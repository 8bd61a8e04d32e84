"""Dtypes and formats by leaf: what each kind of state is stored in, computed in and reduced in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero.base.arguments import wrong
from fzero.base.patterns import matches
from fzero.formats.formats import Blocks, Companded, Corrected, Exact, Format, Plain, decode, encode

_WIDTHS = {"8-bit": 8, "4-bit": 4}
_FLOATS = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TAKES = {
    **dict.fromkeys(("param", "grad", "compute", "reduce"), _FLOATS),
    "moment": (*_FLOATS, *_WIDTHS),
    "rounding": ("nearest", "stochastic", "compensated"),
    "remainder": (torch.int16, torch.int8),
    "gather": (None, "8-bit"),
}


@dataclass(frozen=True)
class Policy:
    """The dtypes that a leaf's state is stored, computed and reduced in. None keeps the leaf's own dtype.

    Ready-made policies: `Policy.exact()`, `compact24()`, `compact16()` and `bf16_states()`. `Policy.by_path` gives
    leaves different ones. `dataclasses.replace(policy, moment=torch.float32)` changes one field.

    Args:
        param: the dtype of stored params.
        grad: the dtype of reduced gradients.
        moment: the dtype of the optimizer's moments. Or `"8-bit"`: companded in groups of 32 with a shared scale, 2.1
            bytes for both moments of Adam. Or `"4-bit"`: the same, with the first moment in 4 bits.
        compute: the dtype that params are gathered and used in. None takes that of `fz.autocast`, if it applies to the
            leaf, and otherwise the stored one. Inputs of your function are not cast.
        reduce: the dtype that gradients are summed in, over uses, microbatches, ranks and `add_grads`. None takes
            float32, or float64 if `grad` or `compute` is. If the wider of `grad` and `compute` is narrower, gradients
            travel between ranks in that.
        rounding: how an update is rounded to a stored bfloat16. `"nearest"`; `"stochastic"`, which keeps small updates
            in the mean; `"compensated"`, which keeps what rounding loses in `remainder`. With the last two, bfloat16
            moments are rounded stochastically.
        remainder: for `"compensated"`. `torch.int16`: param and remainder are a float32 to the bit. `torch.int8`: 24
            bits.
        gather: `"8-bit"` sends params between ranks as 8-bit integers with a scale for every 32 (1.06 bytes each). The
            function computes with these rounded values, and gradients are by them. None sends the compute dtype.

    Raises:
        ValueError: a field has a value that it cannot take. The error lists those that it can.

    Example:
        >>> import torch, fzero as fz
        >>> fz.Policy(param=torch.float32, compute=torch.bfloat16).compute
        torch.bfloat16
    """

    param: torch.dtype | None = None
    grad: torch.dtype | None = None
    moment: torch.dtype | str | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    rounding: str = "nearest"
    remainder: torch.dtype = torch.int16
    gather: str | None = None

    def __post_init__(self) -> None:
        for column, known in _TAKES.items():
            value = getattr(self, column)
            if value not in known:
                raise ValueError(f"Policy({column}=...): got {value!r}, expected {', '.join(map(str, known))}.")
        if self.rounding != "nearest" and self.param not in (None, torch.bfloat16):
            raise ValueError(
                f"Policy(param={self.param}, rounding={self.rounding!r}): {self.rounding} rounding is to "
                "torch.bfloat16. Say param=torch.bfloat16, or rounding='nearest'."
            )

    def __str__(self) -> str:
        """The fields without those that are left to the leaf."""
        said = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        return f"Policy({', '.join(f'{name}={value}' for name, value, default in said if value != default)})"

    @staticmethod
    def bf16_states() -> Policy:
        """Params, grads and moments in bfloat16, rounded to nearest. A baseline: small updates are lost.

        6 bytes a param with Adam's moments, and 2 for its gradient.

        Example:
            >>> fz.Policy.bf16_states().moment
            torch.bfloat16
        """
        bf16 = torch.bfloat16
        return Policy(param=bf16, grad=bf16, moment=bf16, compute=bf16)

    @staticmethod
    def exact(moment: torch.dtype | str = "8-bit") -> Policy:
        """bfloat16 params with an int16 remainder: together float32, to the bit. Computes, and has grads, in bfloat16.

        Args:
            moment: the format of moments. 6.1 bytes a param with Adam's moments in `"8-bit"`, 12 with `torch.float32`.

        Example:
            >>> fz.Policy.exact().param_format.parts[1].dtype
            torch.int16
        """
        return dataclasses.replace(Policy.bf16_states(), moment=moment, rounding="compensated")

    @staticmethod
    def compact24(moment: torch.dtype | str = "8-bit") -> Policy:
        """24-bit params, a bfloat16 with an 8-bit correction. Computes, and keeps grads, in bfloat16.

        Args:
            moment: the format of moments. 5.1 bytes a param with Adam's moments in `"8-bit"`.

        Example:
            >>> fz.Policy.compact24().moment
            '8-bit'
        """
        return dataclasses.replace(Policy.exact(moment), remainder=torch.int8)

    @staticmethod
    def compact16(moment: torch.dtype | str = "8-bit") -> Policy:
        """bfloat16 params, rounded stochastically. Computes, and keeps grads, in bfloat16.

        Args:
            moment: the format of moments. 4.1 bytes a param with Adam's moments in `"8-bit"`, 3.6 in `"4-bit"`.

        Example:
            >>> fz.Policy.compact16().rounding
            'stochastic'
        """
        return dataclasses.replace(Policy.bf16_states(), moment=moment, rounding="stochastic")

    @property
    def param_format(self) -> Format:
        """How params are stored, once all columns are filled in (`resolve`)."""
        if self.rounding == "compensated":
            return Exact() if self.remainder == torch.int16 else Corrected()
        assert self.param is not None
        return Plain(self.param, self.rounding == "stochastic")

    def moment_format(self, signed: bool) -> Format:
        """How a moment is stored, once all columns are filled in.

        Args:
            signed: True for a moment that may be negative, such as Adam's first.
        """
        if isinstance(self.moment, str):
            return Companded(signed, _WIDTHS[self.moment] if signed else 8)
        assert self.moment is not None
        return Plain(self.moment, self.rounding != "nearest" and self.moment == torch.bfloat16)

    @functools.cached_property
    def wire(self) -> torch.dtype:
        """The dtype in which a full gradient travels to be summed, never wider than that of the sum."""
        assert self.grad and self.compute and self.reduce
        own = torch.promote_types(self.grad, self.compute)
        return own if own.itemsize < self.reduce.itemsize else self.reduce

    @property
    def computes_as_stored(self) -> bool:
        """True if a full buffer in the compute dtype holds the stored values."""
        return self.param_format.plain and self.compute == self.param and self.gather is None

    def used(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Params as they are computed with, from the parts that are stored, once all columns are filled in."""
        assert self.compute
        if self.gather is None:
            return decode(self.param_format, parts, self.compute)
        blocks = Blocks()
        return decode(blocks, encode(blocks, decode(self.param_format, parts, torch.float32)), self.compute)

    @staticmethod
    def by_path(policies: Mapping[str, Policy]) -> ByPath:
        """Gives leaves different policies, by patterns over their paths.

        Args:
            policies: `{pattern: policy}`, fnmatch over dotted paths, alternatives separated by `|`. The first pattern
                that matches a leaf counts.

        Returns:
            What `fz.train_step(..., policy=...)` takes.

        Example:
            >>> by = fz.Policy.by_path({"*norm*": fz.Policy(), "*": fz.Policy.bf16_states()})
            >>> by.of("blocks.0.norm.weight").param is None
            True
        """
        if not isinstance(policies, Mapping) or not all(
            isinstance(pattern, str) and isinstance(policy, Policy) for pattern, policy in policies.items()
        ):
            expected = "a dict of patterns to policies, such as {'*norm*': fz.Policy(), '*': fz.Policy.bf16_states()}"
            raise wrong("Policy.by_path", "policies", policies, expected)
        if not policies:
            raise ValueError("Policy.by_path: got no patterns; give at least {'*': fz.Policy()}.")
        return ByPath(tuple(policies.items()))

    def of(self, path: str) -> Policy:
        """The policy of the leaf at `path`: this one."""
        return self

    def resolve(self, own: torch.dtype, autocast: torch.dtype | None) -> Policy:
        """The same policy with every column filled in, for one leaf.

        Args:
            own: the leaf's own dtype.
            autocast: the dtype that `fz.autocast` says for it, or None.
        """
        param = self.param or own
        if self.rounding != "nearest" and param != torch.bfloat16:
            raise ValueError(
                f"its policy has rounding={self.rounding!r}, which is to torch.bfloat16, and the leaf's own dtype "
                f"{own}. Say Policy(param=torch.bfloat16, rounding={self.rounding!r}, ...)."
            )
        grad = self.grad or own
        if not {param, grad, self.moment or own} <= {*_FLOATS, *_WIDTHS}:
            raise TypeError(
                f"got dtype {own}, expected {', '.join(map(str, _FLOATS[1:]))}. Pass a tensor of another dtype as an "
                "input of the function, or let it close over it; or say Policy(param=..., grad=..., moment=...), in "
                "which it is held."
            )
        compute = self.compute or autocast or param
        reduce = self.reduce or torch.promote_types(torch.float32, torch.promote_types(grad, compute))
        return dataclasses.replace(
            self, param=param, grad=grad, moment=self.moment or own, compute=compute, reduce=reduce
        )


@dataclass(frozen=True)
class ByPath:
    """Policies by patterns in order, of which the first match wins; made by `Policy.by_path`."""

    policies: tuple[tuple[str, Policy], ...]

    def of(self, path: str) -> Policy:
        return next((policy for pattern, policy in self.policies if matches(pattern, path)), Policy())
