"""Judges whether a server gives the model's own answers.

Every token of its greedy answers must be the reference's likeliest after the tokens before it, up to ties; the width of
a tie is measured by the distance of the server's log-probabilities from the reference's. Tokens that it samples must
have the reference's distribution: the test of `uniformity.py`, whose false alarms are bounded. The same test at another
temperature is the control, which it must fail: where it does not, there were too few tokens to show anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paradraft.audit.recording import NotNumbersError
from paradraft.audit.reference import Difference
from paradraft.audit.server.draft_causes import DraftComparison
from paradraft.audit.server.endpoint import Served
from paradraft.audit.server.tables import POSITIONS, Reference, Table
from paradraft.audit.uniformity import Uniformity, pit_values, uniformity
from paradraft.audit.verdict import FAIL, INCONCLUSIVE, PASS, TIES

CONTROL = 0.7
"""Factor on the temperature for the control."""
LEAST_TIE = 1e-4
"""Log-probabilities this near are always a tie, because servers write few digits. A server's own log-probabilities need
no wider tie: its tokens are chosen by the same numbers."""
MOST_DIGITS, FEWEST_DIGITS = 4, 2
"""Digits after the point to which servers may round log-probabilities; with fewer, a fault could hide."""
FEWEST = 0.5
"""Least share of the tokens of greedy answers that must be compared."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A token of a greedy answer where the reference prefers another.

    Args:
        prompt: counted from 1.
        position: index of the token, from 0.
        margin: difference of their log-probabilities, by the reference.
        own_margin: the same for the likeliest token, by the server itself.
        is_tie: whether rounding explains it.
    """

    prompt: int
    position: int
    token: int
    preferred: int
    margin: float
    own_margin: float
    is_tie: bool


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


@dataclass(frozen=True, kw_only=True)
class Read:
    """An answer with the ids of the prompt that the model has read."""

    served: Served
    prompt: list[int]


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
    findings = _Findings(groups)
    for index, read in enumerate(greedy, start=1):
        report(f"{reference.name}: greedy answer {index} of {len(greedy)}")
        findings.add_greedy(read, _table(reference, read))
    tested, control = _distribution(sampled, reference, findings, temperature, report)
    difference = findings.difference
    digits = _digits(findings.logprobs)
    rounded = Difference(largest=0.0, root_mean_square=0.0) if digits is None else _of_digits(digits)
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
    findings: _Findings,
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
    findings = _Findings(())
    findings.add_difference(read.served, _table(reference, read))
    digits = _digits(findings.logprobs)
    explained = reference.explained if digits is None else reference.explained.plus(_of_digits(digits))
    return findings.difference is None or findings.difference.within(explained)


def _table(reference: Reference, read: Read) -> Table:
    try:
        return reference.table(read.prompt, read.served.tokens, read.served.logprobs)
    except NotNumbersError as error:
        raise ValueError(str(error)) from None


class _Findings:
    """Collects differences from the reference, answer by answer; `groups` are tokens that answers do not tell apart."""

    def __init__(self, groups: Sequence[Collection[int]]) -> None:
        self.groups = groups
        self.squares: list[float] = []
        """Squares of the differences between the log-probabilities of the server and the reference."""
        self.logprobs: list[float] = []
        """The server's own of its tokens."""
        self.greedy_tokens = self.greedy_places = 0
        self._largest = 0.0
        self._preferences: list[tuple[int, int, int, int, float, float]] = []

    def add_greedy(self, read: Read, table: Table) -> None:
        """Adds a greedy answer: tokens where another is likelier, and differences of log-probabilities."""
        self.add_difference(read.served, table)
        self.greedy_tokens += len(read.served.tokens)
        for begin in range(0, len(table.logprobs), POSITIONS):
            self._add_preferences(read.served, table.rows(begin, begin + POSITIONS), begin)

    def _add_preferences(self, served: Served, table: Table, begin: int) -> None:
        merged = table.merged(self.groups, summed=False)
        columns_N = merged.columns(served.tokens[begin : begin + POSITIONS])
        known_NC = merged.logprobs[:, 1:] if merged.has_rest else merged.logprobs
        best_N, preferred_N = known_NC.max(1)
        own_N = merged.logprobs.gather(1, columns_N[:, None])[:, 0]
        if merged.has_rest:
            # A token not among those of a server is at most as likely as the last of them.
            least_N = known_NC.masked_fill(known_NC == -math.inf, math.inf).amin(1)
            own_N = torch.where(columns_N == 0, least_N, own_N)
            preferred_N = preferred_N + 1
        margins_N = best_N - own_N
        self.greedy_places += int((best_N > -math.inf).sum())
        for index, margin in enumerate(margins_N.tolist()):
            position = begin + index
            own_margin = _own_margin(served, position)
            if margin > 0 or own_margin > 0:
                preferred = int(merged.ids[preferred_N[index]])
                entry = (served.question.number, position, served.tokens[position], preferred, margin, own_margin)
                self._preferences.append(entry)

    def add_difference(self, served: Served, table: Table) -> None:
        """Adds the differences between the log-probabilities of the server and the reference."""
        columns_N = table.columns(served.tokens)
        reference_N: Tensor = table.logprobs.gather(1, columns_N[:, None])[:, 0]
        for logprob, expected, column in zip(served.logprobs, reference_N.tolist(), columns_N.tolist(), strict=False):
            if logprob is None or (table.has_rest and column == 0):
                continue
            difference = abs(logprob - expected) if math.isfinite(expected) else math.inf
            self.logprobs.append(logprob)
            self.squares.append(difference * difference)
            self._largest = max(self._largest, difference)

    @property
    def difference(self) -> Difference | None:
        """Over all tokens."""
        if not self.squares:
            return None
        mean = sum(self.squares) / len(self.squares)
        return Difference(largest=self._largest, root_mean_square=math.sqrt(mean))

    def judged(self, explained: float) -> list[Preference]:
        """All preferences; a tie is at most twice as wide as the two sides differ, because each token may be off."""
        limit = max(2 * min(self._largest, explained), LEAST_TIE)
        return [
            Preference(
                prompt=prompt, position=position, token=token, preferred=preferred, margin=margin,
                own_margin=own_margin, is_tie=margin <= limit and own_margin <= LEAST_TIE,
            )
            for prompt, position, token, preferred, margin, own_margin in self._preferences
            if margin > 0 or own_margin > LEAST_TIE
        ]  # fmt: skip


