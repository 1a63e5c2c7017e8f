"""Requests that join a batch at any round, in any order, beside anything, get what they get alone.

A schedule is a number: its generator says who joins before which round, who is cancelled or taken up again, and what
each asks for. So a failure names what to run again.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.core import Request
from paradraft.decode import prefix_cache
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import AnswerText, Generation, stop_strings
from paradraft.decode.lengths.draft_length import POLICIES
from paradraft.drafters import branches, drafter_class
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.cached_rows import CachedRows
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.text.tokenization import Detokenizer
from paradraft.tree import Tree
from tests.contract.test_random_configurations import never_twice
from tests.support.drafts import DRAFTERS, draft_of
from tests.support.quick import mostly_slow
from tests.support.replays import replay_everything

RUNTIMES = {
    "eager, float64": Runtime(dtype="float64", compiled=False, capacity=100, width=24),
    "C++, float32": Runtime(dtype="float32", compiled=True, capacity=100, width=24),
    "C++, bfloat16": Runtime(dtype="bfloat16", compiled=True, capacity=100, width=24),
}
"""Where equality is exact."""
SHAPES: dict[str, Tree | None] = {
    "chain": None,
    "grown": Tree(budget=9),
    "fixed": Tree(paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0))),
}
QUICK = {"eager, float64": ["chain"], "C++, float32": ["fixed"], "C++, bfloat16": ["chain", "grown"]}
"""What `make test` tries, of every drafter; `make test-long` tries every shape in every arithmetic."""
CASES = [(name, shape) for name in DRAFTERS for shape in SHAPES if shape == "chain" or branches(name)]
RUNTIMES_AND_CASES = [(runtime, name, shape) for runtime in RUNTIMES for name, shape in CASES]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.8, top_k=20, seed=2),
    Sampling(presence_penalty=1.0),
    Sampling(temperature=0.8, frequency_penalty=0.5, processors=[never_twice], seed=-3),
    Sampling(processors=[never_twice]),
]
STOPS: list[list[str]] = [[], [], ["a", "bc"], ["Z"]]
Load = Callable[..., Engine]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What one request asks for, and where its answer is looked up."""

    prompt: tuple[int, ...]
    sampling: int
    seed: int
    limit: int
    stop: int


def random_requests(number: int) -> list[Asked]:
    """What is asked for; some prompts begin as others do."""
    chooser, found = random.Random(number), list[Asked]()
    for _ in range(number):
        begin = chooser.choice(found).prompt if found and chooser.random() < 0.4 else ()
        more = chooser.choice([1, 2, 5, 14, 30])
        asked = Asked(
            # Few tokens, so that prompt lookup finds something.
            prompt=(begin[: chooser.randint(0, len(begin))] + tuple(chooser.choices(range(1, 6), k=more)))[:40],
            sampling=chooser.randrange(len(SAMPLINGS)),
            seed=chooser.randrange(-(2**63), 2**63),
            limit=chooser.choice([1, 2, 3, 6, 12, 20]),
            stop=chooser.randrange(len(STOPS)),
        )
        found.append(asked)
    return found


POOL = random_requests(20)


@pytest.fixture(scope="module", params=mostly_slow(RUNTIMES, quick=["eager, float64", "C++, bfloat16"]))
def loaded(family: Path, request: pytest.FixtureRequest) -> Load:
    """Loads each drafter once."""

    @cache
    def engine(name: str) -> Engine:
        draft = draft_of(family, name)
        return load(str(family / "target"), drafter=name, draft=draft, runtime=RUNTIMES[request.param], lengths="fixed")

    return engine


def generation(engine: Engine, asked: Asked, number: int = 0) -> Generation:
    tokens, sampling = list(asked.prompt), dataclasses.replace(SAMPLINGS[asked.sampling], seed=asked.seed)
    written = Detokenizer(engine.target.tokenizer).after(tokens)
    text = AnswerText(written, stop_strings(STOPS[asked.stop], {})) if asked.stop else None
    eos_ids = frozenset([0]) if asked.sampling % 2 else engine.target.eos_ids | {7}
    return Generation(
        Request(id=number, tokens=tokens, sampling=sampling, max_new_tokens=asked.limit, eos_ids=eos_ids), text
    )


def alone(batch: Callable[[], Batch], engine: Engine, asked: Asked) -> Generation:
    """The answer in a batch of its own."""
    found = generation(engine, asked)
    for _ in run(batch(), [found]):
        pass
    return found


