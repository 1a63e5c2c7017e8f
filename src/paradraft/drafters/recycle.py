"""Token recycling: drafts what the target thought likely when it last read the same tokens.

No model (Luo, Wang, Zhu, Zhang, Zhang, Yang & Xu 2024, "Turning Trash into Treasure: Accelerating Inference of Large
Language Models with Token Recycling", arXiv 2408.08696). In every pass the target computes logits after each node of
the draft, refused ones included. The likeliest tokens after each are kept by the tokens before them, and the next
drafts are grown from them.

The paper keys by one token and drafts a fixed tree of 80 nodes by rank. Here a key of two tokens comes first (as in
ADED, arXiv 2407.12021), logits are kept too, and their shares give each node an estimated chance (docs/decisions.md,
112), so that a draft has the size that pays. Under the match rule the shares include the target's own noise, which
decides between its likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Committed, Drafting, Request
from paradraft.drafters.parts.estimating import Child, Estimating, Node, grown
from paradraft.formats.likely_table import LikelyTable, read_table
from paradraft.likeliest import Likeliest
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling.noise import few_gumbel
from paradraft.sources.recorded import table_file
from paradraft.traits import Traits
from paradraft.tree import ABSENT, MOST_CANDIDATES, Tree


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        width: likeliest tokens that are kept of each place, 1 to 16.
        key: most tokens by which places are looked up: 1 or 2.
        floor: least estimated probability of a drafted path, 0 to 1.
        table: what earlier answers have shown: a file of `paradraft record`, or the name that it printed; None for
            nothing.
    """

    width: int = 8
    key: int = 2
    floor: float = 0.05
    table: str | None = None

    def __post_init__(self) -> None:
        for name, least, most in (("width", 1, MOST_CANDIDATES), ("key", 1, 2), ("floor", 0, 1)):
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name}={value}: use {least} to {most}")
        if self.table is not None and not table_file(self.table).is_file():
            raise ValueError(f"table={self.table!r} does not exist: name a file that paradraft record has written")


BIAS_AND_SLOPE = {
    (1, True): (-1.7, 0.48),
    (2, True): (-1.0, 0.68),
    (1, False): (-2.1, 0.45),
    (2, False): (-1.8, 0.6),
}
"""The logistic function of the log-odds of a token's share that is its chance: by the number of tokens before it that
are equal, and whether they were read in this row or are in the table. Fitted to tokens that answers of three models
reached or refused. Temperature adds little, and so does a mixture of all that is known of a place."""
UNSURE = 0.01
"""Shares count as at least this and at most one minus this: a context of two tokens says no more."""
MOST_KEYS = 2**16
"""Keys that are kept of a row, the latest; a place has two."""
Pair = tuple[int, int]


