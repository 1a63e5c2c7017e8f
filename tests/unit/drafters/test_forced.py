"""The forced drafter asks the processors of each row, with its answer so far, and is never the reason for an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import paradraft
from paradraft.core import Committed, Drafting, Request
from paradraft.drafters import drafter_class
from paradraft.drafters.forced import LAST, SURE, ForcedDrafter, chances
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.sampling_params import ForcingProcessor, Sampling
from paradraft.serve.grammar import Grammars
from paradraft.tree import Tree
from tests.support.decoding import CPU, committed

V = 64
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 5},
        "is_student": {"type": "boolean"},
        "grade": {"enum": ["excellent", "sufficient"]},
    },
    "required": ["full_name", "is_student", "grade"],
    "additionalProperties": False,
}


class Masking:
    """A processor that cannot say what it forces."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Counting(Masking):
    """Forces a row of numbers, and notes what it is asked."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.asked: list[tuple[list[int], int]] = []

    def forced(self, answer: list[int], most: int, /) -> Any:
        self.asked.append((answer, most))
        return [self.begin + len(answer) + number for number in range(most)]


class Faulty(Masking):
    """Raises, or returns what it should not."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def forced(self, answer: list[int], most: int, /) -> Any:
        if isinstance(self.returned, Exception):
            raise self.returned
        return self.returned


def joined(*requests: Request) -> ForcedDrafter:
    drafter = ForcedDrafter(V)
    drafter.start(Drafting(), CPU)
    drafter.join(requests, Committed(tokens=[request.tokens for request in requests]))
    return drafter


def drafted_by(*processors: Any, k: int = 3) -> list[int]:
    draft = joined(Request(tokens=[1], sampling=Sampling(processors=processors))).propose([k])
    return draft.tokens[0].tolist()


def test_rows_ask_their_own_processors_for_their_answers() -> None:
    """Guards rows that come, go and change places, beside rows without a grammar, and answers begun before."""
    first, second, third = Counting(10), Counting(20), Counting(30)
    drafter = joined(
        Request(tokens=[5, 6], sampling=Sampling(processors=[first])),
        Request(tokens=[7]),
        Request(tokens=[8, 9, 40, 41], answered=2, sampling=Sampling(processors=[second])),
    )
    assert drafter.propose([2, 2, 3]).tokens.tolist() == [[10, 11, -1], [-1, -1, -1], [22, 23, 24]]
    assert (first.asked, second.asked) == ([([], 2)], [([40, 41], 3)])
    drafter.commit(committed([10], [1], [22, 50]))
    drafter.keep(torch.tensor([2, 0]))
    drafter.join([Request(tokens=[3], sampling=Sampling(processors=[third]))], committed([3]))
    assert drafter.propose([1, 2, 0]).tokens.tolist() == [[24, -1], [11, 12], [-1, -1]]
    assert (first.asked[1:], second.asked[1:], third.asked) == ([([10], 2)], [([40, 41, 22, 50], 1)], [])
    drafter.start(Drafting(), CPU)
    drafter.join([Request(tokens=[3], sampling=Sampling(processors=[third]))], committed([3]))
    assert drafter.propose([2]).tokens.tolist() == [[30, 31]]


def test_the_first_processor_that_forces_something_is_taken() -> None:
    """Guards requests with several processors, of which most know nothing."""
    assert drafted_by(Masking()) == [] and not isinstance(Masking(), ForcingProcessor)
    assert drafted_by(Masking(), Faulty([]), Counting(10), Counting(20)) == [10, 11, 12]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [([5, 6, 7, 8, 9], [5, 6, 7]), ([5, V, 6], [5]), ([-2, 5], []), ([5, 6], [5, 6])],
    ids=["more than asked", "unknown id", "negative", "fewer"],
)
def test_drafts_have_only_ids_of_the_target(returned: list[int], expected: list[int]) -> None:
    """Guards passes of the target, which has no row for other ids, and rows without room for more."""
    assert drafted_by(Faulty(returned)) == expected


def test_a_short_chain_ends_in_a_guess() -> None:
    """Guards cuts: the last forced token is a guess, unless the chain is as long as it was asked to be."""
    assert chances(3, 3) == [SURE] * 3 and chances(2, 3) == [SURE, SURE * LAST] and chances(0, 3) == []
    short = Request(tokens=[1], sampling=Sampling(processors=(Faulty([7]),)))
    draft = joined(short).propose([4])
    assert draft.tokens.tolist() == [[7]] and draft.values == [[SURE * LAST]]
    assert joined(Request(tokens=[1])).propose([4]).values == [[]]


@pytest.mark.parametrize("returned", [KeyError("x"), None, ["a"], 5])
def test_errors_of_a_processor_are_warnings(returned: object) -> None:
    """Guards answers that are decoded well without drafts."""
    with pytest.warns(UserWarning, match=r"Faulty.forced: (Key|Type)Error, so nothing is drafted"):
        assert drafted_by(Faulty(returned)) == []


def test_what_it_cannot_do_is_refused() -> None:
    """Guards settings of other drafters: it drafts chains after verified tokens, and under every rule."""
    with pytest.raises(ValueError, match="'forced' cannot draft ahead"):
        Speculation(drafter="forced", gamma=4).check_models("pocket")
    with pytest.raises(ValueError, match="leave the tree out"):
        Speculation(drafter="forced", tree=Tree(budget=8)).check_models("pocket")
    assert drafter_class("forced").traits.needs_grammar
    assert not drafter_class("forced+ngram").traits.needs_grammar


@pytest.fixture(scope="module")
def plain() -> Engine:
    return paradraft.load("pocket")


@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("name", ["forced", "forced+ngram"])
def test_the_text_is_that_of_plain_decoding(plain: Engine, name: str, is_compact: bool) -> None:
    """Guards losslessness where nearly all drafts are right, beside rows without a grammar; and that they are right."""
    drafted = paradraft.load("pocket", drafter=name, k=6, lengths="fixed")
    grammars = Grammars(plain.target.facts)
    prompts = [plain.prompt_tokens(text) for text in ("person = ", "import os", "# JSON\n")]
    has_grammar = [True, False, True]

    def samplings(temperature: float) -> list[Sampling]:
        matcher = grammars.matcher(PERSON, is_compact=is_compact)
        made = [grammars.grammar(matcher, prompt=len(prompt), is_compact=is_compact) for prompt in prompts]
        processors = [[each] if has else [] for each, has in zip(made, has_grammar, strict=True)]
        return [Sampling(temperature=temperature, seed=4, processors=each) for each in processors]

    for temperature in (0.0, 0.8):
        wanted = plain.generate(prompts, max_new_tokens=60, sampling=samplings(temperature))
        found = drafted.generate(prompts, max_new_tokens=60, sampling=samplings(temperature))
        assert [each.tokens for each in found] == [each.tokens for each in wanted]
        for answer in (found[0], found[2]):
            assert set(json.loads(answer.text)) == {"full_name", "is_student", "grade"}
            assert sum(answer.accepted) >= 6 + 6 * is_compact, "next to nothing was forced"
        assert name != "forced" or sum(found[1].accepted) == 0
