"""Counts and times of one decoded batch.

Acceptance length is emitted tokens per target pass: the target's own token of each round counts, tokens cut at a stop
do not. Prefill and the drafter's first pass are part of the times. On a GPU, times are taken from CUDA events, so that
timing does not synchronize.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class RoundOutput:
    """The result of a round; every list has one entry per row of the batch.

    Args:
        tokens: new tokens, cut at the end of the answer; none for a request that had ended before.
        accepted: number of leading `tokens` that were drafted.
        drafted: depth of the draft (its length if it is a chain).
        nodes: number of drafted tokens, all nodes of a tree.
        paths: the accepted nodes of the draft.
    """

    requests: list[int]
    tokens: list[list[int]]
    accepted: list[int]
    drafted: list[int]
    nodes: list[int]
    paths: list[list[int]]
    finished: list[bool]


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """Seconds of one round.

    Args:
        draft_s: everything the drafter does before the target's pass.
        verify_s: the target's pass and the verdict.
    """

    draft_s: float
    verify_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        """The whole round."""
        return self.draft_s + self.verify_s + self.other_s


class Marks(Protocol):
    """Time marks on a host or a GPU."""

    def mark(self) -> Any:
        """A mark after all work submitted so far."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks; waits until the later one is reached."""


class HostMarks:
    """Time marks of the host clock."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The time between two marks."""
        return end - start


class GpuMarks:
    """Time marks as CUDA events: a mark is reached when the GPU has done all earlier work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """A mark after all work submitted to this GPU."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The time between two marks; waits for the later one."""
        end.synchronize()
        return start.elapsed_time(end) / 1000.0


def marks_on(device: torch.device) -> Marks:
    """Time marks for a device."""
    return GpuMarks(device) if device.type == "cuda" else HostMarks()


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts and times of decoding; times in seconds.

    Args:
        tokens: emitted tokens.
        rounds: target passes after prefill that gave a row tokens, summed over the requests.
        nodes: drafted tokens, side branches included.
        drafted: by position in the draft, rounds whose draft was that deep.
        accepted: by position in the draft, accepted tokens that were emitted.
        draft_s: all work of the drafter before the target's pass, its prefill included.
        verify_s: target passes and verification.
    """

    tokens: int
    rounds: int
    nodes: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    prefill_s: float
    draft_s: float
    verify_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        """Time from the prompt to the last token."""
        return self.prefill_s + self.draft_s + self.verify_s + self.other_s

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per target pass."""
        return self.tokens / max(self.rounds, 1)

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """By position, the acceptance rate over the rounds whose draft was that deep."""
        return tuple(kept / made for kept, made in zip(self.accepted, self.drafted, strict=True) if made)


def added(parts: Sequence[Stats]) -> Stats:
    """The sum over several batches."""

    def by_position(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(map(sum, zip_longest(*rows, fillvalue=0)))

    return Stats(
        tokens=sum(part.tokens for part in parts),
        rounds=sum(part.rounds for part in parts),
        nodes=sum(part.nodes for part in parts),
        drafted=by_position([part.drafted for part in parts]),
        accepted=by_position([part.accepted for part in parts]),
        prefill_s=sum(part.prefill_s for part in parts),
        draft_s=sum(part.draft_s for part in parts),
        verify_s=sum(part.verify_s for part in parts),
        other_s=sum(part.other_s for part in parts),
    )


@dataclass
class _Counts:
    """Counts of one request; `drafted` and `accepted` are histograms of rounds by number of tokens."""

    tokens: int = 0
    rounds: int = 0
    nodes: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, other: _Counts) -> None:
        self.tokens += other.tokens
        self.rounds += other.rounds
        self.nodes += other.nodes
        self.drafted += other.drafted
        self.accepted += other.accepted