def scheduled(seed: int, engine: Engine, batch: Batch, *, pieces: bool = False) -> list[tuple[Asked, Generation]]:
    """Runs a schedule; returns the answers to its requests, whole, or, where they were cancelled, as far as they went.

    Rows join by chance before rounds, one or several; some are cancelled; some are taken out and join again later with
    the tokens that they have; and once all are, as when another has failed. With `pieces` prompts are read in pieces,
    several side by side, between rounds and along with them, while there are other rows.
    """
    chooser = random.Random(seed)
    found: list[tuple[Asked, Generation]] = []
    left, paused = chooser.randint(3, 6), list[Generation]()
    resets = chooser.randint(3, 20)
    rounds = 0
    while left or paused or batch.members:
        joining = []
        if batch.prefill.generations and chooser.random() < 0.5:
            batch.read(chooser.choice([1, 2, 7, 20]))
        while left and chooser.random() < (0.4 if batch.members else 1.0):
            asked = chooser.choice(POOL)
            joining.append(generation(engine, asked, left))
            found.append((asked, joining[-1]))
            left -= 1
            if chooser.random() < 0.5:
                break
        while paused and (chooser.random() < 0.5 or not (joining or batch.members)):
            joining.append(paused.pop())
        if joining:
            chooser.shuffle(joining)
            (batch.begin if pieces and batch.generations else batch.join)(joining)
        before = {id(one): len(one.tokens) for one in batch.generations}
        rows = list(batch.generations)
        batch.read_along(chooser.choice([0, 1, 2, 7, 20]))
        batch.step()
        assert all(one.is_finished or len(one.tokens) > before[id(one)] for one in rows), "every round gives a token"
        rounds += 1
        active = [one for one in batch.members if not one.is_finished]
        leaving = [one for one in active if chooser.random() < 0.08]
        if leaving:
            batch.leave(leaving)
            # Where a pass needs two rows, the last but one stays.
            gone = [one for one in leaving if one not in batch.members]
            paused += [one for one in gone if chooser.random() < 0.6]
        if rounds == resets:
            paused += [one for one in batch.members if not one.is_finished]
            batch.clear()
    return found


Expected = Callable[[Asked], Generation]


def plain_answers(engine: Engine) -> Expected:
    """What plain decoding with an engine's target says to each request alone."""
    plain = Engine(engine.target, NoDrafter(), Speculation(k=1))
    return cache(lambda asked: alone(plain.new_batch, engine, asked))


def check(seed: int, expected: Expected, drafted: Engine, *, pieces: bool = False, **settings: int) -> int:
    """Fails unless all requests of a schedule get what plain decoding gives each alone; returns how many ended."""
    ended = 0
    batch = Batch(
        drafted.target,
        drafted.drafter,
        lengths=drafted.lengths,
        rule=drafted.speculation.verify,
        tree=drafted.speculation.tree,
        **settings,
    )
    for asked, answer in scheduled(seed, drafted, batch, pieces=pieces):
        whole = expected(asked)
        assert answer.error is None
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
        if answer.is_finished:
            assert (answer.tokens, answer.finish_reason) == (whole.tokens, whole.finish_reason)
            assert "".join(answer.pieces) == "".join(whole.pieces)
            ended += 1
    return ended


@pytest.fixture(scope="module")
def expected(loaded: Load) -> Expected:
    """The answers of plain decoding; all targets of a runtime are the same."""
    return plain_answers(loaded("none"))


@pytest.mark.parametrize(
    ("loaded", "name", "shape"),
    mostly_slow(RUNTIMES_AND_CASES, quick=[case for case in RUNTIMES_AND_CASES if case[2] in QUICK[case[0]]]),
    indirect=["loaded"],
)
def test_requests_that_join_get_what_they_get_alone(loaded: Load, expected: Expected, name: str, shape: str) -> None:
    """Guards continuous batching, of every drafter, as chains and trees: 24 schedules, of which the slow passes of the
    model's own code take a third, whose requests have prompts, settings, seeds, limits, stops and processors of their
    own, and some of which are taken up again."""
    engine, ended = loaded(name), 0
    for seed in range(24 if engine.target.lm.is_native else 8):
        k = 1 + seed % 5 if shape == "chain" else 3
        lengths = list(POLICIES)[seed % len(POLICIES)]
        drafted = Engine(engine.target, engine.drafter, Speculation(k=k, tree=SHAPES[shape], lengths=lengths))
        ended += check(seed, expected, drafted)
    assert ended > 2.5 * (seed + 1)


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_that_are_read_in_pieces_change_no_token(loaded: Load, expected: Expected, name: str) -> None:
    """Guards long prompts, which are read between the rounds of others: while these leave, or all end, while the cache
    grows, with kept rows and without, and where the one who is read goes himself."""
    drafted, ended = Engine(loaded(name).target, loaded(name).drafter, Speculation(k=4, lengths="fixed")), 0
    for seed in range(16 if drafted.target.lm.is_native else 3):
        ended += check(seed, expected, drafted, pieces=True, kept_rows=seed % 3)
    assert ended > 2.5 * (seed + 1)


