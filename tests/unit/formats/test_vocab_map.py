from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paradraft.formats.vocab_map import VocabMap


def stored_tensors(ids: list[int], vocabulary: int) -> tuple[Tensor, Tensor]:
    """As speculators and SpecForge write them, in their own words: `d2t[i] = used[i] - i`, `t2d[id] = id in used`."""
    d2t = torch.tensor([token - row for row, token in enumerate(ids)])
    return d2t, torch.tensor([token in ids for token in range(vocabulary)])


def test_offsets_become_ids() -> None:
    """Guards the meaning of `d2t`: offsets, and not ids; with all ids it is zeros."""
    for ids in ([1, 2, 5, 7], [0], list(range(8))):
        d2t, t2d = stored_tensors(ids, 8)
        for given in (t2d, None):
            found = VocabMap.stored(d2t, given, rows=len(ids), vocabulary=8, name="draft")
            assert found.to_target.tolist() == ids
    assert VocabMap.stored(d2t.int(), None, rows=8, vocabulary=8, name="draft").to_target.dtype == torch.long


@pytest.mark.parametrize(
    ("d2t", "t2d", "problem"),
    [
        ([0, 0], None, r"d2t is torch.int64 of the shape \(2,\): it needs an integer for each of the 3 rows"),
        ([0.0, 0.0, 0.0], None, "d2t is torch.float32 of the shape"),
        ([True, False, False], None, "d2t is torch.bool of the shape"),
        ([0, 0, 4], None, "d2t names the token 6, and its embedding has 6 rows"),
        ([-1, 0, 0], None, "d2t names the token -1, and its embedding has 6 rows"),
        ([1, 0, 0], None, "d2t gives the rows 0 and 1 of the output head the tokens 1 and 1: they must increase"),
        ([0, 3, 1], None, "d2t gives the rows 1 and 2 of the output head the tokens 4 and 3: they must increase"),
        ([0, 1, 1], [1, 0, 0, 1, 0, 1], "d2t and t2d disagree about the token 2"),
        ([0, 1, 1], [1, 0, 1, 1, 0, 1], "d2t and t2d disagree about the token 5"),
    ],
)
def test_a_damaged_map_is_refused(d2t: list[int], t2d: list[int] | None, problem: str) -> None:
    """Guards against drafts of other tokens than the head means, which are slow and not wrong, so that no text shows
    them."""
    flags = None if t2d is None else torch.tensor(t2d, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"^draft 'name': {problem}"):
        VocabMap.stored(torch.tensor(d2t), flags, rows=3, vocabulary=6, name="name")


def test_logits_go_to_their_ids() -> None:
    """Guards the shape, the -inf of all other ids, and padding: ids that the target does not have are left out."""
    found = VocabMap(to_target=torch.tensor([1, 3, 6])).below(5, torch.device("cpu"))
    logits = torch.arange(12.0, dtype=torch.float64).view(2, 2, 3)
    spread = found.spread(logits, 5)
    assert spread.dtype == logits.dtype
    assert torch.equal(spread[..., [1, 3]], logits[..., :2])
    assert bool((spread[..., [0, 2, 4]] == -torch.inf).all())


def naive_choice(counts: list[int], size: int, always: list[int]) -> list[int]:
    """The ids by their definition, one after the other."""
    kept = set(always)
    while len(kept) < size:
        kept.add(min((token for token in range(len(counts)) if token not in kept), key=lambda t: (-counts[t], t)))
    return sorted(kept)


def check_choices(of_counts: Callable[..., VocabMap]) -> None:
    """Compares choices with their definition, with many ties and zeros, and what is stored with what is read."""
    generator = random.Random(5)
    for _ in range(300):
        vocabulary = generator.randint(1, 12)
        counts = [generator.randint(0, generator.choice([0, 1, 3, 9])) for _ in range(vocabulary)]
        size = generator.randint(1, vocabulary)
        always = generator.sample(range(vocabulary), generator.randint(0, size))
        found = of_counts(torch.tensor(counts), size=size, always=always)
        assert found.to_target.tolist() == naive_choice(counts, size, always), (counts, size, always)
        d2t, t2d = found.d2t(), found.t2d(vocabulary)
        wanted = stored_tensors(found.to_target.tolist(), vocabulary)
        assert d2t.dtype == torch.long and torch.equal(d2t, wanted[0]) and torch.equal(t2d, wanted[1])
        again = VocabMap.stored(d2t, t2d, rows=size, vocabulary=vocabulary, name="draft")
        assert torch.equal(again.to_target, found.to_target)


def test_the_most_frequent_ids_are_chosen() -> None:
    """Guards ties, filling, ids that are always kept, the order by id, and the way to the file and back."""
    check_choices(VocabMap.of_counts)


def without_order(counts_V: Tensor, *, size: int, always: list[int]) -> VocabMap:
    """Rows by frequency, and not by id."""
    others = [token for token in counts_V.argsort(descending=True, stable=True).tolist() if token not in always]
    return VocabMap(to_target=torch.tensor([*always, *others][:size]))


def without_always(counts_V: Tensor, *, size: int, always: list[int]) -> VocabMap:
    """Ids that are always kept only where they are frequent."""
    return VocabMap.of_counts(counts_V, size=size)


def with_last_ids(counts_V: Tensor, *, size: int, always: list[int]) -> VocabMap:
    """Of equally frequent ids the higher."""
    flipped = VocabMap.of_counts(counts_V.flip(0), size=size, always=[len(counts_V) - 1 - token for token in always])
    return VocabMap(to_target=(len(counts_V) - 1 - flipped.to_target).flip(0))


@pytest.mark.parametrize("fault", [without_order, without_always, with_last_ids])
def test_a_wrong_choice_is_caught(fault: Callable[..., VocabMap]) -> None:
    """Control of the test above."""
    with pytest.raises((AssertionError, ValueError)):
        check_choices(fault)


@pytest.mark.parametrize(
    ("size", "always", "problem"),
    [
        (0, [], "size=0: use 1 to 4 tokens$"),
        (5, [], "size=5: use 1 to 4 tokens$"),
        (1, [0, 3, 3], r"size=1: use 2 to 4 tokens \(2 are always kept\)$"),
        (2, [4], "token 4 is to be kept, and the vocabulary has 4$"),
        (2, [-1], "token -1 is to be kept, and the vocabulary has 4$"),
    ],
)
def test_an_impossible_size_is_refused(size: int, always: list[int], problem: str) -> None:
    """Guards against a map that silently lacks an end token, or ids that a model cannot read."""
    with pytest.raises(ValueError, match=problem):
        VocabMap.of_counts(torch.zeros(4, dtype=torch.long), size=size, always=always)
