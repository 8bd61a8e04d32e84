"""Reads lines of text from images of several resolutions: two models, each on ranks of its own, trained as one.

A vision transformer has the patches of all images cut over two ranks (Ulysses) and its optimizer's state, too (ZeRO-1);
a Llama-like decoder has its matrices cut over two others (tensor parallelism, and ZeRO-3 over what --text-dp says).
Each image has its own number of patches; fz.Ragged brings them to the one and on to the other, and nothing is padded.
The loop is the same wherever they are. About two minutes on two cores:

    python examples/multimodal.py
    python examples/multimodal.py --on threads
    python examples/multimodal.py --on ray
    python examples/multimodal.py --on here
    python examples/multimodal.py --vision-dp 2 --sp 1 --text-dp 2

The losses are the same to the bit on threads, processes and Ray. "here" is both in this process, with nothing cut.
Losses are in nats per character. Ctrl-C stops the run and keeps what was trained; --resume goes on from the newest
checkpoint, with the bits of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from launch import add_numbers, check_folder, parser_of
from line_images import END, Batch, random_batch
from line_models import Decoder, VisionTransformer, last_rows, loss_of
from read_text import SHORTEST, lines_of, text_lines
from torch import Tensor
from torch.distributed import init_device_mesh

import fzero as fz

# params of 24 bits and moments of 8; what is computed stays in float32, which all CPUs are quick in
COMPACT = dataclasses.replace(fz.Policy.compact24(), grad=torch.float32, compute=torch.float32)
# of images: some of them for each dp, and of all their patches a piece for each sp
PIECES = fz.Ragged(fz.PartitionSpec(("dp", "sp")), fz.PartitionSpec("dp"))
# attention and MLP by columns, then by rows; the head by characters
PLAN = {
    **dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate", "*.up"), "column"),
    **dict.fromkeys(("*.o_proj", "*.down"), "row"),
    "head": "column_gather",
}
OF_A_START = ("on", "resume", "out", "save_every")  # options that change no number
TRACED = 3  # updates that the picture shows
KINDS = {"vjp": fz.schedules.Kind.FORWARD, "pull": fz.schedules.Kind.BACKWARD}


# ---- the two components: what is built on each of their ranks


def vision_on(rank: int, args: argparse.Namespace) -> tuple[Any, ...]:
    """The vision transformer: a step, its params, and the mesh that PIECES is of."""
    mesh, attention = None, fz.parallel.attention
    if args.on != "here":
        mesh = init_device_mesh("cpu", (args.vision_dp, args.sp), mesh_dim_names=("dp", "sp"))
        attention = fz.parallel.ulysses(None, fz.parallel.axis(mesh, "sp"))
    weights = torch.Generator().manual_seed(args.seed)
    encode, params = fz.functional(VisionTransformer(args.width, args.vision_blocks, args.heads, weights, attention))
    step = fz.train_step(encode, optimizer(args), COMPACT)
    return (step, params) if mesh is None else (fz.shard_zero1(step, mesh=mesh, axis=("dp", "sp")), params, mesh)


def text_on(rank: int, args: argparse.Namespace) -> tuple[Any, ...]:
    """The language model: its function is the loss, or what it would write next. Each dp rank has whole examples."""
    weights = torch.Generator().manual_seed(args.seed + 1)
    decode, params = fz.functional(Decoder(args.width, args.text_blocks, args.heads, weights))

    def fn(params: Any, tokens: fz.Ragged, images: fz.Ragged, writes: bool = False) -> Tensor:
        logits = decode(params, tokens, images)
        return logits[last_rows(tokens)].argmax(-1) if writes else loss_of(logits, tokens)

    step = fz.train_step(fn, optimizer(args), COMPACT)
    if args.on == "here":
        return step, params
    mesh = init_device_mesh("cpu", (args.text_dp, args.tp), mesh_dim_names=("dp", "tp"))
    return fz.shard_zero3(fz.shard_tensor(step, PLAN, mesh=mesh), mesh=mesh), params


def optimizer(args: argparse.Namespace) -> Any:
    lr = fz.warmup_cosine(args.lr, warmup=min(args.warmup, args.steps), total=args.steps, end=args.lr / 20)
    return fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(lr, b2=0.98))


# ---- the loop, wherever they are


def update(vision: Any, text: Any, states: tuple[Any, Any], batch: Batch) -> tuple[tuple[Any, Any], dict[str, Any]]:
    v_state, t_state = states
    emb, pull_v = vision.vjp(v_state, batch.images, argnums=())
    loss, pull_t = text.vjp(t_state, batch.tokens, emb)
    g_t, (_, ct) = pull_t(torch.ones_like(loss))
    g_v, _ = pull_v(ct)  # the embeddings' cotangent goes from rank to rank, and on through the vision transformer
    norm = fz.global_norm(g_v, g_t)  # of both, so that they are clipped as one model
    v_state, _ = vision.update(v_state, g_v, grad_norm=norm)
    t_state, _ = text.update(t_state, g_t, grad_norm=norm)
    return (v_state, t_state), {"aux": (loss, batch.count)}  # nobody waits for it yet


def train(args: argparse.Namespace, stop: threading.Event) -> None:
    lines, others = text_lines(args.longest)
    print(f"images of {len(lines):,} lines to train on; {len(others):,} others, from other files, are held out")
    unigram = character_entropy(lines)
    with contextlib.ExitStack() as stack:
        vision, first_v = begun(vision_on, args.vision_dp * args.sp, args, stack, in_specs=(PIECES,), out_specs=PIECES)
        text, first_t = begun(text_on, args.text_dp * args.tp, args, stack)
        kept = args.out / "checkpoints"
        found = newest(kept) if args.resume else None
        if found is None:
            v_state, t_state, losses = first_v(), first_t(), list[float]()
        else:
            v_state, t_state = fz.load(found / "vision", vision), fz.load(found / "text", text)
            losses = fz.load_extra(found / "text")["losses"]
            print(f"going on after update {len(losses)} of {args.steps}")

        batch_of = lambda number: [random_batch(lines, args.batch, (args.seed << 32) + number)]
        options: Any = {"total": args.steps, "after": len(losses), "stop": stop.is_set}
        run = fz.loop(functools.partial(update, vision, text), (v_state, t_state), batch_of, **options)
        began, seen, waiting = time.perf_counter(), 0, list[Any]()

        def keep() -> None:
            losses.extend(map(float, waiting))
            waiting.clear()
            save(kept, *run.state, losses, args)

        for _, metrics in run:
            losses.extend(map(float, waiting))  # one behind, so that the components have work while this draws images
            loss, count = metrics["aux"]
            waiting, seen = [loss], seen + count
            if run.done % args.save_every == 0:
                keep()
            if losses:
                run.note = f"loss {losses[-1]:.3f}, {seen / (time.perf_counter() - began):,.0f} tokens/s"
        if waiting or not losses:
            keep()
        v_state, t_state = run.state
        stopped = run.ended == "asked"
        (args.out / "losses.json").write_text(json.dumps(losses))

        if args.on != "here":

            def go_on() -> None:
                states = v_state, t_state  # which stay as they are
                for number in range(TRACED):
                    states, _ = update(vision, text, states, random_batch(lines, args.batch, number))

            draw_spans(vision, text, go_on, args.out / "multimodal.png")

        batch = random_batch(others, args.batch, args.seed)
        images = vision.forward(v_state, batch.images)
        loss = float(text.forward(t_state, batch.tokens, images))
        read = lines_of(written(text, t_state, images, args.batch, args.longest + 1))
    if stopped:
        print(f"stopped after {len(losses)} of {args.steps} updates; what was trained is kept; --resume goes on")
    print(f"held-out loss {loss:.3f} nats per character; of the characters' frequencies alone {unigram:.3f}")
    right = sum(a == b for line, own in zip(batch.lines, read, strict=True) for a, b in zip(line, own, strict=False))
    share = right / sum(map(len, batch.lines))
    print(f"read from the image alone: {share:.1%} of the characters of {args.batch} held-out lines")
    print(f"an image of {batch.lines[0]!r} is read as {read[0]!r}")
    picture = "" if args.on == "here" else ", multimodal.png"
    print(f"saved losses.json{picture} and checkpoints in {args.out}")


def begun(
    build: Callable[..., Any], ranks: int, args: argparse.Namespace, stack: contextlib.ExitStack, **specs: Any
) -> tuple[Any, Callable[[], Any]]:
    """A component, and what makes its first state. This is all that --on changes."""
    own = functools.partial(build, args=args)
    if args.on == "here":
        step, params = own(0)
        return step, lambda: step.init(params, seed=args.seed)
    name, halves = build.__name__.removesuffix("_on"), {"resources": {"CPU": 0.5}}  # four ranks on two cores
    component = fz.remote(own, ranks, on=args.on, name=name, options=halves if args.on == "ray" else {}, **specs)
    stack.enter_context(component)
    return component, functools.partial(component.init, seed=args.seed)


def written(text: Any, state: Any, images: fz.Ragged, examples: int, count: int) -> Tensor:
    """What the language model writes of each image, each character its best guess: [examples, count]."""
    tokens = torch.full((examples, 1), END)
    for length in range(1, count + 1):
        rows = fz.Ragged(tokens.flatten(), torch.full((examples,), length))
        tokens = torch.cat([tokens, fz.fetch(text.forward(state, rows, images, True))[:, None]], 1)
    return tokens[:, 1:]


def character_entropy(lines: list[str]) -> float:
    """Nats per character, for who knows how often each occurs."""
    counts = Counter("\n".join([*lines, ""])).values()
    return -sum(n / sum(counts) * math.log(n / sum(counts)) for n in counts)


# ---- checkpoints: one folder for both


def save(kept: Path, v_state: Any, t_state: Any, losses: list[float], args: argparse.Namespace) -> None:
    """The language model's part comes last: where it is whole, both are. The last two checkpoints are kept."""
    folder = kept / f"update-{len(losses):06}"
    folder.mkdir(parents=True, exist_ok=True)
    fz.save(folder / "vision", v_state)
    fz.save(folder / "text", t_state, extra={"losses": losses, "options": of_the_run(args)})
    for old in sorted(kept.iterdir())[:-2]:
        shutil.rmtree(old)


