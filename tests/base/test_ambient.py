"""Settings of torch's that operators look at: put back where a unit runs again."""

from __future__ import annotations

from typing import Any

import torch

import fzero as fz
from fzero.base.ambient import without_fast_attention


def test_attention_that_runs_again_is_the_one_that_ran() -> None:
    """Under another `sdpa_kernel` around the unit's call than around the pullback, which finds its own again."""
    kernels = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    params = {"blocks": [{"w": torch.linspace(-0.5, 0.5, 1024).view(32, 32).sin()}]}
    x, seen = torch.linspace(-2, 2, 1024).view(1, 2, 16, 32), list[bool]()

    @fz.unit
    def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        q = x @ p["w"]
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return torch.nn.functional.scaled_dot_product_attention(q, q * 3, q)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(kernels[0]):
            return block(p["blocks"][0], x).square().sum()

    found = []
    for transform in (lambda step: step, fz.remat):
        step = transform(fz.train_step(loss, fz.sgd(0.1)))
        pull = step.vjp(step.init(params), x)[1]
        with torch.nn.attention.sdpa_kernel(kernels[1]):
            found.append(fz.gather(pull(torch.ones(()))[0])["blocks"][0]["w"])
            assert torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
    assert torch.equal(*found)
    assert not any(seen)


def test_one_call_has_one_value_with_padded_attention() -> None:
    """torch takes a faster way without gradients, whose padded places are zeros, where nobody looks at functions."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, padded = torch.randn(3, 4, 8, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.bool)
    padded[0, 3] = True
    apply, params = fz.functional(encoder)
    step = fz.train_step(lambda p, x: apply(p, x, src_key_padding_mask=padded), fz.sgd(0.1))
    state = step.init(params)
    right = step.vjp(state, x)[0]
    assert right[0, 3].abs().max() > 0
    for _ in range(3):
        torch.testing.assert_close(step.forward(state, x), right)
    assert torch.backends.mha.get_fastpath_enabled()


def test_fast_attention_comes_back_with_the_last_thread() -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    first, second = without_fast_attention(), without_fast_attention()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with without_fast_attention():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
