"""What messages between two processes cost: payload beside memcpy, and the round trip of a small message.

    OMP_NUM_THREADS=1 python benchmarks/channels.py
    OMP_NUM_THREADS=1 python benchmarks/channels.py --rounds 31 --mib 4 32

One line per size. The first column is GB/s of torch's `copy_` between two buffers of that size that were touched
before; the others are what a tensor of the size reaches from one process to another as a share of that, the median of
the ratios within each round, in which all take turns: by shared memory and by TCP over the loopback. A tensor has
arrived when the sender has an answer to it, so the time of a small message back is in it. "read" is the same where the
receiver also copies what came into a buffer of its own before it answers.

Then the round trip of a small message, in microseconds: the median, and what 99 of 100 stay below.
"""

from __future__ import annotations

import multiprocessing
import secrets
import statistics
import time
from collections.abc import Callable

import results
import torch

from fzero.channels import Address, Closed, Connection, Listener, connect


def answer(address: Address, token: bytes) -> None:
    """What the other process does: answers whatever comes."""
    torch.set_num_threads(1)
    own = {}
    with connect(address, token, timeout=60.0) as connection:
        while True:
            try:
                payload, read = connection.receive(timeout=600.0)  # type: ignore[misc]
            except Closed:
                return
            if read:
                assert isinstance(payload, torch.Tensor)
                if payload.numel() not in own:
                    own[payload.numel()] = torch.zeros_like(payload)
                own[payload.numel()].copy_(payload)
            del payload
            connection.send(None)


def seconds(run: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - begin) / times


def there(connection: Connection, payload: object, read: bool) -> None:
    connection.send((payload, read))
    connection.receive(timeout=60.0)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64, 256], help="sizes; default 1 16 64 256")
    parser.add_argument("--rounds", type=int, default=11, help="default 11")
    parser.add_argument("--trips", type=int, default=5000, help="round trips of a small message; default 5000")
    args = parser.parse_args()
    torch.set_num_threads(1)
    token = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    with Listener(token) as listener:
        for name, address in (("shared memory", listener.address), ("TCP", ("", "", *listener.address[2:]))):
            processes.append(context.Process(target=answer, args=(address, token), daemon=True))
            processes[-1].start()
            connections[name] = listener.accept(timeout=60.0)
    shared = results.Table("memcpy GB/s", *[name + end for name in connections for end in ("", ", read")])
    for mib in args.mib:
        payload = torch.ones(mib << 20, dtype=torch.uint8)
        target, times = torch.zeros_like(payload), max(1, 64 // mib)
        kinds: dict[tuple[str, bool], Callable[[], object]] = {
            (name, read): lambda c=connection, r=read: there(c, payload, r)
            for name, connection in connections.items()
            for read in (False, True)
        }
        for run in kinds.values():
            run()
        speeds, shares = [], {key: [] for key in kinds}
        for _ in range(args.rounds):
            copying = seconds(lambda: target.copy_(payload), times)
            speeds.append(payload.numel() / copying / 1e9)
            for key, run in kinds.items():
                shares[key].append(copying / seconds(run, times))
        shared.row(f"{mib} MiB", statistics.median(speeds), *[statistics.median(shares[key]) for key in kinds])
    latency = results.Table("us", "p99")
    for name, connection in connections.items():
        trips = sorted(seconds(lambda: there(connection, ("call", 3), False), 1) for _ in range(args.trips))
        name = f"round trip by {'a unix socket' if connection.transport == 'unix' else name}"
        latency.row(name, statistics.median(trips) * 1e6, trips[len(trips) * 99 // 100] * 1e6)
    results.save(args, shared, latency)
    for connection, process in zip(connections.values(), processes, strict=True):
        connection.close()
        process.join(10.0)


if __name__ == "__main__":
    main()
