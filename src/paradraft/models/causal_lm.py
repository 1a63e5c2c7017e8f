"""Causal LM with a ragged KV cache: prefill in chunks, and forward passes over drafts.

On CPUs passes are in C++, built once for all models (`forward/cpu`); for unsupported models torch computes them
(`forward/eager.py`, `forward/compiled.py`). Prefill uses the same pass. Attention reads the used slots only.

Shape letters: B rows of a batch, N tokens of a pass, T tokens of a prompt, R tokens whose logits are wanted,
V vocabulary, D hidden size, E rows of the embedding, P rows added to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.formats.vocab_map import VocabMap
from paradraft.models.added_ids import AddedIds
from paradraft.models.architectures import context_of
from paradraft.models.cached_rows import CachedRows, RowsView
from paradraft.models.config_check import check_architecture, check_capacity
from paradraft.models.forward import FINAL_NORM, Forward, ForwardOut, NotFiniteError
from paradraft.models.forward.choice import chosen
from paradraft.models.forward.cpu.draw import CpuSampling
from paradraft.models.forward.cpu.model import NativePass
from paradraft.models.forward.eager import part_of
from paradraft.models.forward.gated import GatedChange
from paradraft.models.forward.pipeline import PipelinePass, StageModel
from paradraft.models.kv_cache import Storage
from paradraft.models.output_ids import OutputIds
from paradraft.parents import depths, parents_of_chains
from paradraft.ragged import from_lists
from paradraft.sampling.faster import Faster
from paradraft.tree import ABSENT


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The size of a pass: rows, new tokens and logits (0 in prefill) per row, and cached tokens of the longest row."""

    rows: int
    tokens: int
    logits: int
    context: int


@dataclass(frozen=True, kw_only=True)
class PrefillOut:
    """Result of prefill.

    Args:
        last: for each row its last token, which was not read.
        hidden: by requested layer, `[B, T - 1, D]` states of all tokens but the last, 0 where a row has no token.
    """

    last: list[list[int]]
    hidden: dict[int, Tensor] = field(default_factory=dict)


PREFILL_CHUNK = 256


