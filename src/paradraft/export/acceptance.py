"""The acceptance of an exported drafter, which its model card says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load_engine
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class MeasuredAcceptance:
    """Acceptance of the exported folder in paradraft's own loop, greedily.

    Args:
        length: tokens per pass of the target.
        by_position: for each draft position, the share of its drafted tokens that was accepted.
        is_lossless: whether all texts are those of plain decoding.
    """

    prompts: int
    length: float
    by_position: tuple[float, ...]
    is_lossless: bool


def measured_acceptance(
    target: str, speculation: Speculation, prompts: Sequence[str], *, max_new_tokens: int, runtime: Runtime
) -> MeasuredAcceptance:
    """Decodes prompts with and without a drafter."""
    with load_engine(target, speculation, runtime=runtime) as engine:
        answers = engine.generate(list(prompts), max_new_tokens=max_new_tokens)
        stats = [answer.stats for answer in answers]
        plain = Engine(engine.target, NoDrafter(engine.drafter.reserved_tokens), Speculation(k=1))
        expected = plain.generate(list(prompts), max_new_tokens=max_new_tokens)
    accepted = [sum(counts) for counts in zip(*(answer.accepted for answer in stats), strict=True)]
    drafted = [sum(counts) for counts in zip(*(answer.drafted for answer in stats), strict=True)]
    return MeasuredAcceptance(
        prompts=len(answers),
        length=sum(answer.tokens for answer in stats) / sum(answer.rounds for answer in stats),
        by_position=tuple(hits / count for hits, count in zip(accepted, drafted, strict=True) if count),
        is_lossless=[answer.tokens for answer in answers] == [answer.tokens for answer in expected],
    )
