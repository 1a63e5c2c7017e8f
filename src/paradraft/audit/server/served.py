"""Judges whether a server gives the model's own answers.

Every token of its greedy answers must be the reference's likeliest after the tokens before it, up to ties; the width of
a tie is measured by the distance of the server's log-probabilities from the reference's. Tokens that it samples must
have the reference's distribution: the test of `uniformity.py`, whose false alarms are bounded. The same test at another
temperature is the control, which it must fail: where it does not, there were too few tokens to show anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paradraft.audit.recording import NotNumbersError
from paradraft.audit.reference import Difference
from paradraft.audit.server.draft_causes import DraftComparison
from paradraft.audit.server.findings import Findings, Preference, Read, digits_of, error_of_digits
from paradraft.audit.server.tables import POSITIONS, Reference, Table
from paradraft.audit.uniformity import Uniformity, pit_values, uniformity
from paradraft.audit.verdict import FAIL, INCONCLUSIVE, PASS, TIES

CONTROL = 0.7
"""Factor on the temperature for the control."""
FEWEST_DIGITS = 2
"""Digits after the point of log-probabilities; with fewer, a fault could hide."""
FEWEST = 0.5
"""Least share of the tokens of greedy answers that must be compared."""


@dataclass(frozen=True, kw_only=True)
class ServedReport:
    """The result of an audit of a server.

    Args:
        preferences: positions at which greedy answers are not the reference's.
        difference: of the server's log-probabilities from the reference's; None if there was nothing to compare.
        places: tokens at which they were compared.
        greedy_places: those of them at which the reference gives its preferred token.
        explained: the difference that rounding explains, up to a limit.
        prompts: the fault of the prompts that the server has read; None if there is none, or it does not say.
        uniformity: the test of the sampled tokens; None without these.
        control: the same test at another temperature, which it must fail.
        drafting: comparison with the draft model here; None if there was none.
    """

    verdict: str
    reason: str
    answers: int
    tokens: int
    reference: str
    preferences: list[Preference]
    difference: Difference | None
    places: int
    greedy_tokens: int
    greedy_places: int
    explained: Difference | None
    source: str
    prompts: str | None
    uniformity: Uniformity | None
    control: Uniformity | None
    drafting: DraftComparison | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def judge(
    greedy: Sequence[Read],
    sampled: Sequence[Read],
    reference: Reference,
    *,
    groups: Sequence[Collection[int]],
    temperature: float,
    prompts: str | None,
    drafting: DraftComparison | None,
    report: Callable[[str], None],
) -> ServedReport:
    """Judges the answers of a server.

    Args:
        sampled: empty tests no distribution.
        groups: tokens that the answers do not tell apart.
        prompts: the fault of the prompts that it has read; None if there is none.

    Raises:
        ValueError: the reference does not answer.
    """
    findings = Findings(groups)
    for index, read in enumerate(greedy, start=1):
        report(f"{reference.name}: greedy answer {index} of {len(greedy)}")
        findings.add_greedy(read, _table(reference, read))
    tested, control = _distribution(sampled, reference, findings, temperature, report)
    difference = findings.difference
    digits = digits_of(findings.logprobs)
    rounded = Difference(largest=0.0, root_mean_square=0.0) if digits is None else error_of_digits(digits)
    explained = reference.explained.at_most(reference.limit).plus(rounded) if findings.squares else None
    num_prompts = len({read.served.question.number for read in greedy})
    preferences = findings.judged(0.0 if explained is None else explained.largest)
    verdict, reason = (
        _fault_of_prompts(prompts)
        or _fault_of_probabilities(difference, reference, rounded)
        or _fault_of_tokens(preferences, num_prompts, reference)
        or _fault_of_distribution(tested)
        or _fault_of_drafting(drafting)
        or _doubt(reference, control, temperature, findings, digits)
        or _agreement(preferences, num_prompts, tested, reference)
    )
    return ServedReport(
        verdict=verdict, reason=reason, answers=len(greedy) + len(sampled),
        tokens=sum(len(read.served.tokens) for read in (*greedy, *sampled)), reference=reference.name,
        preferences=preferences, difference=difference, places=len(findings.squares),
        greedy_tokens=findings.greedy_tokens, greedy_places=findings.greedy_places, explained=explained,
        source=reference.source, prompts=prompts, uniformity=tested, control=control, drafting=drafting,
    )  # fmt: skip


def _distribution(
    sampled: Sequence[Read],
    reference: Reference,
    findings: Findings,
    temperature: float,
    report: Callable[[str], None],
) -> tuple[Uniformity | None, Uniformity | None]:
    """Tests the distribution of sampled tokens, and a control that must fail; None without samples."""
    values: list[Tensor] = []
    controls: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for index, read in enumerate(sampled, start=1):
        report(f"{reference.name}: sampled answer {index} of {len(sampled)}")
        table = _table(reference, read)
        if temperature == 1.0:  # at others some servers give the probabilities before it, and some those after it
            findings.add_difference(read.served, table)
        for begin in range(0, len(table.logprobs), POSITIONS):
            part, tokens = table.rows(begin, begin + POSITIONS), read.served.tokens[begin : begin + POSITIONS]
            for kept, share in ((values, 1.0), (controls, CONTROL)):
                scaled = part.at_temperature(temperature * share).merged(findings.groups, summed=True)
                kept.append(pit_values(scaled.logprobs.exp(), scaled.columns(tokens), generator))
    if not values:
        return None, None
    most = sum(read.served.question.max_new_tokens for read in sampled)
    return uniformity(torch.cat(values), most), uniformity(torch.cat(controls), most)


def fits(read: Read, reference: Reference) -> bool:
    """Whether the server's log-probabilities of its answer are the reference's, up to rounding."""
    findings = Findings(())
    findings.add_difference(read.served, _table(reference, read))
    digits = digits_of(findings.logprobs)
    explained = reference.explained if digits is None else reference.explained.plus(error_of_digits(digits))
    return findings.difference is None or findings.difference.within(explained)


def _table(reference: Reference, read: Read) -> Table:
    try:
        return reference.table(read.prompt, read.served.tokens, read.served.logprobs)
    except NotNumbersError as error:
        raise ValueError(str(error)) from None


def _fault_of_prompts(prompts: str | None) -> tuple[str, str] | None:
    return None if prompts is None else (FAIL, f"the server reads other prompts than were asked: {prompts}")


def _fault_of_probabilities(
    difference: Difference | None, reference: Reference, rounded: Difference
) -> tuple[str, str] | None:
    explained = reference.explained.plus(rounded)
    if difference is None or difference.within(explained):
        return None
    return FAIL, (
        f"the probabilities that the server tells are not those of {reference.name}: their logarithms differ by "
        f"{difference}, and rounding explains {explained}; is it the same model, in the same precision (--dtype)?"
    )


def _fault_of_tokens(preferences: Sequence[Preference], prompts: int, reference: Reference) -> tuple[str, str] | None:
    faults = [each for each in preferences if not each.is_tie]
    if not faults:
        return None
    margins = {
        reference.name: max(each.margin for each in faults),
        "the server itself, by what it tells,": max(each.own_margin for each in faults),
    }
    margin = " and ".join(f"{who} prefers another by up to {most:.2g}" for who, most in margins.items() if most > 0)
    return FAIL, (
        f"{len({each.prompt for each in faults})} of {prompts} greedy answers hold tokens that are not the likeliest: "
        f"{margin}, which rounding does not explain"
    )


def _fault_of_distribution(tested: Uniformity | None) -> tuple[str, str] | None:
    if tested is None or tested.is_uniform:
        return None
    return FAIL, (
        "greedy answers are the model's, sampled ones are not: their tokens do not have its distribution, so the "
        f"server samples otherwise than it was asked, or verifies wrongly where it samples; {tested.in_words}"
    )


def _fault_of_drafting(drafting: DraftComparison | None) -> tuple[str, str] | None:
    if drafting is None or drafting.cause is None:
        return None
    return FAIL, f"the texts are the model's, but the server does not draft as the draft does here: {drafting.cause}"


def _doubt(
    reference: Reference, control: Uniformity | None, temperature: float, findings: Findings, digits: int | None
) -> tuple[str, str] | None:
    if not reference.explained.within(reference.limit):
        return INCONCLUSIVE, (
            f"rounding explains a difference of {reference.explained}, in which a fault could hide (at most "
            f"{reference.limit} is allowed): compare in a finer dtype"
        )
    if digits is not None and digits < FEWEST_DIGITS:
        return (
            INCONCLUSIVE,
            f"the server tells logprobs to {digits} digits after the point, in which a fault could hide",
        )
    if findings.greedy_places < FEWEST * findings.greedy_tokens:
        return INCONCLUSIVE, (
            f"{reference.name} says of {findings.greedy_places} of {findings.greedy_tokens} greedy tokens what it "
            "prefers: it ends its answers there, and does not tell the token that ends them; compare with the target's "
            "weights"
        )
    if control is not None and control.is_uniform:
        return INCONCLUSIVE, (
            f"the test of the distribution would not notice a temperature of {temperature * CONTROL:.2g} either: ask "
            "for more samples or tokens"
        )
    return None


def _agreement(
    preferences: Sequence[Preference], prompts: int, tested: Uniformity | None, reference: Reference
) -> tuple[str, str]:
    sampled = "" if tested is None else f", and sampled ones have its distribution: {tested.in_words}"
    if not preferences:
        return PASS, f"every greedy token is the likeliest of {reference.name}{sampled}"
    parted = len({each.prompt for each in preferences})
    return TIES, (
        f"greedy tokens are the likeliest of {reference.name}, in {parted} of {prompts} answers up to near-ties"
        + sampled
    )
