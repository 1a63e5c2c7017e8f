"""Decoder layers of a drafter that read the target's tokens and hidden states, with a separate KV cache.

They are a causal LM of the target's shape with one layer or a few that reads vectors instead of tokens, so that a
drafter's pass has all features of a target's, the one in C++ included. Embedding and output head are the target's.

Shape letters: B rows of a batch, M tokens that a round commits, N vectors of a pass, K drafted tokens, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, PreTrainedModel

from paradraft.core import Committed, Request
from paradraft.formats.head import Head
from paradraft.models.architectures import FAMILIES, head_size, spec_of
from paradraft.models.cached_rows import SavedRow
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.runtime import Runtime
from paradraft.models.target import gathered
from paradraft.ragged import from_lists, upload
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
    config = mistral_like(config, layers) if mistral else copy.deepcopy(config)
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


@dataclass(frozen=True, kw_only=True)
class SavedLayers:
    """The saved state of a row.

    Args:
        cache: its row of the KV cache.
        states: `[M, D]` from which the tokens after the cached ones were predicted, as far as known.
    """

    cache: SavedRow
    states: Tensor


class DraftLayers:
    """Draft layers with their KV cache and the pending tokens and states of each row.

    Args:
        head: the checkpoint. It has the layers' weights, named as in the body of a causal LM, such as
            "layers.0.mlp.up_proj.weight", and "norm.weight" if its config has `final_norm`.
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
        count = head.setting("num_hidden_layers", int)
        if (stored := len({name.split(".")[1] for name in head.weights if name.startswith("layers.")})) != count:
            raise ValueError(
                f"draft {head.name!r}: its config.json has {count} layers, its weights {stored}: train it again"
            )
        self._unread = int(for_vllm)  # number of leading tokens that are never read
        config = target.model.config
        model = layers_like(config, count, dtype=target.model.dtype, mistral=for_vllm).to(target.device)
        body: Any = model.model
        own = {name: tensor for name, tensor in body.state_dict().items() if not name.startswith("embed_tokens")}
        self.returned = FINAL_NORM if head.setting("final_norm", bool) else count
        wanted = [name for name in own if name != "norm.weight" or self.returned == FINAL_NORM]
        body.load_state_dict({name: head.tensor(name, *own[name].shape) for name in wanted}, strict=False)
        self.lm = CausalLM(
            model,
            vocab_size=UNUSED_ROWS,
            capacity=target.capacity,
            width=runtime.width,
            compiled=runtime.compiled,
            pad_to=runtime.pad_to,
            cuda_graphs=runtime.cuda_graphs,
        )
        self.target = target
        self.layers, self._fuse = tuple(layers), None
        width = target.model.config.hidden_size
        if len(layers) > 1:
            self._fuse = target.linear(head.tensor("fuse.weight", width, len(layers) * width))
        self.joined = joined
        self._tokens = torch.empty(0, 0, dtype=torch.long, device=target.device)
        self._states = torch.empty(0, 0, width if layers else 0, device=target.device)

    def start(self) -> None:
        """Drops all rows."""
        self.lm.start()
        self._tokens, self._states = self._tokens[:0, :0], self._states[:0, :0]

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Adds rows after the others; the prefill happens at the first draft."""
        self.lm.cache.join(len(requests))
        before, after = self._tokens, from_lists(prompt.tokens, self.lm.device)[:, self._unread :]
        most = max(before.shape[1], after.shape[1])
        pad = nn.functional.pad
        self._tokens = torch.cat([pad(rows, (0, most - rows.shape[1]), value=ABSENT) for rows in (before, after)])
        states = self._states_of(prompt)[:, self._unread :]
        both = (self._states.to(states.dtype), states)
        self._states = torch.cat([pad(rows, (0, 0, 0, most - rows.shape[1])) for rows in both])

    def commit(self, new: Committed) -> None:
        """Adds committed tokens and states to the pending ones."""
        tokens, states = from_lists(new.tokens, self.lm.device), self._states_of(new)
        if not self._tokens.shape[1]:
            self._tokens, self._states = tokens, states
            return
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        self._states = torch.cat([self._states.to(states.dtype), states], dim=1)
        self._tidy()

    def _states_of(self, new: Committed) -> Tensor:
        """`[B, M, D]`, or `[B, M, 0]` if no states are read."""
        if not self.layers:
            return torch.empty(len(new.tokens), max(map(len, new.tokens)), 0, device=self.lm.device)
        if self._fuse is None:
            return new.hidden[self.layers[0]]
        return self._fuse(side_by_side({layer: new.hidden[layer] for layer in self.layers}))

    def _tidy(self) -> None:
        """Moves padding to the right."""
        is_absent = self._tokens == ABSENT
        order_BN = is_absent.long().argsort(dim=1, stable=True)[:, : int((~is_absent).sum(1).max())]
        self._tokens = self._tokens.gather(1, order_BN)
        self._states = self._states.gather(1, order_BN[:, :, None].expand(-1, -1, self._states.shape[2]))

    def keep(self, rows: Tensor) -> None:
        """Drops and reorders rows."""
        self.lm.cache.keep(rows)
        self._tokens, self._states = self._tokens[rows], self._states[rows]

    def save(self, row: int, most: int) -> SavedLayers:
        """See `Drafter.save`."""
        most = max(most - self._unread, 0)
        cache = self.lm.cache.save(row, most)
        unread = min(most - cache.length, int((self._tokens[row] != ABSENT).sum()))
        return SavedLayers(cache=cache, states=self._states[row, :unread].clone())

    def restore(self, row: int, saved: SavedLayers, shared: int) -> None:
        """See `Drafter.restore`."""
        shared = max(shared - self._unread, 0)
        length = int((self._tokens[row] != ABSENT).sum())
        if not length:
            return
        known = self.lm.cache.restore(row, saved.cache, min(shared, length - 1))
        # The target did not read the common prefix again, so its states are those of the other row.
        more = max(min(shared - known, len(saved.states)), 0) if known == saved.cache.length else 0
        self._states[row, known : known + more] = saved.states[:more].to(self._states.dtype)
        self._tokens[row] = nn.functional.pad(self._tokens[row, known:], (0, known), value=ABSENT)
        self._states[row] = nn.functional.pad(self._states[row, known:], (0, 0, 0, known))
        self._tidy()

    def able(self, lengths: Sequence[int]) -> list[int]:
        """The lengths that rows can draft: 0 right after a prompt of one token, if that is never read."""
        if not self._unread or all(self.lm.cache.lengths):
            return list(lengths)
        have_tokens = (self._tokens != ABSENT).any(1).tolist()
        return [length if has_tokens else 0 for length, has_tokens in zip(lengths, have_tokens, strict=True)]

    def read(self, lengths: Sequence[int], masks: Masks | None = None) -> Tensor:
        """Reads the pending tokens of the rows that draft, and masks after them; masks do not stay in the cache.

        Args:
            lengths: by row, the number of tokens to draft; not all 0.
            masks: without them only the first token is drafted.

        Returns:
            `[B, k, D]` outputs for the last committed token and for each mask; undefined beyond a row's length.
        """
        device, k = self.target.device, max(lengths) if masks else 1
        is_wanted_B1 = upload(lengths, device)[:, None] > 0
        tokens_BN = self._tokens.masked_fill(~is_wanted_B1, ABSENT)
        counts = (tokens_BN != ABSENT).sum(1).tolist()
        embeddings_BND, states_BND = self.target.embed(tokens_BN), self._states
        ends_B1 = upload([[max(count - 1, 0)] for count in counts], device)
        last_B1D = gathered(states_BND, ends_B1)
        if max(counts) + k > self.lm.width:
            self.lm.prefill([[0] * count for count in counts], vectors=self.joined(embeddings_BND, states_BND))
            embeddings_BND, states_BND = gathered(embeddings_BND, ends_B1), last_B1D
            counts = [min(count, 1) for count in counts]
        if masks is not None and k > 1:
            both = zip((embeddings_BND, states_BND), masks(last_B1D, k), strict=True)
            embeddings_BND, states_BND = (followed_by(ahead, counts, of_masks) for ahead, of_masks in both)
        vectors_BND = self.joined(embeddings_BND, states_BND)
        widths = [count + min(length, k) - 1 if count else 0 for count, length in zip(counts, lengths, strict=True)]
        present = [[0] * width + [ABSENT] * (max(widths) - width) for width in widths]
        read_BND = self.look(upload(present, device), None, vectors_BND[:, : max(widths)])
        self.lm.cache.advance(counts)
        if min(lengths):
            self._tokens, self._states = self._tokens[:, :0], self._states[:, :0]
        else:
            self._tokens = self._tokens.masked_fill(is_wanted_B1, ABSENT)
            self._tidy()
        rows = [[min(max(count - 1, 0) + i, max(widths) - 1) for i in range(k)] for count in counts]
        return gathered(read_BND, upload(rows, device))

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


def followed_by(vectors_BND: Tensor, lengths: Sequence[int], masks_BMD: Tensor) -> Tensor:
    """Appends masks to rows of different lengths; `[B, N + M, D]`, undefined after a row's masks.

    >>> vectors, masks = torch.tensor([[[1.0], [2.0]], [[5.0], [0.0]]]), torch.tensor([[[8.0]], [[9.0]]])
    >>> followed_by(vectors, [2, 1], masks)[:, :, 0].tolist()
    [[1.0, 2.0, 8.0], [5.0, 9.0, 9.0]]
    """
    both_BXD, N = torch.cat([vectors_BND, masks_BMD], dim=1), vectors_BND.shape[1]
    if min(lengths) == N:
        return both_BXD
    most = both_BXD.shape[1]
    rows = [[i if i < length else min(N + i - length, most - 1) for i in range(most)] for length in lengths]
    return gathered(both_BXD, upload(rows, both_BXD.device))


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
