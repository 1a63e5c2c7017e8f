from __future__ import annotations

import pytest
import torch

from paradraft.core import ABSENT, Draft, Step, Verdict
from paradraft.decode.stops import Stops


def committed(*rows: list[int], nodes: int = 4) -> tuple[Draft, Verdict]:
    """A round in which each row's tokens but the last were drafted, `nodes` of them, and accepted."""
    accepted = torch.tensor([len(row) - 1 for row in rows])
    index = torch.arange(nodes).expand(len(rows), nodes)
    path = index.masked_fill(index >= accepted[:, None], ABSENT)
    tokens = torch.tensor([row + [ABSENT] * (nodes + 1 - len(row)) for row in rows])
    draft = Draft.chain(torch.where(path == ABSENT, 9, tokens[:, :nodes]))
    return draft, Verdict(path=path, accepted=accepted, tokens=tokens)


def cut(stops: Stops, *rows: list[int]) -> Step:
    return stops.cut(*committed(*rows))


@pytest.mark.parametrize(
    ("row", "emitted", "accepted"),
    [
        ([1, 7, 2, 3], [1, 7], 2),  # the first of two end tokens, drafted, inside the accepted run
        ([8, 1, 2, 3], [8], 1),  # the second one, at the very front
        ([1, 7, 2, 8], [1, 7], 2),  # the text ends at the first of several
        ([1, 2, 8], [1, 2, 8], 2),  # the target's own token ends it
        ([8], [8], 0),
    ],
)
def test_text_ends_at_the_first_end_token(row: list[int], emitted: list[int], accepted: int) -> None:
    """Guards against tokens behind an end token, which are neither emitted nor counted as accepted."""
    stops = Stops(batch_size=1, eos_ids=frozenset([7, 8]), max_new_tokens=10)
    step = cut(stops, row)
    assert step == Step(tokens=[emitted], accepted=[accepted], drafted=[4], finished=[True])
    assert stops.all_finished and stops.room == 0


def test_text_ends_at_the_length_limit_inside_an_accepted_run() -> None:
    """Guards against answers of up to K tokens too many, and against counting what was cut as accepted."""
    stops = Stops(batch_size=1, eos_ids=frozenset([7]), max_new_tokens=5)
    assert cut(stops, [1, 2, 3]).finished == [False]
    assert stops.room == 2
    step = cut(stops, [4, 5, 6, 7])
    assert (step.tokens, step.accepted, step.finished) == ([[4, 5]], [2], [True])


def test_the_limit_beats_an_end_token_behind_it() -> None:
    """Guards against an end token that lies beyond the limit and is emitted all the same."""
    stops = Stops(batch_size=1, eos_ids=frozenset([7]), max_new_tokens=2)
    assert cut(stops, [1, 2, 7]).tokens == [[1, 2]]
    assert stops.all_finished


def test_rows_end_on_their_own() -> None:
    """Guards against a row that goes on after its end, or one that ends because another has."""
    stops = Stops(batch_size=2, eos_ids=frozenset([7]), max_new_tokens=4)
    assert cut(stops, [7, 1], [1, 2]).finished == [True, False]
    assert not stops.all_finished and stops.room == 2
    step = cut(stops, [1, 2, 3], [3, 7, 1])
    assert (step.tokens, step.accepted, step.finished) == ([[], [3, 7]], [0, 2], [True, True])


def test_a_finished_row_counts_no_drafts() -> None:
    """Guards the acceptance rate: what is drafted for a row after its end is not counted, as its tokens are not."""
    stops = Stops(batch_size=2, eos_ids=frozenset([7]), max_new_tokens=9)
    assert cut(stops, [7], [1]).drafted == [4, 4]
    assert cut(stops, [1, 2], [1]).drafted == [0, 4]


def test_absent_nodes_are_not_drafted() -> None:
    """Guards the acceptance rate of drafters whose rows propose different numbers of tokens."""
    draft, verdict = committed([1, 2], [3])
    tokens = draft.tokens.clone()
    tokens[1, 1:] = ABSENT
    stops = Stops(batch_size=2, eos_ids=frozenset(), max_new_tokens=9)
    assert stops.cut(Draft.chain(tokens), verdict).drafted == [4, 1]


def test_token_zero_is_a_token() -> None:
    """Guards against token 0 taken for padding."""
    stops = Stops(batch_size=1, eos_ids=frozenset(), max_new_tokens=9)
    assert cut(stops, [0, 0, 5]).tokens == [[0, 0, 5]]


@pytest.mark.parametrize("limit", [0, -1])
def test_at_least_one_token_is_asked_for(limit: int) -> None:
    """Guards against a loop that never runs, or drafts a negative number of tokens."""
    with pytest.raises(ValueError, match=f"max_new_tokens={limit}"):
        Stops(batch_size=1, eos_ids=frozenset(), max_new_tokens=limit)
