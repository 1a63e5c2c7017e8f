"""Teacher: the frozen model whose distribution a drafter learns (distillation).

It reads the same texts as the drafter; its logits are computed for a few rows at a time and never stored. Its hidden
states may be cached for the next epoch.

Shape letters: S groups of samples, N tokens of the longest, M rows, D its width, X size of a token's states (layers *
D), V rows of the drafter's embedding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel

from paradraft.models.forward import FINAL_NORM
from paradraft.models.forward.eager import layer_by_layer
from paradraft.models.output_head import logits_of
from paradraft.train.objectives.batch import Texts
from paradraft.train.objectives.losses import IMPOSSIBLE
from paradraft.train.objectives.rows import FILLING, Rows, attention_mask


class Teacher:
    """A frozen causal LM that computes hidden states and logits of the texts.

    Args:
        model: with the drafter's tokenizer.
        vocab_size: decoding never chooses ids from here on, so they get probability 0.
        mask_id: the drafter's mask token, if any; it gets probability 0 too.
        masks: count of mask ids from `mask_id` on.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, mask_id: int | None, masks: int = 1) -> None:
        model.requires_grad_(False)
        self.model = model
        self.vocab_size = min(vocab_size, model.config.vocab_size)
        self.mask_id = mask_id
        self.masks = masks

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
        return self.as_expected(logits_of(self.model, hidden_MD)[:, : self.vocab_size].float(), width)

    def logits(self, states: Tensor) -> Tensor:
        """The logits `[…, V]` of a drafter's states `[…, D]`, with gradients for these."""
        return logits_of(self.model, states)

    def as_expected(self, logits_MV: Tensor, width: int) -> Tensor:
        """Logits `[M, V]` of tokens that decoding never chooses become `IMPOSSIBLE`; V becomes `width`."""
        logits_MV = F.pad(logits_MV, (0, width - logits_MV.shape[1]), value=IMPOSSIBLE)
        if self.mask_id is not None:
            logits_MV[:, self.mask_id : self.mask_id + self.masks] = IMPOSSIBLE
        return logits_MV


def _rows(texts: Texts) -> Rows:
    return Rows(position=texts.positions, depth=torch.zeros_like(texts.positions), document=texts.documents)


class FeatureCache:
    """LRU cache of hidden states in host memory.

    Args:
        layers: as in `Teacher.states`.
        most_bytes: capacity; 0 disables the cache.
    """

    def __init__(self, target: Teacher, layers: Sequence[int], most_bytes: int) -> None:
        self._target, self._layers, self._most = target, list(layers), most_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0

    def states(self, texts: Texts) -> Tensor:
        """Returns `[S, N, X]` states of a batch's texts; computes the missing ones in one pass."""
        if not self._most:
            return self._target.states(texts, self._layers)
        lengths = (texts.documents != FILLING).sum(1).tolist()
        keys = [_key(texts, group, length) for group, length in enumerate(lengths)]
        unknown = [group for group, key in enumerate(keys) if key not in self._kept]
        new: dict[bytes, Tensor] = {}
        if unknown:
            missing = Texts(**{name: tensor[unknown] for name, tensor in vars(texts).items()})
            for group, states_NX in zip(unknown, self._target.states(missing, self._layers), strict=True):
                new[keys[group]] = states_NX[: lengths[group]]
        known = [new[key] if key in new else self._kept[key] for key in keys]
        for key, states_nX in zip(keys, known, strict=True):
            self._keep(key, states_nX)
        whole = torch.nn.utils.rnn.pad_sequence([each.to(texts.tokens.device) for each in known], batch_first=True)
        return torch.nn.functional.pad(whole, (0, 0, 0, texts.tokens.shape[1] - whole.shape[1]))

    def _keep(self, key: bytes, states_nX: Tensor) -> None:
        if key not in self._kept:
            self._kept[key] = states_nX.to("cpu", copy=True)
            self._bytes += self._kept[key].nbytes
        self._kept.move_to_end(key)
        while self._bytes > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes


def _key(texts: Texts, group: int, length: int) -> bytes:
    key = torch.stack([texts.tokens[group, :length], texts.documents[group, :length]])
    return key.cpu().numpy().tobytes()
