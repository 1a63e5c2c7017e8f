"""The target: prefill, forward(draft), commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paradraft.core import Committed, Draft, Request, TargetOut, Verdict
from paradraft.models.cached_rows import SavedRow
from paradraft.models.causal_lm import CausalLM
from paradraft.models.likeliest_tokens import likeliest_after
from paradraft.models.prompt_tokens import forward_with_probes
from paradraft.parents import depths, logit_rows, parents_of_chains, with_root
from paradraft.ragged import from_lists, upload
from paradraft.text.chat_template import end_of_turn
from paradraft.text.generation_config import end_ids
from paradraft.wording import number_of


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """The facts about a target that a draft model must fit; attributes of `Target` too.

    Drafters that run ahead (PEARL) are built from these alone.

    Args:
        tokenizer: of the target.
        vocab_size: ids from here on are never chosen.
        capacity: most tokens of a row, prompt included.
        eos_ids: the tokens that end a text.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    capacity: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class _ChunkedPrefill:
    """A prompt in chunked prefill: its tokens, the length of its cached prefix, and states of each chunk by layer."""

    tokens: list[int]
    known: int
    states: list[dict[int, Tensor]] = field(default_factory=list)


class Target:
    """The model whose text is produced.

    The last committed token is never in the cache between rounds: it is read together with the
    draft, as the root of the tree. So the first round needs no special case.

    Args:
        lm: the model.
        tokenizer: of the model.
        named_ends: all EOS ids in the model's files; empty without files.
    """

    def __init__(
        self, lm: CausalLM, tokenizer: PreTrainedTokenizerBase, named_ends: frozenset[int] = frozenset()
    ) -> None:
        self.lm = lm
        self.tokenizer = tokenizer
        self.named_ends = named_ends
        self._prefill: _ChunkedPrefill | None = None

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        return self.lm.device

    @property
    def starts(self) -> int:
        """Number of batches started: because there is one cache, a new batch ends the one before."""
        return self.lm.cache.starts

    @property
    def capacity(self) -> int:
        """Most tokens of a row, prompt included."""
        return self.lm.capacity

    @property
    def vocab_size(self) -> int:
        """Ids from here on are never chosen."""
        return self.lm.vocab_size

    @property
    def facts(self) -> TargetFacts:
        """The facts that a draft model must fit."""
        return TargetFacts(
            tokenizer=self.tokenizer, vocab_size=self.vocab_size, capacity=self.capacity, eos_ids=self.eos_ids
        )

    @property
    def fewest_rows(self) -> int:
        """Least rows that the batch may shrink to."""
        return min(self.lm.min_rows, len(self.lm.cache.lengths))

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a text, as `generate` of `transformers` reads them."""
        return end_ids(self.lm.model.generation_config)

    @property
    def is_instruct(self) -> bool:
        """Whether it is a chat model: an EOS id of its files ends a turn in its chat template.

        A base model may have the template of its family, but ends its texts with another token.
        """
        return end_of_turn(self.tokenizer) in self.named_ends

    def start(
        self, reserved_tokens: Iterable[int] = (), hidden_layers: tuple[int, ...] = (), likeliest: int = 0
    ) -> None:
        """Removes all rows and starts a batch for one drafter.

        Args:
            reserved_tokens: never chosen.
            hidden_layers: whose states `join` and every round return.
            likeliest: number of likeliest tokens at each place that every round returns.
        """
        self._hidden_layers = hidden_layers
        self._likeliest = likeliest
        self._prefill = None
        self.lm.start()
        self.lm.reserve(reserved_tokens)
        self._root_B1 = torch.empty(0, 1, dtype=torch.long, device=self.device)

    def join(self, requests: Sequence[Request], prefixes: Sequence[tuple[SavedRow, int] | None] = ()) -> Committed:
        """Appends rows and prefills their prompts, all but the last tokens.

        Args:
            requests: one for each new row.
            prefixes: for each a saved row and the length of its common prefix with the prompt, which is not read again;
                None without one, empty if no request has one.

        Raises:
            ValueError: a prompt is longer than the capacity, its states are not finite, or the cache does not fit into
                memory.
        """
        prompts = [request.tokens for request in requests]
        self._check_room(max(map(len, prompts)))
        before = len(self._root_B1)
        self.lm.cache.join(len(prompts))
        known = [0] * len(prompts)
        for index, prefix in enumerate(prefixes):
            known[index] = self._restore(before + index, prompts[index], prefix)
        unread = [prompt[length:] for prompt, length in zip(prompts, known, strict=True)]
        # The other rows are not read: their roots stay the same until the next round.
        read = self.lm.prefill([[]] * before + unread, self._hidden_layers)
        self._root_B1 = torch.cat([self._root_B1, upload(read.last[before:], self.device)])
        most = max(map(len, prompts))
        hidden = {layer: _after(states[before:], known, most) for layer, states in read.hidden.items()}
        return Committed(tokens=prompts, hidden=hidden)

    def begin(self, request: Request, prefix: tuple[SavedRow, int] | None = None) -> None:
        """Appends a row for chunked prefill by `read`; until its end no pass decodes the row, and no other may join.

        See `join` for `prefix` and errors.
        """
        self._check_room(len(request.tokens))
        self.lm.cache.join(1, in_prefill=True)
        known = self._restore(len(self._root_B1), request.tokens, prefix)
        self._prefill = _ChunkedPrefill(tokens=request.tokens, known=known)

    def read(self, most: int) -> tuple[int, Committed | None]:
        """Prefills a chunk of at most `most` tokens of the row of `begin`.

        Returns:
            The number of tokens read; and the result of `join` after the last chunk, else None. Errors as in `join`.
        """
        assert self._prefill is not None
        row, prompt = self._prefill, self._prefill.tokens
        before, first = len(self._root_B1), self.lm.cache.lengths[-1]
        last = min(first + most, len(prompt) - 1)
        read = self.lm.prefill([[]] * before + [prompt[first : last + 1]], self._hidden_layers)
        row.states.append({layer: states[before:] for layer, states in read.hidden.items()})
        if last < len(prompt) - 1:
            return last - first, None
        self._prefill = None
        self.lm.cache.admit()
        self._root_B1 = torch.cat([self._root_B1, upload([prompt[-1:]], self.device)])
        hidden = {
            layer: _after(torch.cat([part[layer] for part in row.states], dim=1), [row.known], len(prompt))
            for layer in self._hidden_layers
        }
        return last - first, Committed(tokens=[prompt], hidden=hidden)

    def give_up(self) -> None:
        """Removes the row of `begin`."""
        self._prefill = None
        self.lm.cache.keep(torch.arange(len(self._root_B1)))

    def _check_room(self, tokens: int) -> None:
        if tokens > self.capacity:
            raise ValueError(
                f"the prompt has {number_of(tokens, 'token')}, the model has room for {self.capacity}: shorten it"
            )

    def _restore(self, row: int, prompt: list[int], prefix: tuple[SavedRow, int] | None) -> int:
        """Copies a saved prefix into a row; returns its length in tokens."""
        if prefix is None:
            return 0
        saved, shared = prefix
        # The last known token is read again for its state, from which the first unread one is predicted.
        most = min(shared, len(prompt) - 1) - bool(self._hidden_layers)
        return self.lm.cache.restore(row, saved, max(most, 0))

    def forward(self, draft: Draft) -> TargetOut:
        """Reads the last committed tokens, the whole draft and its probes in one pass."""
        tokens = torch.cat([self._root_B1, draft.tokens], dim=1)
        parents = with_root(draft.parents)
        if draft.probes is not None:
            rows_BM = depths(parents_of_chains(*tokens.shape, self.device))
            out, probes = forward_with_probes(self.lm, draft.probes, tokens, parents, rows_BM, self._hidden_layers)
            return TargetOut(logits=out.logits, hidden=out.hidden, probes=probes)
        out = self.lm.forward(tokens, parents, hidden_layers=self._hidden_layers)
        likeliest = likeliest_after(self.lm, draft, out.logits, self._likeliest) if self._likeliest else None
        return TargetOut(logits=out.logits, hidden=out.hidden, likeliest=likeliest)

    def commit(self, verdict: Verdict, out: TargetOut) -> Committed:
        """Keeps the accepted path; the verdict's next token becomes the new root."""
        rows = list(map(logit_rows, verdict.paths))
        self.lm.cache.accept_path(rows)
        self._root_B1 = upload([tokens[-1:] for tokens in verdict.tokens], self.device)
        hidden = {}
        if out.hidden:
            rows_BM = from_lists(rows, self.device).clamp(min=0)
            hidden = {layer: gathered(state, rows_BM) for layer, state in out.hidden.items()}
        probes = None if out.probes is None else out.probes.after(upload([row[-1] - 1 for row in rows], self.device))
        return Committed(
            tokens=verdict.tokens, hidden=hidden, drawn=verdict.drawn, probes=probes, likeliest=out.likeliest
        )

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but `rows`, `[b]` old indices in the new order; one in chunked prefill stays."""
        in_prefill = torch.arange(len(self._root_B1), len(self.lm.cache.lengths))
        self.lm.cache.keep(torch.cat([rows, in_prefill]))
        self._root_B1 = self._root_B1[rows]


def _after(states_BND: Tensor, known: list[int], tokens: int) -> Tensor:
    """For each token the state `[B, M, D]` of the token before it, from which it was predicted.

    It is 0 for the first token of a row, and for those before the first state.

    Args:
        states_BND: of the tokens that were read.
        known: for each row, the tokens before these.
        tokens: M.

    >>> _after(torch.tensor([[[1.0], [2.0], [3.0]], [[5.0], [0.0], [0.0]]]), [0, 2], 4)[:, :, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 5.0]]
    """
    before_BMD = torch.nn.functional.pad(states_BND, (0, 0, 1, tokens - 1 - states_BND.shape[1]))
    for row, shift in enumerate(known):
        if shift:
            before_BMD[row] = before_BMD[row].roll(shift, dims=0)
    return before_BMD


def gathered(states_BMD: Tensor, rows_BR: Tensor) -> Tensor:
    """The states `[B, R, D]` at indices `rows_BR` of each row."""
    return states_BMD.gather(1, rows_BR[:, :, None].expand(-1, -1, states_BMD.shape[2]))
