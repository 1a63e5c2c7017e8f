"""Suffix decoding: places, lengths and chances are those of a count by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from paradraft.core import Committed, Drafting, Request
from paradraft.drafters.suffix import Config, SuffixDrafter, Text, chance
from paradraft.tree import Tree

CPU = torch.device("cpu")


def texts(count: int) -> list[list[int]]:
    """Few tokens, so that they repeat."""
    chooser = random.Random(count)
    return [[chooser.randrange(3) for _ in range(chooser.randint(1, 60))] for _ in range(count)]


def common(first: list[int], second: list[int]) -> int:
    """Equal tokens at the ends of two texts."""
    length = 0
    while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
        length += 1
    return length


def test_matches_are_those_of_a_search() -> None:
    """Guards places that were read before the text grew, and lengths at the beginning of a text."""
    for whole in texts(60):
        text = Text(whole[:1])
        text.extend(whole[1:])
        found = [(at, min(common(whole[:at], whole), 8)) for at in range(len(whole) - 1, 0, -1)]
        assert text.matches(depth=8, places=5) == [(at, length) for at, length in found if length][:5]


def followers(whole: list[int], path: list[int], least: int, places: list[int]) -> Counter[int]:
    """Counts of the tokens after a path, at the places that match over `least` tokens or more."""
    at = [place for place in places if common(whole[:place], whole) >= least]
    at = [place + len(path) for place in at if whole[place : place + len(path)] == path]
    return Counter(whole[place] for place in at if place < len(whole))


@pytest.mark.parametrize("tree", [None, Tree(budget=6)])
def test_values_are_products_of_chances(tree: Tree | None) -> None:
    """Guards the estimate that orders nodes and chooses between lengths, against counts over all places."""
    branched = 0
    for whole in texts(80):
        nodes = Text(whole).draft(Config(depth=8, places=64, floor=0.05), 5, tree)
        places = [place for place in range(1, len(whole)) if whole[place - 1] == whole[-1]]
        lengths = [min(common(whole[:place], whole), 8) for place in places]
        paths: list[list[int]] = []
        for node in nodes:
            paths.append([*(paths[node.parent] if node.parent >= 0 else []), node.token])
        assert len({tuple(path) for path in paths}) == len(paths) <= (5 if tree is None else 6)
        assert [node.value for node in nodes] == sorted((node.value for node in nodes), reverse=True)

        def value(path: list[int], least: int) -> float:
            product = 1.0
            for depth in range(len(path)):
                counts = followers(whole, path[:depth], least, places)  # noqa: B023  # called at once
                votes = counts[path[depth]]
                product *= chance(least + depth, votes, counts.total()) if votes else 0.0
            return product

        own = [node.value for node in nodes]
        assert not nodes or any([value(path, least) for path in paths] == pytest.approx(own) for least in set(lengths))
        branched += len({node.parent for node in nodes}) < len(nodes)
    assert (branched > 20) == (tree is not None)


def scores(whole: list[int], k: int, config: Config) -> dict[int, float]:
    """By match length, the expected accepted tokens of the likeliest chain, counted over all places."""
    places = [place for place in range(len(whole) - 1, 0, -1) if whole[place - 1] == whole[-1]]
    found = {}
    for least in {min(common(whole[:place], whole), config.depth) for place in places}:
        path: list[int] = []
        value, found[least] = 1.0, 0.0
        while len(path) < k and (counts := followers(whole, path, least, places)):
            token, votes = counts.most_common(1)[0]
            value *= chance(least + len(path), votes, counts.total())
            if value < config.floor:
                break
            path.append(token)
            found[least] += value
    return found


@pytest.mark.parametrize("floor", [0.0, 0.4])
def test_the_length_that_expects_most_is_taken(floor: float) -> None:
    """Guards the choice between match lengths, for which any of them has right values, and the floor."""
    config, differing = Config(depth=8, places=64, floor=floor), 0
    for whole in texts(80):
        nodes, expected = Text(whole).draft(config, 5, None), scores(whole, 5, config)
        assert sum(node.value for node in nodes) == pytest.approx(max(expected.values(), default=0.0))
        assert all(node.value >= floor for node in nodes)
        differing += len({round(each, 6) for each in expected.values()}) > 1
    assert differing > 20


def test_a_floor_that_is_met_is_enough() -> None:
    """Guards the border: 5 and 6 follow 1 once each."""
    text, border = Text([1, 5, 2, 1, 6, 3, 1]), chance(1, 1, 2)
    assert len(text.draft(Config(depth=1, floor=border), 1, Tree(budget=4))) == 2
    assert not text.draft(Config(depth=1, floor=border + 1e-6), 1, Tree(budget=4))


def test_no_chance_is_above_the_share_and_more_context_is_never_worse() -> None:
    """Guards siblings whose chances must not exceed 1 together, and the bound that ends the search over lengths."""
    for of in range(1, 9):
        for votes in range(1, of + 1):
            chances = [chance(matched, votes, of) for matched in range(1, 40)]
            assert chances == sorted(chances) and max(chances) <= votes / of
            assert votes == of or chance(5, votes, of) < chance(5, votes + 1, of)
            assert chance(5, votes, votes) <= chance(5, votes + 1, votes + 1)


def test_the_default_depth_is_24_tokens() -> None:
    """Guards the default depth: the last place matches over 20 tokens, an earlier one over more."""
    before, rest = list(range(10, 14)), list(range(20, 40))
    text = Text([*before, *rest, 1, 2, 3, 0, *rest, 4, 5, 6, *before, *rest])
    assert [node.token for node in text.draft(Config(), 2, None)] == [1, 2]


@pytest.mark.parametrize("factor", [0.2, 1.0, 7.0])
def test_siblings_exclude_each_other(factor: float) -> None:
    """Guards expected tokens against factors of odds: two tokens that followed as often are not both likely."""
    text = Text([1, 2, 3, 1, 2, 4] * 8 + [1, 2])
    draft = text.draft(Config(depth=1, floor=0.0), 1, Tree(budget=4), factor=factor)
    assert {node.token for node in draft} == {3, 4} and sum(node.value for node in draft) <= 1.0
    chain = text.draft(Config(), 4, None, factor=factor)
    assert [node.value for node in chain] == sorted((node.value for node in chain), reverse=True)


def test_a_longer_match_wins_where_it_is_as_sure() -> None:
    """Guards the choice between lengths: 9 follows 1 2 3 each time, and 8 follows 3 more often."""
    text = Text([3, 8, 7, 3, 8, 6, 3, 8, 5, 1, 2, 3, 9, 4, 1, 2, 3])
    assert [node.token for node in text.draft(Config(), 4, None)] == [9, 4, 1, 2]
    assert [node.token for node in text.draft(Config(depth=1), 4, None)] == [8, 5]


def test_fixed_paths_are_ranks() -> None:
    """Guards shapes that are named by rank: at the root 5 is first with two of three, 6 second."""
    text = Text([1, 5, 2, 1, 6, 2, 1, 5, 3, 1])
    draft = text.draft(Config(depth=1), 2, Tree(paths=((0,), (1,), (1, 0))))
    assert [(node.token, node.parent) for node in draft] == [(5, -1), (6, -1), (2, 1)]
    assert [node.sure for node in draft] == [chance(1, 2, 3), chance(1, 2, 3), chance(2, 1, 1)], "of the first sibling"


def test_rows_follow_their_order() -> None:
    """Guards rows that draft nothing beside others, and the confidence that policies ask for."""
    drafter = SuffixDrafter(Config())
    drafter.start(Drafting(wants_confidence=True), CPU)
    prompts = [[1, 2, 1], [7], [4, 5, 6, 4, 5]]
    drafter.join([Request(tokens=tokens) for tokens in prompts], Committed(tokens=prompts))
    drafter.keep(torch.tensor([2, 1, 0]))
    drafter.commit(Committed(tokens=[[6], [8], [2, 1]]))
    draft = drafter.propose([3, 3, 0])
    assert draft.tokens.tolist() == [[4, 5, 6], [-1, -1, -1], [-1, -1, -1]]
    assert draft.confidence is not None
    assert draft.confidence.tolist()[0] == pytest.approx([chance(length, 1, 1) for length in (3, 4, 5)])
    assert drafter.propose([0, 0, 4]).tokens[2].tolist() == [2, 1]
    drafter.start(Drafting(tree=Tree(budget=4)), CPU)
    drafter.join([Request(tokens=tokens) for tokens in prompts], Committed(tokens=prompts))
    assert drafter.propose([0, 0, 2]).tokens.tolist() == [[-1, -1], [-1, -1], [6, 4]]


@pytest.mark.parametrize(
    ("settings", "said"), [({"depth": 0}, "depth=0: use 1 to"), ({"floor": 2.0}, "floor=2.0: use 0")]
)
def test_settings_are_checked(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config(**settings)  # type: ignore[arg-type]  # a fraction is refused too
