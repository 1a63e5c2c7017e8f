"""Is this target, with this drafter, lossless on this machine? Compares, measures, and says why.

With the match rule the tokens must be those of plain decoding, but for near-ties; see
`paradraft.bench.divergence`. With the rejection rule the tokens need not be the same, only their
distribution, so a test is made of it; see `paradraft.bench.uniformity`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from paradraft.bench.control import accept_all
from paradraft.bench.divergence import Comparison, Divergence, compare, rounding_of
from paradraft.bench.recording import Case, Recorder, Recording, record
from paradraft.bench.uniformity import Uniformity, place_of_tokens, uniformity
from paradraft.core import Drafter, Sampling
from paradraft.decode.lengths import Fixed, LengthPolicy
from paradraft.decode.sequential import VERIFY, Verify
from paradraft.decode.stats import Clock
from paradraft.drafters.none import NoDrafter
from paradraft.engine import Engine
from paradraft.request import requests_of

PASS, TIES, FAIL, INCONCLUSIVE = "PASS", "PASS UP TO NUMERICAL TIES", "FAIL", "INCONCLUSIVE"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an audit found.

    Args:
        verdict: `PASS`, `TIES`, `FAIL`, or `INCONCLUSIVE`: what was drafted is too little to show anything.
        reason: one sentence.
        answers: how many answers were compared.
        tokens: how many tokens they have.
        acceptance_length: emitted tokens per target pass.
        divergences: with the match rule, the answers that part from plain decoding.
        rounding: largest difference of logits between two harmless ways of computing them.
        positions: places where both sides read the same text.
        bitwise_equal: at how many of them all logits were equal to the last bit.
        largest_difference: largest difference of the logits there.
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
    uniformity: Uniformity | None
    control: Uniformity | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


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
        engine: target, drafter, and how to draft and verify.
        prompts: texts.
        sampling: its seed is that of the first answer, the next answer has the next.
        seeds: how many answers each prompt gets; greedy answers are all the same, so then it is 1.
        max_new_tokens: tokens of an answer; end-of-sequence tokens do not end it.
        batch_size: prompts answered together with the drafter; plain decoding takes them one by one.
        report: told what is going on.

    Raises:
        ValueError: a prompt does not fit into the model, or a number is out of range.
    """
    if seeds < 1 or batch_size < 1:
        raise ValueError(f"seeds={seeds}, batch_size={batch_size}: use at least 1")
    requests = requests_of(engine.target, prompts, max_new_tokens, sampling)
    # Every answer has a seed of its own: answers of one seed share their random numbers where positions are the same.
    cases = [
        Case(
            number=place % len(requests) + 1,
            prompt=request.tokens,
            sampling=replace(sampling, seed=sampling.seed + place),
        )
        for place, request in enumerate(requests * (1 if sampling.is_greedy else seeds))
    ]
    clock = Clock()

    def answers(
        drafter: Drafter, verify: Verify, lengths: LengthPolicy, name: str, size: int, clock: Clock
    ) -> list[Recording]:
        found = []
        for start in range(0, len(cases), size):
            report(f"{name}: answer {start + 1} of {len(cases)}")
            batch = cases[start : start + size]
            found += record(engine, target, drafter, verify, lengths, batch, max_new_tokens, clock)
        return found

    verify = VERIFY[engine.verify]
    tests_distribution = engine.verify == "rejection" and not sampling.is_greedy
    has_drafter = not isinstance(engine.drafter, NoDrafter)
    if tests_distribution and not has_drafter:
        raise ValueError("drafter 'none' drafts nothing that could be rejected: audit it with verify='match'")
    target = engine.target if tests_distribution else Recorder(engine.target)
    drafted = answers(engine.drafter, verify, engine.lengths, "with the drafter", batch_size, clock)
    figures: dict[str, Any] = {
        "answers": len(cases),
        "tokens": sum(len(answer.tokens) for answer in drafted),
        "acceptance_length": clock.stats.acceptance_length,
    }
    if tests_distribution:
        # A policy that has learnt not to draft would leave the wrong rule nothing to do.
        wrong = answers(engine.drafter, accept_all, Fixed(engine.deepest), "control", batch_size, Clock())
        report("testing the distribution")
        judged = _judge_distribution(engine, cases, drafted, wrong, figures)
    else:
        plain = answers(NoDrafter(), verify, Fixed(0), "plain", 1, Clock())
        report("measuring rounding")
        measured = list(zip(cases, plain, strict=True))[:8]
        rounding = max(rounding_of(engine, case, answer, batch_size) for case, answer in measured)
        judged = _judge_tokens(compare(engine, cases, plain, drafted, rounding), figures)
    if has_drafter and judged.verdict in (PASS, TIES) and not clock.stats.nodes:
        reason = "nothing was drafted, so this shows nothing: use more prompts or tokens, and fixed lengths"
        return replace(judged, verdict=INCONCLUSIVE, reason=reason)
    return judged


def _judge_tokens(found: Comparison, figures: dict[str, Any]) -> Report:
    faults = [one for one in found.divergences if not one.is_tie]
    parting = f"of {figures['answers']} answers part from plain decoding"
    if not found.divergences:
        verdict, reason = PASS, "every answer has the tokens of plain decoding"
    elif not faults:
        verdict, reason = TIES, f"{len(found.divergences)} {parting}, each at a near-tie"
    else:
        verdict = FAIL
        reason = (
            f"{len(faults)} {parting} where rounding does not explain it: "
            f"logits differ by {max(one.difference for one in faults):.2g}, rounding by {found.rounding:.2g}"
        )
    return Report(verdict=verdict, reason=reason, uniformity=None, control=None, **vars(found), **figures)


def _judge_distribution(
    engine: Engine, cases: list[Case], drafted: list[Recording], wrong: list[Recording], figures: dict[str, Any]
) -> Report:
    found, control = (_uniformity(engine, cases, answers) for answers in (drafted, wrong))
    if not found.is_uniform:
        verdict = FAIL
        reason = f"the tokens do not have the target's distribution: {found.in_words}"
    elif control.is_uniform:
        verdict = INCONCLUSIVE
        reason = "a rule known to be wrong was not caught, so the test shows nothing: use more prompts, seeds or tokens"
    else:
        verdict, reason = PASS, f"the tokens have the target's distribution: {found.in_words}"
    return Report(
        verdict=verdict, reason=reason, divergences=[], rounding=None, positions=0, bitwise_equal=0,
        largest_difference=0.0, uniformity=found, control=control, **figures,
    )  # fmt: skip


def _uniformity(engine: Engine, cases: list[Case], answers: list[Recording]) -> Uniformity:
    generator = torch.Generator().manual_seed(0)
    places = []
    for case, answer in zip(cases, answers, strict=True):
        prompt = engine.prompt([case.prompt], (case.sampling,))
        places.append(place_of_tokens(engine.target, prompt, answer.tokens, generator))
    return uniformity(torch.cat(places))
