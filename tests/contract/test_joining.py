"""Requests that join a batch at any round, in any order, beside anything, get what they get alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from paradraft.core import Request
from paradraft.decode import prefix_cache
from paradraft.decode.generation import Generation
from paradraft.drafters import drafter_names
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling.sampler import Sampler
from tests.support.replays import replay_everything
from tests.support.schedules import NARROW, POOL, Asked, Expected, Load, check, generation, loader, plain_answers

RUNTIMES = {
    "eager, float64": Runtime(dtype="float64", compiled=False, **NARROW),
    "C++, float32": Runtime(dtype="float32", compiled=True, **NARROW),
    "C++, bfloat16": Runtime(dtype="bfloat16", compiled=True, **NARROW),
}
"""Where equality is exact."""


@pytest.fixture(scope="module", params=RUNTIMES)
def loaded(family: Path, request: pytest.FixtureRequest) -> Load:
    return loader(family, RUNTIMES[request.param])


@pytest.fixture(scope="module")
def expected(loaded: Load) -> Expected:
    """The answers of plain decoding; all targets of a runtime are the same."""
    return plain_answers(loaded("none"))


@pytest.mark.parametrize("name", drafter_names())
def test_requests_that_join_get_what_they_get_alone(loaded: Load, expected: Expected, name: str) -> None:
    """Guards the promise of the library, a drafter changes the speed and never a token, and continuous batching: 24
    schedules, of which the slow passes of the model's own code take a third."""
    engine = loaded(name)
    seeds = range(24 if engine.target.lm.is_native else 8)
    ended = sum(check(seed, expected, engine, name) for seed in seeds)
    assert ended > 2 * len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1, 11))
@pytest.mark.parametrize("name", drafter_names())
def test_more_schedules(loaded: Load, expected: Expected, name: str, block: int) -> None:
    """Guards the same in 240 more schedules."""
    for seed in range(block * 24, block * 24 + 24):
        check(seed, expected, loaded(name), name)


@pytest.mark.parametrize("name", drafter_names())
def test_the_next_turn_of_a_conversation_is_read_from_its_end(loaded: Load, name: str) -> None:
    """Guards the gain of kept rows, which no text shows, and turns of several conversations side by side."""
    drafted, plain = (
        Engine(loaded(name).target, loaded(name).drafter, Speculation(k=4, lengths="fixed"), kept_rows=2),
        loaded("none"),
    )
    talks = [[1, 2, 3, 4] * 5, [5, 4, 3] * 6]
    for turn in range(3):
        found = drafted.generate([list(talk) for talk in talks], max_new_tokens=8)
        read = sum(made.rows * made.tokens for made in drafted.target.lm.passes.elements() if not made.logits)
        assert read <= (2 * 20 if turn == 0 else 2 * 4)
        for talk, answer in zip(talks, found, strict=True):
            assert answer.tokens == plain.generate([list(talk)], max_new_tokens=8)[0].tokens
            talk += [*answer.tokens, 9, 8 + turn]


