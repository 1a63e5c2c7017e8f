"""Forward pass by the model's own code in torch; on a GPU recorded as CUDA graphs.

Shape letters: B rows of a batch, N tokens of a pass, R tokens whose logits are wanted, S slots in use,
V vocabulary, D hidden size, E rows of the embedding, P rows added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from paradraft.models import kv_cache
from paradraft.models.architectures import ropes_of
from paradraft.models.forward import FINAL_NORM, ForwardOut, NotFiniteError
from paradraft.models.forward.cuda_graphs import Replays, graph_size, replays_on
from paradraft.models.forward.gated import GatedChange, GatedProjections
from paradraft.models.output_head import logits_of
from paradraft.models.quantization import stored_bytes
from paradraft.parents import ancestors, depths, is_chain, parents_of_chains
from paradraft.ragged import upload
from paradraft.tree import ABSENT

BUCKET = 64
"""Attention reads the used slots, rounded up to a multiple of this."""
REPLAYED_BUCKET = 256
"""As `BUCKET`, for passes that are replayed; larger, because each step is another shape to record."""
Layers = tuple[int, ...]
PassFunction = Callable[..., tuple[Tensor, ...]]
"""`logits_and_states` of some layers, without their argument."""


def part_of(model: PreTrainedModel, first: int, stop: int) -> PreTrainedModel:
    """A causal LM of layers `first` to `stop`, which shares all modules of the whole one."""
    part, body, config = copy(model), copy(model.model), copy(model.config)
    config.num_hidden_layers = stop - first
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[first:stop]
    body._modules = {**body._modules, "layers": body.layers[first:stop]}
    part._modules = {**part._modules, "model": body}
    part.config = body.config = config
    return part


def hidden_states(
    model: PreTrainedModel,
    storage: kv_cache.Storage,
    layers: Layers,
    added: Added | None,
    slots_S: Tensor,
    tokens_BN: Tensor,
    lengths_B: Tensor,
    depth_BN: Tensor,
    visible_BNN: Tensor,
    vectors_BND: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The states `[B, N, D]` of one pass: after the final norm, then of each of `layers`, named as in `Forward`.

    A pure function of tensors, except that it writes the cache. States of a token that sees a token with NaN or
    infinite keys or values, in any layer, are NaN; other tokens are unaffected. States of `layers` are 0 for absent
    tokens.
    """
    B, N = tokens_BN.shape
    S = slots_S.shape[0]
    # A finished row is decoded on with the others; beyond the capacity it writes to the last slot.
    last_slot = storage[0][0].shape[1] - 1
    written_BN = (lengths_B[:, None] + torch.arange(N, device=tokens_BN.device)).clamp(max=last_slot)
    offset_BS = slots_S[None] - lengths_B[:, None]
    inside_BS = (offset_BS >= 0) & (offset_BS < N)
    index_BNS = offset_BS.clamp(0, N - 1)[:, None].expand(B, N, S)
    sees_BNS = (offset_BS < 0)[:, None] | (inside_BS[:, None] & visible_BNN.gather(2, index_BNS))
    mask = torch.zeros(B, 1, N, S, dtype=model.dtype, device=tokens_BN.device)
    mask = mask.masked_fill(~sees_BNS[:, None], torch.finfo(model.dtype).min)
    cache = kv_cache.SlotCache(storage, written_BN, S)
    settings = {
        "attention_mask": mask, "position_ids": lengths_B[:, None] + depth_BN, "past_key_values": cache,
        "use_cache": True,
    }  # fmt: skip
    if added is not None:
        vectors_BND = added.vectors(model, tokens_BN) if vectors_BND is None else vectors_BND
        added.change(tokens_BN)
    if layers:
        vectors_BND = model.model.embed_tokens(tokens_BN.clamp(min=0)) if vectors_BND is None else vectors_BND
        states = layer_by_layer(model.model, vectors_BND, settings)
    elif vectors_BND is not None:
        states = {FINAL_NORM: model.model(inputs_embeds=vectors_BND, **settings).last_hidden_state}
    else:
        states = {FINAL_NORM: model.model(input_ids=tokens_BN.clamp(min=0), **settings).last_hidden_state}
    if added is not None:
        added.change(None)
    is_finite_BN1 = (cache.is_finite_BN[:, None] | ~visible_BNN).all(2)[:, :, None]
    last_BND = states[FINAL_NORM].where(is_finite_BN1, torch.nan)
    is_token_BN1 = (tokens_BN != ABSENT)[:, :, None]
    requested = (states[layer].where(is_finite_BN1, torch.nan).where(is_token_BN1, 0.0) for layer in layers)
    return last_BND, *requested


