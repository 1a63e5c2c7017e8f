"""Settings of PARD training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from paradraft.formats.path_heads import MOST_RANK
from paradraft.sources.loading import locate
from paradraft.train.init.adaptation import Lora
from paradraft.train.objectives.losses import DIVERGENCE_NAMES, Divergence
from paradraft.train.recipe import Recipe
from paradraft.train.recipe_parts import Part

ORDINARY_K = 4
"""K when an ordinary draft is measured."""


class PardRecipe(Recipe):
    """Settings of `paradraft train pard`; the defaults of k, r and r_min are the paper's."""

    ROLES: ClassVar[dict[str, str]] = {"model": "draft", "teacher": "target", "target": "target"}
    PARTS: ClassVar[tuple[Part, ...]] = (
        *Recipe.PARTS,
        Part(
            settings=(
                "r",
                "r_min",
                "mask_token_id",
                "distinct_masks",
                "depth_weights",
                "previous_token_rank",
            ),
            wanted="k=2 or more",
            is_on=lambda recipe: recipe.k > 1,
        ),
    )

    model: str = Field(description="the draft to adapt: a Hugging Face id, a folder, or pocket")
    k: int = Field(
        default=8, ge=1, description="tokens that one draft pass learns to predict; 1 trains an ordinary draft"
    )
    r: float = Field(default=0.7, gt=0, le=1, description="COD: share of rows kept from position to position")
    r_min: float = Field(default=0.2, ge=0, le=1, description="COD: least share of rows at any position")
    mask_token_id: int | None = Field(
        default=None, description="by default an unused row of the embedding, or a special token that is never output"
    )
    distinct_masks: bool = Field(
        default=False,
        description="a mask token for each position from 2 on; one for all is better, and engines support only that",
    )
    previous_token_rank: int | None = Field(
        default=None,
        ge=0,
        le=MOST_RANK,
        description="rank of the head that gives each mask the tokens drafted before it; 0: none; by default the "
        "model's",
    )
    draft_temperature: float = Field(
        default=1.0,
        ge=0.1,
        le=10,
        description="the saved drafter's logits are divided by this; below 1 its distribution is sharper",
    )
    teacher: str | None = Field(default=None, description="learn this model's probabilities, not the text's tokens")
    loss: Literal["cross_entropy", Divergence] | None = Field(
        default=None,
        description="cross_entropy; with a teacher (default: forward_kl) " + DIVERGENCE_NAMES,
    )
    lora: Lora | None = Field(default=None, description="train adapters of low rank, and the mask's embedding")
    target: str | None = Field(
        default=None, description="decode held-out prompts with this target to measure; by default the teacher"
    )

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if self.divergence is not None and self.teacher is None:
            raise ValueError(f"loss={self.loss}: name a teacher")
        if self.row_loss.needs_teacher and self.teacher is None:
            raise ValueError(f"weighting={self.weighting}: only a teacher knows it, name one")
        if self.teacher is not None and not self.uses_teacher:
            raise ValueError(
                f"loss={self.loss}: use one of the divergences, a weighting that needs one, or leave teacher out"
            )
        return self

    @property
    def uses_teacher(self) -> bool:
        """Whether training reads a teacher."""
        return self.row_loss.needs_teacher

    @property
    def model_folder(self) -> str:
        """Folder or Hugging Face id of the model."""
        return locate(self.model, self.ROLES["model"])

    @property
    def depths(self) -> int:
        """K, the tokens that one draft pass predicts."""
        return self.k

    @property
    def caches_states(self) -> bool:
        """See `Recipe`."""
        return self.teacher is not None

    @property
    def masks(self) -> int:
        """Number of mask tokens."""
        return max(self.k - 1, 1) if self.distinct_masks else 1

    @property
    def divergence(self) -> Divergence | None:
        """Divergence from the teacher; None learns the tokens of the text."""
        if self.loss is None:
            return None if self.teacher is None else "forward_kl"
        return None if self.loss == "cross_entropy" else self.loss

    @property
    def measured_with(self) -> str | None:
        """The target that decodes held-out prompts: `target`, or else the teacher."""
        return self.teacher if self.target is None else self.target

    def decoded_with(self, name: str) -> tuple[str, int]:
        """See `Recipe`; an ordinary draft has no masks."""
        return ("autoregressive", ORDINARY_K) if self.k == 1 else (name, self.k)

    @classmethod
    def continuing(cls, own: Mapping[str, Any], drafter: str, target: str | None) -> dict[str, Any]:
        """See `Recipe`; the weights of the drafter have its temperature."""
        role = "target" if own["teacher"] is None else "teacher"
        of_target = {} if target is None else {"target": None, role: target}
        return {"model": drafter, "draft_temperature": 1.0, **of_target}

    @property
    def identity(self) -> dict[str, Any]:
        """See `Recipe`. Excludes the class, because the first runs, before other recipes existed, did not record it."""
        return {key: value for key, value in super().identity.items() if key != "recipe"}
