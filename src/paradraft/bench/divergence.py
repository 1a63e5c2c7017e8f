"""Where an answer parts from plain decoding, and whether rounding explains it.

The logits that both sides saw at that place are compared. If they differ by no more than two harmless
ways of computing them do (one token at a time, or several), the two candidates were a near-tie and
rounding decided; anything larger is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.bench.recording import Case, Recording
from paradraft.engine import Engine
from paradraft.sampler import Sampler

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
class Comparison:
    """Answers beside those of plain decoding.

    Args:
        divergences: the answers that part from plain decoding.
        rounding: largest difference of logits between two harmless ways of computing them.
        positions: places where both sides read the same text.
        bitwise_equal: at how many of them all logits were equal to the last bit.
        largest_difference: largest difference of the logits there.
    """

    divergences: list[Divergence]
    rounding: float
    positions: int
    bitwise_equal: int
    largest_difference: float


def compare(
    engine: Engine, cases: list[Case], plain: list[Recording], drafted: list[Recording], rounding: float
) -> Comparison:
    """Compares answers, case by case.

    Args:
        engine: whose answers these are.
        cases: what was answered.
        plain: by plain decoding.
        drafted: with the drafter.
        rounding: the largest of `rounding_of`.
    """
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
    return Comparison(
        divergences=divergences,
        rounding=rounding,
        positions=positions,
        bitwise_equal=bitwise,
        largest_difference=largest,
    )


def rounding_of(engine: Engine, case: Case, answer: Recording, batch_size: int) -> float:
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
        lm.keep([tokens.shape[1]] * batch_size)
        expected = answer.logits[start : start + width].expand_as(logits)
        largest = max(largest, _difference(logits, expected))
    return largest


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference; forbidden tokens, -inf on both sides, are equal."""
    return float(torch.where(a == b, 0.0, (a.double() - b.double()).abs()).max())


def _divergence(
    engine: Engine, case: Case, plain: Recording, drafted: Recording, place: int, limit: float
) -> Divergence:
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
