"""Prompts that are read in pieces beside the rounds of others: who waits, who overtakes, and who is woken."""

from __future__ import annotations

import pytest

from paradraft.engine.engine import Engine
from paradraft.sampling_params import Sampling
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
from tests.support.serving import until

LONG = [7, 9, 11, 13, 8] * 6


class SmallPieces:
    """Four tokens of prompts between two rounds, and eight where there are none."""

    alone = 8

    def most(self, rows: int) -> int:
        return 4

    def add(self, rows: int, tokens: int, *, seconds: float) -> None:
        pass


@pytest.fixture
def in_pieces() -> Engine:
    engine = small_engine()
    engine.lengths.policy.k = 0
    engine._scheduler.batch.prefill.pace = SmallPieces()
    return engine


def test_a_long_prompt_is_read_beside_the_rounds_of_others(in_pieces: Engine) -> None:
    """Guards readers of streams against standing still while the prompts of others are read."""
    expected = [alone(in_pieces, prompt, 40) for prompt in (PROMPTS[0], LONG, PROMPTS[1])]
    streams = [
        in_pieces.stream(prompt, max_new_tokens=40, sampling=SAMPLED) for prompt in (PROMPTS[0], LONG, PROMPTS[1])
    ]
    found = [next(streams[0]).tokens]
    with passes_of(in_pieces) as rows:
        found += [next(streams[1]).tokens, next(streams[2]).tokens]
    assert rows == [1] * 8 + [2, 3], "eight rounds read pieces of the long prompt, and the other has but one token"
    assert [first + tokens_of(rest) for first, rest in zip(found, streams, strict=True)] == expected


def test_a_prompt_is_read_at_once_where_nobody_watches(in_pieces: Engine) -> None:
    """Guards the speed of `generate`, whose callers wait for whole answers."""
    with passes_of(in_pieces) as rows:
        in_pieces.generate([PROMPTS[0], LONG], max_new_tokens=5, sampling=Sampling(), batch_size=2)
    assert rows == [2] * 5


@pytest.mark.parametrize("ends", ["the reader", "the others", "a token that is no number"])
def test_who_ends_while_a_prompt_is_read(in_pieces: Engine, ends: str) -> None:
    """Guards the requests beside a prompt that is half read: where its reader goes, where all others end before it is
    read, and where its states are no numbers, which is an error for its reader alone."""
    poisoned(in_pieces, 50)
    bias = Sampling(temperature=0.9, seed=3, logit_bias={50: -100.0})
    most = 3 if ends == "the others" else 30
    expected = alone(in_pieces, PROMPTS[0], most, bias), alone(in_pieces, LONG, 5, bias)
    other = in_pieces.stream(PROMPTS[0], max_new_tokens=most, sampling=bias)
    found = next(other).tokens
    prompt = [*LONG[:14], 50, *LONG[15:]] if ends == "a token that is no number" else LONG
    asked = generation(in_pieces, prompt, 5, bias)
    news = in_pieces._scheduler.stream(asked)
    if ends == "the reader":
        in_pieces._scheduler._waiting.append(asked)
        found += next(other).tokens
        assert asked in in_pieces._scheduler.batch.prefill.generations
        asked.is_cancelled = True
    elif ends == "the others":
        list(news)
        assert asked.tokens == expected[1]
    else:
        with pytest.raises(ValueError, match="not numbers"):
            list(news)
    assert found + tokens_of(other) == expected[0]
    assert not in_pieces._scheduler.batch.prefill.generations and not asked.tokens[5:]


def test_a_short_prompt_overtakes_long_ones(in_pieces: Engine) -> None:
    """Guards a client with a short question against the documents of others, which came before it: its prompt is read
    beside them, and it has its answer while they wait for theirs."""
    texts = [LONG[start:] for start in range(4)]
    expected = [alone(in_pieces, text, 6) for text in [*texts, PROMPTS[2]]]
    long = [generation(in_pieces, text, 6) for text in texts]
    for asked in long:
        asked.is_watched = True
    in_pieces._scheduler._waiting.extend(long)
    with passes_of(in_pieces) as rows:
        found = tokens_of(in_pieces.stream(PROMPTS[2], max_new_tokens=6, sampling=SAMPLED))
    assert rows == [1] * 6 and in_pieces._scheduler.batch.prefill.generations == long
    assert not any(asked.tokens for asked in long)
    in_pieces._scheduler._wait_until(lambda: all(asked.is_told for asked in long))
    assert [*(asked.tokens for asked in long), found] == expected


def test_a_prompt_is_given_up_while_nothing_else_runs(in_pieces: Engine) -> None:
    """Guards the time that the prompt of a client that has gone would take: it is read in pieces also alone."""
    asked = generation(in_pieces, LONG, 6)
    asked.is_watched = True
    in_pieces._scheduler._waiting.append(asked)
    in_pieces._scheduler._run_round()
    assert in_pieces._scheduler.batch.prefill.generations == [asked] and in_pieces.target.unread == [29 - 8]
    asked.is_cancelled = True
    in_pieces._scheduler._run_round()
    assert not in_pieces._scheduler.batch.members and not in_pieces.target.unread
    assert alone(in_pieces, LONG, 6) == alone(in_pieces, LONG, 6)


def test_who_comes_while_only_prompts_are_read_has_news_at_once(
    in_pieces: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards an event loop's clients that come while a long prompt of another is read, and nothing else runs: their
    readers are woken by their own rounds, not by the first one of that prompt."""
    long, short = generation(in_pieces, LONG, 6), generation(in_pieces, PROMPTS[2], 6)
    scheduler, read, loop, news = (
        in_pieces._scheduler,
        in_pieces._scheduler.batch.read,
        Loop(),
        list[tuple[str, bool]](),
    )

    def reading(most: int) -> None:
        if short not in [watched.generation for watched in scheduler._watched] and not short.tokens:
            scheduler.watch(short, loop, lambda: news.append(("short", bool(long.tokens))))
        read(most)

    monkeypatch.setattr(in_pieces._scheduler.batch, "read", reading)
    scheduler.watch(long, loop, lambda: news.append(("long", True)))
    until(lambda: long.is_told and short.is_told and not scheduler._is_watching)
    assert news[0] == ("short", False)
