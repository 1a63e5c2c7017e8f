"""Tokens drawn in C++ against those that torch draws: the same, or none where rounding decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paradraft.core import CHAINS, INVALID, Request
from paradraft.models.forward.cpu.draw import CpuSampling, confidence, draw, likeliest
from paradraft.sampling.noise import gumbel_noise
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling

SETTINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8, seed=1),
    "cold": Sampling(temperature=0.05, seed=-2),
    "hot": Sampling(temperature=5.0, seed=2**63 - 1),
    "top-p": Sampling(temperature=0.8, top_p=0.95, seed=3),
    "small top-p": Sampling(temperature=1.3, top_p=0.05, seed=4),
    "large top-p": Sampling(temperature=1.0, top_p=0.99999, seed=5),
    "top-k": Sampling(temperature=1.0, top_k=5, seed=6),
    "large top-k": Sampling(temperature=1.0, top_k=500, seed=7),
    "min-p": Sampling(temperature=1.5, min_p=0.1, seed=8),
    "all": Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.02, seed=9),
}
SIZES = (1, 2, 15, 16, 17, 255, 256, 257, 1000, 5003)


def spread(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 3


def with_gaps(logits: Tensor) -> Tensor:
    return logits.masked_fill(torch.arange(logits.shape[-1]) % 3 == 1, -torch.inf)


LOGITS: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "spread": spread,
    "flat": lambda shape, generator: spread(shape, generator) / 300,
    "steep": lambda shape, generator: spread(shape, generator) * 10,
    "ties": lambda shape, generator: spread(shape, generator).round(),
    "bfloat16": lambda shape, generator: spread(shape, generator).bfloat16().float(),
    "forbidden": lambda shape, generator: with_gaps(spread(shape, generator)),
}


def torchs(logits_BRV: Tensor, samplings: list[Sampling], positions_BR: Tensor) -> Tensor:
    """What torch draws."""
    sampler = Sampler([Request(tokens=[1], sampling=sampling) for sampling in samplings])
    return sampler.draw(logits_BRV, positions_BR - 1)


def random_positions(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(1, 10**6, shape, generator=generator)


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_torch(name: str, kind: str) -> None:
    """Guards the text of a seed, which must not depend on what draws it, at all sizes of a vocabulary; and the speed,
    which is lost where torch has to draw after all. That may be so where many tokens are equally likely."""
    generator, decided = torch.Generator().manual_seed(0), 0
    for size in SIZES:
        for _ in range(8):
            logits, positions = LOGITS[kind]((1, 1, size), generator), random_positions((1, 1), generator)
            found = draw(logits, [SETTINGS[name]], positions, threads=1)
            if found is not None:
                assert torch.equal(found, torchs(logits, [SETTINGS[name]], positions))
                decided += 1
    assert decided > (0.8 if kind == "ties" else 0.95) * 8 * len(SIZES)


@pytest.mark.parametrize(
    ("other", "later"), [(Sampling(temperature=0.8, seed=2), 0), (Sampling(temperature=0.9, seed=1), 0), (None, 1)]
)
def test_other_settings_and_places_have_other_tokens(other: Sampling | None, later: int) -> None:
    """Control of the test above: another seed, temperature or position must be seen."""
    generator = torch.Generator().manual_seed(0)
    logits, positions = spread((1, 500, 300), generator), torch.arange(500)[None]
    mine = SETTINGS["temperature"]
    found = draw(logits, [other or mine], positions + later, threads=1)
    assert found is not None and not torch.equal(found, torchs(logits, [mine], positions))


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_tokens_of_a_large_vocabulary(scale: float) -> None:
    """Guards vocabularies of real models: all settings beside each other in a batch, whose logits are a part of wider
    rows, on several threads."""
    generator, V = torch.Generator().manual_seed(1), 151_665
    samplings = list(SETTINGS.values())
    logits = (torch.randn(len(samplings), 2, V + 271, generator=generator) * scale)[..., :V]
    positions, before = random_positions((len(samplings), 2), generator), logits.clone()
    found = [draw(logits, samplings, positions, threads=threads) for threads in (1, 3)]
    assert torch.equal(logits, before)
    for tokens in found:
        assert tokens is not None and torch.equal(tokens, torchs(logits, samplings, positions))


@pytest.mark.parametrize("by", [1e-4, -1e-4])
def test_a_token_that_wins_by_a_hair(by: float) -> None:
    """Guards the shortcut of not computing noise that cannot win: the token with the largest noise of all, as far below
    the likeliest one as that allows."""
    V, sampling = 151_936, Sampling(temperature=0.5, seed=11)
    for position in range(20):
        noise_V = gumbel_noise(sampling.seed, torch.tensor([[position]]), V)[0, 0]
        rare, likeliest = int(noise_V.argmax()), 77
        logits_V = torch.full((V,), -100.0)
        logits_V[likeliest] = 0.0
        logits_V[rare] = 0.5 * (noise_V[likeliest] - noise_V[rare] + by)
        found = draw(logits_V.view(1, 1, V), [sampling], torch.tensor([[position]]), threads=1)
        assert found is not None and found.item() == (rare if by > 0 else likeliest)


def test_scores_that_rounding_could_order_are_left_to_torch() -> None:
    """Guards equal texts where two scores are nearer to each other than the logarithms of two libraries: nothing is
    drawn then; a difference that is larger is decided."""
    sampling, position = Sampling(temperature=1.0, seed=5), torch.tensor([[3]])
    noise_V = gumbel_noise(sampling.seed, position, 2)[0, 0]
    rounded = (noise_V[0] - noise_V[1]).float()
    rest = (rounded.double() + noise_V[1] - noise_V[0]).float()  # so small that a float32 holds the difference exactly
    for by, is_decided in ((0.0, False), (1e-6, True)):
        logits = torch.stack([rest + by, rounded])[None, None]
        assert (draw(logits, [sampling], position, threads=1) is not None) == is_decided


def test_a_nucleus_that_rounding_could_enlarge_is_left_to_torch() -> None:
    """Guards equal texts where the probabilities before a token are p itself: of 8 equal tokens 4 are inside, and the
    fifth is if they add up to less than a half. Other winners are decided."""
    logits, sampling = torch.zeros(1, 1, 8), Sampling(temperature=1.0, top_p=0.5, seed=2)
    outcomes = set()
    for position in range(1, 101):
        place = torch.tensor([[position]])
        best = int(gumbel_noise(sampling.seed, place, 8).argmax())
        found = draw(logits, [sampling], place, threads=1)
        outcomes.add((best, found is None))
        if found is not None:
            assert torch.equal(found, torchs(logits, [sampling], place))
    assert {(best, False) for best in range(4)} < outcomes
    assert {best for best, is_none in outcomes if is_none} >= {4}
    assert (4, False) not in outcomes


@pytest.mark.parametrize("kind", LOGITS)
def test_confidence_is_that_of_torch(kind: str) -> None:
    """Guards unions and the policy "confidence": of each row at its own temperature, without filters."""
    generator, samplings = torch.Generator().manual_seed(0), list(SETTINGS.values())
    requests = [Request(tokens=[1], sampling=sampling) for sampling in samplings]
    wanted = replace(CHAINS, wants_confidence=True)
    for size in SIZES:
        logits = LOGITS[kind]((len(samplings), 3, size), generator)
        found = [
            Sampler(requests, drafting=wanted, faster=faster).candidates(logits, 0, 1).confidence
            for faster in (None, CpuSampling(threads=1), CpuSampling(threads=3))
        ]
        temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings])
        right = (logits.double() / temperatures[:, None, None]).softmax(2).amax(2)
        for each in found:
            torch.testing.assert_close(each, right, rtol=1e-5, atol=0.0, equal_nan=True)
        assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_confidence_of_what_is_no_number(bad: float) -> None:
    logits = torch.zeros(1, 2, 300)
    logits[0, 1, 17] = bad
    found = confidence(logits, [Sampling()], threads=1)
    assert found is not None and found[0, 0] == pytest.approx(1 / 300) and found[0, 1].isnan()
    assert confidence(logits.double(), [Sampling()], threads=1) is None


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("size", [5, 300])
def test_logits_that_are_no_numbers(size: int, name: str) -> None:
    """Guards against a token where none can be chosen, wherever in a row the number is that is none."""
    sampling = SETTINGS[name]
    for bad in (torch.nan, torch.inf):
        for place in range(0, size, 13):
            logits = torch.zeros(1, 1, size)
            logits[..., place] = bad
            found = draw(logits, [sampling], torch.tensor([[4]]), threads=1)
            assert found is not None and found.tolist() == [[INVALID]]
    found = draw(torch.full((1, 1, size), -torch.inf), [sampling], torch.tensor([[4]]), threads=1)
    assert found is not None and found.tolist() == [[INVALID]]


def test_a_temperature_that_makes_logits_infinite_is_left_to_torch() -> None:
    """Guards rows in which a quotient is no finite number; and logits of other types, which C++ would misread."""
    position = torch.tensor([[4]])
    assert draw(torch.full((1, 1, 3), 1e35), [Sampling(temperature=1e-6)], position, threads=1) is None
    assert draw(torch.zeros(1, 1, 3, dtype=torch.float64), [Sampling()], position, threads=1) is None


def test_a_sampler_draws_the_same_with_it() -> None:
    """Guards what comes before and after: biases, penalties and processors of rows beside others, drafted tokens before
    a position, positions of rows of several lengths, and rows that leave."""
    kinds = [
        Sampling(temperature=0.8, top_p=0.9, seed=1),
        Sampling(temperature=0.8, repetition_penalty=1.7, seed=2),
        Sampling(logit_bias={3: 2.5, 4: -math.inf}),
        Sampling(temperature=1.0, frequency_penalty=2.0, presence_penalty=0.5, top_k=9, seed=3),
        Sampling(temperature=1.1, min_p=0.05, processors=[lambda ids, scores: scores.roll(ids.shape[1], 1)], seed=4),
        Sampling(temperature=0.8, top_p=0.9, seed=5),
    ]
    requests = [Request(tokens=[3] * (row + 1) + [7, 8], sampling=sampling) for row, sampling in enumerate(kinds)]
    generator = torch.Generator().manual_seed(0)
    served = 0

    class Counting(CpuSampling):
        def draw(self, *given: Any) -> Tensor | None:
            nonlocal served
            found = super().draw(*given)
            served += found is not None
            return found

    for rows in ([0, 1, 2, 3, 4, 5], [5, 1, 3], [0, 5], [2]):
        slow, fast = Sampler(requests), Sampler(requests, faster=Counting(threads=2))
        for sampler in (slow, fast):
            sampler.keep(torch.tensor(rows))
        for _ in range(5):
            logits = spread((len(rows), 3, 40), generator)
            paths = torch.randint(0, 40, (len(rows), 3, 2), generator=generator)
            depths = torch.tensor([[0, 1, 2]]).expand(len(rows), -1)
            assert torch.equal(fast.draw(logits, depths, paths), slow.draw(logits, depths, paths))
            drafted = [sampler.candidates(logits, 0, 1, paths[:, 0, :0]).tokens for sampler in (fast, slow)]
            assert torch.equal(*drafted)
    assert served > 20, "the comparison must not be of torch with itself"


@pytest.mark.parametrize("top_k", [2**63 + 5, 2**64 - 2**40, 2**64 + 1])
def test_top_k_of_more_than_64_bits_keeps_all(top_k: int) -> None:
    """Guards a server: the number of a request once reached C++ as a negative one, and ended the process."""
    logits, positions = torch.randn(1, 50, 64), torch.arange(50)[None]
    found = draw(logits, [Sampling(temperature=1.0, top_k=top_k)], positions, threads=1)
    expected = draw(logits, [Sampling(temperature=1.0)], positions, threads=1)
    assert found is not None and expected is not None and torch.equal(found, expected)


def test_top_p_of_large_logits_is_torchs() -> None:
    """Guards shares that torch's float32 sum of such logits changes: C++ once took token 5, which torch leaves out."""
    logits = torch.tensor([[[104203, 104201.5, 104198.9921875, 104199.75, 104200.3984375, 104202.21875]]])
    positions = torch.full((1, 1), 2)
    sampling = Sampling(temperature=1.0, top_p=0.5521055323507861)
    assert draw(logits, [sampling], positions, threads=1) is None
    assert draw(logits - 104200, [sampling], positions, threads=1) is not None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("count", [1, 8, 300])
