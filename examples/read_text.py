"""Reads lines of text from images: a vision encoder (ZeRO-1) and a language model (ZeRO-3), trained as one.

Each is a component with a step, a placement and a state of its own; one loss and one norm join them. Beside them the
same language model learns without the image, to show what can be guessed. About five minutes on two cores:

    python examples/read_text.py
    python examples/read_text.py --ranks 1 --vision-stage 0 --text-stage 0
    torchrun --nproc-per-node 4 examples/read_text.py

Losses are in nats per character. Ctrl-C stops the run and keeps what was trained; a second one kills it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import add_numbers, check_options, default_ranks, device_of, launch, memory_mib, parser_of
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file
from torch import Tensor, nn
from train_lm import SHARD, standard_library, state_mib
from transformer import Block, Transformer, rotary_angles

import fzero as fz

SHORTEST = 4  # characters of a line
PAD, END = 0, ord("\n")  # a row of tokens: END, a line's characters, END, PAD to the end
GLYPH, HEIGHT, SHIFT = 6, 16, 3  # pixels: a character's width, an image's height, in how many places a line may start
Batch = tuple[Tensor, Tensor]  # images [b, 1, HEIGHT, w] and tokens [b, t]
States = tuple[
    fz.TrainState, fz.TrainState, fz.TrainState
]  # of the encoder, of the text, and of the text without images


# ---- the two components


class Encoder(nn.Module):
    """Images [b, 1, HEIGHT, w] -> embeddings [b, w / GLYPH, width]. Blocks are causal: reading goes left to right."""

    def __init__(self, width: int, blocks: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.rotated = width // heads
        with torch.device("meta"):  # the layers would draw from the global generator
            self.stem = nn.Sequential(
                nn.Conv2d(1, 32, 5, stride=2, padding=2, bias=False),
                nn.ReLU(),
                nn.Conv2d(32, 64, 5, stride=(2, GLYPH // 2), padding=2, bias=False),
                nn.ReLU(),
                nn.Conv2d(64, width, (HEIGHT // 4, 1), bias=False),
            )
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
            self.norm = nn.RMSNorm(width)
        self.to_empty(device="cpu")
        for name, param in self.named_parameters():
            if param.ndim == 1:
                nn.init.ones_(param)
            else:
                gain = 2**0.5 if name.startswith("stem") else 1.0  # a ReLU leaves half of the variance
                nn.init.normal_(param, std=gain * param[0].numel() ** -0.5, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        images = F.layer_norm(images, images.shape[1:])  # faint ink reads like dark ink
        x = self.stem(images).squeeze(2).transpose(1, 2)
        angles = rotary_angles(x.shape[1], self.rotated, x.device)
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)


class Decoder(Transformer):
    """The transformer of train_lm.py; an image's embeddings may stand before the characters."""

    def forward(self, tokens: Tensor, embeddings: Tensor | None = None) -> Tensor:
        x, angles = self.embed(tokens), rotary_angles(tokens.shape[1], self.rotated, tokens.device)
        if embeddings is not None:
            # positions start anew, so that every character is about as far from its own place in the image
            angles = torch.cat([rotary_angles(embeddings.shape[1], self.rotated, tokens.device), angles])
            x = torch.cat([embeddings, x], dim=1)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x[:, -tokens.shape[1] :]))


# ---- the run of one rank


