"""Dynamic sparse trees: number and position of guesses and prompt tokens in a pass (Chen et al. 2024, PPD, section 4).

The target reads guesses, and after some of them *prompt tokens*, in one pass. The outputs of i prompt tokens after the
last accepted guess predict the next i tokens, so the next tree is at most i deep: decoding is then in *state* i. In
state 0 there are no guesses, and the pass reads only the last committed token and prompt tokens.

Guesses pay at once, prompt tokens in the next round. The tree of a state maximises its immediate yield plus the value
of the next state. The value of a state depends on all trees, so they are recomputed until none changes.

The supplied text of the paper has lost the formulas of its propositions. With a_d(r) the probability that the guess of
rank r is right at depth d, if all before it are right:

- 4.1: f(T) = 1 + sum over guesses of the product of a over their path; the 1 is the target's own token.
- 4.2: F(T) = f(T) + sum over states i of P(i | T) v(i), P the probability that the last accepted guess has i prompt
  tokens. The last committed token counts as an accepted guess. In the paper v(i) is f of the tree of state i: only the
  next round. Here it is the relative value of the state over all future rounds (Howard 1960), of which f is the first
  approximation; F with it is larger exactly where the rate R is.
- 4.3: without its i-th prompt token, a guess loses P(it is the last accepted) (v(i) - v(i - 1)).
- 4.4: R = sum over states of pi(i) f(T_i), pi the steady state.

The index of a state is a number of prompt tokens; probabilities multiply along a path, which assumes that ranks at
different depths are independent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from paradraft.sampling.candidates import best_first

Path = tuple[int, ...]
Accuracy = Sequence[Sequence[float]]
"""By depth, from the first token after the last committed one, the probability of each rank."""
ROUNDS = 20
"""Most iterations; a few are enough."""


def is_accuracy(value: object, depths: int = 1) -> TypeGuard[list[list[float]]]:
    """Whether a value is an `Accuracy` with at least this many depths."""
    return (
        isinstance(value, list)
        and len(value) >= depths
        and all(isinstance(row, list) and row for row in value)
        and all(type(share) in (int, float) and 0 <= share <= 1 for row in value for share in row)
    )


@dataclass(frozen=True, kw_only=True)
class StateTree:
    """The tree of a state.

    Args:
        guesses: the path of ranks to each guess; parents come before their children.
        prompts: number of prompt tokens after the last committed token, then after each guess.
    """

    guesses: tuple[Path, ...]
    prompts: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.guesses) + 1

    def size(self, copies: int = 1) -> int:
        """Nodes of a pass, without the last committed token; each prompt token counts `copies` times."""
        return len(self.guesses) + copies * sum(self.prompts)


def reach(guesses: Sequence[Path], accuracy: Accuracy) -> list[float]:
    """The probability that each guess is accepted.

    >>> reach([(0,), (0, 1)], [[0.6, 0.2], [0.5, 0.25]])
    [0.6, 0.15]
    """
    return [math.prod(accuracy[depth][rank] for depth, rank in enumerate(path)) for path in guesses]


def expected_tokens(guesses: Sequence[Path], accuracy: Accuracy) -> float:
    """f, Proposition 4.1.

    >>> expected_tokens([(0,), (0, 1)], [[0.6, 0.2], [0.5, 0.25]])
    1.75
    """
    return 1.0 + sum(reach(guesses, accuracy))


def last_accepted(guesses: Sequence[Path], accuracy: Accuracy) -> list[float]:
    """The probability of being the last accepted token: of the last committed token, then of each guess.

    >>> last_accepted([(0,), (0, 1)], [[0.5, 0.2], [0.5, 0.25]])
    [0.5, 0.375, 0.125]
    """
    reached = dict(zip(guesses, reach(guesses, accuracy), strict=True))
    last = {(): 1.0} | reached
    for path, probability in reached.items():
        last[path[:-1]] -= probability
    return list(last.values())


def transitions(tree: StateTree, accuracy: Accuracy, states: int) -> list[float]:
    """P(i | T) for each state i."""
    probabilities = [0.0] * states
    for probability, prompts in zip(last_accepted(tree.guesses, accuracy), tree.prompts, strict=True):
        probabilities[prompts] += probability
    return probabilities


def steady_state(rows: Sequence[Sequence[float]]) -> list[float]:
    """The steady state from state 0; `rows` are the transition probabilities of each state.

    >>> [round(share, 6) for share in steady_state([[0.0, 1.0], [0.5, 0.5]])]
    [0.333333, 0.666667]
    """
    once = torch.tensor(rows, dtype=torch.float64, device="cpu")
    lazy = (once + torch.eye(len(rows), dtype=torch.float64, device="cpu")) / 2  # the same steady state, but aperiodic
    return torch.linalg.matrix_power(lazy, 2**24)[0].tolist()


def rate(trees: Sequence[StateTree], accuracy: Accuracy) -> float:
    """R, Proposition 4.4: long-run tokens per pass, with one tree per state."""
    shares = steady_state([transitions(tree, accuracy, len(trees)) for tree in trees])
    return sum(share * expected_tokens(tree.guesses, accuracy) for share, tree in zip(shares, trees, strict=True))


def relative_values(trees: Sequence[StateTree], accuracy: Accuracy) -> list[float]:
    """Relative values v: the long-run advantage of each state over state 0, in tokens."""
    states = len(trees)
    once = [expected_tokens(tree.guesses, accuracy) for tree in trees]
    # v(i) + R = f(i) + sum P(j | i) v(j), with v(0) = 0: R replaces v(0) as an unknown.
    equations = torch.eye(states, dtype=torch.float64, device="cpu")
    equations -= torch.tensor(
        [transitions(tree, accuracy, states) for tree in trees], dtype=torch.float64, device="cpu"
    )
    equations[:, 0] = 1.0
    solution = torch.linalg.lstsq(equations, torch.tensor(once, dtype=torch.float64, device="cpu")[:, None]).solution
    return [0.0, *solution[1:, 0].tolist()]


def with_prompts(guesses: Sequence[Path], count: int, accuracy: Accuracy, values: Sequence[float]) -> StateTree:
    """Places `count` prompt tokens in all: starts with the maximum, then removes the least valuable (Proposition 4.3).

    `values` are v, by state.

    >>> tree = with_prompts([(0,)], 3, [[0.9], [0.5]], [0.0, 0.7, 1.0])
    >>> tree.prompts
    (1, 2)
    """
    last = last_accepted(guesses, accuracy)
    prompts = [len(values) - 1] * len(last)

    def loss(node: int) -> float:
        return last[node] * (values[prompts[node]] - values[prompts[node] - 1])

    heap = [(loss(node), -node) for node in range(len(last)) if prompts[node]]
    heapq.heapify(heap)
    for _ in range(sum(prompts) - count):
        node = -heapq.heappop(heap)[1]
        prompts[node] -= 1
        if prompts[node]:
            heapq.heappush(heap, (loss(node), -node))
    return StateTree(guesses=tuple(guesses), prompts=tuple(prompts))


def best_guesses(accuracy: Accuracy, most: int, *, depth: int) -> tuple[Path, ...]:
    """The likeliest guesses, at most `most`, in order, with paths of at most `depth`.

    >>> best_guesses([[0.6, 0.2], [0.5, 0.25]], 3, depth=2)
    ((0,), (0, 0), (1,))
    """
    log_accuracy = [[math.log(max(share, 1e-9)) for share in ranks] for ranks in accuracy[:depth]]
    return tuple(best_first(log_accuracy, most, aside=1.0))


def best_trees(accuracy: Accuracy, size: int, *, prompts: int, copies: int = 1) -> list[StateTree]:
    """The trees of the states 0 to `prompts` that maximise the long-run tokens per pass.

    Args:
        accuracy: of at least `prompts` depths.
        size: most nodes of a pass, at least `copies`.
        prompts: most prompt tokens after a guess.

    >>> trees = best_trees([[0.6, 0.15], [0.4, 0.1]], 5, prompts=2)
    >>> for tree in trees:
    ...     print(tree.guesses, tree.prompts)
    () (2,)
    ((0,), (1,)) (1, 1, 1)
    ((0,), (0, 0)) (1, 1, 1)
    """
    assert size >= copies and prompts <= len(accuracy)
    likeliest = [best_guesses(accuracy, size, depth=state) for state in range(prompts + 1)]

    def choose(state: int, values: Sequence[float]) -> StateTree:
        best: tuple[float, StateTree] | None = None
        for guesses in range(min(len(likeliest[state]), size) + 1):
            kept = likeliest[state][:guesses]
            tree = with_prompts(kept, (size - guesses) // copies, accuracy, values)
            after = transitions(tree, accuracy, prompts + 1)
            worth = expected_tokens(kept, accuracy) + sum(map(math.prod, zip(after, values, strict=True)))
            if best is None or worth > best[0] + 1e-12:
                best = worth, tree
        assert best is not None
        return best[1]

    values = [expected_tokens(guesses, accuracy) for guesses in likeliest]
    trees = [choose(state, values) for state in range(prompts + 1)]
    best_rate = rate(trees, accuracy)
    for _ in range(ROUNDS):
        values = relative_values(trees, accuracy)
        new_trees = [choose(state, values) for state in range(prompts + 1)]
        if (new_rate := rate(new_trees, accuracy)) <= best_rate + 1e-12:
            break
        trees, best_rate = new_trees, new_rate
    return trees