def _own_margin(served: Served, position: int) -> float:
    logprob = served.logprobs[position]
    if logprob is None or not served.likeliest[position]:
        return 0.0
    return max(served.likeliest[position].values()) - logprob


def _fault_of_prompts(prompts: str | None) -> tuple[str, str] | None:
    return None if prompts is None else (FAIL, f"the server reads other prompts than were asked: {prompts}")


def _digits(logprobs: Sequence[float]) -> int | None:
    """The digits after the point to which a server rounds log-probabilities; None for more than `MOST_DIGITS`.

    >>> _digits([-0.25, -1.5] * 8), _digits([-1 / 3] * 16)
    (2, None)
    """
    some = [logprob for logprob in logprobs if logprob < -0.01]
    if len(some) < 2 * MOST_DIGITS:
        return None
    return next(
        (n for n in range(MOST_DIGITS + 1) if all(abs(logprob - round(logprob, n)) < 1e-6 for logprob in some)), None
    )


def _of_digits(digits: int) -> Difference:
    """Error of rounding to this many digits after the point."""
    unit = 10.0**-digits
    return Difference(largest=unit / 2, root_mean_square=unit / math.sqrt(12))


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
    reference: Reference, control: Uniformity | None, temperature: float, findings: _Findings, digits: int | None
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
