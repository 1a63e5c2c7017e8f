from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.core import ABSENT, Draft, Step, Tree, Verdict
from paradraft.decode.stops import Stops, find_stop, settled


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
    stops = Stops(limits=[10], eos_ids=frozenset([7, 8]))
    step = cut(stops, row)
    assert step == Step(rows=[0], tokens=[emitted], accepted=[accepted], drafted=[4], nodes=[4], finished=[True])
    assert stops.all_finished and stops.room == 0


def test_text_ends_at_the_length_limit_inside_an_accepted_run() -> None:
    """Guards against answers of up to K tokens too many, and against counting what was cut as accepted."""
    stops = Stops(limits=[5], eos_ids=frozenset([7]))
    assert cut(stops, [1, 2, 3]).finished == [False]
    assert stops.room == 2
    step = cut(stops, [4, 5, 6, 7])
    assert (step.tokens, step.accepted, step.finished) == ([[4, 5]], [2], [True])


def test_the_limit_beats_an_end_token_behind_it() -> None:
    """Guards against an end token that lies beyond the limit and is emitted all the same."""
    stops = Stops(limits=[2], eos_ids=frozenset([7]))
    assert cut(stops, [1, 2, 7]).tokens == [[1, 2]]
    assert stops.all_finished


def test_rows_end_on_their_own() -> None:
    """Guards against a row that goes on after its end, or one that ends because another has."""
    stops = Stops(limits=[4] * 2, eos_ids=frozenset([7]))
    assert cut(stops, [7, 1], [1, 2]).finished == [True, False]
    assert not stops.all_finished and stops.room == 2
    step = cut(stops, [1, 2, 3], [3, 7, 1])
    assert (step.tokens, step.accepted, step.finished) == ([[], [3, 7]], [0, 2], [True, True])


def test_a_finished_row_counts_no_drafts() -> None:
    """Guards the acceptance rate: what is drafted for a row after its end is not counted, as its tokens are not."""
    stops = Stops(limits=[9] * 2, eos_ids=frozenset([7]))
    assert cut(stops, [7], [1]).drafted == [4, 4]
    assert cut(stops, [1, 2], [1]).drafted == [0, 4]


def test_absent_nodes_are_not_drafted() -> None:
    """Guards the acceptance rate of drafters whose rows propose different numbers of tokens."""
    draft, verdict = committed([1, 2], [3])
    tokens = draft.tokens.clone()
    tokens[1, 1:] = ABSENT
    stops = Stops(limits=[9] * 2, eos_ids=frozenset())
    assert stops.cut(Draft.chain(tokens), verdict).drafted == [4, 1]


def test_token_zero_is_a_token() -> None:
    """Guards against token 0 taken for padding."""
    stops = Stops(limits=[9], eos_ids=frozenset())
    assert cut(stops, [0, 0, 5]).tokens == [[0, 0, 5]]


@pytest.mark.parametrize("limit", [0, -1])
def test_at_least_one_token_is_asked_for(limit: int) -> None:
    """Guards against a loop that never runs, or drafts a negative number of tokens."""
    with pytest.raises(ValueError, match=f"max_new_tokens={limit}"):
        Stops(limits=[limit], eos_ids=frozenset())


PIECES = ["a", "b", "ab", "ba", "aab", "\n", "", "\ufffd", ""]
"""The text of each token; some have none, or half a character."""


def text_of(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def ends(tokens: list[int], strings: tuple[str, ...], eos: int, limit: int) -> tuple[list[int], str]:
    """The emitted tokens and the reason, one token after the other."""
    for number in range(1, len(tokens) + 1):
        if find_stop(text_of(tokens[:number]), strings) is not None:
            return tokens[:number], "stop"
        if tokens[number - 1] == eos:
            return tokens[:number], "eos"
        if number == limit:
            return tokens[:number], "length"
    raise AssertionError("more tokens than the limit are needed")


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.integers(6, 8),
    st.integers(1, 30),
)
@settings(deadline=None, max_examples=300)
def test_any_cut_into_rounds_ends_where_single_tokens_do(
    rounds: list[list[int]], strings: list[str], eos: int, limit: int
) -> None:
    """Guards stop strings across tokens and rounds, and the order of stop, end token and limit inside a run."""
    tokens = [token for row in rounds for token in row]
    expected, reason = ends(tokens + [eos] * limit, tuple(strings), eos, limit)
    stops = Stops(limits=[limit], eos_ids=frozenset([eos]), strings=tuple(strings), text_of=text_of)
    found: list[int] = []
    for row in [*rounds, *[[eos]] * limit]:
        if stops.all_finished:
            break
        path = torch.arange(len(row) - 1)[None]
        verdict = Verdict(path=path, accepted=torch.tensor([len(row) - 1]), tokens=torch.tensor([row]))
        found += stops.cut(Draft.chain(torch.tensor([row[:-1]], dtype=torch.long)), verdict).tokens[0]
    assert (found, stops.reasons[0]) == (expected, reason)


