from __future__ import annotations

import pytest
import torch

from paradraft.environment import describe_machine


def test_the_gpu_is_the_one_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the record of a machine with several GPUs, of which not the first did the work."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"the GPU called {device}")
    assert describe_machine("cuda:1")["gpu"] == "the GPU called cuda:1"
    assert describe_machine("cpu")["gpu"] is None