@dataclass(frozen=True, kw_only=True)
class Added:
    """Ids from E on.

    Args:
        rows: `[P, D]` their embeddings.
        projections: how attention differs for some of them; None if it does for none.
    """

    rows: Tensor
    projections: GatedProjections | None

    def change(self, tokens_BN: Tensor | None) -> None:
        """Changes attention for the tokens of a pass; None ends it."""
        if self.projections is not None:
            self.projections.read(tokens_BN)

    def vectors(self, model: PreTrainedModel, tokens_BN: Tensor) -> Tensor:
        """The embeddings `[B, N, D]` of tokens."""
        embedding = model.model.embed_tokens
        E = len(embedding.weight)
        added_BND = self.rows[(tokens_BN - E).clamp(min=0)]
        return torch.where((tokens_BN >= E)[:, :, None], added_BND, embedding(tokens_BN.clamp(0, E - 1)))


def layer_by_layer(body: Any, vectors_BND: Tensor, settings: dict[str, Any]) -> dict[int, Tensor]:
    """The states of all layers, numbered as in `Forward`, computed as by the forward of a model's body.

    Not by `output_hidden_states`, which lacks the output of the last layer before the final norm, and leaves hooks in
    the model.
    """
    multiplier = getattr(body, "embedding_multiplier", None)  # Granite's
    states = {0: vectors_BND if multiplier is None else vectors_BND * multiplier}
    # In Gemma 3, sliding-window layers have other angles.
    by_type = {
        layer_type: body.rotary_emb(states[0], settings["position_ids"], *([layer_type] if layer_type else []))
        for layer_type in ropes_of(body.config)
    }
    for index, layer in enumerate(body.layers, 1):
        angles = by_type[layer.self_attn.layer_type if None not in by_type else None]
        states[index] = layer(states[index - 1], position_embeddings=angles, **settings)
    return states | {FINAL_NORM: body.norm(states[len(body.layers)])}


