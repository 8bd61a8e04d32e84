"""Others' files: Hugging Face's safetensors, torch's distributed checkpoints (DCP), DeepSpeed's."""

from fzero.compat.dcp import load_dcp as load_dcp
from fzero.compat.dcp import save_dcp as save_dcp
from fzero.compat.deepspeed import load_deepspeed as load_deepspeed
