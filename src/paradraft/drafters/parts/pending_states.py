"""The committed tokens, and the target's states before them, that a draft model has not read.

Shape letters: B rows of a batch, M tokens that a round commits, N pending tokens, K drafted tokens, D width of the
model, S width of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paradraft.core import Committed, Request
from paradraft.models.cached_rows import SavedRow
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import ForwardOut
from paradraft.models.target import gathered
from paradraft.ragged import from_lists, upload
from paradraft.tree import ABSENT

MasksOf = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Embeddings and states `[B, K - 1, …]` of masks, from the states `[B, 1, S]` before each row's last token, and K."""


@dataclass(frozen=True, kw_only=True)
class SavedStates:
    """The saved state of a row.

    Args:
        cache: its row of the KV cache.
        states: `[M, S]` from which the tokens after the cached ones were predicted, as far as known.
    """

    cache: SavedRow
    states: Tensor


class PendingStates:
    """A draft model's KV cache, and the tokens and states of each row that are not in it.

    Subclasses define `_keep`.

    Args:
        lm: the model.
        states_of: the states `[B, M, S]` of committed tokens.
        width: S; 0 if no states are read.
        unread: number of leading tokens of a text that are never read.
    """

    def __init__(self, lm: CausalLM, *, states_of: Callable[[Committed], Tensor], width: int, unread: int = 0) -> None:
        self.lm, self._states_of, self._unread = lm, states_of, unread
        self._tokens = torch.empty(0, 0, dtype=torch.long, device=lm.device)
        self._states = torch.empty(0, 0, width, device=lm.device)
        self.anchors: list[int] = []
        """By row, the last committed token."""

    def start(self) -> None:
        """Drops all rows."""
        self.lm.start()
        self.anchors = []
        self._tokens, self._states = self._tokens[:0, :0], self._states[:0, :0]

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Adds rows after the others; the prefill happens at the first draft."""
        self.lm.cache.join(len(requests))
        self.anchors += [tokens[-1] for tokens in prompt.tokens]
        before, after = self._tokens, from_lists(prompt.tokens, self.lm.device)[:, self._unread :]
        most = max(before.shape[1], after.shape[1])
        self._tokens = torch.cat([pad(rows, (0, most - rows.shape[1]), value=ABSENT) for rows in (before, after)])
        states = self._states_of(prompt)[:, self._unread :]
        both = (self._states.to(states.dtype), states)
        self._states = torch.cat([pad(rows, (0, 0, 0, most - rows.shape[1])) for rows in both])

    def commit(self, new: Committed) -> None:
        """Adds committed tokens and states to the pending ones."""
        tokens, states = from_lists(new.tokens, self.lm.device), self._states_of(new)
        self.anchors = [[anchor, *added][-1] for anchor, added in zip(self.anchors, new.tokens, strict=True)]
        if not self._tokens.shape[1]:
            self._tokens, self._states = tokens, states
            return
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        self._states = torch.cat([self._states.to(states.dtype), states], dim=1)
        self._tidy()

    def _tidy(self) -> None:
        """Moves padding to the right."""
        is_absent = self._tokens == ABSENT
        order_BN = is_absent.long().argsort(dim=1, stable=True)[:, : int((~is_absent).sum(1).max())]
        self._tokens = self._tokens.gather(1, order_BN)
        self._states = self._states.gather(1, order_BN[:, :, None].expand(-1, -1, self._states.shape[2]))

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self.lm.cache.keep(rows)
        self._tokens, self._states = self._tokens[rows], self._states[rows]
        self.anchors = [self.anchors[row] for row in rows.tolist()]

    def save(self, row: int, most: int) -> SavedStates:
        """See `Drafter`."""
        most = max(most - self._unread, 0)
        cache = self.lm.cache.save(row, most)
        unread = min(most - cache.length, int((self._tokens[row] != ABSENT).sum()))
        return SavedStates(cache=cache, states=self._states[row, :unread].clone())

    def restore(self, row: int, saved: SavedStates, shared: int) -> None:
        """See `Drafter`."""
        shared = max(shared - self._unread, 0)
        length = int((self._tokens[row] != ABSENT).sum())
        if not length:
            return
        known = self.lm.cache.restore(row, saved.cache, min(shared, length - 1))
        # The target did not read the common prefix again, so its states are those of the other row.
        more = max(min(shared - known, len(saved.states)), 0) if known == saved.cache.length else 0
        self._states[row, known : known + more] = saved.states[:more].to(self._states.dtype)
        self._tokens[row] = pad(self._tokens[row, known:], (0, known), value=ABSENT)
        self._states[row] = pad(self._states[row, known:], (0, 0, 0, known))
        self._tidy()

    def able(self, lengths: Sequence[int]) -> list[int]:
        """The lengths that rows can draft: 0 right after a prompt of one token, if that is never read."""
        if not self._unread or all(self.lm.cache.lengths):
            return list(lengths)
        have_tokens = (self._tokens != ABSENT).any(1).tolist()
        return [length if has_tokens else 0 for length, has_tokens in zip(lengths, have_tokens, strict=True)]

    def catch_up(self, rows: Sequence[int], most: int) -> dict[int, int]:
        """See `Drafter`; a row that has more than `most` tokens pending is read in pieces."""
        counts, pieces = self.counts(), [0] * len(self._tokens)
        behind = [row for row in rows if counts[row] > most]
        for row in behind:
            pieces[row] = min(most, counts[row] - 1)
            most -= pieces[row]
        self._read_first(pieces)
        return {row: counts[row] - pieces[row] for row in behind}

    def counts(self) -> list[int]:
        """By row, the number of pending tokens."""
        counts: list[int] = (self._tokens != ABSENT).sum(1).tolist()
        return counts

    def _read_first(self, counts: Sequence[int]) -> None:
        """Reads and keeps the first pending tokens of each row."""
        if max(counts, default=0):
            self._keep(counts)
            self._drop(counts)

    def _keep(self, counts: Sequence[int]) -> None:
        """Writes keys and values of the first pending tokens of each row into the cache; not all counts are 0."""
        raise NotImplementedError

    def _drop(self, counts: Sequence[int]) -> None:
        places_1N = torch.arange(self._tokens.shape[1], device=self._tokens.device)[None]
        self._tokens = self._tokens.masked_fill(places_1N < upload(counts, self._tokens.device)[:, None], ABSENT)
        self._tidy()


class PendingVectors(PendingStates):
    """Pending tokens and states of a model that reads vectors made of both.

    Args:
        embed: the embeddings `[…, D]` of token ids `[…]`; arbitrary for absent tokens.
        joined: maps the embeddings `[…, D]` of tokens and their states `[…, S]` to the model's input `[…, D]`.
    """

    def __init__(
        self,
        lm: CausalLM,
        *,
        embed: Callable[[Tensor], Tensor],
        states_of: Callable[[Committed], Tensor],
        width: int,
        joined: Callable[[Tensor, Tensor], Tensor],
        unread: int = 0,
    ) -> None:
        super().__init__(lm, states_of=states_of, width=width, unread=unread)
        self._embed, self.joined = embed, joined

    def _keep(self, counts: Sequence[int]) -> None:
        most = max(counts)
        vectors_BND = self.joined(self._embed(self._tokens[:, :most]), self._states[:, :most])
        self.lm.prefill([[0] * (count + 1) if count else [] for count in counts], vectors=vectors_BND)

    def read(
        self, lengths: Sequence[int], masks: MasksOf | None = None, hidden_layers: Sequence[int] = ()
    ) -> tuple[ForwardOut, Tensor]:
        """Reads the pending tokens of the rows that draft, and masks after them; masks do not stay in the cache.

        Args:
            lengths: by row, the number of tokens to draft; not all 0.
            masks: without them only the first token is drafted.
            hidden_layers: whose states are wanted, as in `Forward`.

        Returns:
            The pass, with the logits of the last committed token and of each mask; and `[B, K]` their places in it.
            Both are undefined beyond a row's length.
        """
        device, k = self.lm.device, max(lengths) if masks else 1
        counts = [count if length else 0 for count, length in zip(self.counts(), lengths, strict=True)]
        if max(counts) + k > self.lm.width:
            self._read_first([max(count - 1, 0) for count in counts])
            counts = [min(count, 1) for count in counts]
        embeddings_BND, states_BNS = self._embed(self._tokens[:, : max(counts)]), self._states[:, : max(counts)]
        if masks is not None and k > 1:
            last_B1S = gathered(states_BNS, upload([[max(count - 1, 0)] for count in counts], device))
            both = zip((embeddings_BND, states_BNS), masks(last_B1S, k), strict=True)
            embeddings_BND, states_BNS = (followed_by(ahead, counts, of_masks) for ahead, of_masks in both)
        widths = [count + min(length, k) - 1 if count else 0 for count, length in zip(counts, lengths, strict=True)]
        vectors_BND = self.joined(embeddings_BND, states_BNS)[:, : max(widths)]
        present = [[0] * width + [ABSENT] * (max(widths) - width) for width in widths]
        places = [[min(max(count - 1, 0) + i, max(widths) - 1) for i in range(k)] for count in counts]
        places_BK = upload(places, device)
        out = self.lm.forward(
            upload(present, device), logit_rows=places_BK, hidden_layers=hidden_layers, vectors=vectors_BND
        )
        self.lm.cache.advance(counts)
        if min(lengths):
            self._tokens, self._states = self._tokens[:, :0], self._states[:, :0]
        else:
            self._drop(counts)
        return out, places_BK


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
