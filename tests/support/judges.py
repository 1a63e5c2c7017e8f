"""Heads of the rule `judge` that tests write."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from paradraft.formats.judge_head import JudgeHead

NEVER, ALWAYS = -60.0, 60.0


def written_judge(folder: Path, weights: Tensor | int, bias: float, *, threshold: float = 0.5) -> str:
    """The name of the rule with a new head; weights as a number are that many zeros."""
    weights = torch.zeros(weights) if isinstance(weights, int) else weights
    file = folder / f"judge-{len([*folder.glob('judge-*')])}.safetensors"
    JudgeHead(weights=weights, bias=bias, threshold=threshold).write(file)
    return f"judge:head={file}"


def with_settings(rule: str, folder: Path, size: int) -> str:
    """The rule with what it cannot do without: a judge that accepts nothing more than `match` does."""
    return written_judge(folder, size, NEVER) if rule == "judge" else rule
