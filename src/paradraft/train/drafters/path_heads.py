"""Heads in training that let a row's prediction depend on the tokens before it (`drafters.parts.path_heads`).

Those tokens are the text's, as if they had been drafted.

Shape letters: S groups of samples, N tokens of the longest, R rows, m some of them, D width, E inputs of a row's
logits, X rank of a head, V target ids, U drafted ids, C likeliest tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Self

from pydantic import Field, model_validator
from torch import Tensor, cat, nn
from transformers import PretrainedConfig

from paradraft.drafters.parts.path_heads.markov import MarkovHead
from paradraft.drafters.parts.path_heads.previous_token import PreviousTokenHead, new_head
from paradraft.drafters.parts.path_heads.selector import SelectorHead
from paradraft.formats.path_heads import MARKOV_RANK, MOST_RANK, PREFIXES, PREVIOUS_TOKEN_RANK, RANKS, SELECTOR_RANK
from paradraft.models.output_head import sizes_of
from paradraft.models.quantized import as_numbers
from paradraft.train.drafters.heads import HeadObjective, HeadRecipe
from paradraft.train.drafters.output_heads import DraftHeadRecipe
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.objective import corrected
from paradraft.train.objectives.selection import Selecting
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.optimizers import WITHOUT_MUON

Rank = Annotated[int, Field(ge=0, le=MOST_RANK)]
Head = Callable[[Tensor], Tensor]
"""Logits `[m, U]` of states `[m, D]`."""


class PathHeadRecipe(DraftHeadRecipe):
    """Settings of trainings that may have one of these heads."""

    previous_token_rank: Rank = Field(
        default=0, description="rank of the head that gives each mask the tokens drafted before it; 0: none"
    )
    markov_rank: Rank = Field(
        default=0, description="rank of a head that corrects each token by the one before, as engines read it; 0: none"
    )
    selector_rank: Rank = Field(
        default=0, description="rank of a head that decides between the 16 likeliest tokens by the one before; 0: none"
    )
    head_only: bool = Field(
        default=False,
        description="train only the head of one of these ranks: all other weights and settings are those of start",
    )

    @property
    def path_ranks(self) -> dict[str, int]:
        """The rank of the head by its setting; empty for none."""
        ranks = {name: getattr(self, name) for name in RANKS}
        return {name: rank for name, rank in ranks.items() if rank and (name != PREVIOUS_TOKEN_RANK or self.depths > 1)}

    @model_validator(mode="after")
    def _check_path_head(self) -> Self:
        ranks = [f"{name}={rank}" for name in RANKS if (rank := getattr(self, name))]
        if len(ranks) > 1:
            raise ValueError(f"{', '.join(ranks)}: give one of the heads")
        if self.head_only and (self.start is None or not self.path_ranks):
            raise ValueError(
                "head_only=true: give the drafter whose weights stay as start, and the rank of a head: one of "
                + ", ".join(RANKS)
            )
        if self.head_only and self.optimizer != "adamw":
            raise ValueError(f"optimizer={self.optimizer}: heads are trained by AdamW, set optimizer=adamw and lr")
        return self

    @property
    def trained_part(self) -> str | None:
        """See `HeadRecipe`."""
        return PREFIXES[next(iter(self.path_ranks))] if self.head_only else None

    def path_parameters(self, config: PretrainedConfig) -> int:
        """How many weights the head has on a target of this config."""
        width, ids = config.hidden_size, config.vocab_size + self.draft_ids(config.vocab_size)
        sizes = {
            PREVIOUS_TOKEN_RANK: lambda rank: rank * (3 * width + rank),
            MARKOV_RANK: lambda rank: rank * ids,
            SELECTOR_RANK: lambda rank: rank * (ids + width),
        }
        return sum(sizes[name](rank) for name, rank in self.path_ranks.items())


class TrainedPathHead(ABC):
    """A head in training.

    Args:
        name: prefix of its weights in a checkpoint.
        module: its weights.
    """

    select: Selecting | None = None
    """Scores of the likeliest tokens, if the head decides between these."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        setattr(module, WITHOUT_MUON, True)

    @abstractmethod
    def read(self, hidden_SRD: Tensor, batch: TrainingBatch, embeddings_SND: Tensor) -> Tensor:
        """`[S, R, E]` the inputs of `logits`: the rows' states, and behind them what the head adds.

        Args:
            embeddings_SND: of the texts.
        """

    def logits(self, read_mE: Tensor, head: Head) -> Tensor:
        """`[m, U]` logits of rows from what `read` returned."""
        return head(read_mE)


