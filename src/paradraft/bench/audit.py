"""Is this target, with this drafter, lossless on this machine? Compares, measures, and says why.

With the match rule the tokens must be those of plain decoding. Where they part, the logits that both
sides saw at that place are compared: if they differ by no more than two harmless ways of computing
them do (one token at a time, or several), the two candidates were a near-tie and rounding decided;
anything larger is a fault. With the rejection rule the tokens need not be the same, only their
distribution, so a test is made of it; see `paradraft.bench.uniformity`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paradraft.bench.uniformity import Uniformity, place_of_tokens, uniformity
from paradraft.core import ABSENT, Draft, Drafter, Prompt, Sampling, TargetOut, Verdict
from paradraft.decode.lengths import Fixed
from paradraft.decode.sequential import VERIFY, Verify, decode
from paradraft.decode.stats import Clock
from paradraft.decode.stops import Stops
from paradraft.drafters.none import NoDrafter
from paradraft.engine import Engine
from paradraft.models.target import Target
from paradraft.request import requests_of
from paradraft.sampler import Sampler
from paradraft.tree import row_behind

PASS, TIES, FAIL = "PASS", "PASS UP TO NUMERICAL TIES", "FAIL"
ROUNDING_FACTOR = 4.0
"""A difference of logits up to this many times the largest harmless one counts as rounding."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place where an answer is not that of plain decoding.

    Args:
        prompt: number of the prompt, from 1.
        seed: of the sampling.
        position: number of the new token, from 0.
        plain: token of plain decoding.
        drafted: token with the drafter.
        margin: how far plain decoding preferred its token: difference of log p, noise included.
        difference: largest difference of the logits that both sides saw there.
        is_tie: whether rounding explains it.
    """

    prompt: int
    seed: int
    position: int
    plain: int
    drafted: int
    margin: float
    difference: float
    is_tie: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an audit found.

    Args:
        verdict: `PASS`, `TIES` or `FAIL`.
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


class Recorder(Target):
    """A target that remembers the logits behind which each committed token was chosen."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.lm, target.tokenizer)
        self.rows: list[list[Tensor]] = []
        self._numbers: list[int] = []

    def prefill(self, prompt: Prompt) -> None:
        """See `Target`."""
        super().prefill(prompt)
        self.rows = [[] for _ in prompt.tokens]
        self._numbers = list(range(len(prompt.tokens)))

    def forward(self, draft: Draft) -> TargetOut:
        """See `Target`."""
        self._out = super().forward(draft)
        return self._out

    def commit(self, verdict: Verdict) -> None:
        """See `Target`."""
        for place, number in enumerate(self._numbers):
            path = [node + 1 for node in verdict.path[place].tolist() if node != ABSENT]
            self.rows[number] += list(self._out.logits[place, [0, *path]].clone())
        super().commit(verdict)

    def keep_rows(self, rows: Tensor) -> None:
        """See `Target`."""
        super().keep_rows(rows)
        self._numbers = [self._numbers[row] for row in rows.tolist()]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """New tokens `[n]`, and the logits `[n, V]` they were chosen by; `[0, 0]` if nobody recorded them."""

    tokens: list[int]
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt with one seed."""

    number: int
    prompt: list[int]
    sampling: Sampling


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

    def answers(drafter: Drafter, verify: Verify, name: str, size: int, clock: Clock) -> list[Answer]:
        found = []
        for start in range(0, len(cases), size):
            report(f"{name}: answer {start + 1} of {len(cases)}")
            found += _answers(engine, target, drafter, verify, cases[start : start + size], max_new_tokens, clock)
        return found

    verify = VERIFY[engine.verify]
    tests_distribution = engine.verify == "rejection" and not sampling.is_greedy
    if tests_distribution and isinstance(engine.drafter, NoDrafter):
        raise ValueError("drafter 'none' drafts nothing that could be rejected: audit it with verify='match'")
    target = engine.target if tests_distribution else Recorder(engine.target)
    drafted = answers(engine.drafter, verify, "with the drafter", batch_size, clock)
    figures: dict[str, Any] = {
        "answers": len(cases),
        "tokens": sum(len(answer.tokens) for answer in drafted),
        "acceptance_length": clock.stats.acceptance_length,
    }
    if tests_distribution:
        wrong = answers(engine.drafter, accept_all, "control", batch_size, Clock())
        report("testing the distribution")
        return _judge_distribution(engine, cases, drafted, wrong, figures)
    plain = answers(NoDrafter(), verify, "plain", 1, Clock())
    report("measuring rounding")
    measured = list(zip(cases, plain, strict=True))[:8]
    rounding = max(_rounding(engine, case, answer, batch_size) for case, answer in measured)
    return _judge_tokens(engine, cases, plain, drafted, rounding, figures)


def accept_all(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """The control: a rule that takes the first path of every draft without asking the target."""
    B, N = draft.tokens.shape
    path = torch.full((B, N), ABSENT, device=draft.tokens.device)
    for row, (tokens, parents) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        last, depth = -1, 0
        for node in range(N):
            if parents[node] == last and tokens[node] != ABSENT:
                path[row, depth] = last = node
                depth += 1
    last_BN1 = row_behind(path)[:, :, None].expand(-1, -1, out.logits.shape[2])
    probs = sampler.probabilities(out.logits.gather(1, last_BN1))
    return Verdict.of(draft, path, sampler.draw_next(probs[:, 0]))


def _answers(
    engine: Engine,
    target: Target,
    drafter: Drafter,
    verify: Verify,
    cases: list[Case],
    max_new_tokens: int,
    clock: Clock,
) -> list[Answer]:
    prompt = engine.prompt([case.prompt for case in cases], tuple(case.sampling for case in cases))
    lengths = Fixed(0) if isinstance(drafter, NoDrafter) else engine.lengths
    stops = Stops(limits=[max_new_tokens] * len(cases), eos_ids=frozenset())
    tokens: list[list[int]] = [[] for _ in cases]
    for step in decode(target, drafter, prompt, verify, stops=stops, lengths=lengths, clock=clock):
        for row, new in zip(step.rows, step.tokens, strict=True):
            tokens[row] += new
    if not isinstance(target, Recorder):
        return [Answer(tokens=new, logits=torch.empty(0, 0)) for new in tokens]
    return [
        Answer(tokens=new, logits=torch.stack(rows[: len(new)])) for new, rows in zip(tokens, target.rows, strict=True)
    ]


def _rounding(engine: Engine, case: Case, answer: Answer, batch_size: int) -> float:
    """Largest difference between logits from passes of one row and token, and of as many of both as a round has."""
    lm = engine.target.lm
    width = min(lm.width, 1 + (engine.k if engine.tree is None else engine.tree.nodes))
    device = answer.logits.device
    reading = [case.prompt[-1], *answer.tokens[:-1]]
    lm.start(engine.prompt([case.prompt] * batch_size, (case.sampling,) * batch_size))
    largest = 0.0
    for start in range(0, len(reading), width):
        tokens = torch.tensor([reading[start : start + width]] * batch_size, device=device)
        logits = lm.forward(tokens)
        lm.keep(torch.full((batch_size,), tokens.shape[1], device=device))
        expected = answer.logits[start : start + width].expand_as(logits)
        largest = max(largest, _difference(logits, expected))
    return largest


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference; forbidden tokens, -inf on both sides, are equal."""
    return float(torch.where(a == b, 0.0, (a.double() - b.double()).abs()).max())


