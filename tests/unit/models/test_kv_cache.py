"""The cache as a `transformers` model sees it: `[B, H, S, D]` views, however the storage is laid out."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from paradraft.models import kv_cache
from paradraft.models.kv_cache import SlotCache, Storage, allocate, compact, move_rows, rows_of
from paradraft.train.drafters.dflash import ContextCache
from paradraft.tree import ABSENT

B, H, C, D = 2, 2, 12, 3
CPU = torch.device("cpu")


def storage() -> Storage:
    config = LlamaConfig(hidden_size=12, num_attention_heads=4, num_key_value_heads=H, num_hidden_layers=3)
    return allocate(config, batch_size=B, capacity=C, dtype=torch.float64, devices=[CPU] * config.num_hidden_layers)


def contents(layers: Storage, layer: int) -> tuple[Tensor, Tensor]:
    """Everything a layer holds: what a pass of no tokens sees."""
    nothing = torch.empty(B, H, 0, D, dtype=torch.float64)
    return SlotCache(layers, torch.empty(B, 0, dtype=torch.long), used=C).update(nothing, nothing, layer)


def fill(layers: Storage) -> list[tuple[Tensor, Tensor]]:
    """Random numbers in every slot; returns a copy."""
    slots = torch.arange(C).expand(B, C)
    for layer in range(len(layers)):
        new = torch.randn(2, B, H, C, D, dtype=torch.float64)
        SlotCache(layers, slots, used=C).update(new[0], new[1], layer)
    return [(keys.clone(), values.clone()) for keys, values in (contents(layers, layer) for layer in range(3))]


def test_allocate_falls_back_to_hidden_size_over_heads() -> None:
    """Guards the models whose config names no head_dim, and those with fewer key/value heads than heads."""
    layers = storage()
    assert len(layers) == 3
    assert all(tensor.numel() == B * H * C * D for layer in layers for tensor in layer)
    assert len({tensor.data_ptr() for layer in layers for tensor in layer}) == 6


def test_update_writes_each_row_behind_its_own_length() -> None:
    """Guards against one write position for the whole batch; other layers and slots stay as they are."""
    layers = storage()
    before = fill(layers)
    new_keys, new_values = torch.randn(2, B, H, 2, D, dtype=torch.float64)
    keys, values = SlotCache(layers, torch.tensor([[0, 1], [7, 8]]), used=9).update(new_keys, new_values, 1)
    for old, new in zip(before[1], (new_keys, new_values), strict=True):
        old[0, :, 0:2], old[1, :, 7:9] = new[0], new[1]
    assert torch.equal(keys, before[1][0][:, :, :9])
    assert torch.equal(values, before[1][1][:, :, :9])
    for layer in range(3):
        assert all(map(torch.equal, contents(layers, layer), before[layer]))


def test_what_is_no_number_is_stored_as_zeros_and_noted() -> None:
    """Guards other texts of the batch: attention multiplies what it does not see by 0, and 0 times NaN is NaN. One
    such number in any head of keys or values, in any layer, marks its token and no other."""
    layers = storage()
    cache = SlotCache(layers, torch.arange(4).expand(B, 4), used=4)
    assert cache.is_finite_BN.dtype == torch.bool and cache.is_finite_BN.all()
    given = torch.randn(3, 2, B, H, 4, D, dtype=torch.float64)
    given[0, 0, 0, 0, 1, 0], given[0, 1, 1, 1, 2, 2], given[2, 0, 1, 0, 3, 1] = torch.nan, torch.inf, -torch.inf
    for layer in range(3):
        views = cache.update(given[layer, 0], given[layer, 1], layer)
        for view, new in zip(views, given[layer], strict=True):
            bad = ~new.isfinite().all(3, keepdim=True).all(1, keepdim=True)
            assert torch.equal(view, new.masked_fill(bad, 0.0))
    assert cache.is_finite_BN.tolist() == [[True, False, True, True], [True, True, False, False]]


@pytest.mark.parametrize("in_cpp", [True, False])
def test_compact_moves_a_path_and_nothing_else(in_cpp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a gather that reads slots it has already overwritten, or moves rows without a path; also on GPUs
    and without a C++ compiler, where torch does it."""
    if not in_cpp:
        monkeypatch.setattr("paradraft.models.forward.cpu.tree.compact", lambda *parts: None)
    layers = storage()
    before = fill(layers)
    compact(layers, torch.tensor([3, 5]), torch.tensor([[0, 2, 3, 5], [0, ABSENT, ABSENT, ABSENT]]))
    for layer in range(3):
        for tensor, old in zip(contents(layers, layer), before[layer], strict=True):
            old[0, :, [3, 4, 5, 6]] = old[0, :, [3, 5, 6, 8]]
            assert torch.equal(tensor, old)


