"""DeepSpeed: its checkpoints (`checkpoint.py`), and its configuration as a step (`config.py` is the place to start)."""