def newest(kept: Path) -> Path | None:
    """The last whole checkpoint."""
    for folder in sorted(kept.glob("update-*"), reverse=True):
        with contextlib.suppress(FileNotFoundError, fz.DamagedCheckpoint):
            fz.load_extra(folder / "text")
            return folder
    return None


def of_the_run(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name not in OF_A_START}


# ---- what is shown


def draw_spans(vision: Any, text: Any, go_on: Callable[[], object], path: Path) -> None:
    """Who computes when while the loop goes on: forward and backward as those of a pipeline, the optimizer in grey."""
    components = vision, text
    for component in components:
        component.spans()  # of what was before
    go_on()
    tasks: list[tuple[int, fz.schedules.Task, float, float]] = []
    others: list[tuple[int, float, float]] = []
    for place, component in enumerate(components):
        numbers: Counter[str] = Counter()
        for span in component.spans():
            if span.verb in KINDS:
                task = fz.schedules.Task(KINDS[span.verb], place, numbers[span.verb])
                tasks.append((place, task, span.start, span.end))
            elif span.verb in ("squares", "update"):
                others.append((place, span.start, span.end))
            numbers[span.verb] += 1
    timeline = fz.schedules.Timeline(tasks)
    axes: Any = fz.plot_schedule(timeline)
    rows = axes.get_yticks()
    for place, began, ended in others:
        axes.broken_barh([(began - timeline.start, ended - began)], (rows[place] - 0.38, 0.76), facecolor="lightgrey")
    axes.set_yticks(rows, ["vision", "text"])
    axes.set_xlim(0, max([timeline.total, *(ended - timeline.start for *_, ended in others)]))
    axes.texts[0].set_text(f"{TRACED} updates; grey: the norm and the optimizer")
    axes.set_xlabel("seconds")
    axes.figure.savefig(path, dpi=150)


