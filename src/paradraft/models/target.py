"""The target: prefill, forward(draft), commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paradraft.core import Committed, Draft, Request, TargetOut, Verdict
from paradraft.models.cached_rows import SavedRow
from paradraft.models.causal_lm import CausalLM
from paradraft.models.likeliest_tokens import likeliest_after
from paradraft.models.prompt_pieces import PromptPieces
from paradraft.models.prompt_tokens import forward_with_probes
from paradraft.parents import depths, logit_rows, parents_of_chains, with_root
from paradraft.ragged import from_lists, upload
from paradraft.text.chat_template import end_of_turn
from paradraft.text.generation_config import end_ids
from paradraft.tree import ABSENT
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
        self._pieces = PromptPieces(lm)
        self._along: Sequence[int] = ()

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

    def relative_work(self, models: Iterable[CausalLM]) -> float:
        """Work of reading a token with other models, relative to the target's: that of their weights between embedding
        and head. Layers of the target itself have read it."""
        own, *others = (_hidden_weights(lm) for lm in (self.lm, *models))
        work = sum(size for weights in others for weight, size in weights.items() if weight not in own)
        return work / max(sum(own.values()), 1)

    def start(
        self,
        reserved_tokens: Iterable[int] = (),
        hidden_layers: tuple[int, ...] = (),
        likeliest: int = 0,
        *,
        of_rule: tuple[int, ...] = (),
    ) -> None:
        """Removes all rows and starts a batch for one drafter.

        Args:
            reserved_tokens: never chosen.
            hidden_layers: whose states `join` and every round return.
            likeliest: number of likeliest tokens at each place that every round returns.
            of_rule: layers whose states at all nodes every `forward` returns too, for the verification rule.
        """
        self._hidden_layers = hidden_layers
        self._pass_layers = tuple(dict.fromkeys(hidden_layers + of_rule))
        self.likeliest = likeliest
        """Number of likeliest tokens at each place that the next rounds return."""
        self._pieces, self._along = PromptPieces(self.lm, hidden_layers), ()
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
        first = len(self.unread)
        self.begin(requests, prefixes)
        unread = self.unread
        self.read([0] * first + unread[first:])
        return self.admit(range(first, len(unread)))

    @property
    def unread(self) -> list[int]:
        """Tokens that are left to read of each prompt in prefill."""
        return self._pieces.unread

    def begin(self, requests: Sequence[Request], prefixes: Sequence[tuple[SavedRow, int] | None] = ()) -> None:
        """Appends rows for prefill in pieces; no round decodes them until `admit`. See `join`."""
        prompts = [request.tokens for request in requests]
        self._check_room(max(map(len, prompts)))
        before = len(self.lm.cache.lengths)
        self.lm.cache.join(len(prompts), in_prefill=True)
        known = [0] * len(prompts)
        for index, prefix in enumerate(prefixes):
            known[index] = self._restore(before + index, prompts[index], prefix)
        self._pieces.begin(prompts, known)

    def read(self, counts: Sequence[int]) -> None:
        """Reads the next `counts[i]` tokens of each prompt in prefill, in a separate pass; errors as in `join`."""
        self._pieces.read(counts)

    def read_along(self, counts: Sequence[int]) -> None:
        """Lets the next `forward` read the next `counts[i]` tokens of each prompt in prefill too."""
        self._along = counts

    def admit(self, rows: Sequence[int]) -> Committed:
        """Ends the prefill of prompts that are read, by index among those in prefill: rounds decode their rows, too."""
        self.lm.cache.admit([self.lm.cache.decoding + row for row in rows])
        prompts = self._pieces.take(rows)
        self._root_B1 = torch.cat([self._root_B1, upload([tokens[-1:] for tokens in prompts.tokens], self.device)])
        return prompts

    def give_up(self, row: int) -> None:
        """Removes a prompt in prefill, by index among them."""
        self._pieces.drop([row])
        rows = [each for each in range(len(self.lm.cache.lengths)) if each != self.lm.cache.decoding + row]
        self.lm.cache.keep(torch.tensor(rows, dtype=torch.long))

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
        """Reads the last committed tokens, the whole draft, its probes and the pieces of `read_along` in one pass."""
        tokens = torch.cat([self._root_B1, draft.tokens], dim=1)
        parents = with_root(draft.parents)
        rows_BM = depths(parents_of_chains(*tokens.shape, self.device))
        along, self._along = self._along, ()
        forward = partial(self._pieces.forward, along) if any(along) else self.lm.forward
        if draft.probes is not None:
            out, probes = forward_with_probes(forward, draft.probes, tokens, parents, rows_BM, self._pass_layers)
            return TargetOut(logits=out.logits, hidden=out.hidden, probes=probes)
        if self.lm.is_native:
            rows_BM = rows_BM.masked_fill(tokens == ABSENT, ABSENT)  # their logits would be written, and read again
        out = forward(tokens, parents, rows_BM, self._pass_layers)
        likeliest = likeliest_after(self.lm, draft, out.logits, self.likeliest) if self.likeliest else None
        return TargetOut(logits=out.logits, hidden=out.hidden, likeliest=likeliest)

    def commit(self, verdict: Verdict, out: TargetOut) -> Committed:
        """Keeps the accepted path; the verdict's next token becomes the new root."""
        rows = list(map(logit_rows, verdict.paths))
        self.lm.cache.accept_path(rows)
        self._root_B1 = upload([tokens[-1:] for tokens in verdict.tokens], self.device)
        hidden = {}
        if self._hidden_layers:
            rows_BM = from_lists(rows, self.device).clamp(min=0)
            hidden = {layer: gathered(out.hidden[layer], rows_BM) for layer in self._hidden_layers}
        probes = None if out.probes is None else out.probes.after(upload([row[-1] - 1 for row in rows], self.device))
        return Committed(
            tokens=verdict.tokens, hidden=hidden, drawn=verdict.drawn, probes=probes, likeliest=out.likeliest
        )

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but `rows`, `[b]` old indices in the new order; those in prefill stay."""
        in_prefill = torch.arange(len(self._root_B1), len(self.lm.cache.lengths))
        self.lm.cache.keep(torch.cat([rows, in_prefill]))
        self._root_B1 = self._root_B1[rows]


def gathered(states_BMD: Tensor, rows_BR: Tensor) -> Tensor:
    """The states `[B, R, D]` at indices `rows_BR` of each row."""
    return states_BMD.gather(1, rows_BR[:, :, None].expand(-1, -1, states_BMD.shape[2]))


def _hidden_weights(lm: CausalLM) -> dict[int, int]:
    """Sizes of a model's weights between embedding and head, by `id()`."""
    weights = lm.model.named_parameters()
    return {id(each): each.numel() for name, each in weights if "embed" not in name and "lm_head" not in name}