def test_the_likeliest_are_those_of_a_sort(kind: str, size: int, count: int) -> None:
    """Guards chunks that are left out, ends of the vocabulary, ties, tokens that may not be chosen, and strides."""
    generator = torch.Generator().manual_seed(size)
    logits = LOGITS[kind]((2, 6, size), generator)[:, ::2]
    tokens, best = likeliest(logits, torch.zeros(2, 3, dtype=torch.long), count, threads=2)
    assert tokens.shape == best.shape == (2, 3, count)
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    order, sorted_logits = order[..., :count], sorted_logits[..., :count]
    assert torch.equal(best[..., :size], sorted_logits)
    assert torch.equal(tokens[..., :size], order.masked_fill(sorted_logits == -torch.inf, -1))
    assert bool((tokens[..., size:] == -1).all()) and bool((best[..., size:] == -torch.inf).all())


def test_after_absent_tokens_nothing_is_read() -> None:
    """Guards places without a token, whose logits are not written: of these NaN would make an invalid token."""
    logits = torch.zeros(1, 3, 600)
    logits[0, :, 7], logits[0, 1:, 9], logits[0, 2, 11] = 1.0, 2.0, torch.nan
    tokens, best = likeliest(logits, torch.tensor([[5, -1, -1]]), 2, threads=1)
    assert tokens.tolist() == [[[7, 0], [-1, -1], [-1, -1]]] and bool(best[0, 1:].eq(-torch.inf).all())
    for sampling in (Sampling(), Sampling(temperature=0.1)):
        drawn = draw(logits, [sampling], torch.tensor([[3, -1, -1]]), threads=1)
        assert drawn is not None and drawn.tolist() == [[7, -1, -1]]
    sampler = Sampler([Request(tokens=[1, 2])], faster=CpuSampling(threads=1))
    assert sampler.draw(logits, torch.tensor([[0, -1, -1]])).tolist() == [[7, -1, -1]]


def test_of_no_numbers_none_is_likely() -> None:
    """Guards drafters against tokens of a pass that has failed."""
    logits = torch.zeros(1, 3, 600)
    logits[0, 1, 511] = torch.nan
    logits[0, 2] = -torch.inf
    tokens, _ = likeliest(logits, torch.zeros(1, 3, dtype=torch.long), 2, threads=1)
    assert tokens.tolist() == [[[0, 1], [-1, -1], [-1, -1]]]
