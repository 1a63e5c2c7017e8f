"""HTTP connections: uvicorn's protocol, with a cap on their number and a time limit for headers."""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 10.0
"""Seconds from the first byte of a request, or from the connection, to the end of its headers."""
MOST = 1024
"""Most connections, where the process may open as many files."""
OTHER_FILES = 128
"""Files that are no connections: of the models, and those accepted in one turn of the event loop."""
BACKLOG = 64
"""Connections that wait to be accepted: Python accepts as many in one turn."""
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
SILENT = logging.getLogger("paradraft.serve.connection")
"""For uvicorn's warnings, one for each malformed request, which `Connections` counts."""
SILENT.setLevel(logging.ERROR)


def most_connections() -> int:
    """`MOST`, or fewer where the process may open fewer files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if files == resource.RLIM_INFINITY else max(min(MOST, files - OTHER_FILES), 1)


@dataclass(kw_only=True)
class Connections:
    """The limit of a server's connections, and counts of what was refused."""

    most: int
    refused: int = 0
    malformed: int = 0


class Connection(H11Protocol):
    """A connection of a client.

    Args:
        connections: those of its server.
        settings: of uvicorn.
    """

    def __init__(self, connections: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self.logger = SILENT
        self._all = connections
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Refuses connections above the cap."""
        super().connection_made(transport)
        if len(self.connections) > self._all.most:
            self._all.refused += 1
            transport.write(BUSY)
            transport.close()
            return
        self._timer = self.loop.call_later(HEADERS_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Takes part of a request."""
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._timer = self.loop.call_later(HEADERS_S, self.transport.close)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the time limit."""
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        """Answers a malformed request."""
        self._all.malformed += 1
        super().send_400_response(msg)
