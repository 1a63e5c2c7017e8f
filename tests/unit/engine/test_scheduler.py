"""Requests of several threads: who runs rounds, who waits, who goes on, and whose an error is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from paradraft.decode.generation import Generation
from paradraft.decode.stats import added
from paradraft.engine.engine import Engine
from paradraft.models import kv_cache
from paradraft.sampling_params import LogitsProcessor, Sampling
from tests.support.scheduling import (
    PROMPTS,
    SAMPLED,
    Loop,
    alone,
    generation,
    passes_of,
    poisoned,
    small_engine,
    tokens_of,
)

SECOND = "load a second engine"


@pytest.fixture
def engine() -> Engine:
    return small_engine()


def calling(function: Callable[[], object], *, at: int = 1) -> Sampling:
    """Settings with a processor that calls a function when it is asked for the `at`-th time, in a round."""
    asked: list[int] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.append(1)
        if len(asked) == at:
            function()
        return scores

    return Sampling(processors=[processor])


def raising(error: BaseException) -> Callable[[], object]:
    def function() -> object:
        raise error

    return function


class InThread(threading.Thread):
    """Calls a function in another thread; `result` waits for what it returns, or raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function, self._error = function, None
        self.start()

    def run(self) -> None:
        try:
            self._returned = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(20)
        assert not self.is_alive(), "it waits for ever"
        if self._error is not None:
            raise self._error
        return self._returned


def test_a_stream_takes_part_in_the_rounds_of_others(engine: Engine) -> None:
    """Guards streams that are read slowly: they go on while others decode, no text changes, and what they got is kept
    for their readers, round by round."""
    expected = [alone(engine, prompt, 12) for prompt in PROMPTS]
    streams = [engine.stream(prompt, max_new_tokens=12, sampling=SAMPLED) for prompt in PROMPTS[:3]]
    found = [next(stream).tokens for stream in streams]
    with passes_of(engine) as rows:
        assert alone(engine, PROMPTS[3], 12) == expected[3]
    assert rows[:2] == [3, 4], "its prompt is read along"
    with passes_of(engine) as rows:
        chunks = [list(stream) for stream in streams]
    assert not rows, "all has been decoded"
    assert [first + tokens_of(rest) for first, rest in zip(found, chunks, strict=True)] == expected[:3]
    assert all(1 <= len(chunk.tokens) == chunk.accepted + 1 for rest in chunks for chunk in rest[:-1])


def test_a_reader_who_takes_nothing_keeps_nobody_waiting(engine: Engine) -> None:
    """Guards a service against one reader who takes nothing from a stream, in the middle of it and at its end."""
    expected = [alone(engine, prompt, 12) for prompt in PROMPTS[:2]]
    stream = engine.stream(PROMPTS[0], max_new_tokens=12, sampling=SAMPLED)
    first = next(stream).tokens
    for _ in range(2):
        assert InThread(lambda: alone(engine, PROMPTS[1], 12)).result() == expected[1]
    assert InThread(lambda: first + tokens_of(stream)).result() == expected[0], "a stream may change its thread"


def test_who_comes_while_a_round_runs_takes_part_in_the_next(engine: Engine) -> None:
    """Guards the one cache: a round at a time, whatever thread runs it, and those who wait get their tokens from it."""
    expected = [alone(engine, prompt, 12, Sampling()) for prompt in PROMPTS]
    in_round, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        in_round.set()
        assert may_end.wait(20)

    with passes_of(engine) as rows:
        first = InThread(lambda: alone(engine, PROMPTS[0], 12, calling(wait)))
        assert in_round.wait(20)
        others = [InThread(lambda prompt=prompt: alone(engine, prompt, 12, Sampling())) for prompt in PROMPTS[1:]]
        threading.Event().wait(0.2)
        assert rows == [1], "nobody runs a round beside another"
        may_end.set()
        assert [thread.result() for thread in [first, *others]] == expected
    assert max(rows) == 4


