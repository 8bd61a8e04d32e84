"""Who takes part in the benchmarks: one model, one loss, AdamW; each contender is `step(x, y) -> loss`.

All get the same weights and train with AdamW (lr 1e-3, weight decay 0.01) on every rank's own batch. In bf16 all keep
float32 masters and moments and compute in bfloat16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from transformer import Transformer

import fzero as fz
from fzero.base import pytree

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LR, DECAY = 1e-3, 0.01
ADAMW = fz.adamw(LR, weight_decay=DECAY)
_BF16, _FP32 = torch.bfloat16, torch.float32
# float32 masters and moments, computing and keeping gradients in bfloat16: what the low-precision schemes are held to
MASTERS = fz.Policy(param=_FP32, grad=_BF16, moment=_FP32, compute=_BF16)


@dataclass(frozen=True)
class Setup:
    """What all contenders of one run share."""

    width: int = 512
    blocks: int = 6
    heads: int = 8
    dtype: torch.dtype = torch.float32
    remat: bool = False
    device: str = "cpu"
    folder: str = ""  # on a local disk, for state; "" where state goes to the host
    clipped: bool = True  # what is offloaded, by the exact norm

    def module(self) -> Transformer:
        return Transformer(self.width, self.blocks, self.heads, torch.Generator().manual_seed(0)).to(self.device)

    @property
    def mixed(self) -> bool:
        return self.dtype != torch.float32


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _checkpointed(module: Transformer) -> Transformer:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in module.blocks)
    return module


def mean_of(loss: torch.Tensor) -> torch.Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Training:
    """A step and its newest state."""

    def __init__(self, step: fz.Step, state: fz.TrainState) -> None:
        self.step, self.state = step, state

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.state, metrics = self.step(self.state, x, y)
        return metrics["loss"]

    def settle(self) -> None:
        """Whoever reads what is under way waits for it."""
        pytree.leaves(self.state)


def built(
    setup: Setup,
    transform: Callable[[fz.Step], fz.Step],
    policy: fz.Policy | None,
    optimizer: fz.GradientTransformation,
) -> tuple[fz.Step, object]:
    """A donated fzero step and its params; a policy says itself what is computed in."""
    apply, params = fz.functional(setup.module())
    step = fz.donate(transform(fz.train_step(lambda p, x, y: loss_of(apply(p, x), y), optimizer, policy)))
    if setup.mixed and policy is None:
        step = fz.autocast(step, setup.dtype)
    return fz.remat(step) if setup.remat else step, params


def fzero_step(transform: Callable[[fz.Step], fz.Step], policy: fz.Policy | None = None) -> Callable[[Setup], Run]:
    def make(setup: Setup) -> Run:
        step, params = built(setup, transform, policy, ADAMW)
        return Training(step, step.init(params))

    return make


def _torch_step(
    wrap: Callable[[Transformer, Setup], nn.Module], autocast: bool, alone: bool = False
) -> Callable[[Setup], Run]:
    def make(setup: Setup) -> Run:
        module = setup.module()
        model = wrap(_checkpointed(module) if setup.remat else module, setup)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            casts = setup.mixed and autocast
            with torch.autocast(setup.device, dtype=setup.dtype) if casts else contextlib.nullcontext():
                loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach() if alone else mean_of(loss)

        return run

    return make


def _ddp(module: Transformer, setup: Setup) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.parallel.DistributedDataParallel(module)


def _pure_bf16(module: Transformer, setup: Setup) -> nn.Module:
    return _fsdp2(module.to(torch.bfloat16), dataclasses.replace(setup, dtype=torch.float32))


def _two_axes(setup: Setup) -> dist.DeviceMesh:
    """Pairs of ranks hold the same shards."""
    return dist.init_device_mesh(setup.device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "dp"))


def _hsdp(module: Transformer, setup: Setup) -> nn.Module:
    return _fsdp2(module, setup, _two_axes(setup))


def _fsdp2(module: Transformer, setup: Setup, mesh: dist.DeviceMesh | None = None) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh or dist.init_device_mesh(setup.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(setup.dtype, torch.float32) if setup.mixed else MixedPrecisionPolicy()
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


def _fsdp2_compiled(module: Transformer, setup: Setup) -> nn.Module:
    """torch's own recipe: each block compiled, then sharded."""
    for block in module.blocks:
        block.compile()
    return _fsdp2(module, setup)


