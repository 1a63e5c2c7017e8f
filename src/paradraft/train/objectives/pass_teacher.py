"""A teacher whose states and logits are those of the pass that decodes, for weights that are stored in few bits.

GGUF files, and folders of GPTQ or AWQ, are learnt as they are decoded: the passes in C++ round the inputs of products.

Shape letters: S groups of samples, N tokens of the longest, M rows, D the width, X size of a token's states (layers *
D), V rows of the drafter's embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import Cache

from paradraft.formats.vocab_map import VocabMap
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.output_head import finished
from paradraft.models.quantized import of_outputs
from paradraft.train.objectives.batch import Texts
from paradraft.train.objectives.losses import IMPOSSIBLE
from paradraft.train.objectives.teacher import Teacher

SAMPLES = 8
"""Samples that are read together: each keeps its keys and values until all are read."""


class PassTeacher(Teacher):
    """A `Teacher` that computes with a causal LM for decoding, which no batch uses meanwhile.

    Args:
        lm: with the drafter's tokenizer.
    """

    cached_gb = 8.0
    """Its states of a text do not depend on other texts, so keeping them changes nothing."""

    def __init__(self, lm: CausalLM, *, mask_id: int | None, masks: int = 1) -> None:
        super().__init__(lm.model, vocab_size=lm.vocab_size, mask_id=mask_id, masks=masks)
        self._lm = lm
        self._logits_as_decoded: Callable[[Tensor], Tensor] = lm.head

    def read(self, texts: Texts, cache: Cache | None = None) -> Tensor:
        """See `Teacher`; it fills no cache."""
        assert cache is None
        return self.states(texts, [FINAL_NORM])

    @torch.no_grad()
    def states(self, texts: Texts, layers: Sequence[int]) -> Tensor:
        """See `Teacher`; in float32, 0 where there is no token."""
        places = list(texts.places())
        samples = [texts.tokens[group, place].tolist() for group, place in places]
        width = self.model.config.hidden_size
        states_SNX = torch.zeros(*texts.tokens.shape, len(layers) * width, device=texts.tokens.device)
        for start in range(0, len(samples), SAMPLES):
            some = samples[start : start + SAMPLES]
            self._lm.start()
            self._lm.cache.join(len(some))
            hidden = self._lm.prefill([[*tokens, 0] for tokens in some], layers).hidden
            for row, (group, place) in enumerate(places[start : start + SAMPLES]):
                length = place.stop - place.start
                states_SNX[group, place] = torch.cat([hidden[layer][row, :length] for layer in layers], dim=-1)
        self._lm.start()
        return states_SNX

    def trimmed(self, vocab_map: VocabMap) -> Self:
        """See `Teacher`."""
        view, head = super().trimmed(vocab_map), self.model.lm_head
        bias = None if head.bias is None else of_outputs(head.bias, vocab_map.to_target)
        products = self._lm.linear(of_outputs(head.weight, vocab_map.to_target), bias)
        view._logits_as_decoded = lambda states: finished(products(states), self.model.config)
        return view

    @torch.no_grad()
    def expects(self, hidden_MD: Tensor, width: int) -> Tensor:
        """See `Teacher`; `logits` has the head's weights as numbers, because a product that rounds its inputs has no
        gradients."""
        logits_MV = self._logits_as_decoded(hidden_MD.float().to(self._lm.device))[:, : self.vocab_size]
        return self.as_expected(logits_MV.clamp(min=IMPOSSIBLE).to(hidden_MD.device), width)
