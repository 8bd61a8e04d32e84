"""Which files of the package a leaf passes in one vjp, pullback and update, under ZeRO-3.

    python benchmarks/passes.py

Counted are the files in which some function, as it returns, holds the leaf in a variable, or in a list, tuple or dict
that is one: the leaf's stored or gathered buffer, its handle, its cotangent, a moment. No other tensor has so many
elements. The step has run before, as what is looked at in a first run only is not passed in others.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import fzero as fz

SHAPE = (13, 17)
SIZES = (221, 256)  # of the leaf, and of its buffer
ROOT = Path(fz.__file__).parent


def holds(value: Any, depth: int = 1) -> bool:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape) == SHAPE or (value.ndim == 1 and value.shape[0] in SIZES)
    if depth and type(value) in (list, tuple, dict):
        return any(holds(item, 0) for item in (value.values() if type(value) is dict else value))
    return False


def passed(call: Callable[[], Any]) -> tuple[Any, set[str]]:
    """What `call()` returns, and the files."""
    files: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "return" or not name.startswith(str(ROOT)):
            return
        name = str(Path(name).relative_to(ROOT))
        if name not in files and any(holds(value) for value in frame.f_locals.values()):
            files.add(name)

    sys.setprofile(look)
    try:
        return call(), files
    finally:
        sys.setprofile(None)


def main() -> None:
    torch.set_num_threads(1)
    block = fz.unit(lambda p, x: x + torch.tanh(x @ p["w"]) @ p["w"].t())

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params["blocks"]:
            x = block(p, x)
        return x.square().mean()

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        step = fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-3)))
        params = {"blocks": [{"w": torch.randn(SHAPE, generator=torch.Generator().manual_seed(i))} for i in range(2)]}
        x = torch.ones(2, 13)
        state = step.init(params)
        for _ in range(2):
            out, pullback = step.vjp(state, x)
            pullback(torch.ones_like(out))
            state, _metrics = step(state, x)
        (out, pullback), forward = passed(lambda: step.vjp(state, x))
        (grads, _), back = passed(lambda: pullback(torch.ones_like(out)))
        _, update = passed(lambda: step.update(state, grads))
        _, whole = passed(lambda: step(state, x))
        dist.destroy_process_group()
    for name, files in {"vjp": forward, "pullback": back, "update": update, "step": whole}.items():
        print(f"{name:<9} {len(files):>3}  {', '.join(sorted(files))}")


if __name__ == "__main__":
    main()
