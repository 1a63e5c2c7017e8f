"""The trees of EAGLE-2 against the plain way: every path is read by itself, from the committed tokens on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paradraft.core import Request
from paradraft.decode.generation import Generation
from paradraft.drafters.eagle import EagleDrafter
from paradraft.engine import Engine
from paradraft.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling import expansion
from paradraft.speculation import Speculation
from paradraft.tree import ABSENT, Tree
from tests.conftest import VOCAB
from tests.support.drafts import draft_of

PROMPTS = [[5, 6, 7, 5, 6], [9], [3, 1, 4, 1, 5, 9, 2, 6]]


def loaded(family: Path, *, width: int = 64) -> Engine:
    runtime = Runtime(dtype="float64", compiled=False, width=width)
    return load(str(family / "target"), drafter="eagle", draft=draft_of(family, "eagle"), k=4, runtime=runtime)


def proposed(engine: Engine, prompts: list[list[int]], lengths: list[int], tree: Tree) -> list[set[tuple[int, ...]]]:
    """The paths of each row's draft."""
    batch = Engine(engine.target, engine.drafter, Speculation(k=4, tree=tree)).new_batch()
    batch.join([Generation(Request(id=row, tokens=prompt)) for row, prompt in enumerate(prompts)])
    draft = batch.drafter.propose(lengths)
    found = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(() if parent == ABSENT else paths[parent]), token))
        assert len(set(paths)) == len(paths) or ABSENT in tokens
        found.append({path for path in paths if ABSENT not in path})
    return found


def plain(engine: Engine, prompt: list[int], k: int, budget: int, widest: int, number: int) -> set[tuple[int, ...]]:
    """The same of one prompt, path by path."""
    drafter = engine.drafter
    assert isinstance(drafter, EagleDrafter)

    def log_probs_after(path: tuple[int, ...]) -> torch.Tensor:
        batch = Engine(engine.target, drafter, Speculation(k=4)).new_batch()
        batch.join([Generation(Request(tokens=prompt))])
        states = drafter.layers.read([k])
        for token in path:
            states = drafter.layers.step(torch.tensor([[token]]), states)
        return engine.target.lm.head(states)[0, 0].log_softmax(-1)

    values: dict[tuple[int, ...], float] = {(): 0.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(k):
        new: dict[tuple[int, ...], float] = {}
        for path in sorted(level, key=lambda path: -values[path])[:widest]:
            best = log_probs_after(path)[:VOCAB].topk(number)
            for token, log_prob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                new[(*path, token)] = values[path] + log_prob
        values |= new
        level = list(new)
    del values[()]
    return set(sorted(values, key=lambda path: -values[path])[:budget])


@pytest.mark.parametrize(("budget", "expanded", "width"), [(7, 10, 64), (12, 3, 64), (5, 10, 12), (1, 10, 64)])
def test_a_grown_tree_holds_the_likeliest_paths(
    family: Path, budget: int, expanded: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards nodes that are read after the wrong ones, which only acceptance would show; also in a batch, beside a row
    that drafts nothing, and where a pass has room for few nodes."""
    monkeypatch.setattr(expansion, "EXPANDED", expanded)
    engine = loaded(family, width=width)
    widest, number = min(budget, expanded, max(width // 4, 1)), min(budget, expanded)
    expected = [plain(engine, prompt, 4, budget, widest, number) for prompt in PROMPTS]
    for lengths in ([4, 4, 4], [4, 0, 4]):
        found = proposed(engine, PROMPTS, lengths, Tree(budget=budget))
        assert found == [paths if length else set() for paths, length in zip(expected, lengths, strict=True)]
    assert any(len(path) > 1 for paths in expected for path in paths) or budget == 1


def test_side_branches_are_read_after_their_own_tokens(family: Path) -> None:
    """Control: a tree whose side branches go on as the best path does is another one."""
    engine = loaded(family)
    grown = proposed(engine, PROMPTS, [4] * 3, Tree(budget=16))
    fixed = tuple((first, second) for first in range(4) for second in range(3))
    shape = Tree(paths=(*((first,) for first in range(4)), *fixed))
    aside = proposed(engine, PROMPTS, [4] * 3, shape)
    assert any(path not in other for one, other in zip(grown, aside, strict=True) for path in one if len(path) == 2)
