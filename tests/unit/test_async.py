"""Requests of an event loop: decoded together by one thread, each with the text that it has alone."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paradraft.decode.prefill import PrefillPace
from paradraft.engine.answers import Chunk
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from tests.support.serving import until

PROMPTS = ["hello", "a", "abcabc", "The", "xyz", "B5C6", "q", "zz"]
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=5), Sampling(repetition_penalty=1.2), Sampling(temperature=1.3)]


@pytest.fixture(scope="module")
def engine(family: Path) -> Engine:
    folder = str(family / "target")
    return load(
        folder, drafter="pard", draft=str(family / "pard"), k=4, runtime=Runtime(dtype="float64"), lengths="fixed"
    )


def expected(engine: Engine, number: int, tokens: int = 30) -> list[int]:
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    return engine.generate(PROMPTS[number % len(PROMPTS)], max_new_tokens=tokens, sampling=sampling).tokens


async def streamed(engine: Engine, number: int, tokens: int = 30) -> list[int]:
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    found: list[int] = []
    async for chunk in engine.astream(PROMPTS[number % len(PROMPTS)], max_new_tokens=tokens, sampling=sampling):
        found += chunk.tokens
    return found


def test_many_streams_at_once(engine: Engine) -> None:
    """Guards the text of each, in one batch, by one thread."""
    names: set[str] = set()
    rows: list[int] = []
    step = engine._scheduler.batch.step

    def watched() -> object:
        names.add(threading.current_thread().name)
        rows.append(len(engine._scheduler.batch.generations))
        return step()

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(streamed(engine, number) for number in range(16)))

    engine._scheduler.batch.step = watched
    try:
        found = asyncio.run(all_of_them())
    finally:
        del engine._scheduler.batch.step
    assert found == [expected(engine, number) for number in range(16)]
    assert names == {"decoding"} and max(rows) == 16


def test_the_end_of_an_answer_does_not_wait_for_the_prompt_of_another(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the last tokens of a stream: when no other answer was under way, the rest of a long prompt was read at
    once, and they were told after that, seconds later."""
    monkeypatch.setattr(PrefillPace, "most", lambda pace, rows: 1)
    told: list[bool] = []
    read = engine._scheduler.batch.read

    def watched(most: int) -> int:
        told.extend(one.is_told for one in engine._scheduler.batch.generations if one.is_finished)
        return read(most)

    async def answers() -> list[list[int]]:
        first = asyncio.create_task(streamed(engine, 0, 8))
        while not engine._scheduler.batch.generations:
            await asyncio.sleep(0)
        chunks = engine.astream("abcdefg" * 8, max_new_tokens=8)
        return [[token async for chunk in chunks for token in chunk.tokens], await first]

    monkeypatch.setattr(engine._scheduler.batch, "read", watched)
    late, first = asyncio.run(answers())
    assert told and all(told)
    assert first == expected(engine, 0, 8)
    assert late == engine.generate("abcdefg" * 8, max_new_tokens=8).tokens


def test_texts_results_and_stop_strings(engine: Engine) -> None:
    whole = engine.generate("hello", max_new_tokens=30)
    stop = whole.text[3:5]

    async def both() -> tuple[str, object]:
        pieces = [chunk.text async for chunk in engine.astream("hello", max_new_tokens=30, stop=stop)]
        return "".join(pieces), await engine.agenerate("hello", max_new_tokens=30, stop=stop)

    text, result = asyncio.run(both())
    assert text == result.text == whole.text[: whole.text.index(stop)]
    assert result.finish_reason == "stop" and result.stats.rounds > 0


def test_mistakes_come_at_once(engine: Engine) -> None:
    """Guards against an error in the middle of a response that has begun."""
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.astream("")
    with pytest.raises(ValueError, match="stop"):
        engine.astream("a", max_new_tokens=4, stop=5)

    async def one() -> None:
        await engine.agenerate("a", max_new_tokens=0)

    with pytest.raises(ValueError, match="max_new_tokens=0"):
        asyncio.run(one())


def test_leaving_early_ends_the_request(engine: Engine) -> None:
    """Guards work for clients that have gone: by `break`, by a task that is cancelled, by a loop that is closed."""

    async def some() -> list[list[int]]:
        stream = engine.astream("hello", max_new_tokens=90)
        async for _ in stream:
            break
        await stream.aclose()
        task = asyncio.create_task(streamed(engine, 1, tokens=90))
        await asyncio.sleep(0.01)
        task.cancel()
        return await asyncio.gather(streamed(engine, 2), streamed(engine, 3))

    assert asyncio.run(some()) == [expected(engine, 2), expected(engine, 3)]
    assert not [each for each in engine._scheduler.batch.generations if not each.is_cancelled and not each.is_finished]

    async def forgotten() -> None:
        await anext(engine.astream("hello", max_new_tokens=90))

    asyncio.run(forgotten())
    assert asyncio.run(streamed(engine, 4)) == expected(engine, 4)


