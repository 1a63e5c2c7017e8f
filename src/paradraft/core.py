"""The vocabulary of the library: what a drafter proposes, what a target answers, what is decided.

Shape letters: B rows of a batch, N nodes of a draft, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ABSENT = -1
"""Token id and node index that mean "nothing here". Never 0, which is a real token."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the logits.

    The same seed gives the same text with and without speculation, whatever the drafter or K.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p, in (0, 1].
        seed: names the random numbers of this request.

    Raises:
        ValueError: a value is out of range.

    >>> Sampling(temperature=0.8, top_p=0.95, seed=7).is_greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not 1e-6 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: use 0 (greedy) or a number of at least 0.000001")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: use 0 (keep all tokens) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: use a number above 0 and at most 1 (keep all tokens)")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: use a whole number that fits in 64 bits")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompts of one batch and how to answer them.

    Args:
        tokens: `[B, T]` token ids, ragged rows filled with `ABSENT` on the right.
        sampling: how tokens are chosen.
    """

    tokens: Tensor
    sampling: Sampling

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2 and bool((self.tokens[:, 0] != ABSENT).all()), "a prompt has at least one token"

    @property
    def lengths(self) -> Tensor:
        """`[B]` number of tokens of each prompt."""
        return (self.tokens != ABSENT).sum(1)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A token tree: proposed continuations of the committed tokens.

    Parents come before their children, and siblings hold different tokens. A chain is the tree
    with parents -1, 0, 1, …

    Args:
        tokens: `[B, N]` token ids; `ABSENT` where a row has fewer nodes.
        parents: `[B, N]` index of each node's parent; -1 is the last committed token.
        probs: `[B, N, V]` the distribution each token was really drawn from, or None if the tokens
            were chosen deterministically.

    >>> Draft.chain(torch.tensor([[5, 6, 7]])).parents.tolist()
    [[-1, 0, 1]]
    """

    tokens: Tensor
    parents: Tensor
    probs: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2 and self.tokens.shape == self.parents.shape
        assert self.probs is None or self.probs.shape[:2] == self.tokens.shape

    @classmethod
    def chain(cls, tokens: Tensor, probs: Tensor | None = None) -> Draft:
        """A draft without branches from `[B, N]` token ids."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
        return cls(tokens=tokens, parents=parents, probs=probs)

    @classmethod
    def empty(cls, batch_size: int, device: torch.device) -> Draft:
        """A draft of no tokens: the round decodes plainly."""
        return cls.chain(torch.empty(batch_size, 0, dtype=torch.long, device=device))


@dataclass(frozen=True, kw_only=True)
class TargetOut:
    """What one pass of the target returned.

    Args:
        logits: `[B, N + 1, V]`; row 0 follows the last committed token, row n + 1 follows node n.
        hidden: for each layer that a drafter asked for, `[B, N + 1, D]` hidden states.
    """

    logits: Tensor
    hidden: dict[int, Tensor]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which drafted tokens became text, and the token the target adds after them.

    Args:
        path: `[B, N]` indices of the accepted nodes from the root down, then `ABSENT`.
        accepted: `[B]` how many there are.
        tokens: `[B, N + 1]` the committed tokens: the accepted ones, the next token, then `ABSENT`.
    """

    path: Tensor
    accepted: Tensor
    tokens: Tensor

    def __post_init__(self) -> None:
        assert self.path.ndim == 2 and self.accepted.shape == self.path.shape[:1]
        assert self.tokens.shape == (self.path.shape[0], self.path.shape[1] + 1)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One round as a reader of the stream sees it; every list has one entry per row.

    Args:
        tokens: the new tokens of each row, cut at its stop.
        accepted: how many of them, counted from the first, were drafted.
        drafted: how many tokens were proposed.
        finished: whether the row has ended.
    """

    tokens: list[list[int]]
    accepted: list[int]
    drafted: list[int]
    finished: list[bool]


class Drafter(Protocol):
    """Proposes drafts; its private state is a function of the committed tokens."""

    needs_hidden: tuple[int, ...]
    """Layers of the target whose hidden states `commit` wants; () for none."""
    can_run_ahead: bool
    """Whether it can propose before the verdict on its last draft (PEARL)."""

    def start(self, prompt: Prompt, out: TargetOut | None) -> None:
        """Forgets everything and takes in a new batch of prompts."""

    def propose(self, k: int, after: Draft | None = None) -> Draft:
        """Guesses at most `k` tokens deep what follows the committed tokens (or `after` them)."""

    def commit(self, verdict: Verdict, out: TargetOut) -> None:
        """Brings the drafter's own state back to the committed tokens."""
