"""Settings of torch's that operators look at: noted, set where they differ, and put back."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import textwrap

import pytest
import torch
from processes import run_forked

import fzero as fz
from fzero.base import ambient as module
from fzero.base.ambient import ambient, within, without_fast_attention


def test_each_setting_is_noted_set_and_put_back() -> None:
    """In a process of its own, whose settings nobody else reads."""
    code = """
        import contextlib
        import torch
        import torch.utils.deterministic
        from fzero.base.ambient import ATTENTIONS, LATER, ambient, within

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
        as_they_were = 0  # what another machine, or a library that is not there, would set
        for name in LATER:
            if hasattr(torch._C, f"_get_{name}") and hasattr(torch._C, f"_set_{name}"):
                own = getattr(torch._C, f"_get_{name}")()
                others = {bool: not own, str: "native", list: [3, 2, 1, 0, 4]}  # of libraries a CPU has one
                with contextlib.suppress(RuntimeError):
                    getattr(torch._C, f"_set_{name}")(others.get(type(own), own))
                as_they_were += getattr(torch._C, f"_get_{name}")() == own
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        for name in ATTENTIONS:
            own = getattr(torch._C, name)()
            getattr(torch._C, name.replace("_get_", "_set_sdp_use_").replace("_sdp_enabled", ""))(not own)
        second = ambient()
        assert sum(a == b for a, b in zip(first, second, strict=True)) == as_they_were, (first, second)
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # no word says what all are at, then
        noted = [first, second, ambient()]
        for backend in ("mkldnn", "cudnn"):  # of one kind of operators only: no word says it
            getattr(torch.backends, backend).conv.fp32_precision = "tf32"
            getattr(torch.backends, backend).rnn.fp32_precision = "ieee"
            noted.append(ambient())
            assert noted[-1] not in noted[:-1]
        torch.backends.fp32_precision = "ieee"
        for settings in [*noted, ambient()]:
            found = ambient()
            with within(settings):
                assert ambient() == settings, (ambient(), settings)
            assert ambient() == found
    """
    done = run_forked("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


def test_attention_that_runs_again_rounds_as_it_did() -> None:
    x = torch.linspace(-2, 2, 1024).view(1, 2, 16, 32).bfloat16()
    params = {"blocks": [{"w": torch.linspace(-0.5, 0.5, 1024).view(32, 32).sin().bfloat16()}]}

    @fz.unit
    def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        q = x @ p["w"]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, q * 3, q)

    step = fz.train_step(lambda p, x: block(p["blocks"][0], x).float().square().sum(), fz.sgd(0.1))
    rounds, found = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, list[torch.Tensor]()
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    try:
        for each, forward, pulled in ((step, True, True), (fz.remat(step), True, False), (step, False, False)):
            rounds(forward)
            pull = each.vjp(each.init(params), x)[1]
            rounds(pulled)
            found.append(fz.gather(pull(torch.ones(()))[0])["blocks"][0]["w"])
    finally:
        rounds(before)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


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


# ---- settings of torch's that are none of those, and why

FOUND = "found by itself, with an operation or a call"
OTHERS = "of what fzero neither notes nor runs again"
NO_NUMBER = "changes no number"
LEFT = {
    **dict.fromkeys(("float32_matmul_precision", "cublas_allow_tf32", "onednn_allow_tf32"), "one of the precisions"),
    **dict.fromkeys(("deterministic_algorithms", "deterministic_fill_uninitialized_memory"), "noted by public names"),
    **dict.fromkeys(("default_dtype", "grad_enabled", "autocast_dtype", "autocast_enabled", "dispatch_mode"), FOUND),
    **dict.fromkeys(
        ("autocast_cpu_dtype", "autocast_gpu_dtype", "autocast_cpu_enabled", "torch_function_state"), FOUND
    ),
    **dict.fromkeys(
        ("autocast_ipu_dtype", "autocast_ipu_enabled", "autocast_xla_dtype", "autocast_xla_enabled"), FOUND
    ),
    **dict.fromkeys(("qengine", "graph_executor_optimize", "graph_exec_group", "tracing_state", "value_trace"), OTHERS),
    **dict.fromkeys(("dtensor_allow_implicit_replication", "tensor_metadata", "fwd_grad_enabled"), OTHERS),
    **dict.fromkeys(("autocast_cache_enabled", "anomaly_enabled", "warnAlways", "thread_name"), NO_NUMBER),
    **dict.fromkeys(("backcompat_broadcast_warn", "backcompat_keepdim_warn", "autograd_fallback_mode"), NO_NUMBER),
    **dict.fromkeys(("multithreading_enabled", "view_replay_enabled", "grad_layout_enforcement_enabled"), NO_NUMBER),
    **dict.fromkeys(("sm_carveout_experimental", "num_interop_threads"), NO_NUMBER),
    **{"cudnn.benchmark_limit": "of a search by time", "vital": NO_NUMBER, "fake_constant": "a tensor's"},
    # public ones beside them
    **{"default_device": "a function mode, which is found", "default_tensor_type": "that of dtypes and devices"},
    **{
        "deterministic_debug_mode": "that of deterministic algorithms",
        "flush_denormal": "noted",
        "printoptions": NO_NUMBER,
    },
    **{"rng_state": "generators are noted", "warn_always": NO_NUMBER, "num_threads": "noted"},
    # of torch.backends, beside those of the same names
    **{"cudnn.fp32_precision": "one of the precisions", "mkldnn.fp32_precision": "one of the precisions"},
    **{"mkldnn.allow_tf32": "one of the precisions", "cudnn.allow_tf32": "noted", "miopen.immediate": "noted"},
}


def _settings() -> set[str]:
    """All that torch can read and set, by name: private ones, public ones, and those of its backends."""
    private = {name for name in dir(torch._C) if name.startswith(("_get_", "_is_", "get_", "is_"))}
    found = {name.removeprefix("_").partition("_")[2] for name in private}
    found = {name for name in found if hasattr(torch._C, f"_set_{name}") or hasattr(torch._C, f"set_{name}")}
    found |= {name.removeprefix("set_") for name in dir(torch) if name.startswith("set_")}
    for each in pkgutil.iter_modules(torch.backends.__path__):
        kind = type(importlib.import_module(f"torch.backends.{each.name}"))
        for name in (name for name, own in vars(kind).items() if isinstance(own, torch.backends.ContextProp)):
            known = f"{each.name}_{name}" in found | {f"{each.name}_{name}"} & set(NOTED)
            found |= set() if known else {f"{each.name}.{name}"}
    return found


NOTED = {
    *("mkldnn_enabled", "mkldnn_deterministic", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
    *("cudnn_allow_tf32", "cublas_allow_fp16_reduced_precision_reduction"),
    *("cublas_allow_bf16_reduced_precision_reduction", *module.LATER),
}


@pytest.mark.filterwarnings("ignore")
def test_there_is_no_setting_that_nobody_has_looked_at() -> None:
    """A version of torch may have new ones: note those that operators look at, and say of the others why not."""
    assert _settings() - NOTED - set(LEFT) == set()
    assert not NOTED & set(LEFT)


def test_all_that_is_noted_is_in_the_list() -> None:
    text = inspect.getsource(module)
    assert all(name in text for name in NOTED - {name for name in NOTED if name.startswith("cublas_allow")})
