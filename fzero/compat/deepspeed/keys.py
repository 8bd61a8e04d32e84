"""The keys of DeepSpeed's configuration, version 0.19, as data: what each may be, by its dotted path."""

from __future__ import annotations

BUCKETS = "fzero has no such buckets: a unit is gathered, and its gradients are reduced, as one"
OVERLAP = "transfers always run beside the computation"
LAYOUT = "fzero lays leaves out by itself, in one buffer for each unit"
LOADER = "your own loader makes the batches"
TELLS = "fz.plan(step, params, inputs=batch) says it"
SAVES = "fz.save and fz.Checkpoints write as they are called"
OWN_IO = "fz.Disk sizes its own transfers"

# accepted, without effect on numbers beyond rounding: a key or a whole block, and why
HINTS = {
    "zero_optimization.allgather_partitions": BUCKETS,
    "zero_optimization.allgather_bucket_size": BUCKETS,
    "zero_optimization.reduce_bucket_size": BUCKETS,
    "zero_optimization.use_multi_rank_bucket_allreduce": BUCKETS,
    "zero_optimization.reduce_scatter": "gradients are always reduced to the slices that a rank keeps",
    "zero_optimization.overlap_comm": OVERLAP,
    "zero_optimization.contiguous_gradients": LAYOUT,
    "zero_optimization.round_robin_gradients": LAYOUT,
    "zero_optimization.parameter_alignment": LAYOUT,
    "zero_optimization.legacy_stage1": LAYOUT,
    "zero_optimization.sub_group_size": "updates go unit by unit",
    "zero_optimization.prefetch_bucket_size": "the next unit is gathered while one computes",
    "zero_optimization.max_live_parameters": "two units are alive at a time",
    "zero_optimization.max_reuse_distance": "a unit is freed behind each use",
    "zero_optimization.param_persistence_threshold": "every leaf is sharded; shard_zero3(step, pattern=) keeps some whole",
    "zero_optimization.model_persistence_threshold": "every leaf is sharded",
    "zero_optimization.module_granularity_threshold": "train_step(..., units=) says what is gathered together",
    "zero_optimization.leaf_module": "train_step(..., units=) says what is gathered together",
    "zero_optimization.allgather_sequential": BUCKETS,
    "zero_optimization.use_all_reduce_for_fetch_params": BUCKETS,
    "zero_optimization.memory_efficient_linear": "pullbacks keep no gathered weight",
    "zero_optimization.log_trace_cache_warnings": "there is no trace cache",
    "zero_optimization.enable_sanity_checks": "fz.testing.checked_collectives() checks what ranks send",
    "zero_optimization.compute_grad_norm": 'metrics["grad_norm"] is there, whether it is read or not',
    "zero_optimization.ignore_unused_parameters": "a leaf that is not used has a gradient of zeros, with a warning",
    "zero_optimization.override_module_apply": "fz.functional works on a copy of the module",
    "zero_optimization.load_from_fp32_weights": "fz.compat.load_deepspeed reads the masters",
    "zero_optimization.elastic_checkpoint": "checkpoints load on any number of ranks",
    "zero_optimization.pipeline_loading_checkpoint": SAVES,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "moments lie where fz.offload puts them",
    "zero_optimization.cpu_offload_use_pin_memory": "memory that GPUs are sent from is always pinned",
    "zero_optimization.mics_hierarchical_params_gather": BUCKETS,
    "zero_optimization.offload_optimizer.pin_memory": "memory that GPUs are sent from is always pinned",
    "zero_optimization.offload_optimizer.buffer_count": OWN_IO,
    "zero_optimization.offload_optimizer.buffer_size": OWN_IO,
    "zero_optimization.offload_optimizer.pipeline_read": OVERLAP,
    "zero_optimization.offload_optimizer.pipeline_write": OVERLAP,
    "zero_optimization.offload_optimizer.fast_init": OWN_IO,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "torch.set_num_threads says it",
    "zero_optimization.offload_param.pin_memory": "memory that GPUs are sent from is always pinned",
    "zero_optimization.offload_param.buffer_count": OWN_IO,
    "zero_optimization.offload_param.buffer_size": OWN_IO,
    "zero_optimization.offload_param.max_in_cpu": OWN_IO,
    "aio": OWN_IO,
    "allgather_size": BUCKETS,
    "disable_allgather": BUCKETS,
    "bf16.immediate_grad_update": "gradients are summed as they come",
    "torch_autocast.lower_precision_safe_modules": "leaves with two or more dims travel in the dtype of autocast",
    "optimizer.legacy_fusion": "updates are fused",
    "zero_allow_untested_optimizer": "every optimizer of fzero is tested with every stage",
    "zero_force_ds_cpu_optimizer": "updates of offloaded leaves run on the CPU",
    "load_from_fp32_weights": "fz.compat.load_deepspeed reads the masters",
    "activation_checkpointing.contiguous_memory_optimization": LAYOUT,
    "activation_checkpointing.number_checkpoints": "each unit is one",
    "activation_checkpointing.synchronize_checkpoint_boundary": OVERLAP,
    "activation_checkpointing.profile": TELLS,
    "checkpoint.tag_validation": "a save checks that ranks agree",
    "checkpoint.use_node_local_storage": SAVES,
    "checkpoint.parallel_write": SAVES,
    "checkpoint.writer": SAVES,
    "tensor_parallel.dtype": "the precision says it",
    "tensor_parallel.preset_model": "the model's own tp_plan says it",
    "tensor_parallel.tp_overlap_comm": OVERLAP,
    "tensor_parallel.tp.tp_grain_size": "pieces may be uneven",
    "tensor_parallel.vocab_parallel_ce_backend": "your function computes the loss",
    "tensor_parallel.keep_module_on_host": "step.init takes leaves that are functions, unit by unit",
    "wandb": "call wandb.log in the loop's body",
    "comet": "call experiment.log_metrics in the loop's body",
    "wall_clock_breakdown": "torch.profiler shows it",
    "memory_breakdown": TELLS,
    "flops_profiler": TELLS,
    "comms_logger": TELLS,
    "timers": "torch.profiler shows it",
    "dump_state": "print(made) shows it",
    "log_level": "fzero logs nothing",
    "vocabulary_size": "it is the model's",
    "dataloader_drop_last": LOADER,
    "disable_python_gc": "gc.disable() does it",
    "comms_config": "DeepSpeed reads no such key",
    "monitor_config": "DeepSpeed reads no such key",
    "pipeline.partition": "it is read by DeepSpeed's PipelineModule alone",
    "pipeline.seed_layers": "it is read by DeepSpeed's PipelineModule alone",
    "pipeline.activation_checkpoint_interval": "it is read by DeepSpeed's PipelineModule alone",
    "pipeline.pipe_partitioned": "it is read by DeepSpeed's PipelineModule alone",
    "pipeline.grad_partitioned": "it is read by DeepSpeed's PipelineModule alone",
    "pipeline.use_reentrant": "it is read by DeepSpeed's PipelineModule alone",
}  # fmt: skip

