"""Lookahead decoding: the target generates n-grams in the same pass in which it verifies earlier ones (Fu, Bailis,
Stoica & Zhang 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding").

No draft model. A draft is one tree of two parts. The *window* generates n-grams: it has W columns of N - 1 guessed
tokens, one column for each of the next W positions. The first tokens of the columns are a chain after the last
committed token, and the other tokens of a column follow its first one. The token that the target draws after the last
one of a column completes an n-gram. The column then drops its first token, appends the drawn one, and moves one
position on: a step of Jacobi iteration. The *guesses* are at most G n-grams from the *pool* of completed ones: those
that begin with the last committed token, the latest first.

Four things differ from the authors' code; none of them changes a token of the text:

- Columns belong to positions. After a round with several accepted tokens, the columns of these positions are dropped,
  and as many begin on the right. The authors move the window by one position in every round. Here a token is guessed
  again at the position where it was drawn, with the noise of that position.
- The first column begins after the last committed token. The authors' first column begins with it.
- A column begins with N - 1 consecutive tokens of the committed text. The authors begin with single random tokens of
  the prompt, and fill one level per round.
- Tokens of the window can be accepted too: verification does not distinguish the two parts.

Shape letters: B rows of a batch, N tokens of an n-gram, W columns, G guesses.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.traits import Traits
from paradraft.tree import ABSENT, Tree

SPREAD = 0x9E3779B9
"""2^32 over the golden ratio: any number of its multiples modulo 2^32 are spread evenly (Knuth, "The Art of Computer
Programming", volume 3, 6.4)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter; the defaults are those that the authors recommend for models of 7 B parameters.

    They decide how large a draft is, in place of a tree and of K, which is W + N - 2.

    Args:
        ngram: N, tokens of an n-gram, 2 to 32.
        window: W, columns of the window, 1 to 128.
        guesses: G, most n-grams of the pool in a draft, and most that it keeps for one first token; 1 to 128.
        text_ngrams: put the n-grams of prompt and answer into the pool too. The authors' code can do so with those of
            the prompt (`POOL_FROM_PROMPT`).
    """

    ngram: int = 5
    window: int = 7
    guesses: int = 7
    text_ngrams: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (("ngram", 2, 32), ("window", 1, 128), ("guesses", 1, 128)):
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name}={value}: use {least} to {most}")

    @property
    def tree(self) -> Tree:
        """The largest draft; it has fewer nodes if columns and guesses share prefixes.

        >>> Config().tree.nodes, Config().tree.depth
        (56, 10)
        """
        nodes, depth = (self.window + self.guesses) * (self.ngram - 1), self.window + self.ngram - 2
        return Tree(budget=nodes, max_depth=depth)


class Pool:
    """N-grams by first token; of each first token the `most` latest are kept.

    >>> pool = Pool(2)
    >>> for ngram in [1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7], [8, 9, 9]:
    ...     pool.add(ngram)
    >>> pool.after(1), pool.after(5)
    ([(6, 7), (2, 3)], [])
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_first: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: list[int]) -> None:
        """Adds an n-gram; a known one becomes the latest."""
        kept = self._of_first.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self._most:
            del kept[next(iter(kept))]

    def after(self, first: int) -> list[tuple[int, ...]]:
        """The continuations of a first token, the latest first."""
        return list(reversed(self._of_first.get(first, {})))


