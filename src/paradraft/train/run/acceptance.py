"""Measures the acceptance length: decodes held-out prompts with the drafter as it is saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paradraft.core import Request
from paradraft.data.samples import Sample
from paradraft.decode.batch import run
from paradraft.decode.generation import Generation
from paradraft.drafters import load_drafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Acceptance of a drafter on held-out prompts.

    Args:
        length: tokens per target pass.
        by_position: acceptance rate at each draft position, from position 1 on.
    """

    length: float
    by_position: tuple[float, ...] = ()


class AcceptanceMeter:
    """Decodes the same prompts greedily, in one batch, with each version of a drafter.

    Args:
        target: a Hugging Face id, a folder, or "pocket".
        prompts: token ids; none empty.
        drafter: spec of the drafter that decodes.
        runtime: device, dtype, and a capacity that target and drafter support.

    Raises:
        ValueError: the target cannot be loaded, or a prompt and its answer exceed the capacity.
    """

    def __init__(
        self, target: str, prompts: list[list[int]], *, drafter: str, k: int, answer_tokens: int, runtime: Runtime
    ) -> None:
        width = max(Speculation(drafter=drafter, k=k).pass_width, runtime.width)
        self._runtime = runtime = replace(runtime, width=width)
        self.target = load_target(target, runtime)
        self._prompts = prompts
        self._answer_tokens = answer_tokens
        self._drafter, self._k = drafter, k
        longest = max(map(len, prompts))
        if longest + answer_tokens > self.target.capacity:
            raise ValueError(
                f"target and draft have room for {self.target.capacity} tokens, a held-out prompt has {longest} and "
                f"answer_tokens={answer_tokens}: lower answer_tokens or max_length"
            )

    def of(self, folder: Path) -> Decoded:
        """Measures the drafter in a folder."""
        drafter = load_drafter(self._drafter, self.target, draft=str(folder), runtime=self._runtime)
        batch = Engine(self.target, drafter, Speculation(k=self._k, lengths="fixed")).new_batch()
        requests = [
            Request(id=row, tokens=prompt, max_new_tokens=self._answer_tokens, eos_ids=self.target.eos_ids)
            for row, prompt in enumerate(self._prompts)
        ]
        for _ in run(batch, list(map(Generation, requests))):
            pass
        stats = batch.clock.stats
        return Decoded(length=stats.acceptance_length, by_position=stats.acceptance_per_position)


def prompt_of(sample: Sample, *, most: int) -> list[int]:
    """Prompt of a sample: the tokens before its first label; of plain text the first `most`, but at most half.

    >>> prompt_of(Sample(tokens=[5, 6, 7, 8], is_label=[False, False, True, True]), most=1)
    [5, 6]
    >>> prompt_of(Sample(tokens=[5, 6, 7, 8], is_label=[True] * 4), most=9)
    [5, 6]
    """
    first = list(sample.is_label).index(True)
    return list(sample.tokens[: first or max(min(most, len(sample.tokens) // 2), 1)])
