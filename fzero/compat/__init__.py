"""Others' files: Hugging Face's safetensors, torch's distributed checkpoints (DCP), DeepSpeed's."""

from fzero.compat.dcp import load_dcp, save_dcp
from fzero.compat.deepspeed import load_deepspeed

__all__ = [
    "load_dcp",
    "load_deepspeed",
    "save_dcp",
]
__dir__ = __all__.copy  # without the modules that the names come from