class Row:
    """The text, window and pool of one row of a batch."""

    def __init__(self, text: list[int], config: Config) -> None:
        self.text = list(text)
        self.columns: dict[int, list[int]] = {}
        """The window: N - 1 tokens per column, by the position of the first one."""
        self.pool = Pool(config.guesses)
        self._config = config
        self._ends: dict[int, int] = {}
        """By the same position, the node of the column's last token in the last draft."""
        self._add_text_ngrams(0)

    def propose(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the nodes of the next draft."""
        first, N = len(self.text), self._config.ngram
        positions = range(first, first + self._config.window)
        self.columns = {at: self.columns.get(at) or new_column(self.text, at, N - 1) for at in positions}
        tokens, parents, ends = draft_tree(list(self.columns.values()), self.pool.after(self.text[-1]))
        self._ends = dict(zip(positions, ends, strict=True))
        return tokens, parents

    def commit(self, tokens: list[int], drawn: list[int]) -> None:
        """Updates text, window and pool after a round.

        Args:
            tokens: committed in the round.
            drawn: the target's own tokens after the root and after each node, `ABSENT` after a node that was cut off;
                empty if they are not known.
        """
        columns: dict[int, list[int]] = {}
        for position, column in self.columns.items():
            end = self._ends.get(position, len(drawn))
            token = drawn[end + 1] if end + 1 < len(drawn) else ABSENT
            if token >= 0:
                self.pool.add([*column, token])
                columns[position + 1] = [*column[1:], token]
            else:
                # Its last token was not read. The column before it may have moved to its position.
                columns.setdefault(position, column)
        self._ends = {}
        self.text += tokens
        self.columns = {position: column for position, column in columns.items() if position >= len(self.text)}
        self._add_text_ngrams(len(self.text) - len(tokens))

    def _add_text_ngrams(self, start: int) -> None:
        """With `text_ngrams`, adds to the pool the text's n-grams whose last token is at `start` or later."""
        N = self._config.ngram
        if self._config.text_ngrams:
            for end in range(max(start + 1, N), len(self.text) + 1):
                self.pool.add(self.text[end - N : end])


def new_column(text: list[int], position: int, levels: int) -> list[int]:
    """The initial tokens of a column: consecutive in the text, which is treated as cyclic.

    Where they begin depends on the column's position and is spread evenly over the text.

    >>> [new_column([10, 11, 12, 13, 14, 15, 16, 17], position, 3) for position in (8, 9, 10)]
    [[17, 10, 11], [14, 15, 16], [11, 12, 13]]
    """
    start = position * SPREAD % 2**32 * len(text) >> 32
    return [text[(start + level) % len(text)] for level in range(levels)]


def draft_tree(columns: list[list[int]], guesses: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """Merges window and guesses into one tree, in which equal siblings are one node.

    The path to the token at level l of column j has the first tokens of columns 0 to j, then levels 1 to l of column j:
    the tokens that it attends to, as in the paper, and j + l + 1 tokens from the root. The window comes first, so a
    length policy that drops the last nodes drops guesses.

    Args:
        columns: W of N - 1 tokens.
        guesses: of N - 1 tokens each, after the root.

    Returns:
        Tokens and parents of the nodes, and for each column the node of its last token.

    Worked example: W = 3 columns and one guess of N - 1 = 3 tokens, two of which are those of the first column.

        root - 10 - 20 - 30               column 0: nodes 0, 1, 2
                |     \\- 60               the guess: nodes 0, 1, 9
                 \\- 11 - 21 - 31          column 1: nodes 0, 3, 4, 5
                       \\- 12 - 22 - 32    column 2: nodes 0, 3, 6, 7, 8

    >>> tokens, parents, ends = draft_tree([[10, 20, 30], [11, 21, 31], [12, 22, 32]], [[10, 20, 60]])
    >>> tokens
    [10, 20, 30, 11, 21, 31, 12, 22, 32, 60]
    >>> parents
    [-1, 0, 1, 0, 3, 4, 3, 6, 7, 1]
    >>> ends
    [2, 5, 8]
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}

    def end_of(path: Sequence[int], node: int) -> int:
        """Adds a path after a node; returns its last node."""
        for token in path:
            child = nodes.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
            node = child
        return node

    ends, before = [], ABSENT
    for column in columns:
        before = end_of(column[:1], before)
        ends.append(end_of(column[1:], before))
    for guess in guesses:
        end_of(guess, ABSENT)
    return tokens, parents, ends


class LookaheadDrafter(Drafter):
    """Lets the target generate n-grams, and drafts from those completed earlier.

    Window and pool of a row depend only on its prompt and its rounds. Columns whose last token was cut off, and all
    columns of a row that drafts nothing, do not move until the text has passed them.

    Length policies do not know that a window pays only in later rounds. `expected` returns to plain decoding if drafts
    do not pay at once; `heuristic` cuts them until no column is left to learn from.
    """

    traits = Traits(
        words="n-grams that the target makes ahead", branching="own", needs_drawn=True, depends_on_rounds=True
    )

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tree = config.tree
        self._rows: list[Row] = []

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._rows, self._device = [], device

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Creates windows and pools."""
        self._rows += [Row(request.tokens, self.config) for request in requests]

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Window and guesses of the rows that draft; deeper nodes are cut off later."""
        trees = [row.propose() if length else ([], []) for row, length in zip(self._rows, lengths, strict=True)]
        tokens, parents = ([row[part] for row in trees] for part in range(2))
        return Draft.of_lists(tokens, parents, self._device)

    def commit(self, new: Committed) -> None:
        """Updates the rows with committed tokens and the target's draws after the columns."""
        drawn = [[]] * len(self._rows) if new.drawn is None else new.drawn
        for row, tokens, own in zip(self._rows, new.tokens, drawn, strict=True):
            row.commit(tokens, own)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._rows = [self._rows[row] for row in rows.tolist()]


def build(config: Config, target: Target, runtime: Runtime) -> LookaheadDrafter:
    """Builds the drafter. Warns on a CPU, where wide passes are slow."""
    if target.device.type == "cpu":
        warnings.warn(
            f"lookahead makes passes of up to {1 + config.tree.nodes} tokens, for hardware on which these take hardly "
            "longer than passes of one, such as GPUs; on a CPU it seldom pays: try --drafter ngram",
            stacklevel=2,
        )
    return LookaheadDrafter(config)