def train(rank: int, ranks: int, args: argparse.Namespace, stop: Callable[[], bool]) -> None:
    device = device_of(rank, ranks)
    say: Callable[..., None] = print if rank == 0 else lambda *_: None
    train_lines, held_out_lines = text_lines(args.longest)
    say(f"{len(train_lines):,} lines to train on; {len(held_out_lines):,} others, from other files, are held out")

    weights = torch.Generator().manual_seed(args.seed)
    encode, vision_params = fz.functional(Encoder(args.width, args.vision_blocks, args.heads, weights).to(device))
    decode, text_params = fz.functional(Decoder(args.width, args.text_blocks, args.heads, weights).to(device))

    def loss_fn(params: Any, tokens: Tensor, embeddings: Tensor | None = None) -> Tensor:
        logits = decode(params, tokens[:, :-1], embeddings)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)

    lr = fz.warmup_cosine(args.lr, warmup=min(args.warmup, args.steps), total=args.steps, end=args.lr / 20)
    optimizer = fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(lr, b2=0.98))
    vision = fz.donate(SHARD[args.vision_stage](fz.train_step(encode, optimizer)))
    text = fz.donate(SHARD[args.text_stage](fz.train_step(loss_fn, optimizer)))
    for name, step, params in (("vision encoder", vision, vision_params), ("language model", text, text_params)):
        say(f"\n{name}\n\n{fz.plan(step, params, world_size=ranks)}")
        say(f"state per rank: {state_mib(step, params, ranks):.2f} MiB of {state_mib(step, params, 1):.2f} MiB alone")

    v_state, t_state = vision.init(vision_params), text.init(text_params)
    blind_state = text.init(text_params)  # a second state of the same step: the language model without the image
    guess = fz.with_fn(text, lambda params, *inputs: decode(params, *inputs).argmax(-1))  # of the next characters
    generator = torch.Generator().manual_seed((args.seed << 16) + rank)
    held_out = [random_batch(held_out_lines, generator, args, device) for _ in range(args.eval_batches)]

    def accuracies(states: States, batches: list[Batch]) -> tuple[float, float]:
        """With and without the image, over the characters of all ranks' batches, each given those before it."""
        v_state, t_state, blind_state = states
        counts = torch.zeros(3, device=device)
        for images, tokens in batches:
            before, after = tokens[:, :-1], tokens[:, 1:]
            seen = guess.forward(t_state, before, vision.forward(v_state, images))
            right = torch.stack([seen == after, guess.forward(blind_state, before) == after, after == after])
            counts += (right & (after > END)).sum((1, 2))
        dist.all_reduce(counts)
        return (counts[0] / counts[2]).item(), (counts[1] / counts[2]).item()

    def update(states: States, images: Tensor, tokens: Tensor) -> tuple[States, dict[str, Tensor]]:
        v_state, t_state, blind_state = states
        emb, pull_v = vision.vjp(v_state, images, argnums=())
        loss, pull_t = text.vjp(t_state, tokens, emb)
        g_t, (_, ct) = pull_t(torch.ones_like(loss))
        g_v, _ = pull_v(ct)  # the embeddings' cotangent goes on through the encoder, whose placement is another
        norm = fz.global_norm(g_v, g_t)  # of both, so that they are clipped as one model
        v_state, _ = vision.update(v_state, g_v, grad_norm=norm)
        t_state, _ = text.update(t_state, g_t, grad_norm=norm)
        blind_state, metrics = text(blind_state, tokens)
        dist.all_reduce(loss)
        return (v_state, t_state, blind_state), {"loss": loss / ranks, "loss without the image": metrics["loss"]}

    def look(states: States) -> dict[str, float]:
        curve.append((run.done, *accuracies(states, held_out[:1])))
        return dict(zip(("held-out accuracy", "without the image"), curve[-1][1:], strict=True))

    losses: list[tuple[float, float]] = []  # with and without the image, as in `curve`
    curve: list[tuple[int, float, float]] = []
    batch = lambda _: random_batch(train_lines, generator, args, device)
    options: Any = {"total": args.steps, "evaluate": look, "evaluate_every": args.eval_every}
    run = fz.loop(update, (v_state, t_state, blind_state), batch, log=args.out / "log.csv", stop=stop, **options)
    for _, metrics in run:
        losses.append((metrics["loss"].item(), metrics["loss without the image"].item()))
        speed = ranks * args.batch / run.logged["seconds"]
        run.note = f"{speed:,.0f} images/s, {memory_mib(device):,.0f} MiB a rank"
    v_state, t_state, blind_state = run.state

    for name, state in (("vision", v_state), ("text", t_state)):
        full = fz.gather(state.params)
        if rank == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            save_file({path: leaf.cpu() for path, leaf in full.items()}, args.out / f"{name}.safetensors")

    curve.append((len(losses), *accuracies(run.state, held_out)))
    images, tokens = held_out[0]
    emb, read, after = vision.forward(v_state, images), tokens[:, :1], tokens[:, 1:]
    for _ in range(after.shape[1]):  # every character follows from the image and from those read so far
        read = torch.cat([read, guess.forward(t_state, read, emb)[:, -1:]], dim=1)
    # places are compared: after a character that was left out, all are wrong
    counts = torch.stack([(read[:, 1:] == after) & (after > END), after > END]).sum((1, 2))
    dist.all_reduce(counts)
    guesses = guess.forward(blind_state, tokens[:, :-1]).clamp(min=ord(" ")).where(after > END, END)
    rows = {"text": lines_of(after), "read": lines_of(read[:, 1:]), "guess": lines_of(guesses)}
    if rank == 0:
        draw_curves(losses, curve, args.out / "curves.png")
        draw_reading(images[:8].cpu(), rows, args.out / "reading.png")
    if run.ended == "asked":
        say(f"stopped after {len(losses)} of {args.steps} steps; what was trained is kept")
    say(f"saved vision.safetensors, text.safetensors, curves.png and reading.png in {args.out}")
    say(f"read from the image alone: {counts[0] / counts[1]:.1%} of {counts[1]} held-out characters")
    _, seen, unseen = curve[-1]
    say(f"held-out accuracy, each character given those before it: {seen:.1%}; without the image: {unseen:.1%}")


