"""A fused update knows the norm of all gradients only where somebody needs it."""

from __future__ import annotations

import fzero as fz
from fzero.table.fusion import Fusion


def test_what_is_asked_for_is_taken_and_otherwise_what_is_needed() -> None:
    plain, clipped = fz.sgd(0.1), fz.chain(fz.clip_by_global_norm(1.0), fz.sgd(0.1))
    assert [Fusion().mode(plain, scaled) for scaled in (False, True)] == ["once", "twice"]
    assert Fusion().mode(clipped, False) in ("twice", "held")
    assert Fusion("8-bit").mode(plain, False) == "8-bit"
