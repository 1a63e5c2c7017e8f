"""The selector: what it drafts against a plain computation of its scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.core import INVALID, Request
from paradraft.decode.generation import Generation
from paradraft.engine.loader import load
from paradraft.formats.head import Head, TargetIdentity, write_head
from paradraft.formats.path_heads import SELECTED, SELECTOR_EMBEDDING, SELECTOR_OUTPUT, SELECTOR_RANK, SELECTOR_STATE
from paradraft.formats.vocab_map import D2T, T2D
from paradraft.models.forward.cpu.drawing import PassOutputs
from paradraft.models.forward.cpu.selector import NativeSelector
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.sources.loading import load_config
from paradraft.tree import ABSENT, Tree
from tests.support.drafts import train_head
from tests.unit.drafters.test_dflash import random_weights, settings_for

RANK, IDS = 6, 20
PROMPTS = ([5], [7, 9, 11, 13, 2], list(range(1, 14)), [8, 3] * 20)
RUNTIMES = {
    "eager, float64": Runtime(dtype="float64", compiled=False),
    "C++, float32": Runtime(dtype="float32"),
    "C++, bfloat16": Runtime(dtype="bfloat16"),
}


def written(folder: Path, target: Path, *, is_reduced: bool) -> dict[str, torch.Tensor]:
    """Writes a drafter with a selector of random numbers; its weights."""
    settings, config = settings_for(target, causal=True, anchor_first=True), load_config(str(target))
    weights, generator = random_weights(settings), torch.Generator().manual_seed(9)
    ids = IDS if is_reduced else config.vocab_size
    shapes = {
        SELECTOR_EMBEDDING: (config.vocab_size, RANK),
        SELECTOR_OUTPUT: (ids, RANK),
        SELECTOR_STATE: (RANK, settings.width),
    }
    weights |= {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    if is_reduced:
        d2t = torch.arange(IDS)  # token 2 i is row i
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[torch.arange(IDS) * 2] = True
        weights |= {D2T: d2t, T2D: t2d}
    entries = {"model_type": "dflash", SELECTOR_RANK: RANK} | settings.entries()
    write_head(folder, Head(config=entries, target=TargetIdentity.of(config), weights=weights))
    return weights


def scores_after(
    token: int, logits_V: torch.Tensor, state_D: torch.Tensor, weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """`[V]` scores of a place after a token, by hand; -inf for tokens that are not drafted."""
    embedding, output, state = (
        weights[name].double() for name in (SELECTOR_EMBEDDING, SELECTOR_OUTPUT, SELECTOR_STATE)
    )
    result = torch.full_like(logits_V, -torch.inf)
    for candidate in logits_V.topk(SELECTED).indices.tolist():
        row = candidate // 2 if D2T in weights else candidate
        result[candidate] = logits_V[candidate] + (output[row] * embedding[token] * (state @ state_D)).sum()
    return result


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_drafts_by_its_scores(
    family: Path, tmp_path: Path, runtime: str, temperature: float, is_reduced: bool
) -> None:
    """Guards another token before than the one that was drafted, another place's state or candidates, and noise of
    another place, in chains of rows of several lengths; greedy ones are computed in float64 here."""
    weights = written(tmp_path, family / "target", is_reduced=is_reduced)
    engine = load(
        str(family / "target"), drafter="dflash", draft=str(tmp_path), k=4, runtime=RUNTIMES[runtime], lengths="fixed"
    )
    batch = engine.new_batch()
    drafter: Any = batch.drafter
    sampling = Sampling(temperature=temperature, seed=3)
    batch.join([Generation(Request(id=row, tokens=prompt, sampling=sampling)) for row, prompt in enumerate(PROMPTS)])
    outputs, changed = {}, 0
    head = drafter._head

    def watched(states: torch.Tensor) -> torch.Tensor:
        outputs["states"], outputs["logits"] = states.clone(), head(states)
        return outputs["logits"].clone()

    drafter._head = watched
    draft = drafter.propose([4] * len(PROMPTS))
    for row, prompt in enumerate(PROMPTS):
        token = prompt[-1]
        for place in range(4):
            logits_V, state_D = (outputs[name][row, place].double() for name in ("logits", "states"))
            scores_V = scores_after(token, logits_V, state_D, weights)
            if temperature:
                depths = torch.full((len(PROMPTS), 1), place)
                whole = scores_V.expand(len(PROMPTS), 1, -1)
                scores_V = drafter._sampler.scores(whole, depths)[row, 0]
            token = int(draft.tokens[row, place])
            assert scores_V[token] >= scores_V.max() - (1e-9 if "float64" in runtime else 1e-2)
            changed += token != int(logits_V.argmax())
    assert changed > 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("tree", [None, Tree(budget=5), Tree(budget=24), Tree(paths=((0,), (1,), (0, 0), (1, 2)))])
def test_all_passes_draft_the_same(
    family: Path, tmp_path: Path, tree: Tree | None, is_reduced: bool, temperature: float
) -> None:
    """Guards trees of C++ that continue a node by another's token or place, or sum other chances than Python's."""
    written(tmp_path, family / "target", is_reduced=is_reduced)
    sampling = Sampling(temperature=temperature, seed=3)
    generations = [Generation(Request(id=row, tokens=prompt, sampling=sampling)) for row, prompt in enumerate(PROMPTS)]
    found = []
    for runtime in (RUNTIMES["eager, float64"], RUNTIMES["C++, float32"]):
        engine = load(
            str(family / "target"), drafter="dflash", draft=str(tmp_path), k=4, runtime=runtime, lengths="fixed",
            tree=tree,
        )  # fmt: skip
        batch = engine.new_batch()
        batch.join(generations)
        draft = batch.drafter.propose([4] * len(PROMPTS))
        found.append([set(paths_of(*row)) for row in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)])
        batch.clear()
    assert found[0] == found[1]
    assert all(len(row) > max(map(len, row)) for row in found[0]) == (tree is not None)  # some are siblings


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens on the way to each node of a tree."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        if token != ABSENT:
            paths.append((*(paths[parent] if parent != ABSENT else ()), token))
    return paths


class Only:
    """Allows one token."""

    def __call__(self, text: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(-1, torch.tensor([1]), 0.0)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("head", ["selector_rank", "markov_rank", "previous_token_rank"])
@pytest.mark.parametrize(
    ("tree", "sampling"),
    [
        (None, Sampling(processors=[Only()])),
        (Tree(budget=5), Sampling(processors=[Only()])),
        (Tree(paths=((0,), (1,), (1, 0))), Sampling(temperature=0.8, top_k=1)),
        (Tree(paths=((0,), (1,), (0, 0), (1, 2))), Sampling(temperature=0.8, top_p=0.1)),
    ],
)
def test_nothing_is_drafted_after_no_token(
    family: Path, tmp_path: Path, runtime: str, head: str, tree: Tree | None, sampling: Sampling
) -> None:
    """Guards against an error where a grammar or a filter leaves a node without a token: the text is the target's."""
    train_head(family, "dflash", tmp_path / "draft", k=4, steps=1, draft_vocab_size=20, **{head: 4})
    settings = {"runtime": RUNTIMES[runtime], "lengths": "fixed"}
    engine = load(str(family / "target"), drafter="dflash", draft=str(tmp_path / "draft"), k=4, tree=tree, **settings)
    plain = load(str(family / "target"), drafter="none", **settings)
    for prompt in PROMPTS:
        found, expected = (each.generate([prompt], max_new_tokens=8, sampling=sampling)[0] for each in (engine, plain))
        assert found.tokens == expected.tokens


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocabulary", [5, 200])
def test_logits_that_are_no_numbers_draw_no_token(threads: int, vocabulary: int) -> None:
    """Guards against a token that is drawn from NaN, or from another row's or place's candidates."""
    generator = torch.Generator().manual_seed(4)
    before, chosen = (torch.randn(vocabulary, RANK, generator=generator) for _ in range(2))
    logits, states = torch.randn(7, 3, vocabulary, generator=generator), torch.randn(7, 3, RANK, generator=generator)
    native = NativeSelector(before, chosen, SELECTED)
    whole = native.chains(PassOutputs([0] * 7, logits, states, [0.0] * 7, None, threads))
    broken = logits.clone()
    broken[2, 1, 3] = torch.nan
    broken[5, 0, 1] = torch.inf
    found = native.chains(PassOutputs([0] * 7, broken, states, [0.0] * 7, None, threads))
    assert found[2].tolist()[:2] == [int(whole[2, 0]), INVALID] and int(found[5, 0]) == INVALID
    others = [0, 1, 3, 4, 6]
    assert torch.equal(found[others], whole[others]) and bool((whole >= 0).all())
    tokens, parents = native.trees(PassOutputs([0] * 7, broken, states, [0.0] * 7, None, threads), number=4, budget=9)
    rows = [paths_of(*row) for row in zip(tokens.tolist(), parents.tolist(), strict=True)]
    assert rows[5] == [(INVALID,)] and all(path[-1] == INVALID for path in rows[2] if len(path) == 2)
    assert all(min(path) >= 0 for row in others for path in rows[row])


@pytest.mark.parametrize("name", [SELECTOR_EMBEDDING, SELECTOR_OUTPUT, SELECTOR_STATE])
def test_damaged_weights_are_named(family: Path, tmp_path: Path, name: str) -> None:
    """Guards a checkpoint whose head is of another target or was cut."""
    weights = written(tmp_path, family / "target", is_reduced=False)
    config = {"model_type": "dflash", SELECTOR_RANK: RANK}
    config |= settings_for(family / "target", causal=True, anchor_first=True).entries()
    identity = TargetIdentity.of(load_config(str(family / "target")))
    write_head(tmp_path, Head(config=config, target=identity, weights=weights | {name: weights[name][:-1].clone()}))
    with pytest.raises(ValueError, match=rf"{name.replace('.', '[.]')} has the shape .* train it again"):
        load(str(family / "target"), drafter="dflash", draft=str(tmp_path), k=4)
