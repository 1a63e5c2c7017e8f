"""Passes on a GPU as CUDA graphs: recorded once for each shape, then sent with one call.

A pass is hundreds of kernels, and sending each of them takes the host microseconds: longer than a small model's kernels
run. A graph is a recording of them all. It reads and writes the addresses that it was recorded with, so inputs are
copied to where it reads, and the cache must stay where it is.

A recording that is wrong would give other tokens without an error. So none is believed: each is compared with the pass
that it was made from, for the inputs of the recording and for others. If one differs nothing is replayed any more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

STEP = 8
"""Passes of more than two tokens are filled up to multiples of it, so that there are few shapes to record. Reading the
weights takes the time, however few rows are multiplied with them."""
MOST = 256
"""Recordings, and shapes seen once, that are kept."""
Inputs = tuple[Tensor, ...]
Results = tuple[Tensor, ...]


def graph_size(tokens: int) -> int:
    """How many tokens a pass over so many is filled up to.

    >>> [graph_size(tokens) for tokens in (1, 2, 3, 8, 9)]
    [1, 2, 8, 8, 16]
    """
    return tokens if tokens <= 2 else -(-tokens // STEP) * STEP


class Recorder(Protocol):
    """Records what a function asks a device for."""

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """What does all of it again; whether it is done now too is not said."""


class CudaRecorder:
    """Records CUDA graphs, which share their memory.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # torch's own would be of the device that records first
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        now = torch.cuda.current_stream(self._device)
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        # `now` is set again at the end: where recording fails, torch stays on its stream.
        with torch.cuda.device(self._device), torch.cuda.stream(now), recording:
            run()
        return graph.replay


@dataclass(frozen=True, kw_only=True)
class _Recording:
    """A pass of one shape, the tensors that it reads, and those that it writes."""

    inputs: Inputs
    again: Callable[[], None]
    results: Results

    def replay(self, inputs: Inputs) -> Results:
        for ours, given in zip(self.inputs, inputs, strict=True):
            ours.copy_(given)
        self.again()
        return tuple(result.clone() for result in self.results)  # the next replay writes over them


class Replays:
    """Runs passes, and replays those whose shape has come before.

    Args:
        new_recorder: makes what records; a new one whenever all recordings have been dropped.
    """

    def __init__(self, new_recorder: Callable[[], Recorder]) -> None:
        self._new_recorder = new_recorder
        self._works = True
        self.forget()

    def forget(self) -> None:
        """Drops all recordings, so that the memory which they read and write can be given back."""
        self._recordings: dict[Hashable, _Recording | None] = {}
        self._record: Recorder | None = None
        self._results: list[Tensor] = []

    def __call__(
        self, run: Callable[..., Results], inputs: Inputs, others: Callable[[], Inputs], *, kind: Hashable = ()
    ) -> Results:
        """What a pass says to its inputs.

        Args:
            run: the pass: it reads its inputs and the cache, and writes the cache, which stays where it is until
                `forget`.
            inputs: tensors on the device.
            others: other inputs of the same shapes, for which nothing is written that is kept.
            kind: tells passes apart whose inputs have the same shapes.
        """
        if not self._works:
            return run(*inputs)
        key = kind, tuple(tensor.shape for tensor in inputs)
        has_come = key in self._recordings
        recording = self._recordings.pop(key, None)
        if recording is not None:
            results = recording.replay(inputs)
        else:
            if has_come:
                recording = self._compared(run, inputs, others)
            results = run(*inputs)  # the last to write the cache
        self._recordings[key] = recording
        if len(self._recordings) > MOST:
            del self._recordings[next(iter(self._recordings))]
        return results

    def _compared(self, run: Callable[..., Results], inputs: Inputs, others: Callable[[], Inputs]) -> _Recording | None:
        """A recording of a pass that does what the pass does; None, with a warning, if there is none."""
        try:
            self._record = self._record or self._new_recorder()
            ours = tuple(tensor.clone() for tensor in inputs)
            results = self._room_for(run(*inputs))
            again = self._record(partial(_write, results, run, ours))
            recording = _Recording(inputs=ours, again=again, results=results)
            if all(_are_same(recording.replay(given), run(*given)) for given in (inputs, others())):
                return recording
            reason = "a recording does not do what it recorded"
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        self.forget()
        self._works = False
        warnings.warn(f"decoding goes on without CUDA graphs: {reason}", stacklevel=2)
        return None

    def _room_for(self, results: Results) -> Results:
        """Tensors like some results, in memory that all recordings write theirs to: one piece for each place."""
        room = []
        for place, result in enumerate(results):
            if place == len(self._results):
                self._results.append(result.new_empty(0))
            if len(self._results[place]) < result.numel():
                self._results[place] = result.new_empty(result.numel())
            room.append(self._results[place][: result.numel()].view(result.shape))
        return tuple(room)


def _write(results: Results, run: Callable[..., Results], inputs: Inputs) -> None:
    for result, new in zip(results, run(*inputs), strict=True):
        result.copy_(new)


def replays_on(device: torch.device) -> Replays | None:
    """What replays passes on a device; None where nothing can be recorded."""
    return Replays(partial(CudaRecorder, device)) if device.type == "cuda" else None


def _are_same(replayed: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(_is_same(ours, theirs) for ours, theirs in zip(replayed, expected, strict=True))


def _is_same(replayed: Tensor, expected: Tensor) -> bool:
    """Whether the logits `[B, R, V]`, or states, of each token differ by roundings at most: half of the digits, in
    standard deviations."""
    if torch.equal(replayed, expected):
        return True
    most = torch.finfo(expected.dtype).eps ** 0.5
    # A few tokens at a time: of a large batch and vocabulary float64 would take gigabytes.
    for ours, theirs in zip(replayed.flatten(0, 1).split(16), expected.flatten(0, 1).split(16), strict=True):
        errors = (ours.double() - theirs.double()).square().mean(-1).sqrt()
        if not (errors < most * theirs.double().std(-1)).all():
            return False
    return True
