"""The vocabulary of the library: `Request`, `Draft`, `TargetOut`, `Verdict`, `Committed` and `Drafter`.

Shape letters: B rows of a batch, N nodes of a draft, M committed tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from paradraft.likeliest import Likeliest
from paradraft.parents import parents_of_chains
from paradraft.probes import Probes
from paradraft.ragged import padded, upload
from paradraft.sampling_params import GREEDY, Draws, Sampling
from paradraft.traits import Serving, Traits
from paradraft.tree import ABSENT, Tree
from paradraft.worth import Worth

INVALID = -2
"""Token id where the logits are NaN or all -inf, so that no token can be chosen."""
NO_LIMIT = 2**31 - 1
"""`max_new_tokens` that no answer reaches."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the settings of its answer.

    Args:
        tokens: of the prompt, at least one.
        max_new_tokens: most tokens of the answer, at least 1.
        eos_ids: tokens that end the answer.
        answered: number of trailing `tokens` that already belong to the answer (a resumed request).
        k: most tokens drafted for it per round, if fewer than for others; 0 drafts none.
        logprobs: number of likeliest tokens returned, with their logprobs, for each token of the answer; None returns
            no logprobs at all.
    """

    id: int = 0
    tokens: list[int]
    sampling: Sampling = GREEDY
    max_new_tokens: int = NO_LIMIT
    eos_ids: frozenset[int] = frozenset()
    answered: int = 0
    k: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        assert self.tokens, "a prompt has at least one token"
        assert 0 <= self.answered < len(self.tokens)
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: ask for at least 1")


class RequestError(Exception):
    """An exception that concerns only some requests, by id, such as one raised by their processors."""

    def __init__(self, requests: Sequence[int], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__} for requests {list(requests)}: {cause}")
        self.requests = requests
        self.cause = cause


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """Settings that all drafts of a batch share.

    Args:
        rule: name of the verification rule, `paradraft/verify/<name>.py`.
        draws: how drafters draw for it: with the target's noise; with separate random numbers, returning the
            distribution; or the likeliest tokens.
        tree: the shape of the drafts; None for chains.
        wants_confidence: whether drafts contain the drafter's confidence.
    """

    rule: str = "match"
    draws: Draws = "noise"
    tree: Tree | None = None
    wants_confidence: bool = False


CHAINS = Drafting()
"""Drafts without branches for the match rule."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A token tree: proposed continuations of the committed tokens.

    Parents come before their children, and siblings hold different tokens. A chain is the tree with parents
    -1, 0, 1, …

    Args:
        tokens: `[B, N]` token ids; `ABSENT` where a row has fewer nodes.
        parents: `[B, N]` index of each node's parent; -1 is the last committed token.
        probs: `[B, N, V]` the distribution that each token was drawn from, or None if tokens were chosen
            deterministically. That of a later sibling excludes the tokens of earlier ones.
        confidence: `[B, N]` the drafter's largest probability at each node, if known.
        values: of each row and node, the estimated probability that the target accepts it and all above it, never above
            that of a node before it; the drafter's class `estimates` them, or None.
        parts: of each row and node, the part of a union that gave it its value; None for drafters that are no unions.
        probes: prompt tokens that are read in the same pass; None without any.

    >>> Draft.chain(torch.tensor([[5, 6, 7]])).parents.tolist()
    [[-1, 0, 1]]
    """

    tokens: Tensor
    parents: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None
    values: list[list[float]] | None = None
    parts: list[list[int]] | None = None
    probes: Probes | None = None

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2 and self.tokens.shape == self.parents.shape
        assert self.probs is None or self.probs.shape[:2] == self.tokens.shape
        assert self.values is None or (
            len(self.values) == len(self.tokens) and self.probs is None and self.probes is None
        )
        assert self.confidence is None or self.confidence.shape == self.tokens.shape

    @classmethod
    def chain(cls, tokens: Tensor, probs: Tensor | None = None, confidence: Tensor | None = None) -> Draft:
        """A draft without branches from `[B, N]` token ids."""
        parents = parents_of_chains(*tokens.shape, tokens.device)
        return cls(tokens=tokens, parents=parents, probs=probs, confidence=confidence)

    @classmethod
    def of_lists(
        cls,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
        device: torch.device | None = None,
        *,
        confidence: Tensor | None = None,
        values: list[list[float]] | None = None,
        parts: list[list[int]] | None = None,
    ) -> Draft:
        """A draft from the tokens of each row, whose lengths may differ, and their parents; None for chains.

        >>> draft = Draft.of_lists([[5, 6], [7]], [[-1, 0], [-1]])
        >>> draft.tokens.tolist(), draft.parents.tolist(), draft.lists[0]
        ([[5, 6], [7, -1]], [[-1, 0], [-1, 0]], [[5, 6], [7, -1]])
        """
        filled = padded(tokens)
        B, N = len(filled), max(map(len, filled), default=0)
        if parents is None or all(parent == node - 1 for row in parents for node, parent in enumerate(row)):
            above, parents_BN = [list(range(-1, N - 1))] * B, parents_of_chains(B, N, device)  # their passes are faster
        else:
            above = padded(parents)
            parents_BN = upload(above, device)
        tokens_BN = upload(filled, device).view(B, N)
        draft = cls(tokens=tokens_BN, parents=parents_BN, confidence=confidence, values=values, parts=parts)
        vars(draft)["lists"] = filled, above  # so that they need not be read back
        return draft

    @cached_property
    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents of each row, from one transfer."""
        tokens, parents = torch.stack([self.tokens, self.parents]).tolist()
        return tokens, parents

    def where(self, is_kept_BN: Tensor) -> Draft:
        """Keeps only some nodes `[B, N]`, and the probes after them; children of a removed node must be removed too.

        The values are not kept.
        """
        tokens = self.tokens.masked_fill(~is_kept_BN, ABSENT)
        is_used = (tokens != ABSENT).any(0).nonzero()
        width = int(is_used.max()) + 1 if len(is_used) else 0
        probes = self.probes
        if probes is not None:
            is_known_BM = torch.nn.functional.pad(tokens != ABSENT, (1, 0), value=True)  # the root's is the first
            probes = probes.without(~is_known_BM.gather(1, probes.nodes + 1))
        return Draft(
            tokens=tokens[:, :width],
            parents=self.parents[:, :width],
            probs=None if self.probs is None else self.probs[:, :width],
            confidence=None if self.confidence is None else self.confidence[:, :width],
            probes=probes,
        )

    def first(self, counts: Sequence[int]) -> Draft:
        """Keeps only the first nodes of each row, of a draft without `probs` and `probes`; `parts` is not kept."""
        assert self.probs is None and self.probes is None
        if not any(counts):
            return Draft.empty(len(counts), self.tokens.device)
        tokens, parents = ([row[:count] for row, count in zip(rows, counts, strict=True)] for rows in self.lists)
        values = self.values and [row[:count] for row, count in zip(self.values, counts, strict=True)]
        confidence = None if self.confidence is None else self.confidence[:, : max(counts)]
        return Draft.of_lists(tokens, parents, self.tokens.device, confidence=confidence, values=values)

    @classmethod
    @lru_cache(maxsize=256)
    def empty(cls, batch_size: int, device: torch.device) -> Draft:
        """A draft without tokens: plain decoding; read-only: all callers share it."""
        nothing: list[list[int]] = [[] for _ in range(batch_size)]
        return cls.of_lists(nothing, device=device, values=[[] for _ in nothing])


