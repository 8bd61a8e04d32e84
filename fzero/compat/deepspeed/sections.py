"""The blocks of a configuration as code: devices, batches, precision, memory, logs."""

from __future__ import annotations

import math
import os

import torch

from fzero.compat.deepspeed.keys import ZERO
from fzero.compat.deepspeed.reading import AUTO, Name, Reading

_DTYPE = "one of 'bf16', 'fp16', 'fp32'"
_LOWS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def devices(r: Reading) -> None:
    """The mesh: how many ranks there are along each axis."""
    r.mesh = {"dp": r.ranks}
    keys = {"tp": "tensor_parallel.autotp_size", "sp": "sequence_parallel_size"}
    cuts = {axis: size for axis, key in keys.items() if (size := r.take(key, 1, least=0)) > 1}
    if len(cuts) > 1:
        r.refuse("DeepSpeed has no mesh of this and of tensor parallelism. Keep one", keys["sp"])
    for axis, size in [*cuts.items()][:1]:
        if r.ranks % size:
            r.refuse(f"it is no divisor of the number of ranks, which is {r.ranks}", keys[axis])
        r.mesh = {"dp": max(1, r.ranks // size), axis: size}
    if "tp" not in r.mesh:
        r.hint("there is no tensor parallelism", *[key for key in r.under("tensor_parallel") if key != keys["tp"]])
    data, mics, second = r.mesh["dp"], f"{ZERO}.mics_shard_size", f"{ZERO}.zero_hpz_partition_size"
    if r.take(second, 1) not in (0, 1, data):
        r.refuse("leave it out, or write fz.shard_zero3(step, mesh, 'shard', replicate='replicate')", second)
    shards = r.take(mics, -1)
    if shards <= 0:
        r.hint("off", mics)
    elif r.take(f"{ZERO}.stage", 0) != 3 or cuts or data % shards:
        r.refuse(f"expected stage 3, a divisor of {data} ranks, and no other parallelism", mics)
    elif shards < data:
        r.mesh = {"replicate": data // shards, "shard": shards}


def batch(r: Reading) -> str:
    """The batch arithmetic. Returns what gradients are multiplied by, in code, or nothing."""
    keys = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    data = r.mesh.get("dp", r.ranks)
    total, micro, count = [0 if r.values.get(key) == AUTO else r.take(key, 0, least=1) for key in keys]
    if not count and r.names and not (total and micro):
        count = r.take(keys[2], 1, open=True)
    size, named = "a call takes what it is given", isinstance(count, Name)
    if not named:
        count = count or max(1, total // (max(1, micro) * data) if micro else 1)
        micro = micro or total // (count * data)
        if total and total != micro * count * data:
            said = f"{micro} examples x {count} microbatches x {data} data-parallel ranks"
            r.refuse(f"expected {micro * count * data}: {said}", keys[0])
        size = f"a call takes {micro * count} examples of each rank" if micro else size
    managed = r.take("managed_gradient_accumulation", True)
    call = f"fz.accumulate(step, {count})" if managed and count != 1 else "a call is one microbatch"
    for key, said in zip(keys, (size, size, call), strict=True):
        (r.hint if r.values.get(key) == AUTO and not named else r.honour)(said, key)
    if call.startswith("fz."):
        r.transforms.append(call)
    times = 1.0 if managed or named else 1 / count
    if r.take("gradient_allreduce_op", "mean", among=("mean", "sum")) == "sum":
        times *= data
    return repr(times) if times != 1 else ""


def precision(r: Reading) -> str:
    """The policy, in code, or nothing; the loss scale and autocast among the transforms."""
    on = {block: enabled for block in _LOWS if (enabled := r.enabled(block)) is not False}
    if len(on) == 2 and not any(isinstance(each, Name) for each in on.values()):
        r.refuse("bf16 is enabled too. Keep one", "fp16.enabled")
    choice = _policy(r, "", None)
    for block in on:
        choice = _if(on[block], _policy(r, block, _LOWS[block]), choice)
    if "bf16" in on:
        said = "an update that is not finite is skipped: the default since 0.19; before, it was applied"
        r.add("bf16.check_grad_overflow", True, said)
    if "fp16" in on:
        r.transforms.append(_if(on["fp16"], _loss_scale(r), "step"))
        if r.take("fp16.auto_cast", False):
            r.lines.append(f"fn = {_if(on['fp16'], 'fz.compat.cast_inputs(fn, torch.float16)', 'fn')}")
    if r.enabled("torch_autocast"):
        low = r.take("torch_autocast.dtype", None, _DTYPE)
        if low not in _LOWS.values():
            r.refuse("expected 'bfloat16' or 'float16': torch's default is each device's", "torch_autocast.dtype")
        r.transforms.append(f"fz.autocast(step, {low})")
        if low == torch.float16:  # torch.amp.GradScaler's defaults
            r.transforms.append("fz.loss_scale(step, initial=2.0**16, interval=2000, minimum=2.0**-24)")
    return "" if choice == "fz.Policy()" else choice


def _if(on: bool | Name, made: str, other: str) -> str:
    return f"{made} if {on} else {other}" if isinstance(on, Name) else made


def _policy(r: Reading, block: str, low: torch.dtype | None) -> str:
    """The policy of a block, in code: params that are computed with in its dtype, DeepSpeed's masters and sums."""
    sequence, said = "seq_parallel_communication_data_type", list[str]()
    if "sp" not in r.mesh:
        r.hint("there is no sequence parallelism", sequence)
    key = sequence if "sp" in r.mesh and r.has(sequence) else "communication_data_type"
    sent, sums, wide = r.take(key, None, _DTYPE), r.take("data_types.grad_accum_dtype", None, _DTYPE), torch.float32
    if low is not None:
        keys = f"{block}.{block}_master_weights_and_grads", f"{block}.{block}_optimizer_states"
        masters, moments = [low if r.take(key, False) else wide for key in keys]
        kept = low if masters == low or wide not in (sent, sums) else wide
        said = [f"param={masters}", f"grad={kept}", f"moment={moments}", f"compute={low}"]
    if (sent or sums) and wide not in (sent, sums) and (sums or sent != low):
        said.append(f"reduce={sent or sums}")
    if r.take(f"{ZERO}.zero_quantized_weights", False):
        said.append("gather='8-bit'")
        if r.take(f"{ZERO}.stage", 0) != 3:
            r.refuse("DeepSpeed has it at stage 3 only", f"{ZERO}.zero_quantized_weights")
    return f"fz.Policy({', '.join(said)})"


def _loss_scale(r: Reading) -> str:
    keys = {"initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1, "hysteresis": 2}
    power, window, least, hysteresis = [r.take(f"fp16.{key}", x, least=x != 16, open=True) for key, x in keys.items()]
    more = f", hysteresis={hysteresis!r}{', consecutive=True' * r.take('fp16.consecutive_hysteresis', False)}"
    if not r.take(f"{ZERO}.stage", 0):
        more = ""
        r.hint("DeepSpeed has it at stages 1, 2 and 3", "fp16.hysteresis", "fp16.consecutive_hysteresis")
    if scale := r.take("fp16.loss_scale", 0.0, least=0):
        r.hint("the scale is static", "fp16.consecutive_hysteresis", *[f"fp16.{key}" for key in keys])
        return f"fz.loss_scale(step, {float(scale)!r})"
    return f"fz.loss_scale(step, initial=2.0**{power!r}, interval={window!r}, minimum={least!r}{more}, late=True)"


def memory(r: Reading) -> None:
    """What is sharded, offloaded and recomputed."""
    stage, steps, ways = r.take(f"{ZERO}.stage", 0, among=(0, 1, 2, 3)), r.transforms, ""
    if len(r.mesh) > 1:
        where = '"cuda" if torch.cuda.is_available() else "cpu"'
        shape = f"{tuple(r.mesh.values())}, mesh_dim_names={tuple(r.mesh)}"
        r.lines.insert(0, f"mesh = torch.distributed.init_device_mesh({where}, {shape})")
        ways = {"shard": ", axis='shard', replicate='replicate'", "sp": ", axis=('dp', 'sp')"}.get([*r.mesh][1], "")
        ways = f", mesh=mesh{ways}"
    if stage or r.ranks > r.mesh.get("tp", 1):
        steps.append(f"fz.shard_zero{stage or 1}(step{ways})")
        r.honour(steps[-1], *[f"{ZERO}.stage"] * bool(stage))
    if "tp" in r.mesh:
        steps.append(f"fz.shard_tensor(step, {_plan(r)}, mesh=mesh)")
    _offload(r, stage)
    r.take(f"{ZERO}.stage3_gather_16bit_weights_on_model_save", False)
    block = "activation_checkpointing"
    cut, host = [r.take(f"{block}.{key}", False) for key in ("partition_activations", "cpu_checkpointing")]
    steps += ["fz.remat(step)"] * (cut or host) + ["fz.offload(step, activations='host')"] * host
    if r.take("compile.deepcompile", False):
        if any(call.startswith("fz.offload(") for call in steps):
            r.refuse("graphs do not offload. Leave it out", "compile.deepcompile")
        steps.append("fz.jit(step)")
    r.lines += [f"step = {call}" for call in steps]


def _plan(r: Reading) -> str:
    """The plan of tensor parallelism, in code: regular expressions as patterns of fnmatch, where they say no more."""
    key = "tensor_parallel.partition_config.layer_specs"
    specs, plan = r.take(key, []), dict[str, str]()
    for spec in specs if isinstance(specs, list) else [specs]:
        own = spec if isinstance(spec, dict) else {}
        style = own.get("partition_type", "column").lower().replace("skip", "whole")
        for pattern in own.get("patterns", [""]):
            plain = str(pattern).removeprefix("^").removesuffix("$").replace("\\.", "\0").replace(".*", "*")
            more = {*own} - {"patterns", "partition_type", "gather_output"} or {*plain} & {*".^$+?(){}|\\"}
            if more or not plain or style not in ("column", "row", "whole"):
                r.refuse(f"{spec!r} is more than patterns and a style. Write a plan for fz.shard_tensor", key)
            gathered = "_gather" if own.get("gather_output") and style == "column" else ""
            plan[plain.replace("\0", ".")] = f"{style}{gathered}"
    return repr(plan or "auto")


def _offload(r: Reading, stage: int) -> None:
    places: dict[str, str] = {}
    for kind, least in (("moments", 1), ("params", 3)):
        block = f"{ZERO}.offload_{'optimizer' if kind == 'moments' else 'param'}"
        place, path = r.take(f"{block}.device", "none", among=("none", "cpu", "nvme")), r.take(f"{block}.nvme_path", "")
        if place == "nvme" and not path:
            r.refuse("it needs nvme_path", f"{block}.device")
        if place != "none" and stage < least:
            r.hint(f"DeepSpeed has it from stage {least} on", f"{block}.device")
        elif place != "none":
            places[kind] = f"fz.Disk({path!r})" if place == "nvme" else "'host'"
    if places:
        place = next(iter(places.values()))  # params lie where masters do
        r.transforms.append(f"fz.offload(step, params={place}{f', moments={place}' * ('moments' in places)})")


def logs(r: Reading) -> None:
    """What fz.loop takes."""
    for block, argument, ending in (("tensorboard", "tensorboard", ""), ("csv_monitor", "log", ".csv")):
        if r.enabled(block):
            job = r.take(f"{block}.job_name", "DeepSpeedJobName")
            r.loop[argument] = os.path.join(r.take(f"{block}.output_path", ""), f"{job}{ending}")
    if r.values.get("steps_per_print") in (None, AUTO, math.inf):
        r.hint("fz.loop prints as it is called", "steps_per_print")
    elif every := r.take("steps_per_print", 0, least=1):
        r.loop["every"] = every