class CausalLM:
    """A model, its KV cache and the length of each row.

    Args:
        model: of one of `FAMILIES`, in evaluation mode; its weights must not change afterwards, because compiled
            passes have copies.
        vocab_size: ids from here on are never chosen (rows that only pad the embedding).
        capacity: most tokens of a row; at most the model's `context_of`.
        width: most tokens of one decoding pass; the cache has as many extra slots.
        compiled: compile passes; falls back to eager, with a warning, where it fails. None compiles only what takes
            seconds: passes in C++. False runs the model's own code.
        pad_to: least tokens of a decoding pass, so that passes of different rounds use the same kernels; in C++ all do.
        cuda_graphs: on a GPU, record decoding passes and replay them.
        stages: pipeline stages; empty if the model is on one device.
        ranks: tensor-parallel processes that share the heads of each layer.
        probe: of an earlier pass in C++ over the same packed weights, see `NativePass`.
        vocab_map: the ids of the output head's rows, if it has fewer than the vocabulary.

    Raises:
        ValueError: an unsupported architecture or capacity.
        OtherLogitsError: its pass in C++ has another `probe`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        capacity: int | None = None,
        width: int = 64,
        compiled: bool | None = None,
        pad_to: int = 1,
        cuda_graphs: bool = True,
        stages: Sequence[StageModel] = (),
        ranks: int = 1,
        probe: str | None = None,
        vocab_map: VocabMap | None = None,
    ) -> None:
        config = model.config
        check_architecture(config, config.name_or_path or config.model_type)
        most = context_of(config)
        check_capacity(capacity, most)
        self.model = model
        self.vocab_size = vocab_size
        self.capacity = capacity or most
        self.width, self._ranks = max(width, pad_to, 2), ranks
        parts = [stage.model for stage in stages] or [model]
        self.device = parts[-1].device
        """Device of tokens and logits: that of the last stage."""
        self.ids = OutputIds(vocab_size, vocab_map, self.device)
        self.refusals: list[str] = []
        """Warnings about passes in C++ that were refused for a supported model."""
        forward_of = partial(
            chosen, compiled=compiled, cuda_graphs=cuda_graphs, pad_to=pad_to, probe=probe, refusals=self.refusals
        )
        self._compute: Forward = PipelinePass(stages, forward_of) if stages else forward_of(model)
        self._added = AddedIds(len(model.get_input_embeddings().weight), config.hidden_size)
        self.cache = CachedRows(
            model,
            capacity=self.capacity,
            width=self.width,
            devices=[part.device for part in parts for _ in part.model.layers],
            ranks=ranks,
        )
        self.cache.holders.add(self._compute)
        self.passes = Counter[Pass]()
        """Count of the passes since `start`, by size."""

    def view(self, layers: int) -> CausalLM:
        """The model cut after `layers` layers, before its final norm and head; it shares weights, slots (`RowsView`).

        It has no prefill. Raises ValueError if there are pipeline stages.
        """
        assert 1 <= layers <= self.model.config.num_hidden_layers
        view = copy(self)
        view._compute, view.model = self._compute.first(layers), part_of(self.model, 0, layers)
        view.cache, view.passes, view.refusals = RowsView(self.cache, layers), Counter(), []
        self.cache.holders.add(view._compute)
        return view

    def start(self) -> None:
        """Removes all rows."""
        self.cache.start()
        self.passes = Counter()

    @torch.no_grad()
    def prefill(
        self, rows: list[list[int]], hidden_layers: Sequence[int] = (), vectors: Tensor | None = None
    ) -> PrefillOut:
        """Prefill: reads and keeps all but the last token of each row, in chunks.

        Args:
            rows: for each row of the batch its new tokens; none for a row that is not read. Leading rows with at most
                one token take no part in the passes.
            hidden_layers: whose states to return, as in `Forward`. `FINAL_NORM` and the last layer cost most: else the
                last layer is not computed in full for a prompt.
            vectors: `[B, T - 1, D]` or longer, read in place of the embeddings.

        Raises:
            NotFiniteError: states became NaN or infinite.
        """
        first = next((row for row, tokens in enumerate(rows) if len(tokens) > 1), len(rows))
        first = min(first, len(rows) - min(self.min_rows, len(rows)))
        rest_bT = from_lists([tokens[:-1] for tokens in rows[first:]], self.device)
        parts: dict[int, list[Tensor]] = {layer: [self._no_states(len(rest_bT))] for layer in hidden_layers}
        for start in range(0, rest_bT.shape[1], PREFILL_CHUNK):
            chunk_bN = rest_bT[:, start : start + PREFILL_CHUNK]
            chunk_vectors = None if vectors is None else vectors[first:, start : start + chunk_bN.shape[1]]
            for layer, states in self._read(chunk_bN, first, hidden_layers, chunk_vectors).hidden.items():
                parts[layer].append(states)
        hidden = {layer: torch.cat(states, dim=1) for layer, states in parts.items()}
        hidden = {layer: torch.nn.functional.pad(states, (0, 0, 0, 0, first, 0)) for layer, states in hidden.items()}
        return PrefillOut(last=[tokens[-1:] for tokens in rows], hidden=hidden)

    def _read(self, chunk_bN: Tensor, first: int, hidden_layers: Sequence[int], vectors: Tensor | None) -> ForwardOut:
        """Reads and keeps one prefill chunk of the rows from `first` on."""
        self.cache.reserve(self.cache.longest + chunk_bN.shape[1])
        storage = self.cache.rows_from(first)
        no_logits_b0 = torch.zeros(len(chunk_bN), 0, dtype=torch.long, device=self.device)
        chains_bN = parents_of_chains(*chunk_bN.shape, self.device)
        lengths = self.cache.lengths[first:]
        try:
            out = self._pass(storage, lengths, chunk_bN, chains_bN, no_logits_b0, hidden_layers, vectors)
        except NotFiniteError as error:
            raise NotFiniteError(first + error.row) from None
        self.cache.advance([0] * first + (chunk_bN != ABSENT).sum(1).tolist())
        return out

    def _no_states(self, rows: int) -> Tensor:
        dtype = torch.float32 if self.is_native else self.model.dtype
        return torch.zeros(rows, 0, self.model.config.hidden_size, dtype=dtype, device=self.device)

    @torch.no_grad()
    def forward(
        self,
        tokens_BN: Tensor,
        parents_BN: Tensor | None = None,
        logit_rows: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
        *,
        vectors: Tensor | None = None,
    ) -> ForwardOut:
        """Reads new tokens after the cached ones; the cache keeps none until its `advance` or `accept_path`.

        Arguments are those of `Forward`, for the rows that are decoded or for these and those in prefill. By default
        tokens are a chain, and the logits of all are returned.

        Returns:
            `[B, R, V]` logits of the next token, -inf for ids that may not be chosen, and `[B, N, D]` states of each of
            `hidden_layers`.
        """
        B, N = tokens_BN.shape
        assert N <= self.width or B > self.cache.decoding, f"a pass of {N} tokens, but room for {self.width}"
        chains_BN = parents_of_chains(B, N, self.device)
        parents_BN = chains_BN if parents_BN is None else parents_BN
        logit_rows = depths(chains_BN) if logit_rows is None else logit_rows
        self.cache.reserve(self.cache.longest + max(N - self.width, 0))
        storage, lengths = self.cache.first(B), self.cache.lengths[:B]
        out = self._pass(storage, lengths, tokens_BN, parents_BN, logit_rows, hidden_layers, vectors)
        return ForwardOut(logits=self.allowed(out.logits), hidden=out.hidden)

    def _pass(
        self,
        storage: Storage,
        lengths: list[int],
        tokens_BN: Tensor,
        parents_BN: Tensor,
        logit_rows: Tensor,
        hidden_layers: Sequence[int],
        vectors: Tensor | None,
    ) -> ForwardOut:
        if hidden_layers:
            self.check_hidden_layers(hidden_layers)
        (B, N), R = tokens_BN.shape, logit_rows.shape[1]
        self.passes[Pass(rows=B, tokens=N, logits=R, context=max(lengths))] += 1
        return self._compute(
            storage, lengths, tokens_BN, parents_BN, logit_rows=logit_rows, hidden_layers=hidden_layers, vectors=vectors
        )

    def check_hidden_layers(self, layers: Sequence[int]) -> None:
        """Raises ValueError if passes cannot return the states of these layers."""
        last = self.model.config.num_hidden_layers
        if len(set(layers)) < len(layers):
            raise ValueError(f"hidden layers {list(layers)}: name each only once")
        for layer in layers:
            if type(layer) is not int or not FINAL_NORM <= layer <= last:
                raise ValueError(
                    f"hidden layer {layer!r}: use 0 (the embeddings) to {last} (the last layer), or {FINAL_NORM} "
                    "(after the final norm)"
                )

    @torch.no_grad()
    def add_embeddings(self, rows_PD: Tensor, change: GatedChange | None = None) -> range:
        """Adds ids with these embeddings `[P, D]`, for prompt tokens, which are read but never chosen, and `change`s
        attention for them; all other ids stay as they are.

        Returns:
            The ids, which follow the last row of the embedding and those of earlier calls.
        """
        if change is not None and self._ranks > 1:
            raise ValueError("a tensor-parallel target cannot change attention for prompt tokens")
        return self._added.add(rows_PD.to(self.device, self.model.dtype), change, self._compute)

    def end_change(self, ids: range) -> None:
        """Ends a change of attention for added ids."""
        self._added.end_change(ids, self._compute)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings `[…, D]` of token ids `[…]`; arbitrary for absent tokens."""
        embedding = self.model.get_input_embeddings()
        vectors: Tensor = embedding(tokens.clamp(min=0).to(embedding.weight.device))
        return vectors.to(self.device)

    @torch.no_grad()
    def head(self, states: Tensor) -> Tensor:
        """The logits `[…, V]` of states `[…, D]` after the final norm, -inf for ids that may not be chosen."""
        return self.allowed(self._compute.head(states.flatten(0, -2)).unflatten(0, states.shape[:-1]))

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """A linear layer of a drafter, computed as the model's own: a function from `[…, inputs]` to `[…, outputs]`.

        The weight `[outputs, inputs]` and the bias `[outputs]` are copied.
        """
        product = self._compute.linear(weight, bias)
        return lambda inputs: product(inputs.flatten(0, -2)).unflatten(0, inputs.shape[:-1])

    @property
    def is_native(self) -> bool:
        """Whether passes are in C++: logits are then bitwise the same in every chunk, batch and tree, and
        passes have their own threads."""
        return self._compute.is_native

    @property
    def native(self) -> NativePass | None:
        """The pass in C++; None if torch or several stages compute the model."""
        return self._compute if isinstance(self._compute, NativePass) else None

    @property
    def probe(self) -> str | None:
        """A digest of the logits of a few tokens of a pass in C++; None for other passes."""
        return self._compute.probe if isinstance(self._compute, NativePass) else None

    @property
    def threads(self) -> int:
        """Most threads of a pass."""
        return self._compute.threads

    @property
    def sampling(self) -> Faster | None:
        """Sampling in C++, with the threads of the passes; None unless these are in C++."""
        return CpuSampling(threads=self.threads) if self.is_native else None

    @property
    def is_ragged(self) -> bool:
        """Whether a pass skips absent tokens; else they cost as much as others."""
        return self.is_native

    @property
    def min_rows(self) -> int:
        """Least rows of a batch that shrinks: 2 where `torch.compile` would compile another pass for one row."""
        return self._compute.min_rows

    @property
    def warm_up_rounds(self) -> int:
        """See `Forward`."""
        return self._compute.warm_up_rounds

    def weight_bytes(self, weight: Tensor) -> int:
        """Bytes that a pass reads of one of the model's weights."""
        return self._compute.weight_bytes(weight)

    def allowed(self, logits: Tensor) -> Tensor:
        """The logits `[…, V]` of ids, from those of the head's rows; -inf for ids that may not be chosen. In place."""
        return self.ids.logits(logits)

    def forbid(self, tokens: Iterable[int]) -> None:
        """Forbids tokens for good, such as the model's suppressed ones."""
        self.ids.forbid(tokens)

    def reserve(self, tokens: Iterable[int]) -> None:
        """Forbids tokens, such as a drafter's mask token, until the next call."""
        self.ids.reserve(tokens)
