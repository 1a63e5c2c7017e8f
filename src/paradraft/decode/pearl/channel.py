"""How two processes talk: over a pipe on one machine, over a network on two.

What is sent is pickled, so both sides must trust each other: one has started the other, or `torchrun` both, and whoever
connects must know a random key.
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
    """Carries messages between two processes, on one machine or on two.

    Args:
        connection: its end.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def limit(self, seconds: float) -> None:
        """Lets nothing that is sent or received wait longer, once it has begun: the other side may be stopped."""
        limit = struct.pack("ll", int(seconds), max(int(seconds % 1 * 1e6), int(seconds < 1)))  # 0 would be no limit
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, message: Any) -> None:
        """Sends a message without waiting for an answer.

        Raises:
            BlockingIOError: the other side does not read.
            OSError: the other side is gone.
        """
        with _undisturbed():
            self._connection.send(message)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Waits for a message.

        Raises:
            TimeoutError: none came in this many seconds; None waits for ever.
            OSError: the other side is gone, or EOFError.
        """
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        with _undisturbed():
            return self._connection.recv()

    def close(self) -> None:
        """Lets the other side know that nothing follows."""
        self._connection.close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, Ctrl-C waits: half a message that is left would be the beginning of the next."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *given: noted.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            before(*noted[0])


def launched() -> int:
    """How many processes `torchrun` has started, this one among them; 0 if it was not started so."""
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        return 0
    return int(os.environ["WORLD_SIZE"])


_MET: list[bool] = []
"""Whether this process has met the other one."""


def _watched(connection: Connection) -> Connection:
    """A connection over a network that ends some time after the other machine has gone without a word."""
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                ours.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def met() -> tuple[int, Channel]:
    """Meets the other process that `torchrun` has started, on this machine or on another.

    They meet in the store of `torchrun` and talk over a connection of their own, which ends when one of them does: a
    message of gloo would be waited for without end.

    Returns:
        The rank of this one: 0 for the target's side, 1 for the drafter's; and the channel to the other.

    Raises:
        ValueError: the two cannot meet.
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
                return rank, Channel(_watched(listener.accept()))
        port, key = pickle.loads(store.get(MEETING))
        return rank, Channel(_watched(Client((address, port), authkey=key)))
    except (RuntimeError, OSError, AuthenticationError) as error:
        place = f"{address}:{os.environ.get('MASTER_PORT')}"
        raise ValueError(f"the two sides cannot meet at {place}: {' '.join(str(error).split())}") from None
