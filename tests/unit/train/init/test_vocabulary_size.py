"""The size of a reduced vocabulary, against its definition."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from paradraft.train.init.vocabulary_size import ACCEPTANCE, BestSize, Coverage, PassTime, best_size


def naive_share(chosen: list[int], counted: list[int], tokens: int, rows: int) -> float:
    return sum(chosen[row] for row in naive_rows(counted, rows)) / tokens


def naive_rows(counted: list[int], rows: int) -> list[int]:
    return sorted(range(len(counted)), key=lambda row: (-counted[row], row))[:rows]


def test_coverage_is_that_of_the_rows() -> None:
    """Guards the order of rows, and a size that is one too large or too small."""
    generator = random.Random(2)
    for _ in range(100):
        rows = generator.randint(1, 9)
        counted, aside = ([generator.randint(0, 5) for _ in range(rows)] for _ in range(2))
        tokens, held_out = sum(counted) + 1, sum(aside) + generator.randint(0, 1)
        coverage = Coverage.of(
            torch.tensor(counted), torch.tensor(aside), tokens=tokens, held_out_tokens=held_out, always=[]
        )
        for size in range(1, rows + 1):
            assert float(coverage.counted[size - 1]) == naive_share(counted, counted, tokens, size)
            if held_out:
                assert coverage.held_out is not None
                assert float(coverage.held_out[size - 1]) == naive_share(aside, counted, held_out, size)
        share = generator.random() * float(coverage.counted[-1])
        fits = [size for size in range(1, rows + 1) if naive_share(counted, counted, tokens, size) >= share]
        assert coverage.size_of(share) == fits[0]
        with pytest.raises(ValueError, match=r"^coverage=1\.0: all rows cover"):
            coverage.size_of(1.0)


def naive_best(shares: list[float], draft: PassTime, target_s: float, most: int, one_pass: bool, least: int) -> int:
    """By the definition, one size and one length after the other."""

    def speed(size: int, k: int) -> float:
        rate = ACCEPTANCE * shares[size - 1]
        draft_s = draft.pass_s - draft.head_s + draft.head_s * size / len(shares)
        return sum(rate**i for i in range(k + 1)) / (target_s + (1 if one_pass else k) * draft_s)

    sizes = range(least, len(shares) + 1)
    return max(sizes, key=lambda size: (max(speed(size, k) for k in range(1, most + 1)), -size))


def check_sizes(best: Callable[..., BestSize]) -> None:
    generator = random.Random(3)
    for _ in range(200):
        rows, least = generator.randint(2, 20), generator.randint(1, 2)
        shares = sorted(generator.random() for _ in range(rows))
        head_s, rest_s, target_s = (generator.choice([0.1, 1.0, 5.0]) for _ in range(3))
        draft = PassTime(pass_s=head_s + rest_s, head_s=head_s, head_bytes=0)
        coverage = Coverage(counted=torch.tensor(shares, dtype=torch.float64), held_out=None, least=least)
        one_pass, most = generator.random() < 0.5, generator.randint(1, 8)
        found = best(coverage, draft, target_s=target_s, in_one_pass=one_pass, most=most)
        assert found.size == naive_best(shares, draft, target_s, most, one_pass, least)
        assert found.speed >= 1 - 1e-12


def test_the_best_size_is_the_best_of_all() -> None:
    """Guards the scan: its formula, the best length of each size, and the rows that are always kept."""
    check_sizes(best_size)


def as_one_pass(*arguments: object, in_one_pass: bool, **settings: object) -> BestSize:
    """Passes are not counted."""
    return best_size(*arguments, in_one_pass=True, **settings)  # type: ignore[arg-type]


def one_too_large(*arguments: object, **settings: object) -> BestSize:
    found = best_size(*arguments, **settings)  # type: ignore[arg-type]
    return BestSize(size=found.size + 1, speed=found.speed)


@pytest.mark.parametrize("fault", [as_one_pass, one_too_large])
def test_a_wrong_size_is_caught(fault: Callable[..., BestSize]) -> None:
    """Control of the test above."""
    with pytest.raises(AssertionError):
        check_sizes(fault)


def test_a_slow_target_wants_more_rows() -> None:
    """Guards the sense of the formula: the longer a round takes beside the head, the less its rows cost; a head that
    takes no time keeps all that cover anything."""
    shares = torch.linspace(0.5, 1, 100, dtype=torch.float64).sqrt()
    coverage = Coverage(counted=shares, held_out=None, least=1)
    draft = PassTime(pass_s=2.0, head_s=1.0, head_bytes=0)
    sizes = [best_size(coverage, draft, target_s=target_s, in_one_pass=False).size for target_s in (1.0, 4.0, 100.0)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    free = PassTime(pass_s=2.0, head_s=0.0, head_bytes=0)
    assert best_size(coverage, free, target_s=1.0, in_one_pass=True).size == 100
