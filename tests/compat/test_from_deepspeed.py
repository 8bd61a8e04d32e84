"""fz.compat.from_deepspeed: the verdict on every key, templates of the kinds that people use, and the printed code."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns
from test_deepspeed import FOLDERS, held_of, optimizer, product
from torch import nn
from torch.nn import functional as F

import fzero as fz
from fzero.compat.deepspeed import __main__ as command
from fzero.compat.deepspeed.keys import ALIASES, HINTS, OFFLOADS, ONLY, OPTIMIZERS, OTHERS, READ, REFUSED
from fzero.compat.deepspeed.reading import KNOWN
from fzero.compat.deepspeed.schedules import PARAMS
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "gradient_clipping": 0.0}
ZERO, MASTERS = "zero_optimization", "bf16_master_weights_and_grads"
BF16 = "fz.Policy(param=torch.float32, grad=torch.bfloat16, moment=torch.float32, compute=torch.bfloat16)"
FP16 = BF16.replace("bfloat16", "float16")
SCALE = "fz.loss_scale(step, initial=2.0**16, interval=1000, minimum=1, hysteresis=2, late=True)"
PLAIN_SCALE = SCALE.replace(", hysteresis=2", "")  # at stage 0


def fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x.to(params["up"].dtype) @ params["up"])
    return (hidden @ params["down"] - y.to(hidden.dtype)).square().mean()


def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"up": torch.randn(4, 6, generator=generator), "down": torch.randn(6, 2, generator=generator)}


def batch(rank: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


def config_with(keys: dict[str, Any]) -> dict[str, Any]:
    """The base with values at dotted paths; None leaves a block out."""
    out = copy.deepcopy(BASE)
    for path, value in keys.items():
        *blocks, key = path.split(".")
        into = out
        for block in blocks:
            into = into.setdefault(block, {})
        into[key] = value
    return {key: value for key, value in out.items() if value is not None}


def made_of(keys: dict[str, Any], ranks: int = 1, **auto: Any) -> Any:
    """What is made on rank 0; in a process alone where there is one rank."""
    make = functools.partial(fz.compat.from_deepspeed, config_with(keys), fn, **auto)
    return make() if ranks == 1 else run_ranks(lambda rank: make(), ranks)[0]


def row_of(made: Any, key: str) -> Any:
    (row,) = [row for row in made.report if row.key == key]
    return row


# ---- every key

# a key and its value; what else is said; the verdict, and what the code then has (or the words of a refusal)
H, M, R = "honoured", "no effect", "refused"
OFF = {block: {f"{block}.enabled": False} for block in ("bf16", "torch_autocast")}
SAID: list[tuple[str, Any, dict[str, Any], str, str]] = [
    ("train_batch_size", 8, {"gradient_accumulation_steps": 4}, H, "fz.accumulate(step, 4)"),
    ("train_batch_size", 8, {}, H, "fz.accumulate(step, 4)"),
    ("train_batch_size", 7, {"gradient_accumulation_steps": 4}, R, "expected 8: 2 examples x 4 microbatches x 1"),
    ("train_batch_size", 0, {}, R, "expected an int of at least 1"),
    ("train_micro_batch_size_per_gpu", 3, {}, H, "step = fz.train_step(fn, optimizer)"),
    ("train_micro_batch_size_per_gpu", "three", {}, R, "expected an int"),
    ("gradient_accumulation_steps", 3, {}, H, "fz.accumulate(step, 3)"),
    ("gradient_accumulation_steps", 1.5, {}, R, "expected an int"),
    ("managed_gradient_accumulation", True, {"gradient_accumulation_steps": 2}, H, "fz.accumulate(step, 2)"),
    ("managed_gradient_accumulation", False, {"gradient_accumulation_steps": 2}, H, "fz.chain(fz.sgd(-0.5), "),
    ("gradient_clipping", 0.5, {}, H, "fz.chain(fz.clip_by_global_norm(0.5), fz.adamw("),
    ("gradient_clipping", 0, {}, H, "optimizer = fz.adamw("),
    ("gradient_clipping", -1, {}, R, "expected a number of at least 0"),
    ("prescale_gradients", True, {}, H, ""),
    ("gradient_predivide_factor", 2.0, {}, H, ""),
    ("gradient_allreduce_op", "mean", {}, H, ""),
    ("gradient_allreduce_op", "sum", {}, H, ""),
    ("gradient_allreduce_op", "max", {}, R, "one of 'mean', 'sum'"),
    ("communication_data_type", "fp32", {"bf16.enabled": True}, H, BF16.replace("grad=torch.bfloat16",
        "grad=torch.float32")),
    ("communication_data_type", "bf16", {}, H, "fz.Policy(reduce=torch.bfloat16)"),
    ("communication_data_type", "int8", {}, R, "one of 'bf16', 'fp16', 'fp32'"),
    ("seq_parallel_communication_data_type", "fp32", {}, M, ""),
    ("data_types.grad_accum_dtype", "fp32", {"bf16.enabled": True}, H, "grad=torch.float32"),
    ("data_types.grad_accum_dtype", "bf16", {"bf16.enabled": True}, H, "reduce=torch.bfloat16"),
    ("data_types.param_dtype", "bf16", {}, R, "fp16 and bf16 say it"),
    ("data_types.buffer_dtype", "bf16", {}, R, "Convert them"),
    ("data_types.keep_in_fp32_modules", "auto", {}, M, ""),
    ("data_types.keep_in_fp32_modules", ["norm"], {}, R, "by_path"),
    ("optimizer.type", "Adam", {}, H, "fz.adamw(0.001, weight_decay=0.0)"),
    ("optimizer.type", "LION", {}, H, "fz.lion(0.001, weight_decay=0.0)"),
    ("optimizer.type", "Lamb", {}, H, "fz.lamb(0.001, eps=1e-08, weight_decay=0.0)"),
    ("optimizer.type", "SGD", {"optimizer.params.momentum": 0.9}, H, "fz.sgd(0.001, momentum=0.9)"),
    ("optimizer.type", "SGD", {"optimizer.params.dampening": 0.5}, H,
        "fz.from_torch(torch.optim.SGD, 0.001, dampening=0.5)"),
    ("optimizer.type", "Adagrad", {}, H, "fz.from_torch(torch.optim.Adagrad, 0.001)"),
    ("optimizer.type", "RMSprop", {"optimizer.params.alpha": 0.9}, H,
        "fz.from_torch(torch.optim.RMSprop, 0.001, alpha=0.9)"),
    ("optimizer.type", "Muon", {"optimizer.params.muon_lr": 0.1, "optimizer.params.weight_decay": 0.2}, H,
     "fz.partition({'*[eE]mbed*|*lm_head*|*[nN]orm*|*bias': fz.adamw(0.001, b2=0.95, eps=1e-10, weight_decay=0.2), "
     "'*': fz.muon(0.1, momentum=0.95, weight_decay=0.2)})"),
    *[("optimizer.type", name, {}, R, "has no such optimizer") for name in OTHERS],
    ("optimizer.type", "AdmaW", {}, R, "The nearest one is 'adamw'"),
    ("optimizer.params.lr", 0.1, {}, H, "fz.adamw(0.1, "),
    ("optimizer.params.lr", "0.1", {}, R, "expected a number"),
    ("optimizer.params.weight_decay", -0.1, {}, R, "expected a number of at least 0"),
    ("optimizer.params.betas", [0.8, 0.95], {}, H, "b1=0.8, b2=0.95"),
    ("optimizer.params.betas", [0.8], {}, R, "expected two numbers"),
    ("optimizer.params.eps", 1e-6, {}, H, "eps=1e-06"),
    ("optimizer.params.weight_decay", 0.1, {}, H, "weight_decay=0.1"),
    ("optimizer.params.adam_w_mode", False, {"optimizer.type": "Adam"}, H, "fz.adam("),
    ("optimizer.params.adam_w_mode", False, {}, M, "fz.adamw("),
    ("optimizer.params.torch_adam", True, {}, M, "weight_decay=0.01"),
    ("optimizer.params.amsgrad", True, {}, H, "amsgrad=True"),
    *[(f"optimizer.params.{key}", True, {}, M, "") for key in ("set_grad_none", "foreach", "fused", "capturable")],
    *[(f"optimizer.params.{key}", True, {}, H, "") for key in ("bias_correction", "fp32_optimizer_states")],
    *[(f"optimizer.params.{key}", False, {}, R, "Leave it out") for key in ("bias_correction",
        "fp32_optimizer_states")],
    ("optimizer.params.max_grad_norm", 1.0, {}, R, "Write gradient_clipping"),
    ("optimizer.params.min_coeff", 1.0, {"optimizer.type": "Lamb"}, R, "no such choice"),
    ("optimizer.params.max_coeff", 1.0, {"optimizer.type": "Lamb"}, R, "no such choice"),
    ("optimizer.params.eps_inside_sqrt", True, {"optimizer.type": "Lamb"}, R, "no such choice"),
    ("optimizer.params.weight_deacy", 0.1, {}, R, "The nearest one is 'weight_decay'"),
    *[(f"optimizer.params.{key}", 0.5, {"optimizer.type": "Muon"}, H, "0.5") for key in ("muon_lr", "adam_lr",
        "momentum")],
    ("optimizer.params.ns_method", "standard", {"optimizer.type": "Muon"}, M, ""),
    ("optimizer.params.per_head_muon", True, {"optimizer.type": "Muon"}, R, "no such choice"),
    *[("scheduler.type", name, {f"scheduler.params.{key}": 5 for key,
        own in PARAMS[name].items() if own not in PARAMS["WarmupLR"].values()
       and not isinstance(own, (bool, float, str)) and own is not None and key != "decay_step_size"}, H,
           f"deepspeed_schedule({name!r}")
      for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest")],
    ("scheduler.type", "WarmupPolyLR", {}, R, "one of 'WarmupLR', "),
    ("scheduler.type", "OneCycle", {"scheduler.params.cycle_min_lr": 0.1, "scheduler.params.cycle_max_lr": 0.2}, H,
        "momentum=True"),
    ("scheduler.params.warmup_type", "linear", {"scheduler.type": "WarmupLR"}, H, "warmup_type='linear'"),
    ("scheduler.params.warmup_type", "poly", {"scheduler.type": "WarmupLR"}, R, "one of 'log', 'linear'"),
    ("scheduler.params.warmup_steps", 5, {"scheduler.type": "WarmupLR"}, R, "The nearest one is 'warmup_num_steps'"),
    ("scheduler.params.total_num_steps", None, {"scheduler.type": "WarmupDecayLR"}, M, ""),
    ("fp16.enabled", True, {}, H, PLAIN_SCALE),
    ("fp16.enabled", True, {f"{ZERO}.stage": 1}, H, SCALE),
    ("fp16.enabled", None, {"fp16.auto_cast": True}, M, "step = fz.train_step(fn, optimizer)"),
    ("fp16.enabled", True, {"bf16.enabled": True}, R, "bf16 is enabled too"),
    ("fp16.enabled", False, {}, H, "step = fz.train_step(fn, optimizer)"),
    ("fp16.loss_scale", 0, {}, H, f"policy = {FP16}"),
    ("fp16.loss_scale", 128, {}, H, "fz.loss_scale(step, 128.0)"),
    ("fp16.loss_scale", -1, {}, R, "at least 0"),
    ("fp16.initial_scale_power", 12, {}, H, "initial=2.0**12"),
    ("fp16.initial_scale_power", 12, {"fp16.loss_scale": 128}, M, "128.0"),
    ("fp16.loss_scale_window", 50, {}, H, "interval=50"),
    ("fp16.hysteresis", 3, {f"{ZERO}.stage": 2}, H, "hysteresis=3"),
    ("fp16.hysteresis", 3, {}, M, PLAIN_SCALE),
    ("fp16.consecutive_hysteresis", True, {f"{ZERO}.stage": 2}, H, "consecutive=True"),
    ("fp16.consecutive_hysteresis", True, {}, M, PLAIN_SCALE),
    ("fp16.initial_scale_power", -1, {}, R, "an int of at least 0"),
    ("fp16", True, {}, R, "expected a block of keys, such as 'fp16.enabled'"),
    (ZERO, 2, {}, R, f"expected a block of keys, such as '{ZERO}.stage'"),
    (f"{ZERO}.offload_optimizer", "cpu", {}, R, "offload_optimizer.device'"),
    ("optimizer.params.lr", math.nan, {}, R, "expected a number"),
    ("optimizer.params.betas", [0.9, 1.0], {}, R, "expected two numbers in [0, 1)"),
    ("gradient_clipping", math.inf, {}, R, "expected a number"),
    ("scheduler.params.last_batch_iteration", -1, {"scheduler.type": "WarmupLR"}, H, "deepspeed_schedule"),
    ("scheduler.params.last_batch_iteration", 5, {"scheduler.type": "WarmupLR"}, R, "the state counts its updates"),
    ("scheduler.params.warmup_num_steps", 0, {"scheduler.type": "WarmupLR"}, R, "an int of at least 1"),
    ("optimizer.type", "NAdam", {"optimizer.params": {"momentum_decay": 0}}, H,
        "fz.from_torch(torch.optim.NAdam, 0.002, momentum_decay=0)"),
    ("fp16.min_loss_scale", 2, {}, H, "minimum=2"),
    ("fp16.min_loss_scale", 2, {"fp16.enabled": False}, M, ""),
    ("fp16.auto_cast", True, {}, H, "fn = fz.compat.cast_inputs(fn, torch.float16)"),
    ("fp16.auto_cast", False, {}, H, ""),
    ("fp16.fp16_master_weights_and_grads", True, {f"{ZERO}.stage": 2}, H, "param=torch.float16, grad=torch.float16"),
    ("bf16.enabled", True, {}, H, f"policy = {BF16}"),
    ("bf16.enabled", "yes", {}, R, "expected true or false"),
    (f"bf16.{MASTERS}", True, {f"{ZERO}.stage": 1}, H, "grad=torch.bfloat16, moment=torch.float32"),
    ("bf16.bf16_optimizer_states", True, {f"{ZERO}.stage": 1, f"bf16.{MASTERS}": True}, H, BF16.replace("float32",
        "bfloat16")),
    ("bf16.bf16_optimizer_states", True, {f"{ZERO}.stage": 1}, H, "moment=torch.bfloat16"),
    ("bf16.check_grad_overflow", True, {}, H, ""),
    ("bf16.check_grad_overflow", False, {}, R, "always skipped. Leave it out"),
    ("torch_autocast.enabled", True, {"torch_autocast.dtype": "bfloat16"}, H, "fz.autocast(step, torch.bfloat16)"),
    ("torch_autocast.enabled", False, {"torch_autocast.dtype": "bfloat16"}, H, ""),
    ("torch_autocast.dtype", "float16", {}, H, "fz.loss_scale(step, initial=2.0**16, interval=2000"),
    ("torch_autocast.dtype", "fp32", {}, R, "expected 'bfloat16'"),
    *[(f"{ZERO}.stage", stage, {}, H, f"fz.shard_zero{stage}(step)" if stage else "") for stage in range(4)],
    (f"{ZERO}.stage", 4, {}, R, "one of 0, 1, 2, 3"),
    (ZERO, True, {}, H, "fz.shard_zero1(step)"),
    (ZERO, False, {}, H, ""),
    (f"{ZERO}.offload_optimizer.device", "cpu", {f"{ZERO}.stage": 1}, H,
        "fz.offload(step, params='host', moments='host')"),
    (f"{ZERO}.offload_optimizer.device", "none", {f"{ZERO}.stage": 1}, H, ""),
    (f"{ZERO}.offload_optimizer.device", "cpu", {}, M, ""),
    (f"{ZERO}.offload_optimizer.device", "nvme", {f"{ZERO}.stage": 3}, R, "needs nvme_path"),
    (f"{ZERO}.offload_optimizer.device", "gpu", {f"{ZERO}.stage": 3}, R, "one of 'none', 'cpu', 'nvme'"),
    (f"{ZERO}.offload_optimizer.nvme_path", "DISK", {f"{ZERO}.stage": 3, f"{ZERO}.offload_optimizer.device": "nvme"}, H,
     "fz.offload(step, params=fz.Disk('DISK'), moments=fz.Disk('DISK'))"),
    (f"{ZERO}.offload_optimizer.ratio", 0.5, {}, M, ""),
    (f"{ZERO}.offload_param.device", "cpu", {f"{ZERO}.stage": 3}, H, "fz.offload(step, params='host')"),
    (f"{ZERO}.offload_param.device", "cpu", {f"{ZERO}.stage": 2}, M, ""),
    (f"{ZERO}.offload_param.nvme_path", "DISK", {f"{ZERO}.stage": 3, f"{ZERO}.offload_param.device": "nvme"}, H,
        "params=fz.Disk('DISK'))"),
    (f"{ZERO}.offload_param.nvme_path", "DISK", {f"{ZERO}.stage": 3, f"{ZERO}.offload_param.device": "cpu"}, H,
        "params='host')"),
    (f"{ZERO}.cpu_offload", True, {f"{ZERO}.stage": 2}, H, "moments='host'"),
    (f"{ZERO}.cpu_offload_param", True, {f"{ZERO}.stage": 3}, H, "fz.offload(step, params='host')"),
    (f"{ZERO}.stage3_gather_16bit_weights_on_model_save", True, {f"{ZERO}.stage": 3}, H, ""),
    (f"{ZERO}.stage3_gather_fp16_weights_on_model_save", True, {f"{ZERO}.stage": 3}, H, ""),
    (f"{ZERO}.gather_16bit_weights_on_model_save", False, {f"{ZERO}.stage": 3}, H, ""),
    (f"{ZERO}.zero_hpz_partition_size", 1, {f"{ZERO}.stage": 3}, H, ""),
    (f"{ZERO}.zero_hpz_partition_size", 8, {f"{ZERO}.stage": 3}, R, "replicate='replicate'"),
    (f"{ZERO}.mics_shard_size", 2, {f"{ZERO}.stage": 3}, R, "a divisor of 1 ranks"),
    (f"{ZERO}.mics_shard_size", -1, {f"{ZERO}.stage": 3}, M, ""),
    (f"{ZERO}.zero_quantized_weights", True, {f"{ZERO}.stage": 3}, H, "fz.Policy(gather='8-bit')"),
    (f"{ZERO}.zero_quantized_weights", True, {f"{ZERO}.stage": 2}, R, "at stage 3 only"),
    ("tensor_parallel.autotp_size", 1, {}, H, ""),
    ("tensor_parallel.autotp_size", 2, {}, R, "no divisor of the number of ranks, which is 1"),
    ("tensor_parallel.tp.tp_size", 2, {}, R, "autotp_size"),
    ("tensor_parallel.partition_config.layer_specs", [], {}, M, ""),
    ("tensor_parallel.partition_config.use_default_specs", False, {}, M, ""),
    ("sequence_parallel_size", 1, {}, H, ""),
    ("sequence_parallel_size", 2, {}, R, "no divisor"),
    ("data_parallel_size", 1, {}, H, ""),
    ("activation_checkpointing.partition_activations", True, {}, H, "fz.remat(step)"),
    ("activation_checkpointing.partition_activations", False, {}, H, ""),
    ("activation_checkpointing.cpu_checkpointing", True, {}, H, "fz.offload(step, activations='host')"),
    ("pipeline.stages", 2, {}, R, "fz.pipeline"),
    ("pipeline.stages", "auto", {}, M, ""),
    ("compile.deepcompile", True, {}, H, "step = fz.jit(step)"),
    ("compile.deepcompile", True, {f"{ZERO}.stage": 1, f"{ZERO}.offload_optimizer.device": "cpu"}, R, "do not offload"),
    ("compile.deepcompile", False, {}, H, ""),
    ("tensorboard.enabled", True, {}, H, ""),
    ("tensorboard.output_path", "out", {}, H, ""),
    ("tensorboard.job_name", "run", {"tensorboard.enabled": False}, M, ""),
    ("csv_monitor.enabled", False, {}, H, ""),
    ("csv_monitor.output_path", "out", {}, H, ""),
    ("csv_monitor.job_name", "run", {}, H, ""),
    ("steps_per_print", 10, {}, H, ""),
    ("steps_per_print", math.inf, {}, M, ""),
    ("bfloat16.enabled", True, {}, H, BF16),
    *[(key, value, OFF.get(key.partition(".")[0], {}), M, "") for key in HINTS for value in (1, "auto",
        {"enabled": True})],
    *[(key, value, {}, R, re.escape(why[:20])) for key, why in REFUSED.items() for value in (True, {"enabled": True},
        {"x": 1})],
    *[(key, value, {}, M, "") for key in REFUSED for value in (False, {"enabled": False, "x": 1})],
    ("graident_clipping", 1.0, {}, R, "nearest one is 'gradient_clipping'"),
    (f"{ZERO}.stege", 1, {}, R, f"nearest one is '{ZERO}.stage'"),
    ("stage", 1, {}, R, f"nearest one is '{ZERO}.stage'"),
    ("bf16.enable", True, {}, R, "nearest one is 'bf16.enabled'"),
    ("quite_another", True, {}, R, "no such key"),
]  # fmt: skip


@in_turns(3)
@pytest.mark.parametrize(
    ("key", "value", "more", "verdict", "what"), SAID, ids=[f"{key}={value}" for key, value, *_ in SAID]
)
def test_the_verdict_on_a_key(
    key: str, value: Any, more: dict[str, Any], verdict: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if key.startswith("scheduler.params.total"):
        more = {**more, key: 9}
        verdict, value = H, 9
    keys = {**more, key: value}
    if verdict == R:
        with pytest.raises(
            ValueError,
            match=rf"(?s)from_deepspeed: \d of the keys.*{key}.*{what if key in REFUSED else re.escape(what)}",
        ):
            made_of(keys)
        return
    made = made_of(keys)
    row = row_of(made, key if not isinstance(value, dict) else f"{key}.enabled")
    assert row.verdict == verdict and row.what and what in made.code
    assert row.value == (value["enabled"] if isinstance(value, dict) else value)
    if key in HINTS:
        assert made.code == made_of({}).code


def test_every_known_key_is_there() -> None:
    asked = {key for key, *_ in SAID} | {path for _, _, more, *_ in SAID for path in more}
    prefixed = {name for name in (*HINTS, *READ) if name.startswith(f"{ZERO}.stage3_")}
    params = {f"optimizer.params.{name}" for own in OPTIMIZERS.values() for name in own}
    assert {*READ, *HINTS, *REFUSED, *ONLY, *params, *OFFLOADS} <= asked
    assert {*KNOWN} == {*READ, *HINTS, *REFUSED, *ONLY, *params, *ALIASES, *OFFLOADS,
                        *[f"scheduler.params.{name}" for own in PARAMS.values() for name in own]}  # fmt: skip
    assert len(prefixed) == 9
    for name in (*prefixed, *[name.replace("stage3_", "") for name in prefixed]):
        assert row_of(made_of({name: 1 if "gather_16" not in name else True}), name).verdict in (H, M)
    with pytest.raises(ValueError, match=r"max_live_parameters: got 1; it is there as .*max_live_parameters too"):
        made_of({f"{ZERO}.stage3_max_live_parameters": 1, f"{ZERO}.max_live_parameters": 1})


def test_defaults_that_have_changed() -> None:
    made = made_of({"gradient_clipping": None, "bf16.enabled": True})
    assert "fz.clip_by_global_norm(1.0)" in made.code
    assert row_of(made, "gradient_clipping")[1:3] == (1.0, H) and "since 0.19" in row_of(made, "gradient_clipping").what
    assert row_of(made, "bf16.check_grad_overflow")[1:3] == (True, H)


def test_all_refusals_are_in_one_error() -> None:
    with pytest.raises(ValueError) as info:
        made_of(
            {"zenflow": 1, f"{ZERO}.zenflow.topk_ratio": 0.1, "fp16.hysteresis": 0, "moe.experts": 4, "autotuning": {}}
        )
    lines = str(info.value).splitlines()
    assert "5 of the keys" in lines[0] and len(lines) == 6
    for key in ("zenflow", f"{ZERO}.zenflow.topk_ratio", "fp16.hysteresis", "moe.experts", "autotuning"):
        assert any(line.startswith(f"  {key}: got ") for line in lines), key


# ---- several ranks


@pytest.mark.parametrize(
    ("keys", "ranks", "code"),
    [
        ({"train_batch_size": 16}, 4, ["fz.accumulate(step, 2)", "fz.shard_zero1(step)"]),
        ({"gradient_allreduce_op": "sum", f"{ZERO}.stage": 2}, 4, ["fz.chain(fz.sgd(-4.0), fz.adamw("]),
        ({"sequence_parallel_size": 2, f"{ZERO}.stage": 3, "train_batch_size": 4, "data_parallel_size": 2}, 4,
         ["(2, 2), mesh_dim_names=('dp', 'sp'))", "fz.shard_zero3(step, mesh=mesh, axis=('dp', 'sp'))"]),
        ({"sequence_parallel_size": 2, "seq_parallel_communication_data_type": "bf16"}, 2,
            ["fz.Policy(reduce=torch.bfloat16)"]),
        ({"tensor_parallel.autotp_size": 2, f"{ZERO}.stage": 1, "tensor_parallel.partition_config.layer_specs": [
            {"patterns": [r".*\.[qk]_proj\.weight$", r"^up$"], "partition_type": "column"},
            {"patterns": [r"down"], "partition_type": "row"}]}, 4,
         ["fz.shard_zero1(step, mesh=mesh)",
          "fz.shard_tensor(step, {'*.[qk]_proj.weight': 'column', 'up': 'column', 'down': 'row'}, mesh=mesh)"]),
        ({"tensor_parallel.autotp_size": 2, "tensor_parallel.preset_model": "llama"}, 2,
            ["fz.shard_tensor(step, 'auto', mesh=mesh)"]),
        ({f"{ZERO}.mics_shard_size": 2, f"{ZERO}.stage": 3}, 4,
         ["(2, 2), mesh_dim_names=('replicate', 'shard'))", "mesh=mesh, axis='shard', replicate='replicate')"]),
        ({f"{ZERO}.zero_hpz_partition_size": 2, f"{ZERO}.stage": 3}, 2, ["fz.shard_zero3(step)"]),
    ],
)  # fmt: skip
def test_ranks(keys: dict[str, Any], ranks: int, code: list[str]) -> None:
    made = made_of(keys, ranks)
    assert all(part in made.code for part in code), made.code
    assert (made.mesh is not None) == ("mesh=mesh" in made.code)


@pytest.mark.parametrize(
    ("keys", "ranks", "match"),
    [
        ({"sequence_parallel_size": 2, "tensor_parallel.autotp_size": 2}, 4, "Keep one"),
        ({"train_batch_size": 10, "gradient_accumulation_steps": 1}, 4, "expected 8: 2 examples x 1 microbatches x 4"),
        ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": None}, 4, "x 4 data-parallel ranks"),
        ({"tensor_parallel.autotp_size": 2, "tensor_parallel.partition_config.layer_specs": [
            {"patterns": [".*(q|k)$"]}]}, 2, "more than patterns and a style"),
        ({"tensor_parallel.autotp_size": 2, "tensor_parallel.partition_config.layer_specs": [
            {"patterns": [".*up$"], "shape": [2, -1], "partition_dim": 0}]}, 2, "more than patterns and a style"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit(keys: dict[str, Any], ranks: int, match: str) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=match):
            fz.compat.from_deepspeed(config_with(keys), fn)

    run_ranks(rank_main, ranks)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.sets(st.integers(0, 2), min_size=1))
def test_two_of_the_batch_keys_give_the_third(ranks: int, micro: int, count: int, given: set[int]) -> None:
    from fzero.compat.deepspeed.config import translated

    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    values = micro * count * ranks, micro, count
    config = {names[number]: values[number] for number in given} | {"optimizer": ADAMW}
    said = "\n".join(translated(config, {}, ranks).lines)
    found = int(match[1]) if (match := re.search(r"accumulate\(step, (\d+)\)", said)) else 1
    assert found == (count if 2 in given or len(given) == 2 else 1)
    if len(given) == 3 and micro > 1:
        wrong = translated({**config, names[1]: micro - 1}, {}, ranks).report()
        assert [row.verdict for row in wrong if row.key == names[0]] == ["refused"]


# ---- values for "auto"


def test_auto() -> None:
    both = {"fp16.enabled": "auto", "bf16.enabled": "auto", "optimizer.params.lr": "auto", "gradient_clipping": "auto"}
    made = made_of(both, lr=0.1, fp16_enabled=False, bf16_enabled=True, gradient_clipping=0.5, warmup_num_steps=3)
    assert row_of(made, "optimizer.params.lr")[1:3] == (0.1, H) and row_of(made, "bf16.enabled").value is True
    assert row_of(made, "warmup_num_steps")[1:3] == (3, M)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"enabled": True}, r"enabled= stands for several keys. Write fp16_enabled= or bf16_enabled="),
        ({"lrr": 0.1}, r"lrr: got 0.1; no key has this name. The nearest one is 'lr'"),
        ({}, r"(?s)4 of the keys.*'auto' has no value. Give fp16_enabled=..."),
        ({"lr": "fast"}, r"optimizer.params.lr: got 'fast'; expected a number"),
        ({"train_micro_batch_size_per_gpu": 4}, r"it is not 'auto', and got train_micro_batch_size_per_gpu=4 too"),
    ]
    for autos, match in calls:
        with pytest.raises(ValueError, match=match):
            made_of(both, **autos)
    assert made_of({}, train_micro_batch_size_per_gpu=2).code == made_of({}).code  # the same is no contradiction
    with pytest.raises(ValueError, match=r"torch_autocast.dtype: got None; expected 'bfloat16' or 'float16'"):
        made_of({"torch_autocast.enabled": True})
    with pytest.raises(ValueError, match=f"{ZERO}.stage: got 'auto'; 'auto' has no value. Give stage="):
        made_of({f"{ZERO}.stage": "auto"})
    assert "fz.shard_zero2" in made_of({f"{ZERO}.stage": "auto"}, stage=2).code


def test_a_rate_that_is_a_schedule_and_an_optimizer_of_ones_own() -> None:
    def lr(count: int) -> float:
        return 0.1 / (count + 1)

    made = made_of({"optimizer.params.lr": "auto"}, lr=lr)
    assert "fz.adamw(lr, " in made.code
    state, _ = made.step(made.step.init(params()), *batch(0))
    assert made.step(state, *batch(0))[1]["lr"] == 0.05
    none = {"optimizer": None}
    assert "fz.adamw(lr, b2=0.95, weight_decay=0.1)" in made_of(none, lr=lr, betas=(0.9, 0.95), weight_decay=0.1).code
    assert "fz.adamw(0.1, weight_decay=0.0)" in made_of(none, lr=0.1).code
    assert "optimizer = optimizer" in made_of(none, optimizer=fz.sgd(0.1)).code
    with pytest.raises(ValueError, match=r"optimizer.params.lr: got 'auto'; 'auto' has no value. Give lr="):
        made_of(none)
    schedule = {"scheduler.type": "WarmupLR"}
    with pytest.raises(ValueError, match="that is no number, and a schedule too"):
        made_of({"optimizer.params.lr": "auto", **schedule}, lr=lr)
    with pytest.raises(ValueError, match=r"optimizer.type: got 'AdamW'; got optimizer= too"):
        made_of({}, optimizer=fz.sgd(0.1))
    with pytest.raises(ValueError, match=r"Give it fz.compat.deepspeed_schedule"):
        made_of({**none, **schedule}, optimizer=fz.sgd(0.1))


# ---- templates, of the kinds of accelerate, LLaMA-Factory and axolotl

A = "auto"
SIZES = {
    "train_batch_size": A,
    "train_micro_batch_size_per_gpu": A,
    "gradient_accumulation_steps": A,
    "gradient_clipping": A,
}
LOSS = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
EITHER = {"fp16": {"enabled": A, **LOSS}, "bf16": {"enabled": A}}
TRAINERS = {"type": "AdamW", "params": {"lr": A, "betas": A, "eps": A, "weight_decay": A}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": A, "warmup_max_lr": A, "warmup_num_steps": A, "total_num_steps": A},
}
BUCKETS = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": A}
LIVE = {"stage3_prefetch_bucket_size": A, "stage3_param_persistence_threshold": A, "sub_group_size": 1e9}
LONG = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
SAVED = {"stage3_gather_16bit_weights_on_model_save": True}
CPU = {"device": "cpu", "pin_memory": True}
TEMPLATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "accelerate stage 1": ({"fp16": {"enabled": True, **LOSS}, "optimizer": TRAINERS, "scheduler": DECAY, **SIZES,
        "zero_optimization":
        {"stage": 1, "reduce_scatter": True, **BUCKETS}, "steps_per_print": math.inf}, ["fz.shard_zero1(step)", SCALE,
            f"policy = {FP16}"]),
    "accelerate stage 2": ({"fp16": {"enabled": True, **LOSS}, "optimizer": TRAINERS, "scheduler": DECAY, **SIZES,
        "zero_optimization":
        {"stage": 2, "offload_optimizer": CPU, "allgather_partitions": True, "allgather_bucket_size": 2e8,
            "reduce_scatter": True, **BUCKETS},
        "wall_clock_breakdown": False, "steps_per_print": 2000},
        ["fz.shard_zero2(step)", "params='host', moments='host'",
            "deepspeed_schedule('WarmupDecayLR', warmup_min_lr=0, "
         "warmup_max_lr=0.01, warmup_num_steps=2, total_num_steps=20)"]),
    "accelerate stage 3": ({"bf16": {"enabled": True}, "optimizer": TRAINERS, "scheduler": DECAY, **SIZES,
        "zero_optimization":
        {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **BUCKETS, **LIVE, **LONG, **SAVED}},
        ["fz.shard_zero3(step)", f"policy = {BF16}", "fz.clip_by_global_norm(0.7)", "fz.accumulate(step, 2)"]),
    "accelerate stage 3 on a disk": ({"bf16": {"enabled": True}, "optimizer": TRAINERS, **SIZES,
        "zero_optimization": {"stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "DISK", "buffer_count": 4, "fast_init": False},
            "offload_param":
        {"device": "nvme", "nvme_path": "DISK", "max_in_cpu": 1e9, **{}}, **BUCKETS}, "aio": {"block_size": 262144,
            "queue_depth": 32}},
        ["fz.Disk('DISK')"]),
    "LLaMA-Factory stage 0": ({**SIZES, "zero_allow_untested_optimizer": True, **EITHER,
        "zero_optimization": {"stage": 0,
        "allgather_partitions": True, "allgather_bucket_size": 5e8, "round_robin_gradients": True, **BUCKETS}},
        ["fz.adamw(0.01, b2=0.95, weight_decay=0.1)", "fz.shard_zero1(step)", f"policy = {BF16}"]),
    "LLaMA-Factory stage 2": ({**SIZES, "zero_allow_untested_optimizer": True, **EITHER,
        "zero_optimization": {"stage": 2,
        "allgather_partitions": True, "overlap_comm": False, "reduce_scatter": True}, "comms_config": {},
            "monitor_config": {}},
        ["fz.shard_zero2(step)"]),
    "LLaMA-Factory stage 3 offloaded": ({**SIZES, "zero_allow_untested_optimizer": True, **EITHER,
        "zero_optimization": {"stage": 3,
        "offload_optimizer": CPU, "offload_param": CPU, **BUCKETS, **LIVE, **LONG, **SAVED}},
        ["fz.shard_zero3(step)", "fz.offload(step, params='host', moments='host')"]),
    "axolotl stage 1": ({"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": A},
        "fp16": {"enabled": A,
        "auto_cast": False, **LOSS}, **SIZES, "wall_clock_breakdown": False}, ["fz.shard_zero1(step)"]),
    "axolotl stage 3 in bf16": ({"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
        "zero_optimization":
        {"stage": 3, **BUCKETS, "sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0,
         "gather_16bit_weights_on_model_save": True}, "bf16": {"enabled": True}, **SIZES}, ["fz.shard_zero3(step)",
             f"policy = {BF16}"]),
    "axolotl stage 3 with everything on the host": ({"zero_optimization": {"stage": 3, "offload_optimizer": CPU,
        "offload_param": CPU,
        **BUCKETS}, "bf16": {"enabled": A}, "fp16": {"enabled": A}, **SIZES, "optimizer": TRAINERS},
            ["fz.shard_zero3(step)", "'host'"]),
    "everything in bf16": ({**SIZES, "bf16": {"enabled": True, MASTERS: True, "bf16_optimizer_states": True},
        "torch_autocast":
        {"enabled": True, "dtype": "bfloat16"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9,
            0.999],
        "eps": 1e-8, "weight_decay": 0.01}}, "zero_optimization": {"stage": 3, **BUCKETS,
            "stage3_param_persistence_threshold": 0}},
        ["policy = " + BF16.replace("float32", "bfloat16"), "fz.autocast(step, torch.bfloat16)",
            "fz.adamw(0.0001, weight_decay=0.01)"]),
    "an old one by hand": ({"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2,
        "cpu_offload":
        True, "allgather_bucket_size": 5e8}, "optimizer": {"type": "Adam", "params": {"lr": 0.02, "adam_w_mode": False,
        "weight_decay": 3e-7}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.02,
        "warmup_num_steps": 5}}, "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "old"}, "steps_per_print": 5},
        ["fz.adam(schedule, weight_decay=3e-07)", "fz.remat(step)", "activations='host'", "fz.accumulate(step, 2)"]),
}  # fmt: skip
TRAINER = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "gradient_clipping": 0.7,
    "warmup_num_steps": 2,
           "total_num_steps": 20, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}  # fmt: skip


def autos_of(config: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer gives; it says nothing of what the configuration says."""
    text = json.dumps(config)
    own = {key: value for key, value in TRAINER.items() if f'"{key}": "auto"' in text or "optimizer" not in config}
    own = {key: value for key, value in own.items() if f'"{key}": ' not in text or f'"{key}": "auto"' in text}
    return {**own, **({"bf16_enabled": True, "fp16_enabled": False} if '"bf16": {"enabled": "auto"' in text else {})}


