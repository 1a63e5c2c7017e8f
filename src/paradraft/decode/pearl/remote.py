"""A drafter in another process: on other CPUs, on another device, or on another machine.

Only token ids are transferred, and each request once: with the match rule a draft has no probabilities, and the noise
of its tokens depends only on (request, position). Only drafts need an answer, so the target's side waits for nothing
else.

The other side, [drafter_process.py](drafter_process.py), is lost if its process ends or does not answer in time: then
it is killed, and decoding raises `DrafterLostError`. It ends by itself when this side does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.decode.pearl.channel import Channel
from paradraft.errors import DrafterLostError
from paradraft.models.runtime import Runtime
from paradraft.models.target import TargetFacts
from paradraft.placement import Placement, on_cpus
from paradraft.ragged import from_lists, to_lists
from paradraft.traits import Traits

WORKER = "import sys; sys.path.append(sys.argv[2]); from paradraft.decode.pearl.drafter_process import main; main()"
"""The package's folder comes last in `sys.path`, so that it hides no module of Python's."""
LOADING_S = 1800.0
"""Timeout for loading a drafter, downloads included."""
GRACE_S = 5.0
"""Time between the request to end and the kill of a process."""
QUESTIONS = ("load", "propose", "passes")
"""Messages with an answer."""
FRESH = ("load", "start")
"""Messages that are executed even after an error."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The arguments of `load_drafter` for the other side, and library versions that must be the same on both sides."""

    drafter: str
    draft: str | None
    runtime: Runtime
    target: TargetFacts
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Library versions that both sides must share: noise and sampling are computed on both."""
    return {name: version(name) for name in ("paradraft", "torch", "transformers")}


@dataclass(frozen=True, kw_only=True)
class Span:
    """Start, end and request time of a side's work, by `time.perf_counter`, which all processes of a machine share."""

    side: str
    began_s: float
    ended_s: float
    asked_s: float


class DrafterProcess:
    """A running drafter process: that of `channel`, or a new one on this machine."""

    def __init__(self, placement: Placement, channel: Channel | None = None) -> None:
        self.placement = placement
        self._process: subprocess.Popen[bytes] | None = None
        if channel is None:
            self._process, channel = _start_process(placement)
        channel.limit(placement.draft_timeout_s)
        self.channel = channel
        self._serial = self._question = 0
        self._keys = count()
        self._unused: list[int] = []
        """Keys of saved rows that the other side may delete."""
        self._end = weakref.finalize(self, _end, channel, self._process, os.getpid())

    def load(self, drafter: str, target: TargetFacts, *, draft: str | None, runtime: Runtime) -> RemoteDrafter:
        """Loads a drafter in the process; see `paradraft.drafters.load_drafter`.

        Raises:
            ValueError: it cannot be loaded; the process has ended.
            DrafterLostError: the process ended meanwhile.
        """
        return RemoteDrafter(
            self, Setup(drafter=drafter, draft=draft, runtime=runtime, target=target, versions=versions())
        )

    def close(self) -> None:
        """Ends the process."""
        self._end()

    def tell(self, name: str, *content: Any) -> None:
        """Sends a message without waiting for its execution; raises `DrafterLostError` if the process is lost."""
        self._serial += name in FRESH
        self._question += name in QUESTIONS
        unused, self._unused[:] = tuple(self._unused), ()
        try:
            if unused:
                self.channel.send((self._serial, self._question, "forget", pickle.dumps((unused,))))
            # Pickled twice, so that content that cannot be read is an error of this message only.
            self.channel.send((self._serial, self._question, name, pickle.dumps(content)))
        except BlockingIOError:
            raise self._silent(self.placement.draft_timeout_s) from None
        except OSError:
            raise self._lost() from None

    def keep(self) -> SavedThere:
        """A key for a row saved on the other side, which deletes it after this object is garbage-collected."""
        saved = SavedThere(next(self._keys))
        # Garbage collection may happen in the middle of a message, so none is sent from there.
        weakref.finalize(saved, self._unused.append, saved.key)
        return saved

    def answer(self, timeout_s: float | None = None) -> Any:
        """Waits for an answer; after an error the other side ignores messages until the next of `FRESH`.

        Raises:
            DrafterLostError: the process is lost and was killed, or it has failed.
            ValueError: it refuses the message.
        """
        timeout_s = self.placement.draft_timeout_s if timeout_s is None else timeout_s
        serial = question = -1
        kind, content = "", None
        # Older messages may come first: an error, or the answer to a request that was interrupted.
        while serial != self._serial or (kind == "answer" and question != self._question):
            try:
                serial, question, kind, content = self.channel.receive(timeout_s)
            except (TimeoutError, BlockingIOError):
                raise self._silent(timeout_s) from None
            except (EOFError, OSError):
                raise self._lost() from None
        if kind == "mistake":
            raise ValueError(content)
        if kind == "failure":
            raise DrafterLostError(f"the drafter's process has failed: {content}")
        return content

    def _silent(self, timeout_s: float) -> DrafterLostError:
        if self._process is not None:
            self._process.kill()  # it does not read messages
        self.close()
        ended = "was given up: end it on its machine" if self._process is None else "was ended"
        return DrafterLostError(
            f"the drafter's process has said nothing for {timeout_s:g} s and {ended}; give it more time by "
            "draft_timeout_s, or draft in the target's process"
        )

    def _lost(self) -> DrafterLostError:
        if not self._end.alive:
            return DrafterLostError("the drafter's process was ended: load the models anew")
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(GRACE_S)  # its end of the channel closes a moment before it ends
        self.close()
        return DrafterLostError("the drafter's process has ended" + ("" if code is None else f", exit code {code}"))


