"""Previous-token head: corrects each mask's prediction by the tokens drafted before it.

This head corrects the state h_i of mask i once the tokens before its own are drawn (see `correction.py`): with the
embedding e of the token just before, and a memory s of those further back,

    s_i = SiLU(A h_i + E e(x_{i-1}) + R s_{i-1} + b),   s_0 = 0,
    logits_i = W (h_i + C s_i),

where W is the model's output head. A head of this kind over Medusa's states is in Zhang et al. 2024 (ReDrafter), one
on the previous token alone in Chimera (Zeng et al. 2024). C is initialized to zero: a model with a new head drafts as
without it.

Shape letters: M rows, D hidden size, X rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.drafters.parts.path_heads.correction import Correction, without_forbidden
from paradraft.formats.head import Head, file_of
from paradraft.formats.pard import PREVIOUS_TOKEN_HEAD, RANK
from paradraft.formats.path_heads import PREVIOUS_TOKEN_RANK
from paradraft.models.causal_lm import CausalLM
from paradraft.models.output_head import check_linear, sizes_of
from paradraft.models.output_ids import OutputIds
from paradraft.models.quantized import QuantizedTensor

PREFIX = "previous."
"""Prefix of its weight names in a head checkpoint."""


class PreviousTokenHead(nn.Module):
    """The matrices A, E, R and C.

    Args:
        width: D of the model's states and embeddings.
        rank: X.
        states: root mean square of the states' elements, for the initial weights.
        embeddings: root mean square of the embeddings' elements.
    """

    def __init__(self, width: int, rank: int, *, states: float = 1.0, embeddings: float = 1.0) -> None:
        super().__init__()
        self.state = nn.Linear(width, rank)
        self.token = nn.Linear(width, rank, bias=False)
        self.memory = nn.Linear(rank, rank, bias=False)
        self.correction = nn.Linear(rank, width, bias=False)
        for linear, size in ((self.state, states), (self.token, embeddings), (self.memory, 1.0)):
            nn.init.normal_(linear.weight, std=1 / (math.sqrt(linear.in_features) * size))
        nn.init.zeros_(self.state.bias)
        nn.init.zeros_(self.correction.weight)

    @property
    def rank(self) -> int:
        """X."""
        return self.memory.in_features

    def remember(self, read_MX: Tensor, memory_MX: Tensor | None) -> Tensor:
        """The next memories `[M, X]`; `read_MX` is `state` of the states plus `token` of the embeddings before them."""
        return silu(read_MX if memory_MX is None else read_MX + self.memory(memory_MX))


def new_head(model: PreTrainedModel, rank: int, *, seed: int) -> PreviousTokenHead:
    """An untrained head, which changes nothing yet."""
    check_linear(model.config, f"previous_token_rank={rank}")
    is_meta = model.device.type == "meta"
    embeddings, states = (1.0, 1.0) if is_meta else (max(size, 1e-6) for size in sizes_of(model))
    with torch.random.fork_rng(devices=[]), torch.device("meta" if is_meta else "cpu"):
        torch.manual_seed(seed)
        return PreviousTokenHead(model.config.hidden_size, rank, states=states, embeddings=embeddings)


def stored_head(head: PreviousTokenHead, config: PretrainedConfig) -> dict[str, Tensor]:
    """The weights to store; also sets the rank in the model's config."""
    setattr(config, RANK, head.rank)
    return {name: weight.detach().to(torch.bfloat16) for name, weight in head.state_dict().items()}


def load_head(config: PretrainedConfig) -> PreviousTokenHead | None:
    """The head of a PARD model, in float32; None if it has none."""
    rank, name = getattr(config, RANK, None), config.name_or_path
    if rank is None:
        return None
    try:
        return _head_of(load_file(file_of(name, PREVIOUS_TOKEN_HEAD)), rank, config.hidden_size)
    except (OSError, SafetensorError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"draft {name!r}: its {PREVIOUS_TOKEN_HEAD} cannot be read ({reason}): train it again"
        ) from None


def previous_token_head(head: Head) -> PreviousTokenHead:
    """The head of a head checkpoint."""
    weights = {name: weight for name, weight in head.weights.items() if name.startswith(PREFIX)}
    try:
        return _head_of(
            {name.removeprefix(PREFIX): weight for name, weight in weights.items()},
            head.setting(PREVIOUS_TOKEN_RANK, int),
            head.setting("hidden_size", int),
        )
    except ValueError as error:
        raise ValueError(f"draft {head.name!r}: {error}: train it again") from None


def _head_of(weights: dict[str, Tensor], rank: int, width: int) -> PreviousTokenHead:
    token_weight = weights.get("token.weight")
    if type(rank) is not int or token_weight is None or tuple(token_weight.shape) != (rank, width):
        raise ValueError(f"it is not of rank {rank!r} and width {width}")
    head = PreviousTokenHead(width, rank)
    shapes = {name: weight.shape for name, weight in head.state_dict().items()}
    if {name: weight.shape for name, weight in weights.items()} != shapes:
        raise ValueError("its weights are not those of a head")
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise ValueError("its weights are not finite")
    head.load_state_dict(weights)
    return head


class PreviousTokenCorrection(Correction):
    """Draws tokens with a previous-token head on the outputs of `lm`.

    Args:
        output_head: of the logits; by default that of `lm`.
        ids: that it drafts; by default those of `lm`.
    """

    @torch.no_grad()
    def __init__(
        self, lm: CausalLM, head: PreviousTokenHead, output_head: Callable[[Tensor], Tensor] | None = None,
        ids: OutputIds | None = None,
    ) -> None:  # fmt: skip
        model: Any = lm.model
        self._state = lm.linear(head.state.weight, head.state.bias)
        self._token = lm.linear(head.token.weight)
        self._memory = lm.linear(head.memory.weight)
        # W C as one matrix, in bfloat16 precision, as most models' weights.
        both_XV = (output_head or lm.head)(head.correction.weight.T.to(lm.device, lm.model.dtype))
        both_VX = without_forbidden(both_XV).bfloat16().to(lm.model.dtype)
        token, memory = (each.to(lm.model.dtype) for each in (head.token.weight, head.memory.weight))
        embedding = model.get_input_embeddings().weight
        if lm.is_native and isinstance(embedding, QuantizedTensor):
            embedding = embedding.dequantize()
        super().__init__(lm, ids or lm.ids, both_VX, embedding, token, memory)

    def _reads(self, states_BKD: Tensor) -> Tensor:
        return self._state(states_BKD[:, 1:])

    def _remember(self, tokens_BW: Tensor, read_B1X: Tensor | None, before_BWX: Tensor | None) -> Tensor:
        assert read_B1X is not None
        read_BWX = read_B1X + self._token(self._lm.embed(tokens_BW))
        return silu(read_BWX if before_BWX is None else read_BWX + self._memory(before_BWX))