class KnownPlaces:
    """What was likely after the tokens of a row, by these tokens.

    >>> known = KnownPlaces(Request(tokens=[3, 4]), Config(), has_noise=True)
    >>> places = {"read": [[5]], "parents": [[-1]], "tokens": [[[5, 8], [6, 9]]], "logits": [[[5.0, 1.0], [3.0, 2.0]]]}
    >>> known.commit([8], Likeliest(**places), 0)
    >>> known.commit([5], None, 0)
    >>> [(node.token, node.parent) for node in known.draft(3, None)]
    [(6, -1)]
    """

    def __init__(self, request: Request, config: Config, table: LikelyTable | None = None, *, has_noise: bool) -> None:
        self._config, self._table = config, table
        self._seed = request.sampling.seed
        self._temperature = request.sampling.temperature
        self._has_noise = has_noise and self._temperature > 0.0
        self._end: Pair = (request.tokens[-2] if len(request.tokens) > 1 else ABSENT, request.tokens[-1])
        self._length = len(request.tokens)
        self._known: dict[int | Pair, tuple[list[int], list[float]]] = {}
        """Likeliest tokens and logits by the last token, and by the last two."""

    def commit(self, tokens: list[int], likeliest: Likeliest | None, row: int) -> None:
        """Keeps what was likely at the places of a pass, and appends committed tokens."""
        if likeliest is not None:
            # Of equal keys the node that comes first is kept: it is likelier to be in the text. After a place
            # whose logits are no numbers nothing is kept.
            for pair, ids, logits in reversed(list(likeliest.places(row, *self._end))):
                for key in (pair[1], pair)[: self._config.key if ids[0] != ABSENT else 0]:
                    self._known.pop(key, None)
                    self._known[key] = ids, logits
            while len(self._known) > MOST_KEYS:
                del self._known[next(iter(self._known))]
        if tokens:
            self._end = (*self._end, *tokens)[-2], tokens[-1]
            self._length += len(tokens)

    def draft(self, k: int, tree: Tree | None, *, least_value: float = 0.0, factor: float = 1.0) -> list[Node]:
        """The likeliest nodes, at most K deep; `factor` is that of the odds of their chances."""

        def children(pair: Pair, depth: int) -> list[Child]:
            return self._children(pair, depth, factor)

        return grown(self._end, children, lambda pair, token: (pair[1], token), k=k, tree=tree,
                     floor=self._config.floor, least_first=least_value)  # fmt: skip

    def _children(self, pair: Pair, depth: int, factor: float) -> list[Child]:
        for matched in range(self._config.key, 0, -1):
            known, is_own = self._known.get(pair if matched == 2 else pair[1]), True
            if known is None and self._table is not None:
                known, is_own = self._table.find(pair, matched), False
            if known is not None:
                break
        else:
            return []
        tokens, scores = known
        if self._temperature > 0.0:
            scores = [logit / self._temperature for logit in scores]
        if self._has_noise:
            noise = few_gumbel(self._seed, self._length + depth, tokens)
            scores = [score + each for score, each in zip(scores, noise, strict=True)]
        largest, (bias, slope) = max(scores), BIAS_AND_SLOPE[matched, is_own]
        weights = [math.exp(score - largest) for score in scores]
        total = sum(weights)
        shares = (min(max(weight / total, UNSURE), 1.0 - UNSURE) for weight in weights)
        chances = [1.0 / (1.0 + math.exp(-bias) / factor * (share / (1.0 - share)) ** -slope) for share in shares]
        if (sum_of_all := sum(chances)) > 1.0:  # the function does not know that they exclude each other
            chances = [chance / sum_of_all for chance in chances]
        pairs = zip(tokens, chances, strict=True)
        return sorted((child for child in pairs if child[0] != ABSENT), key=lambda child: -child[1])


class RecycleDrafter(Estimating):
    """Drafts what was likely in the earlier passes of each row."""

    traits = Traits(
        words="what the target thought likely before", branching="tree", estimates=True, depends_on_rounds=True
    )

    def __init__(self, config: Config, table: LikelyTable | None = None) -> None:
        self.config, self.table = config, table
        self.likeliest = config.width

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        super().start(drafting, device)
        self._rows = list[KnownPlaces]()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Begins with nothing known: the logits after the tokens of a prompt are not computed."""
        has_noise = self.drafting.draws == "noise"
        self._rows += [KnownPlaces(request, self.config, self.table, has_noise=has_noise) for request in requests]

    def grow(self, lengths: Sequence[int]) -> list[list[Node]]:
        """The drafts of `KnownPlaces.draft`."""
        settings = {"least_value": self.worth.least_value, "factor": self.worth.factor}
        rows = zip(self._rows, lengths, strict=True)
        return [row.draft(k, self.drafting.tree, **settings) if k else [] for row, k in rows]

    def commit(self, new: Committed) -> None:
        """Learns from the pass."""
        for index, (row, tokens) in enumerate(zip(self._rows, new.tokens, strict=True)):
            row.commit(tokens, new.likeliest, index)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._rows = [self._rows[row] for row in rows.tolist()]


def build(config: Config, target: Target, runtime: Runtime) -> RecycleDrafter:
    """Builds the drafter; reads the table, and raises ValueError if it is none of this target's tokens."""
    table = None if config.table is None else read_table(table_file(config.table))
    if table is not None and table.tokens.max(initial=-1) >= target.vocab_size:
        raise ValueError(f"table={config.table!r} has tokens that the target lacks: it is of another model")
    return RecycleDrafter(config, table)
