"""How a fused update comes to know the norm of all gradients."""

from __future__ import annotations

from dataclasses import dataclass

from fzero.table.optimizer import GradientTransformation

NORMS = ("auto", "twice", "held", "8-bit")


@dataclass(frozen=True)
class Fusion:
    """How a fused update comes to know the norm of all gradients."""

    norm: str = "auto"

    def mode(self, optimizer: GradientTransformation, scaled: bool) -> str:
        """ "once" where nothing needs the norm.

        Args:
            scaled: whether the step has a loss scale, which skips what is not finite.
        """
        if self.norm != "auto":
            return self.norm
        if optimizer.needs == "all":
            return "held"
        return "twice" if optimizer.needs or scaled else "once"