def test_beside_other_threads(engine: Engine) -> None:
    """Guards an event loop and threads that use one engine at the same time."""
    wanted = {number: expected(engine, number) for number in range(8)}
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(expected, engine, number) for number in range(8) for _ in range(3)]

        async def all_of_them() -> list[list[int]]:
            return await asyncio.gather(*(streamed(engine, number % 8) for number in range(24)))

        found = asyncio.run(all_of_them())
        assert [other.result() for other in others] == [wanted[number] for number in range(8) for _ in range(3)]
    assert found == [wanted[number % 8] for number in range(24)]


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_round_that_fails(engine: Engine, kind: type[BaseException]) -> None:
    """Guards clients against waiting for ever: all who wait are told, and the next request is answered. A processor
    that called `sys.exit` had ended the thread that decodes, and no other was begun."""
    step = engine._scheduler.batch.step

    def failing() -> object:
        engine._scheduler.batch.step = step
        raise kind("the machine is on fire")

    async def two() -> list[object]:
        return await asyncio.gather(streamed(engine, 0), streamed(engine, 1), return_exceptions=True)

    engine._scheduler.batch.step = failing
    found = asyncio.run(two())
    assert any(isinstance(each, RuntimeError) and "on fire" in str(each) for each in found)
    assert all(isinstance(each, RuntimeError) or each == expected(engine, number) for number, each in enumerate(found))
    assert asyncio.run(streamed(engine, 2)) == expected(engine, 2)


