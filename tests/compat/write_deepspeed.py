"""Lets DeepSpeed itself train and save: the folders that tests/compat/test_deepspeed.py reads.

    python tests/compat/write_deepspeed.py tests/compat/deepspeed_folders          # those of the repository
    python tests/compat/write_deepspeed.py --all /somewhere                        # every stage, dtype, number of ranks

It needs deepspeed, which the tests do not. Beside each folder lies `<name>.held.pt`: what the model really held then,
as DeepSpeed's own functions gather it, and the gradients and params of the step after.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

LR, DECAY, MOMENTUM, STEPS = 1e-2, 0.1, 0.9, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        zero, config: further entries of `zero_optimization`, and of the whole configuration.
        exclude_frozen: whether frozen params are left out of what is saved.
    """

    stage: int
    dtype: str
    ranks: int
    optimizer: str = "adamw"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    exclude_frozen: bool = False


SMALL = {"sub_group_size": 20}  # several of them in ZeRO-3
ALIGNED = {"parameter_alignment": True}  # leaves begin at multiples of 16 bytes
# leaves are put into another order; without alignment 0.19's own functions then give the values of others
IN_TURN = {"round_robin_gradients": True, **ALIGNED}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}  # of bf16 at stage 1: another optimizer of DeepSpeed's
KEPT = {
    "zero1-bf16-2": Case(1, "bf16", 2, config=FP32_SUMS),
    "zero1-fp32-3": Case(1, "fp32", 3, zero={"elastic_checkpoint": True}),
    "zero2-bf16-3": Case(2, "bf16", 3, zero=ALIGNED),
    "zero2-fp16-2": Case(2, "fp16", 2, zero=IN_TURN),
    "zero3-bf16-3": Case(3, "bf16", 3, zero=SMALL),
    "zero3-fp32-2": Case(3, "fp32", 2),
    "sgd-2": Case(2, "fp32", 2, "sgd"),
    "lion-1": Case(2, "bf16", 1, "lion"),
    "zero0-fp32-1": Case(0, "fp32", 1),
}
ALL = {
    **{
        f"zero{stage}-{dtype}-{ranks}": Case(stage, dtype, ranks)
        for stage in (1, 2, 3)
        for dtype in DTYPES
        for ranks in (1, 2, 3, 4)
    },
    **{f"sums-{ranks}": Case(1, "bf16", ranks, config=FP32_SUMS) for ranks in (1, 2, 3, 4)},
    **{f"aligned-{dtype}-{ranks}": Case(2, dtype, ranks, zero=ALIGNED) for dtype in DTYPES for ranks in (2, 3)},
    **{f"turn-{stage}-{ranks}": Case(stage, "bf16", ranks, zero=IN_TURN) for stage in (1, 2) for ranks in (2, 3)},
    **{f"small-{dtype}-{ranks}": Case(3, dtype, ranks, zero=SMALL) for dtype in DTYPES for ranks in (1, 2, 3)},
    **{f"elastic-{stage}": Case(stage, "bf16", 3, zero={"elastic_checkpoint": True}) for stage in (1, 2)},
    **{f"sgd-{stage}": Case(stage, "bf16", 2, "sgd") for stage in (1, 2, 3)},
    **{f"without-frozen-{stage}": Case(stage, "bf16", 2, exclude_frozen=True) for stage in (1, 2, 3)},
    **{f"lion-{stage}": Case(stage, "bf16", 2, "lion") for stage in (1, 2, 3)},
    **{f"cpu-adam-{stage}": Case(stage, "bf16", 2, "cpu adam") for stage in (1, 2, 3)},
    **{f"low-{stage}": Case(stage, "bf16", 2, "cpu adam", config={"low": True}) for stage in (2, 3)},
    **{f"zero0-{dtype}-2": Case(0, dtype, 2) for dtype in DTYPES},
}


