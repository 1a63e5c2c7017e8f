"""The drafter's side of [remote.py](remote.py): a process that loads a drafter and drafts on request.

It ends with the target's side: by a message, when the channel closes, or when its standard input does, which the system
closes however the other process has ended.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.decode.pearl.channel import Channel
from paradraft.decode.pearl.remote import FRESH, Setup, Span, versions
from paradraft.drafters import load_drafter
from paradraft.models.forward.cpu.threads import use_one_torch_thread
from paradraft.ragged import from_lists, to_lists


class DraftServer:
    """Executes the messages of the target's side; each public method is a message."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._drafter = Drafter()
        self.saved: dict[int, Any] = {}
        """Saved rows, by the keys of the other side."""
        self._serial = self._question = 0

    def serve(self) -> None:
        """Runs until the other side ends."""
        has_failed = False
        while True:
            try:
                self._serial, self._question, name, content = self._channel.receive()
            except (EOFError, OSError):
                return
            if name == "end":
                return
            has_failed = has_failed and name not in FRESH
            if has_failed and name != "forget":
                continue
            try:
                getattr(self, name)(*pickle.loads(content))
            except Exception as error:
                has_failed = True
                message = " ".join(str(error).split())
                is_mistake = isinstance(error, ValueError)
                self._send(*(("mistake", message) if is_mistake else ("failure", f"{type(error).__name__}: {message}")))

    def load(self, setup: Setup) -> None:
        """Loads the drafter; answers with its attributes and warnings."""
        if (mine := versions()) != setup.versions:
            raise ValueError(
                f"the target's side has {_listed(setup.versions)}, the drafter's {_listed(mine)}: install the same"
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            drafter = load_drafter(setup.drafter, setup.target, draft=setup.draft, runtime=setup.runtime)
        if all(lm.is_native for lm in drafter.models):
            use_one_torch_thread()
        self._drafter, self._device = drafter, next((lm.device for lm in drafter.models), torch.device("cpu"))
        messages = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
        self._answer((drafter.reserved_tokens, drafter.max_k, messages))

    def start(self, drafting: Drafting) -> None:
        """See `Drafter`."""
        self._drafter.start(drafting, self._device)

    def join(self, requests: list[Request]) -> None:
        """See `Drafter`; the prompts are in the requests."""
        self._drafter.join(requests, Committed(tokens=[request.tokens for request in requests]))

    def propose(self, lengths: list[int], after: list[list[int]] | None, asked_s: float) -> None:
        """See `Drafter`; answers with the tokens of each row, and the time span of the work."""
        began_s = time.perf_counter()
        draft = self._drafter.propose(lengths, None if after is None else Draft.chain(from_lists(after, self._device)))
        tokens = to_lists(draft.tokens)
        self._answer((tokens, Span(side="draft", began_s=began_s, ended_s=time.perf_counter(), asked_s=asked_s)))

    def commit(self, tokens: list[list[int]]) -> None:
        """See `Drafter`."""
        self._drafter.commit(Committed(tokens=tokens))

    def keep(self, rows: list[int]) -> None:
        """See `Drafter`."""
        self._drafter.keep(torch.tensor(rows, dtype=torch.long))

    def save(self, row: int, most: int, key: int) -> None:
        """See `Drafter`; `key` is chosen by the other side."""
        self.saved[key] = self._drafter.save(row, most)

    def restore(self, row: int, key: int, shared: int) -> None:
        """See `Drafter`."""
        self._drafter.restore(row, self.saved[key], shared)

    def forget(self, keys: tuple[int, ...]) -> None:
        """Deletes saved rows."""
        for key in keys:
            self.saved.pop(key, None)

    def passes(self) -> None:
        """Answers with the number of passes since `start`, without those that compute only keys and values."""
        counts = [count for lm in self._drafter.models for shape, count in lm.passes.items() if shape.logits]
        self._answer(sum(counts))

    def _answer(self, content: Any) -> None:
        self._send("answer", content)

    def _send(self, kind: str, content: Any) -> None:
        with suppress(OSError):  # the other side is gone: no message will follow
            self._channel.send((self._serial, self._question, kind, content))


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _end_with_the_other_side() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serves the parent process, through the file descriptor in `sys.argv`."""
    threading.Thread(target=_end_with_the_other_side, daemon=True).start()
    DraftServer(Channel(Connection(int(sys.argv[1])))).serve()
    os._exit(0)  # the thread that reads would abort the interpreter's own end