def _start_process(placement: Placement) -> tuple[subprocess.Popen[bytes], Channel]:
    """Starts a process on this machine, which imports its libraries while the target loads."""
    ours, theirs = socket.socketpair()
    with theirs, on_cpus(placement.draft_cpus):
        process = subprocess.Popen(
            # -P: no modules from the current folder.
            [sys.executable, "-P", "-c", WORKER, str(theirs.fileno()), str(Path(__file__).parents[3])],
            stdin=subprocess.PIPE,  # closes when this process ends, for whatever reason
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C reaches only this side, which then ends the other
        )
    return process, Channel(Connection(ours.detach()))


def _end(channel: Channel, process: subprocess.Popen[bytes] | None, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner
    with contextlib.suppress(OSError):
        channel.send((0, 0, "end", ()))
    channel.close()
    if process is None:
        return
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.terminate()  # it has nothing to save, and may not read messages yet
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class RemoteDrafter(Drafter):
    """Proxy of a drafter in another process; see `DrafterProcess.load`."""

    traits = Traits(can_run_ahead=True)

    def __init__(self, process: DrafterProcess, setup: Setup) -> None:
        self._process = process
        try:
            process.tell("load", setup)
            self.reserved_tokens, self.max_k, messages = process.answer(LOADING_S)
        except BaseException:
            process.close()
            raise
        for message in messages:
            warnings.warn(message, stacklevel=3)
        self._device = torch.device("cpu")

    def close(self) -> None:
        """See `Drafter`: ends the process."""
        self._process.close()

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._device = device
        self._process.tell("start", drafting)

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """See `Drafter`; the prompts are in the requests.

        Warns about processors that cannot be sent: drafts are then made without them.
        """
        sendable = [_sendable(request) for request in requests]
        if sendable != list(requests):
            warnings.warn(
                "logits processors of this program's main module, without a name, or with what cannot be pickled, such "
                "as a grammar, are not known to the drafter's process, so fewer drafts are accepted: define them in a "
                "module that can be imported",
                stacklevel=2,
            )
        self._process.tell("join", sendable)

    def begin(self, lengths: Sequence[int], after: Draft | None) -> None:
        """Requests a draft, which `take` waits for."""
        asked_s = time.perf_counter()
        self._process.tell("propose", list(lengths), None if after is None else to_lists(after.tokens), asked_s)

    def take(self) -> Draft:
        """Waits for the requested draft and sets `last_span`."""
        tokens, self.last_span = self._process.answer()
        return Draft.chain(from_lists(tokens, self._device))

    def rest(self) -> None:
        """Does nothing: the other side executes messages in order."""

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """See `Drafter`."""
        self.begin(lengths, after)
        return self.take()

    def commit(self, new: Committed) -> None:
        """See `Drafter`."""
        self._process.tell("commit", new.tokens)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._process.tell("keep", rows.tolist())

    def save(self, row: int, most: int) -> SavedThere:
        """See `Drafter`; the state stays in the other process."""
        saved = self._process.keep()
        self._process.tell("save", row, most, saved.key)
        return saved

    def restore(self, row: int, saved: SavedThere, shared: int) -> None:
        """See `Drafter`."""
        self._process.tell("restore", row, saved.key, shared)

    def passes(self) -> int:
        """Number of decoding passes of the draft model since `start`."""
        self._process.tell("passes")
        return int(self._process.answer())


def _sendable(request: Request) -> Request:
    """The request without processors that another process cannot import."""
    importable = tuple(filter(_is_importable, request.sampling.processors))
    if importable == request.sampling.processors:
        return request
    return replace(request, sampling=replace(request.sampling, processors=importable))


def _is_importable(processor: Any) -> bool:
    owner = processor if hasattr(processor, "__qualname__") else type(processor)
    try:
        pickle.dumps(processor)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return owner.__module__ != "__main__"


class SavedThere:
    """Handle of a row saved on the other side, for as long as this object lives."""

    def __init__(self, key: int) -> None:
        self.key = key