def test_as_many_are_decoded_together_as_asked_for(engine: Engine) -> None:
    """Guards the memory that a batch size was chosen for, and throughput: the next one takes the row of one that has
    ended, so that five answers in two rows take as many rounds as their longest halves."""
    limits = [1, 9, 3, 3, 2]
    engine.lengths.policy.k = 0
    generations = [generation(engine, [5], limit) for limit in limits]
    with passes_of(engine) as rows:
        ended = [generations.index(one) for one in engine._scheduler.answer(generations, most=2)]
    assert ended == [0, 2, 3, 1, 4] or ended == [0, 2, 3, 4, 1]
    assert rows == [2] * 9
    assert [len(one.tokens) for one in generations] == limits


def test_answers_come_in_the_order_of_their_prompts(engine: Engine) -> None:
    """Guards `generate` against the order in which answers end."""
    limits = [9, 1, 5, 2]
    results = engine.generate(PROMPTS, max_new_tokens=limits, sampling=SAMPLED, batch_size=3)
    assert [result.tokens for result in results] == [
        alone(engine, prompt, limit) for prompt, limit in zip(PROMPTS, limits, strict=True)
    ]


def test_a_stream_that_is_closed_leaves(engine: Engine) -> None:
    """Guards a service against answers that nobody waits for any more; the others' texts stay."""
    expected = alone(engine, PROMPTS[1], 12)
    first, second, never = (
        engine.stream(prompt, max_new_tokens=100, sampling=SAMPLED) for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[3])
    )
    kept = engine.stream(PROMPTS[1], max_new_tokens=12, sampling=SAMPLED)
    found = next(kept).tokens
    next(first), next(second)
    first.close()
    never.close()
    with passes_of(engine) as rows:
        while not rows:
            found += next(kept).tokens
        assert rows == [2]
        second.close()
        found += tokens_of(kept)
        assert len(rows) > 2 and set(rows[1:]) == {1}
    assert found == expected
    with passes_of(engine) as rows:
        assert alone(engine, PROMPTS[1], 12) == expected
        assert set(rows) == {1}, "and nothing is left behind"


def test_what_is_cancelled_before_it_joined_is_never_read(engine: Engine) -> None:
    """Guards the time of others: a request whose reader went away while it waited."""
    waiting = generation(engine, PROMPTS[0], 50)
    engine._scheduler._waiting.append(waiting)
    waiting.is_cancelled = True
    with passes_of(engine) as rows:
        alone(engine, PROMPTS[1], 3)
    assert set(rows) == {1} and not waiting.tokens


def test_an_answer_that_fails_cancels_those_it_was_asked_with(engine: Engine) -> None:
    """Guards a service against the rest of a call that has raised already."""
    samplings = [SAMPLED, calling(raising(KeyError("mine")), at=2), SAMPLED]
    with pytest.raises(KeyError, match="mine"):
        engine.generate(PROMPTS[:3], max_new_tokens=100, sampling=samplings)
    with passes_of(engine) as rows:
        alone(engine, PROMPTS[3], 3)
    assert set(rows) == {1}


def watched(engine: Engine, loop: Loop, limit: int) -> list[Generation]:
    """Two requests that somebody watches, when they have ended."""
    generations = [generation(engine, prompt, limit, Sampling()) for prompt in PROMPTS[:2]]
    told = threading.Event()
    for asked in generations:
        engine._scheduler.watch(asked, loop, lambda: all(one.is_told for one in generations) and told.set())
    assert told.wait(20)
    return generations


def test_a_loop_is_woken_once_a_round(engine: Engine) -> None:
    """Guards the thread that decodes: each time it wakes another one, that one takes the interpreter from it."""
    engine.lengths.policy.k, loop = 0, Loop()
    with passes_of(engine) as rows:
        watched(engine, loop, 20)
    assert loop.calls == len(rows), "also where both have news"
    assert rows[-1] == 2


