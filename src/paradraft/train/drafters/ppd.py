"""PPD training: trains embeddings of prompt tokens for a frozen model (Chen et al. 2024, section 3).

The i-th prompt token after a text's token learns the token i + 1 positions ahead, with the model's own distribution
there as its teacher. Rows are PARD's (`rows.py`): a prompt token is a mask at its position, and its *anchor* is the
text's token that its chain follows. One pass without gradients fills the KV cache with the texts; a second pass reads
all prompt tokens with this cache, as in decoding.

Loss: KL(p || q), weighted by 0.8^(i - 1) (Eq. 1; it is missing in the paper's text, this is Medusa's form, to which
the paper refers). The paper puts one chain of prompt tokens at a random position of each text; here many anchors share
a text.

Shape letters: S groups of samples, N tokens of the longest, R rows, M prompt tokens of the group with most, P prompt
tokens of a chain, E copies, X rows of copies (M * E), T prefix tokens, D hidden size, V vocabulary, K depths.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import DynamicCache

from paradraft.data.samples import Sample
from paradraft.drafters.ppd import MOST_PROMPTS
from paradraft.models.architectures import head_size, spec_of
from paradraft.models.forward.gated import shapes_of
from paradraft.sources.loading import load_config, locate
from paradraft.train import memory
from paradraft.train.drafters.heads import DECAY, HeadObjective, HeadRecipe, HeadTrainee, check_memory, frozen_target
from paradraft.train.drafters.trained_change import TrainedChange
from paradraft.train.objectives.batch import Drop, TrainingBatch
from paradraft.train.objectives.chunks import rows_at_once
from paradraft.train.objectives.losses import IGNORED, Divergence
from paradraft.train.objectives.rows import FILLING, as_mask
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.optimizers import Schedule
from paradraft.train.recipe_parts import Part
from paradraft.train.trainee import RunData

RANKS = 10
"""Guesses, the likeliest first, whose accuracy is measured."""
COUNTED = 64
"""Rows of each prompt token whose ranks are counted in a training step; of held-out samples all are."""
MEASURED_SIZE = 24
"""Tree size when acceptance lengths are measured."""
HEAD_SPEED = 0.1
"""Learning rate of the own head, relative to that of the prompt tokens, as in the official code."""


class PpdRecipe(HeadRecipe):
    """Settings of `paradraft train ppd`; the defaults are the paper's, where it names one."""

    PARTS: ClassVar[tuple[Part, ...]] = (
        *HeadRecipe.PARTS,
        Part(settings=("visibility", "aggregation"), wanted="copies=2 or more", is_on=lambda recipe: recipe.copies > 1),
    )

    k: int = Field(
        default=3, ge=1, le=MOST_PROMPTS, description="prompt tokens after a token, and so the most tokens drafted"
    )
    change_rank: int = Field(
        default=0,
        ge=0,
        description="rank of changes of the model's attention that only prompt tokens see (gated LoRA); 0: none",
    )
    copies: int = Field(default=1, ge=1, description="embeddings of each prompt token (the paper's EPTs)")
    anchors: float = Field(
        default=0.3, gt=0, le=1, description="share of an answer's positions with prompt tokens in each step"
    )
    decay: float = Field(default=DECAY, gt=0, le=1, description="ratio of the weights of consecutive prompt tokens")
    loss: Literal["cross_entropy", Divergence] = Field(
        default="forward_kl", description="forward_kl (Eq. 1) and other divergences; or cross_entropy with the text"
    )
    visibility: Literal["ensemble", "decoder", "encoder"] = Field(
        default="ensemble",
        description="attention between copies: to copies of the same index (ensemble, B.5.1), to all earlier ones in "
        "their order (decoder, B.5.2), to all of this prompt token and of those before it (encoder, B.5.3)",
    )
    aggregation: Literal["mean", "weights"] = Field(
        default="mean", description="combination of the copies' states: their mean, or learned weights (B.6)"
    )
    prefix: int = Field(default=0, ge=0, description="trained keys and values that each prompt token sees (B.3)")
    exits: int = Field(default=1, ge=1, description="last layers whose states are averaged (B.7)")
    own_head: bool = Field(
        default=False, description="an output head for prompt tokens (B.4); with start, its second stage"
    )
    nf4: bool = Field(
        default=False,
        description="store the frozen model's matrices in 4 bits (NF4, through torchao): a quarter of their memory; "
        "drafts are for the model as it is",
    )
    depth_weights: list[float] | None = Field(
        default=None,
        description="a list: a value for real tokens, which have no loss, then weights of the draft positions; by "
        "default see decay",
    )
    lr: float = Field(default=1e-2, gt=0, description="AdamW's highest learning rate")
    schedule: Schedule = Field(default="cosine", description="of the learning rate, see `train pard`")
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up of the learning rate")

    @property
    def depths(self) -> int:
        """Depth 0 of real tokens, which have no loss, and K prompt tokens."""
        return self.k + 1

    @property
    def weights_by_depth(self) -> list[float]:
        """Weights of real tokens, 1, and of each prompt token."""
        if self.depth_weights is not None:
            return self.depth_weights
        return [1.0, *(self.decay**i for i in range(self.k))]

    @property
    def caches_states(self) -> bool:
        """See `Recipe`; prompt tokens need keys and values too."""
        return False

    @property
    def is_decoded(self) -> bool:
        """Whether the drafter can decode with these settings: only with those that the paper recommends."""
        plain = self.prefix == 0 and self.exits == 1 and not self.own_head
        return plain and (self.copies == 1 or self.visibility == "ensemble")

    @property
    def measured_with(self) -> str | None:
        """The target that decodes held-out prompts; None if the drafter cannot decode."""
        return super().measured_with if self.is_decoded else None


