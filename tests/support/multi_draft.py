"""What several drafts of one token are worth, exactly, for vocabularies of a few tokens.

References of the rule `rejection` with siblings, which are drawn without replacement (RSD-C, Jeon et al. 2024): a bound
for all rules, and rules of other papers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

P = Sequence[float]


def draws(q: P, number: int) -> Iterator[tuple[tuple[int, ...], float, list[list[float]]]]:
    """All draws without replacement, their chances, and the distributions that each token was drawn from."""
    for tokens in itertools.permutations([token for token, chance in enumerate(q) if chance > 0], number):
        left, chance, probs = list(q), 1.0, []
        for token in tokens:
            probs.append([each / sum(left) for each in left])
            chance *= probs[-1][token]
            left[token] = 0.0
        yield tokens, chance, probs


def without_replacement(p: P, q: P, number: int) -> float:
    """The chance that recursive rejection accepts one of the tokens."""
    return sum(chance * accepted(p, tokens, probs) for tokens, chance, probs in draws(q, number))


def accepted(p: P, tokens: Sequence[int], probs: Sequence[P]) -> float:
    """The chance that one of these tokens is accepted, one tried after the other."""
    left, rejected = list(p), 1.0
    for token, q in zip(tokens, probs, strict=True):
        rejected *= 1 - min(1.0, left[token] / q[token])
        rest = [max(one - other, 0.0) for one, other in zip(left, q, strict=True)]
        if rejected <= 0 or not sum(rest):
            break
        left = [each / sum(rest) for each in rest]
    return 1 - rejected


def greedy(p: P, q: P, number: int) -> float:
    """The same where all but the last are the likeliest, and the last is drawn from the rest (Hu et al. 2025)."""
    likeliest = sorted(range(len(q)), key=lambda token: -q[token])[: number - 1]
    rest = [0.0 if token in likeliest else chance for token, chance in enumerate(q)]
    certain = [[float(token == each) for token in range(len(q))] for each in likeliest]
    if not sum(rest):
        return accepted(p, likeliest, certain)
    rest = [chance / sum(rest) for chance in rest]
    pairs = ((token, chance) for token, chance in enumerate(rest) if chance > 0)
    return sum(chance * accepted(p, [*likeliest, token], [*certain, rest]) for token, chance in pairs)


def with_replacement(p: P, q: P, number: int) -> float:
    """K-SEQ (Sun et al. 2023, SpecTr, Alg. 2): independent draws, each accepted with min(1, p / (rho q)), at the least
    rho for which what is accepted never exceeds p."""
    low, high = 1.0, float(number)
    for _ in range(100):
        rho = (low + high) / 2
        each = sum(min(a / rho, b) for a, b in zip(p, q, strict=True))
        low, high = (rho, high) if 1 - (1 - each) ** number > rho * each else (low, rho)
    each = sum(min(a / high, b) for a, b in zip(p, q, strict=True))
    return 1 - (1 - each) ** number


def optimum(p: P, q: P, number: int, *, replacement: bool = False) -> float:
    """The most that any rule accepts: 1 + min over sets H of p(H) - Q(H), where Q(H) is the chance that all drafts are
    in H. It is the largest flow from sets of drafts to their tokens (Sun et al. 2023, section 3; Hu et al. 2025)."""
    tokens = range(len(p))
    sets: dict[frozenset[int], float] = {}
    if replacement:
        for drawn in itertools.product(tokens, repeat=number):
            chance = 1.0
            for token in drawn:
                chance *= q[token]
            sets[frozenset(drawn)] = sets.get(frozenset(drawn), 0.0) + chance
    else:
        for drawn, chance, _ in draws(q, number):
            sets[frozenset(drawn)] = sets.get(frozenset(drawn), 0.0) + chance
    least = 0.0
    for size in range(len(p) + 1):
        for some in map(frozenset, itertools.combinations(tokens, size)):
            inside = sum(chance for drawn, chance in sets.items() if drawn <= some)
            least = min(least, sum(p[token] for token in some) - inside)
    return 1 + least
