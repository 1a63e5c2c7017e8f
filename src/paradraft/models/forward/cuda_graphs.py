"""CUDA graphs: each shape of a pass is recorded once, then launched with one call.

A pass is hundreds of kernels, and launching each of them takes the host microseconds: longer than a small model's
kernels run. A graph is a recording of all launches. It reads and writes the addresses of its recording, so inputs are
copied there, and the cache must not move.

A wrong graph would silently change tokens, so each graph is checked against the pass it recorded, for the inputs of the
recording and for others. If one differs, no graph is replayed any more.
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
"""Passes of more than two tokens are padded to multiples of it, so that few shapes are recorded. Padding costs little,
because a pass is bound by reading the weights."""
MOST = 256
"""Most recordings, including shapes seen once and not yet recorded; the oldest are dropped."""
Inputs = tuple[Tensor, ...]
Results = tuple[Tensor, ...]


def graph_size(tokens: int) -> int:
    """The size to which a pass over some tokens is padded.

    >>> [graph_size(tokens) for tokens in (1, 2, 3, 8, 9)]
    [1, 2, 8, 8, 16]
    """
    return tokens if tokens <= 2 else -(-tokens // STEP) * STEP


class Recorder(Protocol):
    """Records the kernels that a function launches."""

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """Returns the replay. The kernels may or may not run during the recording."""


class CudaRecorder:
    """Records CUDA graphs, which share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # torch's default belongs to the device that records first
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        now = torch.cuda.current_stream(self._device)
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        # Sets `now` again at the end, because torch stays on the stream of a recording that fails.
        with torch.cuda.device(self._device), torch.cuda.stream(now), recording:
            run()
        return graph.replay


@dataclass(frozen=True, kw_only=True)
class _Recording:
    """A recorded pass of one shape, with the tensors that it reads and writes."""

    inputs: Inputs
    again: Callable[[], None]
    results: Results

    def replay(self, inputs: Inputs) -> Results:
        for recorded, new in zip(self.inputs, inputs, strict=True):
            recorded.copy_(new)
        self.again()
        return tuple(result.clone() for result in self.results)  # the next replay writes over them


class Replays:
    """Runs passes, and replays those whose shape has occurred before.

    `new_recorder` is called again after all recordings have been dropped.
    """

    def __init__(self, new_recorder: Callable[[], Recorder]) -> None:
        self._new_recorder = new_recorder
        self._works = True
        self.forget()

    def forget(self) -> None:
        """Drops all recordings, so that the memory which they read and write can be freed."""
        self._recordings: dict[Hashable, _Recording | None] = {}
        self._record: Recorder | None = None
        self._results: list[Tensor] = []

    def __call__(
        self, run: Callable[..., Results], inputs: Inputs, others: Callable[[], Inputs], *, kind: Hashable = ()
    ) -> Results:
        """Runs or replays a pass.

        Args:
            run: the pass: it reads its inputs and the cache, and writes the cache, which must not move until `forget`.
            inputs: tensors on the device.
            others: other inputs of the same shapes, which overwrite no cached token.
            kind: distinguishes passes whose inputs have the same shapes.
        """
        if not self._works:
            return run(*inputs)
        key = kind, tuple(tensor.shape for tensor in inputs)
        is_repeated = key in self._recordings
        recording = self._recordings.pop(key, None)
        if recording is not None:
            results = recording.replay(inputs)
        else:
            if is_repeated:
                recording = self._compared(run, inputs, others)
            results = run(*inputs)  # the last to write the cache
        self._recordings[key] = recording
        if len(self._recordings) > MOST:
            del self._recordings[next(iter(self._recordings))]
        return results

    def _compared(self, run: Callable[..., Results], inputs: Inputs, others: Callable[[], Inputs]) -> _Recording | None:
        """Records a pass and checks the recording; None, with a warning, if it fails."""
        try:
            self._record = self._record or self._new_recorder()
            recorded = tuple(tensor.clone() for tensor in inputs)
            results = self._buffers_for(run(*inputs))
            again = self._record(partial(_write, results, run, recorded))
            recording = _Recording(inputs=recorded, again=again, results=results)
            if all(_are_same(recording.replay(tensors), run(*tensors)) for tensors in (inputs, others())):
                return recording
            reason = "a recording does not do what it recorded"
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        self.forget()
        self._works = False
        warnings.warn(f"decoding goes on without CUDA graphs: {reason}", stacklevel=2)
        return None

    def _buffers_for(self, results: Results) -> Results:
        """Tensors for results, in buffers that all recordings share: one buffer for each index of a result."""
        buffers = []
        for index, result in enumerate(results):
            if index == len(self._results):
                self._results.append(result.new_empty(0))
            if len(self._results[index]) < result.numel():
                self._results[index] = result.new_empty(result.numel())
            buffers.append(self._results[index][: result.numel()].view(result.shape))
        return tuple(buffers)


def _write(results: Results, run: Callable[..., Results], inputs: Inputs) -> None:
    for result, new in zip(results, run(*inputs), strict=True):
        result.copy_(new)


def replays_on(device: torch.device) -> Replays | None:
    """`Replays` on a GPU; None on other devices."""
    return Replays(partial(CudaRecorder, device)) if device.type == "cuda" else None


def _are_same(replayed: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(_is_same(ours, theirs) for ours, theirs in zip(replayed, expected, strict=True))


def _is_same(replayed: Tensor, expected: Tensor) -> bool:
    """Whether the logits `[B, R, V]`, or states, of each token differ by rounding at most: half of the digits, in
    standard deviations."""
    if torch.equal(replayed, expected):
        return True
    most = torch.finfo(expected.dtype).eps ** 0.5
    # A few tokens at a time: for a large batch and vocabulary float64 would take gigabytes.
    for ours, theirs in zip(replayed.flatten(0, 1).split(16), expected.flatten(0, 1).split(16), strict=True):
        errors = (ours.double() - theirs.double()).square().mean(-1).sqrt()
        if not (errors < most * theirs.double().std(-1)).all():
            return False
    return True
