"""Verification by matching: a drafted token is kept while it equals the target's own draw.

The target's token at a position is argmax(log p + noise of that position), or argmax(log p) when
greedy (`Sampler.draw`). The noise does not depend on the step, so the text is the same with and
without a draft, token for token, at any temperature. Drafters draw with the same noise, which
couples the two draws: acceptance is at least (1 - TV) / (1 + TV) (Daliri, Musco & Suresh 2025,
"Coupling without Communication and Drafter-Invariant Speculative Decoding").

Shape letters: B rows of a batch, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

import torch

from paradraft.core import ABSENT, Draft, TargetOut, Verdict
from paradraft.sampler import Sampler
from paradraft.tree import ancestors, depths, row_behind, texts_before, with_root


def verify(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Decides which drafted tokens are kept and which token follows them.

    Args:
        draft: the proposed tree.
        out: the target's pass over it.
        sampler: how the target chooses in each row.

    Worked example: the draft is the chain 5, 6, 7 and the target draws 5 after the root, 6 after
    5, and 9 after 6. Tokens 5 and 6 are accepted and 9 is recovered.

    >>> from paradraft.core import GREEDY, Prompt
    >>> logits = torch.eye(10)[[5, 6, 9, 0]][None]
    >>> draft = Draft.chain(torch.tensor([[5, 6, 7]]))
    >>> sampler = Sampler(Prompt(tokens=torch.tensor([[1, 2, 3, 4]]), sampling=(GREEDY,)))
    >>> verdict = verify(draft, TargetOut(logits=logits, hidden={}), sampler)
    >>> verdict.accepted.tolist(), verdict.tokens.tolist()
    ([2], [[5, 6, 9, -1]])
    """
    B, N = draft.tokens.shape
    texts = texts_before(draft.tokens, draft.parents) if sampler.reads_text else None
    drawn = sampler.draw(out.logits, depths(with_root(draft.parents)), texts)

    matches_BN = draft.tokens == drawn.gather(1, draft.parents + 1)
    accepted_BN = (matches_BN[:, None] | ~ancestors(draft.parents)).all(2)

    nodes = torch.arange(N, device=draft.tokens.device).expand(B, N)
    # One node per depth: siblings that hold the same token are one continuation.
    path = torch.full((B, N + 1), ABSENT, device=draft.tokens.device)
    path = path.scatter(1, torch.where(accepted_BN, depths(draft.parents), N), nodes)[:, :N].contiguous()
    return Verdict.of(draft, path, drawn.gather(1, row_behind(path))[:, 0])