@pytest.mark.parametrize("kind", [KeyError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_processor_that_fails_fails_its_own_request(engine: Engine, kind: type[BaseException]) -> None:
    """Guards the others of a batch: a processor that called `sys.exit` had failed all of them."""

    def exits(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 12:  # others have joined by then
            raise kind("not this one")
        return scores

    async def failing() -> None:
        async for _ in engine.astream("abcabcabc", max_new_tokens=30, sampling=Sampling(processors=[exits])):
            pass

    async def all_of_them() -> list[object]:
        others = [streamed(engine, number) for number in range(6)]
        return await asyncio.gather(*others, failing(), return_exceptions=True)

    *found, failed = asyncio.run(all_of_them())
    assert found == [expected(engine, number) for number in range(6)]
    assert isinstance(failed, Exception) and kind.__name__ in repr(failed) and "not this one" in str(failed)


def decoding_thread(engine: Engine) -> threading.Thread:
    """The thread that has answered a request, and has nothing to do any more."""
    asyncio.run(streamed(engine, 0))
    until(lambda: not engine._scheduler._is_watching)
    thread = engine._scheduler._worker._thread
    assert thread is not None
    return thread


def test_an_engine_that_is_let_go_of_goes(family: Path) -> None:
    """Guards memory: the thread that waits for further requests keeps no engine, and ends with it."""
    engine = load(str(family / "target"), runtime=Runtime(dtype="float64"))
    thread = decoding_thread(engine)
    gone = weakref.ref(engine)
    del engine
    until(lambda: gc.collect() >= 0 and gone() is None)
    thread.join(10)
    assert not thread.is_alive()


def test_one_thread_decodes_what_comes_later(family: Path) -> None:
    """Guards memory: a second thread would hold as much of it as the first, as the soak found."""
    engine = load(str(family / "target"), runtime=Runtime(dtype="float64"))
    assert len({decoding_thread(engine) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("drafter", "settings"), [("pard", {}), ("pard", {"tree": 6}), ("ngram", {}), ("lookahead", {})], ids=str
)
def test_draft_lengths_of_requests(family: Path, drafter: str, settings: dict[str, int]) -> None:
    """Guards rows that draft less than those beside them: their text is the same, and their drafts are no longer."""
    draft = str(family / "pard") if drafter == "pard" else None
    loaded = load(str(family / "target"), drafter=drafter, draft=draft, k=4, dtype="float64", **settings)

    async def chunks(k: int | None) -> list[Chunk]:
        return [chunk async for chunk in loaded.astream("abcabcabc", max_new_tokens=30, k=k)]

    async def all_of_them() -> list[list[Chunk]]:
        return await asyncio.gather(*map(chunks, (None, 0, 2, 4)))

    wanted = loaded.generate("abcabcabc", max_new_tokens=30)
    found = asyncio.run(all_of_them())
    assert [[token for chunk in each for token in chunk.tokens] for each in found] == [wanted.tokens] * 4
    assert [sum(chunk.drafted for chunk in each) for each in (found[0], found[1])] == [wanted.stats.nodes, 0]
    assert max(chunk.accepted for chunk in found[2]) <= 2
    if drafter == "pard" and not settings:
        assert max(chunk.drafted for chunk in found[2]) == 2
    for each in found:
        assert [chunk.finish_reason for chunk in each] == [None] * (len(each) - 1) + [wanted.finish_reason]


def test_draft_lengths_that_there_are_not(engine: Engine, family: Path) -> None:
    for k in (-1, 5, True):
        with pytest.raises(ValueError, match=f"k={k}"):
            engine.astream("a", max_new_tokens=4, k=k)
    for logprobs in (-1, 21, True):
        with pytest.raises(ValueError, match=f"logprobs={logprobs}"):
            engine.astream("a", max_new_tokens=4, logprobs=logprobs)
    ahead = load(str(family / "target"), drafter="pard", draft=str(family / "pard"), gamma=2, dtype="float64")
    for setting in ({"k": 1}, {"logprobs": 1}):
        with pytest.raises(ValueError, match="ahead"):
            ahead.astream("a", max_new_tokens=4, **setting)


@pytest.mark.parametrize("settings", [{}, {"tree": 6}, {"verify": "rejection"}], ids=str)
def test_log_probabilities(family: Path, settings: dict[str, object]) -> None:
    """Guards them against one pass of the model over the whole text, in a batch whose other rows ask for none, for
    drafted tokens and the target's own, and whatever else the request asks for."""
    folder = family / "target"
    loaded = load(str(folder), drafter="pard", draft=str(family / "pard"), k=4, dtype="float64", **settings)
    sampling = Sampling(temperature=0.8, seed=3, frequency_penalty=0.5, logit_bias={5: 2.0}, top_k=30)

    async def chunks(logprobs: int | None) -> list[Chunk]:
        stream = loaded.astream("abcabc", max_new_tokens=30, sampling=sampling, logprobs=logprobs)
        return [chunk async for chunk in stream]

    async def all_of_them() -> list[list[Chunk]]:
        return await asyncio.gather(*map(chunks, (None, 3, 0)))

    none, three, zero = asyncio.run(all_of_them())
    assert not any(chunk.logprobs for chunk in none)
    assert sum(chunk.accepted for chunk in three), "nothing was accepted, so this shows little"
    tokens = [token for chunk in three for token in chunk.tokens]
    prompt = loaded.prompt_tokens("abcabc")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1, : loaded.target.vocab_size]
    wanted = logits.log_softmax(-1)
    found = [each for chunk in three for each in chunk.logprobs]
    assert [each.token for each in found] == tokens
    assert [each.logprob for each in found] == pytest.approx(wanted[torch.arange(len(tokens)), tokens].tolist())
    for each, row in zip(found, wanted, strict=True):
        values, ids = row.topk(3)
        assert [token for token, _ in each.likeliest] == ids.tolist()
        assert [logprob for _, logprob in each.likeliest] == pytest.approx(values.tolist())
    if not settings.get("verify"):
        assert [each.logprob for chunk in zero for each in chunk.logprobs] == pytest.approx([e.logprob for e in found])
    assert not any(each.likeliest for chunk in zero for each in chunk.logprobs)


def test_what_comes_before_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards readers that are late: they get the pieces of all rounds before the one that failed, then its error."""
    step, rounds = engine._scheduler.batch.step, list[int]()

    def failing() -> object:
        rounds.append(1)
        if len(rounds) == 3:
            raise RuntimeError("the third round")
        return step()

    async def late() -> list[Chunk]:
        found = list[Chunk]()
        stream = engine.astream("hello", max_new_tokens=60, sampling=Sampling(logit_bias={0: -100}))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        while engine._scheduler._is_watching:  # the loop stands still until all is over
            time.sleep(0.01)
        found.append(await first)
        found.append(await anext(stream))
        with pytest.raises(RuntimeError, match="the third round"):
            await anext(stream)
        return found

    monkeypatch.setattr(engine._scheduler.batch, "step", failing)
    assert len(asyncio.run(late())) == 2
