"""The vocabulary of the library: what a drafter proposes, what a target answers, what is decided.

Shape letters: B rows of a batch, N nodes of a draft, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

ABSENT = -1
"""Token id and node index that mean "nothing here". Never 0, which is a real token."""
INVALID = -2
"""Token id of a place where the logits are NaN or all -inf, so that no token can be chosen."""

MOST_BIAS = 10_000.0
"""Largest bias or penalty: far beyond any logit, and far from what a float32 cannot hold."""
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""As in `transformers`: from `[M, T]` token ids and `[M, V]` logits of what follows them to new `[M, V]` logits."""


def whole_number(name: str, value: object) -> int:
    """A whole number that a user gave, of Python or numpy; True and 2.0 are none.

    Raises:
        ValueError: it is something else.

    >>> whole_number("seed", 7)
    7
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ValueError(f"{name}={one_line(value)}: use a whole number")


def real_number(name: str, value: object) -> float:
    """A number that a user gave, of Python or numpy; True and "0.7" are none.

    Raises:
        ValueError: it is something else.

    >>> real_number("temperature", 1)
    1.0
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise ValueError(f"{name}={one_line(value)}: use a number")


def one_line(value: object) -> str:
    """A value for a message: its beginning and its end, in one line.

    >>> one_line([[1.9, 2]]), one_line(torch.zeros(2))
    ('[[1.9, 2]]', 'tensor([0., 0.])')
    """
    return " ".join(reprlib.repr(value).split())


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the logits.

    The settings act in this order: logit bias, penalties, processors, temperature, top-k, top-p,
    min-p. With the match rule the same seed gives the same text with and without speculation.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p, in (0, 1].
        min_p: keep tokens at least this times as likely as the likeliest, in [0, 1].
        repetition_penalty: above 1 makes tokens of prompt and answer less likely (Keskar et al. 2019).
        presence_penalty: taken off the logit of a token that the answer contains.
        frequency_penalty: taken off the logit of a token for each time the answer contains it.
        logit_bias: token id to what is added to its logit; -inf forbids it.
        processors: a list of `LogitsProcessor`s, such as a `LogitsProcessorList` of `transformers`. Each is given
            every drafted position's own text; it must be a function of its two arguments. It is not asked about texts
            that go on after an end token or beyond the length limit, but it may be about what follows a stop string.
        seed: names the random numbers of this request.

    Raises:
        ValueError: a value is out of range or has the wrong type.

    >>> Sampling(temperature=0.8, top_p=0.95, seed=7).is_greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    processors: Sequence[LogitsProcessor] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        numbers = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in numbers:
            object.__setattr__(self, name, real_number(name, getattr(self, name)))
        if self.temperature != 0.0 and not 1e-6 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: use 0 (greedy) or a number of at least 0.000001")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: use 0 (keep all tokens) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: use a number above 0 and at most 1 (keep all tokens)")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p}: use a number from 0 (keep all tokens) to 1")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: use a number above 0; 1 is no penalty")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MOST_BIAS:
                raise ValueError(
                    f"{name}={getattr(self, name)}: use a number of at most {MOST_BIAS:g}; 0 is no penalty"
                )
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: use a whole number that fits in 64 bits")
        # As tuples, so that equal settings are equal and can be told apart quickly.
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "processors", _processors(self.processors))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of token id and bias, by id."""
        return tuple(dict(self.logit_bias).items())

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def reads_text(self) -> bool:
        """Whether the logits of a position are changed in view of the tokens before it."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.processors
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether tokens are the argmax of the model's own logits."""
        return self.is_greedy and not self.reads_text and not self.logit_bias


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, by id.

    Raises:
        ValueError: it is something else.
    """
    example = "use token ids and numbers, such as {50256: -100.0}"
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    kinds = (list, tuple)
    if not isinstance(pairs, kinds) or not all(isinstance(pair, kinds) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"logit_bias={one_line(given)}: {example}")
    biases: dict[int, float] = {}
    for key, value in pairs:
        try:
            token, bias = whole_number("token", key), real_number("bias", value)
        except ValueError:
            raise ValueError(f"logit_bias: {one_line(key)}: {one_line(value)}: {example}") from None
        if token < 0 or not (abs(bias) <= MOST_BIAS or bias == -math.inf):
            raise ValueError(
                f"logit_bias: {token}: {bias}: use a token id and a number of at most {MOST_BIAS:g}, or -inf"
            )
        if token in biases:
            raise ValueError(f"logit_bias: token {token} has two biases: give it one")
        biases[token] = bias
    return tuple(sorted(biases.items()))


def _processors(given: object) -> tuple[LogitsProcessor, ...]:
    """The functions of a list.

    Raises:
        ValueError: it is no list of functions.
    """
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"processors={one_line(given)}: use a list of functions, such as [processor]")
    for processor in given:
        if not callable(processor):
            raise ValueError(f"processors: {one_line(processor)} cannot be called: use a list of functions")
    return tuple(given)


GREEDY = Sampling()
MOST_CANDIDATES = 16
"""Most children of one node of a tree."""
RULES = ("match", "rejection")
"""The verification rules, `paradraft/verify/<name>.py`; both are lossless."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The shape of drafts that branch: either a budget or fixed paths.

    A path names a node by the rank of the candidate taken at each depth: `(0,)` is the drafter's
    best first token, `(0, 1)` the second best behind it.

    Args:
        budget: grow each draft to this many nodes, the most promising first; at least 1.
        paths: these nodes in every round; every path's parent must be there too.

    Raises:
        ValueError: neither or both are given, or a path is empty, repeated or without its parent.

    >>> Tree(paths=((0,), (1,), (0, 0))).depth
    2
    """

    budget: int | None = None
    paths: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.paths is None):
            raise ValueError("a tree has either a budget or paths")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"tree budget {self.budget}: use at least 1 node")
        if self.paths is not None:
            object.__setattr__(self, "paths", tuple(tuple(path) for path in self.paths))
            known = set(self.paths)
            if len(known) < len(self.paths) or not self.paths:
                raise ValueError("tree paths: name at least one, and each only once")
            for path in self.paths:
                if not path or min(path) < 0 or max(path) >= MOST_CANDIDATES:
                    raise ValueError(f"tree path {path}: use ranks from 0 to {MOST_CANDIDATES - 1}, at least one")
                if path[:-1] and path[:-1] not in known:
                    raise ValueError(f"tree path {path} is there without its parent {path[:-1]}: add it")
            # By depth, then rank: parents come before children, better siblings before worse ones.
            object.__setattr__(self, "paths", tuple(sorted(known, key=lambda path: (len(path), path))))

    @property
    def nodes(self) -> int:
        """Most nodes of a draft."""
        return len(self.paths or ()) if self.budget is None else self.budget

    @property
    def depth(self) -> int | None:
        """Depth of the fixed paths; None for a budget, which K bounds."""
        return None if self.paths is None else max(map(len, self.paths))


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


@lru_cache(maxsize=256)
def parents_of_chains(batch_size: int, nodes: int, device: torch.device) -> Tensor:
    """`[B, N]` parents -1, 0, 1, … for every row; not to be changed, because everybody gets the same tensor."""
    return torch.arange(-1, nodes - 1, device=device).repeat(batch_size, 1)


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
class Step:
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
