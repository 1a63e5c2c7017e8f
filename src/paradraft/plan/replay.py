"""Replays recorded answers with other PPD trees, without a model: every round's guesses are known.

`best_trees` assumes that ranks are independent between depths and rounds; a replay keeps their real correlation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from paradraft.sampling.sparse_tree import Accuracy, Path, StateTree, best_guesses, rate

RANKS = 10
"""Number of guesses per depth that are counted."""
Ranks = tuple[int, ...]
"""By depth, the rank of the right guess; `RANKS` if none of the counted ones was, `UNKNOWN` after the answer's end."""
UNKNOWN = -1


def accuracy_of(answers: Sequence[Sequence[Ranks]]) -> list[list[float]]:
    """Share of rounds in which each rank was right, by depth, smoothed with one pseudo-round (1/2, 1/4, … by rank).

    >>> accuracy_of([[(0, 1), (0, 0), (10, 0), (0, -1)]])[0][:2]
    [0.7, 0.05]
    """
    ranks = [of_round for answer in answers for of_round in answer]
    if not ranks:
        raise ValueError("no answer has two tokens: nothing can be counted, raise max_new_tokens")
    expected = [0.5 ** (rank + 1) for rank in range(RANKS)]
    accuracy = []
    for depth in range(len(ranks[0])):
        known = [of_round[depth] for of_round in ranks if of_round[depth] != UNKNOWN]
        accuracy.append([(known.count(rank) + expected[rank]) / (len(known) + 1) for rank in range(RANKS)])
    return accuracy


def replayed(trees: Sequence[StateTree], answers: Sequence[Sequence[Ranks]]) -> float:
    """Tokens per pass of decoding these answers with trees, one for each state (see `sparse_tree`)."""
    paths = [{(): tree.prompts[0]} | dict(zip(tree.guesses, tree.prompts[1:], strict=True)) for tree in trees]
    tokens = passes = 0
    for answer in answers:
        at, state = 0, trees[0].prompts[0]  # the first pass has no guesses, and adds a token
        passes += 1
        tokens += 1 + len(answer)
        while at < len(answer):
            path = _deepest(answer[at], paths[state])
            at, state = at + 1 + len(path), paths[state][path]
            passes += 1
    return tokens / passes


def _deepest(ranks: Ranks, paths: Mapping[Path, int]) -> Path:
    """The longest path of right guesses in a tree."""
    path: Path = ()
    while len(path) < len(ranks) and (*path, ranks[len(path)]) in paths:
        path = (*path, ranks[len(path)])
    return path


def static_trees(accuracy: Accuracy, size: int, prompts: int, copies: int) -> list[StateTree]:
    """The best trees with the same number of prompt tokens after every guess (Fig. 8a, "static")."""
    best: tuple[float, list[StateTree]] | None = None
    for prompts_per_guess in range(1, prompts + 1):
        trees = []
        for state in range(prompts + 1):
            most = (size - copies * prompts_per_guess) // (1 + copies * prompts_per_guess)
            guesses = best_guesses(accuracy, max(most, 0), depth=state)
            trees.append(StateTree(guesses=guesses, prompts=(prompts_per_guess,) * (len(guesses) + 1)))
        if trees[0].size(copies) <= size and (best is None or rate(trees, accuracy) > best[0]):
            best = rate(trees, accuracy), trees
    assert best is not None
    return best[1]


def random_trees(size: int, prompts: int, copies: int, seed: int) -> list[StateTree]:
    """Trees of a size with random guesses and prompt tokens (Fig. 8a, "random"); about half are guesses."""
    generator, trees = random.Random(seed), []
    for state in range(prompts + 1):
        paths: list[Path] = [()]
        children: Counter[Path] = Counter()
        for _ in range(size // 2 if state else 0):
            parent = generator.choice([path for path in paths if len(path) < state])
            if children[parent] < RANKS:
                paths.append((*parent, children[parent]))
                children[parent] += 1
        counts = [0] * len(paths)
        for _ in range((size - len(paths) + 1) // copies):
            free = [node for node, count in enumerate(counts) if count < prompts]
            if free:
                counts[generator.choice(free)] += 1
        trees.append(StateTree(guesses=tuple(paths[1:]), prompts=tuple(counts)))
    return trees
