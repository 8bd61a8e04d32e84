"""Listener and connect: how a connection begins, by a handshake, and where a listener is found."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from fzero.channels import segments
from fzero.channels.connection import Connection, open_here
from fzero.channels.wire import ChannelError, Closed, Deadline, Refused, TimedOut

# Two processes show each other that both know a token, which never travels.
#
#    both ways   hello: magic, version, what this side can do, a fresh nonce, its name
#    both ways   HMAC-SHA256(token, this side's role + the caller's hello + the listener's)
#
# That is challenge and response both ways: an answer is good for these nonces and this role only. What follows is
# neither encrypted nor signed: on a network that others can change, lay a tunnel.
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


Address = tuple[str, str, str, int]
"""(the machine, name of a unix socket there or "", TCP host, TCP port): a value that messages can hold."""


def machine() -> str:
    """Names this machine as processes that reach one another by unix sockets see it: its boot and network namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return ""  # cannot be told: only TCP


def has_unix_sockets() -> bool:
    """Tells whether unix sockets can have names that are no files, which nobody must remove."""
    return sys.platform == "linux" and hasattr(socket, "AF_UNIX") and bool(machine())


HANDSHAKE_SECONDS = 5.0  # that a handshake may take
BACKLOG = 1024  # who may have called and not been taken yet
LOOK_SECONDS = 0.5  # after which whoever listens looks whether it is closed, where closing does not wake it

_log = logging.getLogger("fzero.channels")


class Listener:
    """Takes connections of those who know the token.

    Handshakes run beside one another, each with a deadline of its own, so that nobody who is silent, slow or wrong
    keeps others waiting; what is refused is logged as a warning of "fzero.channels".

    Args:
        token: bytes that both sides know, such as `secrets.token_bytes(32)`.
        host: the name or address by which other machines reach this one; None for this machine only.
        name: what the other sides call this one in their errors; None for the process and the machine.

    Raises:
        OSError: the host is not one of this machine's.

    Example:
        >>> import secrets
        >>> from fzero.channels import Listener
        >>> with Listener(secrets.token_bytes(32)) as listener:
        ...     where, name, host, port = listener.address
        >>> host
        '127.0.0.1'
    """

    def __init__(self, token: bytes, host: str | None = None, name: str | None = None) -> None:
        self._token, self._name = token, name or own_name()
        host = "127.0.0.1" if host is None else host
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._sockets = [socket.create_server((host, 0), family=family, backlog=BACKLOG)]
        port, unix = self._sockets[0].getsockname()[1], ""
        if has_unix_sockets():
            unix = f"fzero-{secrets.token_hex(8)}"
            self._sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._sockets[1].bind("\0" + unix)
            self._sockets[1].listen(BACKLOG)
        self.address: Address = (machine(), unix, host, port)
        self._ready: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        open_here.add(self)
        self._threads = [
            threading.Thread(target=self._listen, args=(sock,), name="fzero listener", daemon=True)
            for sock in self._sockets
        ]
        for thread in self._threads:
            thread.start()

    def accept(self, timeout: float) -> Connection:
        """The next connection whose handshake is done.

        Raises:
            TimedOut: there was none within `timeout` seconds.
            Closed: the listener is closed.
        """
        try:
            connection = None if self._closed else self._ready.get(timeout=timeout)
        except queue.Empty:
            raise TimedOut(f"nobody connected to {self._name} within {timeout} s.") from None
        if connection is None:
            self._ready.put(None)  # for whoever waits beside
            raise Closed(f"the listener {self._name} is closed.")
        return connection

    def close(self) -> None:
        """Ends listening, and connections that nobody has accepted; who waits gets `Closed`. Others stay open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
        open_here.discard(self)
        self._ready.put(None)
        while (connection := self._ready.get()) is not None:
            connection.close()
        self._ready.put(None)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def forget(self) -> None:
        """In a forked child: the listener is the parent's."""
        self._closed, self._lock = True, threading.Lock()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                os.close(sock.detach())

    def _listen(self, listening: socket.socket) -> None:
        """Starts a handshake with everybody who calls."""
        listening.settimeout(LOOK_SECONDS)
        while not self._closed:
            try:
                sock, _ = listening.accept()
            except TimeoutError:
                continue
            except OSError as error:  # it may have gone again, there are no descriptors left, or this is closed
                if not self._closed:
                    _log.warning("a connection could not be taken: %s", error)
                    time.sleep(0.05)
                continue
            try:
                threading.Thread(target=self._greet, args=(sock,), name="fzero handshake", daemon=True).start()
            except RuntimeError as error:  # no more threads
                self._refuse(sock, "somebody", error)

    def _greet(self, sock: socket.socket) -> None:
        who = "an unknown peer"
        try:
            who = f"{sock.getpeername() or 'a process here'}"
            peer = greeted(sock, self._token, self._name, False, Deadline(HANDSHAKE_SECONDS))
            _prepare(sock)
            with self._lock:
                if not self._closed:
                    self._ready.put(Connection(sock, peer.name, peer.shares))
                    return
            sock.close()
        except (OSError, RuntimeError) as error:  # a handshake's errors, and where there are no more threads
            self._refuse(sock, who, error)

    def _refuse(self, sock: socket.socket, who: str, error: Exception) -> None:
        sock.close()
        if not self._closed:
            _log.warning("refused a connection from %s: %s", who, error)


def connect(address: Address, token: bytes, timeout: float, name: str | None = None) -> Connection:
    """Connects to a listener: on its own machine by a unix socket, otherwise by TCP.

    Args:
        address: `listener.address`, also as it comes in a message.
        token: the listener's.
        timeout: seconds that connecting and the handshake may take together.
        name: what the listener's side calls this one in its errors; None for the process and the machine.

    Raises:
        Refused: nobody listens there, or with another token or version.
        TimedOut: it took longer.

    Example:
        >>> import secrets
        >>> from fzero.channels import Listener, connect
        >>> with Listener(token := secrets.token_bytes(32), name="the vision encoder") as listener:
        ...     with connect(listener.address, token, timeout=5.0) as connection:
        ...         connection.peer
        'the vision encoder'
    """
    where, unix, host, port = address
    deadline = Deadline(timeout)
    at = f"{host} port {port}"
    sock = None
    try:
        if unix and where == machine() and has_unix_sockets():
            sock, at = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"{at} by its unix socket {unix}"
            sock.settimeout(timeout)  # and is refused at once where too many are calling
            sock.connect("\0" + unix)
        else:
            sock = socket.create_connection((host, port), timeout=timeout)
        peer = greeted(sock, token, name or own_name(), True, deadline)
        _prepare(sock)
        return Connection(sock, peer.name, peer.shares)
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, TimeoutError) and not isinstance(error, TimedOut):
            raise TimedOut(f"connect: {at} did not answer within {timeout} s.") from None
        if isinstance(error, ChannelError):
            raise type(error)(f"connect: {at}: {error}.") from None
        if isinstance(error, OSError):
            raise Refused(f"connect: {at}: {error}.") from error
        raise


def _prepare(sock: socket.socket) -> None:
    """Small messages go at once; a machine that is gone is noticed within about half a minute."""
    if sock.family == getattr(socket, "AF_UNIX", None):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
