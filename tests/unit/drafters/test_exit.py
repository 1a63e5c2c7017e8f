"""The drafter on the target's first layers, in the target's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paradraft.core import Draft, Drafter
from paradraft.decode.batch import Batch
from paradraft.decode.generation import Generation
from paradraft.drafters.exit import Config, ExitDrafter, build
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.cached_rows import RowsView
from paradraft.models.kv_cache import Storage
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree
from tests.support.decoding import requests

EAGER, CPP = Runtime(dtype="float64", compiled=False), Runtime(dtype="float32")
RUNTIMES = [pytest.param(EAGER, id="eager"), pytest.param(CPP, id="C++")]
PROMPTS = [[5, 6, 7, 5, 6], [9], [3, 1, 4, 1, 5, 9, 2, 6] * 9]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.1, top_k=9, seed=2)]


class Repeating(Drafter):
    """Proposes drafts made elsewhere, and computes nothing."""

    traits = ExitDrafter.traits

    def __init__(self, drafts: list[Draft]) -> None:
        self.drafts = iter(drafts)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        return next(self.drafts)


def loaded(family: Path, drafter: str, runtime: Runtime, tree: Tree | None = None) -> Engine:
    return load(str(family / "target"), drafter=drafter, runtime=runtime, k=4, tree=tree, lengths="fixed")


def used(engine: Engine, rows: int) -> Storage:
    cache = engine.target.lm.cache
    return [
        (keys[row, :length].clone(), values[row, :length].clone())
        for row, length in enumerate(cache.lengths[:rows])
        for keys, values in cache.storage
    ]


def begun(engine: Engine) -> Batch:
    batch = engine.new_batch()
    batch.join(list(map(Generation, requests(PROMPTS, SAMPLINGS, 40))))
    return batch


def check_cache(family: Path, runtime: Runtime, tree: Tree | None) -> None:
    """Compares the target's cache after each round with that of a target which gets the same drafts from elsewhere."""
    drafts: list[Draft] = []
    with_view, without = loaded(family, "exit:layer=1", runtime, tree), loaded(family, "none", runtime)
    propose = with_view.drafter.propose
    with_view.drafter.propose = lambda *arguments: drafts.append(propose(*arguments)) or drafts[-1]  # type: ignore[func-returns-value,method-assign]
    batch, caches, texts = begun(with_view), [], []
    for _ in range(8):
        texts.append(batch.step().tokens)
        caches.append(used(with_view, 3))
    repeating = Engine(without.target, Repeating(drafts), with_view.speculation)
    batch = begun(repeating)
    accepted = 0
    for cache, text in zip(caches, texts, strict=True):
        output = batch.step()
        accepted += sum(output.accepted)
        assert output.tokens == text
        assert all(torch.equal(*pair) for pair in zip(sum(cache, ()), sum(used(repeating, 3), ()), strict=True))
    assert accepted, "else no slot that the view has written was kept"


@pytest.mark.parametrize("tree", [None, Tree(budget=6)], ids=["chains", "trees"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_targets_cache_is_as_without_a_view(family: Path, runtime: Runtime, tree: Tree | None) -> None:
    """Guards the slots that both write: after every round those of the committed tokens are the target's, to the last
    bit, also where an accepted path was moved together."""
    check_cache(family, runtime, tree)


def check_all_is_accepted(family: Path, runtime: Runtime) -> None:
    """With all its layers the target drafts its own text, if the view sees the committed tokens and nothing else."""
    engine = loaded(family, "exit:layer=2", runtime)
    results = engine.generate(["a", "helloworld", "The0quick1brown2fox"] * 2, max_new_tokens=41, batch_size=3)
    assert {(result.stats.rounds, len(result.tokens)) for result in results} <= {(9, 41), (10, 41)}
    assert sum(engine.target.lm.passes[each] for each in engine.target.lm.passes if each.logits) < 60


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_all_layers_draft_the_targets_text(family: Path, runtime: Runtime) -> None:
    """Guards the view's lengths, in a batch that rows join and leave: wrong ones lose acceptance, and no text shows
    it."""
    check_all_is_accepted(family, runtime)


def check_drafts(family: Path, runtime: Runtime) -> None:
    """Compares drafts after some rounds with those of a new batch of the same texts."""
    engine, anew = (loaded(family, "exit:layer=1", runtime) for _ in range(2))
    generations = list(map(Generation, requests(PROMPTS, SAMPLINGS, 40)))
    (batch := engine.new_batch()).join(generations)
    for _ in range(6):
        batch.step()
    anew.new_batch().join([Generation(generation.so_far) for generation in generations])
    drafts = [each.drafter.propose([4, 2, 3]).tokens for each in (engine, anew)]
    assert torch.equal(*drafts)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_rejected_tokens_leave_no_trace(family: Path, runtime: Runtime) -> None:
    """Guards the view's lengths after a rejection."""
    check_drafts(family, runtime)


def with_rejected_tokens(view: RowsView) -> None:
    """Rows stay as long as the view has read, if they are longer than the target's."""
    before = view.lengths
    follow(view)
    kept = zip(before, view.lengths, strict=True) if len(before) == len(view.lengths) else []
    view._set_lengths([max(pair) for pair in kept] or view.lengths)


def over_the_last_token(view: RowsView) -> None:
    """The view writes from the last committed slot on."""
    follow(view)
    view._set_lengths([max(length - 1, 0) for length in view.lengths])


follow = RowsView.follow


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (with_rejected_tokens, check_drafts),
        (over_the_last_token, check_all_is_accepted),
        (over_the_last_token, lambda family, runtime: check_cache(family, runtime, None)),
    ],
)
def test_wrong_lengths_are_seen(
    family: Path,
    wrong: Callable[[RowsView], None],
    check: Callable[[Path, Runtime], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control of the checks above."""
    monkeypatch.setattr(RowsView, "follow", wrong)
    with pytest.raises(AssertionError):
        check(family, EAGER)


def test_the_prompt_is_not_read_twice(family: Path) -> None:
    """Guards the first round's speed: the view reads the last token alone."""
    engine = loaded(family, "exit", CPP)
    engine.generate("The0quick1brown2fox", max_new_tokens=20)
    assert {each.tokens for each in engine.drafter.models[0].passes} == {1}


def test_layers(family: Path) -> None:
    target = loaded(family, "none", CPP).target
    assert isinstance(drafter := build(Config(), target, CPP), ExitDrafter)
    assert drafter.lm.model.config.num_hidden_layers == 1
    with pytest.raises(ValueError, match="layer=0: use at least 1, or leave it out"):
        Config(layer=0)
    with pytest.raises(ValueError, match="layer=3: the target has 2 layers; use 1 to 2"):
        loaded(family, "exit:layer=3", CPP)
