"""Simulates the speed of drafting ahead (PEARL, Mirror-SD) on other machines, from times of passes and acceptance.

Rounds are a Markov chain. Drafting ahead with γ tokens (Liu et al. 2024, Algorithm 2), a round begins without a draft
(pre-verify) or with the last γ - 1 tokens of a window (post-verify). It emits the target's own token and the accepted
tokens before it; if all were accepted and the target's own token is the first of the next window, the next round begins
with the rest of that window.

Mirror-SD (Bhendawade et al. 2025, section 3.1) does not assume that all tokens are accepted. At an early exit of a
pass, the target names the likeliest next tokens at each place of the draft, and the drafter drafts after all of them,
in one batch, while the target's other layers run. A round whose next token was named finds its draft ready.

Acceptance is a list of chances c_i: that token i of a window is right if all before it are. Answers are assumed to be
long, so that each begins with pre-verify is neglected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from paradraft.bench.synthetic import chances_of

MOST_TOKENS = 64
"""Largest window that is tried."""


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Seconds of the parts of a round.

    Args:
        target_s: a pass of the target over one token.
        verify_s: a pass of the target over a draft; None for `target_s`.
        draft_s: a drafted token of an autoregressive draft model.
        window_s: a pass of a parallel drafter (PARD), for any number of tokens; None for `draft_s`.
        transport_s: round trip between the two sides.
        contention: factor, at least 1, on passes while the other side works too.
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
        """Seconds of a draft."""
        if is_parallel:
            return self.draft_s if self.window_s is None else self.window_s
        return tokens * self.draft_s


def accepted(chances: Sequence[float]) -> float:
    """Mean number of accepted tokens of a draft.

    >>> accepted([0.5, 0.5])
    0.75
    """
    return sum(accumulate(chances, mul))


def all_of(chances: Sequence[float]) -> float:
    """The chance that all tokens of a draft are accepted; 1 for an empty draft."""
    return [1.0, *accumulate(chances, mul)][-1]


def plain_speed(times: RoundTimes) -> float:
    """Tokens per second without a drafter (AR+)."""
    return 1.0 / (times.target_s + times.rest_s)


def speed_in_turn(times: RoundTimes, chances: Sequence[float], tokens: int, *, is_parallel: bool = False) -> float:
    """Tokens per second of sequential speculative decoding (VSD, or PARD), with K = `tokens`.

    >>> round(speed_in_turn(RoundTimes(target_s=1.0, draft_s=0.1), [1.0] * 4, 4), 3)
    3.571
    """
    round_s = times.drafting_s(tokens, is_parallel=is_parallel) + times.pass_s + times.rest_s
    return (1.0 + accepted(chances[:tokens])) / round_s


def speed_ahead(
    times: RoundTimes, chances: Sequence[float], gamma: int, *, is_parallel: bool = False, overlap: str = "both"
) -> float:
    """Tokens per second of drafting ahead (PEARL).

    Args:
        chances: of at least `gamma` positions.
        gamma: tokens of a window, at least 2.
        overlap: as in `paradraft.engine.speculation.Speculation`.

    >>> times = RoundTimes(target_s=1.0, draft_s=0.2)
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


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """An early exit of the target that starts drafts (Mirror-SD).

    Args:
        exit_share: share of a pass before the exit.
        named_share: chance that the token after the accepted ones is among those that the exit names.
        branch_cost: how many times as long the drafts after all named tokens take as one draft does, at least 1.
    """

    exit_share: float
    named_share: float
    branch_cost: float = 1.0

    def __post_init__(self) -> None:
        for name in ("exit_share", "named_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: use a share from 0 to 1")
        if not self.branch_cost >= 1:
            raise ValueError(f"branch_cost={self.branch_cost}: use 1 or more")


def speed_mirrored(
    times: RoundTimes, chances: Sequence[float], tokens: int, mirror: Mirror, *, is_parallel: bool = False
) -> float:
    """Tokens per second of Mirror-SD, with drafts of K = `tokens`; arguments as in `speed_in_turn`.

    >>> times = RoundTimes(target_s=1.0, draft_s=0.1)
    >>> speed_mirrored(times, [1.0] * 4, 4, Mirror(exit_share=0.5, named_share=1.0))  # drafts cost nothing
    5.0
    """
    drafting_s = times.drafting_s(tokens, is_parallel=is_parallel)
    sides_s = (1.0 - mirror.exit_share) * times.pass_s, mirror.branch_cost * drafting_s
    together_s = max(sides_s) + (times.contention - 1.0) * min(sides_s)
    round_s = mirror.exit_share * times.pass_s + together_s + times.transport_s + times.rest_s
    again_s = drafting_s + times.transport_s
    return (1.0 + accepted(chances[:tokens])) / (round_s + (1.0 - mirror.named_share) * again_s)


def _reward(goes: float, stays: float, values: tuple[float, float]) -> float:
    """The stationary mean of a value over two states.

    `goes` is the chance of the step from the first to the second state, `stays` that of staying in the second.
    """
    second = goes / (1.0 - stays + goes) if goes else 0.0
    return (1.0 - second) * values[0] + second * values[1]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A method with its best K or γ.

    Args:
        tokens: the best K or γ; None without a drafter.
        speedup: against plain decoding.
    """

    method: str
    tokens: int | None
    tokens_per_s: float
    speedup: float


def simulate(
    times: RoundTimes,
    rates: Sequence[float],
    parallel_rates: Sequence[float] | None = None,
    mirror: Mirror | None = None,
) -> list[Simulated]:
    """All methods, each with its best K or γ.

    Args:
        rates: for each position, the share of drafts of an autoregressive draft model that are accepted that far.
        parallel_rates: the same for a parallel drafter; None leaves PARD out.
        mirror: None leaves Mirror-SD out.
    """
    plain = plain_speed(times)
    methods = [Simulated(method="AR+", tokens=None, tokens_per_s=plain, speedup=1.0)]
    for name, shares, is_parallel in (("VSD", rates, False), ("PARD", parallel_rates, True)):
        if shares is None:
            continue
        chances = chances_of(shares)
        added, lengths = " + PARD" if is_parallel else "", range(1, len(chances) + 1)
        ways = {
            name: {k: speed_in_turn(times, chances, k, is_parallel=is_parallel) for k in lengths},
            f"PEARL{added}": {k: speed_ahead(times, chances, k, is_parallel=is_parallel) for k in lengths[1:]},
        }
        if mirror is not None:
            ways[f"Mirror-SD{added}"] = {
                k: speed_mirrored(times, chances, k, mirror, is_parallel=is_parallel) for k in lengths
            }
        for method, speeds in ways.items():
            if speeds:
                best = max(speeds, key=speeds.__getitem__)
                methods.append(
                    Simulated(method=method, tokens=best, tokens_per_s=speeds[best], speedup=speeds[best] / plain)
                )
    return methods