@pytest.mark.parametrize("name", [name for name in drafter_names() if name != "none"])
def test_replayed_passes_follow_rows_that_come_and_go(family: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards CUDA graphs, played on a CPU: recordings of a cache that has grown since, or of rows that have moved."""
    replay_everything(monkeypatch)
    loaded = loader(family, dataclasses.replace(RUNTIMES["eager, float64"], compiled=True))
    expected = plain_answers(loader(family, RUNTIMES["eager, float64"])("none"))
    assert loaded(name).target.lm.warm_up_rounds > 1
    for seed in range(4):
        check(seed, expected, loaded(name), name)


def test_passes_that_need_two_rows_get_them(loaded: Load, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `torch.compile`, whose pass for one row may not be there: once there are two rows, no pass has one, also
    while a single prompt is read beside others."""
    monkeypatch.setattr(CausalLM, "min_rows", 2)
    engine = loaded("pard")
    drafted = Engine(engine.target, engine.drafter, Speculation(k=3, lengths="fixed"))
    for seed in range(6):
        check(seed, expected, engine, "pard")
    passes: list[tuple[int, int]] = []
    run_pass = engine.target.lm._pass

    def watched(storage: object, lengths: list[int], *rest: torch.Tensor) -> torch.Tensor:
        passes.append((len(lengths), len(engine.target.lm.lengths)))
        return run_pass(storage, lengths, *rest)

    monkeypatch.setattr(engine.target.lm, "_pass", watched)
    batch = drafted.new_batch()
    first, second = (generation(engine, Asked((1, 2, 3), 0, 0, 30, 0), number) for number in range(2))
    batch.join([first])
    batch.step()
    batch.join([second])
    batch.step()
    batch.leave([first])
    batch.step()
    assert [rows for rows, total in passes if total > 1] and all(rows > 1 for rows, total in passes if total > 1)


class Unordered(Sampler):
    """Forgets rows, but leaves the others in their order."""

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows.sort().values)


class ForgottenAnswer(Generation):
    """Does not say which tokens are of the answer."""

    @property
    def so_far(self) -> Request:
        return dataclasses.replace(super().so_far, answered=0)


def lost_rows(lm: CausalLM, rows: torch.Tensor) -> None:
    """Orders the lengths, but moves no keys."""
    lm._storage = [tuple(part[: len(rows)] for part in layer) for layer in lm._storage]
    lm._set_lengths([lm.lengths[row] for row in rows.tolist()])


def lost_cache(lm: CausalLM, rows: int, slots: int) -> None:
    """Takes a larger cache without what the smaller one held."""
    lm._largest, lm._slots = lm._allocate(rows, slots), slots


def forgotten_piece(target: Target, rows: torch.Tensor) -> None:
    """Moves the rows that decode, but not the one that is read."""
    target.lm.keep(torch.cat([rows, torch.arange(len(rows), 1 + len(rows))[: len(target.lm.lengths) > len(rows)]]))
    target._root_B1 = target._root_B1[rows]


def skipped_token(target: Target, most: int) -> object:
    """Takes one token more for read than was."""
    tokens, prompt = read(target, most)
    if prompt is None:
        target.lm.lengths[-1] += 1
    return tokens, prompt


read = Target.read


def shared_too_long(first: list[int], second: list[int]) -> int:
    """Takes a prompt to share one token too many with a kept row."""
    return shared_length(first, second) + 1


shared_length = prefix_cache.shared_length


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        ("paradraft.decode.batch", "Sampler", Unordered),
        ("tests.support.schedules", "Generation", ForgottenAnswer),
        ("paradraft.models.causal_lm.CausalLM", "keep", lost_rows),
        ("paradraft.models.causal_lm.CausalLM", "_grow", lost_cache),
        ("paradraft.decode.batch", "shared_length", shared_too_long),
    ],
    ids=["order of settings", "answer so far", "keys that stay behind", "a cache that grows empty", "a prefix"],
)
def test_wrong_joining_is_caught(
    family: Path, module: str, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: schedules in which these mistakes are not seen would not guard joining."""
    with pytest.raises(AssertionError):
        _check_all(family, monkeypatch, f"{module}.{name}", wrong)


@pytest.mark.parametrize(("name", "wrong"), [("keep", forgotten_piece), ("read", skipped_token)])
def test_wrong_pieces_are_caught(family: Path, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: schedules in which these mistakes are not seen would not guard prompts that are read in pieces."""
    with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
        _check_all(family, monkeypatch, f"paradraft.models.target.Target.{name}", wrong)


def _check_all(family: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: object) -> None:
    """Runs the schedules of prompt lookup with a mistake."""
    engine = loader(family, RUNTIMES["eager, float64"])("ngram")
    expected = plain_answers(engine)
    for asked in POOL:
        expected(asked)
    monkeypatch.setattr(name, wrong)
    for seed in range(24):
        check(seed, expected, engine, "ngram")
