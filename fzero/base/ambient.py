"""Settings of torch's that operators look at beside their operands: what is recomputed runs in those it ran in.

They are the process's, most of them, so they are set only where they differ, and put back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.utils.deterministic

_C = torch._C
_LEAST = 5e-324  # which a thread that flushes denormal numbers takes for zero
_PRECISIONS = [(backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]


def _precision() -> object:
    """What float32 products are rounded to: one word, or one for each backend's operators where they were set so."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return tuple([_C._get_fp32_precision_getter(*each) for each in _PRECISIONS])  # type: ignore[attr-defined]


def _set_precision(value: object) -> None:
    if isinstance(value, str):
        torch.set_float32_matmul_precision(value)
    elif isinstance(value, tuple):
        for each, word in zip(_PRECISIONS, value, strict=True):
            _C._set_fp32_precision_setter(*each, word)  # type: ignore[attr-defined]


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _fills() -> bool:
    return bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory"))  # noqa: B009 - a property


def _set_fills(value: bool) -> None:
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", value)  # noqa: B010


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
)
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
            "cudnn_allow_tf32",
            *[name for name in LATER if hasattr(_C, f"_get_{name}") and hasattr(_C, f"_set_{name}")],
        )
    ],
    *[_reduced(f"cublas_allow_{name}_reduced_precision_reduction") for name in ("fp16", "bf16")],
    *[  # which attention scaled_dot_product_attention takes
        (getattr(torch.backends.cuda, f"{name}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{name}_sdp"))
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ],
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
    nowhere = _C.DisableTorchFunction  # type: ignore[attr-defined]

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