STALE = "its updates are of stale gradients, which are other numbers. Leave it out"
GONE = "fzero has no such feature, and DeepSpeed 0.19 has removed it. Leave it out"
NO_SUCH = "fzero has no such feature. Leave it out"
EXPERTS = "there is no sharding of experts yet (fz.shard_experts). Leave it out"

# refused where they are enabled: a key or a whole block, and why
REFUSED = {
    "zero_optimization.offload_optimizer.super_offload": STALE,
    "zero_optimization.zenflow": STALE,
    "zero_optimization.zero_quantized_nontrainable_weights":
        "frozen weights have no 8-bit storage. fz.Policy(gather='8-bit') sends them so",
    "zero_optimization.zero_quantized_gradients": "gradients do not travel in 8 bits. Leave it out",
    "zero_optimization.zeropp_loco_param": "gradients do not travel in 8 bits. Leave it out",
    "expert_parallel": EXPERTS,
    "moe": EXPERTS,
    "use_data_before_expert_parallelism": EXPERTS,
    "compile": "there is no step as one graph yet (fz.jit). Leave it out; fz.compile(step) compiles each unit",
    "checkpoint.load_universal": "call fz.compat.load_deepspeed on the folder that DeepSpeed saved, before it was "
        "converted; it loads on any number of ranks",
    "tensor_parallel.vocab_parallel_lm_head": "write it in the plan of fz.shard_tensor, and fz.parallel.cross_entropy",
    "tensor_parallel.kernel_inject": NO_SUCH,
    "tensor_parallel.replace_with_kernel_inject": NO_SUCH,
    "tensor_parallel.injection_policy_tuple": "write a plan for fz.shard_tensor",
    "elasticity": "DeepSpeed 0.19 has removed it. Set train_batch_size and train_micro_batch_size_per_gpu; a "
        "checkpoint of fz.save loads on any number of ranks",
    "amp": GONE + ", and write bf16, fp16 or torch_autocast",
    "hybrid_engine": NO_SUCH + "; step.forward generates",
    "sparse_attention": GONE,
    "sparse_gradients": GONE,
    "data_efficiency": NO_SUCH,
    "curriculum_learning": GONE,
    "progressive_layer_drop": GONE,
    "compression_training": GONE,
    "weight_quantization": NO_SUCH,
    "quantize_training": GONE,
    "graph_harvesting": GONE,
    "eigenvalue": GONE,
    "autotuning": "fz.fits proposes a step that fits. Leave it out",
    "nebula": GONE,
    "datastates": "fz.save_async saves while training goes on. Leave it out",
}  # fmt: skip

