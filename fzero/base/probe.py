"""The names of torch's own that fzero stands on, looked up before any is used: they may go with any version."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

TESTED = ("2.11", "2.13", "2.15")  # that tests ran with: `make test-torch`

# by what has them; without those that torch loads late (its compilers, fake tensors), which name themselves
NAMES: Mapping[str, str] = {
    "torch.Tensor": "_backward_hooks _base _is_view _version",
    "torch._C": """
        DispatchKey.ADInplaceOrView DispatchKey.FuncTorchGradWrapper DispatchKeySet DisableTorchFunction
        DisableTorchFunctionSubclass _DisableTorchDispatch _ExcludeDispatchKeyGuard _SetExcludeDispatchKeyGuard
        _FunctionBase._register_hook_dict _FunctionBase._set_sequence_nr
        _InferenceMode _TorchDispatchModeKey.FAKE _TorchDispatchModeKey.PROXY
        _get_torch_function_state _set_grad_enabled _set_torch_function_state _current_autograd_node
        _current_graph_task_id _disabled_torch_dispatch_impl _dispatch_get_all_op_names
        _dispatch_has_kernel_for_dispatch_key _dispatch_keys _dispatch_keyset_full_after
        _dispatch_tls_set_dispatch_key_included _get_dispatch_mode _get_obj_in_tls _get_operation_overload
        _is_any_autocast_enabled _is_fwd_grad_enabled _is_key_in_tls _len_torch_dispatch_stack
        _len_torch_function_stack _parse_dispatch_key _stash_obj_in_tls _storage_Use_Count _set_fwd_grad_enabled
        _will_engine_execute_node""",
    "torch._C._autograd": """
        CreationMeta.MULTI_OUTPUT_NODE _get_creation_meta _get_current_graph_task_keep_graph _get_sequence_nr
        _saved_tensors_hooks_disable _saved_tensors_hooks_enable _saved_tensors_hooks_is_enabled
        _top_saved_tensors_default_hooks""",
    "torch._C._functorch": """
        CGradInterpreterPtr TransformType.Grad TransformType.Jvp get_interpreter_stack get_unwrapped is_batchedtensor
        is_functorch_wrapped_tensor maybe_current_level maybe_get_level peek_interpreter_stack pop_dynamic_layer_stack
        push_dynamic_layer_stack""",
    "torch._C._nn": "flatten_dense_tensors",
    "torch._C._distributed_c10d": "_set_thread_isolation_mode",
    "torch._ops": "OpOverload _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS _higher_order_ops",
    "torch.autograd": """
        graph._engine_run_backward _unsafe_preserve_version_counter forward_ad._current_level
        function._SingleLevelFunction""",
    "torch.distributed.distributed_c10d": "_register_process_group _unregister_process_group _world",
    "torch.ops.aten": """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward""",
    "torch.overrides": """
        _get_current_function_mode _get_current_function_mode_stack _pop_mode _pop_mode_temporarily _push_mode""",
    "torch.utils._python_dispatch": "_get_current_dispatch_mode_stack _pop_mode _push_mode",
}


def need(names: Mapping[str, str]) -> None:
    """Refuses a version of torch that has not all of these names, given as in `NAMES`."""
    every = [f"{place}.{name}" for place, listed in names.items() for name in listed.split()]
    missing = [name for name in every if not _is_there(name)]
    if missing:
        raise ImportError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which fzero needs. fzero is tested with torch "
            f"{', '.join(TESTED)}: install one of these, or a version between them, or a newer fzero."
        )


def _is_there(name: str) -> bool:
    try:
        functools.reduce(getattr, name.split(".")[1:], torch)
    except AttributeError:
        return False
    return True
