"""A drafter whose guesses are learnt: a table says which token follows which. Its training is `table_training.py`.

Copied to `src/paradraft/drafters/table.py` and `src/paradraft/train/drafters/table.py`, they are found by their name:
`paradraft train table RECIPE`, then `--drafter table --draft FOLDER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        draft: the folder that training wrote.
        longest: most tokens of a draft, at least 1.

    Raises:
        ValueError: `longest` is below 1.
    """

    draft: str
    longest: int = 16

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"longest={self.longest}: use at least 1")


class TableDrafter(Drafter):
    """Follows the table from the last committed token.

    Args:
        follower_V: `[V]` the likeliest token after each token.
        longest: most tokens of a draft.
    """

    def __init__(self, follower_V: Tensor, longest: int) -> None:
        self._follower_V = follower_V
        self._longest = longest

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """Forgets all rows."""
        self._last_B = torch.empty(0, dtype=torch.long, device=device)

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Remembers the last token of each prompt."""
        self._last_B = torch.cat([self._last_B, self._last(prompt)])

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """The same number of tokens in all rows; what a row did not ask for is cut off."""
        tokens = [self._last_B]
        for _ in range(min(max(lengths), self._longest)):
            tokens.append(self._follower_V[tokens[-1]])
        return Draft.chain(torch.stack(tokens, dim=1)[:, 1:])

    def commit(self, new: Committed) -> None:
        """Remembers the last committed token of each row."""
        self._last_B = self._last(new)

    def keep(self, rows: Tensor) -> None:
        """Forgets the rows that have left."""
        self._last_B = self._last_B[rows]

    def _last(self, new: Committed) -> Tensor:
        return torch.tensor([tokens[-1] for tokens in new.tokens], device=self._last_B.device)


def build(config: Config, target: Target, runtime: Runtime) -> TableDrafter:
    """Reads the table.

    Raises:
        ValueError: there is none, or it is about other tokens.
    """
    file = Path(config.draft, "model.safetensors")
    if not file.is_file():
        raise ValueError(f"draft {config.draft!r} holds no table: train one with `paradraft train table`")
    weights = load_file(file)
    if weights["lm_head.weight"].shape[0] < target.lm.vocab_size:
        raise ValueError(f"draft {config.draft!r} knows too few tokens: train it for this target")
    logits_VV = weights["embedding.weight"] @ weights["lm_head.weight"].T
    follower_V = logits_VV[:, : target.lm.vocab_size].argmax(-1)
    return TableDrafter(follower_V.to(runtime.device), config.longest)
