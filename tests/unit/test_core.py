from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction

import numpy
import pytest
import torch

from paradraft.core import Committed, Draft, Drafter, Request
from paradraft.drafters.parts.text_drafter import TextDrafter
from paradraft.parents import is_chain
from paradraft.probes import Probes
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT
from tests.support.decoding import committed, requests, started


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("inf")), ("temperature", float("nan")), ("temperature", 1e39),
        ("top_k", -1), ("top_p", 0.0), ("top_p", 1.01), ("top_p", float("nan")),
        ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0), ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e-7), ("repetition_penalty", 1e7),
        ("presence_penalty", float("nan")), ("frequency_penalty", float("inf")), ("presence_penalty", 20000.0),
        ("top_k", 1.5), ("seed", 0.5),
        ("seed", 2**63), ("seed", -(2**63) - 1),
    ],
)  # fmt: skip
def test_sampling_rejects_what_it_cannot_mean(field: str, value: float) -> None:
    """Guards against nonsense settings that would silently sample something else; the message names them."""
    with pytest.raises(ValueError, match=re.escape(f"{field}={value}")):
        Sampling(**{field: value})


@pytest.mark.parametrize("bias", [{-1: 1.0}, {3: float("inf")}, {3: float("nan")}, {3: 1e39}])
def test_a_bias_names_a_token_and_a_number(bias: dict[int, float]) -> None:
    """Guards against a bias that makes a token certain, or logits that are no numbers."""
    with pytest.raises(ValueError, match="logit_bias"):
        Sampling(logit_bias=bias)


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in NUMBERS for value in ("0.7", None, True, [0.5], 10**400)),
        *((name, value) for name in ("top_k", "seed") for value in ("7", None, True, 2.0, [1])),
    ],
)
def test_settings_are_numbers(field: str, value: object) -> None:
    """Guards against a TypeError from deep inside, and against True read as 1; the message names the setting."""
    with pytest.raises(ValueError, match=re.escape(f"{field}=")) as caught:
        Sampling(**{field: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 120


def test_numbers_of_numpy_are_numbers() -> None:
    """Guards equal settings: they are the numbers of Python afterwards, however they came."""
    found = Sampling(temperature=numpy.float32(0.5), top_k=numpy.int64(5), seed=numpy.uint8(3), top_p=Fraction(1, 2))
    assert found == Sampling(temperature=0.5, top_k=5, seed=3, top_p=0.5)
    types = [type(value) for value in (found.temperature, found.top_p, found.top_k, found.seed)]
    assert types == [float, float, int, int]
    assert Sampling(logit_bias={numpy.int32(3): numpy.float32(1)}).logit_bias == ((3, 1.0),)


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({"50256": -100}, "logit_bias: '50256': -100: use token ids"),
        ({3.0: 1.0}, "logit_bias: 3.0: 1.0: use token ids"),
        ({True: 1.0}, "logit_bias: True: 1.0: use token ids"),
        ({3: None}, "logit_bias: 3: None: use token ids"),
        ({3: "1"}, "logit_bias: 3: '1': use token ids"),
        (None, "logit_bias=None: use token ids"),
        (5, "logit_bias=5: use token ids"),
        ("ab", "logit_bias='ab': use token ids"),
        ([5, 6], r"logit_bias=[5, 6]: use token ids"),
        (((3, 1.0), (3, 2.0)), "logit_bias: token 3 has two biases"),
    ],
)
def test_a_bias_has_the_right_types(bias: object, named: str) -> None:
    """Guards against OpenAI's string keys, which would bias nothing, and against the last of two biases winning."""
    with pytest.raises(ValueError, match="^" + re.escape(named)):
        Sampling(logit_bias=bias)


@pytest.mark.parametrize("processors", [len, None, "ab", [None], [len, 3], {"a": len}, (one for one in [len])])
def test_processors_are_a_list_of_functions(processors: object) -> None:
    """Guards against a processor that is given as it is, and one that can only be called once the model answers."""
    with pytest.raises(ValueError, match=r"^processors.*use a list of functions"):
        Sampling(processors=processors)


def test_equal_settings_are_equal() -> None:
    """Guards batches: rows of equal settings are computed together, however these were written."""
    assert Sampling(logit_bias={2: 1.0, 1: 0.5}) == Sampling(logit_bias=((1, 0.5), (2, 1.0)))
    assert len({Sampling(processors=[]), Sampling(logit_bias={})}) == 1


def test_sampling_accepts_the_edges() -> None:
    """Guards against limits that are off by one."""
    assert Sampling(temperature=1e6).temperature == 1e6
    assert Sampling(temperature=0.0).is_greedy and not Sampling(temperature=1e-6).is_greedy
    assert Sampling(top_k=0, top_p=1.0, seed=2**63 - 1).seed == 2**63 - 1
    assert Sampling(seed=-(2**63), top_p=1e-9).seed == -(2**63)


