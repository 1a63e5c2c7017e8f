"""Training of block drafters on the target's states (DFlash, Chen et al. 2026); see `paradraft.drafters.dflash`.

By default blocks are causal, and their anchor drafts the first token: rows are PARD's (`rows.py`) without the real
tokens between. A row is the anchor or a mask after it, and sees the rows before it in its chain and the target's states
before the anchor. COD may drop the later ones. With `causal: false` a row sees all rows of its chain; with
`anchor_first: false` all rows are masks one place further on, after an anchor that drafts nothing. At the end of a text
blocks are shorter.

Shape letters as in `heads.py`; H key/value heads, d head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PretrainedConfig, PreTrainedModel

from paradraft.drafters.parts.block_layers import block_model, norm_of_states, rotated
from paradraft.formats.block import BlockSettings
from paradraft.models.architectures import head_size, spec_of
from paradraft.sources.loading import load_config, locate
from paradraft.train import memory
from paradraft.train.drafters.draft_layers import UNSURE, MasksRecipe, check_target_layers
from paradraft.train.drafters.heads import HeadTrainee, check_memory
from paradraft.train.drafters.output_heads import trimmed_target
from paradraft.train.drafters.path_heads import PathObjective
from paradraft.train.objectives.batch import Drop, Texts, TrainingBatch
from paradraft.train.objectives.chain_attention import CHAINS, ChainMask, chains_of
from paradraft.train.objectives.rows import FILLING, FLEX, as_mask, mask_dtype, of_pairs
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.trainee import RunData

MOST_LAYERS = 5
"""Layers of the target whose states are read by default, as in DFlash."""
THETA = 1e4
"""Base of rotary positions where the target's layers have several."""
CONTEXT = -1
"""In place of a place in a block: the key is a state of the target."""


class DFlashRecipe(MasksRecipe):
    """Settings of `paradraft train dflash`."""

    layers: int = Field(default=2, ge=1, description="layers, of Qwen3's kind in the target's size")
    target_layers: list[int] | None = Field(
        default=None,
        min_length=1,
        description="target layers whose states are read: 0 for the embeddings, i after the i-th layer, -1 after the "
        "final norm; by default up to 5, evenly from the second to the third from the end",
    )
    mask_token_id: int | None = Field(
        default=None, ge=0, description="token whose embedding the masks have; by default the one that ends texts"
    )
    causal: bool = Field(
        default=True, description="whether a mask sees only what is before it in its block, or false: all of it"
    )
    anchor_first: bool = Field(
        default=True,
        description="whether the last committed token drafts the first one, as DSpark's, or false: masks draft all, as "
        "DFlash's",
    )

    @model_validator(mode="after")
    def _check_passes(self) -> Self:
        if self.gradient_checkpointing:
            raise ValueError("gradient_checkpointing: the passes of dflash do not support it, leave it out")
        if not self.causal and self.r < 1:
            raise ValueError(f"r={self.r}: masks that see all of their block need whole ones, set r=1 or causal=true")
        return self

    def layers_of(self, config: PretrainedConfig) -> list[int]:
        """The target's layers whose states are read; raises ValueError if it has not all of them."""
        most = config.num_hidden_layers
        if self.target_layers is None:
            first, last = min(2, most), max(most - 2, 1)
            count = min(MOST_LAYERS, abs(last - first) + 1)
            return sorted({round(first + (last - first) * i / max(count - 1, 1)) for i in range(count)})
        check_target_layers(self.target_layers, most, self.model)
        return self.target_layers

    def settings_of(self, config: PretrainedConfig, data: RunData) -> BlockSettings:
        """The settings of the drafter for a target; raises ValueError as `layers_of`."""
        mask = self.mask_token_id
        if mask is None:
            ends = data.tokenizer.eos_token_id
            mask = 0 if ends is None else int(ends)
        if mask >= config.vocab_size:
            raise ValueError(f"mask_token_id={mask}: model {self.model!r} has {config.vocab_size} tokens")
        names = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
            "rms_norm_eps",
        )  # fmt: skip
        sizes = {name: getattr(config, name) for name in names} | {"head_dim": head_size(config)}
        theta = config.rope_parameters.get("rope_theta", THETA)
        return BlockSettings(
            sizes=sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}},
            layers=self.layers,
            target_layers=tuple(self.layers_of(config)),
            mask_token_id=mask,
            k=self.k,
            causal=self.causal,
            anchor_first=self.anchor_first,
        )


