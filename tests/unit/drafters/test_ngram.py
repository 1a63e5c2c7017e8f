from __future__ import annotations

import itertools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.drafters.ngram import Config, NgramDrafter, lookup, matched
from paradraft.drafters.parts.match_chance import chain_chances
from paradraft.tree import ABSENT
from tests.support.decoding import committed, requests, started


def naive(text: list[int], k: int, max_ngram: int) -> list[int]:
    """All earlier places that end in a suffix of the text; the longest suffix wins, then the latest place."""
    places = [
        (size, end)
        for size in range(1, max_ngram + 1)
        for end in range(size, len(text))
        if text[end - size : end] == text[len(text) - size :]
    ]
    if not places:
        return []
    _, end = max(places)
    return text[end : end + k]


@given(st.lists(st.integers(0, 2), max_size=14), st.integers(0, 5), st.integers(1, 4))
@settings(deadline=None, max_examples=300)
def test_lookup_equals_naive(text: list[int], k: int, max_ngram: int) -> None:
    """Guards against a suffix that finds itself, a short match before a long one, or an old place before a new."""
    end = lookup(text, max_ngram)
    assert text[end : end + k] == naive(text, k, max_ngram)
    sizes = [size for size in range(len(text)) if size <= end and text[end - size : end] == text[len(text) - size :]]
    assert end == len(text) or matched(text, end) == max(sizes)


def test_rows_without_a_match_are_absent() -> None:
    """Guards against token 0 in place of a missing draft, and against a commit that forgets its tokens."""
    drafter = NgramDrafter(Config(max_ngram=2))
    started(drafter, [[5, 6, 7, 5], [1, 2]])
    assert drafter.propose([3, 3]).tokens.tolist() == [[6, 7, 5], [ABSENT] * 3]
    assert drafter.propose([0, 0]).tokens.shape == (2, 0)
    drafter.commit(committed([6, 7, 9], [1]))
    assert drafter.propose([2, 2]).tokens.tolist() == [[ABSENT] * 2, [2, 1]]


def test_values_rise_with_the_match_and_fall_with_the_depth() -> None:
    """Guards cuts: a match of ten tokens is worth more than one of two, whatever `max_ngram` is."""
    drafter, repeated = NgramDrafter(Config(max_ngram=2)), list(range(10))
    started(drafter, [[*repeated, 50, 51, 60, *repeated], [99, 8, 9, 50, 51, 8, 9], [1, 2]])
    values = drafter.propose([2, 2, 2]).values
    chances = [chain_chances(2, 10), chain_chances(2, 2), ()]
    assert values == [list(itertools.accumulate(each, operator.mul)) for each in chances]
    assert values[0][0] > values[0][1] > values[1][0]


def test_rows_come_and_go() -> None:
    """Guards texts of rows that join later or move, and the prompts themselves, which are not the drafter's."""
    drafter = NgramDrafter(Config(max_ngram=2))
    started(drafter, [[5, 6, 7, 5], [1, 2]])
    asked = requests([[3, 4, 3]])
    drafter.join(asked, committed([3, 4, 3]))
    drafter.commit(committed([6], [1], [4]))
    drafter.keep(torch.tensor([2, 0]))
    assert drafter.propose([2, 2]).tokens.tolist() == [[3, 4], [7, 5]]
    assert asked[0].tokens == [3, 4, 3]


def test_max_ngram_is_at_least_one() -> None:
    """Guards against a drafter that silently never finds anything."""
    with pytest.raises(ValueError, match="max_ngram=0"):
        Config(max_ngram=0)
