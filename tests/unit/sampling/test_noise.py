"""Random numbers of places: their distribution, their independence, and what they depend on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.sampling import noise as module
from paradraft.sampling.noise import FEW_NUMBERS, gumbel_noise, seed_of, uniform_numbers, with_noise


def test_noise_is_standard_gumbel() -> None:
    """Guards the formula: mean 0.5772 and variance pi^2 / 6, each within 5 standard errors (false alarm 1e-6)."""
    noise = gumbel_noise(1, torch.arange(500)[None], 400).flatten()
    assert abs(noise.mean() - 0.577216) < 5 * math.sqrt(math.pi**2 / 6 / noise.numel())
    kurtosis = 5.4
    assert abs(noise.var() - math.pi**2 / 6) < 5 * math.pi**2 / 6 * math.sqrt((kurtosis - 1) / noise.numel())


@pytest.mark.parametrize("lag", ["position", "seed", "token"])
def test_noise_of_neighbours_is_uncorrelated(lag: str) -> None:
    """Guards against a weak hash: neighbouring positions, seeds and tokens (|r| < 5 / sqrt(n), false alarm 6e-7)."""
    noise = torch.stack([gumbel_noise(seed, torch.arange(60), 120) for seed in range(30)])
    dim = {"seed": 0, "position": 1, "token": 2}[lag]
    size = noise.shape[dim] - 1
    pair = torch.stack([noise.narrow(dim, 0, size).flatten(), noise.narrow(dim, 1, size).flatten()])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(pair.shape[1])


def test_noise_of_a_position_is_not_a_shift_of_another() -> None:
    """Guards against SplitMix64 streams that overlap: position n + 1 must not be position n moved by one token."""
    noise = gumbel_noise(0, torch.arange(50), 60)
    assert noise.flatten().unique().numel() == noise.numel()


def test_noise_belongs_to_the_position_alone() -> None:
    """Guards against numbers that depend on the batch or on how many positions are asked for at once."""
    positions = torch.tensor([[5, 6, 9], [9, 5, 0]])
    noise = gumbel_noise(3, positions, 20)
    for row in range(2):
        for column in range(3):
            assert torch.equal(gumbel_noise(3, positions[row, column], 20), noise[row, column])
    assert torch.equal(gumbel_noise(3, positions, 12), noise[..., :12])


def test_noise_is_finite_at_the_ends_of_the_random_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against uniform numbers rounded to 0 or 1, whose infinite noise chooses tokens that were cut."""
    monkeypatch.setattr(module, "FEWEST_KEPT", 1)
    for bits in (0, -1):
        monkeypatch.setattr(module, "_mix", lambda z, bits=bits: torch.full_like(z, bits))
        monkeypatch.setattr(module, "_mixed_words", lambda z, bits=bits: np.full_like(z, bits % 2**64))
        module._rows.cache_clear()
        assert gumbel_noise(0, torch.tensor([0]), 2).isfinite().all()
        assert module._gumbel(module._uniform(0, torch.tensor([0]), 2)).isfinite().all()
    module._rows.cache_clear()


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(1, 40))
@settings(deadline=None, max_examples=200)
def test_a_cpu_has_the_numbers_of_other_devices(seed: int, position: int, vocab_size: int) -> None:
    """Guards texts against the device: the two ways to the numbers must not differ in a bit."""
    module.FEWEST_KEPT, before = 1, module.FEWEST_KEPT
    try:
        found = gumbel_noise(torch.tensor([seed]), torch.tensor([[position, position + 1]]), vocab_size)
    finally:
        module.FEWEST_KEPT = before
    positions = torch.tensor([[position, position + 1]])
    expected = module._gumbel(module._uniform(torch.tensor([seed]), positions, vocab_size))
    assert torch.equal(found, expected)


def test_what_is_kept_is_not_changed_by_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the noise of later rounds, and that no more is kept than was meant."""
    monkeypatch.setattr(module, "MOST_KEPT_BYTES", 8 * 10 * 3)
    monkeypatch.setattr(module, "FEWEST_KEPT", 1)
    module._rows.cache_clear()
    positions = torch.tensor([[1, 2]])
    assert gumbel_noise(4, positions[:, :0], 10).shape == (1, 0, 10)
    first = gumbel_noise(4, positions, 10)
    kept = first.clone()
    first += 1.0
    assert torch.equal(gumbel_noise(4, positions, 10), kept)
    gumbel_noise(4, torch.arange(9)[None], 10)
    assert module._rows(10).cache_info().currsize == 3
    module._rows.cache_clear()


def test_seeds_of_purposes_have_nothing_in_common() -> None:
    """Guards the independence that the rejection rule needs (correlation of 20,000 pairs, false alarm 1e-6)."""
    positions = torch.arange(20_000)[None]
    rows = [uniform_numbers(seed, positions)[0] for seed in (5, *(seed_of(5, purpose) for purpose in (1, 2, 3)))]
    correlations = torch.corrcoef(torch.stack(rows)) - torch.eye(4)
    assert correlations.abs().max() < 4.9 / 20_000**0.5
    assert 0.0 < min(row.min() for row in rows) and max(row.max() for row in rows) < 1.0


@pytest.mark.parametrize("seed", [7, torch.tensor([7, -3])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_a_few_tokens_is_that_of_all(
    seed: int | torch.Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards losslessness: which way is taken depends on how much is cut, and may change no bit of what is left."""
    scores = torch.randn(2, 5, 200, generator=torch.Generator().manual_seed(1), dtype=dtype)
    scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(2)) < 0.9] = -torch.inf
    scores[0, 3] = -torch.inf
    positions = torch.tensor([[3, 4, 5, 6, 7], [90, 91, 92, 93, 94]])
    found = []
    for share in (0.0, 1.0):
        monkeypatch.setattr(module, "SPARSE", share)
        found.append(with_noise(scores, seed, positions))
    assert found[0].dtype == found[1].dtype == torch.float64
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], scores + gumbel_noise(seed, positions, 200))
    assert not torch.equal(found[0], scores.double())


def test_few_uniform_numbers_are_those_of_many() -> None:
    """Guards the shortcut for few numbers: with others, a round of one row would accept other tokens than the same row
    among many, and than on a GPU. Seeds and positions at the ends of 64 bits would overflow differently."""
    seeds = torch.tensor([0, 7, 2**63 - 1, -(2**63), -1])
    positions = torch.tensor([[0, 1, 2**20], [5, 2**40, 2**62], [2**63 - 1, 0, 3], [-1, -(2**63), 9], [1, 2, 3]])
    many = positions.repeat(1, FEW_NUMBERS)
    assert torch.equal(uniform_numbers(seeds, positions), uniform_numbers(seeds, many)[:, :3])
    assert torch.equal(uniform_numbers(5, positions), uniform_numbers(5, many)[:, :3])
    assert uniform_numbers(seeds[:0], positions[:0]).shape == (0, 3)
    assert not torch.equal(uniform_numbers(6, positions), uniform_numbers(5, positions))
