"""Layers that draft a block in one pass after keys and values made of the target's states (DFlash, Chen et al. 2026).

The context of a block costs two products for each committed token: f = norm(F [h_1; …; h_n]) joins the states of n
target layers, and each layer writes keys norm(K f), rotated, and values V f into its cache. The block is the last
committed token, the anchor, and masks after it. The anchor's own state is not known yet, so the context ends before it.

Shape letters: B rows of a batch, M tokens that a round commits, N states, K drafted tokens, W tokens of a block,
D hidden size, L layers, H key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from paradraft.core import Committed
from paradraft.drafters.parts.draft_layers import loaded_layers, random_layers
from paradraft.drafters.parts.pending_states import PendingStates
from paradraft.formats.block import OWN_EMBEDDING, BlockSettings
from paradraft.formats.head import Head
from paradraft.models import kv_cache
from paradraft.models.causal_lm import PREFILL_CHUNK, CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.runtime import Runtime
from paradraft.models.target import gathered
from paradraft.parents import BLOCK
from paradraft.ragged import upload
from paradraft.tree import ABSENT


def block_model(settings: BlockSettings, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """A causal LM with random layers of these sizes; embedding and output head are not used."""
    config = Qwen3Config(**settings.sizes, attention_bias=False)
    return random_layers(config, settings.layers, dtype=dtype, device=device)


def norm_of_states(settings: BlockSettings) -> Qwen3RMSNorm:
    """The norm of joined states, as those of the layers."""
    return Qwen3RMSNorm(settings.width, eps=settings.sizes["rms_norm_eps"])


def rotated(keys: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Keys `[…, N, H, d]` turned by the cosines and sines `[…, N, d]` of their positions."""
    cosines, sines = (angle[..., None, :] for angle in angles)
    first, second = keys.chunk(2, dim=-1)
    return keys * cosines + torch.cat([-second, first], dim=-1) * sines


def _rows_of(embedding_VD: Tensor, tokens: Tensor) -> Tensor:
    return torch.nn.functional.embedding(tokens, embedding_VD)


class BlockLayers(PendingStates):
    """The layers with their KV cache, and the states of each row that are not in it.

    Args:
        head: the checkpoint, see `loaded_layers`. It has "fc.weight" (F) and "hidden_norm.weight" too.
    """

    def __init__(self, target: CausalLM, head: Head, runtime: Runtime) -> None:
        self.settings = settings = BlockSettings.of(head)
        width, room = target.model.config.hidden_size, settings.sizes["max_position_embeddings"]
        if settings.width != width:
            raise ValueError(
                f"draft {head.name!r} has layers of width {settings.width}, and this target {width}: it is for another"
            )
        if room < target.capacity:
            raise ValueError(f"draft {head.name!r} has room for {room} tokens: load the target with capacity={room}")
        if settings.mask_token_id >= (rows := len(target.model.get_input_embeddings().weight)):
            raise ValueError(
                f"draft {head.name!r}: mask_token_id {settings.mask_token_id}, but {rows} tokens: train it again"
            )
        lm = loaded_layers(head, partial(block_model, settings), target, runtime, width=settings.k + settings.first)
        body: Any = lm.model.model
        # The first token of a text has no state before it.
        super().__init__(lm, states_of=self._joined, width=width, unread=1)
        self._join = lm.linear(head.tensor("fc.weight", width, len(settings.target_layers) * width))
        self._norm = norm_of_states(settings).to(target.device, target.model.dtype)
        self._norm.weight.data.copy_(head.tensor("hidden_norm.weight", width))
        parts = [part for layer in body.layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        self._project = lm.linear(torch.cat([part.weight for part in parts]))
        self._key_norms = [layer.self_attn.k_norm for layer in body.layers]
        self._angles = body.rotary_emb
        mask = torch.tensor([settings.mask_token_id], device=target.device)
        self._embed = target.embed
        if OWN_EMBEDDING in head.weights:
            own_VD = head.tensor(OWN_EMBEDDING, rows, width).to(target.device, target.model.dtype)
            self._embed = partial(_rows_of, own_VD)
        self._mask_1D = self._embed(mask)

    @torch.no_grad()
    def _joined(self, new: Committed) -> Tensor:
        """`[B, M, D]` f of the states before committed tokens."""
        states = [new.hidden[layer].to(self.lm.device) for layer in self.settings.target_layers]
        joined: Tensor = self._norm(self._join(torch.cat(states, dim=-1)))
        return joined

    @torch.no_grad()
    def _keep(self, counts: Sequence[int]) -> None:
        """Writes keys and values of the first states of each row into the cache."""
        cache, most = self.lm.cache, max(counts)
        cache.reserve(cache.longest + most)
        for first in range(0, most, PREFILL_CHUNK):
            states_BND = self._states[:, first : min(first + PREFILL_CHUNK, most)]
            new = [min(max(count - first, 0), states_BND.shape[1]) for count in counts]
            self._write(states_BND, new)
            cache.advance(new)

    def _write(self, states_BND: Tensor, counts: Sequence[int]) -> None:
        cache, config = self.lm.cache, self.lm.model.config
        both = self._project(states_BND).unflatten(-1, (-1, 2, config.num_key_value_heads, config.head_dim))
        places_1N = torch.arange(states_BND.shape[1], device=states_BND.device)[None]
        is_there = (places_1N < upload(counts, states_BND.device)[:, None])[:, :, None, None]
        positions_BN = upload(cache.lengths, states_BND.device)[:, None] + places_1N
        angles = self._angles(both, positions_BN)
        slots_BN = positions_BN.clamp(max=kv_cache.slots_of(cache.storage) - 1)
        for layer, (keys, values) in enumerate(cache.storage):
            new_keys = rotated(self._key_norms[layer](both[:, :, layer, 0].to(self.lm.model.dtype)), angles)
            for stored, new in ((keys, new_keys), (values, both[:, :, layer, 1])):
                kv_cache.write(stored, slots_BN, new.where(is_there & new.isfinite(), 0.0).to(stored.dtype))

    def outputs(self, lengths: Sequence[int]) -> Tensor:
        """Writes the context of the rows that draft, and runs a block in each; nothing of it stays in the cache.

        Args:
            lengths: by row, the number of tokens to draft; not all 0.

        Returns:
            `[B, K, D]` states for the drafted tokens; undefined beyond a row's length.
        """
        settings, device = self.settings, self.lm.device
        counts = [count if length else 0 for count, length in zip(self.counts(), lengths, strict=True)]
        self._read_first(counts)
        # Where all tokens of a block see each other, it has the size of training.
        sizes = [(length if settings.causal else settings.k) + settings.first if length else 0 for length in lengths]
        most = max(sizes)
        present = [[0] * size + [ABSENT] * (most - size) for size in sizes]
        parents = [[BLOCK] * size + [ABSENT] * (most - size) for size in sizes]
        anchors_B1D = self._embed(upload([[anchor] for anchor in self.anchors], device))
        vectors_BWD = torch.cat([anchors_B1D, self._mask_1D.expand(len(sizes), most - 1, -1)], dim=1)
        first_B1 = torch.zeros(len(sizes), 1, dtype=torch.long, device=device)
        parents_BW = None if settings.causal else upload(parents, device)
        out = self.lm.forward(
            upload(present, device), parents_BW, first_B1, hidden_layers=(FINAL_NORM,), vectors=vectors_BWD
        )
        places = [[min(settings.first + i, most - 1) for i in range(max(lengths))]] * len(sizes)
        return gathered(out.hidden[FINAL_NORM], upload(places, device))