@given(st.lists(st.integers(0, 7), max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
@settings(deadline=None, max_examples=300)
def test_what_is_settled_is_never_taken_back(tokens: list[int], strings: list[str]) -> None:
    """Guards streams: what was shown at any time is the beginning of the final text."""
    number = next(
        (n for n in range(len(tokens)) if find_stop(text_of(tokens[: n + 1]), tuple(strings)) is not None), None
    )
    tokens = tokens if number is None else tokens[: number + 1]
    final = text_of(tokens)
    final = final[: find_stop(final, tuple(strings))]
    for shown in range(len(tokens)):
        assert final.startswith(settled(text_of(tokens[:shown]), tuple(strings)))


def test_a_stop_string_has_whole_characters() -> None:
    """Guards losslessness: half a character is there after one token and gone after the next, so where a text ends
    would depend on how many tokens a round has."""
    with pytest.raises(ValueError, match=r"U\+FFFD"):
        Stops(limits=[1], eos_ids=frozenset(), strings=("a\ufffd",), text_of=text_of)


def test_a_draft_is_no_deeper_than_some_row_has_room_for() -> None:
    """Guards draft passes that are thrown away; a grown tree keeps its shape, but for rows of one token."""
    stops = Stops(limits=[3, 5], eos_ids=frozenset())
    assert [stops.worth(k, None) for k in (1, 4, 9)] == [1, 4, 4]
    assert stops.worth(9, Tree(paths=((0,),))) == 4
    assert stops.worth(9, Tree(budget=7)) == 9
    assert Stops(limits=[1], eos_ids=frozenset()).worth(9, Tree(budget=7)) == 0
    draft = stops.limit(Draft.chain(torch.arange(18).view(2, 9)))
    assert (draft.tokens != ABSENT).sum(1).tolist() == [2, 4]


def test_a_stop_string_must_not_be_empty() -> None:
    """Guards against answers that end before they begin."""
    with pytest.raises(ValueError, match="stop string is empty"):
        Stops(limits=[1], eos_ids=frozenset(), strings=("a", ""), text_of=text_of)


def test_rows_leave_once_a_quarter_has_ended() -> None:
    """Guards throughput (rows that ended cost time) and the numbering of the rows that stay."""
    stops = Stops(limits=[1, 9, 9, 2, 9, 9, 9, 9], eos_ids=frozenset())
    draft = Draft.empty(8, torch.device("cpu"))

    def round_of(number: int) -> Step:
        tokens = torch.arange(number)[:, None]
        nothing = torch.empty(number, 0, dtype=torch.long)
        return stops.cut(
            Draft.empty(number, draft.tokens.device),
            Verdict(path=nothing, accepted=torch.zeros(number, dtype=torch.long), tokens=tokens),
        )

    assert round_of(8).finished.count(True) == 1
    assert stops.leave() is None
    assert round_of(8).tokens[0] == []
    rows = stops.leave()
    assert rows is not None and rows.tolist() == [1, 2, 4, 5, 6, 7]
    assert round_of(6).rows == [1, 2, 4, 5, 6, 7]


def test_as_many_rows_stay_as_must() -> None:
    """Guards compiled passes, which exist for one row or for several."""
    stops = Stops(limits=[1, 9, 1], eos_ids=frozenset())
    draft, verdict = committed([1], [1], [1])
    stops.cut(draft, verdict)
    rows = stops.leave(at_least=2)
    assert rows is not None and rows.tolist() == [1, 2]
