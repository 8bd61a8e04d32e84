"""Two processes show each other that both know a token, which never travels.

    both ways   hello: magic, version, what this side can do, a fresh nonce, its name
    both ways   HMAC-SHA256(token, this side's role + the caller's hello + the listener's)

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

from fzero.channels import segments
from fzero.channels.wire import Deadline, Refused, TimedOut

VERSION = 3
MAX_NAME = 200  # bytes
ROLES = (b"caller", b"listener")

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


def greeted(sock: socket.socket, token: bytes, name: str, calls: bool, deadline: Deadline) -> Peer:
    """Who is at the other end.

    Args:
        calls: whether this is the caller's side, not the listener's.

    Raises:
        Refused: the other side has another token or version, or is no channel.
        TimedOut: it took too long.
        OSError: the connection broke.
    """
    ours = _hello(name)
    _send(sock, ours, deadline)
    theirs = _receive(sock, _HELLO.size, "its hello", deadline)
    peer, hellos = _read(theirs), ours + theirs if calls else theirs + ours
    own, other = ROLES if calls else ROLES[::-1]
    _send(sock, _proof(token, own, hellos), deadline)
    proof = _receive(sock, _PROOF, "its proof (it goes away where tokens differ)", deadline)
    if not hmac.compare_digest(proof, _proof(token, other, hellos)):
        raise Refused("it has another token")
    return peer


def _hello(name: str) -> bytes:
    data = name.encode()[:MAX_NAME]
    return _HELLO.pack(_MAGIC, VERSION, segments.AVAILABLE, len(data), secrets.token_bytes(32), data)


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
    sock.settimeout(deadline.left())
    sock.sendall(data)  # a few bytes, for which a new socket has room


def _receive(sock: socket.socket, count: int, what: str, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < count:
        try:
            if deadline.is_over():
                raise TimeoutError
            sock.settimeout(deadline.left())
            more = sock.recv(count - len(data))
        except TimeoutError:
            raise TimedOut(f"{what} did not come within {deadline.seconds} s") from None
        if not more:
            raise Refused(f"it went away before {what}")
        data += more
    return data
