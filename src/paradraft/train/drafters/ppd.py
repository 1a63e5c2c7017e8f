"""PPD training: the embeddings of prompt tokens, of a frozen model (Chen et al. 2024, section 3).

The i-th prompt token after a text's token learns the token i + 1 places on, with the model's own distribution there as
its teacher. Rows are PARD's (`rows.py`): a prompt token is a mask at its place, and its *anchor* is what its chain
follows. The texts are read once, without gradients; then all prompt tokens are read with their keys and values, as in
decoding.

Loss: KL(p || q), weighted by 0.8^(i - 1) (Eq. 1; the text of the paper has lost it, this is Medusa's form, to which it
refers). The paper puts one chain of prompt tokens at a random place of each text; here many anchors share a text.

Shape letters: S groups of samples, N tokens of the longest, R rows, M prompt tokens of the group with most, P prompt
tokens of a chain, E copies, X rows of copies (M * E), T prefix tokens, D hidden size, V vocabulary, K depths.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import DynamicCache

from paradraft.data.samples import Sample
from paradraft.drafters.ppd import MOST_PROMPTS
from paradraft.models.architecture import has_experts
from paradraft.models.kv_cache import head_size
from paradraft.sources.loading import load_config, locate
from paradraft.train import memory
from paradraft.train.drafters.heads import DECAY, HeadObjective, HeadRecipe, HeadTrainee, check_memory, frozen_target
from paradraft.train.objectives.batch import Drop, TrainingBatch
from paradraft.train.objectives.losses import IGNORED, Divergence
from paradraft.train.objectives.rows import FILLING, as_mask
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.optimizers import Schedule
from paradraft.train.recipe import Part
from paradraft.train.trainee import RunData

RANKS = 10
"""Of how many guesses the accuracy is counted."""
COUNTED = 64
"""Rows of each number whose ranks are looked at in a training step; of held-out samples it is all."""
MEASURED_SIZE = 24
"""Nodes of a pass when acceptance lengths are measured."""
HEAD_SPEED = 0.1
"""The learning rate of a head of its own, in shares of the prompt tokens', as in the official code."""


class PpdRecipe(HeadRecipe):
    """Settings of `paradraft train ppd`; the defaults are the paper's, but for those that name no default there."""

    PARTS: ClassVar[tuple[Part, ...]] = (
        *HeadRecipe.PARTS,
        Part(settings=("visibility", "aggregation"), wanted="copies=2 or more", is_on=lambda recipe: recipe.copies > 1),
    )

    k: int = Field(
        default=3, ge=1, le=MOST_PROMPTS, description="prompt tokens after a token, and so most tokens drafted in a row"
    )
    copies: int = Field(default=1, ge=1, description="embeddings of each prompt token (the paper's EPTs)")
    anchors: float = Field(
        default=0.3, gt=0, le=1, description="share of an answer's places after which prompt tokens stand in a step"
    )
    decay: float = Field(default=DECAY, gt=0, le=1, description="what each prompt token weighs of the one before it")
    loss: Literal["cross_entropy", Divergence] = Field(
        default="forward_kl", description="forward_kl (Eq. 1) and other divergences; or cross_entropy with the text"
    )
    visibility: Literal["ensemble", "decoder", "encoder"] = Field(
        default="ensemble",
        description="which copies see each other: those of one number (ensemble, B.5.1), all before in their order "
        "(decoder, B.5.2), all of this prompt token and of those before it (encoder, B.5.3)",
    )
    aggregation: Literal["mean", "weights"] = Field(
        default="mean", description="how the states of copies become one: their mean, or learned weights (B.6)"
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
        description="a list: a number for real tokens, of which nothing is learnt, then what each position of a draft "
        "weighs; by default see decay",
    )
    lr: float = Field(default=1e-2, gt=0, description="AdamW's highest learning rate")
    schedule: Schedule = Field(default="cosine", description="of the learning rate, see `train pard`")
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up of the learning rate")

    @property
    def depths(self) -> int:
        """Real tokens, of which nothing is learnt, and prompt tokens."""
        return self.k + 1

    @property
    def weights_by_depth(self) -> list[float]:
        """1 for real tokens, and for each prompt token its weight."""
        if self.depth_weights is not None:
            return self.depth_weights
        return [1.0, *(self.decay**number for number in range(self.k))]

    @property
    def is_decoded(self) -> bool:
        """Whether the drafter can decode with what is trained: only what the paper found best is."""
        plain = self.prefix == 0 and self.exits == 1 and not self.own_head
        return plain and (self.copies == 1 or self.visibility == "ensemble")

    @property
    def measured_with(self) -> str | None:
        """The target that decodes held-out prompts; None where nothing can."""
        return super().measured_with if self.is_decoded else None


