"""Pieces of prompts that are read along with a round: nothing changes, neither for the round nor for the prompts."""

from __future__ import annotations

import pytest
import torch

from paradraft.core import Committed, Draft, Request, TargetOut, Verdict
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.target import Target
from paradraft.probes import Probes
from paradraft.tree import ABSENT
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import requests, target_of

LAYERS = (1, FINAL_NORM)
SHORT, LONG, LAST = requests([[5, 6, 7, 8], [*range(1, 41)] * 2, [9, 8, 7, 6, 5, 4]])


def target(*, compiled: bool, dtype: torch.dtype = torch.float32, width: int = 8) -> Target:
    lm = CausalLM(tiny_model(1).to(dtype), vocab_size=VOCAB, compiled=compiled, width=width, capacity=100)
    assert lm.is_native == compiled
    lm.add_embeddings(torch.ones(2, lm.model.config.hidden_size))
    ours = target_of(lm)
    ours.start(reserved_tokens=[3], hidden_layers=LAYERS)
    ours.join(requests([[1, 2, 3], [4, 5, 6, 7]]))
    return ours


def draft_of(ours: Target, *, probes: bool) -> Draft:
    """A tree in one row, a token in the other; prompt tokens after both."""
    first = ours.lm.model.get_input_embeddings().num_embeddings
    following = Probes(
        nodes=torch.tensor([[-1, 1], [0, ABSENT]]), before=torch.tensor([[ABSENT, ABSENT], [ABSENT, ABSENT]]),
        tokens=torch.tensor([[first, first + 1], [first, ABSENT]]),
    )  # fmt: skip
    tokens, parents = torch.tensor([[4, 9, 2], [8, ABSENT, ABSENT]]), torch.tensor([[-1, 0, 0], [-1, ABSENT, ABSENT]])
    return Draft(tokens=tokens, parents=parents, probes=following if probes else None)


def read(ours: Target, draft: Draft, pieces: list[list[int]], *, along: bool) -> tuple[list[TargetOut], Committed]:
    """Rounds beside which three prompts are read, the last from the second piece on; what they gave."""
    outs = []
    ours.begin([SHORT, LONG])
    for number, counts in enumerate(pieces):
        if number == 1:
            ours.begin([LAST])
        (ours.read_along if along else ours.read)(counts)
        outs.append(ours.forward(draft))
        ours.commit(Verdict.of(draft, [[0, 2], [0]], [11, 12]), outs[-1])
    assert not any(ours.unread)
    return outs, ours.admit([2, 0, 1])


PIECES = [[2, 1], [1, 30, 0], [0, 47, 2], [0, 1, 3]]


@pytest.mark.parametrize("probes", [False, True], ids=["without prompt tokens", "with prompt tokens"])
@pytest.mark.parametrize(
    ("compiled", "dtype"),
    [(True, torch.float32), (True, torch.bfloat16), (False, torch.float64)],
    ids=["C++, float32", "C++, bfloat16", "eager, float64"],
)
def test_a_piece_that_is_read_along_changes_nothing(compiled: bool, dtype: torch.dtype, probes: bool) -> None:
    """Guards the identical text and the states that drafters read: bitwise as in a separate pass, for pieces
    that are longer than a round's pass may be, of no token, and for rounds of trees and prompt tokens."""
    ours, other = target(compiled=compiled, dtype=dtype), target(compiled=compiled, dtype=dtype)
    draft = draft_of(ours, probes=probes)
    outs, prompts = read(ours, draft, PIECES, along=True)
    expected_outs, expected = read(other, draft, PIECES, along=False)
    for out, wanted in zip(outs, expected_outs, strict=True):
        is_there = torch.nn.functional.pad(draft.tokens != ABSENT, (1, 0), value=True)
        assert torch.equal(out.logits[is_there], wanted.logits[is_there])
        assert out.hidden.keys() == wanted.hidden.keys() == set(LAYERS)
        assert all(torch.equal(out.hidden[layer], wanted.hidden[layer]) for layer in LAYERS)
        if probes:
            is_probe = draft.probes.tokens != ABSENT
            assert torch.equal(out.probes.states[is_probe], wanted.probes.states[is_probe])
    assert prompts.tokens == expected.tokens == [LAST.tokens, SHORT.tokens, LONG.tokens]
    assert all(torch.equal(prompts.hidden[layer], expected.hidden[layer]) for layer in LAYERS)
    assert ours.lm.cache.lengths == other.lm.cache.lengths
    after = [each.forward(Draft.empty(5, each.device)).logits for each in (ours, other)]
    assert torch.equal(*after)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "C++"])
def test_a_piece_is_read_in_the_pass_of_the_round(compiled: bool) -> None:
    """Guards the speed: one pass in C++; two where a pass computes the padding too, which would be most of it."""
    ours = target(compiled=compiled)
    ours.begin([SHORT, LONG])
    before = ours.lm.passes.copy()
    ours.read_along([1, 20])
    ours.forward(Draft.empty(2, ours.device))
    made = sorted((each.rows, each.tokens) for each in ours.lm.passes - before)
    assert made == ([(4, 20)] if compiled else [(2, 1), (2, 20)])
    before = ours.lm.passes.copy()
    ours.forward(Draft.empty(2, ours.device))
    assert [(each.rows, each.tokens) for each in ours.lm.passes - before] == [(2, 1)], "a piece is read once"


def test_a_prompt_that_is_given_up_leaves_the_others_as_they_are() -> None:
    """Guards the rows behind the one that leaves: their keys move up with them."""
    ours = target(compiled=True)
    asked: list[Request] = [SHORT, LONG, LAST]
    ours.begin(asked)
    ours.read_along([1, 5, 2])
    ours.forward(Draft.empty(2, ours.device))
    ours.give_up(1)
    assert ours.unread == [2, 3]
    ours.read_along([2, 3])
    ours.forward(Draft.empty(2, ours.device))
    ours.admit([0, 1])
    logits = ours.forward(Draft.empty(4, ours.device)).logits[2:, 0]
    fresh = target(compiled=True)
    fresh.join([SHORT, LAST])
    assert torch.equal(logits, fresh.forward(Draft.empty(4, fresh.device)).logits[2:, 0])
