"""A pass by torch: the model's own code as it is, through `torch.compile`, or on a GPU as a CUDA graph of that.

It is called as the pass in C++ is (`cpu/model.py`), over a cache whose rows have different lengths.

Shape letters: B rows of a batch, N tokens of a pass, R tokens whose logits are wanted, S slots in use, V vocabulary,
D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.models import kv_cache
from paradraft.models.forward.compiled import compile_pass
from paradraft.models.forward.cuda_graphs import Replays, graph_size, replays_on
from paradraft.models.runtime import stored_bytes
from paradraft.ragged import upload
from paradraft.tree import ABSENT, ancestors, depths, is_chain, parents_of_chains


def hidden_states(
    model: PreTrainedModel,
    storage: kv_cache.Storage,
    slots_S: Tensor,
    tokens_BN: Tensor,
    lengths_B: Tensor,
    depth_BN: Tensor,
    visible_BNN: Tensor,
) -> Tensor:
    """The last hidden states `[B, N, D]` of one pass: a function of tensors, but for the cache it writes.

    The states of a token that sees another without finite keys and values are NaN, and no other states are changed.
    """
    B, N = tokens_BN.shape
    S = slots_S.shape[0]
    # A row that has ended is read on with the others; past the room, where nobody looks, it writes the last slot.
    last_slot = storage[0][0].shape[1] - 1
    written_BN = (lengths_B[:, None] + torch.arange(N, device=tokens_BN.device)).clamp(max=last_slot)
    offset_BS = slots_S[None] - lengths_B[:, None]
    inside_BS = (offset_BS >= 0) & (offset_BS < N)
    index_BNS = offset_BS.clamp(0, N - 1)[:, None].expand(B, N, S)
    sees_BNS = (offset_BS < 0)[:, None] | (inside_BS[:, None] & visible_BNN.gather(2, index_BNS))
    mask = torch.zeros(B, 1, N, S, dtype=model.dtype, device=tokens_BN.device)
    mask = mask.masked_fill(~sees_BNS[:, None], torch.finfo(model.dtype).min)
    cache = kv_cache.SlotCache(storage, written_BN, S)
    hidden_BND = model.model(
        input_ids=tokens_BN.clamp(min=0),
        attention_mask=mask,
        position_ids=lengths_B[:, None] + depth_BN,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    is_finite_BN = (cache.is_finite_BN[:, None] | ~visible_BNN).all(2)
    return hidden_BND.where(is_finite_BN[:, :, None], torch.nan)


def selected_logits(model: PreTrainedModel, storage: kv_cache.Storage, logit_rows: Tensor, *inputs: Tensor) -> Tensor:
    """The logits `[B, R, V]` of some rows of one pass, fit to be compiled."""
    hidden_BND = hidden_states(model, storage, *inputs)
    return model.lm_head(hidden_BND.gather(1, logit_rows[:, :, None].expand(-1, -1, hidden_BND.shape[2])))


BUCKET = 64
"""Attention reads the used part of the cache, in steps of so many slots."""
REPLAYED_BUCKET = 256
"""The same for passes that are replayed: each step is one more to record."""


class NotFiniteError(ValueError):
    """While a prompt was read, the model's states became NaN or infinite.

    Args:
        row: of the batch; the first of them.
    """

    def __init__(self, row: int) -> None:
        super().__init__(
            "states of the target or the draft model are not numbers: its weights are damaged, or its dtype overflows"
        )
        self.row = row


class TorchPass:
    """Computes the forward pass of a model with torch.

    Args:
        model: in evaluation mode; its weights must not change afterwards.
        slots: of the cache.
        compiled: through `torch.compile`, which makes one pass for a single row and one for more.
        cuda_graphs: on a GPU, record compiled passes and replay them.
        pad_to: run passes whose logits are wanted with at least this many tokens, and this many logits.
    """

    def __init__(self, model: PreTrainedModel, slots: int, *, compiled: bool, cuda_graphs: bool, pad_to: int) -> None:
        self._model = model
        self._positions = torch.arange(slots, device=model.device)
        self.is_traced = compiled
        # A pass of one token would be compiled a second time: torch.compile takes sizes 0 and 1 for constants.
        self._pad_to = max(pad_to, 2) if compiled else pad_to
        self._decode: Callable[..., Tensor] = selected_logits
        self.replays: Replays | None = None
        if compiled:
            self._decode = compile_pass(selected_logits, model)
            self.replays = replays_on(model.device) if cuda_graphs else None

    @property
    def is_replayed(self) -> bool:
        """Whether passes whose shape comes again are recorded."""
        return self.replays is not None

    def stored_bytes(self, weight: Tensor) -> int:
        """What a pass reads of a weight of the model."""
        return stored_bytes(weight)

    def forget(self) -> None:
        """Lets go of the storage, before another is allocated."""
        if self.replays is not None:
            self.replays.forget()

    def __call__(
        self,
        storage: kv_cache.Storage,
        lengths: list[int],
        tokens_BN: Tensor,
        parents_BN: Tensor,
        logit_rows: Tensor,
    ) -> Tensor:
        """The logits `[B, R, V]` of some tokens of one pass; keys and values go into the storage.

        Args:
            storage: of the size given at the start.
            lengths: how many tokens of each row are kept.
            tokens_BN: `[B, N]` token ids, below 0 where there is none.
            parents_BN: `[B, N]` the token that each one follows, -1 for the last kept one.
            rows_BR: `[B, R]` indices of the tokens whose logits are wanted; with none a prompt is read, which is
                not recorded.

        Raises:
            NotFiniteError: while a prompt was read, states became NaN or infinite.
        """
        R = logit_rows.shape[1]
        if not R:
            self._read(storage, lengths, tokens_BN, parents_BN)
            return torch.empty(len(logit_rows), 0, self._model.config.vocab_size, device=tokens_BN.device)
        replays = self.replays
        tokens_BN, parents_BN, logit_rows = self._filled(
            tokens_BN, parents_BN, logit_rows, replayed=replays is not None
        )
        run = partial(self._decode, self._model, storage)
        if replays is None:
            return run(_copy(logit_rows), *self._inputs(lengths, tokens_BN, parents_BN, BUCKET))[:, :R]
        given = _copy(logit_rows), *self._inputs(lengths, tokens_BN, parents_BN, REPLAYED_BUCKET)
        return replays(run, given, partial(self._others, *given))[:, :R]

    def _read(self, storage: kv_cache.Storage, lengths: list[int], tokens_BN: Tensor, parents_BN: Tensor) -> None:
        """Reads chains of tokens. The last token of a row sees all of them, so it tells whether one is not finite."""
        last_B1 = ((tokens_BN != ABSENT).sum(1, keepdim=True) - 1).clamp(min=0)
        if self.is_traced:
            tokens_BN, parents_BN, last_B1 = self._filled(tokens_BN, parents_BN, last_B1, replayed=False)
            inputs = self._inputs(lengths, tokens_BN, parents_BN, BUCKET)
            is_nan_B = self._decode(self._model, storage, _copy(last_B1), *inputs)[:, 0].isnan().any(1)
        else:
            inputs = self._inputs(lengths, tokens_BN, parents_BN, BUCKET)
            hidden_BND = hidden_states(self._model, storage, *inputs)
            is_nan_B = hidden_BND[torch.arange(len(last_B1)), last_B1[:, 0]].isnan().any(1)
        if (rows := (is_nan_B & (tokens_BN[:, 0] != ABSENT)).nonzero()).numel():
            raise NotFiniteError(int(rows[0]))

    def _filled(
        self, tokens_BN: Tensor, parents_BN: Tensor, logit_rows: Tensor, *, replayed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A pass with the least number of tokens and of logits, or those that a recording has."""

        def filled(number: int) -> int:
            least = max(number, self._pad_to)
            return graph_size(least) if replayed else least

        (B, N), R = tokens_BN.shape, logit_rows.shape[1]
        if (most := filled(N)) > N:
            tokens_BN = torch.nn.functional.pad(tokens_BN, (0, most - N), value=ABSENT)
            if is_chain(parents_BN):
                parents_BN = parents_of_chains(B, most, parents_BN.device)
            else:
                parents_BN = torch.nn.functional.pad(parents_BN, (0, most - N), value=ABSENT)
        if (most := filled(R)) > R:
            logit_rows = torch.nn.functional.pad(logit_rows, (0, most - R))
        return tokens_BN, parents_BN, logit_rows

    def _inputs(self, lengths: list[int], tokens_BN: Tensor, parents_BN: Tensor, bucket: int) -> tuple[Tensor, ...]:
        """What a pass is told: slots in use, tokens, kept lengths, depths and who sees whom."""
        used = min(-(-(max(lengths) + tokens_BN.shape[1]) // bucket) * bucket, len(self._positions))
        slots_S, lengths_B = _copy(self._positions[:used]), upload(lengths, tokens_BN.device)
        return slots_S, _copy(tokens_BN), lengths_B, depths(parents_BN), _copy(ancestors(parents_BN))

    def _others(
        self,
        logit_rows: Tensor,
        slots_S: Tensor,
        tokens_BN: Tensor,
        lengths_B: Tensor,
        depth_BN: Tensor,
        sees_BNN: Tensor,
    ) -> tuple[Tensor, ...]:
        """Inputs of the same shapes and, but for the slots, which follow from their number, all others. Nothing that is
        kept is written over; where the cache is full there is no place further."""
        N = tokens_BN.shape[1]
        tokens_BN = torch.where(tokens_BN == ABSENT, ABSENT, (tokens_BN + 1) % self._model.config.vocab_size)
        lengths_B = (lengths_B + 1).clamp(max=len(self._positions) - N)
        alone_BNN = _copy(torch.eye(N, dtype=torch.bool, device=sees_BNN.device).expand_as(sees_BNN))
        return (logit_rows + 1) % N, slots_S, tokens_BN, lengths_B, depth_BN + 1, alone_BNN


def _copy(tensor: Tensor) -> Tensor:
    # torch.compile guards on strides and on what a view is a view of, and would compile again for others.
    return tensor.clone(memory_format=torch.contiguous_format)
