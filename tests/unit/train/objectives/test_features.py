"""The target's states of texts that come again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paradraft.train import trainee_module
from paradraft.train.objectives import features
from paradraft.train.objectives.batch import Texts
from paradraft.train.objectives.features import FeatureCache
from paradraft.train.objectives.rows import FILLING
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.run import launch
from tests.conftest import VOCAB, tiny_model
from tests.contract.test_every_trainee import recipe_for

LAYERS = [1, -1]
SIZE = 2 * 32 * 8
"""Bytes of the states of a token: two layers of 32 numbers in float64."""


def texts_of(groups: list[list[list[int]]]) -> Texts:
    """Groups of packed samples."""
    longest = max(sum(map(len, group)) for group in groups)
    rows: dict[str, list[list[int]]] = {"tokens": [], "positions": [], "documents": []}
    for group in groups:
        fill = longest - sum(map(len, group))
        rows["tokens"].append([token for sample in group for token in sample] + [0] * fill)
        rows["positions"].append([place for sample in group for place in range(len(sample))] + [0] * fill)
        rows["documents"].append([number for number, sample in enumerate(group) for _ in sample] + [FILLING] * fill)
    return Texts(**{name: torch.tensor(numbers) for name, numbers in rows.items()})


class Counting(Teacher):
    """Counts the groups that it reads."""

    read_groups = 0

    def states(self, texts: Texts, layers: object) -> torch.Tensor:
        self.read_groups += len(texts.tokens)
        return super().states(texts, LAYERS)


A, B, C = [[5, 6, 7, 8]], [[9, 10]], [[5, 6], [7, 8]]
"""The last has the tokens of the first, as two samples."""


def test_states_are_those_that_the_target_computes(tmp_path: Path) -> None:
    """Guards states of another text, of filling, or of a sample beside others in its group."""
    target = Counting(tiny_model(1), vocab_size=VOCAB, mask_id=None)
    cache = FeatureCache(target, LAYERS, tmp_path / "states", 1e-3)
    for groups, newly_read in (([A, B], 2), ([B, A], 0), ([C, A], 1), ([[*B, *A]], 0), ([C, C, [[1]]], 1)):
        texts, before = texts_of(groups), target.read_groups
        found = cache.states(texts)
        assert target.read_groups - before == newly_read
        expected = Teacher.states(target, texts, LAYERS)
        is_token = (texts.documents != FILLING)[:, :, None]
        torch.testing.assert_close(found * is_token, expected * is_token)


def test_another_process_finds_them(tmp_path: Path) -> None:
    """Guards a run that resumes, against states of other layers, and of a file that a crash has damaged."""
    target, texts = Counting(tiny_model(1), vocab_size=VOCAB, mask_id=None), texts_of([A, B])
    is_token = (texts.documents != FILLING)[:, :, None]

    def states(layers: list[int] = LAYERS) -> torch.Tensor:
        return FeatureCache(target, layers, tmp_path, 1e-3).states(texts) * is_token

    first = states()
    assert torch.equal(states(), first) and target.read_groups == 2
    states([0, -1])
    assert target.read_groups == 4
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:9])
    assert torch.equal(states(), first) and target.read_groups == 6


def test_no_more_is_kept_than_was_said(tmp_path: Path) -> None:
    """Guards disks: what comes when the space is used up is computed each time, and what is kept stays."""
    target = Counting(tiny_model(1), vocab_size=VOCAB, mask_id=None)
    cache = FeatureCache(target, LAYERS, tmp_path, 5e-9 * SIZE)
    for groups, read in (([A], 1), ([B], 2), ([A], 2), ([B], 3), ([[[3]]], 4), ([[[3]]], 4)):
        cache.states(texts_of(groups))
        assert target.read_groups == read
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_keeps_its_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Counting(tiny_model(1), vocab_size=VOCAB, mask_id=None)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: SimpleNamespace(free=features.RESERVE_BYTES))
    cache = FeatureCache(target, LAYERS, tmp_path, 1.0)
    for _ in range(2):
        cache.states(texts_of([A]))
    assert target.read_groups == 2 and not list(tmp_path.iterdir())


def test_nothing_is_kept_by_default(tmp_path: Path) -> None:
    """Guards resumed runs: with torch, states depend in their last bits on the texts beside."""
    target = Counting(tiny_model(1), vocab_size=VOCAB, mask_id=None)
    cache = FeatureCache(target, LAYERS, tmp_path, None)
    for _ in range(3):
        cache.states(texts_of([A]))
    assert target.read_groups == 3 and not list(tmp_path.iterdir()) and cache.notes == ()


@pytest.mark.parametrize("name", ["medusa", "eagle_parallel"])
def test_a_run_learns_the_same(family: Path, tmp_path: Path, name: str) -> None:
    """Guards a cache that changes what is learnt."""
    losses: list[list[float]] = [[], []]
    for index, size in enumerate((0.0, 1.0)):
        recipe = recipe_for(name, family, tmp_path / f"{size}", steps=6, k=3, feature_cache_gb=size)
        launch.train(
            recipe,
            trainee_module(name).build,
            lambda report, index=index: losses[index].append(getattr(report, "loss", 0.0)),
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) >= 6
