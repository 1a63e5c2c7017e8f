"""Decoding during a run, with the drafter as it is saved; measures the acceptance length on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paradraft.core import Drafter, Request
from paradraft.decode.batch import run
from paradraft.decode.generation import Generation
from paradraft.drafters import load_drafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import resolve
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.sources.load_plan import Checkpoint
from paradraft.sources.target_loading import load_planned


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Acceptance of a drafter on held-out prompts.

    Args:
        length: tokens per target pass.
        by_position: acceptance rate at each draft position, from position 1 on.
    """

    length: float
    by_position: tuple[float, ...] = ()


class DrafterLoader:
    """Loads the drafters that a run saves, for its target.

    Args:
        target: a Hugging Face id, a folder, or "pocket".
        drafter: spec of the drafter that decodes.
        k: most tokens drafted per round.
        runtime: device, dtype, and a capacity that target and drafter support.

    Raises:
        ValueError: the target cannot be loaded.
    """

    def __init__(self, target: str, *, drafter: str, k: int, runtime: Runtime) -> None:
        plan = resolve(Checkpoint.find(target), [Speculation(drafter=drafter, k=k)], runtime)
        self.runtime = plan.runtime
        self.target = load_planned(plan)
        self.k = k
        self._drafter = drafter

    def load(self, folder: Path) -> Drafter:
        """Loads the drafter in a folder."""
        return load_drafter(self._drafter, self.target, draft=str(folder), runtime=self.runtime)


class AcceptanceMeter:
    """Decodes the same prompts greedily, in one batch, with each version of a drafter.

    Args:
        prompts: token ids; none empty.

    Raises:
        ValueError: a prompt and its answer exceed the capacity.
    """

    def __init__(self, loader: DrafterLoader, prompts: list[list[int]], *, answer_tokens: int) -> None:
        self.target = loader.target
        self._loader, self._prompts, self._answer_tokens = loader, prompts, answer_tokens
        longest = max(map(len, prompts))
        if longest + answer_tokens > self.target.capacity:
            raise ValueError(
                f"target and draft have room for {self.target.capacity} tokens, a held-out prompt has {longest} and "
                f"answer_tokens={answer_tokens}: lower answer_tokens or max_length"
            )

    def of(self, folder: Path) -> Decoded:
        """Measures the drafter in a folder."""
        drafter = self._loader.load(folder)
        batch = Engine(self.target, drafter, Speculation(k=self._loader.k, lengths="fixed")).new_batch()
        requests = [
            Request(id=row, tokens=prompt, max_new_tokens=self._answer_tokens, eos_ids=self.target.eos_ids)
            for row, prompt in enumerate(self._prompts)
        ]
        for _ in run(batch, list(map(Generation, requests))):
            pass
        drafter.close()
        stats = batch.clock.stats
        return Decoded(length=stats.acceptance_length, by_position=stats.acceptance_per_position)