def test_telling_readers_is_part_of_a_round(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards length policies of a server: fewer rounds are worth more where each has to be told, and before the first
    there is nothing to tell."""
    others_s: list[float] = []
    monkeypatch.setattr(engine.lengths, "observe", lambda _, time: others_s.append(time.other_s))
    watched(engine, Loop(0.02), 4)
    assert others_s[0] < 0.01 < 0.02 <= min(others_s[1:])
    alone(engine, PROMPTS[0], 4)
    assert others_s[-1] < 0.01


USES: dict[str, Callable[[Engine], object]] = {
    "generate": lambda engine: engine.generate([[1]], max_new_tokens=1),
    "stream": lambda engine: next(engine.stream([1], max_new_tokens=1)),
    "warm_up": lambda engine: engine.warm_up(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("asks", ["generate", "stream"])
def test_nobody_waits_for_himself(engine: Engine, asks: str, use: str) -> None:
    """Guards processors that ask the engine which called them: such a thread would stand still. Whoever catches the
    error gets the answer; the engine is as before."""
    expected = alone(engine, PROMPTS[0], 6, Sampling())

    def ask(function: Callable[[], object]) -> list[int]:
        chosen = {"max_new_tokens": 6, "sampling": calling(function, at=3)}
        if asks == "stream":
            return tokens_of(engine.stream(PROMPTS[0], **chosen))
        return engine.generate([PROMPTS[0]], **chosen)[0].tokens

    def caught() -> None:
        with pytest.raises(ValueError, match=SECOND):
            USES[use](engine)

    with pytest.raises(ValueError, match=SECOND):
        InThread(lambda: ask(lambda: USES[use](engine))).result()
    assert InThread(lambda: ask(caught)).result() == expected
    assert alone(engine, PROMPTS[0], 6, Sampling()) == expected


def test_a_paused_stream_is_no_round(engine: Engine) -> None:
    """Guards loops over a stream that ask the same engine something about each piece."""
    expected = [alone(engine, prompt, 12) for prompt in PROMPTS[:2]]
    found: list[int] = []
    for chunk in engine.stream(PROMPTS[0], max_new_tokens=12, sampling=SAMPLED):
        found += chunk.tokens
        assert alone(engine, PROMPTS[1], 12) == expected[1]
    assert found == expected[0]


def forbids_after(tokens: int) -> LogitsProcessor:
    """A processor that forbids everything once a text has so many tokens."""

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.tensor(ids.shape[1] >= tokens), -torch.inf)

    return processor


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("fault", ["processor", "prompt", "forbidden"])
def test_an_error_reaches_its_owner_alone(engine: Engine, fault: str, when: str) -> None:
    """Guards the users of a service from each other: streams and answers of others go on, with the same tokens, before
    and after an error, though what has been read is read again."""
    at = 1 if when == "at once" else 6
    prompt, made, said = {
        "processor": ([20, 21], lambda: calling(raising(KeyError("mine")), at=at), "mine"),
        "prompt": ([20, 50, 21, 22], Sampling, "not numbers"),
        "forbidden": ([20, 21], lambda: Sampling(processors=[forbids_after(1 + at)]), "forbids every token"),
    }[fault]
    poisoned(engine, 50)
    bias = Sampling(temperature=0.9, presence_penalty=0.5, seed=3, logit_bias={50: -100.0})
    expected = [alone(engine, prompt, 20, bias) for prompt in PROMPTS[:3]]
    streams = [engine.stream(prompt, max_new_tokens=20, sampling=bias) for prompt in PROMPTS[:2]]
    found = [next(stream).tokens for stream in streams]
    with pytest.raises((KeyError, ValueError), match=said):
        engine.generate([prompt], max_new_tokens=20, sampling=made())
    assert alone(engine, PROMPTS[2], 20, bias) == expected[2]
    failing = engine.stream(prompt, max_new_tokens=20, sampling=made())
    with pytest.raises((KeyError, ValueError), match=said):
        list(failing)
    assert [first + tokens_of(stream) for first, stream in zip(found, streams, strict=True)] == expected[:2]


def test_an_error_that_another_thread_met_reaches_its_owner(engine: Engine) -> None:
    """Guards threads that wait while another runs the rounds: the error is theirs, and the runner goes on."""
    expected = alone(engine, PROMPTS[0], 30, Sampling())
    in_round, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        in_round.set()
        assert may_end.wait(20)

    runner = InThread(lambda: alone(engine, PROMPTS[0], 30, calling(wait)))
    assert in_round.wait(20)
    owner = InThread(lambda: alone(engine, PROMPTS[1], 30, calling(raising(KeyError("mine")), at=4)))
    threading.Event().wait(0.1)
    may_end.set()
    assert runner.result() == expected
    with pytest.raises(KeyError, match="mine"):
        owner.result()


def test_a_request_that_finds_no_memory_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards answers that are under way from one too many."""
    expected = [alone(engine, prompt, 12) for prompt in PROMPTS]
    stream = engine.stream(PROMPTS[0], max_new_tokens=12, sampling=SAMPLED)
    found = next(stream).tokens
    with monkeypatch.context() as patched:
        free = kv_cache.free_bytes
        patched.setattr(kv_cache, "free_bytes", lambda device: 1.0)
        with pytest.raises(ValueError, match=r"a cache for . rows"):
            engine.generate(PROMPTS[1:], max_new_tokens=12, sampling=SAMPLED)
        patched.setattr(kv_cache, "free_bytes", free)
        assert found + tokens_of(stream) == expected[0]
    results = engine.generate(PROMPTS, max_new_tokens=12, sampling=SAMPLED)
    assert [result.tokens for result in results] == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of luck")])
def test_an_error_of_nobody_is_raised_where_the_round_ran(engine: Engine, error: BaseException) -> None:
    """Guards Ctrl-C and mistakes of the engine itself: they end the work that ran the round, the engine is not locked,
    and other requests go on, with the same tokens."""
    expected = [alone(engine, prompt, 12) for prompt in PROMPTS[:2]]
    stream = engine.stream(PROMPTS[0], max_new_tokens=12, sampling=SAMPLED)
    found = next(stream).tokens
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.target.lm, "forward", lambda *_, **__: raising(error)())
        with pytest.raises(type(error)):
            alone(engine, PROMPTS[1], 12)
    assert InThread(lambda: alone(engine, PROMPTS[1], 12)).result() == expected[1]
    assert found + tokens_of(stream) == expected[0]


