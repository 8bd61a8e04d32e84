"""Others' files: Hugging Face's safetensors, torch's distributed checkpoints (DCP), DeepSpeed's, and configurations."""

from fzero.compat.dcp import load_dcp, save_dcp
from fzero.compat.deepspeed.checkpoint import load_deepspeed
from fzero.compat.deepspeed.config import cast_inputs, from_deepspeed
from fzero.compat.deepspeed.schedules import deepspeed_schedule

__all__ = [
    "cast_inputs", "deepspeed_schedule", "from_deepspeed", "load_dcp", "load_deepspeed", "save_dcp",
]
__dir__ = __all__.copy  # without the modules that the names come from