def four_rows() -> Storage:
    config = LlamaConfig(hidden_size=12, num_attention_heads=4, num_key_value_heads=H, num_hidden_layers=2)
    layers = allocate(config, batch_size=4, capacity=C, dtype=torch.float64, devices=[CPU] * config.num_hidden_layers)
    for layer in layers:
        for tensor in layer:
            tensor.copy_(torch.randn(tensor.shape, dtype=torch.float64))
    return layers


@pytest.mark.parametrize("order", [[1, 3], [3, 1, 2], [0, 1], [1, 0, 3, 2], [2, 0, 1], [3]])
def test_rows_that_stay_move_to_the_front_of_the_same_memory(order: list[int]) -> None:
    """Guards batches that shrink: the others' keys are not lost, in any order, no memory is taken, and what lies
    after the used part is not moved."""
    layers, used = four_rows(), [7, 5, 6, 3]
    before = [[tensor.clone() for tensor in layer] for layer in layers]
    move_rows(layers, torch.tensor(order), used)
    for layer, old_layer in zip(rows_of(layers, 0, len(order)), before, strict=True):
        for now, old in zip(layer, old_layer, strict=True):
            assert all(torch.equal(now[to, : used[row]], old[row, : used[row]]) for to, row in enumerate(order))
            assert torch.equal(now[:, 7:], old[: len(order), 7:])
    for layer, old_layer in zip(layers, before, strict=True):
        for now, old in zip(layer, old_layer, strict=True):
            assert torch.equal(now[len(order) :], old[len(order) :]), "the rest stays as it was"


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (0, 1), (1, 3), (3, 4)])
def test_rows_of_a_cache_are_in_the_same_memory(start: int, stop: int) -> None:
    """Guards rows that are read alone: what is written there is in the cache; it is no view, on which a compiled pass
    would depend."""
    layers = four_rows()
    part = rows_of(layers, start, stop)
    for layer, whole_layer in zip(part, layers, strict=True):
        for now, whole in zip(layer, whole_layer, strict=True):
            assert now.shape == (stop - start, *whole.shape[1:]) and not now._is_view()
            assert torch.equal(now, whole[start:stop])
            now[-1, 2] = 5.0
            assert (whole[stop - 1, 2] == 5.0).all()


def test_a_cache_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against being killed by the system in the middle of an answer."""
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: 2.0**30)
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
    with pytest.raises(ValueError, match=r"a cache for 16 rows of 4096 tokens needs 16\.0 GiB and 1\.0 GiB are free"):
        allocate(config, batch_size=16, capacity=4096, dtype=torch.float32, devices=[CPU] * config.num_hidden_layers)


def test_a_cache_may_take_all_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a capacity that was computed from the free memory against a refusal."""
    config = LlamaConfig(hidden_size=12, num_attention_heads=4, num_key_value_heads=H, num_hidden_layers=3)
    needed = 3 * 2 * B * H * C * D * 8
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(kv_cache, "free_bytes", lambda device, free=free: float(free))
        with nullcontext() if fits else pytest.raises(ValueError, match="GiB are free"):
            allocate(config, batch_size=B, capacity=C, dtype=torch.float64, devices=[CPU] * config.num_hidden_layers)


def test_what_newer_passes_hand_on_is_taken() -> None:
    """Guards all passes but those in C++ where pip installs `transformers` 5.24: its layers give caches their own
    arguments too, and versions before gave them a dict or nothing."""
    new = torch.randn(2, B, H, C, D, dtype=torch.float64)
    slots = torch.arange(C).expand(B, C)
    context = [(new[0], new[1])]
    for further, named in (((), {}), (({},), {}), ((), {"kwargs": {"use_cache": True}})):
        keys, _ = SlotCache(storage(), slots, used=C).update(new[0], new[1], 0, *further, **named)
        assert torch.equal(keys, new[0])
        keys, values = ContextCache(context).update(new[1], new[0], 0, *further, **named)
        assert torch.equal(keys, torch.cat([new[0], new[1]], dim=2)) and torch.equal(values[:, :, C:], new[0])
