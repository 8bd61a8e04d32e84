"""Every architecture of the installed transformers that a tiny configuration builds, under ZeRO-3 on two processes.

    python tests/huggingface_sweep.py                         # all, and the table benchmarks/huggingface.json
    python tests/huggingface_sweep.py --groups causal speech --go-on
    python tests/huggingface_sweep.py --only LlamaForCausalLM --table /tmp/llama.json   # with the error's traceback

Each is called as its documentation does, with labels and all hidden states, by its configuration's defaults but for
sizes and dropout, in training mode; what is compared says `huggingface_compared`. Verdicts:

- "exact": within 1e-10 of the module's own forward and backward, in float64;
- "float32": within 1e-5, where it does not run in float64, or computes in float32 inside;
- "refused": by an error of fzero; "error": by any other, which the module alone does not raise;
- "wrong": another number; "dead": a process crashed or ran out of its time;
- "random": two runs of the module itself differ, also in evaluation mode;
- "not built": the module itself does not run, of the tiny configuration or with the inputs that are made for it.
"""

from __future__ import annotations

import collections
import copy
import faulthandler
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import huggingface_compared as compared
import huggingface_inputs as inputs
import huggingface_tiny as tiny
import torch
import torch.distributed as dist
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import results

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
SECONDS = 120.0  # of one model
NEAR = {"exact": 1e-10, "float32": 1e-5}
VERDICTS = (*NEAR, "random", "not built", "refused", "error", "dead", "wrong")  # the last of two ranks' counts
IMPORTED = ("torch._dynamo", "transformers.models.llama.modeling_llama")  # what takes long, before any process begins


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


Subject = tuple[torch.nn.Module, list[inputs.Batch]]  # a model, and each rank's batch


def model_of(name: str, model_type: str, group: str) -> Subject:
    """A tiny one and a batch for each rank, in float64 or, where that is not supported, in float32.

    Raises:
        NotBuilt: from what it raises in float32.
    """
    error: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            return _that_runs(name, model_type, group, dtype)
        except Exception as own:
            error = own.__cause__ if isinstance(own.__cause__, Exception) else own
    raise NotBuilt(f"{type(error).__name__}: {error}") from error


def _that_runs(
    name: str, model_type: str, group: str, dtype: torch.dtype
) -> tuple[torch.nn.Module, list[inputs.Batch]]:
    kind = getattr(transformers, name)
    config = CONFIG_MAPPING[model_type]()
    if isinstance(kind.config_class, type) and not isinstance(config, kind.config_class):
        config = kind.config_class()  # the model type is that of a larger model, of which this is a part
    module = tiny.built(kind, tiny.smaller(config), dtype)
    batches = inputs.batches_for(module, (1, 2), group not in TEXT)
    loss = compared.loss_of(copy.deepcopy(module)(**batches[0]))  # a module may keep what its forward computes
    if not loss.isfinite():
        raise ValueError(f"its loss is {loss.item()}")
    loss.backward()
    return module, batches


def on_rank(rank: int, name: str, model_type: str, group: str) -> dict[str, Any]:
    """The verdict of one rank, and what else is said of it."""
    try:
        module, batches = model_of(name, model_type, group)
        if compared.draws(module, batches[0]) and compared.draws(module.eval(), batches[0]):
            return {"verdict": "random"}
    except NotBuilt as error:
        return {"verdict": "not built", "why": str(error)[:300]}
    try:
        found = compared.differences(module, batches, rank)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        verdict = "refused" if "/fzero/" in frames[-1].filename else "error"
        return {
            "verdict": verdict,
            "why": f"{type(error).__name__}: {error}"[:600],
            "traceback": traceback.format_exc(),
        }
    what, (far, leaf) = max(found.items(), key=lambda pair: pair[1][0])
    verdict = next((word for word, near in NEAR.items() if far <= near), "wrong")
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    said = {"verdict": verdict, "dtype": dtype, "training": module.training, "apart": float(f"{far:.1e}")}
    return said if verdict == "exact" else {**said, "of": f"{what} {leaf}"}


