"""The keys of DeepSpeed's configuration, version 0.19, as data: which there are, and which need no translation."""

from __future__ import annotations

from collections.abc import Mapping

ZERO = "zero_optimization"
_BUCKETS = "there are no buckets: a unit is gathered, and its gradients are reduced, as one"
_OVERLAP = "transfers run beside the computation"
_LAYOUT = "fzero lays leaves out by itself, in one buffer for each unit"
_SAVES = "saves are as they are called, and load on any number of ranks"
_PINNED = "memory that GPUs read is pinned"
_NO_CHOICE = "fzero has no such choice. Leave it out"
_DISK = "fz.Disk sizes its transfers"
_PLAN = "fz.plan(step, params, inputs=batch) tells it"
_NONE = "fzero has no such feature. Leave it out"
_GONE = f"DeepSpeed 0.19 has removed it, and {_NONE}"
_STALE = "it updates by stale gradients, which are other numbers. Leave it out"
_TENSOR = "write a plan for fz.shard_tensor"


def _by_key(blocks: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """{block: {why: keys}} as {path: why}."""
    return {
        f"{block}.{key}".lstrip("."): why
        for block, reasons in blocks.items()
        for why, keys in reasons.items()
        for key in keys.split()
    }


# accepted without effect on numbers beyond rounding: keys and whole blocks
HINTS = _by_key({
    ZERO: {
        _BUCKETS: "allgather_partitions allgather_bucket_size reduce_bucket_size use_multi_rank_bucket_allreduce "
        "reduce_scatter allgather_sequential use_all_reduce_for_fetch_params mics_hierarchical_params_gather",
        _OVERLAP: "overlap_comm prefetch_bucket_size offload_optimizer.pipeline_read offload_optimizer.pipeline_write",
        _LAYOUT: "contiguous_gradients round_robin_gradients parameter_alignment legacy_stage1 sub_group_size",
        "train_step(..., units=) says what is gathered together, and two units are alive at a time":
        "max_live_parameters max_reuse_distance module_granularity_threshold leaf_module",
        "every leaf is sharded; shard_zero3(step, pattern=) keeps some whole":
        "param_persistence_threshold model_persistence_threshold",
        _NO_CHOICE: "memory_efficient_linear log_trace_cache_warnings enable_sanity_checks compute_grad_norm "
        "override_module_apply save_muon_momentum_buffer_in_memory offload_optimizer.cpuadam_cores_perc",
        "a leaf that is not used has a gradient of zeros, with a warning": "ignore_unused_parameters",
        _SAVES: "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
        _PINNED: "cpu_offload_use_pin_memory offload_optimizer.pin_memory offload_param.pin_memory",
        _DISK: "offload_optimizer.buffer_count offload_optimizer.buffer_size offload_optimizer.fast_init "
        "offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu",
    },
    "bf16": {"gradients are summed as they come": "immediate_grad_update"},
    "torch_autocast": {"leaves of two or more dims travel in the dtype": "lower_precision_safe_modules"},
    "activation_checkpointing": {
        "each unit is one": "number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary profile",
    },
    "compile": {"a graph has no such choice": "free_activation free_activation_threshold double_buffer "
                "symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather "
                "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes autoep_non_moe",
                _PINNED: "offload_activation_pin_memory"},
    "checkpoint": {_SAVES: "tag_validation use_node_local_storage parallel_write writer"},
    "tensor_parallel": {
        "the plan of fz.shard_tensor says it": "preset_model partition_config.use_default_specs tp.tp_grain_size",
        _OVERLAP: "tp_overlap_comm",
        "your function and its params say it": "dtype vocab_parallel_ce_backend keep_module_on_host",
    },
    "pipeline": {
        "it is for DeepSpeed's own modules": "partition seed_layers activation_checkpoint_interval pipe_partitioned "
        "grad_partitioned",
    },
    "": {
        _BUCKETS: "allgather_size disable_allgather",
        _DISK: "aio",
        "fzero has all optimizers at all stages": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        _SAVES: "load_from_fp32_weights",
        "log metrics in the body of the loop": "wandb comet",
        _PLAN: "memory_breakdown flops_profiler comms_logger",
        "torch.profiler shows it": "wall_clock_breakdown timers",
        _NO_CHOICE: "dump_state log_level vocabulary_size disable_python_gc dataloader_drop_last "
        "optimizer.legacy_fusion",
        "DeepSpeed reads no such key": "comms_config monitor_config",
    },
})  # fmt: skip
# refused where they are enabled: keys and whole blocks
REFUSED = _by_key({
    ZERO: {
        _STALE: "offload_optimizer.super_offload zenflow",
        "frozen leaves are not stored in 8 bits. Leave it out": "zero_quantized_nontrainable_weights",
        "gradients do not travel in 8 bits. Leave it out": "zero_quantized_gradients zeropp_loco_param",
    },
    "checkpoint": {"give fz.compat.load_deepspeed the folder before it was converted": "load_universal"},
    "tensor_parallel": {
        _TENSOR: "vocab_parallel_lm_head injection_policy_tuple",
        _NONE: "kernel_inject replace_with_kernel_inject",
    },
    "": {
        "experts are not sharded yet (fz.shard_experts). Leave it out":
        "expert_parallel moe use_data_before_expert_parallelism",
        "DeepSpeed 0.19 has removed it. Set train_batch_size; saves load on any number of ranks": "elasticity",
        "fz.fits proposes a step that fits. Leave it out": "autotuning",
        _NONE: "hybrid_engine data_efficiency weight_quantization datastates",
        _GONE: "amp sparse_attention sparse_gradients curriculum_learning progressive_layer_drop compression_training "
        "quantize_training graph_harvesting eigenvalue nebula",
    },
})  # fmt: skip
# refused unless they have one of these values, which is what fzero does
ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "bf16.check_grad_overflow": ((True,), "an update that is not finite is always skipped. Leave it out"),
    "data_types.buffer_dtype": ((), "buffers are your function's. Convert them before fz.functional"),
    "data_types.keep_in_fp32_modules": (("auto", []), "write fz.Policy.by_path({'*norm*': fz.Policy(), '*': ...})"),
    "pipeline.stages": (("auto", 1), "make a step of each: fz.pipeline([step_a, step_b], fz.schedules.gpipe(2, 8))"),
    "optimizer.params.max_grad_norm": ((0,), "DeepSpeed refuses it too. Write gradient_clipping"),
    **{f"optimizer.params.{key}": ((True,), _NO_CHOICE) for key in ("bias_correction", "fp32_optimizer_states")},
    **{f"optimizer.params.{key}": ((False,), _NO_CHOICE) for key in ("eps_inside_sqrt", "per_head_muon")},
    **{f"optimizer.params.{key}": ((), _NO_CHOICE) for key in ("max_coeff", "min_coeff")},
    "scheduler.params.last_batch_iteration": ((-1,), "the state counts its updates. Leave it out"),
}
# read by the translation: block -> keys
_READ = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op communication_data_type "
    "seq_parallel_communication_data_type sequence_parallel_size data_parallel_size steps_per_print optimizer.type "
    "scheduler.type",
    "data_types": "grad_accum_dtype param_dtype",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale "
    "auto_cast fp16_master_weights_and_grads",
    "bf16": "enabled bf16_master_weights_and_grads bf16_optimizer_states",
    "torch_autocast": "enabled dtype",
    ZERO: "stage gather_16bit_weights_on_model_save zero_hpz_partition_size mics_shard_size zero_quantized_weights "
    "offload_optimizer.device offload_optimizer.nvme_path offload_optimizer.ratio offload_param.device "
    "offload_param.nvme_path",
    "tensor_parallel": "autotp_size tp.tp_size partition_config.layer_specs",
    "activation_checkpointing": "partition_activations cpu_checkpointing",
    "compile": "deepcompile offload_activation offload_opt_states offload_parameters",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
}  # fmt: skip
READ = [*_by_key({block: {"": keys} for block, keys in _READ.items()})]