class Net(nn.Module):
    """Leaves of odd sizes, one that is tied, one that is frozen, two groups of params, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.base = nn.Linear(5, 3).requires_grad_(False)
        self.body = nn.ModuleList([nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7)), nn.Linear(7, 5)])
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, 5))

    def forward(self, tokens: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.shift.to(x.dtype)
        x = self.body[1](torch.tanh(self.body[0](self.base(x)))) * self.scale
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, -2), expected.flatten())


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two of them: biases and norms do not decay."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randint(11, (2, 4), generator=generator) for _ in range(2))  # type: ignore[return-value]


def engine_of(case: Case, module: nn.Module) -> Any:
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-not-found]

    get_accelerator().is_fp16_supported = lambda: True  # which it is, only not by this processor's matrix units
    optimizer: Any
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups(module), lr=LR)
    elif case.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups(module), lr=LR, momentum=MOMENTUM)
    elif case.optimizer == "lion":
        optimizer = deepspeed.ops.lion.DeepSpeedCPULion(groups(module), lr=LR)
    else:
        low = "low" in case.config
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups(module), lr=LR, fp32_optimizer_states=not low)
    offload = (
        {"offload_optimizer": {"device": "cpu", "pin_memory": False}} if case.optimizer in ("lion", "cpu adam") else {}
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case.stage, **offload, **case.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": case.dtype == "bf16"},
        "fp16": {"enabled": case.dtype == "fp16", "initial_scale_power": 18, "hysteresis": 1},
        **{key: value for key, value in case.config.items() if key != "low"},
    }
    if "low" in case.config:
        config["bf16"].update(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)[0]


def run(rank: int, name: str, case: Case, out: str, meeting: str) -> None:
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(case.ranks), LOCAL_SIZE=str(case.ranks))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=case.ranks)
    from deepspeed.utils import (  # type: ignore[import-not-found]
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
    )

    torch.manual_seed(0)
    module = Net()
    engine = engine_of(case, module)

    def backward(step: int) -> None:
        loss = engine(*batch(step, rank))
        engine.backward(loss)

    step = 0
    while engine.global_steps - engine.skipped_steps < STEPS:
        backward(step)
        engine.step()
        step += 1
    engine.save_checkpoint(os.path.join(out, name), exclude_frozen_parameters=case.exclude_frozen)
    names = [name for name, _ in module.named_parameters()]
    params = dict(module.named_parameters())
    trained = [name for name in names if params[name].requires_grad]
    held: dict[str, Any] = {"step": STEPS, "skipped": engine.skipped_steps, "trained": trained}
    if case.stage:
        if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # 0.19 finds the first group's only
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        whole = lambda own: own.detach().clone()
        of_all = lambda of: {name: whole(of(params[name])) for name in trained}
        words = {"sgd": ["momentum_buffer"], "lion": ["exp_avg"]}.get(case.optimizer, ["exp_avg", "exp_avg_sq"])
        held["moments"] = {word: of_all(lambda p: safe_get_full_optimizer_state(p, word)) for word in words}
        held["params"] = of_all(safe_get_full_fp32_param)
        updates = engine.global_steps - engine.skipped_steps
        while engine.global_steps - engine.skipped_steps == updates:
            backward(step)
            scale = engine.optimizer.loss_scale if case.dtype == "fp16" else 1.0
            if case.zero != IN_TURN:
                held["grads"] = of_all(lambda p: safe_get_full_grad(p).float() / scale)
            engine.step()
            step += 1
        held["next"] = of_all(safe_get_full_fp32_param)
        if case.zero == IN_TURN:  # 0.19 gives the grads of other leaves
            after, before = of_all(lambda p: safe_get_full_optimizer_state(p, "exp_avg")), held["moments"]["exp_avg"]
            held["grads"] = {name: (after[name] - 0.9 * before[name]) / 0.1 for name in trained}
    else:
        held["params"] = {name: p.detach().clone() for name, p in params.items() if name in trained}
    if case.stage == 3:
        import deepspeed  # type: ignore[import-not-found]

        with deepspeed.zero.GatheredParameters([params[name] for name in names]):
            frozen = {name: params[name].detach().clone() for name in names if name not in trained}
    else:
        frozen = {name: params[name].detach().clone() for name in names if name not in trained}
    held["frozen"] = frozen
    if rank == 0:
        torch.save(packed(held), os.path.join(out, f"{name}.held.pt"))
    dist.barrier()
    if rank == 0 and case.stage and case.config != FP32_SUMS:  # of which its script says that they are none
        compare(os.path.join(out, name), held, case)
    dist.barrier()
    if rank == 0:
        for path in Path(out, name).glob("zero_to_*.py"):
            path.unlink()
    dist.destroy_process_group()


def packed(held: dict[str, Any]) -> dict[str, Any]:
    """Trees of leaves, each as one tensor, which takes a tenth of the bytes."""
    out: dict[str, Any] = {}
    for key, value in held.items():
        if not isinstance(value, dict):
            out[key] = value
        elif any(isinstance(own, dict) for own in value.values()):
            out[key] = packed(value)
        else:
            flat = torch.cat([leaf.flatten() for leaf in value.values()])
            out[key] = {"flat": flat, "shapes": {name: list(leaf.shape) for name, leaf in value.items()}}
    return out


def unpacked(kept: dict[str, Any]) -> dict[str, Any]:
    """What was given to `packed`."""
    out: dict[str, Any] = {}
    for key, value in kept.items():
        if not isinstance(value, dict):
            out[key] = value
        elif "flat" not in value:
            out[key] = unpacked(value)
        else:
            leaves = value["flat"].split([math.prod(shape) for shape in value["shapes"].values()])
            pairs = zip(value["shapes"].items(), leaves, strict=True)
            out[key] = {name: leaf.view(shape).clone() for (name, shape), leaf in pairs}
    return out


def compare(folder: str, held: dict[str, Any], case: Case) -> None:
    """With what DeepSpeed's own script makes of the folder."""
    from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found]
        get_fp32_state_dict_from_zero_checkpoint,
    )

    again = get_fp32_state_dict_from_zero_checkpoint(folder)
    for name, own in held["params"].items():
        assert torch.equal(again[name], own), name
    assert "head.weight" in again


def main(given: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("out")
    said = parser.parse_args([*given])
    out = os.path.abspath(said.out)
    os.makedirs(out, exist_ok=True)
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    import deepspeed  # type: ignore[import-not-found]  # noqa: F401  once for all of the processes to come

    for name, case in (ALL if said.all else KEPT).items():
        if not re.search(said.only, name):
            continue
        shutil.rmtree(os.path.join(out, name), ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                mp.start_processes(
                    run, (name, case, out, os.path.join(folder, "meeting")), case.ranks, start_method="fork"
                )
            except Exception as error:
                if not said.all:
                    raise
                print(f"{name}: DeepSpeed refuses: {str(error)[-300:]}", file=sys.stderr)
                shutil.rmtree(os.path.join(out, name), ignore_errors=True)
                continue
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
