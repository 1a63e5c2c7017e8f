"""Does a server give the model's own answers? Judges what any OpenAI-compatible server says, whoever wrote it.

Every token of its greedy answers must be the reference's likeliest after the tokens before it, up to ties; how near
tokens must be to be a tie is measured, by how far the probabilities that the server tells are from the reference's.
Tokens that it samples must have the reference's distribution: the test of `uniformity.py`, whose false alarms are
bounded. The same test at another temperature is the control, which it must fail: where it does not, there were too few
tokens to show anything.
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
from paradraft.audit.server.draft_causes import Drafting
from paradraft.audit.server.endpoint import Served
from paradraft.audit.server.tables import PLACES, Reference, Table
from paradraft.audit.uniformity import Uniformity, places_of, uniformity
from paradraft.audit.verdict import FAIL, INCONCLUSIVE, PASS, TIES

CONTROL = 0.7
"""The control has this times the temperature."""
LEAST_TIE = 1e-4
"""Logarithms of probabilities that are this near are a tie anyhow: servers write few digits. What a server itself tells
of its tokens needs no more room: they are chosen by the same numbers."""
MOST_DIGITS, FEWEST_DIGITS = 4, 2
"""Servers may round what they tell to so many digits after the point; with fewer, a fault could hide in them."""
FEWEST = 0.5
"""The least share of the tokens of greedy answers that must be compared."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A place of a greedy answer where the reference prefers another token.

    Args:
        prompt: number of the prompt, from 1.
        position: number of the token, from 0.
        token: the server's.
        preferred: the reference's.
        margin: difference of the logarithms of their probabilities, by the reference.
        own_margin: how much likelier another token is by what the server itself tells.
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
    """What an audit of a server found.

    Args:
        verdict: as in `paradraft.audit.verdict`.
        reason: one sentence.
        answers: how many there were, greedy ones and sampled ones.
        tokens: how many they have.
        reference: whose probabilities they were compared with.
        preferences: where the greedy answers are not the reference's.
        difference: between the logarithms of probabilities that the server tells and the reference's; None if there
            was nothing to compare.
        places: at how many tokens they were compared.
        greedy_tokens: how many the greedy answers have.
        greedy_places: at how many of them the reference says which token it prefers.
        explained: what rounding explains of it, up to a limit.
        source: where that comes from.
        prompts: what is wrong with the prompts that the server has read; None if nothing is, or it does not say.
        uniformity: the test of the sampled tokens; None without these.
        control: the same test at another temperature, which it must fail.
        drafting: how it drafts, beside what the draft model drafts here; None if that was not asked.
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
    drafting: Drafting | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Read:
    """An answer with the ids that the model has read before it."""

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
    drafting: Drafting | None,
    report: Callable[[str], None],
) -> ServedReport:
    """Judges the answers of a server.

    Args:
        greedy: its greedy answers.
        sampled: those with chance; none tests no distribution.
        reference: what they are compared with.
        groups: tokens that the answers do not tell apart.
        temperature: of the sampled answers.
        prompts: what is wrong with the prompts that it has read.
        drafting: how it drafts.
        report: told what is going on.

    Raises:
        ValueError: the reference cannot be asked.
    """
    found = _Findings(groups)
    for number, read in enumerate(greedy, start=1):
        report(f"{reference.name}: greedy answer {number} of {len(greedy)}")
        found.add_greedy(read, _table(reference, read))
    places: list[Tensor] = []
    controls: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for number, read in enumerate(sampled, start=1):
        report(f"{reference.name}: sampled answer {number} of {len(sampled)}")
        table = _table(reference, read)
        if temperature == 1.0:  # at others some servers tell the probabilities before it, and some those after it
            found.add_difference(read.served, table)
        for begin in range(0, len(table.logprobs), PLACES):
            part, tokens = table.rows(begin, begin + PLACES), read.served.tokens[begin : begin + PLACES]
            for kept, share in ((places, 1.0), (controls, CONTROL)):
                scaled = part.at_temperature(temperature * share).merged(found.groups, summed=True)
                kept.append(places_of(scaled.logprobs.exp(), scaled.columns(tokens), generator))
    most = sum(read.served.question.max_new_tokens for read in sampled)
    tested = uniformity(torch.cat(places), most) if places else None
    control = uniformity(torch.cat(controls), most) if controls else None
    apart = found.difference
    digits = _digits(found.told)
    rounded = Difference(largest=0.0, root_mean_square=0.0) if digits is None else _of_digits(digits)
    explained = reference.explained.at_most(reference.limit).plus(rounded) if found.squares else None
    asked = len({read.served.question.number for read in greedy})
    preferences = found.judged(0.0 if explained is None else explained.largest)
    verdict, reason = (
        _fault_of_prompts(prompts)
        or _fault_of_probabilities(apart, reference, rounded)
        or _fault_of_tokens(preferences, asked, reference)
        or _fault_of_distribution(tested)
        or _fault_of_drafting(drafting)
        or _doubt(reference, control, temperature, found, digits)
        or _agreement(preferences, asked, tested, reference)
    )
    return ServedReport(
        verdict=verdict, reason=reason, answers=len(greedy) + len(sampled),
        tokens=sum(len(read.served.tokens) for read in (*greedy, *sampled)), reference=reference.name,
        preferences=preferences, difference=apart, places=len(found.squares),
        greedy_tokens=found.greedy_tokens, greedy_places=found.greedy_places, explained=explained,
        source=reference.source, prompts=prompts, uniformity=tested, control=control, drafting=drafting,
    )  # fmt: skip


def fits(read: Read, reference: Reference) -> bool:
    """Whether what a server tells of its answer is what the reference tells of it, up to rounding.

    Raises:
        ValueError: the reference cannot be asked.
    """
    found = _Findings(())
    found.add_difference(read.served, _table(reference, read))
    digits = _digits(found.told)
    explained = reference.explained if digits is None else reference.explained.plus(_of_digits(digits))
    return found.difference is None or found.difference.within(explained)


def _table(reference: Reference, read: Read) -> Table:
    try:
        return reference.table(read.prompt, read.served.tokens, read.served.logprobs)
    except NotNumbersError as error:
        raise ValueError(str(error)) from None


class _Findings:
    """What is seen of answers, one after the other.

    Args:
        groups: tokens that answers do not tell apart.
    """

    def __init__(self, groups: Sequence[Collection[int]]) -> None:
        self.groups = groups
        self.squares: list[float] = []
        """Of each difference between what the server and the reference say of a token."""
        self.told: list[float] = []
        """What the server tells of its tokens."""
        self.greedy_tokens = self.greedy_places = 0
        self._largest = 0.0
        self._preferences: list[tuple[int, int, int, int, float, float]] = []

    def add_greedy(self, read: Read, table: Table) -> None:
        """The places of a greedy answer where another token is likelier, and how far probabilities are apart."""
        self.add_difference(read.served, table)
        self.greedy_tokens += len(read.served.tokens)
        for begin in range(0, len(table.logprobs), PLACES):
            self._add_preferences(read.served, table.rows(begin, begin + PLACES), begin)

    def _add_preferences(self, served: Served, table: Table, begin: int) -> None:
        """Those of some of the places, from `begin` on."""
        merged = table.merged(self.groups, summed=False)
        columns_N = merged.columns(served.tokens[begin : begin + PLACES])
        told_NC = merged.logprobs[:, 1:] if merged.has_rest else merged.logprobs
        best_N, preferred_N = told_NC.max(1)
        own_N = merged.logprobs.gather(1, columns_N[:, None])[:, 0]
        if merged.has_rest:
            # What is not among the tokens that a server tells is at most as likely as the last of them.
            least_N = told_NC.masked_fill(told_NC == -math.inf, math.inf).amin(1)
            own_N = torch.where(columns_N == 0, least_N, own_N)
            preferred_N = preferred_N + 1
        margins_N = best_N - own_N
        self.greedy_places += int((best_N > -math.inf).sum())
        for index, margin in enumerate(margins_N.tolist()):
            place = begin + index
            own_margin = _own_margin(served, place)
            if margin > 0 or own_margin > 0:
                preferred = int(merged.ids[preferred_N[index]])
                entry = (served.question.number, place, served.tokens[place], preferred, margin, own_margin)
                self._preferences.append(entry)

    def add_difference(self, served: Served, table: Table) -> None:
        """How far what the server says of its tokens is from what the reference says."""
        columns_N = table.columns(served.tokens)
        theirs_N: Tensor = table.logprobs.gather(1, columns_N[:, None])[:, 0]
        for logprob, other, column in zip(served.logprobs, theirs_N.tolist(), columns_N.tolist(), strict=False):
            if logprob is None or (table.has_rest and column == 0):
                continue
            apart = abs(logprob - other) if math.isfinite(other) else math.inf
            self.told.append(logprob)
            self.squares.append(apart * apart)
            self._largest = max(self._largest, apart)

    @property
    def difference(self) -> Difference | None:
        """Over all tokens."""
        if not self.squares:
            return None
        mean = sum(self.squares) / len(self.squares)
        return Difference(largest=self._largest, root_mean_square=math.sqrt(mean))

    def judged(self, explained: float) -> list[Preference]:
        """All preferences; a tie is at most twice as far apart as the two sides are, for each token may be."""
        limit = max(2 * min(self._largest, explained), LEAST_TIE)
        return [
            Preference(
                prompt=prompt, position=position, token=token, preferred=preferred, margin=margin,
                own_margin=own_margin, is_tie=margin <= limit and own_margin <= LEAST_TIE,
            )
            for prompt, position, token, preferred, margin, own_margin in self._preferences
            if margin > 0 or own_margin > LEAST_TIE
        ]  # fmt: skip


def _own_margin(served: Served, place: int) -> float:
    logprob = served.logprobs[place]
    if logprob is None or not served.likeliest[place]:
        return 0.0
    return max(served.likeliest[place].values()) - logprob


def _fault_of_prompts(prompts: str | None) -> tuple[str, str] | None:
    return None if prompts is None else (FAIL, f"the server reads other prompts than were asked: {prompts}")


def _digits(told: Sequence[float]) -> int | None:
    """To how many digits after the point a server rounds what it tells; None for more than `MOST_DIGITS`.

    >>> _digits([-0.25, -1.5] * 8), _digits([-1 / 3] * 16)
    (2, None)
    """
    some = [logprob for logprob in told if logprob < -0.01]
    if len(some) < 2 * MOST_DIGITS:
        return None
    return next(
        (n for n in range(MOST_DIGITS + 1) if all(abs(logprob - round(logprob, n)) < 1e-6 for logprob in some)), None
    )


def _of_digits(digits: int) -> Difference:
    """What rounding to so many digits takes away."""
    unit = 10.0**-digits
    return Difference(largest=unit / 2, root_mean_square=unit / math.sqrt(12))


def _fault_of_probabilities(
    apart: Difference | None, reference: Reference, rounded: Difference
) -> tuple[str, str] | None:
    explained = reference.explained.plus(rounded)
    if apart is None or apart.within(explained):
        return None
    return FAIL, (
        f"the probabilities that the server tells are not those of {reference.name}: their logarithms differ by "
        f"{apart}, and rounding explains {explained}; is it the same model, in the same precision (--dtype)?"
    )


def _fault_of_tokens(preferences: Sequence[Preference], prompts: int, reference: Reference) -> tuple[str, str] | None:
    faults = [each for each in preferences if not each.is_tie]
    if not faults:
        return None
    margins = {
        reference.name: max(each.margin for each in faults),
        "the server itself, by what it tells,": max(each.own_margin for each in faults),
    }
    told = " and ".join(f"{who} prefers another by up to {most:.2g}" for who, most in margins.items() if most > 0)
    return FAIL, (
        f"{len({each.prompt for each in faults})} of {prompts} greedy answers hold tokens that are not the likeliest: "
        f"{told}, which rounding does not explain"
    )


def _fault_of_distribution(tested: Uniformity | None) -> tuple[str, str] | None:
    if tested is None or tested.is_uniform:
        return None
    return FAIL, (
        "greedy answers are the model's, sampled ones are not: their tokens do not have its distribution, so the "
        f"server samples otherwise than it was asked, or verifies wrongly where it samples; {tested.in_words}"
    )


def _fault_of_drafting(drafting: Drafting | None) -> tuple[str, str] | None:
    if drafting is None or drafting.cause is None:
        return None
    return FAIL, f"the texts are the model's, but the server does not draft as the draft does here: {drafting.cause}"


def _doubt(
    reference: Reference, control: Uniformity | None, temperature: float, found: _Findings, digits: int | None
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
    if found.greedy_places < FEWEST * found.greedy_tokens:
        return INCONCLUSIVE, (
            f"{reference.name} says of {found.greedy_places} of {found.greedy_tokens} greedy tokens what it prefers: "
            "it ends its answers there, and does not tell the token that ends them; compare with the target's weights"
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
