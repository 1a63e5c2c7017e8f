"""What a method of a benchmark hands back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paradraft.bench.roofline import Passes
from paradraft.core import Sampling
from paradraft.decode.stats import Stats


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
class Answer:
    """The answers to one batch of prompts.

    Args:
        tokens: the new tokens of each.
        total_s: from the prompts to the last token, prefill included.
        stats: counts and times of our own loop; None for peers.
        counts: counts of a peer that tells them.
        passes: what the models did; empty if nobody knows.
        accepted: for each answer and each of its rounds, how many of the round's tokens were drafted;
            one of the target's own follows them. None if the method does not tell.
        peak_rss_bytes: most resident memory of a method that has a process of its own, since its start.
    """

    tokens: list[list[int]]
    total_s: float
    stats: Stats | None
    counts: Counts | None = None
    passes: Passes = field(default_factory=dict)
    accepted: list[list[int]] | None = None
    peak_rss_bytes: int | None = None


Answerer = Callable[[list[str], int, Sampling], Answer]


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
