"""What a GPU does with recorded passes, on a CPU: a replay reads and writes the tensors that were recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from paradraft.models import causal_lm, compilation, replay

Again = tuple[Callable[[], None], Tensor]


class Recorder:
    """Replays by calling what was recorded, with the same tensors."""

    recorded = 0

    def __call__(self, run: Callable[[], Tensor]) -> Again:
        type(self).recorded += 1
        result = run()
        result.fill_(torch.nan)  # a GPU does nothing while it records
        return partial(self._again, run, result), result

    def _again(self, run: Callable[[], Tensor], result: Tensor) -> None:
        result.copy_(run())


def replay_everything(monkeypatch: pytest.MonkeyPatch, recorder: type[Recorder] = Recorder) -> None:
    """Makes compiled passes replayed ones of the model's own code, without C++ and compiler."""
    monkeypatch.setattr(recorder, "recorded", 0)
    monkeypatch.setattr(causal_lm, "can_serve", lambda _: False)
    monkeypatch.setattr(compilation, "compiled", lambda function, _: function)
    monkeypatch.setattr(replay, "replays_on", lambda _: replay.Replays(recorder))
