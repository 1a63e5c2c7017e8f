"""The vocabulary of the library: what a drafter proposes, what a target answers, what is decided.

Shape letters: B rows of a batch, N nodes of a draft, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT, Tree, parents_of_chains

INVALID = -2
"""Token id of a place where the logits are NaN or all -inf, so that no token can be chosen."""
RULES = ("match", "rejection")
"""The verification rules, `paradraft/verify/<name>.py`; both are lossless."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompts of one batch and how to answer them.

    Args:
        tokens: `[B, T]` token ids, ragged rows filled with `ABSENT` on the right.
        sampling: for each row how its tokens are chosen.
        rule: one of `RULES`. It decides how drafters draw: with the target's random numbers (match),
            or with their own, telling the distribution (rejection).
        tree: the shape of the drafts; None for chains.
        wants_confidence: whether drafts shall tell how sure the drafter is.
        eos_ids: tokens that end an answer.
        limits: for each row the most tokens of its answer; None for no limit.
        answered: for each row how many of the last tokens are part of its answer already, where one is taken up again.
    """

    tokens: Tensor
    sampling: tuple[Sampling, ...]
    rule: str = "match"
    tree: Tree | None = None
    wants_confidence: bool = False
    eos_ids: frozenset[int] = frozenset()
    limits: tuple[int, ...] | None = None
    answered: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2 and bool((self.tokens[:, 0] != ABSENT).all()), "a prompt has at least one token"
        assert len(self.sampling) == len(self.tokens) and self.rule in RULES
        assert all(part is None or len(part) == len(self.tokens) for part in (self.limits, self.answered))

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
            were chosen deterministically. A later sibling's is without the tokens of earlier ones.
        confidence: `[B, N]` the drafter's largest probability at each node's place, if it knows.

    >>> Draft.chain(torch.tensor([[5, 6, 7]])).parents.tolist()
    [[-1, 0, 1]]
    """

    tokens: Tensor
    parents: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2 and self.tokens.shape == self.parents.shape
        assert self.probs is None or self.probs.shape[:2] == self.tokens.shape
        assert self.confidence is None or self.confidence.shape == self.tokens.shape

    @classmethod
    def chain(cls, tokens: Tensor, probs: Tensor | None = None, confidence: Tensor | None = None) -> Draft:
        """A draft without branches from `[B, N]` token ids."""
        parents = parents_of_chains(*tokens.shape, tokens.device)
        return cls(tokens=tokens, parents=parents, probs=probs, confidence=confidence)

    def where(self, is_kept_BN: Tensor) -> Draft:
        """The draft without some nodes `[B, N]`; whose parent goes must go too."""
        tokens = self.tokens.masked_fill(~is_kept_BN, ABSENT)
        is_used = (tokens != ABSENT).any(0).nonzero()
        width = int(is_used.max()) + 1 if len(is_used) else 0
        return Draft(
            tokens=tokens[:, :width],
            parents=self.parents[:, :width],
            probs=None if self.probs is None else self.probs[:, :width],
            confidence=None if self.confidence is None else self.confidence[:, :width],
        )

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

    @classmethod
    def of(cls, draft: Draft, path: Tensor, next_token: Tensor) -> Verdict:
        """The verdict that accepts a path `[B, N]` and goes on with `[B]` tokens."""
        accepted = (path != ABSENT).sum(1)
        taken = torch.where(path == ABSENT, ABSENT, draft.tokens.gather(1, path.clamp(min=0)))
        tokens = torch.nn.functional.pad(taken, (0, 1), value=ABSENT).scatter(1, accepted[:, None], next_token[:, None])
        return cls(path=path, accepted=accepted, tokens=tokens)

    def __post_init__(self) -> None:
        assert self.path.ndim == 2 and self.accepted.shape == self.path.shape[:1]
        assert self.tokens.shape == (self.path.shape[0], self.path.shape[1] + 1)


@dataclass(frozen=True, kw_only=True)
class RoundOutput:
    """One round as a reader of the stream sees it; every list has one entry per row still in the batch.

    Args:
        rows: which prompts these are.
        tokens: the new tokens of each row, cut at its stop.
        accepted: how many of them, counted from the first, were drafted.
        drafted: how deep the draft was; for a chain, how many tokens.
        nodes: how many tokens the draft had, all nodes of a tree.
        finished: whether the row has ended.
    """

    rows: list[int]
    tokens: list[list[int]]
    accepted: list[int]
    drafted: list[int]
    nodes: list[int]
    finished: list[bool]


class Drafter(Protocol):
    """Proposes drafts; its private state is a function of the committed tokens."""

    needs_hidden: tuple[int, ...]
    """Layers of the target whose hidden states `commit` wants; () for none."""
    can_run_ahead: bool
    """Whether it can propose before the verdict on its last draft (PEARL)."""
    can_branch: bool
    """Whether its drafts take the shape of `Prompt.tree`; False for chains only."""
    can_branch_aside: bool
    """Whether side branches may have branches, or only the path of the best tokens has any."""

    def start(self, prompt: Prompt, out: TargetOut | None) -> None:
        """Forgets everything and takes in a new batch of prompts."""

    def propose(self, k: int, after: Draft | None = None) -> Draft:
        """Guesses at most `k` tokens deep what follows the committed tokens (or `after` them)."""

    def commit(self, verdict: Verdict, out: TargetOut) -> None:
        """Brings the drafter's own state back to the committed tokens."""

    def keep_rows(self, rows: Tensor) -> None:
        """Forgets all rows of the batch but `rows`, `[b]` indices in rising order; the others have ended."""