@in_turns(8)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step is the one that is expected, it trains, and what is printed is the same step when it is pasted."""
    monkeypatch.chdir(tmp_path)
    config, code = TEMPLATES[name]
    if "steps_per_print" not in config or config["steps_per_print"] != math.inf:
        (tmp_path / "ds_config.json").write_text(json.dumps(config))
    given: Any = tmp_path / "ds_config.json" if (tmp_path / "ds_config.json").exists() else config
    autos = autos_of(config)

    def rank_main(rank: int) -> Any:
        made = fz.compat.from_deepspeed(given, fn, **autos)
        namespace: dict[str, Any] = {"fn": fn}
        exec(str(made), namespace)
        pasted = namespace["step"]
        leaves = [(path, tuple(leaf.shape), leaf.dtype) for path, leaf in params().items()]
        assert str(made.step) == str(pasted) and str(made.step.optimizer) == str(pasted.optimizer)
        assert made.step.rows(leaves) == pasted.rows(leaves)
        after = []
        for step in (made.step, pasted):
            state = step.init(params())
            for number in range(8):  # the first of float16 are skipped, until the scale fits
                state, metrics = step(state, *batch(2 * number + rank))
            after.append((fz.gather(state.params), metrics["loss"], metrics["lr"], step.microbatches.count))
        assert_trees_equal(*[dict(each[0]) for each in after])
        assert after[0][1:] == after[1][1:] and not metrics["skipped"]
        return made, after[0]

    made, (trained, loss, *_) = run_ranks(rank_main, 2)[0]
    assert all(part in made.code for part in code), made.code
    assert {row.verdict for row in made.report} <= {H, M} and math.isfinite(loss)
    keys = {row.key for row in made.report}
    assert all(any(key == top or key.startswith(f"{top}.") for key in keys) for top in config)
    assert not any(torch.equal(trained[path], leaf) for path, leaf in params().items())
    assert [line.split()[1] for line in str(made).splitlines()[1 : len(made.report) + 1]] == [
        row.key for row in made.report
    ]


def test_a_table_of_logs() -> None:
    made = made_of({"tensorboard.output_path": "logs", "csv_monitor.job_name": "x", "steps_per_print": 7})
    assert made.loop == {"tensorboard": "logs/DeepSpeedJobName", "log": "x.csv", "every": 7}
    assert str(made).endswith(
        "fz.loop(step, state, batches, tensorboard='logs/DeepSpeedJobName', log='x.csv', every=7):"
    )


# ---- numbers


def plain(
    config: dict[str, Any], make: Any, rates: list[float], steps: int = 4, clip: float = math.inf
) -> dict[str, torch.Tensor]:
    """The same by torch alone, on the examples of all ranks at once."""
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in params().items()}
    own = make(leaves.values())
    for number in range(steps):
        own.param_groups[0]["lr"] = rates[number]
        own.zero_grad()
        pairs = [batch(2 * number + rank) for rank in range(2)]
        fn(leaves, *[torch.cat(each) for each in zip(*pairs, strict=True)]).backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), clip)
        own.step()
    return {path: leaf.detach() for path, leaf in leaves.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_what_torch_does(stage: int) -> None:
    optimizer = {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.95], "weight_decay": 0.1}}
    linear = {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.2, "total_num_steps": 10}
    keys = {"optimizer": optimizer, "gradient_clipping": 0.3, "gradient_accumulation_steps": 4, f"{ZERO}.stage": stage,
            "scheduler": {"type": "WarmupDecayLR", "params": linear}}  # fmt: skip

    def rank_main(rank: int) -> Any:
        step = fz.compat.from_deepspeed(config_with(keys), fn).step
        state = step.init(params())
        for number in range(4):
            state, _ = step(state, *batch(2 * number + rank))
        return dict(fz.gather(state.params))

    make = functools.partial(torch.optim.AdamW, betas=(0.8, 0.95), weight_decay=0.1)
    want = plain(keys, make, [0.0, 0.0, 0.05, 0.1], clip=0.3)
    assert_trees_close(run_ranks(rank_main, 2)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "own"),
    [*[(name, {}) for name in ("RMSprop", "NAdam", "Adadelta", "Adamax", "RAdam", "Adagrad", "SGD")],
     ("RMSprop", {"lr": 0.01, "alpha": 0}), ("NAdam", {"momentum_decay": 0}), ("SGD", {"lr": 0.1, "momentum": 0})],
)  # fmt: skip
def test_an_optimizer_of_torch_has_its_defaults_and_takes_zeros(name: str, own: dict[str, Any]) -> None:
    step = fz.compat.from_deepspeed({**BASE, "optimizer": {"type": name, "params": own}}, fn).step
    state = step.init(params())
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in params().items()}
    theirs = getattr(torch.optim, name)(leaves.values(), **own)
    for number in range(3):
        state, _ = step(state, *batch(number))
        theirs.zero_grad()
        fn(leaves, *batch(number)).backward()
        theirs.step()
    want = {path: leaf.detach() for path, leaf in leaves.items()}
    assert_trees_close(dict(fz.gather(state.params)), want, rtol=1e-6, atol=1e-7)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    made = made_of({"optimizer.params": {"lr": "auto", "betas": "auto", "weight_decay": numpy.float32(0.5)}},
        lr=numpy.float64(0.25), betas=(numpy.float32(0.5), 0.75))  # fmt: skip
    assert "fz.adamw(0.25, b1=0.5, b2=0.75, weight_decay=0.5)" in made.code


def test_a_step_that_fzero_refuses_is_shown() -> None:
    with pytest.raises(ValueError, match=r"(?s)which fzero refuses: from_torch: got torch.optim.LBFGS.*train_step"):
        made_of({"optimizer.type": "LBFGS"})


def test_deepcompile_changes_no_number() -> None:
    def rank_main(rank: int) -> Any:
        after = []
        for deep in (False, True):
            keys = {"compile.deepcompile": deep, f"{ZERO}.stage": 3, "gradient_accumulation_steps": 2}
            step = fz.compat.from_deepspeed(config_with({**keys, "gradient_clipping": 0.5}), fn).step
            state = step.init(params())
            for number in range(3):
                state, _ = step(state, *batch(2 * number + rank))
            after.append(dict(fz.gather(state.params)))
        return after

    for plainly, compiled in run_ranks(rank_main, 2):
        assert_trees_close(compiled, plainly, rtol=1e-5, atol=1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(torch.tanh(self.q_proj(x)))


@in_turns(3)
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        {"tensor_parallel.autotp_size": 2, f"{ZERO}.stage": 1, "tensor_parallel.partition_config.layer_specs": [
            {"patterns": [r".*q_proj\.weight$", r".*q_proj\.bias$"]},
            {"patterns": [r".*o_proj\.weight$"], "partition_type": "row"}]},
        {"sequence_parallel_size": 2, f"{ZERO}.stage": 3},
        {f"{ZERO}.mics_shard_size": 2, f"{ZERO}.stage": 3},
    ],
)  # fmt: skip
def test_no_mesh_changes_a_number(keys: dict[str, Any], deep: bool) -> None:
    apply, params = fz.functional(Net())

    def rank_main(rank: int, keys: dict[str, Any]) -> Any:
        loss = lambda p, x, y: (apply(p, x) - y).square().mean()
        step = fz.compat.from_deepspeed(config_with(keys), loss).step
        state = step.init(params)
        for number in range(3):
            state, _ = step(state, *batch(number))
        return dict(fz.gather(state.params))

    want = rank_main(0, {})
    for found in run_ranks(functools.partial(rank_main, keys={**keys, "compile.deepcompile": deep}), 4):
        assert_trees_close(found, want, rtol=1e-5, atol=1e-6)


def test_deepcompile_of_a_sequence_that_is_cut() -> None:
    """Over two ranks, as `sequence_parallel_size` says, with the attention of fz.parallel in the graph."""
    x = torch.randn(4, 2, 6, 8, generator=torch.Generator().manual_seed(1))  # [batch, heads, sequence, features]

    def rank_main(rank: int, size: int = 2, deep: bool = False) -> Any:
        def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
            if made.mesh is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()
            attend = fz.parallel.ulysses(None, fz.parallel.axis(made.mesh, "sp"), is_causal=True)
            return attend(q, k, v).square().mean()

        keys = {"sequence_parallel_size": size, f"{ZERO}.stage": 3 * (size > 1), "compile.deepcompile": deep}
        made = fz.compat.from_deepspeed(config_with(keys), loss)
        state = made.step.init({name: torch.eye(8) for name in "qkv"})
        for _ in range(3):
            state, _ = made.step(state, x.chunk(size, 2)[rank])
        return dict(fz.gather(state.params))

    want = rank_main(0, 1)
    for deep in (False, True):
        for found in run_ranks(functools.partial(rank_main, deep=deep), 2):
            assert_trees_close(found, want, rtol=1e-5, atol=1e-6)


def test_inputs_that_are_cast_and_a_step_that_is_pickled() -> None:
    made = made_of({"fp16.auto_cast": True, "scheduler.type": "WarmupLR"})
    seen: list[torch.dtype] = []
    probe = fz.compat.cast_inputs(lambda p, x, n, own: seen.extend([x.dtype, n.dtype, own["y"].dtype]), torch.float16)
    probe(None, torch.ones(1), torch.ones(1, dtype=torch.int64), {"y": torch.ones(1)})
    assert seen == [torch.float16, torch.int64, torch.float16]
    again = pickle.loads(pickle.dumps(made.step))
    assert str(again) == str(made.step)
    states = [step(step.init(params()), *batch(0))[0] for step in (made.step, again)]
    assert_trees_equal(*[dict(fz.gather(state.params)) for state in states])


@pytest.mark.parametrize("name", ["zero3-fp32-2", "zero2-bf16-3", "sgd-2", "lion-1"])
def test_a_run_of_deepspeed_goes_on_in_two_calls(name: str) -> None:
    """Its configuration, and its checkpoint; the optimizer was the script's own, as it may be in DeepSpeed."""
    stage = int(name[4]) if name.startswith("zero") else 2
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    held = held_of(name)

    def rank_main(rank: int) -> Any:
        step = fz.freeze(fz.compat.from_deepspeed(config, product, optimizer=optimizer(name)).step, "base.*")
        state = fz.compat.load_deepspeed(FOLDERS / name, step)
        frozen = {path: torch.zeros_like(leaf) for path, leaf in held["frozen"].items()}
        return fz.gather(step.update(state, {**held["grads"], **frozen})[0].params)

    after = run_ranks(rank_main, 2)[0]
    assert_trees_close({path: after[path] for path in held["trained"]}, held["next"], rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("kind", "params", "rates"),
    [
        ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 1.1, "warmup_num_steps": 4, "warmup_type": "linear"},
         [0.1, 0.1, 0.35, 0.6, 0.85, 1.1, 1.1]),
        ("WarmupLR", {"warmup_num_steps": 4}, [0.0, 0.0, 0.25, 0.25 * math.log2(3), 0.5, 0.5]),
        ("WarmupDecayLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 1, "total_num_steps": 4, "warmup_type": "linear"},
         [0.0, 0.0, 0.5, 1.0, 0.5, 0.0, 0.0]),
        ("WarmupCosineLR", {"warmup_num_steps": 2, "total_num_steps": 4, "cos_min_ratio": 0.2, "warmup_min_ratio": 0.5},
         [0.0, 0.25, 0.5, 0.3, 0.1, 0.1]),
        ("OneCycle", {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_second_step_size": 4,
                      "decay_step_size": 2, "decay_lr_rate": 1.0},
         [1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0, 1 / 1.5, 0.5]),
        ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2},
         [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0]),
        ("LRRangeTest", {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2}, [1.0, 1.5, 2.0, 2.5]),
        ("LRRangeTest", {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
         [1.0, 1.0, 2.0, 2.0]),
    ],
)  # fmt: skip
def test_schedules(kind: str, params: dict[str, Any], rates: list[float]) -> None:
    """By hand, from DeepSpeed's definitions; its own run beside them in test_beside_deepspeed.py."""
    schedule = fz.compat.deepspeed_schedule(kind, 0.5, **params)
    assert [schedule(count) for count in range(len(rates))] == pytest.approx(rates)


