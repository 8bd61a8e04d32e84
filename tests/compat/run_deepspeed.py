"""Lets DeepSpeed itself train by the configurations of tests/compat/test_beside_deepspeed.py, on two ranks of CPUs.

    python tests/compat/run_deepspeed.py FOLDER

It writes FOLDER/NAME-STAGE.json, the losses of ten steps, and for AdamW a checkpoint after five of them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RANKS, STEPS, MICRO, SAVED = 2, 10, 3, 5
ADAM = {"type": "AdamW", "params": {"lr": 3e-2, "betas": [0.8, 0.95], "weight_decay": 0.1, "torch_adam": True}}
BASE = {"train_micro_batch_size_per_gpu": MICRO, "zero_allow_untested_optimizer": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "adamw": {
        **BASE,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 3e-2, "warmup_num_steps": 4,
            "total_num_steps": 9}},
    },
    "sgd": {
        "train_batch_size": MICRO * RANKS * 2,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "total_num_steps": 9,
            "warmup_type": "linear"}},
    },
    "adagrad": {
        **BASE,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}},
        "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.02, "lr_range_test_step_size": 3}},
    },
    "cycle": {
        **BASE,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": False}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 1e-3, "cycle_max_lr": 5e-2, "cycle_first_step_size": 3, "cycle_second_step_size": 4,
                "cycle_second_stair_count": 2, "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01,
            },
        },
    },
    "sum": {**BASE, "gradient_allreduce_op": "sum", "gradient_clipping": 0.5, "optimizer": {"type": "SGD",
        "params": {"lr": 0.05}}},
    "unmanaged": {
        **BASE,
        "gradient_accumulation_steps": 2,
        "managed_gradient_accumulation": False,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    },
    "bf16": {**BASE, "bf16": {"enabled": True}, "optimizer": ADAM, "scheduler": {"type": "WarmupLR",
        "params": {"warmup_num_steps": 5}}},
}  # fmt: skip
STAGES = {"adamw": (0, 1, 2, 3), "sgd": (1, 2, 3), "sum": (1, 2), "bf16": (1, 2, 3)}
CASES = [(name, stage) for name in CONFIGS for stage in STAGES.get(name, (1,))]


def net() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.4, generator=generator)
    return module


def config_of(name: str, stage: int) -> dict[str, Any]:
    return {**CONFIGS[name], "zero_optimization": {"stage": stage}}


def microbatches(name: str) -> int:
    unmanaged = CONFIGS[name].get("managed_gradient_accumulation") is False
    return 1 if unmanaged else CONFIGS[name].get("gradient_accumulation_steps", 1)


def batch(step: int, rank: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch)
    return torch.randn(MICRO, 5, generator=generator), torch.randint(3, (MICRO,), generator=generator)


def run(rank: int, out: str, meeting: str) -> None:
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    for name, stage in CASES:
        train(rank, name, stage, out)
    dist.destroy_process_group()


def train(rank: int, name: str, stage: int, out: str) -> None:
    import deepspeed  # type: ignore[import-not-found]

    module = net()
    engine = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config_of(name, stage), dist_init_required=False
    )[0]
    kind, losses = torch.bfloat16 if "bf16" in name else torch.float32, []
    for step in range(STEPS):
        total = torch.zeros(())
        for part in range(microbatches(name)):
            x, y = batch(step, rank, part)
            loss = nn.functional.cross_entropy(engine(x.to(kind)).float(), y)
            engine.backward(loss)
            total += loss.detach() / microbatches(name)
            if microbatches(name) > 1:
                engine.step()
        if microbatches(name) == 1:
            engine.step()
        dist.all_reduce(total)
        losses.append(total.item() / RANKS)
        if step + 1 == SAVED and name == "adamw" and stage:
            engine.save_checkpoint(os.path.join(out, f"{name}-{stage}"))
    if rank == 0:
        Path(out, f"{name}-{stage}.json").write_text(json.dumps(losses))
    dist.barrier()


def main(out: str) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    import deepspeed  # type: ignore[import-not-found]  # noqa: F401  once for all of the processes to come

    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (out, os.path.join(folder, "meeting")), RANKS, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
