"""How far drafts are accepted, read from a report of `paradraft bench`, and what that means for shorter drafts.

`accepted_share_of_rounds` of a report is cumulative: its place i is the share of all rounds that accepted *at least* i
tokens, so a round with k drafted tokens yields 1 + a_1 + … + a_k. Earlier reports have `acceptance_per_position` alone,
the same over the rounds whose draft was that deep; drafts of fixed length are, but for the last of an answer. Most
reports also have `by_round`, the tokens that each target pass gave each answer. It is worth more, because answers
differ: one that repeats itself is accepted ten times as far as its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paradraft.drafters import drafter_settings, split_settings
from paradraft.sampling_params import Sampling


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What the drafts of one method came to.

    Args:
        spec: the method's, as in the report.
        k: most tokens of a path of its drafts.
        tree: nodes its drafts grew to; None for chains.
        length: emitted tokens per target pass.
        shares: for each position the share of rounds that accepted the token there.
        answers: the number of tokens of each answer.
        by_round: for each answer the tokens that each target pass gave it; None in reports that do not say.
        draft: the draft model that it was measured with.
        is_synthetic: whether verdicts were drawn by given rates, see `paradraft.bench.synthetic`.
    """

    spec: str
    k: int
    tree: int | None
    length: float
    shares: tuple[float, ...]
    answers: tuple[int, ...]
    by_round: tuple[tuple[int, ...], ...] | None
    draft: str | None = None
    is_synthetic: bool = False

    def passes(self, k: int) -> tuple[float, ...]:
        """How many target passes each answer takes with drafts of k tokens, at most as many as were drafted.

        Rounds that accepted their whole draft are one run with the next one; a run of n tokens takes rounds of k + 1.
        This is exact at the k that was measured, and below it for drafters whose guess does not depend on where the
        round began (one that drafts token by token). PARD guesses better after real tokens than after masks, so it
        takes fewer passes than this says. Without `by_round` all answers have the mean acceptance.

        >>> seen = Acceptance(spec="pard:k=4", k=4, tree=None, length=2.5, shares=(0.5, 0.5, 0.25, 0.25),
        ...     answers=(6, 4), by_round=((5, 1), (1, 1, 2)))
        >>> seen.passes(4), seen.passes(2)
        ((2, 3), (2, 3))
        """
        assert k == self.k or (k < self.k and self.tree is None)
        if self.by_round is not None:
            return tuple(sum(-(-tokens // (k + 1)) for tokens in _runs(rounds, self.k)) for rounds in self.by_round)
        length = self.length * expected_tokens(self.shares[:k]) / expected_tokens(self.shares)
        return tuple(tokens / length for tokens in self.answers)


def _runs(rounds: Sequence[int], k: int) -> Iterator[int]:
    """The tokens up to each guess that was wrong, that one's place included."""
    tokens = 0
    for found in rounds:
        tokens += found
        if found <= k:
            yield tokens
            tokens = 0
    if tokens:
        yield tokens


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for when a report was made.

    Args:
        target: the model.
        num_prompts: how many prompts were answered.
        max_new_tokens: most tokens of an answer.
        sampling: how they were chosen.
    """

    target: str
    num_prompts: int
    max_new_tokens: int
    sampling: Sampling


PARTS = ("methods", "answers", "arguments")
"""What of a report is read here."""


def asked_of(report: dict[str, Any], name: str) -> Asked:
    """What a report's answers were asked for.

    Raises:
        ValueError: the report does not say.
    """
    arguments = report["arguments"]
    try:
        sampling = dict(arguments["sampling"])
        sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling.get("logit_bias", ()))
        return Asked(
            target=str(arguments["target"]),
            num_prompts=int(arguments["num_prompts"]),
            max_new_tokens=int(arguments["max_new_tokens"]),
            sampling=Sampling(**sampling),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name} does not say what was asked for ({error}): run `paradraft bench` again") from None


def acceptances(
    report: dict[str, Any], name: str, *, drafter: str, draft: str | None, verify: str, dtype: str
) -> list[Acceptance]:
    """The methods of a report that tell how far a drafter's drafts are accepted; one for each k and tree.

    Where the report has methods of several drafts or dtypes, only those with these; the others' would be another
    drafter's. Policies that change the length from round to round tell nothing about a fixed one.

    Args:
        report: a result of `paradraft bench`.
        name: how to call it in a message.
        drafter: its name, with settings or without.
        draft: its draft model.
        verify: the verification rule.
        dtype: of the weights.

    Raises:
        ValueError: there is no such method, or one is damaged.
    """
    methods: dict[str, dict[str, Any]] = report["methods"]
    name_of_drafter, options = split_settings(drafter)[0], drafter_settings(drafter)
    wanted = {"method": name_of_drafter, "verify": verify, "lengths": "fixed"}
    found = [spec for spec, one in methods.items() if all(one.get(key) == value for key, value in wanted.items())]
    # Files of earlier versions do not know them: there they were the defaults.
    found = [spec for spec in found if methods[spec].get("options", drafter_settings(name_of_drafter)) == options]
    for key, value in (("draft", draft), ("dtype", dtype)):
        if len({methods[spec].get(key) for spec in found}) > 1:
            found = [spec for spec in found if methods[spec].get(key) == value]
    result: dict[tuple[int, int | None], Acceptance] = {}
    for spec in found:
        one = _acceptance(spec, methods[spec], report["answers"], name)
        result.setdefault((one.k, one.tree), one)
    if not result:
        raise ValueError(
            f"{name} has no method with drafter {drafter!r}, draft {draft!r}, verify={verify!r} and fixed lengths; it "
            f"has {', '.join(methods) or 'none'}"
        )
    return list(result.values())


def _acceptance(spec: str, figures: dict[str, Any], answers: dict[str, Any], name: str) -> Acceptance:
    try:
        tokens = tuple(len(answer) for answer in answers[spec]["tokens"])
        by_round = answers[spec].get("by_round")
        rounds = None if by_round is None else tuple(tuple(map(int, one)) for one in by_round)
        found = Acceptance(
            spec=spec,
            k=int(figures["k"]),
            tree=None if figures["tree"] is None else int(figures["tree"]),
            length=float(figures["acceptance_length"]),
            shares=tuple(map(float, figures.get("accepted_share_of_rounds") or figures["acceptance_per_position"])),
            answers=tokens,
            by_round=rounds,
            draft=figures.get("draft"),
            is_synthetic=figures.get("synthetic_acceptance") is not None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{name}: method {spec!r} is damaged ({type(error).__name__}: {error})") from None
    if not tokens or (rounds is not None and tuple(map(sum, rounds)) != tokens):
        raise ValueError(f"{name}: method {spec!r} is damaged: its rounds are not those of its answers")
    if problem := _impossible(found):
        raise ValueError(f"{name}: method {spec!r} is damaged: {problem}")
    return found


def _impossible(found: Acceptance) -> str | None:
    """What of these figures cannot be, if anything."""
    if found.k < 1 or not (found.tree is None or found.tree >= 1):
        return f"k={found.k}, tree={found.tree}"
    if not 1 <= found.length <= found.k + 1:
        return f"{found.length} tokens per target pass with k={found.k}"
    if len(found.shares) > found.k:  # fewer are possible: short answers end before
        return f"acceptance of {len(found.shares)} positions with k={found.k}"
    if not all(0 <= share <= 1 for share in found.shares):
        return f"acceptance {', '.join(map(str, found.shares))} is not from 0 to 1"
    if not all(1 <= tokens <= found.k + 1 for rounds in found.by_round or () for tokens in rounds):
        return f"rounds of other than 1 to {found.k + 1} tokens"
    return None


def expected_tokens(shares: Iterable[float]) -> float:
    """Tokens of a row's round: the target's own, and each drafted one as often as it is accepted.

    Args:
        shares: for each position of the draft, the share of rounds that accept the token there.

    >>> expected_tokens([0.5, 0.25])
    1.75
    """
    return 1.0 + sum(shares)
