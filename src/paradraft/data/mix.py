"""Data mix: share and weight of each source in a training run."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from paradraft.data.samples import BEGAN, REFUSED, Sample
from paradraft.models.names import POCKET
from paradraft.sources.loading import pocket_folder


class Source(BaseModel):
    """A source and its part of the mix."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    path: Path = Field(description="of a mix, written {path: FILE, weight: 2, most: 50000}: a file or a dataset")
    weight: float = Field(
        default=1.0,
        ge=0,
        le=1000,
        description="times that each of its samples is taken per epoch; with 0.5 one half of them, in the next epoch "
        "the other; with 0 none: they are the held-out set",
    )
    most: int | None = Field(default=None, ge=1, description="most samples to take, chosen by seed; by default all")
    anchors: Literal["all", "rounds", "refused"] = Field(
        default="all",
        description="of a log of rounds (--rounds): drafts are trained after all tokens, after those at which rounds "
        "began, or only rounds in which something was refused; COD then drops nothing",
    )


ANCHORS = {"all": 0, "rounds": BEGAN, "refused": REFUSED}
PLAIN, MIXED = "file", "mixed"
Entry = Annotated[
    Annotated[Path, Tag(PLAIN)] | Annotated[Source, Tag(MIXED)],
    Discriminator(lambda entry: MIXED if isinstance(entry, (dict, Source)) else PLAIN),
]
"""An entry of a recipe's `data`: a path, or a source with its part of the mix."""


def as_source(entry: Path | Source) -> Source:
    """Turns an entry into a source, by default taken whole once per epoch; "pocket" is the shipped text."""
    source = entry if isinstance(entry, Source) else Source(path=entry)
    if str(source.path) == POCKET:
        return source.model_copy(update={"path": pocket_folder("text.jsonl")})
    return source


def share(samples: list[Sample], source: Source, seed: int) -> list[Sample]:
    """Selects the samples that a run learns from a source, in their order, each with its weight and anchors.

    Raises:
        ValueError: anchors are wanted that all samples lack; those without any are left out, with a warning.

    >>> samples = [Sample(tokens=[i, 0], is_label=[True] * 2) for i in range(9)]
    >>> [sample.tokens[0] for sample in share(samples, Source(path="some.txt", most=3), seed=0)]
    [0, 2, 8]
    """
    if source.most is not None and source.most < len(samples):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(samples), generator=generator)[: source.most].sort().values
        samples = [samples[index] for index in chosen.tolist()]
    if source.anchors != "all":
        if not all(sample.rounds for sample in samples):
            raise ValueError(f"{source.path}: anchors={source.anchors} is for a log of rounds, which --rounds writes")
        marked = [replace(sample, least_round=ANCHORS[source.anchors]) for sample in samples]
        samples = [sample for sample in marked if sample.may_draft().any()]
        if not samples:
            raise ValueError(f"{source.path}: anchors={source.anchors}: no answer has such a round")
        if (bare := len(marked) - len(samples)) > 0:
            warnings.warn(f"{source.path}: {bare} of {len(marked)} answers have no such round", stacklevel=3)
    return samples if source.weight == 1 else [replace(sample, weight=source.weight) for sample in samples]


def taken_in(weights: torch.Tensor, epoch: int, seed: int) -> torch.Tensor:
    """Indices of the samples of an epoch: of n samples with weight w, round(w * n), and at least one.

    Each epoch continues where the last one ended, so that the counts of samples of equal weight differ by at most one.

    Args:
        seed: of the order of samples of equal weight.

    >>> weights = torch.tensor([1.0, 1.0, 0.5, 0.5, 2.0])
    >>> [taken_in(weights, epoch, seed=0).tolist() for epoch in range(2)]
    [[0, 1, 2, 4, 4], [0, 1, 3, 4, 4]]
    """
    indices = []
    for weight in weights.unique().tolist():
        alike = (weights == weight).nonzero()[:, 0]
        count = max(round(weight * len(alike)), 1)
        turns = torch.arange(epoch * count, (epoch + 1) * count) % len(alike)
        order = torch.randperm(len(alike), generator=torch.Generator().manual_seed(seed))
        indices.append(alike[order[turns]])
    return torch.cat(indices).sort().values


def epoch_size(samples: list[Sample]) -> int:
    """Number of samples that an epoch takes."""
    return len(taken_in(weights_of(samples), 0, seed=0))


def weights_of(samples: list[Sample]) -> torch.Tensor:
    """`[n]` weights of samples."""
    return torch.tensor([sample.weight for sample in samples], dtype=torch.float64)
