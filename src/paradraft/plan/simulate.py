"""What drafting ahead (PEARL) would yield on machines that are not at hand: from the times of passes and acceptance.

Rounds are a Markov chain. Drafting ahead with γ tokens (Liu et al. 2024, Algorithm 2), a round begins without a draft
(pre-verify) or with the last γ - 1 tokens of a window (post-verify). It emits the target's own token and the accepted
ones before it; if all were accepted and the target's own token is the first of the next window, the next round begins
with the rest of that.

Acceptance is given as chances: c_i that the token i of a window is right if all before it are. Long answers are meant:
that each begins with pre-verify is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from paradraft.bench.synthetic import chances_of

MOST_TOKENS = 64
"""Windows up to this size are tried."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """What the parts of a round take, in seconds.

    Args:
        target_s: a pass of the target over one token.
        verify_s: one over a draft; None for the same.
        draft_s: a drafted token of an autoregressive draft model.
        window_s: a pass of a parallel drafter (PARD), any number of tokens; None for `draft_s`.
        transport_s: from one side to the other and back.
        rest_s: what a round takes besides.
        contention: how many times as long passes take while the other side works too.
    """

    target_s: float
    draft_s: float
    verify_s: float | None = None
    window_s: float | None = None
    transport_s: float = 0.0
    rest_s: float = 0.0
    contention: float = 1.0

    def __post_init__(self) -> None:
        for name in ("target_s", "draft_s", "verify_s", "window_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: use seconds above 0")
        for name in ("transport_s", "rest_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: use seconds, 0 or more")
        if not self.contention >= 1:
            raise ValueError(f"contention={self.contention}: use 1 (none) or more")

    @property
    def pass_s(self) -> float:
        """A pass of the target over a draft."""
        return self.target_s if self.verify_s is None else self.verify_s

    def drafting_s(self, tokens: int, *, is_parallel: bool) -> float:
        """What a draft of so many tokens takes."""
        if is_parallel:
            return self.draft_s if self.window_s is None else self.window_s
        return tokens * self.draft_s


def accepted(chances: Sequence[float]) -> float:
    """The mean number of accepted tokens of a draft.

    >>> accepted([0.5, 0.5])
    0.75
    """
    return sum(accumulate(chances, mul))


def all_of(chances: Sequence[float]) -> float:
    """The chance that all tokens of a draft are accepted; 1 for none."""
    return [1.0, *accumulate(chances, mul)][-1]


def plain_speed(times: Times) -> float:
    """Tokens per second without a drafter (AR+)."""
    return 1.0 / (times.target_s + times.rest_s)


def speed_in_turn(times: Times, chances: Sequence[float], tokens: int, *, is_parallel: bool = False) -> float:
    """Tokens per second of drafting and verifying in turn (VSD, or PARD), with K = `tokens`.

    >>> round(speed_in_turn(Times(target_s=1.0, draft_s=0.1), [1.0] * 4, 4), 3)
    3.571
    """
    round_s = times.drafting_s(tokens, is_parallel=is_parallel) + times.pass_s + times.rest_s
    return (1.0 + accepted(chances[:tokens])) / round_s


def speed_ahead(
    times: Times, chances: Sequence[float], gamma: int, *, is_parallel: bool = False, overlap: str = "both"
) -> float:
    """Tokens per second of drafting ahead.

    Args:
        times: of each side.
        chances: of at least `gamma` positions.
        gamma: tokens of a window, at least 2.
        is_parallel: whether a window is one pass of the drafter.
        overlap: as in `paradraft.engine.speculation.Speculation`.

    >>> times = Times(target_s=1.0, draft_s=0.2)
    >>> round(speed_ahead(times, [1.0] * 5, 5), 3)  # each round is a window of five, and takes what either side takes
    5.0
    >>> round(speed_ahead(times, [0.0] * 5, 5), 3)
    1.0
    """
    drafting_s = times.drafting_s(gamma, is_parallel=is_parallel)
    besides_s = times.transport_s + times.rest_s

    def both_s(pass_s: float) -> float:
        return times.contention * max(pass_s, drafting_s) + besides_s

    first, later = chances[0], chances[1:gamma]
    post_tokens, stays = 1.0 + accepted(later), all_of(later) * first
    if overlap == "pre":  # a window that begins right is verified while the drafter waits
        return (1.0 + first * post_tokens) / (both_s(times.target_s) + first * (times.pass_s + besides_s))
    if overlap == "post":  # a window is drafted while the target waits, and then drafting goes on
        begin_tokens, begins = 1.0 + accepted(chances[:gamma]), all_of(chances[:gamma]) * first
        begin_s, post_s = drafting_s + besides_s + both_s(times.pass_s), both_s(times.pass_s)
        return _reward(begins, stays, (begin_tokens, post_tokens)) / _reward(begins, stays, (begin_s, post_s))
    return _reward(first, stays, (1.0, post_tokens)) / _reward(
        first, stays, (both_s(times.target_s), both_s(times.pass_s))
    )


def _reward(goes: float, stays: float, each: tuple[float, float]) -> float:
    """The mean of a value over the rounds of two states: `goes` from the first to the second, which is kept by
    `stays`."""
    second = goes / (1.0 - stays + goes) if goes else 0.0
    return (1.0 - second) * each[0] + second * each[1]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A method at its best.

    Args:
        method: its name.
        tokens: K, or γ, that yields most; None without a drafter.
        tokens_per_s: emitted tokens per second.
        speedup: against plain decoding.
    """

    method: str
    tokens: int | None
    tokens_per_s: float
    speedup: float


def simulate(times: Times, rates: Sequence[float], parallel_rates: Sequence[float] | None = None) -> list[Simulated]:
    """All methods, each with the number of tokens that yields most.

    Args:
        times: of each side.
        rates: for each position the share of all drafts that are accepted that far, of an autoregressive draft model.
        parallel_rates: the same of a parallel drafter; None leaves PARD out.
    """
    plain = plain_speed(times)
    found = [Simulated(method="AR+", tokens=None, tokens_per_s=plain, speedup=1.0)]
    for name, shares, is_parallel in (("VSD", rates, False), ("PARD", parallel_rates, True)):
        if shares is None:
            continue
        chances = chances_of(shares)
        ways = {
            name: {k: speed_in_turn(times, chances, k, is_parallel=is_parallel) for k in range(1, len(chances) + 1)},
            "PEARL" if name == "VSD" else "PEARL + PARD": {
                gamma: speed_ahead(times, chances, gamma, is_parallel=is_parallel)
                for gamma in range(2, len(chances) + 1)
            },
        }
        for method, speeds in ways.items():
            if speeds:
                best = max(speeds, key=speeds.__getitem__)
                found.append(
                    Simulated(method=method, tokens=best, tokens_per_s=speeds[best], speedup=speeds[best] / plain)
                )
    return found
