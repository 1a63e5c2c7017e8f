"""The loss of a selector's scores against a plain computation, row by row."""

from __future__ import annotations

import pytest
import torch

from paradraft.formats.path_heads import SELECTED
from paradraft.train.objectives.row_loss import RowLoss
from paradraft.train.objectives.selection import selection_loss

ROWS, VOCAB = 12, 40


@pytest.mark.parametrize("has_teacher", [False, True])
def test_the_loss_is_over_the_likeliest_tokens(has_teacher: bool) -> None:
    """Guards which tokens are scored, with whose logits, and a wanted token that is not among the likeliest: it must
    be learnt, in place of the last one. The gradient reaches scores and logits."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(ROWS, VOCAB, generator=generator, requires_grad=True)
    added, labels = torch.randn(ROWS, VOCAB, generator=generator), torch.randint(VOCAB, (ROWS,), generator=generator)
    teacher = 3 * torch.randn(ROWS, VOCAB, generator=generator) if has_teacher else None
    wanted = labels if teacher is None else teacher.argmax(1)

    def select(read: torch.Tensor, of_ids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert torch.equal(of_ids, logits.gather(1, ids))
        return of_ids + read.gather(1, ids)

    losses, best = selection_loss(select, added, logits, labels, teacher, RowLoss(kind="forward_kl").of)
    missing = 0
    for row in range(ROWS):
        ids = logits[row].topk(SELECTED).indices.tolist()
        assert int(best[row]) == ids[int((logits[row, ids] + added[row, ids]).argmax())], "which decoding can draft"
        if int(wanted[row]) not in ids:
            ids[-1] = int(wanted[row])
            missing += 1
        log_q = (logits[row, ids] + added[row, ids]).log_softmax(0)
        if teacher is None:
            expected = -log_q[ids.index(int(wanted[row]))]
        else:
            log_p = teacher[row, ids].log_softmax(0)
            expected = (log_p.exp() * (log_p - log_q)).sum()
        torch.testing.assert_close(losses[row], expected)
    assert 0 < missing < ROWS
    losses.sum().backward()
    assert logits.grad is not None and bool((logits.grad != 0).any(1).all())
