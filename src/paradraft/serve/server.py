"""The process: where it listens, and how it ends."""

from __future__ import annotations

import os
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paradraft.serve.admission import Admission
from paradraft.serve.guard import is_loopback

LAST_S = 2
"""Seconds for what is left when time is up: telling clients of it."""


class Server(uvicorn.Server):
    """Ends when it is told to: it refuses what is new, and lets what is under way end. Told twice, it ends at once.

    Args:
        app: what it serves.
        admission: who is let in.
    """

    def __init__(self, app: FastAPI, admission: Admission) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http="h11",
                server_header=False,
                timeout_graceful_shutdown=LAST_S,
            )
        )
        self._admission = admission
        self._is_ending = False

    def end(self) -> None:
        """Tells it to end; any thread may."""
        self._is_ending = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What a signal does."""
        if self._is_ending:
            self.force_exit = self.should_exit = True
        self.end()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is over."""
        if self._is_ending and not self._admission.is_closing:
            self._admission.close()
        if self._admission.is_closing and self._admission.is_idle:
            self.should_exit = True
        return await super().on_tick(counter)


def key_of(variable: str | None, host: str) -> str | None:
    """The API key.

    Args:
        variable: of the environment that has it; None for no key.
        host: where the server listens.

    Raises:
        ValueError: there is none where one is wanted.
    """
    if variable is None:
        if is_loopback(host):
            return None
        raise ValueError(f"host {host!r} can be reached from other machines: name a key by --api-key-env too")
    key = os.environ.get(variable, "")
    if not key:
        raise ValueError(f"--api-key-env {variable}: the environment has no such variable, or it is empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"--api-key-env {variable}: the key may have letters, digits and signs of ASCII only")
    return key


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which listens when the server starts.

    Raises:
        ValueError: the address is in use, or is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--host {host}: {error.strerror}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; name another one") from None
    return made


def url_of(made: socket.socket) -> str:
    """Where a server is found."""
    host, port = made.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
