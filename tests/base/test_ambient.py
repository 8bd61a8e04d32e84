"""Settings of torch's that operators look at: noted, set where they differ, and put back."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import torch

from fzero.base.ambient import ambient, within


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
