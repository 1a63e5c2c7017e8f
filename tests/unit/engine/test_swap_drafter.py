"""Another drafter in the middle of answers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from tests.conftest import tiny_tokenizer
from tests.support.drafts import train_head

EXACT = Runtime(dtype="float64", compiled=False)
PROMPTS = ["helloworld", "abcabc", "hello"]
SAMPLED = Sampling(temperature=0.9, presence_penalty=0.5, seed=3)


def engine_of(family: Path, **settings: Any) -> Engine:
    settings = {"drafter": "autoregressive", "k": 3, "lengths": "fixed", "draft": str(family / "draft")} | settings
    return load(str(family / "target"), runtime=EXACT, **settings)


@pytest.fixture(scope="module")
def other(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft with another head, which guesses next to nothing."""
    folder = tmp_path_factory.mktemp("other") / "draft"
    draft = AutoModelForCausalLM.from_pretrained(family / "draft")
    with torch.no_grad():
        draft.get_output_embeddings().weight.neg_()
    draft.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("settings", [{}, {"tree": 6}, {"kept_rows": 2}], ids=str)
def test_answers_go_on_with_the_same_text(
    family: Path, other: Path, settings: dict[str, Any], sampling: Sampling
) -> None:
    """Guards rows, states and noise of the drafter before: a text is that of an engine that was never changed, and the
    guesses are those of the new drafter (control)."""
    with engine_of(family, **settings) as plain:
        wanted = [plain.generate(prompt, max_new_tokens=40, sampling=sampling).tokens for prompt in PROMPTS]
    with engine_of(family, **settings) as engine:
        before = engine.drafter
        stream = engine.stream(PROMPTS[0], max_new_tokens=40, sampling=sampling)
        chunks = [next(stream) for _ in range(3)]
        engine.swap_drafter(other)
        assert engine.drafter is not before and engine.speculation.draft == str(other)
        after = list(stream)
        assert [token for chunk in chunks + after for token in chunk.tokens] == wanted[0]
        assert sum(chunk.accepted for chunk in chunks) > sum(chunk.accepted for chunk in after) or "tree" in settings
        assert [engine.generate(p, max_new_tokens=40, sampling=sampling).tokens for p in PROMPTS] == wanted
        engine.swap_drafter(family / "draft")
        results = engine.generate(PROMPTS, max_new_tokens=40, sampling=sampling)
        assert [result.tokens for result in results] == wanted
        assert sum(sum(result.accepted) for result in results) > 10


def test_swaps_between_the_rounds_of_others(family: Path, other: Path) -> None:
    """Guards a round that has the old drafter's rows and the new one's: swaps come from two threads all the time."""
    with engine_of(family) as engine:
        wanted = [engine.generate(prompt, max_new_tokens=30, sampling=SAMPLED).tokens for prompt in PROMPTS]
        is_over, swaps = threading.Event(), []

        def swap() -> None:
            while not is_over.is_set():
                engine.swap_drafter(family / "draft" if len(swaps) % 2 else other)
                swaps.append(1)

        threads = [threading.Thread(target=swap) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(4):
                results = engine.generate(PROMPTS, max_new_tokens=30, sampling=SAMPLED)
                assert [result.tokens for result in results] == wanted
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert len(swaps) > 3 and torch.get_default_dtype() == torch.float32
        assert engine._scheduler.batch.drafter is engine.drafter


def test_heads_on_the_states_of_the_target(family: Path, tmp_path: Path) -> None:
    """Guards drafters that read the target's states: rows that go on are read anew."""
    for seed in (1, 2):
        train_head(family, "medusa", tmp_path / str(seed), k=3, seed=seed, lr=1e-2 / seed)
    with engine_of(family, drafter="medusa", draft=str(tmp_path / "1")) as engine:
        wanted = engine.generate(PROMPTS[0], max_new_tokens=40, sampling=SAMPLED).tokens
        stream = engine.stream(PROMPTS[0], max_new_tokens=40, sampling=SAMPLED)
        tokens = list(next(stream).tokens)
        engine.swap_drafter(str(tmp_path / "2"))
        assert tokens + [token for chunk in stream for token in chunk.tokens] == wanted


def test_mistakes_change_nothing(family: Path, other: Path, tmp_path: Path) -> None:
    """Guards an engine without a drafter, or with one that needs other passes."""
    with engine_of(family, drafter="ngram", draft=None) as engine, pytest.raises(ValueError, match="from a folder"):
        engine.swap_drafter(other)
    for k in (2, 3):
        train_head(family, "medusa", tmp_path / str(k), k=k, lr=1e-2)
    with engine_of(family, drafter="medusa", draft=str(tmp_path / "3")) as engine:
        wanted, before = engine.generate(PROMPTS[0], max_new_tokens=20).tokens, engine.drafter
        with pytest.raises(ValueError, match=r"draft='.*2' does not draft as '.*3' does"):
            engine.swap_drafter(tmp_path / "2")
        with pytest.raises(ValueError, match="no-such-folder"):
            engine.swap_drafter(tmp_path / "no-such-folder")
        assert engine.drafter is before and engine.generate(PROMPTS[0], max_new_tokens=20).tokens == wanted
