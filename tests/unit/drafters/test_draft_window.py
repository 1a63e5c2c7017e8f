"""Draft models that read a shortened prompt."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.core import Committed
from paradraft.drafters.parts.pending_tokens import FIRST, cut_of
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from tests.support.decoding import requests
from tests.support.drafts import draft_of

EXACT = Runtime(dtype="float64", compiled=False)
WINDOW = 32
LONG = [(7 * number * number + 3 * number) % 60 + 1 for number in range(100)]


def engine(family: Path, name: str, window: int | None = WINDOW, **settings: Any) -> Engine:
    drafter = name if window is None else f"{name}:draft_window={window}"
    draft = draft_of(family, name)
    return load(str(family / "target"), drafter=drafter, draft=draft, k=4, runtime=EXACT, lengths="fixed", **settings)


def drafted(of: Engine, texts: list[list[int]]) -> list[list[int]]:
    batch = of.new_batch()
    of.drafter.start(batch.drafting, of.target.device)
    of.drafter.join(requests(texts), Committed(tokens=texts))
    return of.drafter.propose([4] * len(texts)).tokens.tolist()


@pytest.mark.parametrize("name", ["autoregressive", "pard"])
def test_the_draft_model_reads_both_ends(family: Path, name: str) -> None:
    """Guards what a window leaves out: drafts are those after the beginning and the end of a long prompt, beside a
    short prompt, which is read whole. Control: the whole prompt gives other drafts."""
    cut = cut_of(len(LONG), WINDOW)
    texts = [LONG[number:] + LONG[:number] for number in range(0, 50, 10)]
    shown = [text[:FIRST] + text[FIRST + cut :] for text in texts]
    assert WINDOW <= len(shown[0]) - FIRST < 1.5 * WINDOW
    short, whole = LONG[:20], engine(family, name, None)
    assert drafted(engine(family, name), [*texts, short]) == drafted(whole, [*shown, short])
    assert drafted(whole, [*texts, short]) != drafted(whole, [*shown, short])


@pytest.mark.parametrize("name", ["autoregressive", "pard"])
def test_answers_and_turns(family: Path, name: str) -> None:
    """Guards answers after a shortened prompt, in a batch and in the turns of a conversation, whose draft model reads
    on where the turn before ended unless its window has moved."""
    prompts = [LONG, LONG[:30], [*LONG[:60], 5]]
    plain = load(str(family / "target"), runtime=EXACT, drafter="none")
    with engine(family, name, kept_rows=2) as kept:
        results = kept.generate(prompts, max_new_tokens=12)
        for result, expected in zip(results, plain.generate(prompts, max_new_tokens=12), strict=True):
            assert result.tokens == expected.tokens
        for text in (prompts[2], [*prompts[2], *results[2].tokens, 9], [*prompts[2], *results[2].tokens, *LONG[:30]]):
            result = kept.generate([text], max_new_tokens=8)[0]
            assert result.tokens == plain.generate([text], max_new_tokens=8)[0].tokens


@pytest.mark.parametrize("name", ["autoregressive", "pard"])
def test_what_was_kept_of_a_row(family: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows that come back, and rows that move: drafts are those of a drafter that has read all, and the draft
    model reads what both have in common once, unless another part of the prompt is left out."""
    of, fresh = engine(family, name), engine(family, name)
    drafter, lm, read = of.drafter, of.drafter.models[0], []
    forward, prefill = lm.forward, lm.prefill
    monkeypatch.setattr(
        lm, "forward", lambda tokens, **rest: (read.append((tokens >= 0).sum()), forward(tokens, **rest))[1]
    )
    monkeypatch.setattr(lm, "prefill", lambda rows: (read.extend(map(len, rows)), prefill(rows))[1])
    first, second = LONG[:90], LONG[10:30]
    for following in (LONG[:95], LONG[:80] + [5] * 12, LONG, LONG[:40] + LONG[60:95]):
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, following, strict=False))
        )
        batch = of.new_batch()
        drafter.start(batch.drafting, of.target.device)
        drafter.join(requests([second, first]), Committed(tokens=[second, first]))
        drafter.propose([2, 2])
        drafter.keep(torch.tensor([1, 0]))
        assert drafter.save(0, 70)[0].length <= 70 - cut_of(len(first), WINDOW)
        saved = drafter.save(0, len(first))
        drafter.keep(torch.tensor([1]))
        drafter.join(requests([following]), Committed(tokens=[following]))
        drafter.restore(1, saved, shared)
        read.clear()
        drafted_again = drafter.propose([4, 4]).tokens[1].tolist()
        expected = drafted(fresh, [second, following])[1]
        assert drafted_again == expected
        is_same = cut_of(len(following), WINDOW) == cut_of(len(first), WINDOW)
        assert (sum(map(int, read)) < len(following) - shared + 16) if is_same else sum(map(int, read)) > 30


def test_lengths_count_what_is_read(family: Path) -> None:
    """Guards the first draft after a long prompt, which waits until reading it pays."""
    assert engine(family, "pard").drafter.reads(100) == 100 - cut_of(100, WINDOW) < 100
    assert engine(family, "pard", None).drafter.reads(100) == 100


def test_wrong_windows(family: Path) -> None:
    with pytest.raises(ValueError, match="draft_window=31: use at least 32, or leave it out"):
        engine(family, "pard", 31)
    with pytest.raises(ValueError, match="draft_window"):
        engine(family, "ngram")
