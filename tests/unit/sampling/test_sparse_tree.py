"""The propositions of PPD, against all that there is on small trees."""

from __future__ import annotations

import itertools
import random

import pytest

from paradraft.sampling.sparse_tree import (
    Path,
    StateTree,
    best_trees,
    expected_tokens,
    last_accepted,
    rate,
    reach,
    relative_values,
    steady_state,
    transitions,
    with_prompts,
)

TABLES = [
    [[0.6, 0.15], [0.4, 0.1]],
    [[0.9, 0.05], [0.8, 0.1]],
    [[0.3, 0.25], [0.1, 0.1]],
    [[0.5, 0.2], [0.6, 0.3]],
]


def all_guesses(depth: int, ranks: int, most: int) -> list[tuple[Path, ...]]:
    """All trees of at most `most` guesses: every set of paths that has the parents of all its paths."""
    paths = [path for length in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=length)]
    return [
        chosen
        for number in range(most + 1)
        for chosen in itertools.combinations(paths, number)
        if all(path[:-1] in ((), *chosen) for path in chosen)
    ]


def all_trees(state: int, size: int, *, prompts: int, ranks: int = 2) -> list[StateTree]:
    return [
        StateTree(guesses=guesses, prompts=placed)
        for guesses in all_guesses(state, ranks, size)
        for placed in itertools.product(range(prompts + 1), repeat=len(guesses) + 1)
        if len(guesses) + sum(placed) <= size
    ]


@pytest.mark.parametrize("accuracy", TABLES)
def test_expected_tokens_are_those_of_random_rounds(accuracy: list[list[float]]) -> None:
    """Proposition 4.1 and who is the last accepted, against rounds in which the right rank of each depth is drawn.
    False alarms: the bounds are 5 standard deviations."""
    guesses: list[Path] = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    generator, rounds = random.Random(1), 40_000
    length, last = 0, dict.fromkeys([(), *guesses], 0)
    for _ in range(rounds):
        right: list[int] = []
        for ranks in accuracy:
            drawn = generator.random()
            right.append(next((rank for rank in (0, 1) if drawn < sum(ranks[: rank + 1])), 9))
        path = max((path for path in last if list(path) == right[: len(path)]), key=len)
        last[path] += 1
        length += 1 + len(path)
    assert abs(length / rounds - expected_tokens(guesses, accuracy)) < 5 * 0.8 / rounds**0.5
    for path, share in zip(last, last_accepted(guesses, accuracy), strict=True):
        assert abs(last[path] / rounds - share) < 5 * 0.5 / rounds**0.5
    assert sum(last_accepted(guesses, accuracy)) == pytest.approx(1)


@pytest.mark.parametrize("accuracy", TABLES)
def test_a_removed_prompt_token_costs_what_the_proposition_says(accuracy: list[list[float]]) -> None:
    """Proposition 4.3 against Proposition 4.2 before and after."""
    guesses, values = ((0,), (0, 0), (1,)), [0.0, 0.8, 1.1]
    last = last_accepted(guesses, accuracy)

    def worth(prompts: tuple[int, ...]) -> float:
        after = transitions(StateTree(guesses=guesses, prompts=prompts), accuracy, 3)
        return expected_tokens(guesses, accuracy) + sum(p * v for p, v in zip(after, values, strict=True))

    for node, number in itertools.product(range(4), (1, 2)):
        before = tuple(number if place == node else 2 for place in range(4))
        removed = tuple(number - 1 if place == node else 2 for place in range(4))
        assert worth(before) - worth(removed) == pytest.approx(last[node] * (values[number] - values[number - 1]))


@pytest.mark.parametrize("accuracy", TABLES)
@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 8])
def test_no_other_placing_of_prompt_tokens_is_better(accuracy: list[list[float]], number: int) -> None:
    """Guards the greedy removal: worth with values of which each is a smaller step than the one before."""
    guesses, values = ((0,), (0, 0), (1,)), [0.0, 0.8, 1.1]

    def worth(prompts: tuple[int, ...]) -> float:
        after = transitions(StateTree(guesses=guesses, prompts=prompts), accuracy, 3)
        return sum(p * v for p, v in zip(after, values, strict=True))

    found = with_prompts(guesses, number, accuracy, values)
    assert sum(found.prompts) == number
    placings = (placed for placed in itertools.product(range(3), repeat=4) if sum(placed) == number)
    assert worth(found.prompts) == pytest.approx(max(map(worth, placings)))


