"""Which rows leave a batch, and when."""

from __future__ import annotations

import pytest
import torch

from paradraft.decode.batch import Batch, run
from paradraft.decode.compaction import rows_without, should_compact
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.drafters.none import NoDrafter
from paradraft.models.causal_lm import CausalLM
from paradraft.traits import Traits
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import CPU, decoded, requests, target_of


class Part:
    """Remembers which rows stayed; stands in for all that has rows."""

    device, wants_confidence, traits, k = CPU, False, Traits(), 1

    def __init__(self, *, fewest_rows: int = 1) -> None:
        self.fewest_rows = fewest_rows
        self.kept: list[list[int]] = []

    def keep(self, rows: torch.Tensor) -> None:
        self.kept.append(rows.tolist())


def batch_of(rows: int, *, fewest_rows: int = 1) -> tuple[Batch, list[Part]]:
    """A batch that is never decoded, and its parts."""
    parts = [Part(fewest_rows=fewest_rows) for _ in range(4)]
    target, drafter, lengths, sampler = parts
    batch = Batch(target, drafter, lengths=lengths)
    batch.sampler = sampler
    batch.generations = list(map(Generation, requests([[1]] * rows, limits=9)))
    return batch, parts


def plain_batch(**settings: bool) -> Batch:
    lm = CausalLM(tiny_model(1, layers=1), vocab_size=VOCAB, compiled=False)
    return Batch(target_of(lm), NoDrafter(), lengths=Fixed(0), **settings)


@pytest.mark.parametrize(
    ("ended", "batch", "is_enough"),
    [(0, 1, False), (0, 4, False), (1, 2, True), (1, 4, True), (1, 5, False), (2, 8, True), (3, 16, False)],
)
def test_rows_leave_from_a_quarter_of_the_batch_on(ended: int, batch: int, is_enough: bool) -> None:
    """Guards throughput: rows that ended cost time in every pass, and moving the others costs some once."""
    assert should_compact(ended, batch) == is_enough
    outputs = decoded(plain_batch(), requests([[1]] * batch, limits=[1] * ended + [3] * (batch - ended)))
    staying = sorted(outputs[1].requests)
    assert staying == (list(range(ended, batch)) if is_enough else list(range(batch)))


def test_rows_leave_once_a_quarter_has_ended() -> None:
    """Guards throughput (rows that ended cost time) and the names of the rows that stay: the last ones fill the holes,
    and all others stay where they are."""
    batch = plain_batch()
    outputs = decoded(batch, requests([[1]] * 8, limits=[1, 9, 9, 2, 9, 9, 9, 9]))
    assert outputs[0].finished.count(True) == 1
    assert outputs[1].requests == list(range(8)) and outputs[1].tokens[0] == []
    assert outputs[2].requests == [7, 1, 2, 6, 4, 5]


def test_all_parts_of_a_batch_keep_the_same_rows() -> None:
    """Guards a cache, a drafter, a sampler and lengths that speak of different rows."""
    batch, parts = batch_of(5)
    first, second, third, fourth, fifth = batch.generations
    batch.leave([second, fifth])
    assert batch.generations == [first, fourth, third]
    assert [part.kept for part in parts] == [[[0, 3, 2]]] * 4


def test_nobody_leaves_a_batch_that_is_over() -> None:
    """Guards against a batch of no rows: it is cleared instead, and no part moves any."""
    batch, parts = batch_of(3)
    batch.leave(list(batch.generations))
    assert batch.generations == [] and not any(part.kept for part in parts)
    batch, parts = batch_of(3)
    batch.leave([])
    batch.leave([Generation(generation.request) for generation in batch.generations])
    assert len(batch.generations) == 3 and not any(part.kept for part in parts), "others are not in it"


def test_as_many_rows_stay_as_must() -> None:
    """Guards compiled passes, which exist for one row or for several."""
    batch, _ = batch_of(3, fewest_rows=2)
    first, second, third = batch.generations
    batch.leave([first, third])
    assert second in batch.generations and len(batch.generations) == 2
    batch.leave([second, third])
    assert batch.generations == [], "all may leave"


def test_requests_that_have_ended_may_stay() -> None:
    """Guards `paradraft plan`, which measures the rounds of a batch of constant size."""
    outputs = decoded(plain_batch(keeps_finished=True), requests([[1]] * 4, limits=[1, 1, 1, 4]))
    assert [output.requests for output in outputs] == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("rows", range(1, 7))
def test_few_rows_are_moved(rows: int) -> None:
    """Guards the time that moving takes, against all sets of holes: only the last rows move, into holes, and each row
    that stays is there once."""
    for number in range(2**rows - 1):
        holes = [row for row in range(rows) if number >> row & 1]
        found = rows_without(holes, rows)
        assert sorted(found) == [row for row in range(rows) if row not in holes]
        moved = [place for place, row in enumerate(found) if place != row]
        assert set(moved) <= set(holes) and all(found[place] >= len(found) for place in moved)


def test_an_error_leaves_nobody_behind() -> None:
    """Guards a batch that is used again after an answer that failed."""
    batch = plain_batch()
    generations = list(map(Generation, requests([[1], [2]], limits=9)))
    emit = batch.emit

    def failing(*arguments: object) -> object:
        output = emit(*arguments)
        generations[1].fail(ValueError("broken"))
        return output

    batch.emit = failing
    with pytest.raises(ValueError, match="broken"):
        list(run(batch, generations))
    assert batch.generations == []
