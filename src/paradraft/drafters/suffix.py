"""Suffix decoding: drafts the continuations of the longest earlier matches of the text's end, as counted.

No model (Oliaro, Jia, Campos & Qiao 2024, "SuffixDecoding", arXiv 2411.04975). Earlier places whose last tokens are
those of the text match it over some length. The places that match over at least that length vote on what follows: the
share of a token among them and the length of the match give its chance, and the tree of the likeliest continuations is
the draft. Of all lengths the one whose tree is expected to have most accepted tokens is taken. The paper's tries hold
the texts of other requests too; this drafter reads its own row and a constant corpus (`parts/corpus.py`), so that its
drafts depend on nothing else.

The paper takes the share alone as the chance, and bounds the depth by a multiple of the match length. Here the chance
rises with the length too (docs/decisions.md, 107), so that a draft ends where the expected gain does.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Committed, Drafting, Request
from paradraft.drafters.parts.corpus import Corpus, check_corpus, read_corpus
from paradraft.drafters.parts.estimating import Child, Estimating, Node, at_odds, chain_of, grown
from paradraft.drafters.parts.match_chance import chain_chances, chance, most_expected
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.traits import Traits
from paradraft.tree import ABSENT, Tree


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        depth: longest match, in tokens, 1 to 256.
        places: most earlier places that are compared, the latest ones, 1 to 1024.
        floor: least estimated probability of a drafted path, 0 to 1; 0 drafts whatever has followed.
        corpus: file of a constant text whose continuations are drafted too, see `read_corpus`; None for none.
    """

    depth: int = 24
    places: int = 64
    floor: float = 0.05
    corpus: str | None = None

    def __post_init__(self) -> None:
        for name, least, most in (("depth", 1, 256), ("places", 1, 1024), ("floor", 0, 1)):
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name}={value}: use {least} to {most}")
        if self.corpus is not None:
            check_corpus(self.corpus)


TRIED = 24
"""Most lengths that are compared, the longest."""


def expected(nodes: list[Node]) -> float:
    """How many nodes are accepted on average, if their values are right."""
    return sum(node.value for node in nodes)


class Text:
    """The tokens of a row, with the places of each.

    >>> text = Text([1, 2, 3, 9, 1, 2])
    >>> text.matches(depth=8, places=8)
    [(2, 2)]
    >>> [node.token for node in text.draft(Config(), 8, None)]
    [3, 9, 1, 2]
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._after: defaultdict[int, list[int]] = defaultdict(list)
        """By token, the places after it; the last is the text's end if it is the last token."""
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        for token in tokens:
            self.tokens.append(token)
            self._after[token].append(len(self.tokens))

    def matches(self, *, depth: int, places: int) -> list[tuple[int, int]]:
        """The latest earlier places after the last token, the latest first, and over how many tokens each matches."""
        tokens, end = self.tokens, len(self.tokens)
        found = []
        for place in self._after[tokens[-1]][-2 : -2 - places : -1]:
            length, most = 1, min(depth, place)
            while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
                length += 1
            found.append((place, length))
        return found

    def draft(
        self, config: Config, k: int, tree: Tree | None, corpus: Corpus | None = None, *, least_value: float = 0.0,
        factor: float = 1.0,
    ) -> list[Node]:  # fmt: skip
        """The nodes of the draft that is expected to have most accepted tokens, at most K deep.

        The text and the corpus count apart; of equally good drafts that of the text is taken.

        Args:
            factor: of the odds of chances.
        """
        sources: list[tuple[Sequence[int], list[tuple[int, int]]]] = [
            (self.tokens, self.matches(depth=config.depth, places=config.places))
        ]
        if corpus is not None:
            sources.append((corpus.tokens, corpus.matches(self.tokens, places=config.places)))
        best = list[Node]()
        for tokens, matches in sources:
            for least in sorted({length for _, length in matches}, reverse=True)[:TRIED]:
                # Of the nodes at a depth one is accepted at most, and shorter matches have smaller chances.
                if at_odds(chance(least, len(matches), len(matches)), factor) < least_value:
                    break
                if best and most_expected(k, least, len(matches), factor) <= expected(best):
                    break
                places = [place for place, length in matches if length >= least]
                nodes = self._likeliest(tokens, places, least, k, config.floor, tree, factor)
                best = max(best, nodes, key=expected)
        return best if best and best[0].value >= least_value else []

    @staticmethod
    def _likeliest(
        tokens: Sequence[int], places: list[int], least: int, k: int, floor: float, tree: Tree | None, factor: float
    ) -> list[Node]:
        """The continuations from places that match over `least` tokens: the likeliest chain, or nodes of a tree."""

        if len(places) == 1 and (tree is None or tree.paths is None):
            most = k if tree is None else min(k, tree.nodes)
            following = tokens[places[0] : places[0] + most]
            following = list(itertools.takewhile(lambda token: token != ABSENT, following))
            nodes = chain_of(following, chain_chances(len(following), least, factor=factor))
            return list(itertools.takewhile(lambda node: node.value >= floor, nodes))

        def children(places: list[int], depth: int) -> list[Child]:
            counts = Counter(tokens[place] for place in places)
            found = [(token, votes, chance(least + depth, votes, len(places))) for token, votes in counts.most_common()]
            return [(token, min(at_odds(each, factor), votes / len(places))) for token, votes, each in found]

        def after(places: list[int], token: int) -> list[int]:
            return inside([place + 1 for place in places if tokens[place] == token])

        def inside(places: list[int]) -> list[int]:
            return [place for place in places if place < len(tokens) and tokens[place] != ABSENT]

        return grown(inside(places), children, after, k=k, tree=tree, floor=floor)


class SuffixDrafter(Estimating):
    """Drafts from the committed tokens of each row."""

    traits = Traits(words="what followed the longest earlier matches", branching="tree", estimates=True)

    def __init__(self, config: Config, corpus: Corpus | None = None) -> None:
        self.config, self.corpus = config, corpus

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        super().start(drafting, device)
        self._texts = list[Text]()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Reads the prompts."""
        self._texts += [Text(request.tokens) for request in requests]

    def commit(self, new: Committed) -> None:
        """Appends committed tokens."""
        for text, tokens in zip(self._texts, new.tokens, strict=True):
            text.extend(tokens)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._texts = [self._texts[row] for row in rows.tolist()]

    def grow(self, lengths: Sequence[int]) -> list[list[Node]]:
        """The trees of `Text.draft`; rows without a match draft nothing."""
        settings = {"least_value": self.worth.least_value, "factor": self.worth.factor}
        return [
            text.draft(self.config, k, self.drafting.tree, self.corpus, **settings) if k else []
            for text, k in zip(self._texts, lengths, strict=True)
        ]


def build(config: Config, target: Target, runtime: Runtime) -> SuffixDrafter:
    """Builds the drafter; reads the corpus, in the target's tokens."""
    corpus = None if config.corpus is None else read_corpus(config.corpus, target, depth=config.depth)
    return SuffixDrafter(config, corpus)