# read by the translation, which says what becomes of each
READ = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op
    communication_data_type seq_parallel_communication_data_type
    data_types.grad_accum_dtype data_types.param_dtype data_types.buffer_dtype data_types.keep_in_fp32_modules
    optimizer.type scheduler.type
    fp16.enabled fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis
    fp16.consecutive_hysteresis fp16.min_loss_scale fp16.auto_cast fp16.fp16_master_weights_and_grads
    bf16.enabled bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states bf16.check_grad_overflow
    torch_autocast.enabled torch_autocast.dtype
    zero_optimization.stage zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.nvme_path
    zero_optimization.offload_optimizer.ratio zero_optimization.offload_param.device
    zero_optimization.offload_param.nvme_path zero_optimization.gather_16bit_weights_on_model_save
    zero_optimization.zero_hpz_partition_size zero_optimization.mics_shard_size zero_optimization.zero_quantized_weights
    tensor_parallel.autotp_size tensor_parallel.partition_config.layer_specs
    tensor_parallel.partition_config.use_default_specs sequence_parallel_size data_parallel_size
    activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing pipeline.stages
    tensorboard.enabled tensorboard.output_path tensorboard.job_name
    csv_monitor.enabled csv_monitor.output_path csv_monitor.job_name steps_per_print
""".split()

# other names of the same keys: deprecated ones, and those with and without a prefix
ALIASES = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save":
        "zero_optimization.gather_16bit_weights_on_model_save",
    **{f"zero_optimization.stage3_{name}": f"zero_optimization.{name}" for name in (
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
        "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
        "use_all_reduce_for_fetch_params", "allgather_sequential")},
}  # fmt: skip
OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}  # deprecated booleans

ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
# DeepSpeed's optimizers by their lower-case names: what each takes, with its defaults
OPTIMIZERS: dict[str, dict[str, object]] = {
    **dict.fromkeys(("adam", "adamw"), {
        **ADAM, "adam_w_mode": True, "torch_adam": False, "bias_correction": True, "amsgrad": False,
        "fp32_optimizer_states": True, "set_grad_none": True, "foreach": None, "fused": None, "capturable": False}),
    "lion": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0, "set_grad_none": True, "fp32_optimizer_states": True},
    "lamb": {**ADAM, "bias_correction": True, "eps_inside_sqrt": False, "amsgrad": False},
    "muon": {**ADAM, "lr": 0.02, "muon_lr": None, "adam_lr": None, "momentum": 0.95, "ns_method": "gram",
             "betas": [0.9, 0.95], "eps": 1e-10, "adam_w_mode": True, "torch_adam": False, "per_head_muon": False},
}  # fmt: skip
OTHERS = ("onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd")  # which fzero does not have