def _process(pipe: Connection, rank: int, folder: str, seconds: float, *subject: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    faulthandler.dump_traceback_later(0.95 * seconds, file=open(_stands(folder, rank), "w"))
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    pipe.send(on_rank(rank, *subject))
    pipe.close()
    os._exit(0)  # without the end of a group that the other rank may have left


def verdict_of(seconds: float, *subject: str) -> dict[str, Any]:
    """Of two processes, forked from this one, which has imported what takes long."""
    context, said = multiprocessing.get_context("fork"), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_process, args=(theirs, rank, folder, seconds, *subject))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        end = time.monotonic() + seconds
        for rank, pipe in enumerate(pipes):
            try:
                answers = pipe.poll(max(end - time.monotonic(), 0.0))
                said.append(pipe.recv() if answers else {"verdict": "dead", "why": _where(folder, rank, seconds)})
            except EOFError:
                said.append({"verdict": "dead", "why": "the process died"})
            if said[-1]["verdict"] not in NEAR:
                end = min(end, time.monotonic() + 5.0)  # the other may wait for this one
        for process in processes:
            process.kill()
            process.join()
    alone = [own for own in said if own["verdict"] in ("refused", "error")]  # for which the other one waited
    return max(alone or said, key=lambda own: VERDICTS.index(own["verdict"]))


def _stands(folder: str, rank: int) -> Path:
    """The file in which a process that takes too long writes where it stands."""
    return Path(folder, f"stands {rank}")


def _where(folder: str, rank: int, seconds: float) -> str:
    frames = [line.strip() for line in _stands(folder, rank).read_text().splitlines() if line.startswith("  File")]
    return f"no answer within {seconds:g} seconds; it stands in {'; '.join(frames[:3]) or 'nothing of Python'}"


def summary(table: dict[str, Any]) -> list[str]:
    """How many of each verdict, group by group, and who is refused or worse."""
    lines = []
    for group, rows in table.items():
        counts = collections.Counter(row["verdict"] for row in rows.values())
        built = sum(counts.values()) - counts["not built"]
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        lines.append(f"{group}: {sum(counts.values())} architectures, {built} that a tiny configuration builds; {told}")
        bad = {name: row for name, row in rows.items() if row["verdict"] not in (*NEAR, "not built")}
        lines += [
            f"    {name}: {row['verdict']}, {row.get('why') or row.get('of', '')}"[:150] for name, row in bad.items()
        ]
    return lines


def main() -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types or classes, with tracebacks")
    parser.add_argument("--go-on", action="store_true", help="with those that the table does not have yet")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one model")
    parser.add_argument("--table", type=Path, default=TABLE)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in IMPORTED:
        importlib.import_module(name)
    whole: dict[str, Any] = {"transformers": transformers.__version__, "torch": torch.__version__, "groups": {}}
    if args.table.exists() and (args.go_on or args.only or args.groups != list(GROUPS)):
        whole["groups"] = json.loads(args.table.read_text())["groups"]
    table = whole["groups"]
    for group in args.groups:
        for name, model_type in architectures(group).items():
            known = args.go_on and name in table.get(group, {})
            if known or (args.only and not {model_type, name} & {*args.only}):
                continue
            found = verdict_of(args.seconds, name, model_type, group)
            where = found.pop("traceback", "")
            table.setdefault(group, {})[name] = found
            print(f"{group:20} {name:45} {found['verdict']:9} {found.get('apart', '')} {found.get('why', '')[:120]!r}")
            print(where if args.only else "", end="", flush=True)
            args.table.write_text(json.dumps(whole, indent=1) + "\n")
    print(*summary(table), sep="\n")
    counted = results.Table("built", "exact", "within 1e-5", "refused", show=False)
    for group, rows in table.items():
        found = collections.Counter(row["verdict"] for row in rows.values())
        counted.row(group, len(rows) - found["not built"], *[found[word] for word in (*NEAR, "refused")])
    results.save(args, counted)
    return any(row["verdict"] in ("error", "wrong", "dead") for rows in table.values() for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
