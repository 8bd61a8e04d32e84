"""The blocks of a configuration as code: batches, devices, precision, memory, monitors."""

from __future__ import annotations

import math
import os

import torch

from fzero.compat.deepspeed.reading import Name, Reading, boolean, dtype, integer, number, text

ZERO = "zero_optimization"


def devices(r: Reading) -> None:
    """The mesh: how many ranks there are along each axis."""
    r.mesh = {"dp": r.ranks}
    tensor = _int(r, "tensor_parallel.autotp_size", 0) or 1
    sequence = _int(r, "sequence_parallel_size", 1, 1)
    nested = _int(r, "tensor_parallel.tp.tp_size", 1, 1)
    if nested not in (1, tensor):
        r.refuse("tensor_parallel.tp.tp_size", "it is for inference. Say tensor_parallel.autotp_size")
    r.hint("tensor_parallel.tp.tp_size", "tensor_parallel.autotp_size says it")
    if tensor > 1 and sequence > 1:
        r.refuse("sequence_parallel_size", "DeepSpeed has no mesh of this and of tensor parallelism. Keep one")
        return
    size, key = (tensor, "tensor_parallel.autotp_size") if tensor > 1 else (sequence, "sequence_parallel_size")
    if r.ranks % size:
        r.refuse(key, f"it is no divisor of the number of ranks, which is {r.ranks}")
        return
    r.mesh = {"dp": r.ranks // size} | ({} if size == 1 else {"tp" if tensor > 1 else "sp": size})
    if tensor == 1:
        r.honour("tensor_parallel.autotp_size", "no tensor parallelism")
    said = "axis 'sp' of the mesh: fn runs fz.parallel.ulysses over it; gradients are means over its ranks too"
    r.honour("sequence_parallel_size", said if sequence > 1 else "no sequence parallelism")
    if _int(r, "data_parallel_size", r.mesh["dp"]) != r.mesh["dp"]:
        r.refuse("data_parallel_size", f"{r.ranks} ranks / {size} are {r.mesh['dp']}. Leave it out")
    r.honour("data_parallel_size", "axis 'dp' of the mesh")
    _nodes(r)


def _nodes(r: Reading) -> None:
    """Partitions within nodes."""
    shards, second = _int(r, f"{ZERO}.mics_shard_size", -1), _int(r, f"{ZERO}.zero_hpz_partition_size", 1)
    if second in (0, 1, r.mesh["dp"]):
        r.hint(f"{ZERO}.zero_hpz_partition_size", "there is one partition of the params")
    else:
        r.refuse(
            f"{ZERO}.zero_hpz_partition_size",
            "fzero keeps no second partition of the params in a node. Leave it out, which changes no number. Or shard "
            "states over the ranks of a node: fz.shard_zero3(step, mesh=mesh, axis='shard', replicate='replicate')",
        )
    if shards <= 0:
        r.hint(f"{ZERO}.mics_shard_size", "it is off")
    elif _int(r, f"{ZERO}.stage", 0) != 3 or len(r.mesh) > 1 or r.mesh["dp"] % shards:
        why = f"expected stage 3, a divisor of {r.mesh['dp']} ranks, and neither tensor nor sequence parallelism"
        r.refuse(f"{ZERO}.mics_shard_size", why)
    else:
        r.honour(f"{ZERO}.mics_shard_size", "fz.shard_zero3(..., replicate=); DeepSpeed 0.19 has removed this key")
        if shards < r.mesh["dp"]:
            r.mesh = {"replicate": r.mesh["dp"] // shards, "shard": shards}


def batch(r: Reading) -> str:
    """The batch arithmetic. Returns what gradients are multiplied by, in code, or nothing."""
    keys = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    ranks = math.prod([size for axis, size in r.mesh.items() if axis not in ("tp", "sp")])
    total, micro, own = [(r.values.get(key) != "auto" and r.take(key, None, integer, 1)) or None for key in keys]
    count = own
    if count is None and isinstance(total, int) and isinstance(micro, int):
        count = total // (micro * ranks)
    if count is None:  # an argument, an error, or the default
        count = r.take(keys[2], 1, integer, open=True)
    if isinstance(count, int):
        micro = micro if isinstance(micro, int) else total // (count * ranks) if isinstance(total, int) else None
        if isinstance(micro, int) and isinstance(total, int) and total != micro * count * ranks:
            said = f"{micro} examples x {count} microbatches x {ranks} data-parallel ranks"
            r.refuse(keys[0], f"expected {micro * count * ranks}: {said}")
    known = isinstance(micro, int) and isinstance(count, int)
    size = f"a call takes {micro * count} examples of each rank" if known else "a call takes what it is given"  # type: ignore[operator]
    for key in keys[:2]:
        (r.hint if r.values.get(key) == "auto" else r.honour)(key, size)
    times = 1.0
    if r.take("managed_gradient_accumulation", True, boolean) is False:
        r.honour("managed_gradient_accumulation", "no accumulation: a call is an update")
        times /= count if isinstance(count, int) else 1
        r.honour(keys[2], "gradients are divided by it, as DeepSpeed does" if times < 1 else "one microbatch")
    else:
        r.honour("managed_gradient_accumulation", "fz.accumulate")
        r.honour(keys[2], "one microbatch" if count == 1 else f"fz.accumulate(step, {count})")
        r.transforms += [f"fz.accumulate(step, {count})"] if count != 1 else []
    if r.values.get(keys[2]) == "auto":
        r.hint(keys[2], f"fz.accumulate(step, {count})")
    if r.take("gradient_allreduce_op", "mean", text, among=("mean", "sum")) == "sum":
        times *= ranks
        r.honour("gradient_allreduce_op", f"the mean, times {ranks} ranks")
        if _int(r, f"{ZERO}.stage", 0) == 3:
            r.refuse("gradient_allreduce_op", "DeepSpeed has no sum at stage 3")
    for key in ("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor"):
        r.honour(key, "gradients are means over ranks: where it is divided changes rounding alone")
    return repr(times) if times != 1.0 else ""


def _int(r: Reading, path: str, default: int, least: float = -math.inf) -> int:
    found = r.take(path, default, integer, least)
    return found if isinstance(found, int) else default


def precision(r: Reading) -> str:
    """The policy, in code, or nothing; and the loss scale and autocast among the transforms."""
    half, brain = r.enabled("fp16", open=True), r.enabled("bf16", open=True)
    if half is True and brain is True:
        r.refuse("fp16.enabled", "bf16 is enabled too. Keep one")
    own = "communication_data_type", "seq_parallel_communication_data_type"
    key = own["sp" in r.mesh and r.values.get(own[1]) is not None]
    sent, sums = r.take(key, None, dtype), r.take("data_types.grad_accum_dtype", None, dtype)
    r.honour(key, f"fz.Policy: gradients travel in {_word(sent)}, or as they are kept where that is wider")
    for other in own:
        r.hint(other, "there is no sequence parallelism" if other == own[1] else f"{own[1]} says it")
    r.honour("data_types.grad_accum_dtype", f"fz.Policy: gradients are summed in {_word(sums)}")
    more = _quantised(r)
    choice = _policy(None, False, False, sent, sums, more)
    for block, on, low in (("fp16", half, torch.float16), ("bf16", brain, torch.bfloat16)):
        if on is False:
            continue
        masters, states = _low_states(r, block, low)
        policy = _policy(low, masters, states, sent, sums, more)
        r.honour(f"{block}.enabled", policy if on is True else f"{policy} if {on}")
        choice = policy if on is True else f"{policy} if {on} else {choice}"
    if brain is not False:
        _checked(r)
    if half is not False:
        _scaled(r, half)
    _autocast(r)
    _data_types(r, {torch.float16: half, torch.bfloat16: brain})
    return "" if choice == "fz.Policy()" else choice


def _word(kind: object) -> str:
    return str(kind).removeprefix("torch.")


def _quantised(r: Reading) -> dict[str, str]:
    key = f"{ZERO}.zero_quantized_weights"
    if r.take(key, False, boolean) is not True:
        r.honour(key, "off")
        return {}
    if _int(r, f"{ZERO}.stage", 0) != 3:
        r.refuse(key, "DeepSpeed has it at stage 3 only")
    r.honour(key, "fz.Policy(gather='8-bit')")
    return {"gather": "8-bit"}


def _low_states(r: Reading, block: str, low: torch.dtype) -> tuple[bool, bool]:
    """Whether masters and gradients, and moments are in the dtype too."""
    first, second = f"{block}.{block}_master_weights_and_grads", "bf16.bf16_optimizer_states"
    masters = r.take(first, False, boolean) is True
    states = block == "bf16" and r.take(second, False, boolean) is True
    if states and not masters:
        r.refuse(second, "it needs bf16_master_weights_and_grads")
    for key in [first] * masters + [second] * states:
        if _int(r, f"{ZERO}.stage", 0) == 0:
            r.refuse(key, "DeepSpeed has it at stages 1, 2 and 3")
    r.honour(first, f"fz.Policy: params and gradients in {_word(low) if masters else 'float32'}")
    if block == "bf16":
        r.honour(second, f"fz.Policy: moments in {_word(low) if states else 'float32'}")
    return masters, states


def _data_types(r: Reading, on: dict[torch.dtype, bool | Name]) -> None:
    wanted = r.take("data_types.param_dtype", None, dtype)
    if isinstance(wanted, torch.dtype) and not on.get(wanted, not any(on.values())):
        r.refuse("data_types.param_dtype", "fp16 and bf16 say another one")
    r.honour("data_types.param_dtype", "as fp16 and bf16 say")
    if r.values.get("data_types.buffer_dtype") is not None:
        r.refuse("data_types.buffer_dtype", "buffers are your function's. Convert them before fz.functional")
    if r.values.get("data_types.keep_in_fp32_modules") not in (None, "auto", []):
        r.refuse("data_types.keep_in_fp32_modules", "write fz.Policy.by_path({'*norm*': fz.Policy(), '*': ...})")
    for key in ("buffer_dtype", "keep_in_fp32_modules"):
        r.hint(f"data_types.{key}", "buffers keep their dtype")


def _policy(
    low: torch.dtype | None, masters: bool, states: bool, sent: object, sums: object, more: dict[str, str]
) -> str:
    """The policy of params that are computed with in a dtype, in code."""
    wide, said = torch.float32, dict[str, object]()
    if masters and states and sent is None and sums is None and not more:
        return "fz.Policy.bf16_states()"
    if low is not None:
        said["param"] = low if masters else wide
        said["grad"] = wide if wide in (sent, sums) and not masters else low
        said["moment"] = low if states else wide
        said["compute"] = low
    narrow = [kind for kind in (sent, sums) if kind not in (None, wide)]
    if narrow and wide not in (sent, sums) and (sums is not None or sent != low):
        said["reduce"] = narrow[0]
    return f"fz.Policy({', '.join([f'{name}={value!r}' for name, value in {**said, **more}.items()])})"


def _checked(r: Reading) -> None:
    if r.take("bf16.check_grad_overflow", True, boolean):
        said = "an update that is not finite is skipped"
        r.honour("bf16.check_grad_overflow", said)
        r.add("bf16.check_grad_overflow", True, "honoured", f"{said}: the default since 0.19; before, it was applied")
    else:
        r.refuse("bf16.check_grad_overflow", "an update that is not finite is always skipped. Leave it out")


def _scaled(r: Reading, half: bool | Name) -> None:
    """The loss scale."""
    scale = r.take("fp16.loss_scale", 0, number, least=0, open=True)
    power = r.take("fp16.initial_scale_power", 16, integer, open=True)
    numbers = {
        "interval": ("loss_scale_window", r.take("fp16.loss_scale_window", 1000, integer, least=1, open=True)),
        "minimum": ("min_loss_scale", r.take("fp16.min_loss_scale", 1, number, open=True)),
        "hysteresis": ("hysteresis", r.take("fp16.hysteresis", 2, integer, least=1, open=True)),
        "consecutive": ("consecutive_hysteresis", r.take("fp16.consecutive_hysteresis", False, boolean)),
    }
    if isinstance(scale, Name):
        r.refuse("fp16.loss_scale", f"'auto' has no value. Give {scale}=..., 0 for a dynamic one")
    if scale:
        call = f"fz.loss_scale(step, {float(scale) if isinstance(scale, (int, float)) else scale!r})"
        for key in ("initial_scale_power", *[key for key, _ in numbers.values()]):
            r.hint(f"fp16.{key}", "the loss scale is static")
    else:
        said = [f"{name}={value!r}" for name, (_, value) in numbers.items() if name != "consecutive" or value]
        call = f"fz.loss_scale(step, initial=2.0**{power!r}, {', '.join(said)}, late=True)"
        for key in ("initial_scale_power", *[key for key, _ in numbers.values()]):
            r.honour(f"fp16.{key}", "fz.loss_scale")
    r.honour("fp16.loss_scale", call)
    r.transforms.append(call if half is True else f"{call} if {half} else step")
    if r.take("fp16.auto_cast", False, boolean):
        call = "fz.compat.cast_inputs(fn, torch.float16)"
        r.lines.append(f"fn = {call if half is True else f'{call} if {half} else fn'}")
        r.honour("fp16.auto_cast", call)
    r.honour("fp16.auto_cast", "inputs are as they are given")


def _autocast(r: Reading) -> None:
    if not r.enabled("torch_autocast"):
        return
    low = r.take("torch_autocast.dtype", None, dtype)
    if low not in (torch.float16, torch.bfloat16):
        if "torch_autocast.dtype" in r.values:
            r.refuse("torch_autocast.dtype", "expected 'bfloat16' or 'float16'")
        else:
            said = "say 'bfloat16' or 'float16': torch's default is another one on each device"
            r.add("torch_autocast.dtype", None, "refused", said)
        return
    r.honour("torch_autocast.dtype", f"fz.autocast(step, {low})")
    r.transforms.append(f"fz.autocast(step, {low})")
    if low == torch.float16:  # torch.amp.GradScaler's own defaults
        r.transforms.append("fz.loss_scale(step, initial=2.0**16, interval=2000, minimum=2.0**-24)")


def memory(r: Reading) -> None:
    """What is sharded, offloaded and recomputed."""
    stage = r.take(f"{ZERO}.stage", 0, integer, among=(0, 1, 2, 3))
    assert isinstance(stage, int)
    ways = ""
    if len(r.mesh) > 1:
        where = '"cuda" if torch.cuda.is_available() else "cpu"'
        sizes, names = tuple(r.mesh.values()), tuple(r.mesh)
        r.lines.insert(0, f"mesh = torch.distributed.init_device_mesh({where}, {sizes}, mesh_dim_names={names})")
        hybrid, several = ", axis='shard', replicate='replicate'", ", axis=('dp', 'sp')"
        ways = ", mesh=mesh" + (hybrid if "shard" in r.mesh else several if "sp" in r.mesh else "")
    steps = r.transforms
    if stage or math.prod([size for axis, size in r.mesh.items() if axis != "tp"]) > 1:
        steps.append(f"fz.shard_zero{stage or 1}(step{ways})")
        r.honour(f"{ZERO}.stage", steps[-1] + ("" if stage else ": the least that reduces over ranks"))
    r.honour(f"{ZERO}.stage", "nothing is sharded")
    if "tp" in r.mesh:
        steps.append(f"fz.shard_tensor(step, {_plan(r)}, mesh=mesh)")
        r.honour("tensor_parallel.autotp_size", steps[-1])
    steps += _offloads(r, stage)
    r.honour(
        f"{ZERO}.gather_16bit_weights_on_model_save",
        "fz.save_safetensors(folder, state, dtype=torch.bfloat16)"
        if r.take(f"{ZERO}.gather_16bit_weights_on_model_save", False, boolean)
        else "fz.save_safetensors saves as it is called",
    )
    cut = r.take("activation_checkpointing.partition_activations", False, boolean)
    host = r.take("activation_checkpointing.cpu_checkpointing", False, boolean)
    if cut or host:
        steps.append("fz.remat(step)")
    if host:
        steps.append("fz.offload(step, activations='host')")
    r.honour("activation_checkpointing.partition_activations", "fz.remat(step)" if cut else "no recomputation")
    said = "fz.offload(fz.remat(step), activations='host')" if host else "off"
    r.honour("activation_checkpointing.cpu_checkpointing", said)
    stages = r.values.get("pipeline.stages")
    if stages not in (None, 1, "auto"):
        said = "make a step of each stage: fz.pipeline([step_a, step_b], fz.schedules.one_f_one_b(2, 8))"
        r.refuse("pipeline.stages", said)
    r.hint("pipeline.stages", "it is read by DeepSpeed's PipelineModule alone")
    r.lines += [f"step = {call}" for call in steps]


def _plan(r: Reading) -> str:
    """The plan of tensor parallelism, in code: patterns of regular expressions as those of fnmatch."""
    key = "tensor_parallel.partition_config.layer_specs"
    specs = r.take(key, None)
    r.hint("tensor_parallel.partition_config.use_default_specs", "the plan of fz.shard_tensor is whole")
    if specs is None:
        return "'auto'"
    plan: dict[str, str] = {}
    styles = {"column": "column", "row": "row", "skip": "whole"}
    for spec in specs if isinstance(specs, list) else [None]:
        own = spec if isinstance(spec, dict) else {}
        style = styles.get(str(own.get("partition_type", "column")).lower())
        found = [_as_fnmatch(each) for each in own.get("patterns", [])]
        if not found or None in found or style is None or {*own} - {"patterns", "partition_type", "gather_output"}:
            r.refuse(key, f"{spec!r} is more than patterns and a style. Write a plan for fz.shard_tensor")
            return "'auto'"
        style = "column_gather" if own.get("gather_output") and style == "column" else style
        plan |= {str(pattern): style for pattern in found}
    r.honour(key, "the plan of fz.shard_tensor")
    return repr(plan)


def _as_fnmatch(pattern: object) -> str | None:
    """A regular expression over paths as a pattern of fnmatch, where it says no more than that."""
    if not isinstance(pattern, str):
        return None
    plain = pattern.removeprefix("^").removesuffix("$").replace("\\.", "\0").replace(".*", "*")
    return None if any(sign in plain for sign in ".^$+?(){}|\\") else plain.replace("\0", ".")


def _offloads(r: Reading, stage: int) -> list[str]:
    places: dict[str, str] = {}
    for kind, least in (("offload_optimizer", 1), ("offload_param", 3)):
        block = f"{ZERO}.{kind}"
        place = r.take(f"{block}.device", "none", text, among=("none", "cpu", "nvme"))
        path = r.take(f"{block}.nvme_path", None, text)
        ratio = r.take(f"{block}.ratio", 1.0, number, least=0)
        if place == "none" or (kind == "offload_optimizer" and ratio == 0):
            r.honour(f"{block}.device", "nothing is offloaded")
        elif stage < least:
            r.hint(f"{block}.device", f"DeepSpeed has it from stage {least} on")
        elif place == "nvme" and path is None:
            r.refuse(f"{block}.device", "it needs nvme_path")
        else:
            places[kind] = f"fz.Disk({path!r})" if place == "nvme" else "'host'"
            kinds = "masters and moments" if kind == "offload_optimizer" else "params"
            r.honour(f"{block}.device", f"fz.offload: {kinds} in {places[kind]}")
            if place == "nvme":
                r.honour(f"{block}.nvme_path", places[kind])
        r.hint(f"{block}.nvme_path", "the device is another one")
        part = isinstance(ratio, (int, float)) and 0 < ratio < 1
        said = "all is offloaded: fz.offload(step, ..., pattern=) takes a part" if part else "all or nothing"
        (r.hint if part else r.honour)(f"{block}.ratio", said)
    if "offload_optimizer" in places:
        place = places["offload_optimizer"]
        if places.get("offload_param", place) != place:
            r.honour(f"{ZERO}.offload_param.device", f"params lie where their masters do: in {place}")
        return [f"fz.offload(step, params={place}, moments={place})"]
    return [f"fz.offload(step, params={places['offload_param']})"] if places else []


def monitors(r: Reading) -> None:
    """What fz.loop takes."""
    for block, argument, ending in (("tensorboard", "tensorboard", ""), ("csv_monitor", "log", ".csv")):
        if r.enabled(block):
            folder = r.take(f"{block}.output_path", "", text)
            name = r.take(f"{block}.job_name", "DeepSpeedJobName", text)
            r.loop[argument] = os.path.join(str(folder), f"{name}{ending}")
            for key in ("enabled", "output_path", "job_name"):
                r.honour(f"{block}.{key}", f"fz.loop(..., {argument}={r.loop[argument]!r})")
    every = r.values.get("steps_per_print")
    if every in (None, "auto") or (isinstance(every, float) and math.isinf(every)):
        r.hint("steps_per_print", "nothing is printed; fz.loop writes logs where it is asked to")
    elif count := r.take("steps_per_print", None, integer, least=1):
        r.loop["every"] = count
        r.honour("steps_per_print", f"fz.loop(..., every={count})")
