"""Compares recorded logits with the model's own code: they may be no farther from a finer pass than that code is.

Two correct passes differ by what each rounds away, so the difference between them bounds nothing: it is as large as the
coarser one makes it, and a fault hides in it. Each is therefore measured to a third, finer pass over the same text. The
model's own code makes two passes, one as it is and one with finer products; the distance of its coarser pass from its
finer one at a position is what the engine may have there, but for a small factor. Where the finer pass prefers a token
by more than twice what the coarser one rounds there, no correct pass prefers another.

A pass in C++ shows more: its logits are those of one pass over the whole text to the last bit, its exact mode
computes what the model's own code does in float32, and each of its products is right (`cpu/self_check.py`).

Shape letters: N tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paradraft.audit.recording import Case, NotNumbersError, Recording, are_numbers
from paradraft.audit.reference import (
    MEASURED,
    OTHER_DTYPE,
    TYPICAL_FACTOR,
    Difference,
    can_compute_otherwise,
    difference,
    explained_by,
    limit_of,
    over_all,
    own_logits,
    rounded_to,
)
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.self_check import TOKENS, Figures, allowance, over_texts, readings_of

LEAST = 1e-7
"""A distance, in standard deviations of the logits, that is never too large."""
SURE = 2.0
"""Times the coarser pass's largest rounding at a position: the margin from which the finer pass is sure of a token."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds on the distance of logits from the finer pass, over that of the coarser pass.

    Args:
        mean: bound on the geometric mean over very many positions.
        at_a_place: bound at each position.
    """

    mean: float
    at_a_place: float

    def over(self, positions: int) -> float:
        """The bound on the mean over some positions, wider for few of them to avoid false alarms.

        >>> round(ROUNDED.over(512), 2), round(ROUNDED.over(16), 2)
        (1.43, 2.65)
        """
        return self.mean * allowance(positions)


ROUNDED = Tolerance(mean=1.25, at_a_place=40.0)
"""In 16 bits and fewer, where means of correct passes were at most 1.1, and single positions at most 4.9."""
IN_FLOATS = Tolerance(mean=8.0, at_a_place=50.0)
"""Where only float32 arithmetic is rounded. Single positions of correct passes were at most 14, and any fault is
far larger."""


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """Distance of one side's logits from those of the finer pass.

    Args:
        measured: positions that were compared with the coarser pass too.
        mean: geometric mean of each position's distance over that of the coarser pass, the larger one of root mean
            squares and largest differences; None without a coarser pass.
        worst: the same ratio at the worst position.
        sure: positions at which the finer pass is sure of a token.
        overturned: those of them at which another token has the largest logit.
        other_bits: positions at which logits are not those of one pass in C++ over the whole text.
    """

    distance: Difference
    measured: int
    mean: float | None
    worst: float | None
    sure: int
    overturned: int
    other_bits: int


@dataclass(frozen=True, kw_only=True)
class OwnPass:
    """Recorded logits compared with those of the model's own code.

    Args:
        places: positions of each side.
        plain: of plain decoding; None where it was not run.
        rounding: distance of the coarser pass from the finer one; None where there is only one pass.
        most: bounds on the ratio of a side's distance to that of the coarser pass.
        explained: the difference that rounding explains: a multiple of `rounding`, or `limit` without one.
        limit: largest distance from the finer pass, however large rounding is.
    """

    dtype: str
    places: int
    plain: Nearness | None
    drafted: Nearness
    rounding: Difference | None
    most: Tolerance
    explained: Difference
    limit: Difference
    pass_in_cpp: Figures | None

    def fault(self, side: Nearness) -> str | None:
        """The fault of the logits of a side; None if there is none."""
        if side.other_bits:
            return (
                f"at {side.other_bits} of {self.places} places its logits are not those of one pass in C++ over the "
                "same text"
            )
        if self.pass_in_cpp is not None and not self.pass_in_cpp.is_right:
            return f"the pass in C++ does not compute what the model's own code does: {self.pass_in_cpp}"
        if side.mean is None or side.worst is None:
            is_far = not side.distance.within(self.limit)
            return f"its logits differ by {side.distance}, at most {self.limit} is allowed" if is_far else None
        if side.mean > self.most.over(side.measured) or side.worst > self.most.at_a_place:
            return f"its logits are {self.in_words(side)}"
        if not side.distance.within(self.explained):
            return f"its logits differ by {side.distance} from a finer pass, and rounding explains {self.explained}"
        if side.overturned:
            return (
                f"at {side.overturned} of {side.sure} places at which a finer pass is sure of a token, another one has "
                "the largest logit"
            )
        return None

    def in_words(self, side: Nearness) -> str:
        """Figures of a side, as a clause."""
        if side.mean is None:
            return f"{side.distance} from the model's own pass"
        return (
            f"{side.mean:.2g} times as far from a finer pass as the model's own code is in {self.dtype}, "
            f"{side.worst:.2g} times at one place (at most {self.most.over(side.measured):.2g} and "
            f"{self.most.at_a_place:g})"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        sides = {"plain": self.plain, "drafted": self.drafted}
        differences = {"rounding": self.rounding, "limit": self.limit}
        return (
            {"dtype": self.dtype, "places": self.places, "most": vars(self.most)}
            | {
                name: None if side is None else vars(side) | {"distance": vars(side.distance)}
                for name, side in sides.items()
            }
            | {name: None if value is None else vars(value) for name, value in differences.items()}
            | {"pass_in_cpp": None if self.pass_in_cpp is None else vars(self.pass_in_cpp)}
        )


@dataclass(frozen=True, kw_only=True)
class _Read:
    """Logits `[N, V]` of the tokens of an answer, by the reference passes.

    Args:
        finer: by the finer of two passes of the model's own code, or by the only one; None beyond `MEASURED` texts.
        coarser: by the other.
        in_cpp: by one pass in C++, if there is one.
    """

    finer: Tensor | None
    coarser: Tensor | None
    in_cpp: Tensor | None = None
    figures: Figures | None = None


@dataclass
class _Tally:
    """Sums over the answers of a side."""

    differences: list[Difference] = field(default_factory=list)
    ratios: list[Tensor] = field(default_factory=list)
    sure: int = 0
    overturned: int = 0
    other_bits: int = 0

    def add(self, logits_NV: Tensor, read: _Read) -> None:
        if read.in_cpp is not None:
            self.other_bits += int((logits_NV != read.in_cpp).any(1).sum())
        if read.finer is None:
            return
        self.differences.append(difference(logits_NV, read.finer))
        if read.coarser is None:
            return
        ours_2N, rounding_2N = _distances(logits_NV, read.finer), _distances(read.coarser, read.finer)
        self.ratios.append(ours_2N / rounding_2N)
        best_N2 = read.finer.double().topk(2, dim=1).values
        is_sure_N = best_N2[:, 0] - best_N2[:, 1] > SURE * rounding_2N[1]
        self.sure += int(is_sure_N.sum())
        self.overturned += int((is_sure_N & (logits_NV.argmax(1) != read.finer.argmax(1))).sum())

    def nearness(self) -> Nearness:
        ratios_2N = None
        if self.ratios:
            ratios_2N = torch.cat(self.ratios, dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        return Nearness(
            distance=over_all(self.differences),
            measured=0 if ratios_2N is None else ratios_2N.shape[1],
            mean=None if ratios_2N is None else float(ratios_2N.log().mean(1).exp().max()),
            worst=None if ratios_2N is None else float(ratios_2N.max()),
            sure=self.sure,
            overturned=self.overturned,
            other_bits=self.other_bits,
        )


def _distances(a_NV: Tensor, finer_NV: Tensor) -> Tensor:
    """`[2, N]` root mean squares and largest absolute values of differences, none smaller than `LEAST`."""
    differences_NV = torch.where(a_NV == finer_NV, 0.0, (a_NV.double() - finer_NV.double()).abs()).nan_to_num(
        nan=torch.inf
    )
    finite_NV = torch.where(finer_NV.isfinite(), finer_NV.double(), torch.nan)
    least_N = LEAST * (finite_NV - finite_NV.nanmean(1, keepdim=True)).square().nanmean(1).sqrt()
    least_N = least_N.clamp(min=torch.finfo(torch.float32).tiny)  # 0 if all are the same
    return torch.stack([differences_NV.square().mean(1).sqrt(), differences_NV.amax(1)]).maximum(least_N)


def own_pass(
    lm: CausalLM,
    cases: list[Case],
    drafted: list[Recording],
    plain: list[Recording] | None,
    report: Callable[[str], None],
) -> OwnPass:
    """Compares recorded logits with the model's own.

    Args:
        plain: by plain decoding; None if it was not run.

    Raises:
        NotNumbersError: the model's own logits are not numbers.
    """
    tallies = {"drafted": _Tally(), "plain": _Tally()}
    sides = {"drafted": drafted} | ({} if plain is None else {"plain": plain})
    rounding, variances, figures, measured = list[Difference](), list[float](), list[Figures](), 0
    for index, case in enumerate(cases):
        report(f"the model's own pass: answer {index + 1} of {len(cases)}")
        reads: dict[tuple[int, ...], _Read] = {}
        for name, answers in sides.items():
            answer = answers[index]
            text = tuple(answer.tokens)
            if text not in reads:
                reads[text] = _read(lm, case, answer, is_measured=index < MEASURED)
            tallies[name].add(answer.logits, reads[text])
        for read in reads.values():
            figures += [] if read.figures is None else [read.figures]
            if read.finer is not None:
                variances.append(float(read.finer[read.finer.isfinite()].double().var()))
            if read.finer is not None and read.coarser is not None:
                rounding.append(difference(read.coarser, read.finer))
                measured += len(read.finer)
    limit = limit_of(lm, variances)
    explained = limit
    if rounding:
        factor = max(ROUNDED.over(measured) / TYPICAL_FACTOR, 1.0)  # few positions may have little rounding by chance
        explained = explained_by(lm, rounding).times(factor, factor)
    return OwnPass(
        dtype=str(lm.model.dtype).removeprefix("torch."),
        places=sum(len(answer.tokens) for answer in drafted),
        plain=None if plain is None else tallies["plain"].nearness(),
        drafted=tallies["drafted"].nearness(),
        rounding=over_all(rounding) if rounding else None,
        most=ROUNDED if rounded_to(lm).itemsize == 2 else IN_FLOATS,
        explained=explained,
        limit=limit,
        pass_in_cpp=over_texts(figures) if figures else None,
    )


def _read(lm: CausalLM, case: Case, answer: Recording, *, is_measured: bool) -> _Read:
    """Reads an answer by the model's own code; where passes are in C++, only `MEASURED` answers."""
    if lm.native is not None:
        return _read_in_cpp(lm, case, answer, is_measured=is_measured)
    own_NV = own_logits(lm, case, answer)
    if not can_compute_otherwise(lm):
        return _Read(finer=own_NV, coarser=None)
    dtype = OTHER_DTYPE[lm.model.dtype]
    other_NV = own_logits(lm, case, answer, dtype=dtype)
    if lm.model.dtype == torch.float64:
        return _Read(finer=own_NV, coarser=other_NV)
    return _Read(finer=other_NV, coarser=own_NV)


