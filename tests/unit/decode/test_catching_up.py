"""A draft model that reads a long prompt in pieces, so that the streams beside it do not wait for the whole."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from paradraft.core import Request
from paradraft.decode.batch import Batch
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.models.causal_lm import CausalLM
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import target_of

SHORT, LONG = [5, 6, 7], [7, 9, 11, 13, 8] * 6
PIECE = 8


class Always(Fixed):
    """Always drafts, but times could decide otherwise."""

    runs_plain = True


def model(seed: int) -> CausalLM:
    return CausalLM(tiny_model(seed, layers=1), vocab_size=VOCAB, compiled=False, width=8)


@pytest.fixture
def batch() -> Batch:
    batch = Batch(target_of(model(1)), AutoregressiveDrafter(model(2)), lengths=Always(3))
    batch.prefill.pace = SimpleNamespace(most=lambda rows: PIECE, add=lambda rows, tokens, *, seconds: None)
    return batch


def joined(batch: Batch, prompt: list[int], limit: int, *, is_watched: bool) -> Generation:
    generation = Generation(
        Request(id=len(batch.generations), tokens=prompt, max_new_tokens=limit, eos_ids=frozenset())
    )
    generation.is_watched = is_watched
    batch.join([generation])
    return generation


def read(batch: Batch) -> Iterator[int]:
    """Tokens that the draft model has of the last row, after each round."""
    while not batch.is_finished:
        batch.step()
        yield batch.drafter.lm.cache.lengths[-1] if batch.generations else 0


@pytest.mark.parametrize(
    ("others", "is_watched", "first"),
    [([True], False, [8, 16, 24]), ([False], True, [8, 16, 24]), ([False], False, [30]), ([], True, [30])],
)
def test_a_long_prompt_is_read_in_pieces_beside_a_stream(
    batch: Batch, others: list[bool], first: list[int], *, is_watched: bool
) -> None:
    """Guards the streams beside a long prompt; and the drafts of a request without streams beside it, which begin at
    once."""
    for other in others:
        joined(batch, SHORT, 30, is_watched=other)
        batch.step()
    joined(batch, LONG, 20, is_watched=is_watched)
    lengths = list(read(batch))
    assert [*lengths[: len(first) - 1], min(lengths[len(first) - 1], len(LONG))] == first


def test_texts_are_the_same(batch: Batch) -> None:
    alone = []
    for prompt in (SHORT, LONG):
        generation = joined(batch, prompt, 30, is_watched=False)
        while not batch.is_finished:
            batch.step()
        alone.append(generation.tokens)
    both = [joined(batch, prompt, 30, is_watched=True) for prompt in (SHORT, LONG)]
    while not batch.is_finished:
        batch.step()
    assert [generation.tokens for generation in both] == alone
