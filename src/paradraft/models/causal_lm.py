"""A Hugging Face causal LM that reads several tokens per row in one pass and can go back.

On CPUs the forward pass is one in C++, built once for all models (`forward/cpu`). Where that does not serve, torch
computes it (`forward/eager.py`). Prompts are read by the same pass. Attention reads the used part of the cache only.

Shape letters: B rows of a batch, N tokens of a pass, R tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.models import kv_cache
from paradraft.models.architecture import check_architecture
from paradraft.models.forward.cpu.build import CannotBuildError
from paradraft.models.forward.cpu.model import NativePass, can_serve
from paradraft.models.forward.cuda_graphs import graph_size
from paradraft.models.forward.eager import BUCKET, NotFiniteError, TorchPass
from paradraft.ragged import from_lists, upload
from paradraft.tree import ABSENT, depths, parents_of_chains


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a causal LM over a batch.

    Args:
        rows: texts of the batch.
        tokens: new tokens of each.
        logits: tokens of each whose logits are wanted; 0 while a prompt is read.
        context: tokens that the longest row had before.
    """

    rows: int
    tokens: int
    logits: int
    context: int


PREFILL_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class SavedRow:
    """What a cache held of one row.

    Args:
        length: how many tokens.
        storage: their keys and values.
    """

    length: int
    storage: kv_cache.Storage


