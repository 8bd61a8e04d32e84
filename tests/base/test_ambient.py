"""Settings of torch's that operators look at: noted, set where they differ, and put back."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import torch

import fzero as fz
from fzero.base.ambient import ambient, within, without_fast_attention


def test_each_setting_is_noted_set_and_put_back() -> None:
    """In a process of its own, whose settings nobody else reads."""
    code = """
        import torch
        import torch.utils.deterministic
        from fzero.base.ambient import ambient, within

        first = ambient()
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_flush_denormal(True)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision("medium")
        torch.backends.mkldnn.enabled = torch.backends.cudnn.enabled = False
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = False
        torch._C._set_mkldnn_deterministic(True)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        second = ambient()
        assert all(a != b for a, b in zip(first, second, strict=True)), (first, second)
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # no word says what all are at, then
        third = ambient()
        for settings in (first, second, third):
            found = ambient()
            with within(settings):
                assert ambient() == settings
            assert ambient() == found == third
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True)


def test_what_is_the_same_is_not_touched() -> None:
    threads = torch.get_num_threads()
    with within(ambient()):
        torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads


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