@pytest.mark.parametrize("name", DRAFTERS)
def test_kept_rows_change_no_token(loaded: Load, expected: Expected, name: str) -> None:
    """Guards conversations: a prompt that begins as an earlier one, with its answer or not, is read from where they
    part."""
    drafted = Engine(loaded(name).target, loaded(name).drafter, Speculation(k=4, lengths="fixed"))
    for seed in range(12 if drafted.target.lm.is_native else 4):
        check(seed, expected, drafted, kept_rows=1 + seed % 4)


@pytest.mark.parametrize("name", DRAFTERS)
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


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_replayed_passes_follow_rows_that_come_and_go(family: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards CUDA graphs, played on a CPU: recordings of a cache that has grown since, or of rows that have moved."""
    replay_everything(monkeypatch)
    draft, target = draft_of(family, name), str(family / "target")
    runtime = Runtime(dtype="float64", compiled=True, capacity=100, width=24)
    engine = load(target, drafter=name, draft=draft, k=4, runtime=runtime, lengths="fixed")
    plain = dataclasses.replace(RUNTIMES["eager, float64"], cuda_graphs=False)
    expected = plain_answers(load(target, runtime=plain))
    assert engine.target.lm.warm_up_rounds > 1
    for seed in range(3):
        check(seed, expected, engine)


def test_passes_that_need_two_rows_get_them(loaded: Load, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `torch.compile`, whose pass for one row may not be there: once there are two rows, no pass has one, also
    while a single prompt is read beside others."""
    monkeypatch.setattr(CausalLM, "min_rows", 2)
    engine = loaded("pard")
    drafted = Engine(engine.target, engine.drafter, Speculation(k=3, lengths="fixed"))
    for seed in range(6):
        check(seed, expected, drafted)
    passes: list[tuple[int, int]] = []
    run_pass = engine.target.lm._pass

    def watched(storage: object, lengths: list[int], *rest: torch.Tensor) -> torch.Tensor:
        passes.append((len(lengths), len(engine.target.lm.cache.lengths)))
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


INDEPENDENT_ROWS = [
    (runtime, name, shape)
    for runtime, name, shape in RUNTIMES_AND_CASES
    if name != "none" and not drafter_class(name).traits.depends_on_rounds and drafter_class(name).traits.parts == 1
]


@pytest.mark.parametrize(
    ("loaded", "name", "shape"),
    mostly_slow(INDEPENDENT_ROWS, quick=[case for case in INDEPENDENT_ROWS if case[0] == "C++, bfloat16"]),
    indirect=["loaded"],
)
def test_rows_do_not_disturb_each_other_under_the_rejection_rule(
    loaded: Load, expected: Expected, name: str, shape: str
) -> None:
    """Guards the distribution: with fixed lengths a row has its own random numbers and drafts, so that whatever joins
    or leaves beside it changes no token. Greedy rows have the tokens of plain decoding."""
    engine = loaded(name)
    drafted = Engine(
        engine.target, engine.drafter, Speculation(k=3, verify="rejection", tree=SHAPES[shape], lengths="fixed")
    )
    own = cache(lambda asked: alone(drafted.new_batch, engine, asked))
    for seed in range(20 if engine.target.lm.is_native else 6):
        chooser, batch, left = random.Random(seed), drafted.new_batch(), 5
        answers: list[tuple[Asked, Generation]] = []
        while left or batch.generations:
            joining = []
            while left and chooser.random() < (0.4 if batch.generations or joining else 1.0):
                asked = chooser.choice(POOL)
                joining.append(generation(engine, asked, left))
                answers.append((asked, joining[-1]))
                left -= 1
            if joining:
                batch.join(joining)
            batch.step()
            if chooser.random() < 0.1 and batch.generations:
                batch.leave([chooser.choice(batch.generations)])
        for asked, answer in answers:
            assert answer.tokens == own(asked).tokens[: len(answer.tokens)]
            if SAMPLINGS[asked.sampling].is_greedy:
                assert answer.tokens == expected(asked).tokens[: len(answer.tokens)]


class Unordered(Sampler):
    """Forgets rows, but leaves the others in their order."""

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows.sort().values)


