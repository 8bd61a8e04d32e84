"""Dtypes and formats by leaf: what each kind of state is stored in, computed in and reduced in."""

from __future__ import annotations

import dataclasses
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
    "straight_through": (False, True),
}


@dataclass(frozen=True)
class Policy:
    """The dtypes of a leaf's state. `None` keeps the leaf's own dtype, so float64 stays float64.

    Args:
        param: dtype of the stored params.
        grad: dtype of the reduced grads.
        moment: dtype of the optimizer's moments.
        compute: dtype that the params are gathered and used in; `None` takes `autocast`'s dtype
            where that transform applies, otherwise the stored one.
        reduce: dtype that gradients are summed in, over uses, microbatches, ranks and `add_grads`; `None` takes
            float32, or float64 where `grad` or `compute` is. They travel between ranks in the wider of `grad` and
            `compute` where that is narrower.
        rounding: how an update is rounded to a stored bfloat16: "nearest"; "stochastic", up with the probability of
            the fraction, so that small updates are kept in the mean; "compensated", with what it leaves kept
            in `remainder`. Unless it is "nearest", bfloat16 moments are rounded stochastically.
        remainder: torch.int16, with which a compensated param is a float32 one bit for bit, or torch.int8 (24 bits).
        gather: "8-bit" lets params travel, and be computed with, as 8-bit integers with a scale for every 32 (1.06
            bytes); their gradients are those of the rounded values. None gathers the compute dtype.
        straight_through: what torch.func does through whole steps of a leaf whose states are encoded, rounded
            stochastically, or gathered in 8 bits: True takes the derivative of this rounding for one, as quantised
            training does (Bengio et al. 2013, 1308.3432), at the values that are rounded; False refuses. There the
            states hold float32 values, which take the memory of such, until `fz.convert(state, step)` encodes them.

    `moment` may also be "8-bit", both moments companded in groups of 32 with a shared exponent (2.1 bytes for the two
    of Adam), or "4-bit", the same with the first moment in 4 bits.

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
    straight_through: bool = False

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
        """Params, grads and moments in bfloat16, rounded to nearest: 6 bytes per parameter, and 2 for its grad.

        Example:
            >>> fz.Policy.bf16_states().moment
            torch.bfloat16
        """
        bf16 = torch.bfloat16
        return Policy(param=bf16, grad=bf16, moment=bf16, compute=bf16)

    @staticmethod
    def exact(moment: torch.dtype | str = "8-bit") -> Policy:
        """bfloat16 params whose int16 remainder makes them float32 masters bit for bit; computes and grads in bfloat16.

        4 bytes per parameter and its moments: 6.1 with "8-bit" ones, 12 with torch.float32.

        Example:
            >>> fz.Policy.exact().param_format.parts[1].dtype
            torch.int16
        """
        return dataclasses.replace(Policy.bf16_states(), moment=moment, rounding="compensated")

    @staticmethod
    def compact24(moment: torch.dtype | str = "8-bit") -> Policy:
        """24-bit params, a bfloat16 with an 8-bit correction, and 8-bit moments: 5.1 bytes per parameter.

        Example:
            >>> fz.Policy.compact24().moment
            '8-bit'
        """
        return dataclasses.replace(Policy.exact(moment), remainder=torch.int8)

    @staticmethod
    def compact16(moment: torch.dtype | str = "8-bit") -> Policy:
        """bfloat16 params, rounded stochastically, and 8-bit moments: 4.1 bytes per parameter; 3.6 with "4-bit".

        Example:
            >>> fz.Policy.compact16().rounding
            'stochastic'
        """
        return dataclasses.replace(Policy.bf16_states(), moment=moment, rounding="stochastic")

    @property
    def param_format(self) -> Format:
        """How params are stored, for a policy whose columns are filled in."""
        if self.rounding == "compensated":
            return Exact() if self.remainder == torch.int16 else Corrected()
        assert self.param is not None
        return Plain(self.param, self.rounding == "stochastic")

    def moment_format(self, signed: bool) -> Format:
        """How a moment is stored that may be negative, or never is."""
        if isinstance(self.moment, str):
            return Companded(signed, _WIDTHS[self.moment] if signed else 8)
        assert self.moment is not None
        return Plain(self.moment, self.rounding != "nearest" and self.moment == torch.bfloat16)

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which a full gradient travels to be summed: never wider than that of the sum."""
        assert self.grad and self.compute and self.reduce
        own = torch.promote_types(self.grad, self.compute)
        return own if own.itemsize < self.reduce.itemsize else self.reduce

    @property
    def computes_as_stored(self) -> bool:
        """True where a full buffer in compute dtype has the stored values."""
        return self.param_format.plain and self.compute == self.param and self.gather is None

    def used(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Params as they are computed with, of the parts that are stored, for a policy whose columns are filled in."""
        assert self.compute
        if self.gather is None:
            return decode(self.param_format, parts, self.compute)
        return self.gathered(decode(self.param_format, parts, torch.float32))

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Values as they are computed with, where they travel in 8 bits."""
        assert self.compute
        blocks = Blocks()
        return decode(blocks, encode(blocks, values), self.compute)

    @staticmethod
    def by_path(policies: Mapping[str, Policy]) -> ByPath:
        """A policy per pattern over leaf paths (fnmatch, alternatives separated by `|`); the first match wins.

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
        """Every column filled in for a leaf whose own dtype is `own`."""
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
        for pattern, policy in self.policies:
            if matches(pattern, path):
                return policy
        return Policy()
