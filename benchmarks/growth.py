"""How step time and memory of ZeRO-3 grow with units, params, ranks and tokens, as a picture.

    OMP_NUM_THREADS=1 python benchmarks/growth.py            # some minutes; writes out/growth.png
    OMP_NUM_THREADS=1 python benchmarks/growth.py --quick    # fewer points

Time is that of a step over the same step without any communication, interleaved in one run. Memory is live tensor bytes
of one rank at peak, over those of the step without communication. A term of ours that grew faster than the model's own
would bend a line upwards.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import results
from contenders import ALONE
from matplotlib.ticker import NullFormatter, ScalarFormatter
from step import memory, ratio, spawned, timed

NAMES = [ALONE, "FSDP2", "fzero ZeRO-3"]
BASE = {"ranks": 2, "width": 128, "blocks": 6, "heads": 2, "batch": 4, "context": 64}
AXES: dict[str, tuple[str, list[int]]] = {
    "blocks": ("units", [6, 12, 24, 48, 96]),
    "width": ("width (params grow with its square)", [64, 128, 256, 512]),
    "ranks": ("ranks (on 2 cores)", [1, 2, 3, 4]),
    "batch": ("sequences of 64 tokens on each rank", [1, 2, 4, 8, 16, 32]),
}


def both(rank: int, args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Ratios of time and of live bytes at peak to the step without communication."""
    times, _ = timed(rank, args, names)
    peaks = {name: memory(rank, args, name)[1] for name in names}
    return {name: {"time": ratio(times, name, ALONE), "peak": peaks[name] / peaks[ALONE]} for name in names[1:]}


def measured(**sizes: int) -> dict[str, Any]:
    args = argparse.Namespace(
        **{**BASE, **sizes}, dtype="float32", device="cpu", remat=False, warmup=1, rounds=7, steps=5
    )
    return spawned(both, args, NAMES)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/growth.png"))
    parser.add_argument("--quick", action="store_true", help="first, middle and last point of each axis only")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure, panels = plt.subplots(2, len(AXES), figsize=(15, 6.5), sharey="row", layout="constrained")
    table = results.Table("FSDP2, time", "FSDP2, live at peak", "fzero ZeRO-3, time", "fzero ZeRO-3, live at peak")
    for column, (axis, (label, values)) in enumerate(AXES.items()):
        chosen = sorted({values[0], values[len(values) // 2], values[-1]}) if args.quick else values
        points = []
        for value in chosen:
            points.append(measured(**{axis: value}))
            table.row(f"{axis}={value}", *[points[-1][name][kind] for name in NAMES[1:] for kind in ("time", "peak")])
        for row, kind in enumerate(("time", "peak")):
            panel = panels[row][column]
            for name, style in (("fzero ZeRO-3", "o-"), ("FSDP2", "s--")):
                panel.plot(chosen, [point[name][kind] for point in points], style, label=name)
            panel.axhline(1.0, color="grey", linewidth=0.8)
            if axis != "ranks":
                panel.set_xscale("log", base=2)
            panel.set_xticks(chosen)
            panel.xaxis.set_major_formatter(ScalarFormatter())
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.grid(alpha=0.3)
        panels[1][column].set_xlabel(label)
    for panel in panels[:, 0]:  # of the whole row, once all of it is drawn
        panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel("step time, of the step\nwithout communication")
    panels[1][0].set_ylabel("live bytes at peak, of the step\nwithout communication")
    panels[0][0].legend()
    base = ", ".join(f"{key} {value}" for key, value in BASE.items())
    figure.suptitle(f"How cost grows: one size at a time, from {base}; float32, AdamW, gloo")
    figure.savefig(args.out, dpi=110)
    print(f"wrote {args.out}")
    results.save(args, table)


if __name__ == "__main__":
    main()
