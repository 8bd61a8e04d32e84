"""fzero: ZeRO for torch.func. Training states that are sharded pytrees, steps that are pure functions."""

from fzero import compat, optim, parallel, schedules, testing, transforms
from fzero.base.carriers import register_carrier
from fzero.base.collecting import collect, collected
from fzero.base.pages import keep_memory
from fzero.base.ragged import Ragged
from fzero.checkpoint.checkpoints import Checkpoints
from fzero.checkpoint.load import load, load_extra
from fzero.checkpoint.manifest import DamagedCheckpoint
from fzero.checkpoint.save import Saving, save, save_async
from fzero.compat.safetensors import load_safetensors, save_safetensors
from fzero.components.parts import PerStage, PipelineState
from fzero.components.remote.failure import ComponentDied
from fzero.components.remote.specs import PartitionSpec
from fzero.convert import convert
from fzero.derivatives import hvp, per_example_grads, tape
from fzero.engine.batch import Pullback
from fzero.explain import Explanation, explain
from fzero.functional import functional
from fzero.jit import jit
from fzero.loop import Loop, loop
from fzero.optim import (
    GradientTransformation,
    adafactor,
    adam,
    adamw,
    adaptive_clip,
    chain,
    clip_by_block_norm,
    clip_by_global_norm,
    clip_by_value,
    constant,
    from_torch,
    gradient_noise,
    lamb,
    linear,
    lion,
    muon,
    partition,
    sgd,
    warmup_cosine,
    whole,
)
from fzero.pipeline import Pipeline, pipeline
from fzero.planning.bandwidth import Bandwidth, measure_bandwidth
from fzero.planning.fits import Proposal, fits
from fzero.planning.plan import Plan, plan
from fzero.planning.plot_plan import plot_plan
from fzero.planning.plot_schedule import plot_schedule
from fzero.purity.check import check_pure
from fzero.remote import fetch, remote
from fzero.scan import scan
from fzero.state.gather import gather, global_norm, stream
from fzero.state.scatter import scatter
from fzero.state.sharded import Sharded
from fzero.state.stack import stack, unstack
from fzero.state.train_state import TrainState
from fzero.step import Step, train_step, with_fn
from fzero.stores.disk import Disk
from fzero.table.handle import HandleError
from fzero.table.layout import Layout
from fzero.table.policy import Policy
from fzero.table.spec import Extra
from fzero.transforms import (
    accumulate,
    autocast,
    carry,
    compile,
    donate,
    ema,
    freeze,
    fuse_update,
    lookahead,
    loss_scale,
    offload,
    remat,
    shard_tensor,
    shard_zero1,
    shard_zero2,
    shard_zero3,
)
from fzero.unit import name, sum_over, unit

__version__ = "0.2.0"

__all__ = [
    "Bandwidth", "Checkpoints", "ComponentDied", "DamagedCheckpoint", "Disk", "Explanation", "Extra",
    "GradientTransformation", "HandleError", "Layout", "Loop", "PartitionSpec", "PerStage", "Pipeline", "PipelineState",
    "Plan", "Policy", "Proposal", "Pullback", "Ragged", "Saving", "Sharded", "Step", "TrainState", "accumulate",
    "adafactor", "adam", "adamw", "adaptive_clip", "autocast", "carry", "chain", "check_pure", "clip_by_block_norm",
    "clip_by_global_norm", "clip_by_value", "collect", "collected", "compat", "compile", "constant", "convert",
    "donate", "ema", "explain", "fetch", "fits", "freeze", "from_torch", "functional", "fuse_update", "gather",
    "global_norm", "gradient_noise", "hvp", "jit", "keep_memory", "lamb", "linear", "lion", "load", "load_extra",
    "load_safetensors", "lookahead", "loop", "loss_scale", "measure_bandwidth", "muon", "name", "offload", "optim",
    "parallel", "partition", "per_example_grads", "pipeline", "plan", "plot_plan", "plot_schedule", "register_carrier",
    "remat", "remote", "save", "save_async", "save_safetensors", "scan", "scatter", "schedules", "sgd", "shard_tensor",
    "shard_zero1", "shard_zero2", "shard_zero3", "stack", "stream", "sum_over", "tape", "testing", "train_step",
    "transforms", "unit", "unstack", "warmup_cosine", "whole", "with_fn",
]
__dir__ = [*__all__, "__version__"].copy  # without the modules that the names come from