def logits_and_states(
    model: PreTrainedModel, storage: kv_cache.Storage, layers: Layers, added: Added | None, logit_rows: Tensor,
    *inputs: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The logits `[B, R, V]` of some rows of one pass, and the states of `layers`; can be compiled."""
    last_BND, *states = hidden_states(model, storage, layers, added, *inputs)
    return logits_of(model, _rows_of(last_BND, logit_rows)), *states


def logits_and_states_of(layers: Layers) -> PassFunction:
    """`logits_and_states` for fixed layers."""

    def run(
        model: PreTrainedModel, storage: kv_cache.Storage, added: Added | None, logit_rows: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        return logits_and_states(model, storage, layers, added, logit_rows, *inputs)

    return run


def _rows_of(states_BND: Tensor, rows_BR: Tensor) -> Tensor:
    return states_BND.gather(1, rows_BR[:, :, None].expand(-1, -1, states_BND.shape[2]))


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """Inputs of a pass, see `Forward`."""

    tokens: Tensor
    parents: Tensor
    logit_rows: Tensor
    vectors: Tensor | None

    def padded(self, tokens: int, logits: int) -> NewTokens:
        """Padded to at least this many tokens, by absent ones, and logits."""
        (B, N), R = self.tokens.shape, self.logit_rows.shape[1]
        if tokens <= N and logits <= R:
            return self
        more, most = max(tokens - N, 0), max(tokens, N)
        if is_chain(self.parents):
            parents = parents_of_chains(B, most, self.parents.device)
        else:
            parents = pad(self.parents, (0, more), value=ABSENT)
        return NewTokens(
            tokens=pad(self.tokens, (0, more), value=ABSENT),
            parents=parents,
            logit_rows=pad(self.logit_rows, (0, max(logits - R, 0))),
            vectors=None if self.vectors is None else pad(self.vectors, (0, 0, 0, more)),
        )


class EagerPass:
    """Computes the forward pass of a model with the model's own code.

    Args:
        model: in evaluation mode; its weights must not change afterwards.
        pad_to: least tokens, and least logits, of a decoding pass.
        cuda_graphs: on a GPU, record decoding passes and replay them.
    """

    min_rows = 1
    is_native = False

    def __init__(self, model: PreTrainedModel, *, pad_to: int, cuda_graphs: bool) -> None:
        self._model = model
        self._pad_to = pad_to
        self._added: Added | None = None
        self.replays: Replays | None = replays_on(model.device) if cuda_graphs else None
        self.warm_up_rounds = 0 if self.replays is None else 2

    @property
    def threads(self) -> int:
        """See `Forward`: those of torch."""
        return torch.get_num_threads()

    def head(self, states: Tensor) -> Tensor:
        """See `Forward`."""
        return logits_of(self._model, states.to(self._model.dtype))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """See `Forward`; in the model's dtype."""
        device, dtype = self._model.device, self._model.dtype
        weight, bias = weight.to(device, dtype), None if bias is None else bias.to(device, dtype)
        return lambda inputs: linear(inputs.to(dtype), weight, bias)

    def weight_bytes(self, weight: Tensor) -> int:
        """See `Forward`."""
        return stored_bytes(weight)

    def add_embeddings(self, rows_PD: Tensor, changes: Sequence[tuple[range, GatedChange]] = ()) -> None:
        """See `Forward`."""
        if self._added is not None and self._added.projections is not None:
            self._added.projections.remove()
        rows_PD = rows_PD.detach().to(self._model.device, self._model.dtype, copy=True)
        self._added = Added(rows=rows_PD, projections=GatedProjections(self._model, changes) if changes else None)
        self.forget()  # recordings read the old rows

    def first(self, layers: int) -> Self:
        """See `Forward`; recorded apart."""
        view = copy(self)
        view._model = part_of(self._model, 0, layers)
        view.replays = None if self.replays is None else replays_on(self._model.device)
        return view

    def forget(self) -> None:
        """See `Forward`: recordings hold the storage."""
        if self.replays is not None:
            self.replays.forget()

    def __call__(
        self,
        storage: kv_cache.Storage,
        lengths: list[int],
        tokens_BN: Tensor,
        parents_BN: Tensor,
        *,
        logit_rows: Tensor,
        hidden_layers: Sequence[int] = (),
        vectors: Tensor | None = None,
    ) -> ForwardOut:
        """See `Forward`; logits and states are in the model's dtype."""
        (B, N), R = tokens_BN.shape, logit_rows.shape[1]
        layers = tuple(hidden_layers)
        vectors = None if vectors is None else vectors.to(self._model.dtype)
        if not R:  # the last token of a row sees all others, so its states tell whether one is not finite
            logit_rows = ((tokens_BN != ABSENT).sum(1, keepdim=True) - 1).clamp(min=0)
        new = NewTokens(tokens=tokens_BN, parents=parents_BN, logit_rows=logit_rows, vectors=vectors)
        outputs_BRX, *states = (self._run if R else self._read)(storage, lengths, layers, new)
        if not R:
            if (rows := (outputs_BRX[:, 0].isnan().any(1) & (tokens_BN[:, 0] != ABSENT)).nonzero()).numel():
                raise NotFiniteError(int(rows[0]))
            outputs_BRX = outputs_BRX.new_empty(B, 0, self._model.config.vocab_size)
        hidden = {layer: states_BND[:, :N] for layer, states_BND in zip(layers, states, strict=True)}
        return ForwardOut(logits=outputs_BRX[:, :R], hidden=hidden)

    def _run(self, storage: kv_cache.Storage, lengths: list[int], layers: Layers, new: NewTokens) -> Sequence[Tensor]:
        """The logits `[B, R, V]`, then the states of `layers`; maybe with padding at the end."""
        if self.replays is None:
            return self._computed(storage, lengths, layers, new)
        sizes = (new.tokens.shape[1], new.logit_rows.shape[1])
        new = new.padded(*(graph_size(max(size, self._pad_to)) for size in sizes))
        inputs = self._inputs(storage, lengths, new, REPLAYED_BUCKET)
        added = self._added_in(new)
        run = partial(self._function(layers, new), self._model, storage, added)
        return self.replays(
            run, inputs, partial(self._others, kv_cache.slots_of(storage), *inputs), kind=(layers, added is self._added)
        )

    def _computed(
        self, storage: kv_cache.Storage, lengths: list[int], layers: Layers, new: NewTokens
    ) -> Sequence[Tensor]:
        """As `_run`, without a recording."""
        new = new.padded(self._pad_to, self._pad_to)
        inputs = self._inputs(storage, lengths, new, BUCKET)
        return self._function(layers, new)(self._model, storage, self._added_in(new), *inputs)

    def _read(self, storage: kv_cache.Storage, lengths: list[int], layers: Layers, new: NewTokens) -> Sequence[Tensor]:
        """Prefill, not recorded, because prompts have many lengths: as `_run`, but may return states in place of
        logits, which are NaN in the same tokens."""
        logit_rows, *inputs = self._inputs(storage, lengths, new, BUCKET)
        last_BND, *states = hidden_states(self._model, storage, layers, self._added_in(new), *inputs)
        return _rows_of(last_BND, logit_rows), *states

    def _added_in(self, new: NewTokens) -> Added | None:
        """The added ids for a pass: without their change of attention if none of them is read, which takes time."""
        if self._added is None or self._added.projections is None:
            return self._added
        return self._added if self._added.projections.concern(new.tokens) else replace(self._added, projections=None)

    def _function(self, layers: Layers, new: NewTokens) -> PassFunction:
        """The function that computes these layers for these kinds of inputs."""
        return logits_and_states_of(layers)

    def _inputs(self, storage: kv_cache.Storage, lengths: list[int], new: NewTokens, bucket: int) -> tuple[Tensor, ...]:
        """Inputs of a pass: wanted logits, slots in use, tokens, cached lengths, depths, tree attention mask, and
        vectors if any."""
        device = new.tokens.device
        used = min(-(-(max(lengths) + new.tokens.shape[1]) // bucket) * bucket, kv_cache.slots_of(storage))
        slots_S, lengths_B = torch.arange(used, device=device), upload(lengths, device)
        copies = (contiguous_copy(each) for each in (new.logit_rows, new.tokens, ancestors(new.parents)))
        logit_rows, tokens_BN, visible_BNN = copies
        vectors = () if new.vectors is None else (contiguous_copy(new.vectors),)
        return logit_rows, slots_S, tokens_BN, lengths_B, depths(new.parents), visible_BNN, *vectors

    def _others(
        self, slots: int, logit_rows: Tensor, slots_S: Tensor, tokens_BN: Tensor, lengths_B: Tensor, depth_BN: Tensor,
        sees_BNN: Tensor, *vectors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Other inputs of the same shapes, to check a recording. They write after the cached tokens, one slot further
        than the pass unless the cache is full."""
        N = tokens_BN.shape[1]
        tokens_BN = torch.where(tokens_BN == ABSENT, ABSENT, (tokens_BN + 1) % self._model.config.vocab_size)
        lengths_B = (lengths_B + 1).clamp(max=slots - N)
        alone_BNN = contiguous_copy(torch.eye(N, dtype=torch.bool, device=sees_BNN.device).expand_as(sees_BNN))
        others = (-vectors_BND for vectors_BND in vectors)
        return (logit_rows + 1) % N, slots_S, tokens_BN, lengths_B, depth_BN + 1, alone_BNN, *others


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy that is no view: `torch.compile` guards on strides and on the base of a view, and would compile
    again for others."""
    return tensor.clone(memory_format=torch.contiguous_format)