# ---- options


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--on", default="processes", choices=["here", "threads", "processes", "ray"], help="where")
    add_numbers(
        parser,
        ("vision-dp", 1, "shares of the batch in the vision transformer"),
        ("sp", 2, "ranks that patches are cut over, for each of these"),
        ("text-dp", 1, "shares of the batch in the language model"),
        ("tp", 2, "ranks that matrices are cut over, for each of these"),
        ("width", 64, "features of the residual streams"),
        ("vision-blocks", 2, "transformer blocks of the vision transformer"),
        ("text-blocks", 2, "transformer blocks of the language model"),
        ("heads", 4, "attention heads of a block"),
        ("longest", 10, "characters of a line"),
        ("batch", 32, "images of an update"),
        ("steps", 800, "updates"),
        ("warmup", 50, "updates over which the learning rate rises"),
        ("save-every", 200, "updates between two checkpoints; the last two are kept"),
        ("lr", 5e-3, "peak learning rate"),
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if any")
    parser.add_argument("--out", type=Path, default=Path("out/multimodal"), help="folder for what is kept")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error("--seed must not be negative")
    if args.width % (2 * args.heads) or args.heads % 2:
        parser.error(f"--heads must be even and --width a multiple of 2 * heads, got {args.heads} and {args.width}")
    if args.longest < SHORTEST:
        parser.error(f"--longest must be at least {SHORTEST}, got {args.longest}")
    check_folder(parser, args.out)
    found = newest(args.out / "checkpoints")
    if found is not None and not args.resume:
        parser.error(f"--out {args.out} holds a run: --resume goes on with it, another --out begins a new one")
    was = fz.load_extra(found / "text")["options"] if found is not None else of_the_run(args)
    for name, value in of_the_run(args).items():
        if value != was[name]:
            parser.error(f"--{name.replace('_', '-')} {value}, but the run in --out {args.out} has {was[name]}")
    return args


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # of each rank: what is summed in which order does not depend on the machine
    stop = threading.Event()

    def handle(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # a second one kills

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    train(args, stop)


if __name__ == "__main__":
    main(options())