def test_a_cycle_of_momentum() -> None:
    own = {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.2,
        "cycle_first_step_size": 2,
        "decay_step_size": 1,
        "decay_mom_rate": 0.1,
    }
    momentum = fz.compat.deepspeed_schedule("OneCycle", momentum=True, **own)  # type: ignore[arg-type]
    assert [momentum(count) for count in range(7)] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.1, 0.9 * 1.2])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: fz.compat.deepspeed_schedule("Warmup", 0.1), "got type='Warmup', expected one of 'WarmupLR'"),
        (lambda: fz.compat.deepspeed_schedule(3, 0.1), "got type=3"),  # type: ignore[arg-type]
        (lambda: fz.compat.deepspeed_schedule("WarmupLR"), "expected the rate of the optimizer"),
        (lambda: fz.compat.deepspeed_schedule("WarmupLR", "fast"), "got lr='fast'"),  # type: ignore[arg-type]
        (lambda: fz.compat.deepspeed_schedule("WarmupLR", 0.1, warmup_steps=3), "expected warmup_num_steps"),
        (lambda: fz.compat.deepspeed_schedule("WarmupLR", 0.1, warmup_num_steps=0), "at least 1"),
        (lambda: fz.compat.deepspeed_schedule("WarmupLR", 0.1, warmup_min_lr="x"), "got warmup_min_lr='x'"),
        (lambda: fz.compat.deepspeed_schedule("WarmupDecayLR", 0.1), "got no total_num_steps="),
        (lambda: fz.compat.deepspeed_schedule("WarmupLR", 0.1, warmup_type="x"), "expected 'log' or 'linear'"),
        (lambda: fz.compat.deepspeed_schedule("WarmupLR", 0.1, momentum=True), "OneCycle alone"),
        (lambda: fz.compat.cast_inputs(nn.Linear(1, 1), torch.float16), "got fn="),
        (lambda: fz.compat.cast_inputs(fn, torch.int8), "got dtype="),
        (lambda: fz.compat.from_deepspeed(3, fn), "got config=3"),  # type: ignore[arg-type]
        (lambda: fz.compat.from_deepspeed({3: 4}, fn), "got the key 3"),  # type: ignore[dict-item]
        (lambda: fz.compat.from_deepspeed(BASE, 3), "got fn=3"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_a_wrong_kind(call: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        call()


@pytest.mark.parametrize(
    ("text", "match"),
    [("{", "got no JSON"), ("[1]", "got list, expected an object"), ('{"a": 1, "a": 2}', "twice in .'a', 'a'")],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "ds_config.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        fz.compat.from_deepspeed(tmp_path / "ds_config.json", fn)
    with pytest.raises(FileNotFoundError):
        fz.compat.from_deepspeed(str(tmp_path / "none.json"), fn)


# ---- the command


def printed(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], *given: str
) -> tuple[int, str, str]:
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    done = command.main([str(tmp_path / "ds_config.json"), *given])
    said = capsys.readouterr()
    return done, said.out, said.err


@pytest.mark.parametrize(
    ("key", "auto"),
    [
        ("zero_optimization.gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
        ("zero_optimization.gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
        ("bfloat16.enabled", "bfloat16_enabled"),
        ("bfloat16.enabled", "bf16_enabled"),
    ],
)
def test_a_value_of_auto_is_given_by_the_key_as_it_was_written(key: str, auto: str) -> None:
    block, name = key.split(".")
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, block: {name: "auto"}}
    made = fz.compat.from_deepspeed(config, lambda p, x: (p["w"] * x).sum(), **{auto: False})
    assert [(row.value, row.verdict) for row in made.report if row.key == key] == [(False, "honoured")]


def test_the_command_makes_arguments_of_autos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**SIZES, **EITHER, "optimizer": TRAINERS, "scheduler": DECAY, "zero_optimization": {"stage": 1}}
    done, said, _ = printed(config, tmp_path, capsys, "--ranks", "2", "--auto", "eps=1e-6", "weight_decay=0.1")
    assert done == 0
    asked = {**{key: value for key, value in TRAINER.items() if f"{key}" in said.partition("):")[0]}, "lr": 0.01}
    namespace: dict[str, Any] = {}
    exec(said, namespace)
    names = re.search(r"def make_step\(fn, (.*)\):", said)
    assert names
    known = {**TRAINER, "bf16_enabled": True, "fp16_enabled": False, **asked}

    def rank_main(rank: int) -> tuple[str, str]:
        step = namespace["make_step"](fn, **{name: known[name] for name in names[1].split(", ")})
        autos = {**autos_of(config), "eps": 1e-6, "weight_decay": 0.1}
        return str(step), str(fz.compat.from_deepspeed(config, fn, **autos).step)

    for own, want in run_ranks(rank_main, 2):
        assert own == want


def test_clipping_by_an_argument_that_is_zero_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    exec(printed({**BASE, "gradient_clipping": "auto"}, tmp_path, capsys)[1], namespace)
    steps = [namespace["make_step"](fn, 0.0), made_of({}).step]
    states = [step(step.init(params()), *batch(0))[0] for step in steps]
    assert_trees_equal(*[dict(fz.gather(state.params)) for state in states])


def test_the_command_says_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, said, errors = printed({**BASE, "zenflow": True}, tmp_path, capsys)
    assert done == 1 and "refused" in said and "import" not in said and "zenflow: got True" in errors
    assert command.main([str(tmp_path / "none.json")]) == 1
    for wrong in (["--ranks", "0"], ["--auto", "lr"], ["--auto", "lr=1", "lr=2"], ["--auto", "optimizer=fz.sgd(1)"]):
        with pytest.raises(SystemExit):
            command.main([str(tmp_path / "ds_config.json"), *wrong])


@in_turns(10, "interpreters of their own")
def test_the_command_runs_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(BASE))
    run = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "fzero.compat.deepspeed",
        str(tmp_path / "ds_config.json"),
        "--ranks",
        "8",
    ]
    root = str(Path(fz.__file__).parents[1])
    done = subprocess.run(run, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root})
    assert not done.stderr and "step = fz.shard_zero1(step)" in done.stdout
