"""Verification by matching: a drafted token is kept while it equals the target's own draw.

The target's token at a position is argmax(log p + noise of that position), or argmax(log p) when
greedy (`sampling.draw`). The noise does not depend on the step, so the text is the same with and
without a draft, token for token, at any temperature. Drafters draw with the same noise, which
couples the two draws: acceptance is at least (1 - TV) / (1 + TV) (Daliri, Musco & Suresh 2025,
"Coupling without Communication and Drafter-Invariant Speculative Decoding").

Shape letters: B rows of a batch, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.core import ABSENT, Draft, Sampling, TargetOut, Verdict
from paradraft.sampling import draw
from paradraft.tree import ancestors

LOSSLESS = True


def verify(draft: Draft, out: TargetOut, root_positions_B: Tensor, sampling: Sampling) -> Verdict:
    """Decides which drafted tokens are kept and which token follows them.

    Args:
        draft: the proposed tree.
        out: the target's pass over it.
        root_positions_B: `[B]` absolute position of the last committed token.
        sampling: how the target chooses.

    Worked example: the draft is the chain 5, 6, 7 and the target draws 5 after the root, 6 after
    5, and 9 after 6. Tokens 5 and 6 are accepted and 9 is recovered.

    >>> logits = torch.eye(10)[[5, 6, 9, 0]][None]
    >>> draft = Draft.chain(torch.tensor([[5, 6, 7]]))
    >>> verdict = verify(draft, TargetOut(logits=logits, hidden={}), torch.tensor([3]), Sampling())
    >>> verdict.accepted.tolist(), verdict.tokens.tolist()
    ([2], [[5, 6, 9, -1]])
    """
    B, N = draft.tokens.shape
    sees_BNN = ancestors(draft.parents)
    depth_BN = sees_BNN.sum(2)
    positions = root_positions_B[:, None] + 1 + torch.nn.functional.pad(depth_BN, (1, 0))
    drawn = draw(out.logits, positions, sampling)

    matches_BN = draft.tokens == drawn.gather(1, draft.parents + 1)
    accepted_BN = (matches_BN[:, None] | ~sees_BNN).all(2)

    nodes = torch.arange(N, device=draft.tokens.device).expand(B, N)
    path = torch.full((B, N + 1), ABSENT, device=draft.tokens.device)
    path = path.scatter(1, torch.where(accepted_BN, depth_BN - 1, N), nodes)[:, :N].contiguous()
    # Counted on the path, one node per depth: siblings that hold the same token are one continuation.
    accepted_B = (path != ABSENT).sum(1)
    last_row = torch.nn.functional.pad(path + 1, (1, 0)).gather(1, accepted_B[:, None])
    next_token = drawn.gather(1, last_row)
    taken = torch.where(path == ABSENT, ABSENT, draft.tokens.gather(1, path.clamp(min=0)))
    tokens = torch.nn.functional.pad(taken, (0, 1), value=ABSENT).scatter(1, accepted_B[:, None], next_token)
    return Verdict(path=path, accepted=accepted_B, tokens=tokens)
