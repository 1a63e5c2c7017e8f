"""Where an answer ends, inside an accepted run too, and its text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.core import INVALID, Request
from paradraft.decode.generation import AnswerText, Generation, find_stop, settled, stop_strings
from paradraft.sampling_params import Sampling
from paradraft.text.tokenization import Detokenizer
from tests.support.small_tokenizers import END, byte_fallback, byte_level


def generation(limit: int, *eos: int, text: AnswerText | None = None) -> Generation:
    return Generation(Request(tokens=[1], max_new_tokens=limit, eos_ids=frozenset(eos)), text)


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
    """Guards against tokens after an end token, which are neither emitted nor counted as accepted."""
    answer = generation(10, 7, 8)
    assert answer.emit(row, len(row) - 1) == answer.tokens == emitted
    assert (answer.accepted, answer.round_ends, answer.finish_reason) == ([accepted], [len(emitted)], "eos")
    assert answer.is_finished and answer.room == 0


def test_text_ends_at_the_length_limit_inside_an_accepted_run() -> None:
    """Guards against answers of up to K tokens too many, and against counting what was cut as accepted."""
    answer = generation(5, 7)
    answer.emit([1, 2, 3], 2)
    assert not answer.is_finished and answer.room == 2
    assert answer.emit([4, 5, 6, 7], 3) == [4, 5]
    assert (answer.accepted, answer.round_ends, answer.finish_reason) == ([2, 2], [3, 5], "length")


def test_the_limit_beats_an_end_token_behind_it() -> None:
    """Guards against an end token that lies beyond the limit and is emitted all the same."""
    answer = generation(2, 7)
    assert answer.emit([1, 2, 7], 2) == [1, 2]
    assert answer.finish_reason == "length"


def test_an_end_token_at_the_limit_is_an_end() -> None:
    """Guards the reason that users see: an answer that ended by itself was not cut."""
    answer = generation(2, 7)
    assert answer.emit([1, 7], 1) == [1, 7]
    assert answer.finish_reason == "eos"


def test_an_answer_that_has_ended_takes_nothing_more() -> None:
    """Guards rows that are read on because too few have ended to leave: no token, no round is counted."""
    answer = generation(4, 7)
    answer.emit([7, 1], 1)
    assert answer.emit([1, 2, 3], 2) == []
    assert (answer.tokens, answer.accepted, answer.round_ends) == ([7], [1], [1])
    assert len(answer.delivered_s) == 1


def test_every_round_tells_when_its_tokens_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards latencies: from the request, not from the round before, and one for each round."""
    now_s = iter([10.0, 10.5, 11.25])
    monkeypatch.setattr("paradraft.decode.generation.time.perf_counter", lambda: next(now_s))
    answer = generation(5, 7)
    answer.emit([1, 2, 3], 2)
    answer.emit([4, 5, 6], 2)
    assert (answer.delivered_s, answer.round_ends) == ([0.5, 1.25], [3, 5])


def test_token_zero_is_a_token() -> None:
    """Guards against token 0 taken for padding."""
    assert generation(9).emit([0, 0, 5], 2) == [0, 0, 5]


@pytest.mark.parametrize(
    ("committed", "strings", "tokens", "reason"),
    [
        ([0, INVALID], [], [], "error"),
        ([INVALID], [], [], "error"),
        ([0, 7, INVALID], [], [0, 7], "eos"),
        ([0, 1, INVALID], ["ab"], [0, 1], "stop"),
        ([0, 1, 0, INVALID], [], [0, 1, 0], "length"),
    ],
)
def test_a_token_that_could_not_be_chosen_is_an_error(
    committed: list[int], strings: list[str], tokens: list[int], reason: str
) -> None:
    """Guards against texts of damaged models, and against an error for a place after the answer's end."""
    answer = generation(3, 7, text=answer_text(strings))
    assert answer.emit(committed, len(committed) - 1) == answer.tokens == tokens
    assert answer.finish_reason == reason
    if reason == "error":
        assert isinstance(answer.error, ValueError) and "the target's largest logit is NaN" in str(answer.error)
        assert answer.is_finished and answer.room == 0 and not answer.accepted
    else:
        assert answer.error is None