# other names: deprecated ones, and those with a prefix
_PREFIXED = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential"
)
ALIASES = {f"{ZERO}.stage3_{key}": f"{ZERO}.{key}" for key in _PREFIXED.split()} | {
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": f"{ZERO}.gather_16bit_weights_on_model_save",
    "bfloat16": "bf16",
}
OFFLOADS = {f"{ZERO}.cpu_offload": "offload_optimizer", f"{ZERO}.cpu_offload_param": "offload_param"}  # booleans

_ADAM: dict[str, object] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_CHOICES: dict[str, object] = {"adam_w_mode": True, "torch_adam": False}
_ANY = dict.fromkeys(("set_grad_none", "foreach", "fused", "capturable"))
# DeepSpeed's optimizers by their names in lower case: what they take, and their defaults
OPTIMIZERS: dict[str, dict[str, object]] = {
    **{name: {**_ADAM, **_CHOICES, "amsgrad": False, **_ANY} for name in ("adam", "adamw")},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0, **_ANY},
    "lamb": {**_ADAM, "amsgrad": False},
    "muon": {**_ADAM, "lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-10, **_CHOICES, "muon_lr": None, "adam_lr": None,
             "momentum": 0.95, "ns_method": "gram"},
}  # fmt: skip
OTHERS = ("onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd")  # which fzero does not have
