"""Decoder layers of a drafter that read the target's tokens and hidden states, with a separate KV cache.

They are a causal LM of the target's shape with one layer or a few that reads vectors instead of tokens, so that a
drafter's pass has all features of a target's, the one in C++ included. Embedding and output head are the target's.

Shape letters: B rows of a batch, M tokens that a round commits, N vectors of a pass, K drafted tokens, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, PreTrainedModel

from paradraft.core import Committed
from paradraft.drafters.parts.pending_states import PendingVectors
from paradraft.formats.head import Head
from paradraft.models.architectures import FAMILIES, head_size, spec_of
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.runtime import Runtime
from paradraft.models.target import gathered
from paradraft.tree import ABSENT

UNUSED_ROWS = 64
"""Rows of the unused embedding and output head; a causal LM must have some."""


def mistral_like(config: PretrainedConfig, layers: int) -> MistralConfig:
    """Config of Mistral layers in the target's size: attention without biases, and without query and key norms."""
    if not spec_of(config).allows_vllm_layers:
        allowed = ", ".join(family for family, spec in FAMILIES.items() if spec.allows_vllm_layers)
        raise ValueError(f"Mistral's layers cannot stand beside a {config.model_type} model, only beside {allowed}")
    sizes = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    )  # fmt: skip
    values = {name: getattr(config, name) for name in sizes}
    return MistralConfig(**values, head_dim=head_size(config), num_hidden_layers=layers, sliding_window=None)


def layers_like(
    config: PretrainedConfig, layers: int, *, dtype: torch.dtype, device: str = "cpu", mistral: bool = False
) -> PreTrainedModel:
    """A causal LM with random layers of a target's shape, or `mistral_like`; embedding and output head are not used."""
    return random_layers(mistral_like(config, layers) if mistral else config, layers, dtype=dtype, device=device)


