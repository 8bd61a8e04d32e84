"""Settings of torch's that operators look at."""

from __future__ import annotations

import torch

import fzero as fz
from fzero.base.ambient import without_fast_attention


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
