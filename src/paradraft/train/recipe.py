"""Settings shared by all recipes: data, optimisation, memory, evaluation, output. Each drafter's recipe adds more.

A contradictory recipe is rejected. Settings of a part that is switched off only give a warning, so that a published
recipe can be tried with `optimizer=adamw`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from paradraft.data.mix import Entry, Source, as_source
from paradraft.data.tokens.tokenized import Long
from paradraft.digests import file_digest, model_digest
from paradraft.models.names import POCKET
from paradraft.sources.loading import pocket_folder
from paradraft.sources.records import check_columns
from paradraft.train.objectives.losses import Divergence, Reduction
from paradraft.train.objectives.row_loss import RowLoss
from paradraft.train.objectives.rows import FLEX, fastest_attention
from paradraft.train.objectives.weightings import NONE, weighting_of
from paradraft.train.optimizers import Schedule
from paradraft.train.recipe_parts import Part
from paradraft.train.samples import DATASET, source_config, source_identity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Beta = Annotated[float, Field(ge=0, lt=1)]
NOT_DECISIVE = frozenset({
    "out", "log_every", "save_every", "report_to", "skip_unlabelled", "device", "attention", "gradient_checkpointing",
    "samples_per_pass", "pack", "bf16", "feature_cache_gb",
})  # fmt: skip
"""Settings that change location, speed and memory of a training but, except for rounding, not the drafter. Checkpoints
record their precision, because `bf16` may be None."""


CHECKPOINT, STATES = "checkpoint", "states"
"""Folder in `out` of the checkpoints of an unfinished run, and that in it of `feature_cache_gb`."""


class Recipe(BaseModel):
    """Settings of every training run; a subclass adds those of a drafter, and overrides properties that depend on them.

    Paths are relative to the working directory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ROLES: ClassVar[dict[str, str]] = {"model": "target", "target": "target"}
    """Settings that name models, and the model of the shipped family that "pocket" is in each."""
    PARTS: ClassVar[tuple[Part, ...]] = (
        Part(settings=("muon_lr",), wanted="optimizer=muon", is_on=lambda recipe: recipe.optimizer == "muon"),
        Part(
            settings=("prompts", "prompt_tokens", "answer_tokens"),
            wanted="a target to measure with",
            is_on=lambda recipe: recipe.measured_with is not None,
        ),
        Part(settings=("feature_cache_gb",), wanted="states to keep", is_on=lambda recipe: recipe.caches_states),
        Part(
            settings=("pack",),
            wanted="samples_per_pass=2 or more",
            is_on=lambda recipe: (recipe.samples_per_pass or recipe.samples_per_step) > 1,
        ),
    )
    """Parts for `ignored_settings`."""

    model: str = Field(
        description="the model to begin with, whose tokenizer reads the data: a Hugging Face id, a folder, or pocket"
    )
    data: list[Entry] = Field(
        min_length=1,
        description="text, JSONL or Parquet files, or Hugging Face datasets: name, name:split; or each with its part "
        "of the mix, see data.path",
    )
    columns: dict[str, str] = Field(
        default={},
        description="the data's names for text, prompt, response, messages, user or assistant, if they differ",
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default={}, description="variables of the chat template, such as Qwen3's enable_thinking, as it will be served"
    )
    date_string: str | None = Field(
        default=None,
        description="today's date in the chat template, if it writes one; by default the day on which the run began, "
        "also after a resume",
    )
    skip_unlabelled: bool = Field(default=False, description="skip samples without labels")
    source: str = Field(
        default=DATASET,
        description="where the samples of a step come from, as name or name:setting=value:...; dataset: the data, "
        "shuffled in each epoch",
    )
    out: Path = Field(description="folder of the drafter")

    average: Reduction = Field(
        default="token_mean",
        description="token_mean, over all rows, or per_depth: over those of each position of a draft, then over the "
        "positions (Eq. 8)",
    )
    depth_weights: list[float] | None = Field(
        default=None, description="a list: weights of the draft positions, from position 1 on; by default 1"
    )

    hard_share: float = Field(
        default=0.0, ge=0, description="weight of the cross-entropy with the text's tokens beside a divergence"
    )
    weighting: str = Field(
        default=NONE,
        description="weights of rows within their draft: none; chain:power=1, the teacher's probability of the tokens "
        "before; expected_length:by=acceptance|text|siblings:floor=0:siblings=3, the row's share in it; valid_prefix, "
        "0 after the first wrong token; first_error:boost=0:decay=0.8, less after that token",
    )

    steps: int | None = Field(default=None, ge=1, description="optimizer steps; give these or epochs")
    epochs: float | None = Field(default=None, gt=0, description="times through the data")
    samples_per_step: int = Field(default=8, ge=1, description="samples of one step, on all devices together")
    samples_per_pass: int | None = Field(
        default=None, ge=1, description="samples of a pass on each device; fewer take less memory"
    )
    max_length: int = Field(default=1024, ge=2, description="most tokens of a sample")
    long: Long = Field(
        default="auto",
        description="longer samples: truncate, split, or auto: split plain text, truncate what has a prompt or turns",
    )
    pack: bool = Field(default=False, description="pack short samples into sequences of up to max_length")
    feature_cache_gb: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="disk space for the states of the teacher or target, which are then computed once for all epochs; "
        "0: they are not kept; by default 8 if its weights are stored in few bits, else 0",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="adamw, or muon for the matrices and AdamW for the rest"
    )
    lr: float = Field(default=2e-5, gt=0, description="AdamW's highest learning rate")
    muon_lr: float = Field(default=1e-2, gt=0, description="Muon's highest learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="of the matrices")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's")
    max_grad_norm: float | None = Field(
        default=1.0,
        ge=0,
        description="gradients with a larger norm, over all parameters, are scaled down to it; null or 0: none are",
    )
    warmup_steps: int = Field(default=50, ge=0, description="linear warm-up of the learning rate")
    schedule: Schedule = Field(
        default="linear",
        description="after the warm-up: linear or cosine decay to 0, constant, or warmup_stable_decay, constant until "
        "the last fifth",
    )

    bf16: bool | None = Field(
        default=None, description="compute in bf16 (weights stay in float32); by default where the device can"
    )
    attention: Literal["auto", "sdpa", "flex_attention", "eager"] = Field(
        default="auto",
        description="auto: flex_attention on GPUs, elsewhere text and chain alone; sdpa, eager: with a dense mask",
    )
    gradient_checkpointing: bool = Field(default=False, description="less memory for a third more time")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="cpu, cuda, or auto: a GPU if there is one"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="of the order of samples and the dropped rows")

    log_every: int = Field(default=10, ge=1, description="steps between reports")
    save_every: int = Field(default=100, ge=1, description="steps between checkpoints")
    report_to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        default=[], description="trackers: tensorboard, wandb, mlflow, trackio"
    )
    held_out: int | None = Field(
        default=None,
        ge=0,
        description="size of the held-out set; by default 1 in 20 samples, or all data of weight 0, at most 64",
    )
    evaluate_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between evaluations; by default a tenth, or "
        "more if evaluations took more than a tenth of the time",
    )
    target: str | None = Field(default=None, description="decode held-out prompts with this target to measure")
    prompts: int = Field(default=8, ge=1, description="count of held-out prompts")
    prompt_tokens: int = Field(default=64, ge=1, description="tokens of a prompt that is cut from plain text")
    answer_tokens: int = Field(default=64, ge=1, description="most tokens of the target's answer")
    patience: int | None = Field(
        default=None, ge=1, description="evaluations without improvement after which the run stops"
    )

    @field_validator("max_grad_norm")
    @classmethod
    def _zero_is_none(cls, norm: float | None) -> float | None:
        return norm or None

    @model_validator(mode="before")
    @classmethod
    def _wrap_scalars(cls, values: Any) -> Any:
        """Accepts a scalar for a list: the brackets of `data=[FILE]` have another meaning in some shells."""
        if not isinstance(values, dict):
            return values
        wrapped = dict(values)
        for name, field in cls.model_fields.items():
            kinds = {get_origin(kind) or kind for kind in (field.annotation, *get_args(field.annotation))}
            value = wrapped.get(name)
            is_scalar = isinstance(value, (str, Path, int, float)) and not isinstance(value, bool)
            if list in kinds and (is_scalar or (name == "data" and isinstance(value, (dict, Source)))):
                wrapped[name] = [value]
        return wrapped

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"steps={self.steps}, epochs={self.epochs}: give either steps or epochs, the other as null"
            )
        if self.depth_weights is not None:
            if len(self.depth_weights) != self.depths:
                raise ValueError(
                    f"depth_weights: {len(self.depth_weights)} numbers for {self.depths} depths, give one each"
                )
            if min(self.depth_weights) < 0 or max(self.depth_weights) == 0:
                raise ValueError(f"depth_weights={self.depth_weights}: use numbers from 0, not all 0")
        if self.date_string is not None and "date_string" in self.chat_template_kwargs:
            raise ValueError("date_string: chat_template_kwargs sets it too, give it once")
        if self.out == Path():
            raise ValueError("out: name a folder of its own")
        if self.held_out == 0:
            self.check_measurable(0)
        self.check_device(self.device)
        check_columns(self.columns)
        source_config(self.source)
        row_loss = self.row_loss  # raises for a wrong weighting
        if self.hard_share and row_loss.kind is None:
            raise ValueError(f"hard_share={self.hard_share}: the loss is the cross-entropy already, leave it out")
        return self

    def check_measurable(self, held_out: int) -> None:
        """Raises ValueError if the recipe asks for measurements but no samples are held out."""
        settings = {name: getattr(self, name) for name in ("target", "evaluate_every", "patience")}
        for name, value in settings.items():
            if value is not None and not held_out:
                raise ValueError(f"{name}={value}: nothing is held out to measure with, set held_out")

    def check_device(self, kind: str) -> None:
        """Raises ValueError if a device type, such as "cpu", does not support the settings."""
        if self.attention == FLEX and kind == "cpu":
            raise ValueError("attention=flex_attention: it has no backward pass on a CPU, use sdpa")

    def set_up_passes(self, model: PreTrainedModel, *, on_gpu: bool) -> None:
        """Sets a model's attention and gradient checkpointing."""
        fastest = fastest_attention(model.config, on_gpu=on_gpu)
        model.set_attn_implementation(fastest if self.attention == "auto" else self.attention)
        if self.gradient_checkpointing:
            # `transformers` renamed it in 5.23.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})

    @property
    def depths(self) -> int:
        """K, the consecutive tokens that a training pass learns to predict."""
        return 1

    @property
    def weights_by_depth(self) -> list[float]:
        """Weight of the loss at each depth."""
        return self.depth_weights or [1.0] * self.depths

    @property
    def divergence(self) -> Divergence | None:
        """Divergence from a teacher's probabilities; None learns the tokens of the text."""
        return None

    @property
    def row_loss(self) -> RowLoss:
        """The loss of a row, and its weight."""
        return RowLoss(kind=self.divergence, hard_share=self.hard_share, weighting=weighting_of(self.weighting))

    @property
    def caches_states(self) -> bool:
        """Whether the states of a frozen model are kept."""
        return False

    @property
    def measured_with(self) -> str | None:
        """The target that decodes held-out prompts, if any."""
        return self.target

    def decoded_with(self, name: str) -> tuple[str, int | None]:
        """Returns the drafter that decodes with the result of training `name`, and its K; None if it has no K."""
        return name, getattr(self, "k", None)

    @classmethod
    def continuing(cls, own: Mapping[str, Any], drafter: str, target: str | None) -> dict[str, Any]:
        """Settings of a run that goes on with a drafter.

        Args:
            own: settings of the run that wrote it.
            drafter: its folder.
            target: to draft for; None for the same.
        """
        return {"model": drafter} | ({} if target is None else {"target": target})

    @property
    def identity(self) -> dict[str, Any]:
        """All settings that decide the trained drafter; only an equal identity may resume a run.

        Data and models on this disk are identified by their content, not by their path.
        """
        settings = self.model_dump(mode="json", exclude={*NOT_DECISIVE, "source"}) | source_identity(self.source)
        data = [self._identity_of(source) for source in map(as_source, self.data)]
        return settings | {"recipe": type(self).__name__, "data": data} | self.model_hashes

    def _identity_of(self, source: Source) -> str | dict[str, Any]:
        """Digest of a source, or its name, with its part of the mix if that is not the default."""
        content = self.data_hashes.get(str(source.path), str(source.path))
        part = source.model_dump(exclude={"path"}, exclude_defaults=True)
        return {"path": content} | part if part else content

    @property
    def fingerprint(self) -> str:
        """Short digest of the identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def data_hashes(self) -> dict[str, str]:
        """SHA-256 of every local data file, by path."""
        files = [source.path for source in map(as_source, self.data)]
        return {str(file): file_digest(file) for file in files if file.is_file()}

    @cached_property
    def model_hashes(self) -> dict[str, str]:
        """SHA-256 of every local model folder, by role."""
        folders = {
            role: pocket_folder(shipped) if name == POCKET else Path(name)
            for role, shipped in self.ROLES.items()
            if (name := getattr(self, role)) is not None
        }
        return {role: model_digest(folder) for role, folder in folders.items() if folder.is_dir()}
