"""Prompts that a target reads in pieces, in separate passes or along with the tokens of a round.

A pass over one token of each row takes about as long as one over several, because it waits for the weights. So a piece
that is read along costs less time than the same piece in a separate pass.

Shape letters: B rows that are decoded, P prompts in prefill, N tokens, M tokens of a prompt, R wanted logits, D hidden
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paradraft.core import Committed
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import ForwardOut
from paradraft.parents import parents_of_chains
from paradraft.ragged import from_lists
from paradraft.tree import ABSENT


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """Tokens, length of the cached prefix, and states `[T, D]` of each piece by layer."""

    tokens: list[int]
    known: int
    pieces: list[dict[int, Tensor]] = field(default_factory=list)


class PromptPieces:
    """The prompts in prefill of a target; their rows follow those that are decoded.

    Args:
        lm: of the target; its cache has the rows.
        hidden_layers: whose states of the prompts are kept.
    """

    def __init__(self, lm: CausalLM, hidden_layers: Sequence[int] = ()) -> None:
        self._lm, self._hidden_layers = lm, hidden_layers
        self._prompts: list[_Prompt] = []

    @property
    def unread(self) -> list[int]:
        """Tokens that are left to read of each prompt: the last is not, because it is the root of the first round."""
        lengths = self._lm.cache.lengths[self._lm.cache.decoding :]
        return [len(prompt.tokens) - 1 - length for prompt, length in zip(self._prompts, lengths, strict=True)]

    def begin(self, prompts: Sequence[list[int]], known: Sequence[int]) -> None:
        """Adds prompts, whose rows the cache has already with `known` tokens."""
        self._prompts += [_Prompt(tokens=tokens, known=length) for tokens, length in zip(prompts, known, strict=True)]

    def read(self, counts: Sequence[int]) -> None:
        """Reads the next `counts[i]` tokens of each prompt in a separate pass."""
        rest = [[*piece, 0] if piece else [] for piece in self._next(counts)]  # prefill leaves the last one
        read = self._lm.prefill([[]] * self._lm.cache.decoding + rest, self._hidden_layers)
        self._keep(counts, read.hidden)

    def forward(
        self, counts: Sequence[int], tokens_BN: Tensor, parents_BN: Tensor, rows_BR: Tensor, layers: Sequence[int] = ()
    ) -> ForwardOut:
        """`CausalLM.forward`, which reads the next `counts[i]` tokens of each prompt too, and keeps these.

        Where a pass computes absent tokens too, the pieces are read in a separate pass before.
        """
        if not self._lm.is_ragged:
            self.read(counts)
            return self._lm.forward(tokens_BN, parents_BN, rows_BR, layers)
        pieces = self._next(counts)
        width = max(tokens_BN.shape[1], *map(len, pieces))
        pieces_PN = _widened(from_lists(pieces, tokens_BN.device), width)
        out = self._lm.forward(
            torch.cat([_widened(tokens_BN, width), pieces_PN]),
            torch.cat([_widened(parents_BN, width), parents_of_chains(*pieces_PN.shape, tokens_BN.device)]),
            torch.cat([rows_BR, rows_BR.new_full((len(pieces), rows_BR.shape[1]), ABSENT)]),
            layers,
        )
        B, N = tokens_BN.shape
        self._lm.cache.advance([*[0] * B, *counts])
        self._keep(counts, out.hidden)
        return ForwardOut(logits=out.logits[:B], hidden={layer: states[:B, :N] for layer, states in out.hidden.items()})

    def _next(self, counts: Sequence[int]) -> list[list[int]]:
        lengths = self._lm.cache.lengths[self._lm.cache.decoding :]
        rows = zip(self._prompts, lengths, counts, strict=True)
        return [prompt.tokens[first : first + count] for prompt, first, count in rows]

    def _keep(self, counts: Sequence[int], hidden: dict[int, Tensor]) -> None:
        """Keeps the states of pieces, whose rows are the last."""
        for row, (prompt, count) in enumerate(zip(self._prompts, counts, strict=True)):
            at = row - len(self._prompts)
            prompt.pieces.append({layer: hidden[layer][at, :count] for layer in self._hidden_layers})

    def take(self, rows: Sequence[int]) -> Committed:
        """Removes prompts by index and returns their tokens and states; their rows follow those that are decoded."""
        taken = [self._prompts[row] for row in rows]
        self.drop(rows)
        most = max(len(prompt.tokens) for prompt in taken)
        hidden = {
            layer: torch.stack([_after([piece[layer] for piece in each.pieces], each.known, most) for each in taken])
            for layer in self._hidden_layers
        }
        return Committed(tokens=[prompt.tokens for prompt in taken], hidden=hidden)

    def drop(self, rows: Iterable[int]) -> None:
        """Removes prompts by index."""
        gone = set(rows)
        self._prompts = [prompt for row, prompt in enumerate(self._prompts) if row not in gone]


def _widened(tokens_BN: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens_BN, (0, width - tokens_BN.shape[1]), value=ABSENT)


def _after(pieces: Sequence[Tensor], known: int, tokens: int) -> Tensor:
    """For each of a row's tokens the state `[M, D]` of the token before it, from which it was predicted.

    It is 0 for the first token of a row, and for those before the first state.

    Args:
        pieces: states `[T, D]` of the tokens that were read, in order.
        known: tokens before these.
        tokens: M.

    >>> _after([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])], 0, 4)[:, 0].tolist()
    [0.0, 1.0, 2.0, 3.0]
    >>> _after([torch.tensor([[5.0]])], 2, 4)[:, 0].tolist()
    [0.0, 0.0, 0.0, 5.0]
    """
    states_TD = torch.cat(list(pieces))
    return torch.nn.functional.pad(states_TD, (0, 0, known + 1, tokens - known - 1 - len(states_TD)))