def test_the_rest_of_an_answer_is_a_request() -> None:
    """Guards requests that are taken up again: prompt, limit, seed and processors are told as for the whole."""
    asked = Request(id=3, tokens=[1, 2], sampling=Sampling(seed=5), max_new_tokens=9, eos_ids=frozenset([7]))
    answer = Generation(asked)
    assert answer.so_far is asked
    answer.emit([4, 5], 1)
    rest = answer.so_far
    assert (rest.tokens, rest.answered) == ([1, 2, 4, 5], 2)
    assert (rest.id, rest.sampling, rest.max_new_tokens, rest.eos_ids) == (3, asked.sampling, 9, asked.eos_ids)
    assert asked.tokens == [1, 2], "and the request itself stays"
    again = Generation(rest)
    again.emit([6], 0)
    assert (again.so_far.tokens, again.so_far.answered) == ([1, 2, 4, 5, 6], 3)


PIECES = ["a", "b", "ab", "ba", "aab", "\n", "", "\ufffd", ""]
"""The text of each token; some have none, or a character that stands for what is none."""


class Spelled:
    """The text of tokens each of which has its own."""

    rest = ""

    def add(self, token: int) -> str:
        return PIECES[token]

    def end(self) -> str:
        return ""


def text_of(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def answer_text(strings: list[str]) -> AnswerText:
    return AnswerText(Spelled(), stop_strings(strings, {}))


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
    answer = generation(limit, eos, text=answer_text(strings))
    found: list[int] = []
    for row in [*rounds, *[[eos]] * limit]:
        if answer.is_finished:
            break
        found += answer.emit(row, len(row) - 1)
        assert answer.round_ends[-1] == len(answer.tokens)
    assert (found, answer.finish_reason) == (expected, reason)
    assert answer.tokens == found and len(answer.pieces) == len(found)
    shown = text_of(found)
    assert "".join(answer.pieces) == shown[: find_stop(shown, tuple(strings))]


@pytest.mark.parametrize(
    ("row", "emitted", "reason"),
    [([0, 1, 0], [0, 1], "stop"), ([0, 8, 1], [0, 8], "eos"), ([1, INVALID], [1], "stop"), ([8, INVALID], [8], "eos")],
)
def test_the_reason_is_what_comes_first(row: list[int], emitted: list[int], reason: str) -> None:
    """Guards the reason that a user is told; after the end, logits need not be numbers."""
    answer = generation(9, 8, text=answer_text(["b"]))
    assert (answer.emit(row, len(row) - 1), answer.finish_reason, answer.room) == (emitted, reason, 0)
    assert answer.error is None


@pytest.mark.parametrize("strings", [None, ["b"]])
@pytest.mark.parametrize("row", [[INVALID], [0, INVALID], [0, INVALID, 1], [0, INVALID, 8]])
def test_no_token_is_made_up_where_logits_are_no_numbers(row: list[int], strings: list[str] | None) -> None:
    """Guards texts against a token that stands for none: the target's logits are at fault, and nothing has ended the
    text before them. An end token after them, which follows a draft that is as wrong, is none."""
    answer = generation(9, 8, text=strings and answer_text(strings))
    assert answer.emit(row, len(row) - 1) == answer.tokens == []
    assert answer.finish_reason == "error"
    assert str(answer.error).startswith("the target's largest logit is NaN or infinite")


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
    text, shown = answer_text(strings), ""
    for token in tokens:
        shown += text.add(token)
        assert final.startswith(shown)
    assert shown + text.end() == final
    assert text.has_stop == (number is not None)


@pytest.mark.parametrize(
    ("text", "strings", "shown"),
    [
        ("", ("ab",), ""),
        ("xay", (), "xay"),
        ("xay", ("ab",), "xay"),
        ("xa", ("ab",), "x"),
        ("xaa", ("aab",), "x"),  # as much as may be the beginning
        ("xaaa", ("aab",), "xa"),  # and no more
        ("xab", ("bcd", "abc"), "x"),
    ],
)
def test_a_text_is_shown_as_soon_as_it_is_settled(text: str, strings: tuple[str, ...], shown: str) -> None:
    """Guards streams that show nothing before the end, and those that show the beginning of a stop string."""
    assert settled(text, strings) == shown


@pytest.mark.parametrize("string", ["a\ufffd", "\ud800", chr(0xDFFF)])
def test_a_stop_string_has_whole_characters(string: str) -> None:
    """Guards against stop strings that are never found: half a character is no text."""
    with pytest.raises(ValueError, match=r"half a character \(U\+FFFD"):
        stop_strings(["x", string], {})


@pytest.mark.parametrize("string", ["\ud7ff", "\ue000", "\U0001f600"])
def test_characters_beside_the_halves_are_whole(string: str) -> None:
    """Guards stop strings of characters that come right before or after the halves, or are made of two."""
    assert stop_strings([string], {}).patterns == (string,)


@pytest.mark.parametrize("stop", [7, b"x", {"x": 1}, {"x"}, ["x", 7], [b"x"], [None], (part for part in "x")])
def test_a_stop_string_is_a_string(stop: object) -> None:
    """Guards against bytes that are read as numbers, and errors from deep inside, half way through the answers."""
    with pytest.raises(ValueError, match=r"^stop.*: use a string, or a list of strings"):
        stop_strings(stop, {})


def test_none_is_no_stop_string() -> None:
    """Guards callers who hand on what they were not given."""
    assert stop_strings(None, {}).patterns == ()


def test_one_string_is_one_stop_string() -> None:
    """Guards against a string that is taken apart: "END" would end answers at every E."""
    assert stop_strings("END", {}).patterns == ("END",)


@pytest.mark.parametrize(("stop", "named"), [(7, "stop=7: "), (["x", 8], "stop: 8 is no string")])
def test_what_is_no_stop_string_is_named(stop: object, named: str) -> None:
    """Guards a message that a user can act on."""
    with pytest.raises(ValueError, match=f"^{named}"):
        stop_strings(stop, {})


KINDS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}
DETOKENIZERS = {kind: Detokenizer(tokenizer) for kind, tokenizer in KINDS.items()}