class PpdObjective(HeadObjective):
    """Prompt tokens in training, and their loss.

    Args:
        target: the frozen model.
        recipe: the run.
        bf16: see `HeadObjective`.
    """

    hits: Tensor
    seen: Tensor

    def __init__(self, target: Teacher, recipe: PpdRecipe, *, bf16: bool = False) -> None:
        super().__init__(target, recipe, bf16=bf16)
        self.recipe = recipe
        config, embed = target.model.config, target.model.get_input_embeddings()
        generator = torch.Generator().manual_seed(recipe.seed)
        ids = torch.randint(target.vocab_size, (recipe.k, recipe.copies), generator=generator)
        begun = embed(ids.to(embed.weight.device)).detach().float()
        self.prompts = nn.ParameterDict({"embeddings": nn.Parameter(begun.clone())})
        if recipe.aggregation == "weights":
            self.prompts["weights"] = nn.Parameter(torch.full((recipe.k, recipe.copies), 1 / recipe.copies))
        if recipe.prefix:
            heads, size = config.num_key_value_heads, head_size(config)
            shape = (2, config.num_hidden_layers, heads, recipe.k * recipe.prefix, size)
            self.prompts["prefix"] = nn.Parameter(torch.randn(shape, generator=generator))
        if recipe.own_head:
            self.prompts["head"] = nn.Parameter(torch.zeros(target.model.lm_head.weight.shape))
        # How often the guess of each rank was right, on held-out samples as soon as there are some.
        self.register_buffer("hits", torch.zeros(recipe.k, RANKS))
        self.register_buffer("seen", torch.zeros(recipe.k))
        self._was_held_out = False

    def train(self, mode: bool = True) -> PpdObjective:
        """Before held-out samples are measured, forgets what was counted."""
        if not mode:
            self._was_held_out = True
            self.hits.zero_()
            self.seen.zero_()
        super().train(mode)
        return self

    def forward(self, batch: TrainingBatch, weights_K: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum of the rows' losses, and `[K]` rows of each depth predicted correctly."""
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            cache = DynamicCache()
            read_SND = self.target.read(batch.texts, cache)
            hidden_SRD = self._read_prompts(batch, cache, read_SND)
            if not self.training or not self._was_held_out:
                self._count(batch, hidden_SRD.detach())
            return self.loss(hidden_SRD, batch, read_SND, weights_K)

    def _read_prompts(self, batch: TrainingBatch, cache: DynamicCache, read_SND: Tensor) -> Tensor:
        """The states of all prompt tokens, `[S, R, D]`; zeros for real tokens, of which nothing is learnt."""
        recipe, E, dtype = self.recipe, self.recipe.copies, read_SND.dtype
        rows_SM, are_there_SM = prompt_rows(batch)
        hidden_SRD = torch.zeros(*batch.depths.shape, read_SND.shape[2], dtype=dtype, device=rows_SM.device)
        if not rows_SM.shape[1]:
            return hidden_SRD + sum(weight.sum() for weight in self.parameters()) * 0.0
        of_rows = {name: getattr(batch, name).gather(1, rows_SM) for name in ("positions", "depths")}
        positions_SM, numbers_SM = of_rows["positions"], of_rows["depths"] - 1
        documents_SM = batch.documents.gather(1, rows_SM).masked_fill(~are_there_SM, FILLING)
        anchors_SM = positions_SM - numbers_SM - 1
        sees = [self._sees_texts(batch, anchors_SM, documents_SM)]
        if recipe.prefix:
            self._add_prefixes(cache, len(rows_SM), dtype)
            of_number = torch.arange(recipe.k, device=rows_SM.device).repeat_interleave(recipe.prefix)
            sees.append((numbers_SM.clamp(min=0)[:, :, None] == of_number).repeat_interleave(E, dim=1))
        sees.append(self._sees_prompts(anchors_SM, numbers_SM, documents_SM))
        vectors_SMED = self.prompts["embeddings"][numbers_SM.clamp(min=0)]
        model: Any = self.target.model.model
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
            weights_SME = self.prompts["weights"][numbers_SM.clamp(min=0)].to(states_SMED.dtype)
            mixed_SMD = (states_SMED * weights_SME[:, :, :, None]).sum(2)
        which = (torch.arange(len(rows_SM), device=rows_SM.device)[:, None] * batch.depths.shape[1] + rows_SM)[
            are_there_SM
        ]
        told = hidden_SRD.flatten(0, 1).index_copy(0, which, mixed_SMD[are_there_SM].to(dtype))
        return told.view_as(hidden_SRD)

    def _sees_texts(self, batch: TrainingBatch, anchors_SM: Tensor, documents_SM: Tensor) -> Tensor:
        """Which of the texts' tokens each copy sees, `[S, X, N]`: those up to its anchor."""
        texts = batch.texts
        sees_SMN = (texts.positions[:, None] <= anchors_SM[:, :, None]) & (
            texts.documents[:, None] == documents_SM[:, :, None]
        )
        return sees_SMN.repeat_interleave(self.recipe.copies, dim=1)

    def _sees_prompts(self, anchors_SM: Tensor, numbers_SM: Tensor, documents_SM: Tensor) -> Tensor:
        """Which copies see which, `[S, X, X]`: those of its anchor, as the recipe says."""
        E = self.recipe.copies
        anchors, numbers, documents = (
            each.repeat_interleave(E, dim=1) for each in (anchors_SM, numbers_SM, documents_SM)
        )
        copies = torch.arange(E, device=anchors.device).repeat(anchors_SM.shape[1])
        is_one_chain = (anchors[:, :, None] == anchors[:, None]) & (documents[:, :, None] == documents[:, None])
        own, other = numbers[:, :, None], numbers[:, None]
        if self.recipe.visibility == "ensemble":
            return is_one_chain & (other <= own) & (copies[:, None] == copies)
        if self.recipe.visibility == "decoder":
            return is_one_chain & (other * E + copies <= own * E + copies[:, None])
        return is_one_chain & (other <= own)

    def _add_prefixes(self, cache: DynamicCache, rows: int, dtype: torch.dtype) -> None:
        """Adds the trained keys and values after those of the texts."""
        keys, values = self.prompts["prefix"]
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            cache.update(*(part.to(dtype).expand(rows, -1, -1, -1) for part in pair), layer)

    def head(self, hidden_mD: Tensor, depths_m: Tensor) -> Tensor:
        """Logits of the frozen head, or of the prompt tokens' own, which begins as that."""
        logits_mV = super().head(hidden_mD, depths_m)
        if "head" in self.prompts:
            logits_mV = logits_mV + HEAD_SPEED * nn.functional.linear(
                hidden_mD, self.prompts["head"].to(hidden_mD.dtype)
            )
        return logits_mV

    @torch.no_grad()
    def _count(self, batch: TrainingBatch, hidden_SRD: Tensor) -> None:
        """Counts which guess was the text's token."""
        for number in range(self.recipe.k):
            is_its = (batch.depths == number + 1) & (batch.labels != IGNORED)
            rows = is_its.flatten().nonzero()[:, 0]
            if self.training:
                rows = rows[:COUNTED]
            for some in rows.split(self.chunk):
                logits_mV = self.head(hidden_SRD.flatten(0, 1)[some], batch.depths.flatten()[some])
                logits_mV = logits_mV[:, : self.target.vocab_size]
                own_m1 = logits_mV.gather(1, batch.labels.flatten()[some][:, None])
                ranks_m = (logits_mV > own_m1).sum(1)
                self.hits[number] += torch.bincount(ranks_m[ranks_m < RANKS], minlength=RANKS)
                self.seen[number] += len(some)


def prompt_rows(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """`[S, M]` which rows of each group are prompt tokens, and whether there is one: groups with fewer are filled up
    with their first row."""
    is_prompt_SR = (batch.depths > 0) & (batch.documents != FILLING)
    most = int(is_prompt_SR.sum(1).max())
    rows_SM = (~is_prompt_SR).long().argsort(dim=1, stable=True)[:, :most]
    are_there_SM = is_prompt_SR.gather(1, rows_SM)
    return rows_SM.masked_fill(~are_there_SM, 0), are_there_SM


class PpdTrainee(HeadTrainee):
    """Prompt tokens in training, see `Trainee`."""

    def collate(self, groups: list[list[Sample]], generators: list[list[torch.Generator]]) -> TrainingBatch:
        """The rows of some samples; of real tokens nothing is learnt."""
        batch = super().collate(groups, generators)
        return replace(batch, labels=batch.labels.masked_fill(batch.depths == 0, IGNORED))

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes the prompt tokens in bf16, and how often they were right; see `paradraft.formats.head`."""
        hits, seen = (weights[name].float().cpu() for name in ("hits", "seen"))
        # As if one more row had been seen: what was never right in a few rows may be right in others.
        expected = 0.5 ** torch.arange(1, RANKS + 1)
        shares = (hits + expected) / (seen[:, None] + 1)
        self._config["accuracy"] = [[round(share, 6) for share in row] for row in shares.tolist()]
        super().save(folder, {name: weight for name, weight in weights.items() if name not in ("hits", "seen")})


def build(recipe: PpdRecipe, data: RunData) -> PpdTrainee:
    """Loads the model, once it is known that the run fits into memory.

    Raises:
        ValueError: the model cannot be used, the settings do not fit it, or there is not enough memory.
    """
    config = load_config(locate(recipe.model, "target"))
    if recipe.gradient_checkpointing:
        raise ValueError(
            "gradient_checkpointing=true: prompt tokens are read with a cache, which it excludes: leave it out"
        )
    if recipe.nf4 and has_experts(config):
        raise ValueError("nf4=true: torchao stores linear layers, and experts are none: leave it out")
    if recipe.exits > (most := config.num_hidden_layers):
        raise ValueError(f"exits={recipe.exits}: model {recipe.model!r} has {most} layers")
    trained = recipe.k * recipe.copies * config.hidden_size + recipe.own_head * config.vocab_size * config.hidden_size
    prompts = recipe.anchors * recipe.k * recipe.copies
    kept = memory.kept_by_layers(recipe, config, bf16=data.bf16) * prompts / (1 + prompts)
    needed = check_memory(
        recipe,
        data,
        trained=trained,
        kept=kept,
        rows_per_token=1 + prompts,
        attended_per_token=1 + prompts,
        nf4=recipe.nf4,
    )
    # Passes with a cache have SDPA everywhere.
    chosen = recipe if recipe.attention == "eager" else recipe.model_copy(update={"attention": "sdpa"})
    target = frozen_target(chosen, data, nf4=recipe.nf4)
    objective = PpdObjective(target, recipe, bf16=data.bf16).to(data.device)
    settings = {
        "hidden_size": config.hidden_size,
        "prompt_tokens": recipe.k,
        "copies": recipe.copies,
        "is_decoded": recipe.is_decoded,
    }
    drop = Drop(k=recipe.depths, r=recipe.anchors, r_min=recipe.anchors, mask_id=0)
    trainee = PpdTrainee("ppd", recipe, objective, settings, drop, needed)
    # Measured in passes of a size that does not depend on what was planned.
    trainee.drafter = f"ppd:size={max(MEASURED_SIZE, recipe.copies)}:prompts={min(recipe.k, MOST_PROMPTS)}"
    return trainee
