"""Times rounds with a simulated acceptance length.

Draft pass, target pass and verification run as usual; then the verdict is replaced by a drawn one with given acceptance
rates. So the speed of any pair of models can be measured before the drafter is trained. The texts are not the
target's: this is for timing alone, and only `paradraft bench` can use it.

Shape letters: B rows of a batch, N nodes of a draft, K positions.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paradraft.bench.hardware.roofline import models_of, passes_of
from paradraft.bench.hardware.sides import Sides, forwards
from paradraft.bench.result import Answerer, BatchResult
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import Generation
from paradraft.decode.pearl.pearl import AheadBatch
from paradraft.decode.stats import RoundOutput
from paradraft.engine.engine import Engine
from paradraft.engine.request import requests_of
from paradraft.engine.speculation import Speculation
from paradraft.models.target import Target
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT
from paradraft.verify import Verify, load_rule


def rounds(batch: Batch, prompts: list[str], max_new_tokens: int, samplings: list[Sampling]) -> Iterator[RoundOutput]:
    """Answers prompts together, in a batch without rows; only their length ends the answers."""
    requests = requests_of(batch.target, prompts, max_new_tokens, samplings)
    return run(batch, [Generation(replace(request, eos_ids=frozenset())) for request in requests])


@dataclass(frozen=True, kw_only=True)
class SyntheticAcceptance:
    """Acceptance rates of chains that replace the target's verdicts.

    Args:
        rates: for each position the share of drafts of that length or more whose token there is accepted, as
            `acceptance_per_position` in a benchmark's file has it. Acceptance of a position needs that of all
            earlier ones, so rates never rise. (The share of those drafts whose earlier tokens were all accepted is
            a rate divided by the one before.)

    Raises:
        ValueError: there is no rate, or one is not in [0, 1] or larger than the one before.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ValueError(f"synthetic acceptance {self.in_words}: give rates from 0 to 1, one for each position")
        for index in range(1, len(self.rates)):
            if self.rates[index] > self.rates[index - 1]:
                raise ValueError(
                    f"synthetic acceptance {self.in_words}: rate {index + 1} is larger than the one before: give "
                    "shares of all drafts, as acceptance_per_position has them, and a token needs all those before it"
                )

    @classmethod
    def parse(cls, text: str) -> SyntheticAcceptance:
        """Reads rates separated by commas.

        >>> SyntheticAcceptance.parse("0.79,0.57,0.40").length
        2.76
        """
        try:
            return cls(rates=tuple(float(rate) for rate in text.split(",")))
        except ValueError as error:
            if str(error).startswith("synthetic"):
                raise
            raise ValueError(f"synthetic acceptance {text!r}: write rates as in 0.79,0.57,0.40") from None

    @property
    def in_words(self) -> str:
        """The rates, separated by commas."""
        return ", ".join(f"{rate:.3g}" for rate in self.rates)

    @property
    def length(self) -> float:
        """The acceptance length of chains with a token for each rate."""
        return 1.0 + sum(self.rates)

    def check(self, spec: str, speculation: Speculation) -> None:
        """Raises ValueError unless a method's drafts are chains for which there are rates."""
        if speculation.tree is not None or speculation.nodes > speculation.k:
            raise ValueError(
                f"method {spec!r} drafts trees, and synthetic acceptance is for chains: leave the tree, or it, out"
            )
        if speculation.k > len(self.rates):
            raise ValueError(
                f"method {spec!r} drafts {speculation.k} tokens, but there are {len(self.rates)} rates of synthetic "
                "acceptance: give one for each position, or lower k"
            )

    def instead_of(self, verify: Verify) -> Verify:
        """A rule that does the work of another and accepts by these rates.

        A single uniform number of the (seed, position) decides a round: as many tokens are accepted as there
        are rates above it, but no more than the draft has. The token after them is the other rule's.
        """

        def drawn(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
            verdict = verify(draft, out, sampler)
            N = draft.tokens.shape[1]
            assert N <= len(self.rates)
            chance_B1 = sampler.acceptance_numbers(1)
            rates_N = torch.tensor(self.rates[:N], dtype=chance_B1.dtype, device=chance_B1.device)
            is_kept_BN = ((chance_B1 < rates_N) & (draft.tokens != ABSENT)).long().cumprod(1) == 1
            return accepting(draft, is_kept_BN, verdict)

        return drawn

    def answerer(self, engine: Engine) -> Answerer:
        """An answerer with this acceptance."""
        verify = self.instead_of(load_rule(engine.speculation.verify))
        models = models_of(engine.target.lm, engine.drafter)

        def answer(prompts: list[str], max_new_tokens: int, sampling: Sampling) -> BatchResult:
            ahead = engine.speculation.gamma is not None
            options: dict[str, Any] = (
                {"kind": DrawnAheadBatch.of(chances_of(self.rates))} if ahead else {"verify": verify}
            )
            batch = engine.new_batch(**options)
            tokens: list[list[int]] = [[] for _ in prompts]
            delivered_s: list[list[float]] = [[] for _ in prompts]
            samplings = [replace(sampling, seed=_seed(prompt, sampling.seed)) for prompt in prompts]
            with engine.in_round():
                steps, asked_s = rounds(batch, prompts, max_new_tokens, samplings), time.perf_counter()
                for output in steps:
                    taken_s = time.perf_counter() - asked_s
                    for request, new in zip(output.requests, output.tokens, strict=True):
                        tokens[request] += new
                        delivered_s[request] += [taken_s] * bool(new)
            stats = batch.clock.stats
            spans = batch.spans if isinstance(batch, AheadBatch) else ()
            return BatchResult(
                tokens=tokens,
                total_s=stats.total_s,
                stats=stats,
                passes={} if ahead else passes_of(models),
                sides=Sides.of(spans, forwards(models, engine.drafter)) if spans else None,
                delivered_s=delivered_s,
            )

        return answer


def accepting(draft: Draft, is_kept_BN: Tensor, verdict: Verdict) -> Verdict:
    """Accepts the first tokens `[B, N]` of chains; the tokens after them are another verdict's."""
    paths = [list(range(kept)) for kept in is_kept_BN.sum(1).tolist()]
    return Verdict.of(draft, paths, [tokens[-1] for tokens in verdict.tokens])


def chances_of(rates: Sequence[float]) -> list[float]:
    """For each position the chance of its token once all before it are accepted, from shares of all drafts.

    >>> chances_of([0.5, 0.375, 0.0, 0.0])
    [0.5, 0.75, 0.0, 0.0]
    """
    before = (1.0, *rates)
    return [rate / last if last else 0.0 for last, rate in zip(before, rates, strict=False)]


class DrawnAheadBatch(AheadBatch):
    """Draws verdicts for a drafter that is a round ahead: each token of a window by the chance of its position.

    `chances` are those of `chances_of`.
    """

    def __init__(self, *args: Any, chances: Sequence[float], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._exact, self.verify = self.verify, self._drawn
        self._chances = torch.tensor((*chances, 0.0))

    @classmethod
    def of(cls, chances: Sequence[float]) -> Callable[..., AheadBatch]:
        """A constructor of such batches."""
        return partial(cls, chances=chances)

    def _drawn(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        verdict = self._exact(draft, out, sampler)
        N = draft.tokens.shape[1]
        self._uniforms_BN = sampler.acceptance_numbers(N + 1)
        positions_BN = torch.tensor(self.first_depths)[:, None] - 1 + torch.arange(N)
        chances_BN = self._chances[positions_BN.clamp(max=len(self._chances) - 1)]
        is_kept_BN = ((self._uniforms_BN[:, 1:] < chances_BN) & (draft.tokens != ABSENT)).long().cumprod(1) == 1
        return accepting(draft, is_kept_BN, verdict)

    def settle(self, verdict: Verdict, window: Draft) -> Verdict:
        """Draws whether the target's own token is the first of the window, by the chance of a first token."""
        if not window.tokens.shape[1]:
            return verdict
        first_B = window.tokens[:, 0]
        is_first_B = (self._uniforms_BN[:, 0] < self._chances[0]) & (first_B != ABSENT)
        own_B = torch.where(is_first_B, first_B, (first_B.clamp(min=0) + 1) % self.target.vocab_size)
        pairs = zip(verdict.tokens, own_B.tolist(), strict=True)
        return replace(verdict, tokens=[[*tokens[:-1], own] for tokens, own in pairs])


def _seed(prompt: str, seed: int) -> int:
    """A seed for each prompt: prompts of the same length would otherwise all have the same verdicts."""
    return zlib.crc32(prompt.encode()) ^ seed


def without_ends(target: Target) -> None:
    """Removes the end-of-sequence tokens of this target: random verdicts make texts that end anywhere."""
    target.lm.model.generation_config.eos_token_id = None
    target.lm.model.config.eos_token_id = None