@dataclass(frozen=True, kw_only=True)
class TargetOut:
    """The output of one target pass.

    Args:
        logits: `[B, N + 1, V]`; row 0 follows the last committed token, row n + 1 follows node n.
        hidden: `[B, N + 1, D]` hidden states by layer, for the drafter's `hidden_layers`.
        probes: those of the draft, with their states; None without any.
        likeliest: the likeliest tokens at each place, if the drafter learns from them.
    """

    logits: Tensor
    hidden: dict[int, Tensor]
    probes: Probes | None = None
    likeliest: Likeliest | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The accepted tokens of a draft, and the token that the target adds after them.

    Every list has an entry per row. A few ids are handled as lists: one operation on such a small tensor takes longer.

    Args:
        paths: the accepted nodes, from the root down.
        tokens: the committed tokens: the accepted ones, then the recovered or bonus token.
        drawn: the tokens that the target chose after the last committed token and after each node of the draft,
            `ABSENT` after an absent node; None if the rule does not draw them all.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
    drawn: list[list[int]] | None = None

    @classmethod
    def of(cls, draft: Draft, paths: list[list[int]], next_tokens: Sequence[int]) -> Verdict:
        """The verdict that accepts a path of each row and adds its recovered or bonus token."""
        rows = zip(draft.lists[0], paths, next_tokens, strict=True)
        return cls(paths=paths, tokens=[[*(guesses[node] for node in path), last] for guesses, path, last in rows])

    def __post_init__(self) -> None:
        assert all(len(path) < len(tokens) for path, tokens in zip(self.paths, self.tokens, strict=True))


