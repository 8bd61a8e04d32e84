"""Others' files: Hugging Face's safetensors, torch's distributed checkpoints (DCP), DeepSpeed's."""
