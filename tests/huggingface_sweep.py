"""Every architecture of the installed transformers that a tiny configuration builds, under ZeRO-3 on two processes.

    python tests/huggingface_sweep.py                          # all, and the table benchmarks/huggingface.json
    python tests/huggingface_sweep.py --groups causal --only llama mamba

Verdicts: "exact", all that is compared within 1e-10 of the module's own forward and backward (outputs, gradients,
losses and params of three updates, buffers), with and without remat; "float32", within 1e-5; "refused", by an error of
fzero; "wrong", another number; "error", any other error; "dead", a process that crashed or ran out of its time.
"random" are those of which two runs of the module itself differ, and "not built" those that the tiny configuration, or
the inputs that are made for it, do not suit: the module itself does not run.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import huggingface_compared as compared
import huggingface_tiny as tiny
import torch
import torch.distributed as dist
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

GROUPS: dict[str, tuple[str, ...]] = {
    "causal": ("CAUSAL_LM",),
    "encoder": ("MASKED_LM",),
    "sequence to sequence": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "vision": ("IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING"),
    "speech": ("CTC", "SPEECH_SEQ_2_SEQ", "AUDIO_CLASSIFICATION"),
    "two towers": ("ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT"),
}
TEXT = ("causal", "encoder")  # groups that are given no images
TABLE = Path(__file__).parent.parent / "benchmarks" / "huggingface.json"
IMPORTED = ("torch._dynamo", "transformers.models.llama.modeling_llama", "transformers.modeling_utils")  # what takes long
SECONDS = 90.0  # of one model
NEAR = {"exact": 1e-10, "float32": 1e-5}


def architectures(group: str) -> dict[str, str]:
    """Class name -> the model type of its configuration."""
    found: dict[str, str] = {}
    for mapping in GROUPS[group]:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return found


class NotBuilt(Exception):
    """The module itself does not run."""


def model_of(name: str, model_type: str, group: str) -> tuple[torch.nn.Module, list[tiny.Batch]]:
    """A tiny one and a batch for each rank, in float64 or, where that is not supported, in float32."""
    why = []
    for dtype in (torch.float64, torch.float32):
        try:
            return _that_runs(name, model_type, group, dtype)
        except Exception as error:
            why.append(error)
    said = why[1].__cause__ or why[1]
    raise NotBuilt(f"{type(said).__name__}: {said}") from said


def _that_runs(
    name: str, model_type: str, group: str, dtype: torch.dtype
) -> tuple[torch.nn.Module, list[tiny.Batch]]:
    kind = getattr(transformers, name)
    config = CONFIG_MAPPING[model_type]()
    if isinstance(kind.config_class, type) and not isinstance(config, kind.config_class):
        config = kind.config_class()
    module = tiny.built(kind, tiny.smaller(config), dtype)
    batches = tiny.batches_for(module, (1, 2), group not in TEXT)
    out = module(**batches[0])
    loss = compared.loss_of(out)
    if not loss.isfinite():
        raise ValueError(f"its loss is {loss.item()}")
    loss.backward()
    module.zero_grad()
    return module, batches


def verdict_on_rank(rank: int, name: str, model_type: str, group: str) -> dict[str, Any]:
    try:
        module, batches = model_of(name, model_type, group)
        mode = "train"
        if compared.draws(module, batches[0]):
            module, mode = module.eval(), "eval"
            if compared.draws(module, batches[0]):
                return {"verdict": "random"}
    except NotBuilt as error:
        return {"verdict": "not built", "why": str(error)[:300]}
    try:
        found = compared.differences(module, batches, rank)
    except Exception as error:
        own = "fzero" in "".join(traceback.format_tb(error.__traceback__)[-1:])
        where = traceback.format_exc()[-3000:]
        return {"verdict": "refused" if own else "error", "why": f"{type(error).__name__}: {error}"[:600], "trace": where}
    what, (far, leaf) = max(found.items(), key=lambda pair: pair[1][0])
    verdict = next((word for word, near in NEAR.items() if far <= near), "wrong")
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    said = {"verdict": verdict, "dtype": dtype, "mode": mode, "apart": far}
    return said if verdict == "exact" else {**said, "what": what, "leaf": leaf}


def _rank(pipe: Any, rank: int, store: str, *subject: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    pipe.send(verdict_on_rank(rank, *subject))
    pipe.close()
    os._exit(0)


def verdict(seconds: float, *subject: str) -> dict[str, Any]:
    """Of two processes, forked from this one, which has imported what takes long."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, rank, f"{folder}/store", *subject))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        said, end = [], time.monotonic() + seconds
        for pipe in pipes:
            try:
                if not pipe.poll(max(end - time.monotonic(), 0)):
                    raise EOFError
                said.append(pipe.recv())
            except EOFError:
                late = time.monotonic() >= end
                said.append({"verdict": "dead", "why": "ran out of time" if late else "the process died"})
            if said[-1]["verdict"] not in NEAR:
                end = min(end, time.monotonic() + 5)  # the other may wait for it
        for process in processes:
            process.kill()
            process.join()
    order = ["exact", "float32", "random", "not built", "refused", "error", "dead", "wrong"]
    worst = max(said, key=lambda one: order.index(one["verdict"]))
    if said[0]["verdict"] in ("refused", "error") and worst["verdict"] == "dead":
        worst = said[0]
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types, or classes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one model")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--go-on", action="store_true", help="with those that the table does not have yet")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in IMPORTED:
        importlib.import_module(name)
    table: dict[str, Any] = json.loads(args.table.read_text()) if args.table.exists() else {}
    for group in args.groups:
        for name, model_type in architectures(group).items():
            if args.go_on and name in table.get(group, {}):
                continue
            if args.only and model_type not in args.only and name not in args.only:
                continue
            start = time.monotonic()
            found = verdict(args.seconds, name, model_type, group)
            found["seconds"] = round(time.monotonic() - start, 1)
            table.setdefault(group, {})[name] = found
            print(f"{group:10} {name:50} {found['verdict']:10} {found.get('apart', '')} {found.get('why', '')[:150]!r}", flush=True)
            args.table.write_text(json.dumps(table, indent=1) + "\n")
    for group, rows in table.items():
        print(group, dict(collections.Counter(row["verdict"] for row in rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
