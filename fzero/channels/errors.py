"""What can go wrong with a connection; each error names the peer, what was waited for and how long."""

from __future__ import annotations


class ChannelError(ConnectionError):
    """What went wrong with a connection to another process: the base of the errors of this wing."""


class Closed(ChannelError):
    """The connection has ended: it was closed here or there, or the peer's process has died."""


class BadMessage(Closed):
    """The peer sent what is no message; the connection is closed, as what follows cannot be told apart."""


class Refused(ChannelError):
    """No connection came about: nobody listens there, or the handshake failed, by a wrong token for example."""


class TimedOut(ChannelError, TimeoutError):
    """What was waited for did not happen in time."""
