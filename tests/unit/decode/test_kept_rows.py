"""What a batch keeps of requests that have ended, and what a prompt that begins like one of them is given of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paradraft.core import Request
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.prefix_cache import CachedRow, shared_length
from paradraft.drafters.none import NoDrafter
from paradraft.models.cached_rows import SavedRow
from paradraft.models.causal_lm import CausalLM
from paradraft.models.target import Target
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.support.decoding import requests


class SeenTarget(Target):
    """Remembers what rows begin with, and reads all."""

    def begin(self, requests: Sequence[Request], begun: Sequence[tuple[SavedRow, int] | None] = ()) -> None:
        self.begun = begun
        super().begin(requests)


class SeenDrafter(NoDrafter):
    """Remembers what rows begin with; what it saves is named after the row."""

    def __init__(self) -> None:
        super().__init__()
        self.restored: list[tuple[int, Any, int]] = []

    def save(self, row: int, most: int) -> Any:
        return f"row {row}, {most} tokens"

    def restore(self, row: int, saved: Any, shared: int) -> None:
        self.restored.append((row, saved, shared))


def batch_of(kept_rows: int, drafter: NoDrafter | None = None) -> Batch:
    target = SeenTarget(CausalLM(tiny_model(1), vocab_size=VOCAB, compiled=False), tiny_tokenizer())
    return Batch(target, drafter or SeenDrafter(), lengths=Fixed(0), kept_rows=kept_rows)


def asked(*prompts: list[int], limits: int | list[int] = 3) -> list[Generation]:
    return list(map(Generation, requests(prompts, limits=limits)))


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [([1, 2, 3], [1, 2, 4, 5], 2), ([1], [2], 0), ([], [2], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2)],
)
def test_texts_share_what_is_the_same_from_the_first_token_on(first: list[int], second: list[int], shared: int) -> None:
    """Guards against a prompt that goes on with the cache of another text."""
    assert shared_length(first, second) == shared


def test_the_rows_of_requests_that_have_ended_are_kept() -> None:
    """Guards the next turn of a conversation, also where the batch goes on: prompt and answer are kept, from the row
    that the request has then; what leaves before its end, or has failed, is not."""
    batch, prompts = batch_of(9), ([5, 6], [1, 2, 3], [7], [9], [8, 8])
    generations = asked(*prompts, limits=[9, 1, 9, 9, 2])
    batch.join(generations)
    batch.step()
    assert batch.generations == generations, "one of five is too few to leave"
    _, ended, cancelled, failed, moved = generations
    batch.leave([cancelled])
    failed.fail(ValueError("broken"))
    batch.step()
    assert batch.generations == generations[:1]
    assert [kept.tokens for kept in batch._prefix_cache._rows] == [[1, 2, 3, *ended.tokens], [8, 8, *moved.tokens]]
    # A row that stayed after its end has read more since; the last token of one that just ended is not read yet.
    assert [kept.target.length for kept in batch._prefix_cache._rows] == [4, 3]
    assert [kept.drafter for kept in batch._prefix_cache._rows] == ["row 1, 4 tokens", "row 2, 4 tokens"]


def test_no_more_rows_are_kept_than_asked_for() -> None:
    """Guards memory: the last requests to end are kept, and none by default."""
    for number in (0, 1, 2):
        batch = batch_of(number)
        for prompt in ([1, 2], [3, 4], [5, 6]):
            assert list(run(batch, asked(prompt)))
        assert [kept.tokens[:2] for kept in batch._prefix_cache._rows] == [[1, 2], [3, 4], [5, 6]][3 - number :]


def test_a_prompt_begins_with_the_kept_row_that_has_the_most_of_it() -> None:
    """Guards the time that reading takes, and both models: they are given their own caches, of the same request, for
    the right row, and how much of it is the same."""
    batch = batch_of(4)
    saved = [SavedRow(length=number, storage=[]) for number in range(4)]
    texts = [1, 2, 9], [1, 2, 3, 4], [1, 2, 3, 8], [7]
    for tokens, target in zip(texts, saved, strict=True):
        batch._prefix_cache.add(CachedRow(tokens=tokens, target=target, drafter=target.length))
    batch.join(asked([6, 6]))
    assert batch.target.begun == [None] and batch.drafter.restored == []
    batch.join(asked([5], [1, 2, 3, 5], [7, 1]))
    assert batch.target.begun == [None, (saved[1], 3), (saved[3], 1)]
    assert batch.drafter.restored == [(2, 1, 3), (3, 3, 1)]
