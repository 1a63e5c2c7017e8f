"""Message channel between two processes: a pipe on one machine, a network connection on two.

Messages are pickled, so both sides must trust each other: one has started the other, or `torchrun` has started both,
and a connection requires a random key.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from types import FrameType
from typing import Any

from torch import distributed
from torch.distributed.rendezvous import rendezvous

LOCALHOST, MEETING = "127.0.0.1", "paradraft"


class Channel:
    """One end of a message channel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def limit(self, seconds: float) -> None:
        """Sets the timeout of a message in transfer: the other side may be stopped in the middle of one."""
        limit = struct.pack("ll", int(seconds), max(int(seconds % 1 * 1e6), int(seconds < 1)))  # 0 means no timeout
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, message: Any) -> None:
        """Sends a message without waiting for an answer.

        Raises:
            BlockingIOError: the other side does not read.
            OSError: the other side is gone.
        """
        with _sigint_deferred():
            self._connection.send(message)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Waits for a message.

        Raises:
            TimeoutError: none came in this many seconds; None waits for ever.
            OSError: the other side is gone, or EOFError.
        """
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        with _sigint_deferred():
            return self._connection.recv()

    def close(self) -> None:
        """Closes the channel, which the other side notices."""
        self._connection.close()


@contextmanager
def _sigint_deferred() -> Iterator[None]:
    """Defers Ctrl-C: the rest of an interrupted message would be read as the beginning of the next."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arguments: noted.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            before(*noted[0])


def launched() -> int:
    """Number of processes that `torchrun` has started; 0 without `torchrun`."""
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        return 0
    return int(os.environ["WORLD_SIZE"])


_MET: list[bool] = []
"""Whether this process has connected to the other one."""


def _with_keepalive(connection: Connection) -> Connection:
    """Enables TCP keepalive, so that the connection ends when the other machine disappears."""
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                ours.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def met() -> tuple[int, Channel]:
    """Connects to the other process that `torchrun` has started, on this machine or on another.

    They exchange the address through the store of `torchrun` and use a separate connection, which ends when one of them
    does: a gloo receive would wait without end.

    Returns:
        The rank of this process, 0 for the target's side, 1 for the drafter's; and the channel to the other.

    Raises:
        ValueError: they cannot connect.
    """
    address = os.environ.get("MASTER_ADDR", LOCALHOST)
    if _MET:
        raise ValueError("the two processes that torchrun has started serve one engine, which they had: load one only")
    _MET.append(True)
    try:
        store, rank, _ = next(rendezvous("env://"))
        if rank == 0:
            key = secrets.token_bytes(32)
            with Listener((LOCALHOST if address in (LOCALHOST, "localhost") else "", 0), authkey=key) as listener:
                store.set(MEETING, pickle.dumps((listener.address[1], key)))
                return rank, Channel(_with_keepalive(listener.accept()))
        port, key = pickle.loads(store.get(MEETING))
        return rank, Channel(_with_keepalive(Client((address, port), authkey=key)))
    except (RuntimeError, OSError, AuthenticationError) as error:
        endpoint = f"{address}:{os.environ.get('MASTER_PORT')}"
        raise ValueError(f"the two sides cannot meet at {endpoint}: {' '.join(str(error).split())}") from None