def _judge_tokens(
    engine: Engine,
    cases: list[Case],
    plain: list[Answer],
    drafted: list[Answer],
    rounding: float,
    figures: dict[str, Any],
) -> Report:
    divergences, positions, bitwise, largest = [], 0, 0, 0.0
    dtype = plain[0].logits.dtype
    scale = max(float(answer.logits[answer.logits.isfinite()].abs().max()) for answer in plain)
    limit = ROUNDING_FACTOR * max(rounding, torch.finfo(dtype).eps * scale)
    for case, mine, theirs in zip(cases, plain, drafted, strict=True):
        pairs = zip(mine.tokens, theirs.tokens, strict=True)
        split = next((place for place, (a, b) in enumerate(pairs) if a != b), len(mine.tokens))
        shared = min(split + 1, len(mine.tokens))
        equal = (mine.logits[:shared] == theirs.logits[:shared]).all(1)
        positions += shared
        bitwise += int(equal.sum())
        largest = max(largest, _difference(mine.logits[:shared], theirs.logits[:shared]))
        if split < len(mine.tokens):
            divergences.append(_divergence(engine, case, mine, theirs, split, limit))
    faults = [found for found in divergences if not found.is_tie]
    if not divergences:
        verdict, reason = PASS, "every answer has the tokens of plain decoding"
    elif not faults:
        verdict = TIES
        reason = f"{len(divergences)} of {len(cases)} answers part from plain decoding, each at a near-tie"
    else:
        verdict = FAIL
        reason = (
            f"{len(faults)} of {len(cases)} answers part from plain decoding where rounding does not explain it: "
            f"logits differ by {max(f.difference for f in faults):.2g}, rounding by {rounding:.2g}"
        )
    return Report(
        verdict=verdict, reason=reason, divergences=divergences, rounding=rounding, positions=positions,
        bitwise_equal=bitwise, largest_difference=largest, uniformity=None, control=None, **figures,
    )  # fmt: skip


