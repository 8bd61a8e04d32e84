"""The keys of DeepSpeed's configuration, version 0.19, as data: which there are, and which need no translation."""

from __future__ import annotations

ZERO = "zero_optimization"
_BUCKETS = "there are no buckets: a unit is gathered, and its gradients are reduced, as one"
_OVERLAP = "transfers run beside the computation"
_LAYOUT = "fzero lays leaves out by itself, in one buffer for each unit"
_SAVES = "saves are as they are called, and load on any number of ranks"
_PINNED = "memory that GPUs read is pinned"
_NO_CHOICE = "fzero has no such choice. Leave it out"
_DISK = "fz.Disk sizes its transfers"
_NONE = "fzero has no such feature. Leave it out"


def _paths(*blocks: tuple[str, str, str]) -> dict[str, str]:
    """(block, its keys, why) each: {path: why}."""
    return {f"{block}.{key}".lstrip("."): why for block, keys, why in blocks for key in keys.split()}


# accepted without effect on numbers beyond rounding: keys and whole blocks
HINTS = _paths(
    (ZERO, "allgather_partitions allgather_bucket_size reduce_bucket_size reduce_scatter "
     "use_multi_rank_bucket_allreduce stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params "
     "mics_hierarchical_params_gather", _BUCKETS),
    (ZERO, "overlap_comm stage3_prefetch_bucket_size offload_optimizer.pipeline_read offload_optimizer.pipeline_write",
     _OVERLAP),
    (ZERO, "contiguous_gradients round_robin_gradients parameter_alignment legacy_stage1 sub_group_size", _LAYOUT),
    (ZERO, "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold leaf_module",
     "train_step(..., units=) says what is gathered together, and two units are alive at a time"),
    (ZERO, "stage3_param_persistence_threshold stage3_model_persistence_threshold",
     "every leaf is sharded; shard_zero3(step, pattern=) keeps some whole"),
    (ZERO, "memory_efficient_linear log_trace_cache_warnings enable_sanity_checks compute_grad_norm "
     "override_module_apply save_muon_momentum_buffer_in_memory offload_optimizer.cpuadam_cores_perc", _NO_CHOICE),
    (ZERO, "ignore_unused_parameters", "a leaf that is not used has a gradient of zeros, with a warning"),
    (ZERO, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", _SAVES),
    (ZERO, "cpu_offload_use_pin_memory offload_optimizer.pin_memory offload_param.pin_memory", _PINNED),
    (ZERO, "offload_optimizer.buffer_count offload_optimizer.buffer_size offload_optimizer.fast_init "
     "offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu", _DISK),
    (ZERO, "offload_optimizer.ratio", "all is offloaded: fz.offload(step, ..., pattern=) takes a part"),
    ("bf16", "immediate_grad_update", "gradients are summed as they come"),
    ("torch_autocast", "lower_precision_safe_modules", "leaves of two or more dims travel in the dtype"),
    ("activation_checkpointing", "number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary "
     "profile", "each unit is one"),
    ("compile", "free_activation free_activation_threshold double_buffer symmetric_memory debug_log sync_before_reduce "
     "sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors "
     "passes autoep_non_moe offload_activation_pin_memory", "a graph has no such choice"),
    ("checkpoint", "tag_validation use_node_local_storage parallel_write writer", _SAVES),
    ("tensor_parallel", "preset_model partition_config.use_default_specs tp.tp_grain_size",
     "the plan of fz.shard_tensor says it"),
    ("tensor_parallel", "tp_overlap_comm", _OVERLAP),
    ("tensor_parallel", "dtype vocab_parallel_ce_backend keep_module_on_host", "your function and its params say it"),
    ("pipeline", "partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
     "it is for DeepSpeed's own modules"),
    ("", "allgather_size disable_allgather", _BUCKETS),
    ("", "aio", _DISK),
    ("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "fzero has all optimizers at all stages"),
    ("", "load_from_fp32_weights", _SAVES),
    ("", "wandb comet", "log metrics in the body of the loop"),
    ("", "memory_breakdown flops_profiler comms_logger wall_clock_breakdown timers dump_state",
     "fz.plan(step, params, inputs=batch) tells it, or torch.profiler"),
    ("", "log_level vocabulary_size disable_python_gc dataloader_drop_last optimizer.legacy_fusion", _NO_CHOICE),
    ("", "comms_config monitor_config", "DeepSpeed reads no such key"),
)  # fmt: skip
# refused where they are enabled: keys and whole blocks
REFUSED = _paths(
    (ZERO, "offload_optimizer.super_offload zenflow", "stale gradients make other numbers. Leave it out"),
    (ZERO, "zero_quantized_nontrainable_weights", "frozen leaves are not stored in 8 bits. Leave it out"),
    (ZERO, "zero_quantized_gradients zeropp_loco_param", "gradients do not travel in 8 bits. Leave it out"),
    ("checkpoint", "load_universal", "give fz.compat.load_deepspeed the folder before it was converted"),
    ("tensor_parallel", "vocab_parallel_lm_head injection_policy_tuple", "write a plan for fz.shard_tensor"),
    ("tensor_parallel", "kernel_inject replace_with_kernel_inject", _NONE),
    ("compile", "offload_activation offload_opt_states offload_parameters", "graphs do not offload. Leave it out"),
    ("", "expert_parallel moe use_data_before_expert_parallelism",
     "experts are not sharded yet (fz.shard_experts). Leave it out"),
    ("", "elasticity", "DeepSpeed 0.19 has removed it. Set train_batch_size; saves load on any number of ranks"),
    ("", "autotuning", "fz.fits proposes a step that fits. Leave it out"),
    ("", "hybrid_engine data_efficiency weight_quantization datastates", _NONE),
    ("", "amp sparse_attention sparse_gradients curriculum_learning progressive_layer_drop compression_training "
     "quantize_training graph_harvesting eigenvalue nebula", f"DeepSpeed 0.19 has removed it, and {_NONE}"),
)  # fmt: skip
# refused unless they have one of these values, which is what fzero does
ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "bf16.check_grad_overflow": ((True,), "an update that is not finite is always skipped. Leave it out"),
    "data_types.buffer_dtype": ((), "buffers are your function's. Convert them before fz.functional"),
    "data_types.param_dtype": ((), "fp16 and bf16 say it. Leave it out"),
    "data_types.keep_in_fp32_modules": (("auto", []), "write fz.Policy.by_path({'*norm*': fz.Policy(), '*': ...})"),
    "tensor_parallel.tp.tp_size": ((1,), "it is for inference. Write tensor_parallel.autotp_size"),
    "pipeline.stages": (("auto", 1), "make a step of each: fz.pipeline([step_a, step_b], fz.schedules.gpipe(2, 8))"),
    "optimizer.params.max_grad_norm": ((0,), "DeepSpeed refuses it too. Write gradient_clipping"),
    **{f"optimizer.params.{key}": ((True,), _NO_CHOICE) for key in ("bias_correction", "fp32_optimizer_states")},
    **{f"optimizer.params.{key}": ((False,), _NO_CHOICE) for key in ("eps_inside_sqrt", "per_head_muon")},
    **{f"optimizer.params.{key}": ((), _NO_CHOICE) for key in ("max_coeff", "min_coeff")},
    "scheduler.params.last_batch_iteration": ((-1,), "the state counts its updates. Leave it out"),
}
# read by the translation, and what they become unless that says more
READ = _paths(
    ("", "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
     "optimizer.type scheduler.type", "fz.accumulate, or the optimizer"),
    ("", "gradient_clipping", "nothing is clipped"),
    ("", "gradient_allreduce_op prescale_gradients gradient_predivide_factor", "the mean over ranks, or the sum"),
    ("", "communication_data_type seq_parallel_communication_data_type",
     "fz.Policy: gradients travel in it, or as they are kept where that is wider"),
    ("", "sequence_parallel_size data_parallel_size",
     "the mesh: fn runs fz.parallel.ulysses over its axis 'sp', and gradients are means over all ranks"),
    ("", "steps_per_print", "fz.loop(..., every=)"),
    ("data_types", "grad_accum_dtype", "fz.Policy: gradients are summed in it"),
    ("fp16", "enabled fp16_master_weights_and_grads", "fz.Policy"),
    ("fp16", "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
     "fz.loss_scale"),
    ("fp16", "auto_cast", "fz.compat.cast_inputs"),
    ("bf16", "enabled bf16_master_weights_and_grads bf16_optimizer_states", "fz.Policy"),
    ("torch_autocast", "enabled dtype", "fz.autocast"),
    (ZERO, "stage", "fz.shard_zero1 reduces over ranks. In 16 bits DeepSpeed's Adam counts one update more than here"),
    (ZERO, "stage3_gather_16bit_weights_on_model_save", "fz.save_safetensors(folder, state, dtype=torch.bfloat16)"),
    (ZERO, "zero_hpz_partition_size", "there is one partition of the params"),
    (ZERO, "mics_shard_size", "fz.shard_zero3(..., replicate=); DeepSpeed 0.19 has removed it"),
    (ZERO, "zero_quantized_weights", "fz.Policy(gather='8-bit')"),
    (ZERO, "offload_optimizer.device offload_param.device", "fz.offload"),
    (ZERO, "offload_optimizer.nvme_path offload_param.nvme_path", "fz.Disk, where the device is nvme"),
    ("tensor_parallel", "autotp_size partition_config.layer_specs", "fz.shard_tensor"),
    ("activation_checkpointing", "partition_activations cpu_checkpointing", "fz.remat; on the CPU by fz.offload"),
    ("compile", "deepcompile", "fz.jit"),
    ("tensorboard", "enabled output_path job_name", "fz.loop(..., tensorboard=)"),
    ("csv_monitor", "enabled output_path job_name", "fz.loop(..., log=)"),
)  # fmt: skip

# other names: without a prefix, and deprecated ones
ALIASES = {path.replace("stage3_", ""): path for path in (*HINTS, *READ) if "stage3_" in path}
ALIASES |= {f"{ZERO}.{way}gather_fp16_weights_on_model_save": f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
            for way in ("", "stage3_")} | {"bfloat16": "bf16"}  # fmt: skip
OFFLOADS = {f"{ZERO}.cpu_offload": "offload_optimizer", f"{ZERO}.cpu_offload_param": "offload_param"}  # booleans

_LAMB: dict[str, object] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
_ADAM = {**_LAMB, "adam_w_mode": True, "torch_adam": False}
_ANY = dict.fromkeys(("set_grad_none", "foreach", "fused", "capturable"))
# DeepSpeed's optimizers by their names in lower case: what they take, and their defaults
OPTIMIZERS: dict[str, dict[str, object]] = {
    **{name: {**_ADAM, **_ANY} for name in ("adam", "adamw")},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0, **_ANY},
    "lamb": _LAMB,
    "muon": {**_ADAM, "lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-10, "muon_lr": None, "adam_lr": None,
             "momentum": 0.95, "ns_method": "gram"},
}  # fmt: skip
OTHERS = ("onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd")  # which fzero does not have