def random_layers(config: PretrainedConfig, layers: int, *, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """A causal LM with random layers of a config's sizes; embedding and output head are not used."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    config.vocab_size = UNUSED_ROWS
    config.tie_word_embeddings = True
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.name_or_path = ""
    if getattr(config, "embedding_multiplier", None) is not None:
        config.embedding_multiplier = 1.0  # Granite's layers read unscaled states
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types + config.layer_types[-1:] * layers)[:layers]
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()


def loaded_layers(
    head: Head,
    layers: Callable[[torch.dtype, str], PreTrainedModel],
    target: CausalLM,
    runtime: Runtime,
    *,
    final_norm: bool = True,
    width: int = 0,
) -> CausalLM:
    """A model of a checkpoint's layers, which reads vectors, beside a target.

    Args:
        head: the checkpoint. It has the layers' weights, named as in the body of a causal LM, such as
            "layers.0.mlp.up_proj.weight", and "norm.weight" with `final_norm`.
        layers: random ones of its sizes, in a dtype and on a device.
        width: most tokens of a pass, if that is more than the runtime's.

    Raises:
        ValueError: it has other layers, or other sizes than its config; no memory is taken for these.
    """
    count = head.setting("num_hidden_layers", int)
    if (stored := len({name.split(".")[1] for name in head.weights if name.startswith("layers.")})) != count:
        raise ValueError(
            f"draft {head.name!r}: its config.json has {count} layers, its weights {stored}: train it again"
        )
    shapes: Any = layers(torch.float32, "meta").model
    own = {name: like.shape for name, like in shapes.state_dict().items() if not name.startswith("embed_tokens")}
    wanted = [name for name in own if name != "norm.weight" or final_norm]
    weights = {name: head.tensor(name, *own[name]) for name in wanted}
    model = layers(target.model.dtype, "cpu").to(target.device)
    body: Any = model.model
    body.load_state_dict(weights, strict=False)
    return CausalLM(
        model,
        vocab_size=UNUSED_ROWS,
        capacity=target.capacity,
        width=max(runtime.width, width),
        compiled=runtime.compiled,
        pad_to=runtime.pad_to,
        cuda_graphs=runtime.cuda_graphs,
    )


def target_layers(head: Head) -> tuple[int, ...]:
    """The target layers whose states a checkpoint reads; default: after the final norm."""
    layers = head.config.get("target_layers", [FINAL_NORM])
    if not isinstance(layers, list) or not layers or any(type(layer) is not int for layer in layers):
        raise ValueError(f"draft {head.name!r}: target_layers in its config.json is {layers!r}: train it again")
    return tuple(layers)


def side_by_side(states: Mapping[int, Tensor]) -> Tensor:
    """Concatenates the states `[…, D]` of several target layers to `[…, layers * D]`.

    Those before the final norm are RMS-normalized without weights: states grow from layer to layer, tenfold and more,
    and the linear layer that joins them would learn little but to scale them down.
    """
    parts = [
        state if layer == FINAL_NORM else nn.functional.rms_norm(state, state.shape[-1:], eps=1e-6)
        for layer, state in states.items()
    ]
    return torch.cat(parts, dim=-1)


class DraftLayers(PendingVectors):
    """Draft layers with their KV cache and the pending tokens and states of each row.

    Args:
        head: the checkpoint, see `loaded_layers`; its config has `final_norm`.
        layers: target layers whose states are read, numbered as in `Forward`; several are joined by the checkpoint's
            "fuse.weight". Without any, only tokens are read.
        joined: maps the embeddings `[…, D]` of tokens and the states `[…, D]` from which they were predicted to the
            input `[…, D]`.
        for_vllm: use Mistral layers, and never read the first token of a text, which has no state before it, as in
            vLLM.
    """

    def __init__(
        self,
        target: CausalLM,
        head: Head,
        runtime: Runtime,
        *,
        layers: Sequence[int] = (FINAL_NORM,),
        joined: Callable[[Tensor, Tensor], Tensor],
        for_vllm: bool = False,
    ) -> None:
        count, final_norm = head.setting("num_hidden_layers", int), head.setting("final_norm", bool)
        self.returned = FINAL_NORM if final_norm else count

        def like_target(dtype: torch.dtype, device: str) -> PreTrainedModel:
            return layers_like(target.model.config, count, dtype=dtype, device=device, mistral=for_vllm)

        lm = loaded_layers(head, like_target, target, runtime, final_norm=final_norm)
        self.target = target
        self.layers, self._fuse = tuple(layers), None
        width = target.model.config.hidden_size
        if len(layers) > 1:
            self._fuse = target.linear(head.tensor("fuse.weight", width, len(layers) * width))
        super().__init__(
            lm,
            embed=target.embed,
            states_of=self._fused,
            width=width if layers else 0,
            joined=joined,
            unread=int(for_vllm),
        )

    def _fused(self, new: Committed) -> Tensor:
        """`[B, M, D]` states of committed tokens, or `[B, M, 0]` if none are read."""
        if not self.layers:
            return torch.empty(len(new.tokens), max(map(len, new.tokens)), 0, device=self.lm.device)
        if self._fuse is None:
            return new.hidden[self.layers[0]]
        return self._fuse(side_by_side({layer: new.hidden[layer] for layer in self.layers}))

    def outputs(self, lengths: Sequence[int], masks: Masks | None = None) -> Tensor:
        """Reads the pending tokens of the rows that draft, and masks after them, see `read`.

        Returns:
            `[B, K, D]` outputs for the last committed token and for each mask; undefined beyond a row's length.
        """
        out, places_BK = self.read(lengths, masks, (self.returned,))
        return gathered(out.hidden[self.returned], places_BK)

    def step(self, tokens_B1: Tensor, states_B1D: Tensor) -> Tensor:
        """Reads a drafted token per row with its state `[B, 1, D]`, and returns the next state.

        Args:
            tokens_B1: `ABSENT` in rows that draft no further.
            states_B1D: the layers' own predictions, in place of the target's states.
        """
        present_B1 = tokens_B1.masked_fill(tokens_B1 >= 0, 0).clamp(min=ABSENT)
        vectors_B1D = self.joined(self.target.embed(tokens_B1), states_B1D)
        states_B1D = self.look(present_B1, None, vectors_B1D)
        self.lm.cache.advance((present_B1[:, 0] != ABSENT).long().tolist())
        return states_B1D

    def look(self, present_BN: Tensor, parents_BN: Tensor | None, vectors_BND: Tensor) -> Tensor:
        """Runs the layers without extending the cache; outputs `[B, N, D]`.

        Args:
            present_BN: 0 where a row has a vector, else `ABSENT`.
            parents_BN: index of the vector before each; -1 for the last one in the cache; None for a chain.
        """
        first_B1 = torch.zeros_like(present_BN[:, :1])
        out = self.lm.forward(present_BN, parents_BN, first_B1, hidden_layers=(self.returned,), vectors=vectors_BND)
        return out.hidden[self.returned]


class Masks:
    """The mask inputs that a drafter reads after the committed tokens.

    Args:
        head: the checkpoint: "masks.embeddings" has one row per position of the draft after the first, or one for all;
            "masks.state" is their state. Without it they use the state before the last committed token.
    """

    def __init__(self, head: Head, device: torch.device) -> None:
        count, width = len(head.weights.get("masks.embeddings", ())), head.setting("hidden_size", int)
        self._embeddings_KD = head.tensor("masks.embeddings", max(count, 1), width).to(device).float()
        self._state_D = None
        if "masks.state" in head.weights:
            self._state_D = head.tensor("masks.state", width).to(device).float()
        self.max_k = count + 1 if head.setting("distinct_masks", bool) else None
        """None if one mask serves all positions, also those beyond the training."""

    def __call__(self, states_B1D: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Embeddings and states `[B, k - 1, D]` of the masks, from the states before each row's last token, if any."""
        which = torch.arange(k - 1, device=states_B1D.device).clamp(max=len(self._embeddings_KD) - 1)
        masks_BKD = self._embeddings_KD[which].expand(len(states_B1D), -1, -1)
        states = states_B1D if self._state_D is None else self._state_D.to(states_B1D.dtype)
        return masks_BKD, states.expand(len(states_B1D), k - 1, -1)
