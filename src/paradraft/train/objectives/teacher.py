"""Teacher: the frozen model whose distribution a drafter learns (distillation).

It reads the same texts as the drafter; its logits are computed for a few rows at a time and never stored.

Shape letters: S groups of samples, N tokens of the longest, M rows, D its width, X size of a token's states (layers *
D), V rows of the drafter's embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel

from paradraft.formats.vocab_map import VocabMap
from paradraft.models.forward import FINAL_NORM
from paradraft.models.forward.eager import layer_by_layer
from paradraft.models.output_head import finished
from paradraft.models.quantized import as_numbers, of_outputs
from paradraft.train.objectives.batch import Texts
from paradraft.train.objectives.losses import IMPOSSIBLE
from paradraft.train.objectives.rows import Rows, attention_mask


class Linear(NamedTuple):
    """The weights `[outputs, inputs]` of a linear layer, and its bias `[outputs]`."""

    weight: Tensor
    bias: Tensor | None


class Teacher:
    """A frozen causal LM that computes hidden states and logits of the texts.

    Args:
        model: with the drafter's tokenizer.
        vocab_size: decoding never chooses ids from here on, so they get probability 0.
        mask_id: the drafter's mask token, if any; it gets probability 0 too.
        masks: count of mask ids from `mask_id` on.
    """

    cached_gb: float = 0.0
    """Default size of a `FeatureCache`: with torch, states depend in their last bits on the texts beside."""

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, mask_id: int | None, masks: int = 1) -> None:
        model.requires_grad_(False)
        self.model = model
        self.vocab_map: VocabMap | None = None
        """The ids of the logits, if not all; see `trimmed`."""
        self._heads: dict[tuple[torch.device, torch.dtype], Linear] = {}
        self.vocab_size = min(vocab_size, model.config.vocab_size)
        self.mask_id = mask_id
        self.masks = masks

    def trimmed(self, vocab_map: VocabMap) -> Self:
        """The same teacher with the logits of these ids alone, and so the distribution over them.

        A token without a row is no label: the text's tokens are the teacher's, so leaving out their rows weights each
        row by the probability of these ids.

        Args:
            vocab_map: on the device of the batches.
        """
        assert self.vocab_map is None
        view = copy(self)
        view.vocab_map, view._heads = vocab_map, {}
        return view

    @property
    def ids(self) -> int:
        """V, or U of a trimmed teacher."""
        return int(self.model.config.vocab_size) if self.vocab_map is None else len(self.vocab_map.to_target)

    def head(self, device: torch.device, dtype: torch.dtype) -> Linear:
        """The output head as numbers; that of a trimmed teacher has the rows of its ids."""
        if (device, dtype) not in self._heads:
            weight, bias = self.model.lm_head.weight, self.model.lm_head.bias
            if self.vocab_map is not None:
                ids_U = self.vocab_map.to_target
                weight, bias = of_outputs(weight, ids_U), None if bias is None else of_outputs(bias, ids_U)
            bias = None if bias is None else bias.to(device, dtype)
            self._heads[device, dtype] = Linear(as_numbers(weight).to(device, dtype), bias)
        return self._heads[device, dtype]

    @torch.no_grad()
    def read(self, texts: Texts, cache: Cache | None = None) -> Tensor:
        """Returns `[S, N, D]` last hidden states of a batch's texts, for `expects`; fills the KV cache if given."""
        hidden: Tensor = self.model.model(
            input_ids=texts.tokens,
            attention_mask=attention_mask(_rows(texts), self.model),
            position_ids=texts.positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return hidden

    @torch.no_grad()
    def states(self, texts: Texts, layers: Sequence[int]) -> Tensor:
        """Returns `[S, N, layers * D]` states of a batch's texts; layers as in `paradraft.models.forward.Forward`."""
        if list(layers) == [FINAL_NORM]:
            return self.read(texts)
        kwargs = {"attention_mask": attention_mask(_rows(texts), self.model), "position_ids": texts.positions}
        body: Any = self.model.model
        by_layer = layer_by_layer(body, body.embed_tokens(texts.tokens), kwargs)
        return torch.cat([by_layer[layer] for layer in layers], dim=-1)

    @torch.no_grad()
    def expects(self, hidden_MD: Tensor, width: int) -> Tensor:
        """Returns `[M, V]` float32 logits of the next token; `IMPOSSIBLE` for tokens that decoding never chooses.

        Args:
            hidden_MD: last hidden states. Rows of several depths share a state: pass each state once.
            width: V, the size of the drafter's logits.
        """
        return self.as_expected(self.logits(hidden_MD)[:, : self.vocab_size].float(), width)

    def logits(self, states: Tensor) -> Tensor:
        """The logits `[…, V]` of a drafter's states `[…, D]`, with gradients for these."""
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        return finished(F.linear(states, *self.head(states.device, dtype)), self.model.config)

    def as_expected(self, logits_MV: Tensor, width: int) -> Tensor:
        """Logits `[M, V]` of tokens that decoding never chooses become `IMPOSSIBLE`; V becomes `width`.

        A trimmed teacher has none of these tokens.
        """
        if self.vocab_map is not None:
            return logits_MV
        logits_MV = F.pad(logits_MV, (0, width - logits_MV.shape[1]), value=IMPOSSIBLE)
        if self.mask_id is not None:
            logits_MV[:, self.mask_id : self.mask_id + self.masks] = IMPOSSIBLE
        return logits_MV


def _rows(texts: Texts) -> Rows:
    return Rows(position=texts.positions, depth=torch.zeros_like(texts.positions), document=texts.documents)
