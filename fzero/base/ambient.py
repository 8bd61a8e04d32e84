"""Settings of torch's that operators look at beside their operands: what is recomputed runs in those it ran in.

They are the process's, most of them, so they are set only where they differ, and put back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.utils.deterministic

_C = torch._C
_LEAST = 5e-324  # which a thread that flushes denormal numbers takes for zero
# what float32 products are rounded to, and what says so of several: each overrules those before it
_PRECISIONS = [
    ("generic", "all"),
    *[(backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")],
]


def _older(read: Callable[[], object]) -> object:
    """What an older way to say it reads; None where by the newer one operators differ, so that no word says it."""
    try:
        return read()
    except RuntimeError:
        return None


def _precision() -> tuple[object, ...]:
    older = (_older(torch.get_float32_matmul_precision), _older(_C._get_cudnn_allow_tf32))
    return *older, *[_C._get_fp32_precision_getter(*each) for each in _PRECISIONS]  # type: ignore[attr-defined]


def _set_precision(value: tuple[object, ...]) -> None:
    word, tf32, *precisions = value
    now = _precision()
    if word != now[0] and isinstance(word, str):
        torch.set_float32_matmul_precision(word)
    if tf32 != now[1] and isinstance(tf32, bool):
        _C._set_cudnn_allow_tf32(tf32)
    for each, own in zip(_PRECISIONS, precisions, strict=True):
        if own != _C._get_fp32_precision_getter(*each):  # type: ignore[attr-defined]
            _C._set_fp32_precision_setter(*each, own)  # type: ignore[attr-defined]


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _fills() -> bool:
    return bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory"))  # noqa: B009 - a property


def _set_fills(value: bool) -> None:
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", value)  # noqa: B010


def _einsum() -> str | None:
    """How opt_einsum orders the products of more than two tensors; None: as they stand."""
    return torch.backends.opt_einsum.strategy if torch.backends.opt_einsum.enabled else None


def _set_einsum(value: str | None) -> None:
    torch.backends.opt_einsum.set_flags(value is not None, value)


def _reduced(name: str) -> tuple[Callable[[], object], Callable[..., object]]:
    """Whether sums of products in half precision may be rounded on their way."""
    get, set_ = getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")
    return get, lambda value: set_(*value) if isinstance(value, tuple) else set_(value)


# those that not every version of torch has, by the names of what reads and sets them; a test looks for more
LATER = (
    *("nnpack_enabled", "miopen_immediate", "cudnn_depthwise_kernel"),
    *("blas_preferred_backend", "linalg_preferred_backend"),
    *("cpu_allow_fp16_reduced_precision_reduction", "cublas_allow_fp16_accumulation", "cublaslt_prefer_grouped_gemm"),
    *("native_aot_enabled", "native_aot_unconditional_masked"),
    # whether the attention that is made of products rounds between them, on a CPU too; which one is asked first
    *("math_sdp_allow_fp16_bf16_reduction", "sdp_priority_order", "rocm_fa_preferred_backend"),
)
ATTENTIONS = [name for name in dir(_C) if name.startswith("_get_") and name.endswith("_sdp_enabled")]
_SETTINGS: list[tuple[Callable[[], object], Callable[..., object]]] = [
    (torch.get_num_threads, torch.set_num_threads),  # which sums are cut by
    (lambda: _LEAST * 1.0 == 0.0, torch.set_flush_denormal),
    (_deterministic, _set_deterministic),
    (_fills, _set_fills),
    (_precision, _set_precision),
    *[
        (getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}"))
        for name in (
            *("mkldnn_enabled", "mkldnn_deterministic", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
            *[name for name in LATER if hasattr(_C, f"_get_{name}") and hasattr(_C, f"_set_{name}")],
        )
    ],
    *[_reduced(f"cublas_allow_{name}_reduced_precision_reduction") for name in ("fp16", "bf16")],
    *[  # which attention scaled_dot_product_attention takes
        (getattr(_C, name), getattr(_C, f"_set_sdp_use_{name.removeprefix('_get_').removesuffix('_sdp_enabled')}"))
        for name in ATTENTIONS
    ],
    *[(_einsum, _set_einsum) for _ in range(torch.backends.opt_einsum.is_available())],
]


def ambient() -> list[object]:
    """The settings, as they are here and now; `within` takes them."""
    return [read() for read, _ in _SETTINGS]


@contextlib.contextmanager
def within(settings: Sequence[object]) -> Iterator[None]:
    """Inside, the settings are those that `ambient` has noted."""
    found = ambient()
    if found == settings:
        yield
        return
    changed = [i for i, value in enumerate(found) if value != settings[i]]
    try:
        for i in changed:
            _SETTINGS[i][1](settings[i])
        yield
    finally:
        for i in reversed(changed):
            _SETTINGS[i][1](found[i])


class default_dtype:
    """Inside, this is the default dtype. It is the process's, so it is set only where it differs, and put back."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._before != self._dtype:
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        if self._before != self._dtype:
            torch.set_default_dtype(self._before)


class functions_seen:
    """Inside, classes of tensors and function modes see the functions that are called as they did where it was noted.

    Args:
        state: `functions_seen.now()`, there and then. It is the thread's.
    """

    now = staticmethod(_C._get_torch_function_state)  # type: ignore[attr-defined]
    nowhere = staticmethod(_C.DisableTorchFunction)  # type: ignore[attr-defined]

    def __init__(self, state: object) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._before = self.now()
        if self._before != self._state:
            _C._set_torch_function_state(self._state)  # type: ignore[attr-defined]

    def __exit__(self, *error: object) -> None:
        if self._before != self._state:
            _C._set_torch_function_state(self._before)  # type: ignore[attr-defined]


_attention = threading.Lock()
_slow: set[object] = set()  # of threads that are inside


@contextlib.contextmanager
def without_fast_attention() -> Iterator[None]:
    """Inside, `nn.MultiheadAttention` and the layers made of it compute as they do for a gradient.

    Without one torch takes another way, which puts zeros in padded places, unless somebody looks at the functions that
    it calls: one call would have two values.
    """
    fast, own = torch.backends.mha, object()
    with _attention:
        if not _slow and not fast.get_fastpath_enabled():
            own = None
        else:
            _slow.add(own)
            fast.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _attention:
            if own in _slow:
                _slow.discard(own)
                if not _slow:
                    fast.set_fastpath_enabled(True)


def forward_derivatives() -> AbstractContextManager[object]:
    """Inside, torch.autograd.forward_ad pushes tangents through operations, as it does where nobody turned that off."""
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)
