"""A drafter in another process: on other CPUs, on another device, or on another machine.

Only token ids cross, and once the requests: with the match rule a draft has no probabilities, and the noise that its
tokens are drawn with belongs to (request, position). What the drafter is told needs no answer, but for drafts, so the
target's side waits for nothing else.

The other side, [drafter_process.py](drafter_process.py), is lost if its process ends, or says nothing for too long:
then it is ended, and whoever decodes is told. It ends by itself when this side does.
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

WORKER = "import sys; sys.path.append(sys.argv[2]); from paradraft.decode.pearl.drafter_process import main; main()"
"""After all other places, so that nothing hides a module of Python's."""
LOADING_S = 1800.0
"""How long a drafter may take to load, downloads included."""
GRACE_S = 5.0
"""How long a process that was told to end may take for it, before it is killed."""
QUESTIONS = ("load", "propose", "passes")
"""What the other side answers."""
FRESH = ("load", "start")
"""What the other side does whatever has gone wrong before."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the other side is to load.

    Args:
        drafter: its name and settings.
        draft: its draft model.
        runtime: where and how it runs.
        target: whose text is guessed.
        versions: of what decides about tokens; both sides must have the same.
    """

    drafter: str
    draft: str | None
    runtime: Runtime
    target: TargetFacts
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Those that both sides must have: noise and sampling are computed on both."""
    return {name: version(name) for name in ("paradraft", "torch", "transformers")}


@dataclass(frozen=True, kw_only=True)
class Span:
    """When a side was at work, in seconds by `time.perf_counter`, which all processes of a machine share.

    Args:
        side: "target" or "draft".
        began_s: when it began.
        ended_s: when it was done.
        asked_s: when it was asked for.
    """

    side: str
    began_s: float
    ended_s: float
    asked_s: float


class DrafterProcess:
    """The other side, once it is started: it loads what `load` says.

    Args:
        placement: its CPUs and its device, and how long it may be silent.
        channel: to a process that runs already; None starts one on this machine.
    """

    def __init__(self, placement: Placement, channel: Channel | None = None) -> None:
        self.placement = placement
        self._process: subprocess.Popen[bytes] | None = None
        if channel is None:
            self._process, channel = _started(placement)
        channel.limit(placement.draft_timeout_s)
        self.channel = channel
        self._serial = self._question = 0
        self._keys = count()
        self._unused: list[int] = []
        """Keys of what the other side need not keep any more."""
        self._end = weakref.finalize(self, _end, channel, self._process, os.getpid())

    def load(self, drafter: str, target: TargetFacts, *, draft: str | None, runtime: Runtime) -> RemoteDrafter:
        """Has it load a drafter; see `paradraft.drafters.load_drafter`, also for the arguments.

        Raises:
            ValueError: it cannot be loaded; the process has ended.
            DrafterLostError: the process ended meanwhile.
        """
        return RemoteDrafter(
            self, Setup(drafter=drafter, draft=draft, runtime=runtime, target=target, versions=versions())
        )

    def close(self) -> None:
        """Ends the other side; nothing is left of it."""
        self._end()

    def tell(self, name: str, *content: Any) -> None:
        """Has the other side do something, without waiting for it.

        Raises:
            DrafterLostError: it is lost.
        """
        self._serial += name in FRESH
        self._question += name in QUESTIONS
        unused, self._unused[:] = tuple(self._unused), ()
        try:
            if unused:
                self.channel.send((self._serial, self._question, "forget", pickle.dumps((unused,))))
            # What cannot be read there is then an error of this message, and not of all that follow.
            self.channel.send((self._serial, self._question, name, pickle.dumps(content)))
        except BlockingIOError:
            raise self._silent(self.placement.draft_timeout_s) from None
        except OSError:
            raise self._lost() from None

    def keep(self) -> SavedThere:
        """A name for something that the other side is to keep, for as long as this object is kept here."""
        saved = SavedThere(next(self._keys))
        # An object may go at any time, in the middle of a message too, so this is not the time for one.
        weakref.finalize(saved, self._unused.append, saved.key)
        return saved

    def answer(self, timeout_s: float | None = None) -> Any:
        """What the other side answers; after an error it does nothing until the next of `FRESH`.

        Args:
            timeout_s: how long to wait; None for the placement's.

        Raises:
            DrafterLostError: it is lost, and has been ended; or it has failed.
            ValueError: it cannot do what it was told.
        """
        timeout_s = self.placement.draft_timeout_s if timeout_s is None else timeout_s
        serial = question = -1
        kind, content = "", None
        # What nobody has waited for may come first: an error, or the answer to a question that was interrupted.
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
            self._process.kill()  # it would not hear anything else
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
                code = self._process.wait(GRACE_S)  # its end of the channel goes a moment before it
        self.close()
        return DrafterLostError("the drafter's process has ended" + ("" if code is None else f", exit code {code}"))


def _started(placement: Placement) -> tuple[subprocess.Popen[bytes], Channel]:
    """A process of this machine, which imports its libraries while others load their models."""
    ours, theirs = socket.socketpair()
    with theirs, on_cpus(placement.draft_cpus):
        process = subprocess.Popen(
            # -P: the folder that the user is in is no place for modules.
            [sys.executable, "-P", "-c", WORKER, str(theirs.fileno()), str(Path(__file__).parents[3])],
            stdin=subprocess.PIPE,  # its end tells that this process has ended, however that came
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for this side, which then ends the other
        )
    return process, Channel(Connection(ours.detach()))


def _end(channel: Channel, process: subprocess.Popen[bytes] | None, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the process that has it
    with contextlib.suppress(OSError):
        channel.send((0, 0, "end", ()))
    channel.close()
    if process is None:
        return
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.terminate()  # it has nothing to save, and may not have begun to listen
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class RemoteDrafter(Drafter):
    """Stands for a drafter in another process.

    Args:
        process: that loads it.
        setup: what it is to load.
        device: of the target.

    Raises:
        ValueError: it cannot be loaded.
        DrafterLostError: the process ended while it loaded.
    """

    can_run_ahead = True

    def __init__(self, process: DrafterProcess, setup: Setup) -> None:
        self._process = process
        try:
            process.tell("load", setup)
            self.reserved_tokens, self.max_k, told = process.answer(LOADING_S)
        except BaseException:
            process.close()
            raise
        for message in told:
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

        Warns of processors that the other side does not have: then its drafts are made without them.
        """
        known = [_as_known_there(request) for request in requests]
        if known != list(requests):
            warnings.warn(
                "logits processors of this program's main module, without a name, or with what cannot be pickled, such "
                "as a grammar, are not known to the drafter's process, so fewer drafts are accepted: define them in a "
                "module that can be imported",
                stacklevel=2,
            )
        self._process.tell("join", known)

    def begin(self, lengths: Sequence[int], after: Draft | None) -> None:
        """Asks for a draft, which `take` waits for."""
        asked_s = time.perf_counter()
        self._process.tell("propose", list(lengths), None if after is None else to_lists(after.tokens), asked_s)

    def take(self) -> Draft:
        """Waits for the draft that was asked for; `last_span` then says when it was made."""
        tokens, self.last_span = self._process.answer()
        return Draft.chain(from_lists(tokens, self._device))

    def rest(self) -> None:
        """See `DrafterThread`: the other side does one thing after the other."""

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """See `Drafter`."""
        self.begin(lengths, after)
        return self.take()

    def commit(self, new: Committed) -> None:
        """See `Drafter`."""
        self._process.tell("commit", to_lists(new.tokens))

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._process.tell("keep", rows.tolist())

    def save(self, row: int, most: int) -> SavedThere:
        """See `Drafter`; it stays where it is."""
        saved = self._process.keep()
        self._process.tell("save", row, most, saved.key)
        return saved

    def restore(self, row: int, saved: SavedThere, shared: int) -> None:
        """See `Drafter`."""
        self._process.tell("restore", row, saved.key, shared)

    def passes(self) -> int:
        """Decoding passes of the draft model since `start`."""
        self._process.tell("passes")
        return int(self._process.answer())


def _as_known_there(request: Request) -> Request:
    """A request without the processors that another process does not find by their names."""
    known = tuple(filter(_is_found_by_name, request.sampling.processors))
    if known == request.sampling.processors:
        return request
    return replace(request, sampling=replace(request.sampling, processors=known))


def _is_found_by_name(processor: Any) -> bool:
    owner = processor if hasattr(processor, "__qualname__") else type(processor)
    try:
        pickle.dumps(processor)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return owner.__module__ != "__main__"


class SavedThere:
    """What the other side keeps of a row, as long as this is kept here.

    Args:
        key: its name there.
    """

    def __init__(self, key: int) -> None:
        self.key = key
