"""Acceptance of drafts, read from a report of `paradraft bench`, and extrapolated to shorter drafts.

`accepted_share_of_rounds` of a report is cumulative: entry i is the share of all rounds that accepted *at least* i
tokens, so a round with k drafted tokens yields 1 + a_1 + … + a_k. Earlier reports have `acceptance_per_position` alone,
the same over the rounds whose draft was that deep, which drafts of fixed length are, except the last of an answer. Most
reports also have `by_round`, the tokens per target pass of each answer. It predicts better, because answers differ: an
answer that repeats itself has ten times the acceptance length of its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paradraft.drafters import drafter_settings, split_settings
from paradraft.sampling_params import Sampling


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Measured acceptance of a method.

    Args:
        k: maximum depth of its drafts.
        tree: node budget; None for chains.
        length: emitted tokens per target pass.
        shares: for each position the share of rounds that accepted the token there.
        answers: tokens of each answer.
        by_round: for each answer the tokens of each target pass; None in reports without it.
        is_synthetic: whether verdicts were drawn at configured rates, see `paradraft.bench.synthetic`.
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
        """Target passes of each answer with drafts of k tokens, for k up to the measured one.

        A round that accepted its whole draft forms a run with the next one; a run of n tokens takes rounds of k + 1.
        This is exact at the measured k, and below it for drafters whose guess does not depend on where the round began
        (autoregressive ones). PARD guesses better after real tokens than after masks, so it takes fewer passes than
        predicted. Without `by_round` all answers have the mean acceptance.

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
    """Lengths of the runs of tokens that end with each wrong guess, its position included."""
    tokens = 0
    for emitted in rounds:
        tokens += emitted
        if emitted <= k:
            yield tokens
            tokens = 0
    if tokens:
        yield tokens


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """The command-line arguments of a report's answers."""

    target: str
    num_prompts: int
    max_new_tokens: int
    sampling: Sampling


PARTS = ("methods", "answers", "arguments")
"""The keys of a report that are read."""


def arguments_of(report: dict[str, Any], name: str) -> ReportArguments:
    """The arguments of a report; `name` is the report's, for the message.

    Raises:
        ValueError: the report lacks them.
    """
    arguments = report["arguments"]
    try:
        sampling = dict(arguments["sampling"])
        sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling.get("logit_bias", ()))
        return ReportArguments(
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
    """The acceptance of a drafter's methods in a report, one for each k and tree.

    If the report has methods of several draft models or dtypes, only those with `draft` or `dtype` count, because the
    others belong to another drafter. Adaptive length policies say nothing about a fixed length, so they are left out.

    Args:
        drafter: its name, with or without settings.

    Raises:
        ValueError: there is no such method, or an entry is damaged.
    """
    methods: dict[str, dict[str, Any]] = report["methods"]
    name_of_drafter, options = split_settings(drafter)[0], drafter_settings(drafter)
    wanted = {"method": name_of_drafter, "verify": verify, "lengths": "fixed"}
    specs = [spec for spec, figures in methods.items() if all(figures.get(key) == wanted[key] for key in wanted)]
    # Earlier reports have fewer options, or none: there they were the defaults.
    defaults = drafter_settings(name_of_drafter)
    specs = [spec for spec in specs if defaults | methods[spec].get("options", {}) == options]
    for key, value in (("draft", draft), ("dtype", dtype)):
        if len({methods[spec].get(key) for spec in specs}) > 1:
            specs = [spec for spec in specs if methods[spec].get(key) == value]
    result: dict[tuple[int, int | None], Acceptance] = {}
    for spec in specs:
        acceptance = _acceptance(spec, methods[spec], report["answers"], name)
        result.setdefault((acceptance.k, acceptance.tree), acceptance)
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
        rounds = None if by_round is None else tuple(tuple(map(int, lengths)) for lengths in by_round)
        acceptance = Acceptance(
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
    if problem := _impossible(acceptance):
        raise ValueError(f"{name}: method {spec!r} is damaged: {problem}")
    return acceptance


def _impossible(acceptance: Acceptance) -> str | None:
    """The inconsistency in the figures, if there is one."""
    if acceptance.k < 1 or not (acceptance.tree is None or acceptance.tree >= 1):
        return f"k={acceptance.k}, tree={acceptance.tree}"
    if not 1 <= acceptance.length <= acceptance.k + 1:
        return f"{acceptance.length} tokens per target pass with k={acceptance.k}"
    if len(acceptance.shares) > acceptance.k:  # fewer are possible: short answers end earlier
        return f"acceptance of {len(acceptance.shares)} positions with k={acceptance.k}"
    if not all(0 <= share <= 1 for share in acceptance.shares):
        return f"acceptance {', '.join(map(str, acceptance.shares))} is not from 0 to 1"
    if not all(1 <= tokens <= acceptance.k + 1 for rounds in acceptance.by_round or () for tokens in rounds):
        return f"rounds of other than 1 to {acceptance.k + 1} tokens"
    return None


def expected_tokens(shares: Iterable[float]) -> float:
    """Mean tokens of a row's round: the target's token, and each drafted token at the share of rounds that accept it.

    >>> expected_tokens([0.5, 0.25])
    1.75
    """
    return 1.0 + sum(shares)
