"""How two processes talk: over a pipe on one machine, over a network on two.

What is sent is pickled, so both sides must trust each other: one has started the other, or `torchrun` both, and whoever
connects must know a random key.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
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
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, message: Any) -> None:
        """Sends a message without waiting for an answer.

        Raises:
            BlockingIOError: the other side does not read.
            OSError: the other side is gone.
        """
        self._connection.send(message)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Waits for a message.

        Raises:
            TimeoutError: none came in this many seconds; None waits for ever.
            OSError: the other side is gone, or EOFError.
        """
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv()

    def close(self) -> None:
        """Lets the other side know that nothing follows."""
        self._connection.close()


def launched() -> int:
    """How many processes `torchrun` has started, this one among them; 0 if it was not started so."""
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        return 0
    return int(os.environ["WORLD_SIZE"])


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
    try:
        store, rank, _ = next(rendezvous("env://"))
        if rank == 0:
            key = secrets.token_bytes(32)
            with Listener((LOCALHOST if address in (LOCALHOST, "localhost") else "", 0), authkey=key) as listener:
                store.set(MEETING, pickle.dumps((listener.address[1], key)))
                return rank, Channel(listener.accept())
        port, key = pickle.loads(store.get(MEETING))
        return rank, Channel(Client((address, port), authkey=key))
    except (RuntimeError, OSError, AuthenticationError) as error:
        place = f"{address}:{os.environ.get('MASTER_PORT')}"
        raise ValueError(f"the two sides cannot meet at {place}: {' '.join(str(error).split())}") from None