def test_a_request_has_a_prompt() -> None:
    """Guards against answers to nothing: there is no last token after which to decode. Token 0 is a real one; a
    request that is resumed has tokens of its own before those of its answer."""
    assert Request(tokens=[0]).tokens == [0]
    with pytest.raises(AssertionError):
        Request(tokens=[])
    assert Request(tokens=[1, 2, 3], answered=2).answered == 2
    for answered in (-1, 3, 4):
        with pytest.raises(AssertionError):
            Request(tokens=[1, 2, 3], answered=answered)


@pytest.mark.parametrize("limit", [0, -1])
def test_at_least_one_token_is_asked_for(limit: int) -> None:
    """Guards against a loop that never runs, or drafts a negative number of tokens."""
    with pytest.raises(ValueError, match=f"max_new_tokens={limit}"):
        Request(tokens=[1], max_new_tokens=limit)


def test_committed_states_are_those_of_the_tokens() -> None:
    """Guards the seam to drafters that read states: one for each token, of each row."""
    tokens = [[1, 1], [1, 1, 1]]
    Committed(tokens=tokens, hidden={4: torch.zeros(2, 3, 8)})
    for hidden in (torch.zeros(2, 2, 8), torch.zeros(1, 3, 8)):
        with pytest.raises(AssertionError):
            Committed(tokens=tokens, hidden={4: hidden})


def test_the_first_nodes_are_a_draft() -> None:
    """Guards cuts by value: rows of different lengths, the confidence of what is left, and chains, whose passes need no
    mask."""
    draft = Draft.of_lists(
        [[5, 6, 7], [8]], [[-1, 0, -1], [-1]], confidence=torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.0, 0.0]]),
        values=[[0.9, 0.5, 0.2], [0.6]],
    )  # fmt: skip
    first = draft.first([2, 0])
    assert first.lists == ([[5, 6], [ABSENT, ABSENT]], [[-1, 0], [-1, 0]])
    assert first.tokens.tolist(), first.parents.tolist() == first.lists
    assert is_chain(first.parents) and not is_chain(draft.parents)
    assert first.values == [[0.9, 0.5], []] and first.confidence is not None
    assert torch.equal(first.confidence, torch.tensor([[0.9, 0.8], [0.6, 0.0]]))
    assert draft.first([3, 1]).lists == draft.lists
    nothing = draft.first([0, 0])
    assert nothing is Draft.empty(2, torch.device("cpu")) and nothing.tokens.shape == (2, 0)


@pytest.mark.parametrize("more", ["probs", "probes"])
def test_only_nodes_alone_are_cut(more: str) -> None:
    """Guards distributions and prompt tokens, which would be those of other nodes."""
    found = {
        "probs": torch.ones(1, 2, 10) / 10,
        "probes": Probes(nodes=torch.tensor([[0]]), before=torch.tensor([[-1]]), tokens=torch.tensor([[90]])),
    }
    chain = Draft.chain(torch.tensor([[5, 6]]))
    with pytest.raises(AssertionError):
        dataclasses.replace(chain, **{more: found[more]}).first([1])


class Lengths(TextDrafter):
    """Drafts how long the text is."""

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        return Draft.chain(torch.tensor([[len(text)] for text in self.texts]))


def test_drafters_of_texts_follow_them() -> None:
    """Guards drafters that look at the tokens alone: texts of rows that join, leave and move, and of another batch."""
    drafter = Lengths()
    for _ in range(2):
        started(drafter, [[1, 2], [3]])
        drafter.commit(committed([4], [5, 6, 7]))
        drafter.join(requests([[0] * 7]), committed([0] * 7))
        assert drafter.propose([1] * 3).tokens.tolist() == [[3], [4], [7]]
        drafter.keep(torch.tensor([2, 1]))
        drafter.commit(committed([4], [5]))
        assert drafter.texts == [[0] * 7 + [4], [3, 5, 6, 7, 5]]


def test_a_drafter_is_what_it_overrides() -> None:
    """Guards drafters of an article's length: one that only proposes has no rows to keep, and says nothing else."""
    drafter = Drafter()
    started(drafter, [[1]])
    drafter.commit(committed([2]))
    drafter.keep(torch.tensor([0]))
    assert (drafter.hidden_layers, drafter.traits.branching, drafter.traits.can_run_ahead, drafter.reserved_tokens) == (
        (), "chain", False, (),
    )  # fmt: skip
    assert (drafter.tree, drafter.traits.needs_drawn) == (None, False)
    with pytest.raises(NotImplementedError):
        drafter.propose([1])


def test_empty_draft_is_a_chain_of_nothing() -> None:
    """Guards the rounds with K = 0: their draft has no nodes but still one row per prompt."""
    draft = Draft.empty(3, torch.device("cpu"))
    assert draft.tokens.shape == draft.parents.shape == (3, 0)
    assert draft.tokens.dtype == torch.long
