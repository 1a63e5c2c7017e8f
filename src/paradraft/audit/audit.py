"""Audits whether a target with this drafter is lossless on this machine: compares, measures, explains.

With the match rule the tokens must be those of plain decoding, but for near-ties (`divergence.py`). With the
rejection rule only their distribution must be the same, which a test decides (`uniformity.py`). With both rules all
logits must be those of the model's own pass, but for rounding (`reference.py`). A wrong rule serves as the control
that a test of losslessness must catch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from paradraft.audit.divergence import Comparison, Divergence, compare, rounding_of
from paradraft.audit.own_pass import OwnPass, own_pass
from paradraft.audit.recording import Case, NotNumbersError, Recording, RecordingTarget, record
from paradraft.audit.reference import MEASURED, own_logits
from paradraft.audit.uniformity import Uniformity, accept_all, pit_of_answer, uniformity
from paradraft.audit.verdict import FAIL, INCONCLUSIVE, PASS, TIES
from paradraft.core import Request
from paradraft.decode.batch import Batch
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.stats import Stats, added
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.request import requests_of
from paradraft.sampling_params import Sampling
from paradraft.verify import rule_class
from paradraft.wording import number_of


def findings(report: Report, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A report as lines of text."""
    lines = [
        f"{report.verdict}: {report.reason}",
        f"  {number_of(report.answers, 'answer')}, {number_of(report.tokens, 'token')}, "
        f"acceptance length {report.acceptance_length:.2f}",
    ]
    if (own := report.own_pass) is not None:
        sides = {"in plain decoding": own.plain, "with the drafter": own.drafted}
        lines += [f"  {name}, logits are {own.in_words(side)}" for name, side in sides.items() if side is not None]
        lines.append(
            f"  at {own.drafted.sure} places a finer pass is sure of a token: another one has the largest logit at "
            f"{own.drafted.overturned}"
        )
        if own.pass_in_cpp is not None:
            lines.append(f"  the pass in C++: {own.pass_in_cpp}")
    if report.uniformity is not None and report.control is not None:
        caught = "was not caught" if report.control.is_uniform else "was caught"
        lines.append(f"  control, a rule that takes every drafted token: {caught}; {report.control.in_words}")
        return lines
    if not report.positions:
        return lines
    share = report.bitwise_equal / report.positions
    lines.append(
        f"  logits of {number_of(report.positions, 'place')} compared: {share:.0%} equal to the last bit, largest "
        f"difference {report.largest_difference:.2g}; passes of one and of several tokens differ by "
        f"{report.rounding:.2g}"
    )
    for split in report.divergences:
        plain, drafted = (tokenizer.decode([token]) for token in (split.plain, split.drafted))
        lines.append(
            f"  prompt {split.prompt}, seed {split.seed}, new token {split.position}: {plain!r} without, {drafted!r} "
            f"with the drafter; margin {split.margin:.2g}, logits differ by {split.difference:.2g}: "
            + ("a near-tie" if split.is_tie else "NOT explained by rounding")
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of an audit.

    Args:
        verdict: `PASS`, `TIES`, `FAIL`, or `INCONCLUSIVE`: too little was compared to show anything, or rounding is so
            large that a fault could hide in it.
        acceptance_length: emitted tokens per target pass.
        divergences: with the match rule, the answers that differ from plain decoding.
        rounding: largest difference of logits between passes of one token and of several.
        positions: those where both sides read the same text.
        bitwise_equal: positions at which all logits were equal to the last bit.
        largest_difference: of the logits at these positions.
        own_pass: comparison with the logits of the model's own pass; None if there was nothing to compare.
        uniformity: with the rejection rule, the test of the distribution.
        control: the same test of a rule that is known to be wrong; it must fail.
    """

    verdict: str
    reason: str
    answers: int
    tokens: int
    acceptance_length: float
    divergences: list[Divergence]
    rounding: float | None
    positions: int
    bitwise_equal: int
    largest_difference: float
    own_pass: OwnPass | None
    uniformity: Uniformity | None
    control: Uniformity | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"own_pass": None if self.own_pass is None else self.own_pass.as_json()}


def check_may_be_lossless(rule: str) -> None:
    """Raises ValueError if a verification rule is lossy by design."""
    if (warning := rule_class(rule).warning) is not None:
        raise ValueError(f"verify={rule!r}: {warning}, so there is nothing to audit: use match or rejection")


def audit(
    engine: Engine,
    prompts: list[str],
    *,
    sampling: Sampling,
    seeds: int,
    max_new_tokens: int,
    batch_size: int,
    report: Callable[[str], None],
) -> Report:
    """Audits an engine.

    Args:
        sampling: its seed is that of the first answer; each answer has the next.
        seeds: answers per prompt; greedy answers are all the same, so then it is 1.
        max_new_tokens: tokens of an answer; end-of-sequence tokens do not end it.
        batch_size: prompts answered together with the drafter; plain decoding takes them one at a time.

    Raises:
        ValueError: a prompt does not fit into the model, or an argument is out of range.
    """
    if seeds < 1 or batch_size < 1:
        raise ValueError(f"seeds={seeds}, batch_size={batch_size}: use at least 1")
    requests = requests_of(engine.target, prompts, max_new_tokens, sampling)
    # Every answer has another seed: answers of one seed share their random numbers where positions are the same.
    cases = [
        Case(
            number=index % len(requests) + 1,
            prompt=request.tokens,
            sampling=replace(sampling, seed=sampling.seed + index),
        )
        for index, request in enumerate(requests * (1 if sampling.is_greedy else seeds))
    ]
    check_may_be_lossless(engine.speculation.verify)
    tests_distribution = not rule_class(engine.speculation.verify).same_tokens and not sampling.is_greedy
    has_drafter = not isinstance(engine.drafter, NoDrafter)
    if tests_distribution and not has_drafter:
        raise ValueError("drafter 'none' drafts nothing that could be rejected: audit it with verify='match'")
    answering = _Answering(engine, cases, max_new_tokens, report)
    figures: dict[str, Any] = {"answers": len(cases), "tokens": 0, "acceptance_length": 0.0}
    counts: list[Stats] = []
    try:
        drafted = answering.with_drafter(batch_size, counts)
        figures["tokens"] = sum(len(answer.tokens) for answer in drafted)
        rounds = sum(stats.rounds for stats in counts)
        figures["acceptance_length"] = sum(stats.tokens for stats in counts) / max(rounds, 1)
        if tests_distribution:
            judged = _judge_distribution(answering, drafted, batch_size, figures)
        else:
            judged = _judge_tokens(answering, drafted, batch_size, figures)
    except NotNumbersError as error:
        return _report(FAIL, str(error), figures)
    if has_drafter and judged.verdict in (PASS, TIES) and (reason := _why_inconclusive(added(counts))) is not None:
        return replace(judged, verdict=INCONCLUSIVE, reason=reason)
    return judged


def _why_inconclusive(stats: Stats) -> str | None:
    """The reason why correct answers prove nothing; None if they do."""
    if not stats.nodes:
        return "nothing was drafted, so this shows nothing: use more prompts or tokens, and fixed lengths"
    if not sum(stats.accepted):
        return (
            f"none of {stats.nodes} drafted tokens was accepted, so this shows nothing of accepted ones: use more "
            "prompts or tokens, or a drafter that fits the target"
        )
    return None


@dataclass(frozen=True)
class _Answering:
    """Answers the cases of an audit: with the drafter, plainly, and by a wrong rule."""

    engine: Engine
    cases: list[Case]
    max_new_tokens: int
    report: Callable[[str], None]

    def with_drafter(self, batch_size: int, counts: list[Stats]) -> list[Recording]:
        """Decodes with the engine as it is; appends the statistics of each batch to `counts`."""
        target = RecordingTarget(self.engine.target)
        return self._answers(self.engine.new_batch(target=target), target, "with the drafter", batch_size, counts)

    def plain(self) -> list[Recording]:
        """Decodes one token per pass, one prompt at a time."""
        target, drafter = RecordingTarget(self.engine.target), NoDrafter(self.engine.drafter.reserved_tokens)
        batch = self.engine.new_batch(target=target, drafter=drafter, lengths=Fixed(0))
        return self._answers(batch, target, "in plain decoding", 1, [])

    def control(self, batch_size: int) -> list[Recording]:
        """Decodes with a wrong rule; drafts even where a length policy has learnt not to."""
        target, lengths = RecordingTarget(self.engine.target), Fixed(self.engine.speculation.depth)
        batch = self.engine.new_batch(target=target, lengths=lengths, verify=accept_all)
        return self._answers(batch, target, "with the control", batch_size, [])

    def _answers(
        self, batch: Batch, target: RecordingTarget, name: str, size: int, counts: list[Stats]
    ) -> list[Recording]:
        recordings = []
        for start in range(0, len(self.cases), size):
            self.report(f"{name}: answer {start + 1} of {len(self.cases)}")
            recordings += record(batch, target, self.cases[start : start + size], self.max_new_tokens, name)
            counts.append(batch.clock.stats)
        return recordings


def _report(verdict: str, reason: str, figures: dict[str, Any], **results: Any) -> Report:
    empty: dict[str, Any] = {
        "divergences": [], "rounding": None, "positions": 0, "bitwise_equal": 0, "largest_difference": 0.0,
        "own_pass": None, "uniformity": None, "control": None,
    }  # fmt: skip
    return Report(verdict=verdict, reason=reason, **{**empty, **figures, **results})


def _judge_tokens(answering: _Answering, drafted: list[Recording], batch_size: int, figures: dict[str, Any]) -> Report:
    engine, cases = answering.engine, answering.cases
    plain = answering.plain()
    own = own_pass(engine.target.lm, cases, drafted, plain, answering.report)
    answering.report("measuring rounding")
    measured = list(zip(cases, plain, strict=True))[:MEASURED]
    rounding = max(rounding_of(engine, case, answer, batch_size) for case, answer in measured)
    comparison = compare(engine, cases, plain, drafted, rounding, own.explained.at_most(own.limit).largest)
    verdict, reason = (
        _fault_of_logits(own, comparison, is_native=engine.target.lm.is_native)
        or _fault_of_tokens(comparison, figures["answers"])
        or _doubt(own)
        or _agreement(comparison, figures["answers"])
    )
    figures = figures | {name: value for name, value in vars(comparison).items() if name != "not_chosen"}
    return _report(verdict, reason, figures, own_pass=own)


def _fault_of_logits(own: OwnPass, comparison: Comparison | None, *, is_native: bool) -> tuple[str, str] | None:
    if own.plain is not None and (fault := own.fault(own.plain)) is not None:
        return FAIL, f"plain decoding itself is not the model's: {fault}"
    if (
        is_native
        and comparison is not None
        and (comparison.rounding or comparison.bitwise_equal < comparison.positions)
    ):
        return FAIL, (
            "passes in C++ give the same logits to the last bit with and without a drafter, but here "
            f"{comparison.positions - comparison.bitwise_equal} of {comparison.positions} places differ, by up to "
            f"{comparison.largest_difference:.2g}, and passes of one and of several tokens by up to "
            f"{comparison.rounding:.2g}"
        )
    if (fault := own.fault(own.drafted)) is not None:
        return FAIL, f"with the drafter, logits are not the model's: {fault}"
    if comparison is not None and comparison.rounding > 2 * own.explained.largest:
        return FAIL, (
            f"logits of passes of one token and of several differ by {comparison.rounding:.2g}, and rounding in "
            f"{own.dtype} explains {own.explained} between each and the model's own pass"
        )
    return None


def _fault_of_tokens(comparison: Comparison, answers: int) -> tuple[str, str] | None:
    """The tokens judged by the recorded logits, which are taken as right."""
    faults = [split for split in comparison.divergences if not split.is_tie]
    if faults:
        return FAIL, (
            f"{len(faults)} of {answers} answers part from plain decoding where rounding does not explain it: "
            f"logits differ by {max(split.difference for split in faults):.2g}, rounding by {comparison.rounding:.2g}"
        )
    if comparison.not_chosen:
        return FAIL, f"{comparison.not_chosen} tokens are not those that their own logits choose"
    return None


def _doubt(own: OwnPass) -> tuple[str, str] | None:
    """INCONCLUSIVE if rounding is so large that a fault could hide in it."""
    if all(side is None or side.distance.within(own.limit) for side in (own.plain, own.drafted)):
        return None
    return INCONCLUSIVE, (
        f"rounding in {own.dtype} explains a difference of {own.drafted.distance} from a finer pass of the model's own "
        f"code, in which a fault could hide (at most {own.limit} is allowed): audit in a finer dtype"
    )


def _agreement(comparison: Comparison, answers: int) -> tuple[str, str]:
    if not comparison.divergences:
        return PASS, "every answer has the tokens of plain decoding"
    return TIES, f"{len(comparison.divergences)} of {answers} answers part from plain decoding, each at a near-tie"


def _judge_distribution(
    answering: _Answering, drafted: list[Recording], batch_size: int, figures: dict[str, Any]
) -> Report:
    engine, cases = answering.engine, answering.cases
    own = own_pass(engine.target.lm, cases, drafted, None, answering.report)
    wrong = answering.control(batch_size)
    answering.report("testing the distribution")
    tested, control = (_uniformity(engine, cases, answers) for answers in (drafted, wrong))
    if fault := _fault_of_logits(own, None, is_native=engine.target.lm.is_native):
        verdict, reason = fault
    elif not tested.is_uniform:
        verdict = FAIL
        reason = f"the tokens do not have the target's distribution: {tested.in_words}"
    elif doubt := _doubt(own):
        verdict, reason = doubt
    elif control.is_uniform:
        verdict = INCONCLUSIVE
        reason = "a rule known to be wrong was not caught, so the test shows nothing: use more prompts, seeds or tokens"
    else:
        verdict, reason = PASS, f"the tokens have the target's distribution: {tested.in_words}"
    return _report(verdict, reason, figures, own_pass=own, uniformity=tested, control=control)


def _uniformity(engine: Engine, cases: list[Case], answers: list[Recording]) -> Uniformity:
    generator = torch.Generator().manual_seed(0)
    u = []
    for case, answer in zip(cases, answers, strict=True):
        logits_NV = own_logits(engine.target.lm, case, answer)
        request = Request(tokens=case.prompt, sampling=case.sampling)
        u.append(pit_of_answer(logits_NV, request, answer.tokens, generator))
    return uniformity(torch.cat(u))
