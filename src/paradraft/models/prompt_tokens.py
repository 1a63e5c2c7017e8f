"""Trained prompt tokens in a model's own passes, and what they let it guess of the tokens to come (Chen et al. 2024).

A pass reads a row's last tokens, a tree of guesses, and prompt tokens after some of them
(`paradraft.sampling.sparse_tree` says where). What the model makes of the i-th prompt token after the last accepted
guess is a guess of the i-th token after the one that it adds itself. A prompt token may have several embeddings, its
*copies*, each of which sees the copies of its own number alone; their states are averaged.

Shape letters: B rows of a batch, S states, N guesses, R the last read token and all guesses, M tokens of a pass before
its prompt tokens, Q prompt tokens of a pass or after a node, each copy counted, P most of them in a chain, E copies,
D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paradraft.core import Draft, Probes
from paradraft.formats.head import Head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM, ForwardOut
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates
from paradraft.sampling.sparse_tree import Accuracy, StateTree, best_trees, is_accuracy
from paradraft.tree import ABSENT


class Shapes:
    """The trees of all states as tensors, `[S, …]`, filled up with `ABSENT` to the largest.

    Args:
        trees: by state.
        ids: `[P, E]` of the prompt tokens.
        device: of the tensors.
    """

    def __init__(self, trees: Sequence[StateTree], ids: Tensor, device: torch.device) -> None:
        self.trees = tuple(trees)

        def filled(rows: list[list[int]]) -> Tensor:
            width = max(map(len, rows))
            return upload([row + [ABSENT] * (width - len(row)) for row in rows], device).view(len(rows), width)

        self.depths_SN = filled([[len(path) - 1 for path in tree.guesses] for tree in trees])
        self.ranks_SN = filled([[path[-1] for path in tree.guesses] for tree in trees])
        places = [{path: node for node, path in enumerate(tree.guesses)} for tree in trees]
        self.parents_SN = filled([[place.get(path[:-1], ABSENT) for path in place] for place in places])
        probes = [
            [
                (node - 1, number, copy)
                for node, most in enumerate(tree.prompts)
                for copy in range(ids.shape[1])
                for number in range(most)
            ]
            for tree in trees
        ]
        self.nodes_SQ = filled([[node for node, _, _ in row] for row in probes])
        self.before_SQ = filled(
            [[at - 1 if number else ABSENT for at, (_, number, _) in enumerate(row)] for row in probes]
        )
        self.tokens_SQ = filled([[int(ids[number, copy]) for _, number, copy in row] for row in probes])
        self.guesses, self.probes = [len(tree.guesses) for tree in trees], list(map(len, probes))
        self.ranks = max((path[-1] + 1 for tree in trees for path in tree.guesses), default=1)


class PromptTokens:
    """Prompt tokens that a model can read, and what it made of those after the last token of each row.

    Each row is in a state: how many prompt tokens the model has read after its last accepted token.

    Args:
        lm: the model.
        head: the checkpoint: "prompts.embeddings" `[trained, E, D]`; "prompts.weights" `[trained, E]` if they are not
            averaged; in its config "accuracy", see `paradraft.sampling.sparse_tree.Accuracy`.
        number: P, most prompt tokens after a token.

    Raises:
        ValueError: the checkpoint is damaged, or has too few prompt tokens.
    """

    def __init__(self, lm: CausalLM, head: Head, number: int) -> None:
        if head.config.get("is_decoded") is not True:
            raise ValueError(
                f"draft {head.name!r} was trained with settings that are only measured: train it with others"
            )
        trained, self.copies = head.setting("prompt_tokens", int), head.setting("copies", int)
        if number > trained:
            raise ValueError(
                f"prompts={number}: draft {head.name!r} has {trained} prompt tokens, use at most {trained}"
            )
        accuracy = head.config.get("accuracy")
        if not is_accuracy(accuracy, trained):
            raise ValueError(f"draft {head.name!r}: accuracy in its config.json is no table of shares: train it again")
        self._accuracy = accuracy
        embeddings = head.tensor("prompts.embeddings", trained, self.copies, lm.model.config.hidden_size)[:number]
        if not bool(embeddings.isfinite().all()):
            raise ValueError(f"draft {head.name!r}: its prompt tokens are not finite: train it again")
        self._weights_PE = torch.full((number, self.copies), 1 / self.copies, device=lm.device)
        if "prompts.weights" in head.weights:
            self._weights_PE = head.tensor("prompts.weights", trained, self.copies)[:number].to(lm.device).float()
        self._ids_PE = torch.tensor(lm.add_embeddings(embeddings.flatten(0, 1))).view(number, self.copies)
        self._lm = lm
        self.start()

    def best(self, size: int, accuracy: Accuracy | None = None) -> Shapes:
        """The trees that yield most in passes of a size.

        Args:
            size: guesses and prompt tokens.
            accuracy: of the guesses; by default what was found on held-out rows of the training.

        Raises:
            ValueError: it has no room for a prompt token.
        """
        if size < self.copies:
            raise ValueError(f"size={size}: each prompt token has {self.copies} copies, use at least {self.copies}")
        known, prompts = self._accuracy if accuracy is None else accuracy, len(self._ids_PE)
        return self.shapes(best_trees(known, size, prompts=prompts, copies=self.copies))

    def shapes(self, trees: Sequence[StateTree]) -> Shapes:
        """Trees for drafts, one for each state."""
        return Shapes(trees, self._ids_PE, self._lm.device)

    def start(self) -> None:
        """Forgets all rows."""
        self.states: list[int] = []
        dtype = torch.float64 if self._lm.model.dtype == torch.float64 else torch.float32
        self._logits_BPV = torch.empty(0, len(self._ids_PE), self._lm.vocab_size, dtype=dtype, device=self._lm.device)

    def join(self, rows: int) -> None:
        """Adds rows after the others; nothing is known of what comes next."""
        self.states += [0] * rows
        new = self._logits_BPV.new_zeros(rows, *self._logits_BPV.shape[1:])
        self._logits_BPV = torch.cat([self._logits_BPV, new])

    def keep(self, rows: Tensor) -> None:
        """Forgets the other rows."""
        self.states = [self.states[row] for row in rows.tolist()]
        self._logits_BPV = self._logits_BPV[rows]

    def forget(self) -> None:
        """Nothing is known of what comes next in any row."""
        self.states = [0] * len(self.states)

    def commit(self, probes: tuple[Tensor, Tensor] | None) -> None:
        """Takes in what the model made of the prompt tokens after the last accepted guess, see `Probes.after`."""
        if probes is None or not probes[0].shape[1]:
            self.forget()
            return
        tokens_BQ, states_BQD = probes
        P, E = self._weights_PE.shape
        which_BQ = tokens_BQ - int(self._ids_PE[0, 0])
        self.states = ((tokens_BQ != ABSENT).sum(1) // E).tolist()
        # States are averaged before the head, which is linear.
        mixing_BQP = torch.nn.functional.one_hot(which_BQ.clamp(min=0) // E, P) * (tokens_BQ != ABSENT)[:, :, None]
        weights_BQ = self._weights_PE.flatten()[which_BQ.clamp(min=0)]
        mixed_BPD = (mixing_BQP * weights_BQ[:, :, None]).to(states_BQD.dtype).mT @ states_BQD
        depth = max(self.states)
        self._logits_BPV[:, :depth] = self._lm.head(mixed_BPD[:, :depth]).to(self._logits_BPV.dtype)

    @property
    def logits(self) -> Tensor:
        """`[B, depth, V]` of the tokens after the next one, as far as any row has some, but at least of one."""
        return self._logits_BPV[:, : max(*self.states, 1)]

    def draft(self, shapes: Shapes, found: Candidates, is_wanted_B: Tensor) -> Draft:
        """Guesses for the rows that want some, and prompt tokens for the next pass.

        Args:
            shapes: the trees.
            found: of the logits, `shapes.ranks` or fewer.
            is_wanted_B: which rows want guesses.
        """
        state_B, is_wanted_B1 = upload(self.states, is_wanted_B.device), is_wanted_B[:, None]
        depth, ranks = found.tokens.shape[1:]
        N, Q = (max(number[state] for state in self.states) for number in (shapes.guesses, shapes.probes))
        depths_BN, ranks_BN = shapes.depths_SN[state_B, :N], shapes.ranks_SN[state_B, :N]
        # Of a node that a state does not have, and of one whose rank there is not, anything may be taken.
        which_BN = (depths_BN * ranks + ranks_BN).clamp(min=0, max=depth * ranks - 1)
        is_there_BN = is_wanted_B1 & (depths_BN != ABSENT) & (ranks_BN < ranks)
        is_there_BN &= found.log_probs.flatten(1).gather(1, which_BN) != -torch.inf
        tokens_BN = found.tokens.flatten(1).gather(1, which_BN).masked_fill(~is_there_BN, ABSENT)
        confidence = None
        if found.confidence is not None:
            confidence = found.confidence.gather(1, depths_BN.clamp(min=0, max=depth - 1))
        parts = (shapes.nodes_SQ, shapes.before_SQ, shapes.tokens_SQ)
        nodes_BQ, before_BQ, probes_BQ = (part[state_B, :Q] for part in parts)
        probes = Probes(nodes=nodes_BQ, before=before_BQ, tokens=probes_BQ)
        is_known_BR = torch.nn.functional.pad(is_there_BN, (1, 0), value=True)
        return Draft(
            tokens=tokens_BN,
            parents=shapes.parents_SN[state_B, :N],
            confidence=confidence,
            probes=probes.without(~is_wanted_B1 | ~is_known_BR.gather(1, nodes_BQ + 1)),
        )


def forward_with_probes(
    lm: CausalLM,
    probes: Probes,
    tokens_BM: Tensor,
    parents_BM: Tensor,
    rows_BR: Tensor,
    hidden_layers: Sequence[int] = (),
) -> tuple[ForwardOut, Probes]:
    """The pass over some tokens and the prompt tokens after them, of which only the states are wanted.

    A row's prompt tokens stand right after its own last token: a pass is as wide as its widest row needs, which may be
    less than most tokens and most prompt tokens together.

    Args:
        lm: reads them.
        probes: the prompt tokens.
        tokens_BM: the tokens, as `CausalLM.forward` takes them.
        parents_BM: likewise.
        rows_BR: where the token stands that the probes call -1, then each node of theirs; the rows whose logits are
            wanted.
        hidden_layers: whose states of all tokens are wanted.

    Returns:
        Logits `[B, R, V]` and states `[B, M, D]`; the probes with theirs.
    """
    M = tokens_BM.shape[1]
    first_B1, number_B1 = _ends(tokens_BM), _ends(probes.tokens)
    width = max(M, int((first_B1 + number_B1).max()))
    # What fills a row up goes to a last column, which is cut off.
    places_BQ = torch.arange(probes.tokens.shape[1], device=tokens_BM.device)
    places_BQ = torch.where(places_BQ < number_B1, first_B1 + places_BQ, width)
    follows_BQ = rows_BR.gather(1, probes.nodes + 1)
    follows_BQ = torch.where(probes.before == ABSENT, follows_BQ, probes.before + first_B1)
    tokens_BW, parents_BW = (
        torch.nn.functional.pad(part, (0, width + 1 - M), value=ABSENT).scatter(1, places_BQ, more)[:, :width]
        for part, more in ((tokens_BM, probes.tokens), (parents_BM, follows_BQ))
    )
    layers = dict.fromkeys([*hidden_layers, FINAL_NORM])
    out = lm.forward(tokens_BW, parents_BW, rows_BR, hidden_layers=list(layers))
    hidden = {layer: out.hidden[layer][:, :M] for layer in hidden_layers}
    states_BWD = out.hidden[FINAL_NORM]
    which_BQD = places_BQ.clamp(max=width - 1)[:, :, None].expand(-1, -1, states_BWD.shape[2])
    return ForwardOut(logits=out.logits, hidden=hidden), replace(probes, states=states_BWD.gather(1, which_BQD))


def _ends(tokens_BN: Tensor) -> Tensor:
    """`[B, 1]` the number of tokens of each row up to its last that is there.

    >>> _ends(torch.tensor([[5, -1, 7, -1], [-1, -1, -1, -1]])).tolist()
    [[3], [0]]
    """
    numbers_N = torch.arange(1, tokens_BN.shape[1] + 1, device=tokens_BN.device)
    return torch.nn.functional.pad(numbers_N * (tokens_BN != ABSENT), (1, 0)).amax(1, keepdim=True)
