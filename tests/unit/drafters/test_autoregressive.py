"""VSD with prompt tokens on the draft model: the same drafts, in fewer passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.core import Request
from paradraft.decode.generation import Generation
from paradraft.drafters import branches, drafter_class
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.parents import depths
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree
from tests.support.drafts import draft_of

EAGER, CPP = Runtime(dtype="float64", compiled=False), Runtime(dtype="float32")
RUNTIMES = [pytest.param(EAGER, id="eager"), pytest.param(CPP, id="C++")]
ASKED = [
    ([5, 6, 7, 5, 6], Sampling()),
    ([9], Sampling(temperature=0.8, seed=3)),
    ([3, 1, 4, 1, 5, 9, 2, 6] * 9, Sampling(temperature=0.7, repetition_penalty=1.2, seed=1)),
    ([2, 7, 1, 8], Sampling(temperature=1.1, top_k=9, seed=2)),
]


def loaded(family: Path, settings: str, **others: Any) -> Engine:
    """The target drafts for itself, so that deep guesses are accepted too."""
    target = str(family / "target")
    return load(target, drafter=f"autoregressive{settings}", draft=target, **others)


def with_prompts(family: Path, settings: str = "") -> str:
    return f":prompts={draft_of(family, 'ppd')}{settings}"


def passes_of(engine: Engine) -> int:
    return sum(engine.drafter.models[0].passes.values())


@pytest.mark.parametrize(
    ("size", "runtime", "verify"),
    [
        (2, EAGER, "match"),
        (2, CPP, "rejection"),
        (9, EAGER, "rejection"),
        (9, CPP, "match"),
        (48, EAGER, "match"),
        (48, CPP, "rejection"),
    ],
)
def test_drafts_are_the_same_in_fewer_passes(family: Path, size: int, runtime: Runtime, verify: str) -> None:
    """Guards guesses that are taken for what the draft model draws there, and their distributions, which a rule reads:
    round by round, in a batch whose rows want drafts of different lengths. Every pair of settings occurs."""
    engines = [
        loaded(family, settings, runtime=runtime, verify=verify, k=7)
        for settings in ("", with_prompts(family, f":size={size}"))
    ]
    drafters = [engine.drafter for engine in engines]
    batches = [engine.new_batch() for engine in engines]
    for batch in batches:
        batch.join(
            [
                Generation(Request(id=row, tokens=tokens, sampling=sampling, max_new_tokens=40))
                for row, (tokens, sampling) in enumerate(ASKED)
            ]
        )
    for number in range(6):
        lengths = [(number + row) % 8 for row in range(len(ASKED))]
        plain, fewer = (drafter.propose(lengths) for drafter in drafters)
        for row, length in enumerate(lengths):
            assert plain.tokens[row, :length].tolist() == fewer.tokens[row, :length].tolist()
            if verify == "rejection" and length:
                assert plain.probs is not None and fewer.probs is not None
                difference = plain.probs[row, :length] - fewer.probs[row, :length]
                assert float(difference.abs().max()) < (1e-9 if runtime.dtype == "float64" else 1e-5)
        for batch, draft in zip(batches, (plain, fewer), strict=True):
            # As `decode_round` goes on.
            draft = draft.where(depths(draft.parents) < torch.tensor(lengths)[:, None])
            out = batch.target.forward(draft)
            verdict = batch.verify(draft, out, batch.sampler)
            committed = batch.target.commit(verdict, out)
            batch.drafter.commit(committed)
            batch.sampler.commit(committed)
    few, many = passes_of(engines[1]), passes_of(engines[0])
    assert few < many if size > 2 else few <= many


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_answers_are_those_of_plain_decoding(family: Path, runtime: Runtime) -> None:
    """Guards rows that join and leave, and conversations whose caches are kept."""
    plain = load(str(family / "target"), runtime=runtime)
    drafted = loaded(family, with_prompts(family), runtime=runtime, kept_rows=2, lengths="heuristic")
    prompts, samplings = [list(tokens) for tokens, _ in ASKED], [sampling for _, sampling in ASKED]
    for _ in range(2):
        found, expected = (
            engine.generate(prompts, max_new_tokens=[9, 3, 20, 14], sampling=samplings, batch_size=3)
            for engine in (drafted, plain)
        )
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        prompts = [[*prompt, *answer.tokens, 4] for prompt, answer in zip(prompts, expected, strict=True)]
        samplings = [replace(sampling, seed=7) for sampling in samplings]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_passes_are_as_wide_as_the_size_asks_for(family: Path, runtime: Runtime) -> None:
    """Guards a runtime whose passes are narrower: a pass of 49 tokens, but room for 8."""
    plain = load(str(family / "target"), runtime=runtime).generate([[5, 6, 7]], max_new_tokens=30)[0]
    narrow = replace(runtime, width=8)
    for size in (48, 200):
        engine = loaded(family, with_prompts(family, f":size={size}"), runtime=narrow, k=5)
        assert engine.generate([[5, 6, 7]], max_new_tokens=30)[0].tokens == plain.tokens


def test_fewer_words_than_guesses(family: Path) -> None:
    """Guards a vocabulary with fewer tokens than a tree may have ranks."""
    sampler = Sampler([Request(tokens=[1])])
    found = sampler.guesses_at(torch.zeros(1, 2, 6), torch.tensor([[0, 1]]), 10)
    assert found.tokens.shape == (1, 2, 6)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (":size=9", "size=9 is for prompt tokens: name their folder as prompts=, or leave it out"),
        ("PROMPTS:size=0", "size=0: use 1 to 512"),
        ("PROMPTS:size=513", "size=513: use 1 to 512"),
        (":prompts=nowhere", "prompts='nowhere' is no folder"),
        ("PROMPTS:size=1", "size=1: each prompt token has 2 copies, use at least 2"),
    ],
)
def test_settings_that_do_not_fit(family: Path, settings: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        loaded(family, settings.replace("PROMPTS", with_prompts(family)))


def test_prompt_tokens_of_another_model(family: Path) -> None:
    """Guards prompt tokens of the target beside a draft model, which would guess nothing right and say nothing."""
    with pytest.warns(UserWarning, match="was trained for other weights"):
        load(
            str(family / "target"),
            drafter=f"autoregressive{with_prompts(family)}",
            draft=str(family / "pard"),
            lengths="fixed",
        )


def test_trees_are_refused(family: Path) -> None:
    """Guards a tree that would silently be a chain, and plans of trees; before anything is loaded."""
    drafter = f"autoregressive{with_prompts(family)}"
    assert branches("autoregressive") and not branches(drafter)
    assert drafter_class("autoregressive").traits.can_run_ahead and not drafter_class(drafter).traits.can_run_ahead
    with pytest.raises(ValueError, match="chains only"):
        loaded(family, with_prompts(family), tree=Tree(budget=8))
