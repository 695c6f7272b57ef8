"""Asks whether the process of another rank is alive, even while its interpreter is blocked.

A rank's heartbeats come from a Python thread, which does not run while another thread keeps the GIL in one
call: unpickling a large data set, a sort, a regular expression. A thread of the C++ core (csrc/comm/pulse.h)
does not need the GIL; it answers datagrams of waiting ranks.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from contextlib import suppress
from functools import cache

from gemini import _C
from gemini.errors import GeminiError

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 16
_NONCE_BYTES = 8
_ANY_PORT = 9  # only selects a route: nothing is sent to it


class OwnPulse:
    """The socket that answers for this process, if one could be opened."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._address = _own_address()
        self._pulse: _C.Pulse | None = None
        try:
            self._pulse = _C.Pulse(self._address, self._token)
        except GeminiError as error:
            logger.warning("this rank cannot answer while a call keeps the interpreter's lock: %s", error)

    @property
    def where(self) -> str:
        """The address, port and token under which other ranks query this process; "" if no socket could be
        opened.
        """
        return f"{self._address} {self._pulse.port} {self._token.hex()}" if self._pulse else ""

    def beat(self) -> None:
        if self._pulse is not None:
            self._pulse.beat()


@cache
def own_pulse() -> OwnPulse:
    """Return the pulse of this process, which lives as long as the process."""
    return OwnPulse()


def _own_address() -> str:
    """Return the IP address at which other ranks reach this machine: the source address of a route to
    MASTER_ADDR.
    """
    meet = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with suppress(OSError):
        family, kind, protocol, _, there = socket.getaddrinfo(meet, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(there)
            return str(way.getsockname()[0])
    return _LOOPBACK


class PulseQuestions:
    """Queries other ranks without waiting for answers, which a later call collects."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}  # by family
        self._asked: dict[bytes, int] = {}

    def ask(self, rank: int, where: str) -> None:
        """Query ``rank``; ``where`` is its :attr:`OwnPulse.where`."""
        if not where:
            return
        address, port, token = where.split()
        nonce = next((key for key, other in self._asked.items() if other == rank), None)
        if nonce is None:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            self._asked[nonce] = rank
        with suppress(OSError):  # unreachable: there will be no answer
            self._socket_for(address).sendto(bytes.fromhex(token) + nonce, (address, int(port)))

    def answers(self) -> dict[int, float]:
        """Return the ranks that have answered since the last call, and for how many seconds no Python thread
        has run there.
        """
        found: dict[int, float] = {}
        for asked in self._sockets.values():
            while True:
                try:
                    said = asked.recv(_TOKEN_BYTES + _NONCE_BYTES)
                except BlockingIOError:
                    break
                except OSError:  # port unreachable: the process is gone
                    continue
                rank = self._asked.get(said[:_NONCE_BYTES])
                if rank is not None:
                    milliseconds = int.from_bytes(said[_NONCE_BYTES : 2 * _NONCE_BYTES], "little")
                    found[rank] = milliseconds / 1e3
        return found

    def close(self) -> None:
        for asked in self._sockets.values():
            asked.close()
        self._sockets.clear()

    def _socket_for(self, address: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if family not in self._sockets:
            self._sockets[family] = socket.socket(family, socket.SOCK_DGRAM)
            self._sockets[family].setblocking(False)
        return self._sockets[family]
