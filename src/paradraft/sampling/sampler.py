"""The sampler of a batch: settings, random numbers and text of each row.

The target and every drafter have one each, for the same requests, so p and q go through the same function. Its state
depends on committed tokens only.

Shape letters: B rows of a batch, R positions, C candidates, D tokens of a path, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from paradraft import ragged
from paradraft.core import CHAINS, Committed, Drafting, Request, RequestError
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates, _candidates, joined
from paradraft.sampling.distribution import (
    best_token,
    filtered_logits,
    largest_probabilities,
    penalized_logits,
    probabilities,
)
from paradraft.sampling.drawing import token_at, without_replacement
from paradraft.sampling.faster import Faster
from paradraft.sampling.noise import PositionNoise, gumbel_noise, seed_of, uniform_numbers, with_noise
from paradraft.signals import may_be_of_signal
from paradraft.tree import ABSENT, MOST_CANDIDATES

# Purposes of random numbers under the rejection rule, where each must be independent of all others.
_DRAFT, _ACCEPT, _NEXT = 1, 2, 3
_MOST_DEPTH = 2**20
_NODES = 2**46
"""Between the random keys of two nodes of one depth: room for texts of 2**26 tokens."""
CACHED = 2**15
"""Number of float64 values that fit into a CPU's cache a few times."""