class ForgottenAnswer(Generation):
    """Does not say which tokens are of the answer."""

    @property
    def so_far(self) -> Request:
        return dataclasses.replace(super().so_far, answered=0)


def lost_rows(cache: CachedRows, rows: torch.Tensor) -> None:
    """Orders the lengths, but moves no keys."""
    cache._use(sum(row < cache.decoding for row in rows.tolist()))
    cache._set_lengths([cache.lengths[row] for row in rows.tolist()])


def lost_cache(cache: CachedRows, rows: int, slots: int) -> None:
    """Takes a larger cache without what the smaller one held."""
    cache._largest, cache._slots = cache._allocate(rows, slots), slots


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        ("paradraft.decode.batch", "Sampler", Unordered),
        ("tests.contract.test_joining", "Generation", ForgottenAnswer),
        ("paradraft.models.cached_rows.CachedRows", "keep", lost_rows),
        ("paradraft.models.cached_rows.CachedRows", "_grow", lost_cache),
    ],
    ids=["order of settings", "answer so far", "keys that stay behind", "a cache that grows empty"],
)
def test_wrong_joining_is_caught(
    family: Path, module: str, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: schedules in which these mistakes are not seen would not guard joining."""
    engine = load(str(family / "target"), drafter="ngram", runtime=RUNTIMES["eager, float64"], lengths="fixed")
    expected = plain_answers(load(str(family / "target"), runtime=RUNTIMES["eager, float64"]))
    for asked in POOL:
        expected(asked)
    monkeypatch.setattr(f"{module}.{name}", wrong)

    def check_all() -> None:
        for seed in range(24):
            check(seed, expected, Engine(engine.target, engine.drafter, Speculation(k=3, lengths="fixed")))

    with pytest.raises(AssertionError):
        check_all()


def forgotten_piece(target: Target, rows: torch.Tensor) -> None:
    """Moves the rows that decode, but not the one that is read."""
    target.lm.cache.keep(
        torch.cat([rows, torch.arange(len(rows), 1 + len(rows))[: len(target.lm.cache.lengths) > len(rows)]])
    )
    target._root_B1 = target._root_B1[rows]


def skipped_token(name: str) -> Callable[[Target, Any], Any]:
    """Takes one token more for read than was."""
    right = getattr(Target, name)

    def wrong(target: Target, given: Any) -> Any:
        returned = right(target, given)
        if target.unread and target.unread[-1]:
            target.lm.cache.lengths[-1] += 1
        return returned

    return wrong


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("keep", forgotten_piece), ("read", skipped_token("read")), ("forward", skipped_token("forward"))],
    ids=["keep", "read", "read along"],
)
def test_wrong_pieces_are_caught(family: Path, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: schedules in which these mistakes are not seen would not guard prompts that are read in pieces."""
    engine = load(str(family / "target"), drafter="ngram", runtime=RUNTIMES["eager, float64"], lengths="fixed")
    expected = plain_answers(engine)
    for asked in POOL:
        expected(asked)
    monkeypatch.setattr(Target, name, wrong)

    def check_all() -> None:
        for seed in range(12):
            check(seed, expected, Engine(engine.target, engine.drafter, Speculation(k=3, lengths="fixed")), pieces=True)

    with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
        check_all()


def test_wrong_kept_rows_are_caught(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a prompt that is taken to share one token too many with a kept row."""
    engine = load(str(family / "target"), drafter="ngram", runtime=RUNTIMES["eager, float64"], lengths="fixed")
    expected = plain_answers(engine)
    shared_length = prefix_cache.shared_length
    monkeypatch.setattr(prefix_cache, "shared_length", lambda *texts: shared_length(*texts) + 1)

    def check_all() -> None:
        for seed in range(12):
            check(seed, expected, Engine(engine.target, engine.drafter, Speculation(k=3, lengths="fixed")), kept_rows=3)

    with pytest.raises(AssertionError):
        check_all()