class Clock:
    """Takes the times and counts the tokens of one batch.

    Each `lap` books the time since the previous one under a name: "prefill", "draft", "verify" or "other". The time
    that the reader of a stream takes between two rounds is skipped.

    There is no GPU synchronization after "draft" and "other", so that the target's pass is queued while the drafter's
    still runs: their times are known after the next lap that synchronizes.
    """

    WAITING = ("prefill", "verify")
    """Laps at whose end the GPU is idle: the host has read the last result."""

    def __init__(self, marks: Marks | None = None) -> None:
        self._marks = marks or HostMarks()
        self._times_s = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "other": 0.0}
        self._counts: dict[int, _Counts] = defaultdict(_Counts)
        self._ended = _Counts()
        self._before: dict[int, dict[str, float]] = {}
        self._open: list[tuple[str, Any, Any]] = []
        self._last = self._marks.mark()
        self.last_s: dict[str, float] = {}
        """Known time of the last lap of each name, summed over consecutive laps."""

    @classmethod
    def on(cls, device: torch.device) -> Clock:
        """A clock for the work of a device."""
        return cls(marks_on(device))

    def lap(self, name: str) -> None:
        """Books the time since the last lap."""
        start, self._last = self._last, self._marks.mark()
        self._open.append((name, start, self._last))
        if name in self.WAITING:
            self._settle()

    def _settle(self) -> None:
        took_s: dict[str, float] = defaultdict(float)
        for name, start, end in reversed(self._open):  # the first `seconds` waits, so the others are over
            took_s[name] += self._marks.seconds(start, end)
        for name, seconds in took_s.items():
            self.last_s[name] = seconds
            self._times_s[name] += seconds
        self._open = []

    def skip(self) -> None:
        """Ignores the time since the last lap."""
        self._last = self._marks.mark()

    def join(self, requests: Iterable[int]) -> None:
        """Starts the times of requests."""
        self._settle()
        for request in requests:
            self._before.setdefault(request, dict(self._times_s))

    def count(self, step: RoundOutput) -> None:
        """Adds one round."""
        for row, request in enumerate(step.requests):
            counts = self._counts[request]
            counts.rounds += bool(step.tokens[row])
            counts.tokens += len(step.tokens[row])
            counts.nodes += step.nodes[row]
            counts.drafted[step.drafted[row]] += 1
            counts.accepted[step.accepted[row]] += 1

    @property
    def stats(self) -> Stats:
        """Counts and times so far, summed over the requests."""
        return self._stats([self._ended, *self._counts.values()], {})

    def end(self, request: int) -> Stats:
        """`stats_of` a finished request; afterwards the clock keeps its counts only in the sum."""
        stats = self.stats_of(request)
        self._before.pop(request, None)
        self._ended.add(self._counts.pop(request, _Counts()))
        return stats

    def stats_of(self, request: int) -> Stats:
        """The counts of one request; the times are those of its whole batch since it joined."""
        return self._stats([self._counts[request]], self._before.get(request, {}))

    def _stats(self, counts: list[_Counts], before_s: Mapping[str, float]) -> Stats:
        self._settle()
        times_s = {f"{name}_s": time_s - before_s.get(name, 0.0) for name, time_s in self._times_s.items()}
        drafted = sum((c.drafted for c in counts), Counter[int]())
        accepted = sum((c.accepted for c in counts), Counter[int]())
        return Stats(
            tokens=sum(c.tokens for c in counts),
            rounds=sum(c.rounds for c in counts),
            nodes=sum(c.nodes for c in counts),
            drafted=_by_position(drafted, max(drafted, default=0)),
            accepted=_by_position(accepted, max(drafted, default=0)),
            **times_s,
        )


def _by_position(rounds_by_length: Counter[int], positions: int) -> tuple[int, ...]:
    """Number of rounds that reached each position, from a histogram of rounds by number of tokens.

    >>> _by_position(Counter({0: 5, 2: 1, 3: 4}), 3)
    (5, 5, 4)
    """
    return tuple(
        sum(rounds for length, rounds in rounds_by_length.items() if length > position) for position in range(positions)
    )