def answered(kind: str, tokens: list[int], stop: list[str]) -> tuple[str, int | None]:
    """The text of an answer, and after how many tokens a stop string ends it."""
    detokenizer = DETOKENIZERS[kind]
    text, shown = AnswerText(detokenizer.after([]), stop_strings(stop, detokenizer.special)), ""
    for number, token in enumerate(tokens, start=1):
        shown += text.add(token)
        if text.has_stop:
            return shown + text.end(), number
    return shown + text.end(), None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stop", "text", "place"),
    [
        ([END], "cat\n", 3),
        (["\n" + END], "cat", 3),
        (["\n" + END + "\n"], "cat", 4),
        ([END + "\n" + END], "cat\n\ncat\n\n", None),
        (["\n\n"], "cat", 4),  # a special token that is not named has no text
        ([END[:-1]], "cat\n\ncat\n\n", None),  # and one is not found by a part of its name
        (["cat" + END], "cat\n\ncat\n\n", None),
        (["\ncat", END + "\ncat"], "cat\n", 5),
        (["<|im|>"], "cat\n\ncat\n", 7),
    ],
)
def test_stop_strings_may_name_special_tokens(kind: str, stop: list[str], text: str, place: int | None) -> None:
    """Guards ends of turns that are no end tokens: they have no text in the answer, and were never found."""
    tokenizer = KINDS[kind]
    line = "<0x0A>" if kind == "byte-fallback" else "Ċ"
    tokens = tokenizer.convert_tokens_to_ids(["cat", line, END, line, "cat", line, "<|im|>", line])
    assert answered(kind, tokens, stop) == (text, place)


