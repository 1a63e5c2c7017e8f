"""Results of a method of a benchmark, and the origin of each token of an answer: drafted, at which depth, or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paradraft.bench.hardware.roofline import Passes
from paradraft.bench.hardware.sides import Sides
from paradraft.decode.stats import Stats
from paradraft.sampling_params import Sampling
from paradraft.text.tokenization import REPLACEMENT

FIRST = 32
"""First tokens of an answer. Later on, a small target that decodes greedily repeats itself."""


@dataclass(frozen=True, kw_only=True)
class PeerCounts:
    """Counts of a peer that drafts, as far as it reports them; fields as in `Stats`."""

    tokens: int
    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, drafted: Iterable[int], accepted: Iterable[int]) -> PeerCounts:
        """From the drafted tokens of each round, and those of them that were accepted.

        >>> PeerCounts.of(6, drafted=[3, 3, 2], accepted=[2, 0, 1])
        PeerCounts(tokens=6, rounds=3, drafted=(3, 3, 2), accepted=(2, 1, 0))
        """
        made, kept = list(drafted), list(accepted)
        positions = range(max(made, default=0))
        return cls(
            tokens=tokens,
            rounds=len(kept),
            drafted=tuple(sum(depth > position for depth in made) for position in positions),
            accepted=tuple(sum(depth > position for depth in kept) for position in positions),
        )


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The answers to one batch of prompts.

    Args:
        total_s: from the prompts to the last token, prefill included.
        passes: of each model; empty if unknown.
        accepted: for each answer and each of its rounds, how many of the round's tokens were drafted;
            a token of the target's own follows them. None if the method does not report it.
        peak_rss_bytes: most resident memory of a method in another process, since its start.
        delivered_s: for each answer and each of its rounds, seconds from the request until its tokens were there.
            None if the method does not report it.
        engine_passes: of an engine in another process, passes of each model, those over prompts included; None if it
            does not report them.
    """

    tokens: list[list[int]]
    total_s: float
    stats: Stats | None
    counts: PeerCounts | None = None
    passes: Passes = field(default_factory=dict)
    accepted: list[list[int]] | None = None
    peak_rss_bytes: int | None = None
    sides: Sides | None = None
    delivered_s: list[list[float]] | None = None
    engine_passes: dict[str, int] | None = None


Answerer = Callable[[list[str], int, Sampling], BatchResult]


def tokens_by_round(accepted: Sequence[int], tokens: int) -> list[int]:
    """The tokens of an answer that each target pass gave: those accepted and one more; the last pass gave the rest.

    >>> tokens_by_round([2, 0, 1], 5)
    [3, 1, 1]
    """
    counts: list[int] = []
    for kept in accepted:
        counts.append(min(kept + 1, tokens - sum(counts)))
    return counts


def by_round(answers: Iterable[BatchResult]) -> list[list[int]]:
    """For each answer the tokens that each target pass gave it; methods that do not report it are left out."""
    return [
        tokens_by_round(accepted, len(tokens))
        for answer in answers
        for accepted, tokens in zip(answer.accepted or (), answer.tokens, strict=answer.accepted is not None)
    ]


def first_length(by_round: Iterable[Sequence[int]], first: int = FIRST) -> float | None:
    """The acceptance length over the first tokens of each answer, as if the answers ended there; None without a pass.

    Args:
        by_round: for each answer, the tokens that each target pass gave.

    >>> first_length([[3, 1, 4, 9], [2]], first=6)  # 3 + 1 + 2 of 4 tokens in three passes, and 2 in one
    2.0
    """
    tokens = passes = 0
    for rounds in by_round:
        left = first
        for count in rounds:
            if left <= 0:
                break
            tokens += min(count, left)
            passes += 1
            left -= count
    return tokens / passes if passes else None


def accepted_share_of_rounds(by_round: Iterable[Sequence[int]]) -> list[float]:
    """For i = 1, 2, …: the share of all rounds in which at least i drafted tokens were accepted.

    A round that gave n tokens is taken to have accepted n - 1. Where the length limit cut off the target's own token at
    the end of an answer, that is 1 too few for its last round.

    >>> accepted_share_of_rounds([[3, 1], [2, 1]])
    [0.5, 0.25]
    """
    accepted = [count - 1 for rounds in by_round for count in rounds]
    return [sum(kept > position for kept in accepted) / len(accepted) for position in range(max(accepted, default=0))]


Piece = tuple[str, int]
"""A token's text, and its position in the draft, counted from 1; 0 for the target's own."""


def origins(accepted: Sequence[int], tokens: int) -> list[int]:
    """For each token of an answer its position in the draft; 0 for the target's own. The last round may be cut.

    >>> origins([2, 0, 1], 5)
    [1, 2, 0, 0, 1]
    """
    return [position for kept in accepted for position in (*range(1, kept + 1), 0)][:tokens]


def pieces(tokens: Sequence[int], accepted: Sequence[int], text_of: Callable[[list[int]], str]) -> list[Piece]:
    """The text of an answer, token by token; a character of several tokens belongs to the last of them."""
    pieces: list[Piece] = []
    shown = 0
    for count, origin in enumerate(origins(accepted, len(tokens)), start=1):
        text = text_of(list(tokens[:count]))
        if count < len(tokens):
            text = text.rstrip(REPLACEMENT)
        pieces.append((text[shown:], origin))
        shown = max(shown, len(text))
    return pieces
