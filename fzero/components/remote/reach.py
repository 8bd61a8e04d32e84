"""How one reader gets to one rank: by connections, or by calls of the rank's actor where none can be opened."""

from __future__ import annotations

import logging
import os
import socket
import threading

from fzero.channels import Address, ChannelError, Refused, TimedOut, connect
from fzero.components.remote.link import Way
from fzero.components.remote.through_ray import HELLO, Asking

CONNECT_SECONDS = 10.0  # that opening a connection may take
TRY_SECONDS = 5.0  # the same where there is another way
_log = logging.getLogger("fzero.components")


class Reach:
    """The ways to a rank, as many at one time as there are threads that ask.

    Args:
        actor: the name of the rank's actor; empty where it has none.
        peer: the rank, in errors.
        patience: seconds without a sign of life.
        silent: machines on which no port has answered in time, of those that this reader has tried.
    """

    def __init__(
        self, address: Address, token: bytes, actor: str, peer: str, patience: float, silent: set[str]
    ) -> None:
        self._address, self._token, self._actor, self._peer, self._patience = address, token, actor, peer, patience
        self._silent = silent
        self._deciding, self._through_ray = threading.Lock(), False

    def way(self) -> Way:
        """One more way.

        Raises:
            TimedOut: nobody answered in time.
            OSError: the rank cannot be reached.
        """
        if not self._actor:
            return connect(self._address, self._token, min(CONNECT_SECONDS, self._patience))
        with self._deciding:  # once is enough
            if not self._through_ray:
                host = self._address[2]
                try:
                    if host in self._silent:  # waiting for each of its ranks in turn would take long
                        raise Refused(f"no other port of {host} has answered.")
                    return connect(self._address, self._token, min(TRY_SECONDS, self._patience))
                except ChannelError as error:
                    self._need_actor(error)
                    if isinstance(error, TimedOut):
                        self._silent.add(host)
                self._through_ray = True
        return Asking(self._actor, self._peer)

    def _need_actor(self, error: ChannelError) -> None:
        """Goes on where the actor answers, as it does not where the rank has died."""
        try:
            way = Asking(self._actor, self._peer)
            way.send(HELLO)
            way.receive(self._patience)
        except OSError as other:
            raise Refused(f"{error} Nor through Ray: {other}") from error
        here = f"process {os.getpid()} on {socket.gethostname()}"
        _log.warning("%s can open no connection to %s: %s %s", here, self._peer, error, GOES_THROUGH_RAY)


GOES_THROUGH_RAY = (
    "It goes through Ray's calls and object store instead, which is slower; open the ports between the machines to "
    "have connections."
)
