"""The file of `paradraft train-judge`: a linear head that judges drafted tokens by the target's states."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from paradraft.files import write_output

FORMAT = "paradraft-judge-1"


@dataclass(frozen=True, kw_only=True)
class JudgeHead:
    """Logistic regression on the target's state after its last norm, at a drafted token.

    Args:
        weights: `[D]` float32.
        threshold: least probability of being harmless with which a token is accepted, in (0, 1).
        facts: names of target and draft, and what `paradraft.judge.fit` measured.
    """

    weights: Tensor
    bias: float
    threshold: float
    facts: dict[str, str] = field(default_factory=dict)

    def harmless(self, states: Tensor) -> Tensor:
        """The probabilities `[…]` that tokens with these states `[…, D]` change no answer."""
        return (states.float() @ self.weights.to(states.device) + self.bias).sigmoid()

    def write(self, file: Path) -> None:
        """Writes the file, atomically."""
        numbers = {"bias": repr(self.bias), "threshold": repr(self.threshold)}
        write_output(file, save({"weight": self.weights}, {"format": FORMAT, **numbers, **self.facts}))


def read_judge(file: Path) -> JudgeHead:
    """Reads a file of `JudgeHead.write`; raises ValueError if it is no such file."""
    try:
        with safe_open(file, "pt") as opened:
            facts = dict(opened.metadata() or {})
            if facts.pop("format", None) != FORMAT:
                raise ValueError
            numbers = {name: float(facts.pop(name)) for name in ("bias", "threshold")}
            head = JudgeHead(weights=opened.get_tensor("weight"), facts=facts, **numbers)
        if head.weights.ndim != 1 or head.weights.dtype != torch.float32 or not 0 < head.threshold < 1:
            raise ValueError
        if not (head.weights.isfinite().all() and abs(head.bias) < torch.inf):
            raise ValueError
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        missing = "does not exist" if isinstance(error, FileNotFoundError) else "is no judge"
        raise ValueError(f"head={str(file)!r} {missing}: name a file that paradraft train-judge has written") from None
    return head
