"""The vocabulary of the library: what is asked, what a drafter proposes, what a target answers, what is decided.

Shape letters: B rows of a batch, N nodes of a draft, M committed tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from paradraft import ragged
from paradraft.parents import parents_of_chains
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.tree import ABSENT, Tree

INVALID = -2
"""Token id of a place where the logits are NaN or all -inf, so that no token can be chosen."""
NO_LIMIT = 2**31 - 1
"""More tokens than any answer has."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and how it is answered.

    Args:
        id: names it in rounds and statistics.
        tokens: of the prompt, at least one.
        sampling: how the tokens of its answer are chosen.
        max_new_tokens: most tokens of its answer, at least 1.
        eos_ids: tokens that end its answer.
        answered: how many of `tokens`, the last ones, belong to the answer already: a request that is resumed.
        k: most tokens drafted for it per round, if fewer than for others; 0 drafts none.
        logprobs: how many of the likeliest tokens are told for each of its own, with their probabilities; None tells
            none, and no probabilities either.
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
    """Something that belongs to some requests alone, such as their processors, raised an exception.

    Args:
        requests: their ids.
        cause: the exception.
    """

    def __init__(self, requests: Sequence[int], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__} for requests {list(requests)}: {cause}")
        self.requests = requests
        self.cause = cause


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What all drafts of a batch have in common.

    Args:
        rule: a verification rule, `paradraft/verify/<name>.py`. It decides how drafters draw: with the target's random
            numbers (match), or with their own, telling the distribution (rejection).
        tree: the shape of the drafts; None for chains.
        wants_confidence: whether drafts tell how sure the drafter is.
    """

    rule: str = "match"
    tree: Tree | None = None
    wants_confidence: bool = False


CHAINS = Drafting()
"""Drafts without branches for the match rule."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Prompt tokens, which the target reads in the pass of a draft and which can never become text.

    They stand in chains, each after a node of the draft. What the target makes of a chain is a guess of what comes
    after that node.

    Args:
        nodes: `[B, P]` the node that each one's chain follows; -1 is the last committed token.
        before: `[B, P]` the index of the one before it in its chain, which is smaller than its own; -1 for the first.
        tokens: `[B, P]` ids from `CausalLM.add_embeddings`; `ABSENT` where a row has fewer.
        states: `[B, P, D]` the target's states of them after the final norm; None before the pass.
    """

    nodes: Tensor
    before: Tensor
    tokens: Tensor
    states: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.nodes.ndim == 2 and self.nodes.shape == self.before.shape == self.tokens.shape
        assert self.states is None or self.states.shape[:2] == self.nodes.shape

    def without(self, is_gone_BP: Tensor) -> Probes:
        """The same without some, `[B, P]`; whose chain begins with one that goes must go too."""
        nodes, before, tokens = (
            each.masked_fill(is_gone_BP, ABSENT) for each in (self.nodes, self.before, self.tokens)
        )
        return Probes(nodes=nodes, before=before, tokens=tokens, states=self.states)

    def after(self, last_B: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `[B, Q]` and states `[B, Q, D]` of those after one node of each row, in their order; rows that have
        fewer are filled with `ABSENT`. Only once they were read.

        >>> probes = Probes(
        ...     nodes=torch.tensor([[-1, 4, 4]]), before=torch.tensor([[-1, -1, 1]]),
        ...     tokens=torch.tensor([[90, 90, 91]]), states=torch.tensor([[[0.5], [0.6], [0.7]]]),
        ... )
        >>> [found.flatten().tolist() for found in probes.after(torch.tensor([4]))]
        [[90, 91], [0.6000000238418579, 0.699999988079071]]
        """
        assert self.states is not None
        is_other_BP = (self.nodes != last_B[:, None]) | (self.tokens == ABSENT)
        most = int((~is_other_BP).sum(1).max())
        order_BQ = is_other_BP.long().argsort(dim=1, stable=True)[:, :most]
        tokens_BQ = self.tokens.gather(1, order_BQ).masked_fill(is_other_BP.gather(1, order_BQ), ABSENT)
        return tokens_BQ, self.states.gather(1, order_BQ[:, :, None].expand(-1, -1, self.states.shape[2]))


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
        probes: prompt tokens that are read with it; None without any.

    >>> Draft.chain(torch.tensor([[5, 6, 7]])).parents.tolist()
    [[-1, 0, 1]]
    """

    tokens: Tensor
    parents: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None
    probes: Probes | None = None

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
        """The draft without some nodes `[B, N]` and the probes after them; whose parent goes must go too."""
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
        probes: the draft's, with their states; None without any.
    """

    logits: Tensor
    hidden: dict[int, Tensor]
    probes: Probes | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which drafted tokens became text, and the token the target adds after them.

    Args:
        path: `[B, N]` indices of the accepted nodes from the root down, then `ABSENT`.
        accepted: `[B]` how many there are.
        tokens: `[B, N + 1]` the committed tokens: the accepted ones, the next token, then `ABSENT`.
        drawn: see `Committed`.
    """

    path: Tensor
    accepted: Tensor
    tokens: Tensor
    drawn: Tensor | None = None

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
class Committed:
    """The tokens that prompts or a round added to the committed text.

    Args:
        tokens: `[B, M]` in order, `ABSENT` on the right.
        hidden: for each layer that the drafter asked for, `[B, M, D]` the target's state from which each token was
            predicted: that of the token before it. Zeros for the first token of a prompt.
        drawn: `[B, N + 1]` the token that the target chose after the last committed token and after each node of the
            draft as it was verified, `ABSENT` after a node that it did not have; None for prompts and under the
            rejection rule.
        probes: what `Probes.after` says of the last accepted node: what comes after the last of `tokens`, and further
            on; None for prompts and where the draft had none.
    """

    tokens: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    drawn: Tensor | None = None
    probes: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2 and all(state.shape[:2] == self.tokens.shape for state in self.hidden.values())

    def last_tokens(self) -> Tensor:
        """`[B]` the last token of each row."""
        return self.tokens.gather(1, (self.tokens != ABSENT).sum(1, keepdim=True) - 1)[:, 0]

    def last_hidden(self, layer: int) -> Tensor:
        """`[B, D]` the state from which the last token of each row was predicted."""
        states_BMD = self.hidden[layer]
        last_B = (self.tokens != ABSENT).sum(1) - 1
        return states_BMD[torch.arange(len(last_B), device=last_B.device), last_B]


@dataclass(frozen=True, kw_only=True)
class RoundOutput:
    """What a round gave each request of the batch; every list has one entry per row.

    Args:
        requests: the ids of the requests.
        tokens: the new tokens of each, cut at its end; none for a request that had ended before.
        accepted: how many of them, counted from the first, were drafted.
        drafted: how deep the draft was; for a chain, how many tokens.
        nodes: how many tokens the draft had, all nodes of a tree.
        paths: which nodes of the draft were accepted; of a chain, the first ones.
        finished: whether the request has ended.
    """

    requests: list[int]
    tokens: list[list[int]]
    accepted: list[int]
    drafted: list[int]
    nodes: list[int]
    paths: list[list[int]]
    finished: list[bool]


class Drafter:
    """Proposes drafts for the rows of a batch; its own state is a function of their committed tokens, unless it
    `depends_on_rounds`.

    A drafter overrides `propose`, and what of the rest its state needs.
    """

    hidden_layers: tuple[int, ...] = ()
    """Layers of the target whose states `commit` wants, named as in `paradraft.models.forward.Forward`: -1 is the last
    one after its norm."""
    prompt_hidden_layers: tuple[int, ...] = ()
    """Those whose states `join` wants, of the whole prompt but its last token."""
    branching: Literal["chain", "spine", "tree", "own"] = "chain"
    """Drafts without branches, trees whose best path alone branches, any trees, or trees of a shape of its own."""
    tree: Tree | None = None
    """The size of trees of a shape of its own: K is their depth, and no other tree can be asked for. Its `Config` has a
    property `tree` that says the same, because passes are made wide enough before a drafter is built."""
    max_k: int | None = None
    """Most tokens deep that it can draft, such as the number of its heads; None for any number."""
    needs_drawn: bool = False
    """Whether it learns from `Committed.drawn`. Then it serves the match rule only, and `depends_on_rounds`."""
    depends_on_rounds: bool = False
    """Whether what it proposes depends on the rounds too in which the tokens were committed; but on nothing else."""
    can_run_ahead: bool = False
    """Whether it can propose before the verdict on its last draft (PEARL)."""
    drafts_one_by_one: bool = False
    """Whether each token of a draft takes a pass of its own, so that half of a draft takes half of the time."""
    reserved_tokens: tuple[int, ...] = ()
    """Tokens, such as a mask, that no answer may contain."""

    @property
    def models(self) -> tuple[Any, ...]:
        """The models of its own that it drafts with, each a `paradraft.models.causal_lm.CausalLM`; not its target."""
        return ()

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """Forgets all rows.

        Args:
            drafting: what the drafts are to be like.
            device: of the target's tensors.
        """

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Adds rows after the others.

        Args:
            requests: one for each new row.
            prompt: their tokens, as they are in `requests`, and the target's states.
        """

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Guesses what follows the committed tokens, or `after` them.

        Args:
            lengths: for each row, at most how many tokens deep; 0 wants no draft. What is deeper is cut off.
            after: a draft that is not verified yet, for drafters that can run ahead.
        """
        raise NotImplementedError

    def commit(self, new: Committed) -> None:
        """Takes in the tokens of a round, the rejected ones excluded."""

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but some, and orders these anew.

        Args:
            rows: `[b]` the index that each row had before.
        """

    def save(self, row: int, most: int) -> Any:
        """What is worth keeping of a row that leaves, of its first `most` tokens; see `restore`."""

    def restore(self, row: int, saved: Any, shared: int) -> None:
        """Begins a row that has just joined with what was saved of another.

        Args:
            row: the new one.
            saved: by `save`.
            shared: how many tokens the new row and the other have in common, from the first.
        """

    def close(self) -> None:
        """Lets go of what it has outside of this process; it drafts no more."""


class TextDrafter(Drafter):
    """A drafter that looks at the committed tokens alone."""

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self.device = device
        self.texts: list[list[int]] = []
        """The committed tokens of each row."""

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Remembers the prompts."""
        self.texts += [list(request.tokens) for request in requests]

    def commit(self, new: Committed) -> None:
        """Appends the committed tokens."""
        for text, tokens in zip(self.texts, ragged.to_lists(new.tokens), strict=True):
            text += tokens

    def keep(self, rows: Tensor) -> None:
        """Forgets the other rows."""
        self.texts = [self.texts[row] for row in rows.tolist()]
