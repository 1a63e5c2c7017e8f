"""Losses that are summed in chunks, against autograd over all rows at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paradraft.train.objectives.chunks import rows_at_once, sum_in_chunks

WIDTH, IDS, ROWS = 5, 11, 9


class Parts(nn.Module):
    """A body, a head that a loss reads, and a weight that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, IDS)
        self.other = nn.Parameter(torch.ones(3))
        self.double()

    def states(self) -> Tensor:
        return self.body(torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH))

    def loss(self, states_mD: Tensor, rows_m: Tensor) -> tuple[Tensor, Tensor]:
        logits_mV = self.head(states_mD)
        loss_m = nn.functional.cross_entropy(logits_mV, rows_m % IDS, reduction="none")
        return ((rows_m + 1) * loss_m).sum(), logits_mV.detach().argmax(-1)


@pytest.mark.parametrize("chunk", [1, 2, 4, ROWS, 100])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_are_those_of_all_rows_at_once(chunk: int, is_frozen: bool) -> None:
    """Guards each gradient: of states in any order and of those left out, of the head in every chunk, and none of a
    weight that the loss does not read."""
    rows_M = torch.tensor([7, 0, 3, 8, 1, 2])
    gradients = []
    for in_chunks in (True, False):
        parts = Parts()
        parts.head.requires_grad_(not is_frozen)
        states = parts.states()
        weights = [weight for weight in parts.parameters() if weight.requires_grad]
        if in_chunks:
            total, values = sum_in_chunks(parts.loss, states, rows_M.split(chunk), weights)
        else:
            total, values = parts.loss(states[rows_M], rows_M)
        (3 * total).backward()
        gradients.append([total.detach(), values, *(weight.grad for weight in parts.parameters())])
    for computed, expected in zip(*gradients, strict=True):
        assert (computed is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(computed, expected, check_dtype=False)
    assert sum(each is None for each in gradients[0]) == (3 if is_frozen else 1)


def test_a_head_is_read_only_once() -> None:
    """Guards the reason for it: logits that are computed again in the backward pass cost a third of the head's time."""
    parts, calls = Parts(), []
    parts.head.register_forward_hook(lambda *_: calls.append(1))
    total, _ = sum_in_chunks(parts.loss, parts.states(), torch.arange(ROWS).split(4), list(parts.parameters()))
    total.backward()
    assert len(calls) == 3


def test_without_gradients_nothing_is_kept() -> None:
    parts = Parts()
    with torch.no_grad():
        total, values = sum_in_chunks(parts.loss, parts.states(), torch.arange(ROWS).split(4), list(parts.parameters()))
    assert not total.requires_grad and len(values) == ROWS


def test_chunks_have_at_least_a_row() -> None:
    assert rows_at_once(10**9, torch.device("cpu")) == 1
    assert 1 < rows_at_once(1000, torch.device("cpu")) < rows_at_once(1000, torch.device("meta"))