def test_a_special_token_whose_name_contains_another_is_found() -> None:
    """Guards ends of turns with such names: the longer name is replaced first, wherever it sorts in an alphabet."""
    found = stop_strings(["a!<im>", "<im>b"], {"<im>": 100, "!<im>": 101})
    for tokens, ends in (([0, 101], True), ([0, 100], False), ([100, 1], True), ([101, 1], False)):
        text = AnswerText(Spelled(), found)
        for token in tokens:
            text.add(token)
        assert text.has_stop == ends, tokens


def test_special_tokens_are_searched_for_as_characters_that_no_text_contains() -> None:
    """Guards texts against being taken for special tokens: only halves of a character are in no text."""
    marks = stop_strings(["<a><b><c>"], {"<a>": 1, "<b>": 2, "<c>": 3}).marks
    assert sorted(marks) == [1, 2, 3] and len(set(marks.values())) == 3
    assert all("\ud800" <= mark <= "\udfff" for mark in marks.values())


def test_an_answer_ends_at_the_first_of_several_stops_in_one_token() -> None:
    """Guards long tokens: one that holds a stop string twice, or two of them, ends the text before the first."""
    assert find_stop("x--y--z", ("--",)) == 1
    assert find_stop("a--y==", ("==", "--")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_a_special_token_may_be_spelled(kind: str) -> None:
    """Guards stop strings that the model writes in ordinary tokens, as some do with an end of turn."""
    tokenizer = KINDS[kind]
    names = [f"<0x{ord(character):02X}>" if kind == "byte-fallback" else character for character in END]
    tokens = tokenizer.convert_tokens_to_ids(["cat", *names, "cat"])
    assert tokenizer.decode(tokens) == f"cat{END}cat"
    assert answered(kind, tokens, [END]) == ("cat", 1 + len(END))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_an_answer_ends_where_its_text_first_holds_a_stop_string(kind: str, data: st.DataObject) -> None:
    """Guards stop strings across tokens and characters against a search through the whole text after every token."""
    tokenizer = KINDS[kind]
    some = ["cat", "a", "Ċ", "é", "â", "Ĥ", "¬", "ï¿½"] if kind == "byte-level" else ["cat", "▁cat", "▁", "<0x0A>", "é"]
    some += [] if kind == "byte-level" else ["<0xE2>", "<0x82>", "<0xAC>", "\ufffd"]
    tokens = data.draw(st.lists(st.sampled_from(tokenizer.convert_tokens_to_ids(some)), max_size=12))
    stop = data.draw(st.lists(st.text("cat \né€", min_size=1, max_size=4), max_size=3))
    for number in range(1, len(tokens) + 1):
        text, _ = answered(kind, tokens[:number], [])
        if (place := find_stop(text, tuple(stop))) is not None:
            assert answered(kind, tokens, stop) == (text[:place], number)
            return
    assert answered(kind, tokens, stop) == (answered(kind, tokens, [])[0], None)


def test_a_stop_string_must_not_be_empty() -> None:
    """Guards against answers that end before they begin."""
    with pytest.raises(ValueError, match=r"^a stop string is empty: give at least one character$"):
        stop_strings(["a", ""], {})


def test_nothing_is_told_of_an_answer_that_has_not_begun() -> None:
    """Guards readers in other threads, and requests that would leave before their first round."""
    answer = generation(4)
    assert (answer.tokens, answer.accepted, answer.round_ends, answer.pieces, answer.stats) == ([], [], [], [], [])
    assert answer.told_rounds == 0 and answer.is_told is False and answer.is_cancelled is False
    assert answer.error is None and answer.finish_reason is None and answer.room == 4