class PpdObjective(HeadObjective):
    """Prompt tokens in training, and their loss; see `HeadObjective`."""

    hits: Tensor
    seen: Tensor

    def __init__(self, target: Teacher, recipe: PpdRecipe, *, bf16: bool = False) -> None:
        super().__init__(target, recipe, bf16=bf16)
        self.recipe = recipe
        config, embed = target.model.config, target.model.get_input_embeddings()
        generator = torch.Generator().manual_seed(recipe.seed)
        ids = torch.randint(target.vocab_size, (recipe.k, recipe.copies), generator=generator)
        initial = embed(ids.to(embed.weight.device)).detach().float()
        self.prompts = nn.ParameterDict({"embeddings": nn.Parameter(initial.clone())})
        if recipe.aggregation == "weights":
            self.prompts["weights"] = nn.Parameter(torch.full((recipe.k, recipe.copies), 1 / recipe.copies))
        if recipe.prefix:
            heads, size = config.num_key_value_heads, head_size(config)
            shape = (2, config.num_hidden_layers, heads, recipe.k * recipe.prefix, size)
            self.prompts["prefix"] = nn.Parameter(torch.randn(shape, generator=generator))
        if recipe.own_head:
            self.prompts["head"] = nn.Parameter(torch.zeros(target.model.lm_head.weight.shape))
        self.change = TrainedChange(target.model, recipe.change_rank, generator) if recipe.change_rank else None
        # Correct guesses by rank, on held-out samples once they have been evaluated.
        self.register_buffer("hits", torch.zeros(recipe.k, RANKS))
        self.register_buffer("seen", torch.zeros(recipe.k))
        self._was_held_out = False

    def train(self, mode: bool = True) -> PpdObjective:
        """Resets the counts before held-out samples are evaluated."""
        if not mode:
            self._was_held_out = True
            self.hits.zero_()
            self.seen.zero_()
        super().train(mode)
        return self

    def forward(self, batch: TrainingBatch, weights_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Trainee.objective`."""
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            cache = DynamicCache()
            read_SND = self.target.read(batch.texts, cache)
            hidden_SRD = self._read_prompts(batch, cache, read_SND)
            if not self.training or not self._was_held_out:
                self._count(batch, hidden_SRD.detach())
            return self.loss(hidden_SRD, batch, read_SND, weights_K).sums

    def _read_prompts(self, batch: TrainingBatch, cache: DynamicCache, read_SND: Tensor) -> Tensor:
        """Returns `[S, R, D]` states of all prompt tokens; zeros for real tokens, which have no loss."""
        recipe, E, dtype = self.recipe, self.recipe.copies, read_SND.dtype
        rows_SM, is_real_SM = prompt_rows(batch)
        hidden_SRD = torch.zeros(*batch.depths.shape, read_SND.shape[2], dtype=dtype, device=rows_SM.device)
        if not rows_SM.shape[1]:
            return hidden_SRD + sum(weight.sum() for weight in self.parameters()) * 0.0
        of_rows = {name: getattr(batch, name).gather(1, rows_SM) for name in ("positions", "depths")}
        positions_SM, index_SM = of_rows["positions"], of_rows["depths"] - 1
        documents_SM = batch.documents.gather(1, rows_SM).masked_fill(~is_real_SM, FILLING)
        anchors_SM = positions_SM - index_SM - 1
        sees = [self._sees_texts(batch, anchors_SM, documents_SM)]
        if recipe.prefix:
            self._add_prefixes(cache, len(rows_SM), dtype)
            index_T = torch.arange(recipe.k, device=rows_SM.device).repeat_interleave(recipe.prefix)
            sees.append((index_SM.clamp(min=0)[:, :, None] == index_T).repeat_interleave(E, dim=1))
        sees.append(self._sees_prompts(anchors_SM, index_SM, documents_SM))
        vectors_SMED = self.prompts["embeddings"][index_SM.clamp(min=0)]
        model: Any = self.target.model.model
        with nullcontext() if self.change is None else self.change.reading():
            out = model(
                inputs_embeds=vectors_SMED.flatten(1, 2).to(dtype),
                attention_mask=as_mask(torch.cat(sees, dim=2), self.target.model),
                position_ids=positions_SM.repeat_interleave(E, dim=1),
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=recipe.exits > 1,
            )
        states_SXD = out.last_hidden_state
        if recipe.exits > 1:
            earlier = [model.norm(states) for states in out.hidden_states[-recipe.exits : -1]]
            states_SXD = torch.stack([*earlier, states_SXD]).mean(0)
        states_SMED = states_SXD.unflatten(1, (-1, E))
        mixed_SMD = states_SMED.mean(2)
        if "weights" in self.prompts:
            weights_SME = self.prompts["weights"][index_SM.clamp(min=0)].to(states_SMED.dtype)
            mixed_SMD = (states_SMED * weights_SME[:, :, :, None]).sum(2)
        index_m = (torch.arange(len(rows_SM), device=rows_SM.device)[:, None] * batch.depths.shape[1] + rows_SM)[
            is_real_SM
        ]
        filled = hidden_SRD.flatten(0, 1).index_copy(0, index_m, mixed_SMD[is_real_SM].to(dtype))
        return filled.view_as(hidden_SRD)

    def _sees_texts(self, batch: TrainingBatch, anchors_SM: Tensor, documents_SM: Tensor) -> Tensor:
        """`[S, X, N]` whether each copy sees each token of the texts: those up to its anchor."""
        texts = batch.texts
        sees_SMN = (texts.positions[:, None] <= anchors_SM[:, :, None]) & (
            texts.documents[:, None] == documents_SM[:, :, None]
        )
        return sees_SMN.repeat_interleave(self.recipe.copies, dim=1)

    def _sees_prompts(self, anchors_SM: Tensor, index_SM: Tensor, documents_SM: Tensor) -> Tensor:
        """`[S, X, X]` whether each copy sees each other: those of its anchor, by the recipe's `visibility`."""
        E = self.recipe.copies
        anchors, index, documents = (each.repeat_interleave(E, dim=1) for each in (anchors_SM, index_SM, documents_SM))
        copies = torch.arange(E, device=anchors.device).repeat(anchors_SM.shape[1])
        is_one_chain = (anchors[:, :, None] == anchors[:, None]) & (documents[:, :, None] == documents[:, None])
        own, other = index[:, :, None], index[:, None]
        if self.recipe.visibility == "ensemble":
            return is_one_chain & (other <= own) & (copies[:, None] == copies)
        if self.recipe.visibility == "decoder":
            return is_one_chain & (other * E + copies <= own * E + copies[:, None])
        return is_one_chain & (other <= own)

    def _add_prefixes(self, cache: DynamicCache, rows: int, dtype: torch.dtype) -> None:
        """Appends the trained keys and values to the KV cache, after those of the texts."""
        keys, values = self.prompts["prefix"]
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            cache.update(*(part.to(dtype).expand(rows, -1, -1, -1) for part in pair), layer)

    def head(self, hidden_mD: Tensor, depths_m: Tensor) -> Tensor:
        """Returns logits of the frozen head, or of the prompt tokens' own head, which is initialized to it."""
        logits_mV = super().head(hidden_mD, depths_m)
        if "head" in self.prompts:
            logits_mV = logits_mV + HEAD_SPEED * nn.functional.linear(
                hidden_mD, self.prompts["head"].to(hidden_mD.dtype)
            )
        return logits_mV

    @torch.no_grad()
    def _count(self, batch: TrainingBatch, hidden_SRD: Tensor) -> None:
        """Counts the ranks of the text's tokens among the guesses."""
        for i in range(self.recipe.k):
            is_counted = (batch.depths == i + 1) & (batch.labels != IGNORED)
            rows = is_counted.flatten().nonzero()[:, 0]
            if self.training:
                rows = rows[:COUNTED]
            for rows_m in rows.split(rows_at_once(self.target.ids, hidden_SRD.device)):
                logits_mV = self.head(hidden_SRD.flatten(0, 1)[rows_m], batch.depths.flatten()[rows_m])
                logits_mV = logits_mV[:, : self.target.vocab_size]
                own_m1 = logits_mV.gather(1, batch.labels.flatten()[rows_m][:, None])
                ranks_m = (logits_mV > own_m1).sum(1)
                self.hits[i] += torch.bincount(ranks_m[ranks_m < RANKS], minlength=RANKS)
                self.seen[i] += len(rows_m)


def prompt_rows(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Indices `[S, M]` of each group's prompt tokens, and whether each is real: shorter lists are padded with 0."""
    is_prompt_SR = (batch.depths > 0) & (batch.documents != FILLING)
    most = int(is_prompt_SR.sum(1).max())
    rows_SM = (~is_prompt_SR).long().argsort(dim=1, stable=True)[:, :most]
    is_real_SM = is_prompt_SR.gather(1, rows_SM)
    return rows_SM.masked_fill(~is_real_SM, 0), is_real_SM


class PpdTrainee(HeadTrainee):
    """The `Trainee` of prompt tokens."""

    def collate(self, groups: list[list[Sample]], generators: list[list[torch.Generator]]) -> TrainingBatch:
        """See `Trainee`; real tokens have no label."""
        batch = super().collate(groups, generators)
        return replace(batch, labels=batch.labels.masked_fill(batch.depths == 0, IGNORED))

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes the prompt tokens in bf16, and their accuracy by rank; see `paradraft.formats.head`."""
        hits, seen = (weights[name].float().cpu() for name in ("hits", "seen"))
        # Smoothed by one more row: a rank without hits in a few rows may have some in others.
        expected = 0.5 ** torch.arange(1, RANKS + 1)
        shares = (hits + expected) / (seen[:, None] + 1)
        self._config["accuracy"] = [[round(share, 6) for share in row] for row in shares.tolist()]
        super().save(folder, {name: weight for name, weight in weights.items() if name not in ("hits", "seen")})


def build(recipe: PpdRecipe, data: RunData) -> PpdTrainee:
    """Checks settings and memory, then loads the model. See `Builder`."""
    config = load_config(locate(recipe.model, "target"))
    if recipe.gradient_checkpointing:
        raise ValueError(
            "gradient_checkpointing=true: prompt tokens are read with a cache, which it excludes: leave it out"
        )
    if recipe.nf4 and spec_of(config).has_experts:
        raise ValueError("nf4=true: torchao stores linear layers, and experts are none: leave it out")
    if recipe.change_rank and spec_of(config).is_fused:
        fused = f"{config.model_type} models have one matrix for queries, keys and values"
        raise ValueError(f"change_rank={recipe.change_rank}: {fused}: leave change_rank out")
    if recipe.exits > (most := config.num_hidden_layers):
        raise ValueError(f"exits={recipe.exits}: model {recipe.model!r} has {most} layers")
    trained = recipe.k * recipe.copies * config.hidden_size + recipe.own_head * config.vocab_size * config.hidden_size
    trained += sum(map(math.prod, shapes_of(config, recipe.change_rank).values()))
    prompts = recipe.anchors * recipe.k * recipe.copies
    kept = memory.kept_by_layers(recipe, config, bf16=data.bf16) * prompts / (1 + prompts)
    needed = check_memory(
        recipe,
        data,
        trained=trained,
        kept=kept,
        rows_per_token=1 + prompts,
        attended_per_token=1 + prompts,
        has_gradients=True,
        nf4=recipe.nf4,
    )
    # Passes with a KV cache use SDPA, also on GPUs.
    with_sdpa = recipe if recipe.attention == "eager" else recipe.model_copy(update={"attention": "sdpa"})
    target = frozen_target(with_sdpa, data, has_gradients=True, nf4=recipe.nf4)
    objective = PpdObjective(target, recipe, bf16=data.bf16).to(data.device)
    head_config = {
        "hidden_size": config.hidden_size,
        "prompt_tokens": recipe.k,
        "copies": recipe.copies,
        "is_decoded": recipe.is_decoded,
        "change_rank": recipe.change_rank,
    }
    drop = Drop(k=recipe.depths, r=recipe.anchors, r_min=recipe.anchors, mask_id=0, first=1)
    trainee = PpdTrainee("ppd", recipe, objective, head_config, drop, needed)
    # Measured with a tree size that does not depend on the machine's plan.
    trainee.drafter = f"ppd:size={max(MEASURED_SIZE, recipe.copies)}:prompts={min(recipe.k, MOST_PROMPTS)}"
    return trainee