@dataclass(frozen=True, kw_only=True)
class Committed:
    """Newly committed tokens of a prompt or a round.

    Args:
        tokens: of each row, in order; M is the length of the longest.
        hidden: `[B, M, D]` by layer: the target's state from which each token was predicted, that of the token before
            it. Zeros for the first token of a prompt.
        drawn: see `Verdict`; None for prompts too.
        probes: `Probes.after` the last accepted node: they predict the tokens after `tokens`; None for prompts and for
            drafts without probes.
        likeliest: that of the pass; None for prompts, and where no draft will be asked for soon.
    """

    tokens: list[list[int]]
    hidden: dict[int, Tensor] = field(default_factory=dict)
    drawn: list[list[int]] | None = None
    probes: tuple[Tensor, Tensor] | None = None
    likeliest: Likeliest | None = None

    def __post_init__(self) -> None:
        shape = (len(self.tokens), max(map(len, self.tokens), default=0))
        assert all(state.shape[:2] == shape for state in self.hidden.values())

    def last_hidden(self, layer: int) -> Tensor:
        """`[B, D]` the state from which the last token of each row was predicted."""
        states_BMD = self.hidden[layer]
        last_B = upload([len(tokens) - 1 for tokens in self.tokens], states_BMD.device)
        return states_BMD[torch.arange(len(last_B), device=last_B.device), last_B]


class Drafter:
    """Proposes drafts for the rows of a batch.

    State must depend on committed tokens only, unless its traits say that it `depends_on_rounds`. A drafter overrides
    `propose`, and the methods that its state needs.
    """

    traits: Traits = Traits()
    """What is known of it before it is built."""
    serving: Serving = Serving()
    """How other engines use its checkpoints."""
    hidden_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states `join` receives for the whole prompt but its last token, and `commit`
    for each round, numbered as in `paradraft.models.forward.Forward`: -1 is the last one after its norm."""
    likeliest: int = 0
    """Number of likeliest tokens at each place of a pass that `commit` receives, at most the vocabulary's size; none
    early in a long pause (`Worth.pause`)."""
    tree: Tree | None = None
    """With `branching = "own"`, the size of its trees: K is their depth, and no other tree can be requested. Its
    `Config` has a property `tree` with the same value, as the width of passes is fixed before a drafter is built."""
    max_k: int | None = None
    """Largest depth that it can draft, such as the number of its heads; None for any."""
    reserved_tokens: tuple[int, ...] = ()
    """Tokens, such as a mask, that no answer may contain."""
    worth: Worth = Worth()
    """That of drafts in the next round, which is set before it."""
    models: tuple[Any, ...] = ()
    """Its draft models, each a `paradraft.models.causal_lm.CausalLM`; not the target."""

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """Resets: drops all rows."""

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Adds rows after the others; `prompt` has their tokens and the target's hidden states."""

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Drafts the tokens after the committed ones.

        Args:
            lengths: largest depth of each row's draft; 0 for no draft. Deeper nodes are cut off.
            after: a draft that is not verified yet, after which to draft, for drafters that can run ahead.
        """
        raise NotImplementedError

    def reads(self, prompt: int) -> int:
        """Number of tokens that it reads of a prompt of `prompt` tokens."""
        return prompt

    def catch_up(self, rows: Sequence[int], most: int) -> dict[int, int]:
        """Reads at most `most` tokens of those of `rows` whose model has more to read; these draft later. Returns them
        with the number of their unread tokens."""
        return {}

    def commit(self, new: Committed) -> None:
        """Adds the committed tokens of a round."""

    def keep(self, rows: Tensor) -> None:
        """Drops and reorders rows: `[b]` the old index of each row."""

    def save(self, row: int, most: int) -> Any:
        """The state of a row that leaves, for its first `most` tokens; see `restore`."""

    def restore(self, row: int, saved: Any, shared: int) -> None:
        """Reuses the saved state of another row in one that just joined; their common prefix has `shared` tokens."""

    def close(self) -> None:
        """Releases other processes, and ends its changes of the target; the drafter cannot be used afterwards."""