class Sampler:
    """Applies the `Sampling` of each row; `faster` does it in place of torch."""

    def __init__(
        self,
        requests: Sequence[Request] = (),
        *,
        drafting: Drafting = CHAINS,
        device: torch.device | None = None,
        faster: Faster | None = None,
    ) -> None:
        self._faster = faster
        self.draws = drafting.draws
        self._has_paths = drafting.tree is not None and drafting.tree.paths is not None
        self._is_chain = drafting.tree is None
        self._wants_confidence = drafting.wants_confidence
        self._device = device or torch.device("cpu")
        self._requests: list[Request] = []
        self._texts: list[list[int]] = []
        self.lengths_B = upload([], self._device)
        """`[B]` number of committed tokens, which is the position of the next one."""
        self._begun_B = self.lengths_B
        """`[B]` the same at the beginning of the round."""
        self.reads_text = False
        """Whether `paths` are used."""
        if requests:
            self.join(requests)

    def join(self, requests: Sequence[Request]) -> None:
        """Adds rows after the others."""
        self._texts += [list(request.tokens) for request in requests]
        lengths_b = upload([len(request.tokens) for request in requests], self._device)
        self.lengths_B = self._begun_B = torch.cat([self.lengths_B, lengths_b])
        self._serve([*self._requests, *requests])

    def keep(self, rows: Tensor) -> None:
        """Drops and reorders rows: `[b]` the old index of each row."""
        order = rows.tolist()
        self._texts = [self._texts[row] for row in order]
        self.lengths_B = self._begun_B = self.lengths_B[rows]
        self._serve([self._requests[row] for row in order])

    def commit(self, new: Committed) -> None:
        """Adds committed tokens."""
        self.lengths_B = self._begun_B = self.lengths_B + upload(list(map(len, new.tokens)), self._device)
        if self.reads_text:
            self._texts = ragged.joined(self._texts, new.tokens)

    def after(self, tokens: list[list[int]]) -> Sampler:
        """A copy of this sampler with tokens of each row committed."""
        later = copy.copy(self)
        later.commit(Committed(tokens=tokens))
        later._begun_B = self._begun_B
        return later

    def _serve(self, requests: list[Request]) -> None:
        """Sets all attributes that depend on the set of rows."""
        self._requests = requests
        samplings = self._samplings = [request.sampling for request in requests]
        device = self._device
        self._seeds_B = upload([sampling.seed for sampling in samplings], device)
        self._acceptance_seeds_B = seed_of(self._seeds_B, _ACCEPT)
        self._prompt_lengths_B = upload([len(request.tokens) - request.answered for request in requests], device)
        self._limits_B = upload([request.max_new_tokens for request in requests], device)
        self._temperatures_B = torch.tensor([each.temperature or 1.0 for each in samplings], device=device)
        """Those at which the confidence is taken."""
        self._is_random_B = torch.tensor([not sampling.is_greedy for sampling in samplings], device=device)
        self._are_random = not any(sampling.is_greedy for sampling in samplings)
        self._are_greedy = all(sampling.is_greedy for sampling in samplings)
        rows_of: dict[object, list[int]] = {}
        for row, request in enumerate(requests):
            rows_of.setdefault((request.sampling.settings, request.eos_ids), []).append(row)
        self._groups = [(requests[rows[0]], torch.tensor(rows, device=device)) for rows in rows_of.values()]
        self._is_plain = all(sampling.is_plain_greedy for sampling in samplings)
        self._are_raw = not any(sampling.changes_logits for sampling in samplings)
        self._may_forbid = any(sampling.may_forbid for sampling in samplings)
        self.reads_text = any(sampling.reads_text for sampling in samplings)

    def draw(self, logits_BRV: Tensor, depths_BR: Tensor, paths_BRD: Tensor | None = None) -> Tensor:
        """The token `[B, R]` at each position: argmax of log p plus that position's noise; `INVALID` if p has NaN.

        Args:
            depths_BR: number of drafted tokens between the committed text and each position; `ABSENT` for none, of
                which neither the logits nor the token mean anything.
            paths_BRD: these tokens, padded with `ABSENT`; None without any.
        """
        return self._drawn(self._all_penalized(logits_BRV, paths_BRD), depths_BR)

    def _drawn(self, logits_BRV: Tensor, depths_BR: Tensor) -> Tensor:
        positions_BR = (self.lengths_B[:, None] + depths_BR).masked_fill(depths_BR < 0, ABSENT)
        faster = None if self._faster is None else self._faster.draw(logits_BRV, self._samplings, positions_BR)
        if faster is not None:
            return faster
        return best_token(logits_BRV if self._is_plain else self._noised_at(logits_BRV, positions_BR))

    def _all_penalized(self, logits_BRV: Tensor, paths_BRD: Tensor | None) -> Tensor:
        return logits_BRV if self._are_raw else self._each(self._penalized, logits_BRV, paths_BRD)

    def _confidence(self, logits_BRV: Tensor) -> Tensor:
        faster = None if self._faster is None else self._faster.confidence(logits_BRV, self._samplings)
        if faster is not None:
            return faster
        return largest_probabilities(logits_BRV, self._temperatures_B)

    def scores(self, logits_BRV: Tensor, depths_BR: Tensor, paths_BRD: Tensor | None = None) -> Tensor:
        """`[B, R, V]` whose argmax is the target's token: log p, up to a constant, plus noise; see `draw`."""
        return self._noised_at(self._all_penalized(logits_BRV, paths_BRD), self.lengths_B[:, None] + depths_BR)

    def _noised_at(self, logits_BRV: Tensor, positions_BR: Tensor) -> Tensor:
        """Scores of logits after bias, penalties and processors."""
        sampling = self._groups[0][0].sampling
        if len(self._groups) == 1 and sampling.is_plain and not sampling.is_greedy:
            # The same result; logits that are not numbers yield scores that are not.
            scores = logits_BRV if logits_BRV.dtype == torch.float64 else logits_BRV.float()
            return scores / sampling.temperature + gumbel_noise(self._seeds_B, positions_BR, scores.shape[2])
        return self._noised(self._each(self._filtered, logits_BRV, None), self._seeds_B, positions_BR)

    def probabilities(self, logits_BRV: Tensor, paths_BRD: Tensor | None = None) -> Tensor:
        """The sampling distributions `[B, R, V]` in float64; arguments as in `draw`."""

        def of_group(request: Request, logits: Tensor, paths: Tensor | None, rows: Tensor) -> Tensor:
            return probabilities(self._penalized(request, logits, paths, rows), request.sampling)

        return self._each(of_group, logits_BRV, paths_BRD)

    def acceptance_numbers(self, count: int) -> Tensor:
        """`[B, count]` uniform numbers for the acceptance tests of a round."""
        keys = self.lengths_B[:, None] * _MOST_DEPTH + torch.arange(count, device=self.lengths_B.device)
        return uniform_numbers(self._acceptance_seeds_B, keys)

    def draw_next(self, probs_BV: Tensor) -> Tensor:
        """`[B]` the recovered or bonus token under the rejection rule, drawn from `[B, V]`; `INVALID` for NaN."""
        shares_B1 = uniform_numbers(seed_of(self._seeds_B, _NEXT), self.lengths_B[:, None])
        return token_at(probs_BV[:, None], shares_B1)[:, 0]

    def candidates(self, logits_BRV: Tensor, depth: int, count: int, path_BD: Tensor | None = None) -> Candidates:
        """The C = `count` candidates of a drafter at depths `depth`, `depth + 1`, … after the committed text.

        Under the match rule the order is that of log q plus the position's noise, which the target will use too, under
        typical acceptance that of q. Under the rejection rule chains and fixed trees are drawn from q, siblings without
        replacement, with separate random numbers; a tree grown to a budget takes the likeliest tokens.

        Args:
            path_BD: `[B, depth]` drafted tokens before the first position, for settings that read the text. At later
                positions the best candidates are taken as the tokens before.
        """
        if self.reads_text and logits_BRV.shape[1] > 1:
            return self._one_by_one(logits_BRV, depth, count, path_BD)
        depths_BR = _consecutive(depth, logits_BRV.shape[1], logits_BRV.device)
        return self.candidates_at(logits_BRV, depths_BR, count, None if path_BD is None else path_BD[:, None])

    def candidates_after(self, logits_BRV: Tensor, depth: int, count: int, paths_BRD: Tensor) -> Candidates:
        """The candidates of a drafter after R nodes of one depth, whose tokens from the root are `paths_BRD`.

        They share the noise of the target at their position; separate random numbers are independent.
        """
        depths_BR = _consecutive(depth, 1, logits_BRV.device).expand(-1, logits_BRV.shape[1])
        nodes_1R = _consecutive(0, logits_BRV.shape[1], logits_BRV.device)
        return self.candidates_at(logits_BRV, depths_BR, count, paths_BRD, nodes_1R * _NODES)

    def plain_draws(self, count: int, vocab_size: int) -> tuple[list[float], PositionNoise | None] | None:
        """The inputs of a faster `candidates` at the first `count` positions: temperatures of the rows, and their noise
        or None if all rows are greedy. None if some row has other settings."""
        # Under the rejection rule random numbers belong to nodes, so trees must not depend on the other rows.
        if self.draws != "noise" or self._wants_confidence or self._has_paths:
            return None
        if not all(request.sampling.is_plain for request in self._requests):
            return None
        temperatures = [request.sampling.temperature for request in self._requests]
        if self._are_greedy:
            return temperatures, None
        positions_BR = self.lengths_B[:, None] + _consecutive(0, count, self.lengths_B.device)
        return temperatures, PositionNoise(self._seeds_B, positions_BR, vocab_size)

    def candidates_at(
        self, logits_BRV: Tensor, depths_BR: Tensor, count: int, paths: Tensor | None, streams: Tensor | int = 0
    ) -> Candidates:
        """The candidates of a drafter at any positions; see `candidates`, and `draw` for the arguments. Positions of
        one depth with different `streams` have separate random numbers."""
        candidates = self._candidates_at(logits_BRV, depths_BR, count, paths, streams)
        return candidates.without_closed(logits_BRV) if self._may_forbid else candidates

    def _candidates_at(
        self, logits_BRV: Tensor, depths_BR: Tensor, count: int, paths: Tensor | None, streams: Tensor | int
    ) -> Candidates:
        logits_BRV = self._all_penalized(logits_BRV, paths)
        confidence = self._confidence(logits_BRV) if self._wants_confidence else None
        if self.draws == "noise" and self._is_chain:
            tokens = self._drawn(logits_BRV, depths_BR)[..., None]
            return Candidates(tokens=tokens, log_probs=torch.zeros_like(tokens), probs=None, confidence=confidence)
        scores_BRV = self._each(self._filtered, logits_BRV, None)
        count = min(count, scores_BRV.shape[2])
        if self.draws != "numbers" or self._are_greedy or not (self._is_chain or self._has_paths):
            return self._likeliest(scores_BRV, depths_BR, count, confidence)
        # A position may be drawn again in a later round, with other numbers.
        drafted_BR = (self.lengths_B - self._begun_B)[:, None] + depths_BR
        keys = (self._begun_B[:, None] * _MOST_DEPTH + drafted_BR + streams) * MOST_CANDIDATES
        seeds_B = seed_of(self._seeds_B, _DRAFT)
        shares_BRC = torch.stack([uniform_numbers(seeds_B, keys + rank) for rank in range(count)], dim=-1)
        tokens, log_probs, probs = without_replacement(scores_BRV.double().softmax(-1), shares_BRC)
        if not self._are_random:
            best = self._likeliest(scores_BRV, depths_BR, count)
            is_random_B11, certain = self._is_random_B[:, None, None], torch.zeros_like(probs)
            certain.scatter_(-1, best.tokens[..., None].clamp(min=0), 1.0)
            tokens = torch.where(is_random_B11, tokens, best.tokens)
            log_probs = torch.where(is_random_B11, log_probs, best.log_probs)
            probs = torch.where(is_random_B11[..., None], probs, certain)
        return _candidates(tokens, log_probs, probs, confidence=confidence)

    def guesses_at(self, logits_BRV: Tensor, depths_BR: Tensor, count: int) -> Candidates:
        """The likeliest candidates at these positions, for any rule and draft shape."""
        scores_BRV = self._each(self._filtered, self._all_penalized(logits_BRV, None), None)
        return self._likeliest(scores_BRV, depths_BR, min(count, scores_BRV.shape[2]))

    def _likeliest(
        self, scores_BRV: Tensor, depths_BR: Tensor, count: int, confidence: Tensor | None = None
    ) -> Candidates:
        """The best candidates by log q, under the match rule plus the position's noise.

        On a CPU a few positions at a time, which stay in its cache between the steps: for 8 rows and 64 positions of
        4,096 tokens this takes a third of the time.
        """
        B, R, V = scores_BRV.shape
        rows, width = B, R
        if scores_BRV.device.type == "cpu":
            rows, width = max(CACHED // (R * V), 1), max(CACHED // V, 1)
        positions_BR = self.lengths_B[:, None] + depths_BR
        has_noise = self.draws == "noise" and not self._are_greedy
        tokens, log_probs = [], []
        for row, column in itertools.product(range(0, B, rows), range(0, R, width)):
            some_B, some_R = slice(row, row + rows), slice(column, column + width)
            scores = scores_BRV[some_B, some_R]
            if has_noise:
                scores = self._noised(scores, self._seeds_B[some_B], positions_BR[some_B, some_R], some_B)
            best = scores.topk(count, dim=-1)
            tokens.append(best.indices)
            log_probs.append((best.values - scores.logsumexp(-1, keepdim=True)).double())

        def whole(parts: list[Tensor]) -> Tensor:
            if len(parts) == 1:
                return parts[0]
            return torch.cat([part.flatten(0, 1) for part in parts]).view(B, R, *parts[0].shape[2:])

        return _candidates(whole(tokens), whole(log_probs), confidence=confidence)

    def _one_by_one(self, logits_BRV: Tensor, depth: int, count: int, path_BD: Tensor | None) -> Candidates:
        path = logits_BRV.new_empty(len(logits_BRV), 0, dtype=torch.long) if path_BD is None else path_BD
        candidates = []
        for index in range(logits_BRV.shape[1]):
            candidates.append(self.candidates(logits_BRV[:, index : index + 1], depth + index, count, path))
            path = torch.cat([path, candidates[-1].tokens[:, :, 0]], dim=1)
        return joined(candidates)

    def _noised(self, scores_BRV: Tensor, seeds_B: Tensor, positions_BR: Tensor, rows: slice = slice(None)) -> Tensor:
        """Scores plus noise, in float64; greedy rows get none. `rows` are those of `scores_BRV` in the batch."""
        if self._are_greedy:
            return scores_BRV.double()
        noised = with_noise(scores_BRV, seeds_B, positions_BR)
        return noised if self._are_random else torch.where(self._is_random_B[rows, None, None], noised, scores_BRV)

    def _filtered(self, request: Request, logits: Tensor, *_: Tensor | None) -> Tensor:
        return logits if request.sampling.is_greedy else filtered_logits(logits, request.sampling)

    def _penalized(self, request: Request, logits: Tensor, paths: Tensor | None, rows: Tensor) -> Tensor:
        texts = torch.empty(0)  # not used
        if request.sampling.reads_text:
            texts = ragged.from_lists([self._texts[row] for row in rows.tolist()], self._device)[:, None]
            texts = texts.expand(-1, logits.shape[1], -1)
            texts = texts if paths is None else torch.cat([texts, paths.expand(-1, logits.shape[1], -1)], dim=2)
        lengths_B, limits_B = self._prompt_lengths_B[rows], self._limits_B[rows]
        try:
            return penalized_logits(
                logits, request.sampling, texts, lengths_B, eos_ids=request.eos_ids, limits_B=limits_B
            )
        except BaseException as error:  # a processor's, which is a user's code
            if may_be_of_signal(error):
                raise
            cause = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            raise RequestError([self._requests[row].id for row in rows.tolist()], cause) from error

    def _each(
        self,
        function: Callable[[Request, Tensor, Tensor | None, Tensor], Tensor],
        logits_BRV: Tensor,
        paths_BRD: Tensor | None,
    ) -> Tensor:
        """Applies a function to each group of rows with equal settings."""
        if len(self._groups) == 1:
            return function(self._groups[0][0], logits_BRV, paths_BRD, self._groups[0][1])
        parts = [
            function(request, logits_BRV[rows], None if paths_BRD is None else paths_BRD[rows], rows)
            for request, rows in self._groups
        ]
        order = torch.cat([rows for _, rows in self._groups]).argsort()
        return torch.cat(parts)[order]


@lru_cache(maxsize=256)
def _consecutive(first: int, count: int, device: torch.device) -> Tensor:
    """`[1, R]` consecutive depths; read-only: all callers share the tensor."""
    return torch.arange(first, first + count, device=device)[None]
