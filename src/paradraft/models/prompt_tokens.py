"""Trained prompt tokens in the target's own passes, from which PPD drafts (Chen et al. 2024).

A pass reads a row's last tokens, a draft tree, and prompt tokens after some of its nodes (chosen by
`paradraft.sampling.sparse_tree`). The logits of the i-th prompt token after the last accepted node predict the i-th
token after the target's own next token. A prompt token may have several embeddings, its *copies*: the j-th copy sees
only j-th copies of earlier prompt tokens, and the states of all copies are averaged.

Shape letters: B rows of a batch, S states, N guesses, R the last read token and all guesses, M tokens of a pass before
its prompt tokens, Q prompt tokens of a pass or after a node, each copy counted, P most of them in a chain, E copies,
D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paradraft.core import Draft
from paradraft.formats.head import Head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM, ForwardOut
from paradraft.models.forward.gated import GatedChange, shapes_of
from paradraft.probes import Probes
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates
from paradraft.sampling.sparse_tree import Accuracy, StateTree, best_trees, is_accuracy
from paradraft.tree import ABSENT

ForwardFunction = Callable[[Tensor, Tensor, Tensor, Sequence[int]], ForwardOut]


class Shapes:
    """The trees of all states as tensors `[S, …]`, padded with `ABSENT`; `ids` `[P, E]` are those of prompt tokens."""

    def __init__(self, trees: Sequence[StateTree], ids: Tensor, device: torch.device) -> None:
        self.trees = tuple(trees)

        def padded(rows: list[list[int]]) -> Tensor:
            width = max(map(len, rows))
            return upload([row + [ABSENT] * (width - len(row)) for row in rows], device).view(len(rows), width)

        self.depths_SN = padded([[len(path) - 1 for path in tree.guesses] for tree in trees])
        self.ranks_SN = padded([[path[-1] for path in tree.guesses] for tree in trees])
        nodes = [{path: node for node, path in enumerate(tree.guesses)} for tree in trees]
        self.parents_SN = padded([[node_of.get(path[:-1], ABSENT) for path in node_of] for node_of in nodes])
        probes = [
            [
                (node - 1, index, copy)
                for node, most in enumerate(tree.prompts)
                for copy in range(ids.shape[1])
                for index in range(most)
            ]
            for tree in trees
        ]
        self.nodes_SQ = padded([[node for node, _, _ in row] for row in probes])
        self.before_SQ = padded(
            [[at - 1 if index else ABSENT for at, (_, index, _) in enumerate(row)] for row in probes]
        )
        self.tokens_SQ = padded([[int(ids[index, copy]) for _, index, copy in row] for row in probes])
        self.guesses, self.probes = [len(tree.guesses) for tree in trees], list(map(len, probes))
        self.ranks = max((path[-1] + 1 for tree in trees for path in tree.guesses), default=1)


class PromptTokens:
    """Prompt tokens of a model, and each row's logits of those after its last accepted token.

    Each row is in a state: the count of prompt tokens that the model has read after the row's last accepted token.

    Args:
        lm: of the target or a draft model.
        head: the checkpoint: "prompts.embeddings" `[trained, E, D]`; "prompts.weights" `[trained, E]` if copies are not
            simply averaged; the tensors of a `GatedChange`, as "change.…", if the config has its "change_rank"; there
            also "accuracy", see `paradraft.sampling.sparse_tree.Accuracy`.
        prompts: P, most prompt tokens after a token.

    Raises:
        ValueError: the checkpoint is damaged, or has too few prompt tokens.
    """

    def __init__(self, lm: CausalLM, head: Head, prompts: int) -> None:
        if head.config.get("is_decoded") is not True:
            raise ValueError(
                f"draft {head.name!r} was trained with settings that are only measured: train it with others"
            )
        trained, self.copies = head.setting("prompt_tokens", int), head.setting("copies", int)
        if prompts > trained:
            raise ValueError(
                f"prompts={prompts}: draft {head.name!r} has {trained} prompt tokens, use at most {trained}"
            )
        accuracy = head.config.get("accuracy")
        if not is_accuracy(accuracy, trained):
            raise ValueError(f"draft {head.name!r}: accuracy in its config.json is no table of shares: train it again")
        self._accuracy = accuracy
        embeddings = head.tensor("prompts.embeddings", trained, self.copies, lm.model.config.hidden_size)[:prompts]
        if not bool(embeddings.isfinite().all()):
            raise ValueError(f"draft {head.name!r}: its prompt tokens are not finite: train it again")
        self._weights_PE = torch.full((prompts, self.copies), 1 / self.copies, device=lm.device)
        if "prompts.weights" in head.weights:
            self._weights_PE = head.tensor("prompts.weights", trained, self.copies)[:prompts].to(lm.device).float()
        ids = lm.add_embeddings(embeddings.flatten(0, 1), _change_of(head, lm))
        self._ids, self._ids_PE = ids, torch.tensor(ids).view(prompts, self.copies)
        self._lm = lm
        self.start()

    def close(self) -> None:
        """Ends the change of attention."""
        self._lm.end_change(self._ids)

    def best(self, size: int, accuracy: Accuracy | None = None) -> Shapes:
        """The trees with the highest expected yield in passes of a size.

        Args:
            size: guesses and prompt tokens of a pass; ValueError if it is too small for a prompt token.
            accuracy: of the guesses; by default that on the held-out rows of the training.
        """
        if size < self.copies:
            raise ValueError(f"size={size}: each prompt token has {self.copies} copies, use at least {self.copies}")
        known, prompts = self._accuracy if accuracy is None else accuracy, len(self._ids_PE)
        return self.shapes(best_trees(known, size, prompts=prompts, copies=self.copies))

    def shapes(self, trees: Sequence[StateTree]) -> Shapes:
        """Converts trees, one for each state, to tensors."""
        return Shapes(trees, self._ids_PE, self._lm.device)

    def start(self) -> None:
        """Removes all rows."""
        self.states: list[int] = []
        dtype = torch.float64 if self._lm.model.dtype == torch.float64 else torch.float32
        self._logits_BPV = torch.empty(0, len(self._ids_PE), self._lm.vocab_size, dtype=dtype, device=self._lm.device)

    def join(self, rows: int) -> None:
        """Appends rows in state 0."""
        self.states += [0] * rows
        new = self._logits_BPV.new_zeros(rows, *self._logits_BPV.shape[1:])
        self._logits_BPV = torch.cat([self._logits_BPV, new])

    def keep(self, rows: Tensor) -> None:
        """Drops all other rows."""
        self.states = [self.states[row] for row in rows.tolist()]
        self._logits_BPV = self._logits_BPV[rows]

    def forget(self) -> None:
        """Sets all rows to state 0."""
        self.states = [0] * len(self.states)

    def commit(self, probes: tuple[Tensor, Tensor] | None) -> None:
        """Computes the logits of the prompt tokens after the last accepted guess, see `Probes.after`."""
        if probes is None or not probes[0].shape[1]:
            self.forget()
            return
        tokens_BQ, states_BQD = probes
        P, E = self._weights_PE.shape
        index_BQ = tokens_BQ - int(self._ids_PE[0, 0])
        self.states = ((tokens_BQ != ABSENT).sum(1) // E).tolist()
        # States are averaged before the head, which is linear.
        mixing_BQP = torch.nn.functional.one_hot(index_BQ.clamp(min=0) // E, P) * (tokens_BQ != ABSENT)[:, :, None]
        weights_BQ = self._weights_PE.flatten()[index_BQ.clamp(min=0)]
        mixed_BPD = (mixing_BQP * weights_BQ[:, :, None]).to(states_BQD.dtype).mT @ states_BQD
        depth = max(self.states)
        self._logits_BPV[:, :depth] = self._lm.head(mixed_BPD[:, :depth]).to(self._logits_BPV.dtype)

    @property
    def logits(self) -> Tensor:
        """`[B, depth, V]` of the tokens after the next one, up to the largest state of a row, at least 1."""
        return self._logits_BPV[:, : max(*self.states, 1)]

    def draft(self, shapes: Shapes, candidates: Candidates, is_wanted_B: Tensor) -> Draft:
        """The draft tree of each row with its prompt tokens for the next pass; empty for rows that want none.

        The candidates are those of `logits`, `shapes.ranks` or fewer.
        """
        state_B, is_wanted_B1 = upload(self.states, is_wanted_B.device), is_wanted_B[:, None]
        depth, ranks = candidates.tokens.shape[1:]
        N, Q = (max(counts[state] for state in self.states) for counts in (shapes.guesses, shapes.probes))
        depths_BN, ranks_BN = shapes.depths_SN[state_B, :N], shapes.ranks_SN[state_B, :N]
        # Clamped for nodes that are masked below: absent ones, and those of a rank without a candidate.
        index_BN = (depths_BN * ranks + ranks_BN).clamp(min=0, max=depth * ranks - 1)
        is_node_BN = is_wanted_B1 & (depths_BN != ABSENT) & (ranks_BN < ranks)
        is_node_BN &= candidates.log_probs.flatten(1).gather(1, index_BN) != -torch.inf
        tokens_BN = candidates.tokens.flatten(1).gather(1, index_BN).masked_fill(~is_node_BN, ABSENT)
        confidence = None
        if candidates.confidence is not None:
            confidence = candidates.confidence.gather(1, depths_BN.clamp(min=0, max=depth - 1))
        parts = (shapes.nodes_SQ, shapes.before_SQ, shapes.tokens_SQ)
        nodes_BQ, before_BQ, probes_BQ = (part[state_B, :Q] for part in parts)
        probes = Probes(nodes=nodes_BQ, before=before_BQ, tokens=probes_BQ)
        is_known_BR = torch.nn.functional.pad(is_node_BN, (1, 0), value=True)
        return Draft(
            tokens=tokens_BN,
            parents=shapes.parents_SN[state_B, :N],
            confidence=confidence,
            probes=probes.without(~is_wanted_B1 | ~is_known_BR.gather(1, nodes_BQ + 1)),
        )


def _change_of(head: Head, lm: CausalLM) -> GatedChange | None:
    """How attention differs at the prompt tokens; None if it does not."""
    if not head.config.get("change_rank"):
        return None
    shapes = shapes_of(lm.model.config, head.setting("change_rank", int))
    trained = {name: head.tensor(f"change.{name}", *shape) for name, shape in shapes.items()}
    if not all(bool(weight.isfinite().all()) for weight in trained.values()):
        raise ValueError(f"draft {head.name!r}: its change of attention is not finite: train it again")
    return GatedChange.of(trained)


def forward_with_probes(
    forward: ForwardFunction,
    probes: Probes,
    tokens_BM: Tensor,
    parents_BM: Tensor,
    rows_BR: Tensor,
    hidden_layers: Sequence[int] = (),
) -> tuple[ForwardOut, Probes]:
    """A pass over tokens and the prompt tokens after them.

    Each row's prompt tokens directly follow its last token, so the pass is only as wide as its widest row needs.

    Args:
        forward: computes the pass, as `CausalLM.forward`.
        probes: the prompt tokens.
        tokens_BM: the tokens, see `CausalLM.forward`.
        parents_BM: likewise.
        rows_BR: indices of the tokens whose logits are wanted: of the token that is node -1 of the probes, then of each
            node.
        hidden_layers: whose states of all tokens are wanted.

    Returns:
        Logits `[B, R, V]` and states `[B, M, D]` of the tokens; the probes with their states after the final norm.
    """
    M = tokens_BM.shape[1]
    first_B1, counts_B1 = _lengths(tokens_BM), _lengths(probes.tokens)
    width = max(M, int((first_B1 + counts_B1).max()))
    # Padding goes to a last column, which is cut off.
    columns_BQ = torch.arange(probes.tokens.shape[1], device=tokens_BM.device)
    columns_BQ = torch.where(columns_BQ < counts_B1, first_B1 + columns_BQ, width)
    follows_BQ = rows_BR.gather(1, probes.nodes + 1)
    follows_BQ = torch.where(probes.before == ABSENT, follows_BQ, probes.before + first_B1)
    tokens_BW, parents_BW = (
        torch.nn.functional.pad(part, (0, width + 1 - M), value=ABSENT).scatter(1, columns_BQ, more)[:, :width]
        for part, more in ((tokens_BM, probes.tokens), (parents_BM, follows_BQ))
    )
    layers = dict.fromkeys([*hidden_layers, FINAL_NORM])
    out = forward(tokens_BW, parents_BW, rows_BR, list(layers))
    hidden = {layer: out.hidden[layer][:, :M] for layer in hidden_layers}
    states_BWD = out.hidden[FINAL_NORM]
    columns_BQD = columns_BQ.clamp(max=width - 1)[:, :, None].expand(-1, -1, states_BWD.shape[2])
    return ForwardOut(logits=out.logits, hidden=hidden), replace(probes, states=states_BWD.gather(1, columns_BQD))


def _lengths(tokens_BN: Tensor) -> Tensor:
    """The length `[B, 1]` of each row, without trailing `ABSENT`.

    >>> _lengths(torch.tensor([[5, -1, 7, -1], [-1, -1, -1, -1]])).tolist()
    [[3], [0]]
    """
    lengths_N = torch.arange(1, tokens_BN.shape[1] + 1, device=tokens_BN.device)
    return torch.nn.functional.pad(lengths_N * (tokens_BN != ABSENT), (1, 0)).amax(1, keepdim=True)
