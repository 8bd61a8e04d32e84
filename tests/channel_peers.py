"""What the tests of channels share: pairs of connections, drawn messages, and processes at the other end."""

from __future__ import annotations

import contextlib
import math
import multiprocessing.process
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator

import torch
from hypothesis import strategies as st

from fzero.base.forking import Context, forking_context
from fzero.channels import Address, Closed, Connection, Listener, connect
from fzero.channels.tensors import DTYPES, Row, as_contiguous, memory

TOKEN = b"a token that both sides know"
KINDS = ("shared", "unix", "tcp")  # a unix socket with and without shared memory


def over_tcp(address: Address) -> Address:
    """The same listener, reached by TCP also from its own machine."""
    return (address[0], "", *address[2:])


@contextlib.contextmanager
def pair(kind: str) -> Iterator[tuple[Connection, Connection]]:
    """Two ends of a connection in this process."""
    if kind == "unix":
        ours, theirs = socket.socketpair()
        with Connection(ours, "there", False) as here, Connection(theirs, "here", False) as there:
            yield here, there
        return
    with Listener(TOKEN, name="here") as listener:
        address = over_tcp(listener.address) if kind == "tcp" else listener.address
        with connect(address, TOKEN, 5.0, name="there") as there, listener.accept(5.0) as here:
            yield here, there


def bits(tensor: torch.Tensor) -> bytes:
    """Of its values in order."""
    tensor = as_contiguous(tensor, Row(tensor.dtype, tuple(tensor.shape)))
    return bytes(memory(tensor))


def same(a: object, b: object) -> bool:
    """Of the same types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


@st.composite
def drawn_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any dtype, shape and bits, contiguous or not, some of them large enough for shared memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from([(), (1,), (0,), (3,), (2, 0, 3), (2, 3), (4, 1, 5), (300, 310), (70000,)]))
    seed = draw(st.integers(0, 1 << 20))
    count = math.prod(shape) * dtype.itemsize
    bits = torch.randint(2 if dtype is torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed))
    tensor = bits.to(torch.uint8).view(dtype).view(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(),
    st.integers(0, (1 << 64) - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]),
    st.text(st.characters(codec=None)),
    st.binary(),
    st.sampled_from(DTYPES),
    drawn_tensors(),
)
messages = st.recursive(
    values,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text() | st.integers(-(1 << 70), 1 << 70), inner, max_size=4),
    ),
    max_leaves=8,
)


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def soon(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether it holds within that time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def context() -> Context:
    """Processes that are forked from the one that all ranks are forked from, which has no threads."""
    return forking_context("fzero.testing")


@contextlib.contextmanager
def peer(
    run: Callable[[Connection], None], tcp: bool = False
) -> Iterator[tuple[Connection, multiprocessing.process.BaseProcess]]:
    """A process that runs `run(connection)`, and the other end of that connection."""
    with Listener(TOKEN, name="the test") as listener:
        address = over_tcp(listener.address) if tcp else listener.address
        process = context().Process(target=_peer_main, args=(run, address), daemon=True)
        process.start()
        try:
            with listener.accept(60.0) as connection:
                yield connection, process
        finally:
            process.kill()
            process.join(10.0)
            process.close()


def _peer_main(run: Callable[[Connection], None], address: Address) -> None:
    torch.set_num_threads(1)
    with connect(address, TOKEN, 30.0, name="the peer") as connection:
        run(connection)


def echo(connection: Connection) -> None:
    """Sends back whatever comes."""
    with contextlib.suppress(Closed):
        while True:
            connection.send(connection.receive(60.0))


def pour(connection: Connection) -> None:
    """Sends large tensors without end."""
    payload = torch.ones(4 << 20)
    with contextlib.suppress(Closed):
        while True:
            connection.send(payload)


def hold(connection: Connection) -> None:
    """Says that it is there, keeps what comes, and does nothing more."""
    kept = [connection.receive(60.0)]
    connection.send("held")
    signal.pause()
    del kept


def forks(connection: Connection) -> None:
    """Forks a child, which has the parent's tensor and connections, and tells what the child could do with them."""
    kept = connection.receive(60.0)
    assert isinstance(kept, torch.Tensor)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            connection.send("from the child", timeout=1.0)
        except Closed as error:
            said = str(error)
        total = int(kept.sum())
        del kept  # says nothing of the parent's
        os.write(theirs, f"{total} {said}".encode())
        signal.pause()
    connection.send(("child", child, os.read(ours, 1000).decode()))
    connection.receive(60.0)
    connection.send(int(kept.sum()))
    signal.pause()
