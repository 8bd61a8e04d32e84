"""The blocks of a configuration as code: devices, batches, precision, memory, logs."""

from __future__ import annotations

import math
import os

import torch

from fzero.compat.deepspeed.keys import ZERO
from fzero.compat.deepspeed.reading import AUTO, Name, Reading

_DTYPE = "one of 'bf16', 'fp16', 'fp32'"


def devices(r: Reading) -> None:
    """The mesh: how many ranks there are along each axis."""
    r.mesh = {"dp": r.ranks}
    keys = {"tp": "tensor_parallel.autotp_size", "sp": "sequence_parallel_size"}
    sizes = {axis: max(1, r.integer(key, 1, 0)) for axis, key in keys.items()}
    if r.integer("tensor_parallel.tp.tp_size", 1) not in (1, sizes["tp"]):
        r.refuse("tensor_parallel.tp.tp_size", "it is for inference. Write tensor_parallel.autotp_size")
    cuts = {axis: size for axis, size in sizes.items() if size > 1}
    if len(cuts) > 1:
        r.refuse(keys["sp"], "DeepSpeed has no mesh of this and of tensor parallelism. Keep one")
    for axis, size in [*cuts.items()][:1]:
        if r.ranks % size:
            r.refuse(keys[axis], f"it is no divisor of the number of ranks, which is {r.ranks}")
        r.mesh = {"dp": r.ranks // size, axis: size}
        said = "axis 'sp': fn runs fz.parallel.ulysses over it, and gradients are means over its ranks too"
        r.honour(keys[axis], said if axis == "sp" else "fz.shard_tensor(step, ..., mesh=mesh)")
    for key in r.under("tensor_parallel"):
        if "tp" not in r.mesh and key != "autotp_size":
            r.hint(f"tensor_parallel.{key}", "there is no tensor parallelism")
    data = r.mesh["dp"]
    if r.integer("data_parallel_size", data) != data:
        r.refuse("data_parallel_size", f"{r.ranks} ranks make {data}. Leave it out")
    shards, second = r.integer(f"{ZERO}.mics_shard_size", -1), r.integer(f"{ZERO}.zero_hpz_partition_size", 1)
    if second not in (0, 1, data):
        said = "there is one partition of the params. Leave it out, which changes no number; or shard states in a node"
        said += ": fz.shard_zero3(step, mesh, 'shard', replicate='replicate')"
        r.refuse(f"{ZERO}.zero_hpz_partition_size", said)
    r.hint(f"{ZERO}.zero_hpz_partition_size", "there is one partition of the params")
    if shards <= 0:
        r.hint(f"{ZERO}.mics_shard_size", "off")
    elif r.integer(f"{ZERO}.stage", 0) != 3 or cuts or data % shards:
        r.refuse(f"{ZERO}.mics_shard_size", f"expected stage 3, a divisor of {data} ranks, and no other parallelism")
    elif shards < data:
        r.mesh = {"replicate": data // shards, "shard": shards}
    r.honour(f"{ZERO}.mics_shard_size", "fz.shard_zero3(..., replicate=); DeepSpeed 0.19 has removed it")


def batch(r: Reading) -> str:
    """The batch arithmetic. Returns what gradients are multiplied by, in code, or nothing."""
    keys = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    ranks = math.prod([size for axis, size in r.mesh.items() if axis not in ("tp", "sp")])
    total, micro, count = [0 if r.values.get(key) == AUTO else r.integer(key, 0, 1) for key in keys]
    name: object = None
    if not count and total and micro:
        count = total // (micro * ranks)
    elif not count and r.names:
        name = r.take(keys[2], None, open=True)
    if not name:
        count = max(count, 1)
        micro = micro or total // (count * ranks)
        if total and total != micro * count * ranks:
            said = f"{micro} examples x {count} microbatches x {ranks} data-parallel ranks"
            r.refuse(keys[0], f"expected {micro * count * ranks}: {said}")
    size = f"a call takes {micro * count} examples of each rank" if micro and count else "a call takes what it is given"
    managed = r.flag("managed_gradient_accumulation", True)
    call = f"fz.accumulate(step, {name or count})" if managed and (name or count > 1) else "a call is one microbatch"
    for key, said in zip(keys, (size, size, call), strict=True):
        (r.hint if r.values.get(key) == AUTO and not name else r.honour)(key, said)
    if call.startswith("fz."):
        r.transforms.append(call)
    r.honour("managed_gradient_accumulation", call if managed else "gradients are divided, and not accumulated")
    times = 1.0 if managed else 1 / max(count, 1)
    if r.take("gradient_allreduce_op", "mean", "a string", among=("mean", "sum")) == "sum":
        times *= ranks
        if r.integer(f"{ZERO}.stage", 0) == 3:
            r.refuse("gradient_allreduce_op", "DeepSpeed has no sum at stage 3")
    for key in ("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor"):
        r.honour(key, "the mean over ranks" if times == 1 else f"the mean over ranks, times {times:g}")
    return repr(times) if times != 1 else ""


def precision(r: Reading) -> str:
    """The policy, in code, or nothing; the loss scale and autocast among the transforms."""
    on = {"fp16": r.enabled("fp16"), "bf16": r.enabled("bf16")}
    lows = {"fp16": torch.float16, "bf16": torch.bfloat16}
    if on["fp16"] is True and on["bf16"] is True:
        r.refuse("fp16.enabled", "bf16 is enabled too. Keep one")
    policies = {block: _policy(r, block, lows[block]) for block in on if on[block] is not False}
    choice = _policy(r, "", None)
    for block, policy in policies.items():
        choice = policy if on[block] is True else f"{policy} if {on[block]} else {choice}"
        r.honour(f"{block}.enabled", policy if on[block] is True else f"{policy} if {on[block]}")
    if "bf16" in policies:
        said = "an update that is not finite is skipped: the default since 0.19; before, it was applied"
        r.add("bf16.check_grad_overflow", True, "honoured", said)
    if "fp16" in policies:
        _scaled(r, on["fp16"])
    if r.enabled("torch_autocast"):
        low = r.take("torch_autocast.dtype", None, _DTYPE)
        r.add("torch_autocast.dtype", None, "refused", "say 'bfloat16' or 'float16': torch's default is each device's")
        if low not in lows.values():
            r.refuse("torch_autocast.dtype", "expected 'bfloat16' or 'float16'")
        r.honour("torch_autocast.dtype", f"fz.autocast(step, {low})")
        r.transforms.append(f"fz.autocast(step, {low})")
        if low == torch.float16:  # torch.amp.GradScaler's defaults
            r.transforms.append("fz.loss_scale(step, initial=2.0**16, interval=2000, minimum=2.0**-24)")
    wanted = r.take("data_types.param_dtype", None, _DTYPE)
    if wanted not in [None, *[lows[block] for block in policies], *[torch.float32] * (not policies)]:
        r.refuse("data_types.param_dtype", "fp16 and bf16 say another one")
    return "" if choice == "fz.Policy()" else choice


def _policy(r: Reading, block: str, low: torch.dtype | None) -> str:
    """The policy of a block, in code: params that are computed with in its dtype, DeepSpeed's masters and sums."""
    sequence = "seq_parallel_communication_data_type"
    key = sequence if "sp" in r.mesh and r.values.get(sequence) is not None else "communication_data_type"
    sent, sums = r.take(key, None, _DTYPE), r.take("data_types.grad_accum_dtype", None, _DTYPE)
    r.honour(key, f"fz.Policy: gradients travel in {sent}, or as they are kept where that is wider")
    r.honour("data_types.grad_accum_dtype", f"fz.Policy: gradients are summed in {sums}")
    r.hint(sequence, "there is no sequence parallelism")
    masters, states = f"{block}.{block}_master_weights_and_grads", f"{block}.{block}_optimizer_states"
    narrow = {key: low is not None and r.flag(key) for key in (masters, states)}
    for key in (masters, states):
        if narrow[key] and not r.integer(f"{ZERO}.stage", 0):
            r.refuse(key, "DeepSpeed has it at stages 1, 2 and 3")
        r.honour(key, f"fz.Policy: {low if narrow[key] else torch.float32}")
    if narrow[states] and not narrow[masters]:
        r.refuse(states, "it needs bf16_master_weights_and_grads")
    said, wide = dict[str, object](), torch.float32
    if low is not None:
        kept = low if narrow[masters] or wide not in (sent, sums) else wide
        said |= {"param": low if narrow[masters] else wide, "grad": kept}
        said |= {"moment": low if narrow[states] else wide, "compute": low}
    if (sent or sums) and wide not in (sent, sums) and (sums or sent != low):
        said["reduce"] = sent or sums
    if r.flag(f"{ZERO}.zero_quantized_weights"):
        said["gather"] = "8-bit"
        r.honour(f"{ZERO}.zero_quantized_weights", "fz.Policy(gather='8-bit')")
        if r.integer(f"{ZERO}.stage", 0) != 3:
            r.refuse(f"{ZERO}.zero_quantized_weights", "DeepSpeed has it at stage 3 only")
    return f"fz.Policy({', '.join([f'{name}={value!r}' for name, value in said.items()])})"


def _scaled(r: Reading, half: bool | Name) -> None:
    """The loss scale, and the cast of inputs."""
    keys = {"loss_scale_window": 1000, "min_loss_scale": 1, "hysteresis": 2}
    window, least, hysteresis = [r.take(f"fp16.{key}", x, "an int", 1, open=True) for key, x in keys.items()]
    power = r.take("fp16.initial_scale_power", 16, "an int", 0, open=True)
    more = f", hysteresis={hysteresis!r}{', consecutive=True' * r.flag('fp16.consecutive_hysteresis')}"
    if not r.integer(f"{ZERO}.stage", 0):
        more = ""
        for key in ("hysteresis", "consecutive_hysteresis"):
            r.hint(f"fp16.{key}", "DeepSpeed has it at stages 1, 2 and 3")
    call = f"fz.loss_scale(step, initial=2.0**{power!r}, interval={window!r}, minimum={least!r}{more}, late=True)"
    if scale := r.take("fp16.loss_scale", 0, "a number", 0):
        call = f"fz.loss_scale(step, {float(scale)!r})"  # type: ignore[arg-type]
    for key in ("loss_scale", "initial_scale_power", "consecutive_hysteresis", *keys):
        (r.honour if not scale or key == "loss_scale" else r.hint)(f"fp16.{key}", call)
    r.transforms.append(call if half is True else f"{call} if {half} else step")
    if r.flag("fp16.auto_cast"):
        cast = "fz.compat.cast_inputs(fn, torch.float16)"
        r.lines.append(f"fn = {cast if half is True else f'{cast} if {half} else fn'}")
        r.honour("fp16.auto_cast", cast)


def memory(r: Reading) -> None:
    """What is sharded, offloaded and recomputed."""
    stage, steps, ways = r.take(f"{ZERO}.stage", 0, "an int", among=(0, 1, 2, 3)), r.transforms, ""
    assert isinstance(stage, int)
    if len(r.mesh) > 1:
        where = '"cuda" if torch.cuda.is_available() else "cpu"'
        shape = f"{tuple(r.mesh.values())}, mesh_dim_names={tuple(r.mesh)}"
        r.lines.insert(0, f"mesh = torch.distributed.init_device_mesh({where}, {shape})")
        ways = {"shard": ", axis='shard', replicate='replicate'", "sp": ", axis=('dp', 'sp')"}.get([*r.mesh][1], "")
        ways = f", mesh=mesh{ways}"
    if stage or math.prod([size for axis, size in r.mesh.items() if axis != "tp"]) > 1:
        steps.append(f"fz.shard_zero{stage or 1}(step{ways})")
        r.honour(f"{ZERO}.stage", steps[-1] + ": the least that reduces over ranks" * (not stage))
    if "tp" in r.mesh:
        steps.append(f"fz.shard_tensor(step, {_plan(r)}, mesh=mesh)")
    steps += (places := _offloads(r, stage))
    if r.flag(f"{ZERO}.gather_16bit_weights_on_model_save"):
        said = "fz.save_safetensors(folder, state, dtype=torch.bfloat16)"
        r.honour(f"{ZERO}.gather_16bit_weights_on_model_save", said)
    block = "activation_checkpointing"
    cut, host = r.flag(f"{block}.partition_activations"), r.flag(f"{block}.cpu_checkpointing")
    calls = ["fz.remat(step)"] * (cut or host) + ["fz.offload(step, activations='host')"] * host
    for key in ["partition_activations"] * cut + ["cpu_checkpointing"] * host:
        r.honour(f"{block}.{key}", " and ".join(calls))
    if r.flag("compile.deepcompile"):
        calls.append("fz.jit(step)")
        r.honour("compile.deepcompile", calls[-1])
        for key in [f"compile.{key}" for key in ("offload_activation", "offload_opt_states", "offload_parameters")]:
            if r.flag(key):
                r.refuse(key, "a graph takes no offloading. Leave it out")
        if places or host or "tp" in r.mesh:
            r.refuse("compile.deepcompile", "a graph takes no offloading and no tensor axis. Leave it out")
    for key in r.under("compile"):
        r.hint(f"compile.{key}", "a graph has no such choice" if r.flag("compile.deepcompile") else "off")
    r.lines += [f"step = {call}" for call in [*steps, *calls]]


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
                r.refuse(key, f"{spec!r} is more than patterns and a style. Write a plan for fz.shard_tensor")
            gathered = "_gather" if own.get("gather_output") and style == "column" else ""
            plan[plain.replace("\0", ".")] = f"{style}{gathered}"
    r.honour(key, "the plan of fz.shard_tensor")
    return repr(plan or "auto")


def _offloads(r: Reading, stage: int) -> list[str]:
    places: dict[str, str] = {}
    for block, least in ((f"{ZERO}.offload_optimizer", 1), (f"{ZERO}.offload_param", 3)):
        place = r.take(f"{block}.device", "none", "a string", among=("none", "cpu", "nvme"))
        path, ratio = r.take(f"{block}.nvme_path", None, "a string"), r.take(f"{block}.ratio", 1.0, "a number", 0)
        if place == "nvme" and path is None:
            r.refuse(f"{block}.device", "it needs nvme_path")
        if place != "nvme":
            r.hint(f"{block}.nvme_path", "the device is another one")
        if place != "none" and stage < least:
            r.hint(f"{block}.device", f"DeepSpeed has it from stage {least} on")
        elif place != "none" and ratio:
            places[block] = f"fz.Disk({path!r})" if place == "nvme" else "'host'"
            if ratio != 1:
                r.hint(f"{block}.ratio", "all is offloaded: fz.offload(step, ..., pattern=) takes a part")
    if not places:
        return []
    place, moments = next(iter(places.values())), f"{ZERO}.offload_optimizer" in places
    call = f"fz.offload(step, params={place}{f', moments={place}' * moments})"  # params lie where masters do
    for key in [f"{block}.{key}" for block in places for key in r.under(block)]:
        r.honour(key, call)
    return [call]


def logs(r: Reading) -> None:
    """What fz.loop takes."""
    for block, argument, ending in (("tensorboard", "tensorboard", ""), ("csv_monitor", "log", ".csv")):
        if r.enabled(block):
            job = r.take(f"{block}.job_name", "DeepSpeedJobName", "a string")
            r.loop[argument] = os.path.join(str(r.take(f"{block}.output_path", "", "a string")), f"{job}{ending}")
            for key in r.under(block):
                r.honour(f"{block}.{key}", f"fz.loop(..., {argument}={r.loop[argument]!r})")
    if r.values.get("steps_per_print") in (None, AUTO, math.inf):
        r.hint("steps_per_print", "fz.loop prints as it is called")
    elif every := r.take("steps_per_print", None, "an int", 1):
        r.loop["every"] = every
        r.honour("steps_per_print", f"fz.loop(..., every={every})")
