"""Compares answers with plain decoding, and decides whether rounding explains a difference.

The logits that both sides saw at the first different token are compared. If they differ by no more than the logits of
passes of one token and of several do over the same text, the two candidates were a near-tie and rounding decided;
anything larger is a fault. Both kinds of passes are the audited engine's, so this difference is itself bounded from
outside, by the model's own pass: see `paradraft.audit.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.audit.recording import Case, NotNumbersError, Recording, are_numbers
from paradraft.audit.reference import difference
from paradraft.core import Request
from paradraft.engine.engine import Engine
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT

ROUNDING_FACTOR = 4.0
"""A difference of logits up to this many times that between passes of one and of several tokens counts as rounding."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first token at which an answer differs from plain decoding.

    Args:
        prompt: counted from 1.
        position: index of the new token, from 0.
        margin: by how much plain decoding preferred its token: difference of log p, noise included.
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
    """Answers compared with those of plain decoding; see `Report` for the other fields.

    Args:
        not_chosen: tokens of either side that are not those its own logits choose.
    """

    divergences: list[Divergence]
    not_chosen: int
    rounding: float
    positions: int
    bitwise_equal: int
    largest_difference: float


def compare(
    engine: Engine, cases: list[Case], plain: list[Recording], drafted: list[Recording], rounding: float, allowed: float
) -> Comparison:
    """Compares answers, case by case.

    Args:
        rounding: the largest of `rounding_of`.
        allowed: largest difference of each side from the model's own pass.
    """
    divergences, not_chosen, positions, bitwise, largest = [], 0, 0, 0, 0.0
    dtype = plain[0].logits.dtype
    scale = max(float(answer.logits[answer.logits.isfinite()].abs().max()) for answer in plain)
    # If each side is within `allowed` of the model's own pass, they differ by at most twice as much.
    limit = min(ROUNDING_FACTOR * max(rounding, torch.finfo(dtype).eps * scale), 2 * allowed)
    for case, alone, with_draft in zip(cases, plain, drafted, strict=True):
        scores = [_scores(engine, case, answer) for answer in (alone, with_draft)]
        is_chosen = [_are_chosen(*side) for side in zip(scores, (alone, with_draft), strict=True)]
        not_chosen += sum(int((~chosen_N).sum()) for chosen_N in is_chosen)
        pairs = zip(alone.tokens, with_draft.tokens, strict=True)
        split = next((index for index, (a, b) in enumerate(pairs) if a != b), len(alone.tokens))
        shared = min(split + 1, len(alone.tokens))
        positions += shared
        bitwise += int((alone.logits[:shared] == with_draft.logits[:shared]).all(1).sum())
        largest = max(largest, difference(alone.logits[:shared], with_draft.logits[:shared]).largest)
        if split == len(alone.tokens):
            continue
        gap = difference(alone.logits[split], with_draft.logits[split]).largest
        a, b = alone.tokens[split], with_draft.tokens[split]
        divergences.append(
            Divergence(
                prompt=case.number, seed=case.sampling.seed, position=split, plain=a, drafted=b,
                margin=float(scores[0][split, a] - scores[0][split, b]), difference=gap,
                is_tie=all(bool(chosen_N[split]) for chosen_N in is_chosen) and gap <= limit,
            )
        )  # fmt: skip
    return Comparison(
        divergences=divergences,
        not_chosen=not_chosen,
        rounding=rounding,
        positions=positions,
        bitwise_equal=bitwise,
        largest_difference=largest,
    )


def rounding_of(engine: Engine, case: Case, answer: Recording, batch_size: int) -> float:
    """Largest difference between the logits of passes of one row and token, and of passes as large as a round's.

    Raises:
        NotNumbersError: logits of the larger passes are not numbers.
    """
    lm = engine.target.lm
    width = min(lm.width, 1 + engine.speculation.nodes)
    device = answer.logits.device
    reading = [case.prompt[-1], *answer.tokens[:-1]]
    lm.start()
    lm.cache.join(batch_size)
    lm.prefill([case.prompt] * batch_size)
    largest = 0.0
    for start in range(0, len(reading), width):
        tokens = torch.tensor([reading[start : start + width]] * batch_size, device=device)
        logits = lm.forward(tokens).logits
        lm.cache.advance([tokens.shape[1]] * batch_size)
        if not bool((is_finite := are_numbers(logits).all(0)).all()):
            raise NotNumbersError(case, start + int(is_finite.int().argmin()), "in passes of several tokens and rows")
        expected = answer.logits[start : start + width].expand_as(logits)
        largest = max(largest, difference(logits, expected).largest)
    return largest


def _scores(engine: Engine, case: Case, answer: Recording) -> Tensor:
    """The scores `[N, V]` whose argmax each token should be, by the logits recorded for it."""
    N, device = len(answer.tokens), answer.logits.device
    before_NN = torch.ones(N, N, dtype=torch.bool, device=device).tril(-1)
    texts_NN = torch.where(before_NN, torch.tensor(answer.tokens, device=device), ABSENT)
    sampler = Sampler([Request(tokens=case.prompt, sampling=case.sampling)], device=device)
    return sampler.scores(answer.logits[None], torch.arange(N, device=device)[None], texts_NN[None])[0]


def _are_chosen(scores_NV: Tensor, answer: Recording) -> Tensor:
    """Which tokens of an answer have the largest score at their position, `[N]`."""
    tokens_N1 = torch.tensor(answer.tokens, device=scores_NV.device)[:, None]
    return scores_NV.gather(1, tokens_N1)[:, 0] == scores_NV.amax(1)
