"""What a method of a benchmark hands back, and how each token of an answer came: drafted, at which depth, or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paradraft.bench.roofline import Passes
from paradraft.bench.sides import Sides
from paradraft.decode.stats import Stats
from paradraft.sampling_params import Sampling
from paradraft.text.tokenization import REPLACEMENT

FIRST = 32
"""The tokens of an answer's beginning. Later on, a small target that decodes greedily repeats itself."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How a peer that drafts came to its tokens, as far as it tells; fields as in `Stats`."""

    tokens: int
    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, drafted: Iterable[int], accepted: Iterable[int]) -> Counts:
        """From how many tokens each round drafted, and how many of them were accepted.

        >>> Counts.of(6, drafted=[3, 3, 2], accepted=[2, 0, 1])
        Counts(tokens=6, rounds=3, drafted=(3, 3, 2), accepted=(2, 1, 0))
        """
        made, kept = list(drafted), list(accepted)
        places = range(max(made, default=0))
        return cls(
            tokens=tokens,
            rounds=len(kept),
            drafted=tuple(sum(depth > place for depth in made) for place in places),
            accepted=tuple(sum(depth > place for depth in kept) for place in places),
        )


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The answers to one batch of prompts.

    Args:
        tokens: the new tokens of each.
        total_s: from the prompts to the last token, prefill included.
        stats: counts and times of our own loop; None for peers.
        counts: counts of a peer that tells them.
        passes: what the models did; empty if that is not known.
        accepted: for each answer and each of its rounds, how many of the round's tokens were drafted;
            one of the target's own follows them. None if the method does not tell.
        peak_rss_bytes: most resident memory of a method that has a process of its own, since its start.
        sides: of a method that drafts ahead, what each side did.
        delivered_s: for each answer and each of its rounds, seconds from the request until its tokens were there.
            None if the method does not tell.
        engine_passes: of an engine in a process of its own, how many passes each model made, those over prompts
            included; None if it does not tell.
    """

    tokens: list[list[int]]
    total_s: float
    stats: Stats | None
    counts: Counts | None = None
    passes: Passes = field(default_factory=dict)
    accepted: list[list[int]] | None = None
    peak_rss_bytes: int | None = None
    sides: Sides | None = None
    delivered_s: list[list[float]] | None = None
    engine_passes: dict[str, int] | None = None


Answerer = Callable[[list[str], int, Sampling], BatchResult]


def tokens_by_round(accepted: Sequence[int], tokens: int) -> list[int]:
    """How many tokens of an answer each target pass gave: those accepted and one more, of the last what is left.

    Args:
        accepted: for each round, how many of its tokens were drafted.
        tokens: how many tokens the answer has.

    >>> tokens_by_round([2, 0, 1], 5)
    [3, 1, 1]
    """
    found: list[int] = []
    for kept in accepted:
        found.append(min(kept + 1, tokens - sum(found)))
    return found


def by_round(answers: Iterable[BatchResult]) -> list[list[int]]:
    """For each answer the tokens that each target pass gave it; nothing of methods that do not tell."""
    return [
        tokens_by_round(accepted, len(tokens))
        for answer in answers
        for accepted, tokens in zip(answer.accepted or (), answer.tokens, strict=answer.accepted is not None)
    ]


def first_length(by_round: Iterable[Sequence[int]], first: int = FIRST) -> float | None:
    """The acceptance length over the first tokens of each answer, as if the answers ended there.

    Args:
        by_round: for each answer the tokens that each target pass gave, see `tokens_by_round`.
        first: how many tokens of each answer count.

    Returns:
        Tokens per target pass; None if there was no pass.

    >>> first_length([[3, 1, 4, 9], [2]], first=6)  # 3 + 1 + 2 of 4 tokens in three passes, and 2 in one
    2.0
    """
    tokens = passes = 0
    for rounds in by_round:
        left = first
        for given in rounds:
            if left <= 0:
                break
            tokens += min(given, left)
            passes += 1
            left -= given
    return tokens / passes if passes else None


def accepted_share_of_rounds(by_round: Iterable[Sequence[int]]) -> list[float]:
    """For i = 1, 2, …: the share of all rounds in which at least i drafted tokens were accepted.

    A round that gave n tokens is taken to have accepted n - 1. Where the length limit cut off the target's own token at
    the end of an answer, that is one too few for its last round.

    >>> accepted_share_of_rounds([[3, 1], [2, 1]])
    [0.5, 0.25]
    """
    accepted = [given - 1 for rounds in by_round for given in rounds]
    return [sum(kept > place for kept in accepted) / len(accepted) for place in range(max(accepted, default=0))]


Piece = tuple[str, int]
"""A token's text, and its position in the draft, counted from 1; 0 for the target's own."""


def origins(accepted: Sequence[int], tokens: int) -> list[int]:
    """For each token of an answer its position in the draft; 0 for the target's own.

    Args:
        accepted: for each round, how many of its tokens were drafted.
        tokens: how many tokens the answer has; the last round may have been cut.

    >>> origins([2, 0, 1], 5)
    [1, 2, 0, 0, 1]
    """
    return [place for kept in accepted for place in (*range(1, kept + 1), 0)][:tokens]


def pieces(tokens: Sequence[int], accepted: Sequence[int], text_of: Callable[[list[int]], str]) -> list[Piece]:
    """The text of an answer, token by token.

    A character of several tokens stands with its last one.

    Args:
        tokens: of the answer.
        accepted: see `origins`.
        text_of: the text of a list of tokens.
    """
    found: list[Piece] = []
    shown = 0
    for number, origin in enumerate(origins(accepted, len(tokens)), start=1):
        text = text_of(list(tokens[:number]))
        if number < len(tokens):
            text = text.rstrip(REPLACEMENT)
        found.append((text[shown:], origin))
        shown = max(shown, len(text))
    return found