@torch.no_grad()
def _read_in_cpp(lm: CausalLM, case: Case, answer: Recording, *, is_measured: bool) -> _Read:
    assert lm.native is not None
    text_N = torch.tensor([*case.prompt, *answer.tokens[:-1]])
    positions_N = torch.arange(len(text_N))
    all_NV, of_answer = lm.native.logits_at(text_N, positions_N), slice(-len(answer.tokens), None)
    in_cpp_NV = all_NV[of_answer]
    if not is_measured:
        return _Read(finer=None, coarser=None, in_cpp=lm.allowed(in_cpp_NV))
    # One position says little about rounding: tokens of the prompt count where the answer has few.
    last_NV = all_NV[-max(len(answer.tokens), TOKENS) :]
    readings = readings_of(lm.model, lm.native, text_N, positions_N, last_NV)
    figures = readings.figures(last_NV)
    finer_NV = lm.allowed(readings.floats[of_answer])
    if not bool((is_finite_N := are_numbers(finer_NV)).all()):
        raise NotNumbersError(case, int(is_finite_N.int().argmin()), "in the model's own pass")
    coarser_NV = (readings.moved[0] if readings.rounded is None else readings.rounded)[of_answer]
    return _Read(finer=finer_NV, coarser=lm.allowed(coarser_NV), in_cpp=lm.allowed(in_cpp_NV), figures=figures)