class CausalLM:
    """A model, its cache, and how many tokens of each row the cache holds.

    Args:
        model: any Llama- or Qwen-type causal LM without sliding windows, in evaluation mode; its weights must not
            change afterwards, because compiled passes have copies.
        vocab_size: ids from here on are never chosen (rows that only pad the embedding).
        capacity: most tokens a row may have; at most the model's `max_position_embeddings`.
        width: most tokens of one decoding pass; the cache has that much room to spare.
        compiled: compile the passes; falls back to eager, with a warning, where it fails. None compiles what takes
            no more than seconds: passes in C++. False runs the model's own code.
        pad_to: run decoding passes with at least this many tokens, so that passes of different
            rounds go through the same kernels; in C++ all do.
        cuda_graphs: record and replay passes that `torch.compile` makes for a GPU.

    Raises:
        ValueError: an architecture or capacity that this cache cannot serve.
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
    ) -> None:
        config = model.config
        check_architecture(config, config.name_or_path or config.model_type)
        most = config.max_position_embeddings
        if capacity is not None and not 1 <= capacity <= most:
            raise ValueError(f"capacity={capacity}: this model has room for 1 to {most} tokens")
        self.model = model
        self.vocab_size = vocab_size
        self._forbidden = set[int]()
        self._reserved = set[int]()
        self.capacity = capacity or most
        self.width = max(width, pad_to, 2)
        self.device = model.device
        self._slots = -(-(self.capacity + graph_size(self.width)) // BUCKET) * BUCKET
        self._compute = (None if compiled is False else _native_pass(model, self._slots)) or TorchPass(
            model, self._slots, compiled=compiled is True, cuda_graphs=cuda_graphs, pad_to=pad_to
        )
        self.starts = 0
        """How often `start` was called: there is one cache, so whoever starts ends what others had in it."""
        self._largest = self._allocate(1)
        self._storage: kv_cache.Storage = []
        self.passes = Counter[Pass]()
        """The passes since `clear`, for whoever wants to know what they cost."""
        self._set_lengths([])

    def _allocate(self, batch_size: int) -> kv_cache.Storage:
        return kv_cache.allocate(
            self.model.config, batch_size=batch_size, capacity=self._slots, dtype=self.model.dtype, device=self.device
        )

    def start(self) -> None:
        """Forgets all rows."""
        self.starts += 1
        self._storage = []
        self._set_lengths([])
        self.passes = Counter()

    def join(self, rows: int) -> None:
        """Adds empty rows after the others.

        Raises:
            ValueError: a cache for so many rows does not fit into memory.
        """
        total = len(self.lengths) + rows
        if not self._largest or len(self._largest[0][0]) < total:
            self._grow(total)
        self._storage = kv_cache.rows_of(self._largest, 0, total)
        self._set_lengths([*self.lengths, *[0] * rows])

    def save(self, row: int, most: int) -> SavedRow:
        """Keys and values of a row's first tokens, at most so many, for another row that begins with the same."""
        length = min(self.lengths[row], most)
        return SavedRow(length=length, storage=kv_cache.copied(self._storage, row, length))

    def restore(self, row: int, saved: SavedRow, most: int) -> int:
        """Begins an empty row with the first tokens of another, at most so many; returns how many there are."""
        length = min(saved.length, most)
        kv_cache.restore(self._storage, row, saved.storage, length)
        self._set_lengths([length if index == row else before for index, before in enumerate(self.lengths)])
        return length

    def _grow(self, rows: int) -> None:
        """A larger cache. Without rows, the smaller one is given back before; else what it holds is copied."""
        self._storage = []
        self._compute.forget()
        before = self._largest if self.lengths else []
        self._largest = []
        self._largest = self._allocate(rows)
        for new, old in zip(self._largest, before, strict=False):
            for new_BCHD, old_BCHD in zip(new, old, strict=True):
                new_BCHD[: len(self.lengths), : self._longest] = old_BCHD[: len(self.lengths), : self._longest]

    @torch.no_grad()
    def prefill(self, rows: list[list[int]]) -> list[list[int]]:
        """Reads and keeps all but the last token of each row; at any length, in chunks.

        Args:
            rows: for each row of the batch the tokens after those that it has, at least one. Rows of one token are not
                read, if no row before them has more.

        Returns:
            The last token of each row.

        Raises:
            NotFiniteError: the states of a row are not numbers.
        """
        first = next((row for row, tokens in enumerate(rows) if len(tokens) > 1), len(rows))
        first = min(first, len(rows) - self.fewest_rows)
        rest_bT = from_lists([tokens[:-1] for tokens in rows[first:]], self.device)
        for start in range(0, rest_bT.shape[1], PREFILL_CHUNK):
            self._read(rest_bT[:, start : start + PREFILL_CHUNK], first)
        return [tokens[-1:] for tokens in rows]

    def _read(self, chunk_bN: Tensor, first: int) -> None:
        """Reads and keeps a piece of the texts of the rows from `first` on."""
        storage = kv_cache.rows_of(self._largest, first, len(self.lengths))
        nothing_b0 = torch.zeros(len(chunk_bN), 0, dtype=torch.long, device=self.device)
        chains_bN = parents_of_chains(*chunk_bN.shape, self.device)
        lengths = self.lengths[first:]
        try:
            self._pass(storage, lengths, chunk_bN, chains_bN, nothing_b0)
        except NotFiniteError as error:
            raise NotFiniteError(first + error.row) from None
        self.advance([0] * first + (chunk_bN != ABSENT).sum(1).tolist())

    @torch.no_grad()
    def forward(self, tokens_BN: Tensor, parents_BN: Tensor | None = None, logit_rows: Tensor | None = None) -> Tensor:
        """Reads new tokens behind the kept ones; nothing is kept until `advance` or `accept_path`.

        Args:
            tokens_BN: `[B, N]` token ids, `ABSENT` where a row has fewer.
            parents_BN: `[B, N]` the token that each one follows, -1 for the last kept token; by
                default each follows the one before it.
            rows_BR: `[B, R]` indices of the tokens whose logits are wanted; all by default.

        Returns:
            `[B, R, V]` logits of what comes next; ids that may not be chosen are -inf.
        """
        B, N = tokens_BN.shape
        assert N <= self.width, f"a pass of {N} tokens, but room for {self.width}"
        chains_BN = parents_of_chains(B, N, self.device)
        parents_BN = chains_BN if parents_BN is None else parents_BN
        logit_rows = depths(chains_BN) if logit_rows is None else logit_rows
        return self.allowed(self._pass(self._storage, self.lengths, tokens_BN, parents_BN, logit_rows))

    def _pass(
        self, storage: kv_cache.Storage, lengths: list[int], tokens_BN: Tensor, parents_BN: Tensor, logit_rows: Tensor
    ) -> Tensor:
        (B, N), R = tokens_BN.shape, logit_rows.shape[1]
        self.passes[Pass(rows=B, tokens=N, logits=R, context=max(lengths))] += 1
        return self._compute(storage, lengths, tokens_BN, parents_BN, logit_rows)

    @property
    def is_native(self) -> bool:
        """Whether passes are in C++: logits are then the same to the last bit in every cut, batch and tree, and passes
        have threads of their own."""
        return isinstance(self._compute, NativePass)

    def stored_bytes(self, weight: Tensor) -> int:
        """What a pass reads of one of the model's weights."""
        return self._compute.stored_bytes(weight)

    @property
    def is_traced(self) -> bool:
        """Whether passes go through `torch.compile`, which makes one for a single row and one for more."""
        return self._compute.is_traced

    @property
    def is_replayed(self) -> bool:
        """Whether decoding passes whose shape comes again are recorded."""
        return self._compute.is_replayed

    @property
    def fewest_rows(self) -> int:
        """How few rows a batch may shrink to: `torch.compile` makes a pass for one row, which may not be there."""
        return 2 if self.is_traced and len(self.lengths) > 1 else 1

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits `[…, V]` of the tokens that may be chosen, in place; forbidden ones are -inf."""
        logits = logits.narrow(-1, 0, self.vocab_size)
        for token in self._forbidden | self._reserved:
            logits.select(-1, token).fill_(-torch.inf)
        return logits

    def forbid(self, tokens: Iterable[int]) -> None:
        """Makes sure that tokens, such as those that the model suppresses, are never chosen."""
        self._forbidden |= {token for token in tokens if token < self.vocab_size}

    def reserve(self, tokens: Iterable[int]) -> None:
        """Makes sure that these tokens, such as a drafter's mask, are not chosen until others are named."""
        self._reserved = {token for token in tokens if token < self.vocab_size}

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)
        """How many tokens of each row the cache holds."""
        self._longest = max(lengths, default=0)

    def advance(self, counts: list[int]) -> None:
        """Keeps the first tokens of the last pass, of each row so many."""
        # A row that has ended is read on until all rows of its batch have; it must not outgrow the cache.
        self._set_lengths([min(sum(pair), self.capacity) for pair in zip(self.lengths, counts, strict=True)])

    def accept_path(self, paths: list[list[int]]) -> None:
        """Keeps the tokens of the last pass that each row's path names, in its order."""
        if any(path != list(range(len(path))) for path in paths):
            first_slot_B = upload(self.lengths, self.device)
            kv_cache.compact(self._storage, first_slot_B, from_lists(paths, self.device))
        self.advance(list(map(len, paths)))

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but `rows`, `[b]` the index that each had before."""
        kv_cache.move_rows(self._storage, rows, self._longest)
        self._storage = kv_cache.rows_of(self._largest, 0, len(rows))
        self._set_lengths([self.lengths[row] for row in rows.tolist()])

    def rollback(self, lengths: list[int]) -> None:
        """Goes back to earlier lengths of the rows."""
        assert all(earlier <= now for earlier, now in zip(lengths, self.lengths, strict=True))
        self._set_lengths(lengths)


def _native_pass(model: PreTrainedModel, slots: int) -> NativePass | None:
    """The pass in C++; None where it does not serve."""
    if not can_serve(model):
        return None
    try:
        return NativePass(model, slots)
    except (CannotBuildError, ValueError) as error:
        warnings.warn(f"no passes in C++, which are several times as fast: {error}", stacklevel=2)
        return None