def deepspeed_engine(
    module: nn.Module,
    stage: int,
    bf16: bool = False,
    low_precision: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Nothing persistent, no clipping, AdamW by default; in low precision masters, grads and moments are bfloat16."""
    os.environ.setdefault("LOCAL_SIZE", str(dist.get_world_size()))
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # type: ignore[import-not-found]

    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only a label here: the batches come from outside
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {
            "enabled": bf16,
            "bf16_master_weights_and_grads": low_precision,
            "bf16_optimizer_states": low_precision,
        },
    }
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)[0]


def _deepspeed(setup: Setup, low_precision: bool = False) -> Run:
    module = setup.module()
    if setup.remat:
        module = _checkpointed(module)
    engine = deepspeed_engine(module, 3, setup.dtype == torch.bfloat16, low_precision)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()
        return mean_of(loss)

    return run


ALONE = "no communication"
CONTENDERS: dict[str, Callable[[Setup], Run]] = {
    ALONE: _torch_step(lambda module, setup: module, autocast=True, alone=True),
    "DDP": _torch_step(_ddp, autocast=True),
    "FSDP2": _torch_step(_fsdp2, autocast=False),
    "DeepSpeed ZeRO-3": _deepspeed,
    "fzero": fzero_step(lambda step: step),
    "fzero ZeRO-1": fzero_step(fz.shard_zero1),
    "fzero ZeRO-2": fzero_step(fz.shard_zero2),
    "fzero ZeRO-3": fzero_step(fz.shard_zero3),
    "fzero ZeRO-2, fused": fzero_step(lambda step: fz.fuse_update(fz.shard_zero2(step))),
    "fzero ZeRO-3, fused": fzero_step(lambda step: fz.fuse_update(fz.shard_zero3(step))),
    "fzero ZeRO-3, compiled": fzero_step(lambda step: fz.compile(fz.shard_zero3(step))),
    "fzero ZeRO-3, jit": fzero_step(lambda step: fz.jit(fz.shard_zero3(step))),
    "fzero, jit": fzero_step(fz.jit),
    "FSDP2, compiled": _torch_step(_fsdp2_compiled, autocast=False),
    "FSDP2, two axes": _torch_step(_hsdp, autocast=False),
    "fzero ZeRO-3, two axes": lambda setup: fzero_step(
        lambda step: fz.shard_zero3(step, _two_axes(setup), replicate="replicas")
    )(setup),
}


def _full(setup: Setup) -> Run:
    return CONTENDERS["FSDP2"](dataclasses.replace(setup, dtype=torch.float32))


# every storage scheme under ZeRO-3, computing in bfloat16
SCHEMES: dict[str, Callable[[Setup], Run]] = {
    "FSDP2, fp32": _full,
    "FSDP2, fp32 masters": CONTENDERS["FSDP2"],
    "FSDP2, bf16": _torch_step(_pure_bf16, autocast=False),
    "DeepSpeed, fp32 masters": _deepspeed,
    "DeepSpeed, bf16 states": functools.partial(_deepspeed, low_precision=True),
    "fp32 masters": fzero_step(fz.shard_zero3, MASTERS),
    "exact, fp32 moments": fzero_step(fz.shard_zero3, fz.Policy.exact(_FP32)),
    "exact": fzero_step(fz.shard_zero3, fz.Policy.exact()),
    "compact24": fzero_step(fz.shard_zero3, fz.Policy.compact24()),
    "compact16": fzero_step(fz.shard_zero3, fz.Policy.compact16()),
    "compact16, fused": fzero_step(lambda step: fz.fuse_update(fz.shard_zero3(step)), fz.Policy.compact16()),
    "bf16, nearest": fzero_step(fz.shard_zero3, fz.Policy.bf16_states()),
}


# the exact norm of all gradients, which others that offload give up
CLIPPED = fz.chain(fz.clip_by_global_norm(1.0), ADAMW)


_STATE = ("params", "grads", "moments")
# scheme, and what of it is away -> the policy, and which kinds of state those are
AWAY: dict[str, tuple[fz.Policy, tuple[str, ...]]] = {
    f"{scheme}, {what}": (policy, kinds)
    for what, kinds in {"resident": (), "moments away": ("moments",), "all away": _STATE}.items()
    for scheme, policy in (
        ("fp32 masters", MASTERS),
        ("compact24", fz.Policy.compact24()),
        ("compact16", fz.Policy.compact16()),
    )
}


def away(setup: Setup, name: str) -> tuple[fz.Step, object]:
    """The step and params of one of `AWAY`: updated in the pullback, once the norm is known where that clips."""
    policy, kinds = AWAY[name]
    memory = fz.Disk(setup.folder) if setup.folder else "host"

    def transform(step: fz.Step) -> fz.Step:
        step = fz.fuse_update(step, norm="held" if setup.clipped else "auto")
        for kind in kinds:
            step = fz.offload(step, **{kind: memory})  # type: ignore[arg-type]
        return step

    return built(setup, transform, policy, CLIPPED if setup.clipped else ADAMW)


def _away(setup: Setup, name: str) -> Run:
    step, params = away(setup, name)
    return Training(step, step.init(params))


def _zero_offload(setup: Setup) -> Run:
    """DeepSpeed's ZeRO-Offload: stage 2, its own Adam on the host, clipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # type: ignore[import-not-found]

    os.environ.setdefault("LOCAL_SIZE", str(dist.get_world_size()))
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    adamw = {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": adamw,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "bf16": {"enabled": True},
    }
    module = _checkpointed(setup.module())
    engine, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return run


def _torchao(setup: Setup) -> Run:
    """torchao's CPUOffloadOptimizer, which refuses to clip."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    module = _checkpointed(setup.module())
    optimizer = CPUOffloadOptimizer(
        module.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=LR, weight_decay=DECAY
    )

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(setup.device, dtype=setup.dtype):
            loss = loss_of(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


# state that lies elsewhere, beside the same step with all of it on the device
OFFLOADED: dict[str, Callable[[Setup], Run]] = {
    **{name: functools.partial(_away, name=name) for name in AWAY},
    "DeepSpeed ZeRO-Offload": _zero_offload,
    "torchao CPUOffloadOptimizer": _torchao,
}
ALL = CONTENDERS | SCHEMES | OFFLOADED


def is_here(name: str, ranks: int) -> bool:
    """Whether a contender's package is installed, and it has ranks enough."""
    if "two axes" in name:
        return ranks >= 4 and ranks % 2 == 0
    if "torchao" in name or "ZeRO-Offload" in name:  # which are for an accelerator
        package = name.partition(" ")[0].lower()
        return torch.cuda.is_available() and importlib.util.find_spec(package) is not None
    return "DeepSpeed" not in name or importlib.util.find_spec("deepspeed") is not None


def start(rank: int, ranks: int, store: str, device: str) -> None:
    """Joins the process group of one benchmark."""
    warnings.simplefilter("ignore", FutureWarning)  # peers call what torch renamed
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=store, rank=rank, world_size=ranks)