class ContextCache(Cache):
    """Keys and values `[S, H, N, d]` of each layer that all rows of a pass may see before their own."""

    def __init__(self, context: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(layers=[])
        self._context = context

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Returns them with those of the rows behind."""
        keys, values = self._context[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


class DFlash(PathObjective):
    """The layers in training, and their loss."""

    def __init__(
        self, target: Teacher, recipe: DFlashRecipe, settings: BlockSettings, *, on_gpu: bool, bf16: bool = False
    ) -> None:
        super().__init__(target, recipe, bf16=bf16)
        self.target_layers = list(settings.target_layers)
        width, count = settings.width, len(settings.target_layers)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(recipe.seed)
            model = block_model(settings, torch.float32)
            body: Any = model.model
            body.apply(model._init_weights)
            self.fc = nn.Linear(count * width, width, bias=False)
            base: Any = target.model.model
            body.norm.weight.copy_(UNSURE * (base.norm.weight + spec_of(target.model.config).norm_offset))
        recipe.set_up_passes(model, on_gpu=on_gpu)
        model.requires_grad_(True)
        self.hidden_norm = norm_of_states(settings)
        self.layers, self.norm = body.layers, body.norm
        self._settings = settings
        self._model = (model,)  # hidden from `nn.Module`: only parameters of its layers and norm are trained

    def hidden(self, batch: TrainingBatch, read_SNX: Tensor) -> Tensor:
        """See `HeadObjective`."""
        (model,) = self._model
        dtype = self.fc.weight.dtype
        embed = self.target.model.get_input_embeddings()
        block = BlockRows.of(batch) if self._settings.anchor_first else BlockRows.after_anchors(batch, self._settings)
        hidden_SQD: Tensor = model.model(
            inputs_embeds=embed(block.tokens).to(dtype),
            attention_mask=block_mask(batch.texts, block, model, causal=self._settings.causal),
            position_ids=block.anchors + block.places,
            past_key_values=ContextCache(self._context(batch, self.hidden_norm(self.fc(read_SNX.to(dtype))))),
            use_cache=True,
        ).last_hidden_state
        return self.read(hidden_SQD[:, : batch.tokens.shape[1]], batch)

    def _context(self, batch: TrainingBatch, states_SND: Tensor) -> list[tuple[Tensor, Tensor]]:
        (model,) = self._model
        body: Any = model.model
        angles = body.rotary_emb(states_SND, batch.texts.positions)
        context = []
        for layer in body.layers:
            own, d = layer.self_attn, model.config.head_dim
            keys, values = (project(states_SND).unflatten(-1, (-1, d)) for project in (own.k_proj, own.v_proj))
            context.append((rotated(own.k_norm(keys), angles).transpose(1, 2), values.transpose(1, 2)))
        return context


class BlockRows(NamedTuple):
    """What the layers read, `[S, Q]` each: the R rows of a batch, and maybe anchors behind.

    Args:
        places: in the block, from 0, the anchor's, on.
    """

    tokens: Tensor
    anchors: Tensor
    places: Tensor
    documents: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch) -> BlockRows:
        """The rows, the first of a block being its anchor."""
        return cls(batch.tokens, batch.rows.anchor, batch.depths, batch.documents)

    @classmethod
    def after_anchors(cls, batch: TrainingBatch, settings: BlockSettings) -> BlockRows:
        """The rows as masks after their anchors, and behind them the anchors."""
        rows = cls.of(batch)
        masks = rows._replace(tokens=torch.full_like(rows.tokens, settings.mask_token_id), places=rows.places + 1)
        is_first, fill = (batch.depths == 0) & (batch.documents != FILLING), (0, 0, 0, FILLING)
        own = [
            pad_sequence([part[mine] for part, mine in zip(parts, is_first, strict=True)], True, filling)
            for parts, filling in zip(rows, fill, strict=True)
        ]
        return cls(*(torch.cat(pair, dim=1) for pair in zip(masks, own, strict=True)))


def may_attend(
    anchor: Tensor, place: Tensor, document: Tensor, other_anchor: Tensor, other_place: Tensor, other_document: Tensor,
    *, causal: bool = True,
) -> Tensor:  # fmt: skip
    """Whether a row attends to a key: to a state (at place `CONTEXT`) before its anchor, and to its block.

    Of a state, `other_anchor` is its position.

    Args:
        causal: only up to the row itself.
    """
    context = (other_place == CONTEXT) & (other_anchor < anchor)
    block = (other_place != CONTEXT) & (other_anchor == anchor)
    if causal:
        block = block & (other_place <= place)
    return (document == other_document) & (context | block)


def block_mask(texts: Texts, block: BlockRows, model: PreTrainedModel, *, causal: bool) -> Tensor | BlockMask:
    """Attention mask of what is read over the N states of the texts and itself: `[S, 1, Q, N + Q]`; with chains
    `[S, 1, Q, N]`; or a block mask."""
    own = block[1:]
    of_states = texts.positions, torch.full_like(texts.positions, CONTEXT), texts.documents
    if model.config._attn_implementation == CHAINS:
        sees_SQN = of_pairs(may_attend, own, of_states)
        return ChainMask.of(sees_SQN, chains_of(*own, first=0, causal=causal), mask_dtype(model))
    keys = [torch.cat(pair, dim=1) for pair in zip(of_states, own, strict=True)]
    rule, (S, Q), both = partial(may_attend, causal=causal), block.tokens.shape, keys[0].shape[1]
    if model.config._attn_implementation == FLEX:

        def sees(group: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return rule(*(part[group, query] for part in own), *(part[group, key] for part in keys))

        return create_block_mask(sees, S, None, Q, both, device=texts.tokens.device)
    return as_mask(of_pairs(rule, own, keys), model)


def build(recipe: DFlashRecipe, data: RunData) -> HeadTrainee:
    """Checks the memory, then loads the target. See `Builder`."""
    config = load_config(locate(recipe.model, "target"))
    settings = recipe.settings_of(config, data)
    shape = block_model(settings, torch.float32, device="meta")
    width = settings.width
    trained = memory.parameters_of(shape) + len(settings.target_layers) * width**2 + recipe.path_parameters(config)
    drop = Drop(k=recipe.depths, r=recipe.r, r_min=recipe.r_min, mask_id=settings.mask_token_id)
    rows = sum(max(drop.r**depth, drop.r_min) for depth in range(drop.k))
    kept = memory.kept_by_layers(recipe, shape.config, bf16=data.bf16) + 4.0 * 6 * width
    needed = check_memory(recipe, data, trained=trained, kept=kept, rows_per_token=rows, attended_per_token=rows + 1)
    target = trimmed_target(recipe, data)
    objective = DFlash(target, recipe, settings, on_gpu=data.device.type == "cuda", bf16=data.bf16).to(data.device)
    return HeadTrainee("dflash", recipe, objective, settings.entries() | recipe.path_ranks, drop, needed)