def _divergence(engine: Engine, case: Case, plain: Answer, drafted: Answer, place: int, limit: float) -> Divergence:
    a, b = plain.tokens[place], drafted.tokens[place]
    path = torch.tensor([[plain.tokens[:place]]], device=plain.logits.device).long()
    depth = torch.tensor([[place]], device=plain.logits.device)
    sampler = Sampler(engine.prompt([case.prompt], (case.sampling,)))
    mine, theirs = (
        sampler.scores(answer.logits[None, place : place + 1], depth, path)[0, 0] for answer in (plain, drafted)
    )
    difference = _difference(plain.logits[place], drafted.logits[place])
    is_honest = int(mine.argmax()) == a and int(theirs.argmax()) == b
    return Divergence(
        prompt=case.number, seed=case.sampling.seed, position=place, plain=a, drafted=b,
        margin=float(mine[a] - mine[b]), difference=difference, is_tie=is_honest and difference <= limit,
    )  # fmt: skip


def _judge_distribution(
    engine: Engine, cases: list[Case], drafted: list[Answer], wrong: list[Answer], figures: dict[str, Any]
) -> Report:
    found, control = (_uniformity(engine, cases, answers) for answers in (drafted, wrong))
    if not found.is_uniform:
        verdict = FAIL
        reason = f"the tokens do not have the target's distribution: {found.in_words}"
    elif control.is_uniform:
        verdict = FAIL
        reason = "a rule known to be wrong was not caught, so the test shows nothing: use more prompts, seeds or tokens"
    else:
        verdict, reason = PASS, f"the tokens have the target's distribution: {found.in_words}"
    return Report(
        verdict=verdict, reason=reason, divergences=[], rounding=None, positions=0, bitwise_equal=0,
        largest_difference=0.0, uniformity=found, control=control, **figures,
    )  # fmt: skip


def _uniformity(engine: Engine, cases: list[Case], answers: list[Answer]) -> Uniformity:
    generator = torch.Generator().manual_seed(0)
    places = []
    for case, answer in zip(cases, answers, strict=True):
        prompt = engine.prompt([case.prompt], (case.sampling,))
        places.append(place_of_tokens(engine.target, prompt, answer.tokens, generator))
    return uniformity(torch.cat(places))
