"""What a GPU does with recorded passes, on a CPU: a replay reads and writes the tensors that were recorded.

A number that the host computes is computed again in such a replay, and would not be on a GPU: that only `make test-gpu`
shows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paradraft.models.forward import choice, compiled, cuda_graphs, eager


class Recorder:
    """Replays by calling what was recorded, with the same tensors; does nothing while it records."""

    recorded = 0

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        type(self).recorded += 1
        return lambda: self._again(run)

    def _again(self, run: Callable[[], object]) -> None:
        run()


def replay_everything(monkeypatch: pytest.MonkeyPatch, recorder: type[Recorder] = Recorder) -> None:
    """Makes all passes replayed ones of the model's own code, without C++ and compiler."""
    replay_compiled(monkeypatch, recorder)
    monkeypatch.setattr(compiled, "compile_pass", lambda function, _: function)


def replay_compiled(monkeypatch: pytest.MonkeyPatch, recorder: type[Recorder] = Recorder) -> None:
    """Makes eager and compiled passes replayed ones, without C++."""
    monkeypatch.setattr(recorder, "recorded", 0)
    monkeypatch.setattr(choice, "can_serve", lambda _: False)
    monkeypatch.setattr(eager, "replays_on", lambda _: cuda_graphs.Replays(recorder))
