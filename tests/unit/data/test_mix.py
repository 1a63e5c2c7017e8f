"""How much of each source a run learns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from paradraft.data.dataset import load_samples
from paradraft.data.mix import Source, share, taken_in
from paradraft.data.samples import Sample, hold_out
from paradraft.train.samples.dataset import BatchSampler
from tests.conftest import tiny_tokenizer
from tests.support.jsonl import write_lines


def numbered(count: int, weight: float = 1.0, start: int = 0) -> list[Sample]:
    """Samples that are told apart by their first token, of three lengths."""
    return [
        Sample(tokens=[start + i] * (2 + i % 3), is_label=[True] * (2 + i % 3), weight=weight) for i in range(count)
    ]


def numbers(samples: list[Sample]) -> list[int]:
    return [int(sample.tokens[0]) for sample in samples]


def test_at_most_so_many_samples_are_chosen_by_seed() -> None:
    """Guards against the first samples of a sorted file, against others in a run that goes on, and against an order
    that is not that of the data."""
    samples = numbered(100)
    chosen = numbers(share(samples, Source(path=Path("d"), most=30), seed=1))
    assert len(chosen) == 30 and chosen == sorted(set(chosen)) != list(range(30))
    assert chosen == numbers(share(samples, Source(path=Path("d"), most=30), seed=1))
    assert chosen != numbers(share(samples, Source(path=Path("d"), most=30), seed=2))
    for most in (None, 100, 101):
        assert share(samples, Source(path=Path("d"), most=most), seed=1) == samples


@pytest.mark.parametrize(("weight", "each"), [(0.5, 6), (0.25, 3), (2.0, 6), (1.5, 10), (0.01, 7)])
def test_samples_of_one_weight_are_taken_equally_often(weight: float, each: int) -> None:
    """Guards against a fraction that is the same part of the data in every epoch, and against parts of other sizes."""
    weights = torch.tensor([1.0] * 3 + [weight] * 12)
    epochs = [taken_in(weights, epoch, seed=0).tolist() for epoch in range(each)]
    assert {len(epoch) for epoch in epochs} == {3 + max(round(weight * 12), 1)}
    counts = Counter(index for epoch in epochs for index in epoch)
    assert {counts[index] for index in range(3)} == {each}
    weighed = [counts[index] for index in range(3, 15)]
    assert max(weighed) - min(weighed) <= 1
    assert taken_in(weights, 1, seed=0).tolist() == epochs[1]


def test_an_epoch_takes_samples_as_often_as_they_weigh() -> None:
    """Guards the length of an epoch, and that step n depends on n and the seed alone, or a resumed run would differ."""
    samples = numbered(7) + numbered(4, 2.0, start=10) + numbered(8, 0.5, start=20)
    order = BatchSampler(samples, per_step=3, seed=4)
    seen = [number for step in range(19 * 2) for number in numbers(order.samples_of(step))]
    for start in range(0, 19 * 6, 19):
        taken = Counter(seen[start : start + 19])
        assert [taken[number] for number in range(7)] == [1] * 7
        assert [taken[number] for number in range(10, 14)] == [2] * 4
        assert sum(taken[number] for number in range(20, 28)) == 4
    assert sorted(set(seen[:38])) == sorted(numbers(samples)), "two epochs take all halves"
    assert numbers(BatchSampler(samples, per_step=3, seed=4).samples_of(17)) == seen[51:54]


def test_without_weights_the_order_is_what_it_was() -> None:
    """Guards runs that began before there were weights, and go on."""
    order = BatchSampler(numbered(7), per_step=3, seed=5)
    seen = [number for step in range(5) for number in numbers(order.samples_of(step))]
    assert seen == [1, 4, 5, 0, 6, 3, 2, 4, 1, 5, 0, 3, 6, 2, 3]


def test_a_prompt_of_two_sources_is_on_one_side(tmp_path: Path) -> None:
    """Guards the evidence: what is held out of one source must not be learnt from another, nor twice from its own."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    prompts = [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]
    write_lines(first, [{"prompt": prompt, "response": "x"} for prompt in prompts])
    write_lines(second, [{"prompt": prompt, "response": "yz"} for prompt in reversed(prompts)])
    sources = [first, Source(path=second, weight=3, most=40)]
    samples = load_samples(sources, tiny_tokenizer(), max_length=9, seed=3)
    assert [sample.weight for sample in samples] == [1] * 64 + [3] * 40
    learnt, held_out = hold_out(samples, 20)
    assert len(held_out) == 20
    assert {tuple(s.tokens[:2]) for s in learnt}.isdisjoint(tuple(s.tokens[:2]) for s in held_out)
    assert len({tuple(sample.tokens) for sample in held_out}) == 20
    assert {sample.weight for sample in held_out} == {1, 3}, "control: of both sources"


def test_data_of_weight_0_is_held_out(tmp_path: Path) -> None:
    """Guards a test set of its own: it measures, in its order, and nothing of it is learnt."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    write_lines(first, [{"prompt": "ab", "response": "x"}] * 30)
    write_lines(second, [{"prompt": prompt, "response": "yz"} for prompt in "abcdefgh"])
    samples = load_samples([first, Source(path=second, weight=0)], tiny_tokenizer(), max_length=9)
    learnt, held_out = hold_out(samples, None)
    assert learnt == samples[:30] and held_out == samples[30:]
    assert hold_out(samples, 3) == (samples[:30], samples[30:33])
    with pytest.raises(ValueError, match="held_out=9: the data with weight=0 has 8 samples"):
        hold_out(samples, 9)
    with pytest.raises(ValueError, match="weight=0 in all data leaves nothing to learn"):
        hold_out(samples[30:], None)