class PreviousToken(TrainedPathHead):
    """See `PreviousTokenHead`."""

    def __init__(self, head: PreviousTokenHead) -> None:
        super().__init__(PREFIXES[PREVIOUS_TOKEN_RANK], head)
        self._head = head

    def read(self, hidden_SRD: Tensor, batch: TrainingBatch, embeddings_SND: Tensor) -> Tensor:
        """See `TrainedPathHead`."""
        return corrected(self._head, hidden_SRD, batch, embeddings_SND)


class Markov(TrainedPathHead):
    """See `MarkovHead`."""

    def __init__(self, head: MarkovHead, width: int) -> None:
        super().__init__(PREFIXES[MARKOV_RANK], head)
        self._head, self._width = head, width

    def read(self, hidden_SRD: Tensor, batch: TrainingBatch, embeddings_SND: Tensor) -> Tensor:
        """See `TrainedPathHead`."""
        return cat([hidden_SRD, self._head.embedding(batch.tokens_before).to(hidden_SRD.dtype)], dim=-1)

    def logits(self, read_mE: Tensor, head: Head) -> Tensor:
        """See `TrainedPathHead`."""
        logits: Tensor = head(read_mE[:, : self._width]) + self._head.output(read_mE[:, self._width :])
        return logits


class SelectorPath(TrainedPathHead):
    """See `SelectorHead`. The logits have the loss that they have without a head, and the scores of the
    likeliest tokens, which are made of them, another."""

    def __init__(self, head: SelectorHead, width: int) -> None:
        super().__init__(PREFIXES[SELECTOR_RANK], head)
        self._head, self._width = head, width
        self.select = self._scores

    def read(self, hidden_SRD: Tensor, batch: TrainingBatch, embeddings_SND: Tensor) -> Tensor:
        """See `TrainedPathHead`."""
        return cat([hidden_SRD, self._head.read(batch.tokens_before, hidden_SRD)], dim=-1)

    def logits(self, read_mE: Tensor, head: Head) -> Tensor:
        """See `TrainedPathHead`."""
        return head(read_mE[:, : self._width])

    def _scores(self, read_mE: Tensor, logits_mC: Tensor, ids_mC: Tensor) -> Tensor:
        return logits_mC + self._head.corrections(read_mE[:, self._width :], ids_mC)


class PathObjective(HeadObjective):
    """A drafter in training that may have a head of this kind; `hidden` ends with `read`."""

    def __init__(self, target: Teacher, recipe: HeadRecipe, *, bf16: bool = False) -> None:
        super().__init__(target, recipe, bf16=bf16)
        self._path_head = new_path_head(recipe, target) if isinstance(recipe, PathHeadRecipe) else None
        if self._path_head is not None:
            self.add_module(self._path_head.name, self._path_head.module)
            self.select = self._path_head.select

    def read(self, hidden_SRD: Tensor, batch: TrainingBatch) -> Tensor:
        """`[S, R, E]` the inputs of `head`: the rows' states, with those of a path head."""
        if self._path_head is None:
            return hidden_SRD
        embeddings_SND = self.target.model.get_input_embeddings()(batch.texts.tokens)
        return self._path_head.read(hidden_SRD, batch, embeddings_SND.to(hidden_SRD.dtype))

    def head(self, hidden_mD: Tensor, depths_m: Tensor) -> Tensor:
        """See `HeadObjective`."""

        def whole(states_mD: Tensor) -> Tensor:
            return super(PathObjective, self).head(states_mD, depths_m)

        return whole(hidden_mD) if self._path_head is None else self._path_head.logits(hidden_mD, whole)


def new_path_head(recipe: PathHeadRecipe, target: Teacher) -> TrainedPathHead | None:
    """The untrained head of a recipe, which changes nothing yet; None for none."""
    width = target.model.config.hidden_size
    for name, rank in recipe.path_ranks.items():
        if name == PREVIOUS_TOKEN_RANK:
            return PreviousToken(new_head(target.model, rank, seed=recipe.seed))
        embeddings_VD = as_numbers(target.model.get_input_embeddings().weight).detach()
        if name == MARKOV_RANK:
            return Markov(MarkovHead(embeddings_VD, target.ids, rank, seed=recipe.seed), width)
        states = max(sizes_of(target.model)[1], 1e-6)
        return SelectorPath(SelectorHead(embeddings_VD, target.ids, rank, states=states, seed=recipe.seed), width)
    return None