@pytest.mark.parametrize("accuracy", TABLES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_other_trees_yield_more(accuracy: list[list[float]], size: int) -> None:
    """Proposition 4.4 over all trees of two states that there are (prompts = 1), and over the best of three for each
    (prompts = 2): guards splits that are not tried, and trees that are good for the next round alone."""
    trees = best_trees(accuracy, size, prompts=1)
    every = itertools.product(*(all_trees(state, size, prompts=1) for state in range(2)))
    assert rate(trees, accuracy) == pytest.approx(max(rate(each, accuracy) for each in every), abs=1e-9)
    assert all(tree.size() <= size for tree in trees)
    if size <= 3:
        trees = best_trees(accuracy, size, prompts=2)
        # Of trees with the same next states, the one that yields most; the others cannot be better.
        few = []
        for state in range(3):
            best: dict[tuple[float, ...], StateTree] = {}
            for tree in all_trees(state, size, prompts=2):
                key = tuple(round(share, 9) for share in transitions(tree, accuracy, 3))
                kept = best.setdefault(key, tree)
                if expected_tokens(tree.guesses, accuracy) > expected_tokens(kept.guesses, accuracy):
                    best[key] = tree
            few.append(list(best.values()))
        most = max(rate(each, accuracy) for each in itertools.product(*few))
        assert rate(trees, accuracy) == pytest.approx(most, abs=1e-9)


def test_a_rate_is_that_of_rounds_one_after_the_other() -> None:
    """Guards steady states: rounds are drawn one after the other, from state 0 on. Bound: 5 standard deviations."""
    accuracy = TABLES[0]
    trees = best_trees(accuracy, 6, prompts=2)
    generator, state, tokens, rounds = random.Random(2), 0, 0, 40_000
    for _ in range(rounds):
        tree = trees[state]
        drawn = generator.choices(range(len(tree.prompts)), last_accepted(tree.guesses, accuracy))[0]
        tokens += 1 + (len(tree.guesses[drawn - 1]) if drawn else 0)
        state = tree.prompts[drawn]
    assert abs(tokens / rounds - rate(trees, accuracy)) < 5 * 1.0 / rounds**0.5


def test_values_satisfy_their_equations() -> None:
    """v(i) + R = f(i) + sum P(j | i) v(j)."""
    accuracy = TABLES[3]
    trees = best_trees(accuracy, 5, prompts=2)
    values, mean = relative_values(trees, accuracy), rate(trees, accuracy)
    assert values[0] == 0 and values[1] > 0
    for state, tree in enumerate(trees):
        after = sum(p * v for p, v in zip(transitions(tree, accuracy, 3), values, strict=True))
        assert values[state] + mean == pytest.approx(expected_tokens(tree.guesses, accuracy) + after)


def test_steady_states_of_chains_with_a_period_and_with_states_that_are_left() -> None:
    assert steady_state([[0.0, 1.0], [1.0, 0.0]]) == pytest.approx([0.5, 0.5])
    assert steady_state([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.5, 0.5]]) == pytest.approx([0, 1 / 3, 2 / 3])


@pytest.mark.parametrize("copies", [1, 3])
def test_sizes(copies: int) -> None:
    """Guards passes with more nodes than there is room for; larger trees never yield less."""
    accuracy = [[0.5 * 0.6**depth * 0.4**rank for rank in range(10)] for depth in range(4)]
    before = 0.0
    for size in range(copies, 60):
        trees = best_trees(accuracy, size, prompts=4, copies=copies)
        assert len(trees) == 5 and all(tree.size(copies) <= size for tree in trees)
        assert all(max(map(len, tree.guesses), default=0) <= state for state, tree in enumerate(trees))
        assert all(path[:-1] in ((), *tree.guesses[:at]) for tree in trees for at, path in enumerate(tree.guesses))
        found = rate(trees, accuracy)
        assert found >= before - 1e-9
        before = found
    assert before > 1.8
    assert reach([(0, 1)], accuracy) == pytest.approx([0.5 * 0.3 * 0.4])
