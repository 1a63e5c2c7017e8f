from __future__ import annotations

import pytest
import torch

from paradraft.train import optimizers as optimizers_module
from paradraft.train.optimizers import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(6, 6), (4, 11), (11, 4)])
def test_orthogonalize_keeps_directions_and_levels_singular_values(shape: tuple[int, int]) -> None:
    """Guards Newton-Schulz: each matrix of a stack by itself, tall and wide, keeps its singular vectors."""
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    scaled = stack * torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)[:, None, None]
    for before, after in zip(stack, orthogonalize(scaled), strict=True):
        left, _, right = torch.linalg.svd(before, full_matrices=False)
        levelled = left.mT @ after @ right.mT
        values = levelled.diagonal()
        assert 0.3 < values.min() and values.max() < 1.3
        torch.testing.assert_close(levelled, values.diag(), rtol=0, atol=1e-9)
    assert not orthogonalize(torch.zeros(1, *shape)).any(), "no gradient, no update, and no NaN"


@pytest.mark.parametrize(("bf16", "together"), [(False, 2**25), (True, 2**25), (False, 1)])
def test_muon_is_the_one_of_torch(bf16: bool, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards momentum, Nesterov, decay and the scale of tall matrices against torch's Muon, which rounds to bf16."""
    monkeypatch.setattr(optimizers_module, "computes_bf16", lambda device: bf16)
    monkeypatch.setattr(optimizers_module, "_BATCH_ELEMENTS", together)
    shapes = [(8, 8), (20, 8), (8, 20), (8, 8)]
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    optimizers = Muon(ours, lr=0.1, weight_decay=0.2), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.2)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = other.grad = torch.randn(mine.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - 1).abs().max() > 0.1
        torch.testing.assert_close(mine, other, rtol=0, atol=0.02)