# ---- data: lines of the standard library, and images of them


def text_lines(longest: int) -> tuple[list[str], list[str]]:
    """Lines to train on, and lines that only held-out files have. No line comes twice."""

    def lines(text: Tensor) -> dict[str, None]:
        stripped = (line.strip() for line in text.numpy().tobytes().decode(errors="replace").splitlines())
        return dict.fromkeys(s for s in stripped if SHORTEST <= len(s) <= longest and s.isascii() and s.isprintable())

    train, held_out = (lines(text) for text in standard_library())
    return list(train), [line for line in held_out if line not in train]


def render(lines: list[str], longest: int, generator: torch.Generator) -> Tensor:
    """Images [b, 1, HEIGHT, w], each line somewhat shifted, more or less dark, on noisy paper; paper is 0, ink 1."""
    font = ImageFont.load_default_imagefont()  # Pillow's own bitmaps look alike everywhere
    shifts = torch.randint(SHIFT, (len(lines), 2), generator=generator).tolist()
    drawn = []
    for line, (right, down) in zip(lines, shifts, strict=True):
        image = Image.new("L", ((longest + 2) * GLYPH, HEIGHT))
        ImageDraw.Draw(image).text((right, down + 2), line, fill=255, font=font)
        drawn.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, HEIGHT, -1))
    ink = torch.stack(drawn).float() / 255
    darkness = 0.4 + 0.6 * torch.rand(len(lines), 1, 1, 1, generator=generator)
    return darkness * ink + 0.15 * torch.randn(ink.shape, generator=generator)


def random_batch(lines: list[str], generator: torch.Generator, args: argparse.Namespace, device: torch.device) -> Batch:
    chosen = [lines[i] for i in torch.randint(len(lines), (args.batch,), generator=generator).tolist()]
    rows = [[END, *line.encode(), END] + [PAD] * (args.longest - len(line)) for line in chosen]
    return render(chosen, args.longest, generator).to(device), torch.tensor(rows, device=device)


