"""The target: prefill, forward(draft), commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paradraft.core import Committed, Draft, Request, TargetOut, Verdict
from paradraft.models.causal_lm import CausalLM, SavedRow
from paradraft.models.prompt_tokens import forward_with_probes
from paradraft.parents import depths, parents_of_chains, row_after, with_root
from paradraft.ragged import from_lists, to_lists, upload
from paradraft.text.chat_template import end_of_turn
from paradraft.text.generation_config import end_ids
from paradraft.wording import number_of


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What a draft model must fit; a `Target` has it too. Drafters that run ahead are built from nothing else.

    Args:
        tokenizer: of the target.
        vocab_size: ids from here on are never chosen.
        capacity: most tokens, prompt included, that a row may have.
        eos_ids: the tokens that end a text.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    capacity: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class _PartlyRead:
    """A prompt that is read piece by piece.

    Args:
        tokens: of the prompt.
        known: how many of its first tokens were not read but taken from another row.
        states: of each piece that was read, by layer.
    """

    tokens: list[int]
    known: int
    states: list[dict[int, Tensor]] = field(default_factory=list)


class Target:
    """The model whose text is produced.

    The last committed token is never in the cache between rounds: it is read together with the
    draft, as the root of the tree. So the first round needs no special case.

    Args:
        lm: the model.
        tokenizer: its tokenizer.
        named_ends: the tokens that the model's files name as the end of its texts, if it has files.
    """

    def __init__(
        self, lm: CausalLM, tokenizer: PreTrainedTokenizerBase, named_ends: frozenset[int] = frozenset()
    ) -> None:
        self.lm = lm
        self.tokenizer = tokenizer
        self.named_ends = named_ends
        self._partly: _PartlyRead | None = None

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.lm.device

    @property
    def starts(self) -> int:
        """How often a batch was started: there is one cache, so a new batch ends the one before."""
        return self.lm.starts

    @property
    def capacity(self) -> int:
        """Most tokens, prompt included, that a row may have."""
        return self.lm.capacity

    @property
    def vocab_size(self) -> int:
        """Ids from here on are never chosen."""
        return self.lm.vocab_size

    @property
    def facts(self) -> TargetFacts:
        """What a draft model must fit."""
        return TargetFacts(
            tokenizer=self.tokenizer, vocab_size=self.vocab_size, capacity=self.capacity, eos_ids=self.eos_ids
        )

    @property
    def fewest_rows(self) -> int:
        """How few rows a batch may shrink to."""
        return min(self.lm.min_rows, len(self.lm.lengths))

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a text, as `generate` of `transformers` finds them."""
        return end_ids(self.lm.model.generation_config)

    @property
    def is_instruct(self) -> bool:
        """Whether it has learnt to answer in a chat: its texts end with what ends a turn in its chat template.

        A base model may have the template of its family; its texts end with another token.
        """
        return end_of_turn(self.tokenizer) in self.named_ends

    def start(
        self,
        reserved_tokens: Iterable[int] = (),
        hidden_layers: tuple[int, ...] = (),
        prompt_hidden_layers: tuple[int, ...] = (),
    ) -> None:
        """Forgets all rows, and serves those that join from now on for one drafter.

        Args:
            reserved_tokens: tokens that are not chosen.
            hidden_layers: layers whose states every round returns.
            prompt_hidden_layers: layers whose states `join` returns.
        """
        self._hidden_layers, self._prompt_hidden_layers = hidden_layers, prompt_hidden_layers
        self._partly = None
        self.lm.start()
        self.lm.reserve(reserved_tokens)
        self._root_B1 = torch.empty(0, 1, dtype=torch.long, device=self.device)

    def join(self, requests: Sequence[Request], begun: Sequence[tuple[SavedRow, int] | None] = ()) -> Committed:
        """Adds rows after the others and reads their prompts, all but the last tokens.

        Args:
            requests: one for each new row.
            begun: for each a row that was saved, and how many of its first tokens the prompt begins with; they are not
                read again. Nothing for none.

        Raises:
            ValueError: a prompt is longer than the capacity, its states are not numbers, or the cache does not fit into
                memory.
        """
        prompts = [request.tokens for request in requests]
        self._check_room(max(map(len, prompts)))
        before = len(self._root_B1)
        self.lm.join(len(prompts))
        known = [0] * len(prompts)
        for index, found in enumerate(begun):
            known[index] = self._restore(before + index, prompts[index], found)
        unread = [prompt[number:] for prompt, number in zip(prompts, known, strict=True)]
        # Of the other rows nothing is read: their roots are theirs until the next round.
        read = self.lm.prefill([[]] * before + unread, self._prompt_hidden_layers)
        self._root_B1 = torch.cat([self._root_B1, upload(read.last[before:], self.device)])
        tokens = from_lists(prompts, self.device)
        hidden = {layer: _after(states[before:], known, tokens.shape[1]) for layer, states in read.hidden.items()}
        return Committed(tokens=tokens, hidden=hidden)

    def begin(self, request: Request, begun: tuple[SavedRow, int] | None = None) -> None:
        """Adds a row whose prompt `read` reads, piece by piece; it takes part in no pass until then, and nothing joins.

        Args:
            request: see `join`, for the others too.
            begun: see `join`.

        Raises:
            ValueError: the prompt is longer than the capacity, or the cache does not fit into memory.
        """
        self._check_room(len(request.tokens))
        self.lm.join(1, apart=True)
        known = self._restore(len(self._root_B1), request.tokens, begun)
        self._partly = _PartlyRead(tokens=request.tokens, known=known)

    def read(self, most: int) -> tuple[int, Committed | None]:
        """Reads at most `most` tokens of the row that `begin` has added.

        Returns:
            How many were read; and what `join` returns, as soon as all but the last one are.

        Raises:
            ValueError: states are not numbers, or the cache does not fit into memory.
        """
        assert self._partly is not None
        row, prompt = self._partly, self._partly.tokens
        before, first = len(self._root_B1), self.lm.lengths[-1]
        last = min(first + most, len(prompt) - 1)
        read = self.lm.prefill([[]] * before + [prompt[first : last + 1]], self._prompt_hidden_layers)
        row.states.append({layer: states[before:] for layer, states in read.hidden.items()})
        if last < len(prompt) - 1:
            return last - first, None
        self._partly = None
        self.lm.admit()
        self._root_B1 = torch.cat([self._root_B1, upload([prompt[-1:]], self.device)])
        hidden = {
            layer: _after(torch.cat([part[layer] for part in row.states], dim=1), [row.known], len(prompt))
            for layer in self._prompt_hidden_layers
        }
        return last - first, Committed(tokens=from_lists([prompt], self.device), hidden=hidden)

    def give_up(self) -> None:
        """Forgets the row that `begin` has added."""
        self._partly = None
        self.lm.keep(torch.arange(len(self._root_B1)))

    def _check_room(self, tokens: int) -> None:
        if tokens > self.capacity:
            raise ValueError(
                f"the prompt has {number_of(tokens, 'token')}, the model has room for {self.capacity}: shorten it"
            )

    def _restore(self, row: int, prompt: list[int], begun: tuple[SavedRow, int] | None) -> int:
        """Begins a row with what was saved of another; returns how many tokens of its prompt are known by that."""
        if begun is None:
            return 0
        saved, shared = begun
        # Of the last token that is known the state is wanted again: the first unread one is predicted from it.
        most = min(shared, len(prompt) - 1) - bool(self._prompt_hidden_layers)
        return self.lm.restore(row, saved, max(most, 0))

    def forward(self, draft: Draft) -> TargetOut:
        """Reads the last committed tokens and the whole draft in one pass, and what is probed with it."""
        tokens = torch.cat([self._root_B1, draft.tokens], dim=1)
        parents = with_root(draft.parents)
        if draft.probes is not None:
            rows_BM = depths(parents_of_chains(*tokens.shape, self.device))
            out, probes = forward_with_probes(self.lm, draft.probes, tokens, parents, rows_BM, self._hidden_layers)
            return TargetOut(logits=out.logits, hidden=out.hidden, probes=probes)
        out = self.lm.forward(tokens, parents, hidden_layers=self._hidden_layers)
        return TargetOut(logits=out.logits, hidden=out.hidden)

    def commit(self, verdict: Verdict, out: TargetOut) -> Committed:
        """Keeps the accepted path; the verdict's next token becomes the new root."""
        self.lm.accept_path([[0, *(node + 1 for node in path)] for path in to_lists(verdict.path)])
        self._root_B1 = verdict.tokens.gather(1, verdict.accepted[:, None])
        hidden = {}
        if out.hidden:
            # Row 0 of the pass follows the root, row n + 1 node n.
            rows_BM = torch.nn.functional.pad((verdict.path + 1).clamp(min=0), (1, 0))
            hidden = {layer: gathered(state, rows_BM) for layer, state in out.hidden.items()}
        probes = None if out.probes is None else out.probes.after(row_after(verdict.path)[:, 0] - 1)
        return Committed(tokens=verdict.tokens, hidden=hidden, drawn=verdict.drawn, probes=probes)

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but `rows`, `[b]` the index that each had before; one that is partly read stays."""
        partly = torch.arange(len(self._root_B1), len(self.lm.lengths))
        self.lm.keep(torch.cat([rows, partly]))
        self._root_B1 = self._root_B1[rows]


def _after(states_BND: Tensor, known: list[int], tokens: int) -> Tensor:
    """For each token of some texts the state `[B, M, D]` from which it was predicted, that of the token before it.

    It is 0 for the first token of a text, and for those before the first state.

    Args:
        states_BND: of the tokens that were read.
        known: for each text, how many tokens came before these.
        tokens: M.

    >>> _after(torch.tensor([[[1.0], [2.0], [3.0]], [[5.0], [0.0], [0.0]]]), [0, 2], 4)[:, :, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 5.0]]
    """
    before_BMD = torch.nn.functional.pad(states_BND, (0, 0, 1, tokens - 1 - states_BND.shape[1]))
    for row, number in enumerate(known):
        if number:
            before_BMD[row] = before_BMD[row].roll(number, dims=0)
    return before_BMD


def gathered(states_BMD: Tensor, rows_BR: Tensor) -> Tensor:
    """`[B, R, D]` the states at some places of each row."""
    return states_BMD.gather(1, rows_BR[:, :, None].expand(-1, -1, states_BMD.shape[2]))