def test_work_of_its_own_comes_between_rounds(engine: Engine) -> None:
    """Guards `warm_up` and whoever else needs the target for a while: requests that are under way go on afterwards,
    with the same tokens, and nobody decodes meanwhile; after an error too."""
    expected = [alone(engine, prompt, 12) for prompt in PROMPTS[:2]]
    stream = engine.stream(PROMPTS[0], max_new_tokens=12, sampling=SAMPLED)
    found = next(stream).tokens
    engine.warm_up(3)
    found += next(stream).tokens
    others: list[InThread] = []

    def work() -> None:
        with engine._scheduler.exclusive():
            others.append(InThread(lambda: alone(engine, PROMPTS[1], 12)))
            others[0].join(0.2)
            assert others[0].is_alive()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        work()
    assert others[0].result() == expected[1]
    assert found + tokens_of(stream) == expected[0]


@pytest.mark.parametrize("between", ["nothing", "exclusive", "an error of another"])
def test_the_counts_of_an_answer_are_those_of_all_its_rounds(engine: Engine, between: str) -> None:
    """Guards the statistics of an answer that was taken up again, and of one that joined others."""
    asked = generation(engine, PROMPTS[2], 20, Sampling())
    with closing(engine._scheduler.stream(asked)) as news:
        next(news)
        alone(engine, PROMPTS[1], 2)
        if between == "exclusive":
            engine.warm_up()
        if between == "an error of another":
            with pytest.raises(KeyError):
                alone(engine, PROMPTS[1], 5, calling(raising(KeyError())))
        for _ in news:
            pass
    whole = added(asked.stats)
    assert (whole.tokens, whole.rounds) == (20, len(asked.accepted))
    assert sum(whole.accepted) == sum(asked.accepted)


