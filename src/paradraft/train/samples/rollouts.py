"""On-policy samples: prompts of the data continued by the drafter in training (Agarwal et al. 2023, GKD, Algorithm 1;
the student's data of DistillSpec, Zhou et al. 2023).

Every `every` steps a share of the samples of the next steps gets new answers, drawn from the drafter as it is then;
prompts, order and lengths stay those of the data. An answer is drawn token by token: the first token of a draft is
committed whatever the target says, so the next draft follows the drafter's own text. So any drafter can be the
student, with any states of the target that it reads.

Shape letters: B rows of a batch, N nodes of a draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paradraft.core import Draft, Drafter, Request, TargetOut, Verdict
from paradraft.data.samples import Sample, prompt_of
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.models.target import Target
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.train.samples import SampleSource, SourceData
from paradraft.train.samples.dataset import BatchSampler
from paradraft.tree import ABSENT
from paradraft.verify.match import verify

ROWS = 8
"""Most prompts that are continued at a time: their caches are no part of the memory estimate."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the source.

    Args:
        every: steps between two renewals; the first is before the first step.
        share: of the samples that the drafter continues, in (0, 1]; the others are those of the data.
        temperature: of the drafter's draws; 0 takes its likeliest tokens.

    Raises:
        ValueError: a setting is out of range.
    """

    every: int = 100
    share: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every}: use at least 1 step")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}: use a number above 0, at most 1")
        Sampling(temperature=self.temperature)


def commit_drafts(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Commits the first token of each row's draft as if the target had drawn it, or the target's where none is drafted.

    It accepts nothing, so that drafters read it as any token after a refused draft.
    """
    drawn = verify(draft, out, sampler).drawn
    assert drawn is not None
    pairs = zip(draft.lists[0], drawn, strict=True)
    tokens = [guesses[0] if guesses and guesses[0] != ABSENT else own[0] for guesses, own in pairs]
    return Verdict.of(draft, [[] for _ in tokens], tokens)


class Rollouts(SampleSource):
    """See the module.

    The state is the tokens of the current answers, by the index of their sample in the run.

    Raises:
        ValueError: there is no teacher, so that the drafter would only learn what it already says, samples have
            anchors, or the share is of too few samples.
    """

    decodes = True

    def __init__(self, config: Config, data: SourceData) -> None:
        if not data.is_taught:
            raise ValueError(
                "a drafter learns nothing from its own tokens without a teacher: name one as teacher, or set loss to a "
                "divergence from the target"
            )
        if any(sample.least_round for sample in data.samples):
            raise ValueError("data.anchors are places in logged answers, and rollouts are other answers: leave one out")
        if not round(config.share * (samples := config.every * data.per_step)):
            raise ValueError(
                f"share={config.share}: of the {samples} samples between two renewals it is none, raise every"
            )
        self._config, self._data = config, data
        self._order = BatchSampler(data.samples, per_step=data.per_step, seed=data.seed)
        self._continued: dict[int, list[int]] = {}
        self.notes = (f"{config.share:.0%} of the answers from the drafter, new ones every {config.every} steps",)

    def samples_of(self, step: int) -> list[Sample]:
        """See `SampleSource`."""
        return [
            _continued(self._prompt(sample), self._continued[index]) if index in self._continued else sample
            for index, sample in self._indexed(step)
        ]

    def is_due(self, step: int) -> bool:
        """See `SampleSource`."""
        return step % self._config.every == 0 and step < self._data.steps

    def renew(self, step: int, target: Target, drafter: Drafter) -> None:
        """See `SampleSource`."""
        steps = range(step, min(step + self._config.every, self._data.steps))
        samples = [pair for each in steps for pair in self._indexed(each)]
        generator = torch.Generator().manual_seed(self._data.seed * 104_729 + step)
        count = round(self._config.share * len(samples))
        chosen = [samples[i] for i in torch.randperm(len(samples), generator=generator)[:count].tolist()]
        chosen.sort(key=lambda pair: (len(pair[1].tokens), pair[0]))  # rows of a batch have similar lengths
        self._continued = {}
        for first in range(0, len(chosen), ROWS):
            self._continue(dict(chosen[first : first + ROWS]), target, drafter)

    def _continue(self, samples: dict[int, Sample], target: Target, drafter: Drafter) -> None:
        """Draws new answers, of at most the lengths of the old ones, to some samples by index."""
        wanted, requests = {}, []
        for index, sample in samples.items():
            prompt = self._prompt(sample)
            wanted[index] = min(len(sample.tokens), target.capacity - 1) - len(prompt)
            if wanted[index] < 1:
                raise ValueError(
                    f"target and drafter have room for {target.capacity} tokens, a prompt has {len(prompt)}: "
                    "lower max_length"
                )
            sampling = Sampling(temperature=self._config.temperature, seed=self._data.seed * 1_000_003 + index)
            # One more than wanted: the last token of an answer is never drafted.
            requests.append(
                Request(
                    id=index, tokens=prompt, sampling=sampling, max_new_tokens=wanted[index] + 1, eos_ids=target.eos_ids
                )
            )
        batch = Batch(target, drafter, lengths=Fixed(1), tree=drafter.tree, verify=commit_drafts)
        generations = list(map(Generation, requests))
        for _ in run(batch, generations):
            pass
        for generation in generations:
            index = generation.request.id
            self._continued[index] = generation.tokens[: wanted[index]]

    def _indexed(self, step: int) -> Iterator[tuple[int, Sample]]:
        """The data's samples of a step, each with its index in the run."""
        return enumerate(self._order.samples_of(step), start=step * self._data.per_step)

    def _prompt(self, sample: Sample) -> list[int]:
        return prompt_of(sample, most=self._data.prompt_tokens)

    def state_dict(self) -> dict[str, Any]:
        """See `SampleSource`."""
        return {"continued": self._continued}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `SampleSource`."""
        self._continued = state["continued"]


def _continued(prompt: list[int], answer: list[int]) -> Sample:
    return Sample(tokens=prompt + answer, is_label=[False] * len(prompt) + [True] * len(answer))


def build(config: Config, data: SourceData) -> Rollouts:
    """The samples of the data, some continued by the drafter."""
    return Rollouts(config, data)
