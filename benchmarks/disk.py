"""How fast tensors go to files of a fz.Disk and come back, beside dd on the same disk.

    OMP_NUM_THREADS=1 python benchmarks/disk.py [FOLDER]

Both move the same number of bytes in the same folder, past the page cache (`direct` for dd, and here where the
filesystem takes it), turn by turn in one run; a line gives the medians in MB/s, and the median of the ratios:

- write: new files beside a new file of dd;
- write over: each tensor's next file is written over its last one, beside dd that overwrites its file (conv=notrunc);
- write again: the last file is dropped instead, its blocks freed and others allocated;
- read, into memory that begins at a block and, by a copy more, into memory that does not.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

import results
import torch

from fzero.stores.blocks import aligned
from fzero.stores.disk import Disk
from fzero.stores.file import File
from fzero.stores.folder import folder_of

MIB = 1 << 20


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def dd(*operands: str) -> None:
    subprocess.run(["dd", "bs=8M", "status=none", *operands], check=True)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    sizes = {"mib": 64, "tensors": 16, "in-flight": 3, "threads": 4, "turns": 7}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--verify", action="store_true", help="with checksums")
    args = parser.parse_args()
    nbytes = args.mib * MIB
    total, flight = nbytes * args.tensors, args.in_flight
    print(f"{args.tensors} tensors of {args.mib} MiB, {flight} in flight; {torch.backends.cpu.get_cpu_capability()}")

    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        disk = Disk(scratch, threads=args.threads, verify=args.verify)
        folder = folder_of(disk, lambda: "benchmark")
        generator = torch.Generator().manual_seed(0)
        sources = [aligned(nbytes, torch.uint8).random_(generator=generator) for _ in range(flight)]
        targets = [aligned(nbytes, torch.uint8) for _ in range(flight)]
        askew = [torch.empty(nbytes + 1, dtype=torch.uint8)[1:] for _ in range(flight)]
        files: dict[int, File] = {}

        def write(over: bool = False) -> None:
            pending: deque[File] = deque()
            for number in range(args.tensors):
                if len(pending) == flight:
                    pending.popleft().written()
                last = files.get(number) if over else None
                files[number] = folder.start_write(sources[number % flight], f"tensor {number}", disk, last)
                pending.append(files[number])
            for file in pending:
                file.written()

        def read(targets: list[torch.Tensor]) -> None:
            pending: deque[Callable[[], None]] = deque()
            for number in range(args.tensors):
                if len(pending) == flight:
                    pending.popleft()()
                pending.append(files[number].start_read(targets[number % flight]))
            for wait in pending:
                wait()

        theirs = Path(scratch, "dd")
        count = f"count={max(1, total >> 23)}"
        times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for turn in range(args.turns + 1):
            files.clear()
            theirs.unlink(missing_ok=True)
            new = ("if=/dev/zero", f"of={theirs}", "oflag=direct", count)
            back = (f"if={theirs}", "of=/dev/null", "iflag=direct", count)
            pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
                "write": (lambda: dd(*new), write),
                "write over": (lambda: dd(*new, "conv=notrunc"), lambda: write(over=True)),
                "write again": (lambda: dd(*new, "conv=notrunc"), write),
                "read": (lambda: dd(*back), lambda: read(targets)),
                "read, not aligned": (lambda: dd(*back), lambda: read(askew)),
            }
            for name, (one, other) in pairs.items():
                pair = [seconds(one), seconds(other)] if turn % 2 else [seconds(other), seconds(one)][::-1]
                if turn:  # the first one warms up
                    times[name].append((pair[0], pair[1]))
            last = (args.tensors - 1) % flight
            assert torch.equal(targets[last], sources[last]) and torch.equal(askew[last], sources[last])
        files.clear()

    table = results.Table("dd MB/s", "fzero MB/s", "ratio")
    for name, pairs_of_seconds in times.items():
        one = statistics.median(total / a / 1e6 for a, _ in pairs_of_seconds)
        other = statistics.median(total / b / 1e6 for _, b in pairs_of_seconds)
        ratio = statistics.median(a / b for a, b in pairs_of_seconds)
        table.row(name, one, other, ratio)
    results.save(args, table)


if __name__ == "__main__":
    main()