@contextmanager
def running(engine: Engine, waiting: int) -> Iterator[None]:
    """Another thread runs rounds for all, for a while, as soon as so many requests wait."""

    def wait() -> None:
        for _ in range(200):
            if len(engine._scheduler._waiting) >= waiting:
                return
            threading.Event().wait(0.02)

    runner = InThread(lambda: alone(engine, PROMPTS[0], 60, calling(wait)))
    yield
    runner.result()


def test_an_answer_is_handed_over_when_its_round_is_over(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards answers whose rounds another thread runs: who comes back while a round ends finds it whole or not at all,
    never an answer without its statistics."""
    generations = [generation(engine, [8], limit, Sampling()) for limit in (2, 30)]
    in_round, observe = threading.Event(), engine.lengths.observe

    def slowly(*arguments: Any, **times: float) -> None:
        observe(*arguments, **times)
        if generations[1].is_finished and not in_round.is_set():
            in_round.set()
            threading.Event().wait(0.3)

    monkeypatch.setattr(engine.lengths, "observe", slowly)
    with running(engine, 2), closing(engine._scheduler.answer(generations, most=2)) as ended:
        assert next(ended) is generations[0]
        assert in_round.wait(20)
        assert next(ended) is generations[1]
        assert added(generations[1].stats).tokens == len(generations[1].tokens)


def test_a_round_is_told_whole(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards streams whose rounds another thread runs against half a round: tokens whose text is still missing."""
    in_round = threading.Event()

    class Slow(list[int]):
        def append(self, end: int) -> None:
            if self and not in_round.is_set():
                in_round.set()
                threading.Event().wait(0.3)
            super().append(end)
            threading.Event().wait(0.01)

    made = engine._answers.generation

    def generation_of(*arguments: Any) -> Generation:
        one = made(*arguments)
        if arguments[0].tokens == [8]:
            one.round_ends = Slow()
        return one

    expected = engine.generate([[8]], max_new_tokens=12, sampling=SAMPLED)[0]
    monkeypatch.setattr(engine._answers, "generation", generation_of)
    with running(engine, 1):
        chunks = []
        for chunk in engine.stream([8], max_new_tokens=12, sampling=SAMPLED):
            chunks.append(chunk)
            assert in_round.wait(20)
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert tokens_of(chunks) == expected.tokens


def test_many_threads_get_their_own(engine: Engine) -> None:
    """Guards servers: streams and answers of many threads, some of which fail or are given up, in any order."""
    limits = Counter({0: 9, 1: 14, 2: 3, 3: 20})
    expected = [alone(engine, PROMPTS[number], limits[number]) for number in range(4)]

    def work(number: int) -> None:
        for turn in range(6):
            prompt, chosen = PROMPTS[number], {"max_new_tokens": limits[number], "sampling": SAMPLED}
            kind = (number + turn) % 4
            if kind == 0:
                assert tokens_of(engine.stream(prompt, **chosen)) == expected[number]
            elif kind == 1:
                assert engine.generate([prompt], **chosen)[0].tokens == expected[number]
            elif kind == 2:
                with pytest.raises(KeyError):
                    alone(engine, prompt, 9, calling(raising(KeyError()), at=turn + 1))
            else:
                with closing(engine.stream(prompt, **chosen)) as stream:
                    found = next(stream).tokens
                assert found == expected[number][: len(found)]

    for thread in [InThread(lambda number=number: work(number)) for number in range(4)]:
        thread.result()
    assert alone(engine, PROMPTS[3], 20) == expected[3]
