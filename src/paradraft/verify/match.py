"""Verification by matching: a drafted token is accepted while it equals the target's own draw.

The target's token at a position is argmax(log p + noise of that position), or argmax(log p) when greedy
(`Sampler.draw`). The noise does not depend on the step, so the text is the same with and without a draft, token for
token, at any temperature. Drafters draw with the same noise, which couples the two draws: acceptance is at least
(1 - TV) / (1 + TV) (Daliri, Musco & Suresh 2025, "Coupling without Communication and Drafter-Invariant Speculative
Decoding").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.parents import depths_of_places, logit_rows, texts_before
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Draws
from paradraft.tree import ABSENT
from paradraft.verify import Rule


def verify(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Decides the accepted tokens and the recovered or bonus token.

    Worked example: the draft is the chain 5, 6, 7 and the target draws 5 after the root, 6 after 5, and 9 after 6.
    Tokens 5 and 6 are accepted and 9 is recovered.

    >>> import torch
    >>> from paradraft.core import Request
    >>> logits = torch.eye(10)[[5, 6, 9, 0]][None]
    >>> draft = Draft.chain(torch.tensor([[5, 6, 7]]))
    >>> sampler = Sampler([Request(tokens=[1, 2, 3, 4])])
    >>> verdict = verify(draft, TargetOut(logits=logits, hidden={}), sampler)
    >>> verdict.paths, verdict.tokens
    ([[0, 1]], [[5, 6, 9]])
    """
    texts = texts_before(draft.tokens, draft.parents) if sampler.reads_text else None
    drawn = sampler.draw(out.logits, depths_of_places(draft.tokens, draft.parents), texts).tolist()
    paths = [accepted_path(*row) for row in zip(*draft.lists, drawn, strict=True)]
    return verdict_of(draft, paths, drawn)


def verdict_of(draft: Draft, paths: list[list[int]], drawn: list[list[int]]) -> Verdict:
    """The verdict that accepts a path of each row, and adds the token that the target has drawn after it.

    Args:
        drawn: of each row, the target's own tokens: after the root, then after each node.
    """
    guesses, _ = draft.lists
    last = [own[logit_rows(path)[-1]] for own, path in zip(drawn, paths, strict=True)]
    if any(ABSENT in row for row in guesses):
        pairs = zip(drawn, guesses, strict=True)
        drawn = [
            own[:1] + [ABSENT if guess == ABSENT else token for token, guess in zip(own[1:], row, strict=True)]
            for own, row in pairs
        ]
    return replace(Verdict.of(draft, paths, last), drawn=drawn)


def accepted_path(tokens: list[int], parents: list[int], drawn: list[int]) -> list[int]:
    """The path from the root on which every node equals the target's draw after its parent.

    Args:
        tokens: of the nodes of one row's tree, or `ABSENT`.
        parents: of the nodes, each before its children; -1 is the root.
        drawn: the target's own tokens: after the root, then after each node; `ABSENT` where it can choose none.

    >>> accepted_path([5, 8, 6, 7], [-1, -1, 0, 2], [5, 6, 0, 9, 0])
    [0, 2]
    """
    path: list[int] = []
    depth = {-1: 0}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent in depth and token == drawn[parent + 1] and token != ABSENT:
            # One node per depth: siblings with the same token are one continuation.
            path[depth[parent] : depth[parent] + 1] = [node]
            depth[node] = depth[parent] + 1
    return path


@dataclass(frozen=True, kw_only=True)
class Match(Rule):
    """The rule; it has no settings."""

    draws: ClassVar[Draws] = "noise"
    same_tokens: ClassVar[bool] = True

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """See `verify`."""
        return verify(draft, out, sampler)


RULE = Match