def lines_of(tokens: Tensor) -> list[str]:
    """Each row up to its first END; what cannot be printed is replaced."""
    lines = (bytes(row).split(b"\n")[0].decode("latin-1") for row in tokens.tolist())
    return ["".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line) for line in lines]


# ---- what is shown


def draw_curves(losses: list[tuple[float, float]], curve: list[tuple[int, float, float]], path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    updates, *accuracies = zip(*curve, strict=True)
    for i, (label, color) in enumerate((("with the image", "tab:blue"), ("without the image", "gray"))):
        left.plot(range(1, len(losses) + 1), [pair[i] for pair in losses], color=color, lw=1, label=label)
        right.plot(updates, accuracies[i], color=color, marker="o", ms=3, label=label)
    for axes, label, top in ((left, "training loss, nats per character", None), (right, "held-out accuracy", 1)):
        axes.set(xlabel="update", ylabel=label, ylim=(0, top))
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def draw_reading(images: Tensor, rows: dict[str, list[str]], path: Path) -> None:
    """Up to eight images; under each a line of every row, the first row being the truth. Wrong characters are red."""
    figure = Figure(figsize=(15, 8), layout="constrained")
    grid = figure.subplots(4, 2, subplot_kw={"frame_on": False, "xticks": [], "yticks": []})
    for axes, image, *lines in zip(grid.flat, images, *rows.values(), strict=False):
        axes.imshow(image[0].numpy(), cmap="gray_r", vmin=-0.3, vmax=1)
        axes.set(xlim=(0, image.shape[-1]), ylim=(HEIGHT + 9 * len(rows), 0))
        for i, (name, line) in enumerate(zip(rows, lines, strict=True)):
            y = HEIGHT + 9 * i + 5
            axes.text(-2, y, name, ha="right", va="center", fontsize=10, color="gray")
            for k, (true, read) in enumerate(zip_longest(lines[0], line, fillvalue=" ")):
                style: Any = {"color": "black"}
                if read != true:
                    read, style = read.replace(" ", "\N{OPEN BOX}"), {"color": "white", "backgroundcolor": "tab:red"}
                x = GLYPH * (k + 0.5) + SHIFT / 2
                axes.text(x, y, read, ha="center", va="center", family="monospace", parse_math=False, **style)
    figure.suptitle("held-out lines; guess: without the image, from the true characters before; red: wrong")
    figure.savefig(path, dpi=120)


# ---- options


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_numbers(
        parser,
        ("ranks", default_ranks(), "processes, each with its own share of the batch and of the state"),
        ("width", 128, "features of the residual streams"),
        ("vision-blocks", 1, "transformer blocks of the encoder"),
        ("text-blocks", 2, "transformer blocks of the language model"),
        ("heads", 4, "attention heads of a block"),
        ("longest", 24, f"characters of the longest line, {SHORTEST} or more"),
        ("batch", 16, "images a rank and step"),
        ("steps", 1500, "updates"),
        ("warmup", 30, "updates over which the learning rate rises"),
        ("eval-every", 50, "updates between two looks at held-out lines"),
        ("eval-batches", 16, "held-out batches a rank at the end; one is looked at in between"),
        ("lr", 3e-3, "peak learning rate"),
    )
    for name, default, component in (("vision", 1, "encoder"), ("text", 3, "language model")):
        text = f"ZeRO stage of the {component}; 0 shards nothing"
        parser.add_argument(f"--{name}-stage", type=int, default=default, choices=sorted(SHARD), help=text)
    parser.add_argument("--seed", type=int, default=0, help="of weights, lines and images")
    parser.add_argument("--out", type=Path, default=Path("out/read_text"), help="folder for weights and pictures")
    args = parser.parse_args(argv)
    if args.longest < SHORTEST:
        parser.error(f"--longest must be at least {SHORTEST}, as shorter lines are left out; got {args.longest}")
    check_options(parser, args, args.vision_stage, args.text_stage)
    return args


if __name__ == "__main__":
    sys.exit(launch(train, options()))
