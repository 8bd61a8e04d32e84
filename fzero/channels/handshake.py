"""Two processes show each other that both know a token, which never travels.

    caller   -> listener   hello: magic, version, what it can do, a fresh nonce, its name
    listener -> caller     hello, likewise
    caller   -> listener   HMAC-SHA256(token, "caller" + both hellos)
    listener -> caller     HMAC-SHA256(token, "listener" + both hellos)

That is challenge and response both ways: an answer is good for these nonces and this role only. What follows is neither
encrypted nor signed: on a network that others can change, lay a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
from typing import NamedTuple

from fzero.channels import mappings
from fzero.channels.deadline import Deadline
from fzero.channels.errors import Refused, TimedOut

VERSION = 2
MAX_NAME = 200  # bytes

_HELLO = struct.Struct(f"<8sHBB32s{MAX_NAME}s")  # magic, version, can share memory, length of the name, nonce, name
_MAGIC = b"fzero\x00ch"
_PROOF = hashlib.sha256().digest_size


class Peer(NamedTuple):
    """What the other side says of itself."""

    name: str
    shares: bool


def own_name() -> str:
    """What this process is called where nobody says anything else."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def as_caller(sock: socket.socket, token: bytes, name: str, deadline: Deadline) -> Peer:
    """The caller's side.

    Raises:
        Refused: the other side has another token or version, or is no listener.
        TimedOut: it took too long.
        OSError: the connection broke.
    """
    ours = _hello(name)
    _send(sock, ours, deadline)
    theirs = _receive(sock, _HELLO.size, "its hello", deadline)
    peer = _read(theirs)
    _send(sock, _proof(token, b"caller", ours + theirs), deadline)
    proof = _receive(sock, _PROOF, "its proof (it goes away where tokens differ)", deadline)
    if not hmac.compare_digest(proof, _proof(token, b"listener", ours + theirs)):
        raise Refused("it has another token")
    return peer


def as_listener(sock: socket.socket, token: bytes, name: str, deadline: Deadline) -> Peer:
    """The listener's side; raises as the caller's."""
    ours = _hello(name)
    theirs = _receive(sock, _HELLO.size, "its hello", deadline)
    if theirs.startswith(_MAGIC):
        _send(sock, ours, deadline)  # also where the version differs, for the error there
    peer = _read(theirs)
    proof = _receive(sock, _PROOF, "its proof", deadline)
    if not hmac.compare_digest(proof, _proof(token, b"caller", theirs + ours)):
        raise Refused("it has another token")
    _send(sock, _proof(token, b"listener", theirs + ours), deadline)
    return peer


def _hello(name: str) -> bytes:
    data = name.encode()[:MAX_NAME]
    return _HELLO.pack(_MAGIC, VERSION, mappings.AVAILABLE, len(data), secrets.token_bytes(32), data)


def _read(hello: bytes) -> Peer:
    magic, version, shares, length, _, name = _HELLO.unpack(hello)
    if magic != _MAGIC or length > MAX_NAME:
        raise Refused(f"it says {hello[:16]!r}..., which is no greeting of a channel")
    if version != VERSION:
        raise Refused(f"it speaks version {version}, this side version {VERSION}: use the same fzero on both")
    return Peer(name[:length].decode("utf-8", "replace"), bool(shares))


def _proof(token: bytes, role: bytes, hellos: bytes) -> bytes:
    return hmac.new(token, role + b"\0" + hellos, hashlib.sha256).digest()


def _send(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    sock.settimeout(max(deadline.left(), 1e-3))
    try:
        sock.sendall(data)
    except TimeoutError:
        raise TimedOut(f"it did not read within {deadline.seconds} s") from None


def _receive(sock: socket.socket, count: int, what: str, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < count:
        left = deadline.left()
        try:
            if not left:
                raise TimeoutError
            sock.settimeout(left)
            more = sock.recv(count - len(data))
        except TimeoutError:
            raise TimedOut(f"{what} did not come within {deadline.seconds} s") from None
        if not more:
            raise Refused(f"it went away before {what}")
        data += more
    return data
