"""Settings of drafters on the target's states whose output head is the target's, some of its rows, or a small one."""

from __future__ import annotations

from pydantic import Field

from paradraft.data.samples import label_counts
from paradraft.formats.head import read_checkpoint
from paradraft.formats.vocab_map import D2T, VocabMap
from paradraft.sources.loading import locate
from paradraft.train.drafters.heads import DECAY, HeadRecipe, frozen_target
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.trainee import RunData


class DraftHeadRecipe(HeadRecipe):
    """Settings of trainings whose output head is the target's, or a smaller one."""

    draft_vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="ids that can be drafted: the most frequent ones among the labels, or those of start; by default "
        "all",
    )
    head_rank: int | None = Field(
        default=None,
        ge=1,
        description="rank of an output head that is trained; by default the target's head is used and not trained",
    )

    @property
    def rank_of_head(self) -> int | None:
        """See `HeadRecipe`."""
        return self.head_rank

    def draft_ids(self, vocab_size: int) -> int:
        """See `HeadRecipe`; raises ValueError if the target has fewer."""
        if (size := self.draft_vocab_size) is not None and size > vocab_size:
            raise ValueError(f"draft_vocab_size={size}: model {self.model!r} has {vocab_size} tokens")
        return size or vocab_size

    def vocab_map(self, data: RunData, vocab_size: int) -> VocabMap | None:
        """The ids that can be drafted; None for all. Raises ValueError as `draft_ids`."""
        if self.draft_vocab_size is None:
            return None
        size = self.draft_ids(vocab_size)
        if self.start is not None:
            weights = read_checkpoint(locate(self.start, "draft")).weights
            if D2T in weights and len(weights[D2T]) == size:
                return VocabMap.stored(weights[D2T], None, rows=size, vocabulary=vocab_size, name=self.start)
        return VocabMap.of_counts(label_counts(data.samples, vocab_size), size=size)


class MedusaWeights(DraftHeadRecipe):
    """Settings of trainings whose loss is Medusa's (ParallelSpec, Eq. 2 and 3)."""

    depth_weights: list[float] | None = Field(
        default=None,
        description="a list: weights of the draft positions, from position 1 on; by default 1, 0.8, 0.64, ...",
    )

    @property
    def weights_by_depth(self) -> list[float]:
        """λ by depth."""
        return self.depth_weights or [DECAY**depth for depth in range(self.depths)]


def trimmed_target(recipe: DraftHeadRecipe, data: RunData) -> Teacher:
    """Loads the frozen target, with the logits of the ids that can be drafted; raises ValueError as `frozen_target`."""
    target = frozen_target(recipe, data)
    vocab_map = recipe.vocab_map(data, target.vocab_size)
    return target if vocab_map is None else target.trimmed(vocab_map.below(target.vocab_size, data.device))
