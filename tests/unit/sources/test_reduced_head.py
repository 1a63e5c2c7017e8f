"""Draft models whose output head has fewer rows than their embedding."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from paradraft.models.causal_lm import CausalLM
from paradraft.sources.load_plan import plan_of
from paradraft.sources.packed_file import SETTING
from paradraft.sources.target_loading import load_lm, load_target, weights_bytes
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support.decoding import empty_rows
from tests.support.kinds import model_of
from tests.support.reduced_heads import RUNTIMES, reduced_folder
from tests.support.targets import write_model

IDS = [0, 3, 4, 5, *range(10, 40, 3), VOCAB - 1, VOCAB + 4]
"""With one id that only pads the embedding."""


def logits_of(lm: CausalLM) -> torch.Tensor:
    """Of a pass, and of its head alone."""
    empty_rows(lm, 2)
    out = lm.forward(torch.tensor([[5, 7, 9], [1, 2, -1]]), hidden_layers=(-1,))
    alone = lm.head(out.hidden[-1])
    return torch.stack([out.logits, alone])[:, :, :2]


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_rows_are_those_of_the_whole_head(tmp_path: Path, name: str) -> None:
    """Guards every way of loading and of computing: the logits of kept ids are the same, in C++ to the last bit, and
    all others are -inf. Nothing is called unused, and no pass is refused."""
    whole = write_model(tmp_path / "whole", "llama", hidden_size=64, intermediate_size=64, layers=2)
    reduced = reduced_folder(Path(whole), tmp_path / "reduced", IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = (load_lm(plan_of(folder, RUNTIMES[name]), VOCAB) for folder in (whole, reduced))
    assert found.is_native == expected.is_native == name.startswith("C++")
    assert len(found.model.lm_head.weight) == len(IDS)
    is_kept_V = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(IDS[:-1]), True)
    logits = logits_of(expected)
    wanted, logits = logits.masked_fill(~is_kept_V, -torch.inf), logits_of(found)
    assert torch.equal(logits, wanted) if found.is_native else torch.allclose(logits, wanted, rtol=1e-5, atol=1e-6)
    assert bool((logits > -torch.inf)[..., is_kept_V].all())
    assert weights_bytes(plan_of(reduced, RUNTIMES[name])) < weights_bytes(plan_of(whole, RUNTIMES[name]))


@pytest.mark.parametrize("kind", ["gemma3_text with a softcap", "granite", "phi3", "qwen3_moe"])
def test_other_families_have_them_too(tmp_path: Path, kind: str) -> None:
    """Guards families that PyTorch computes, whose logits are scaled or capped, or whose weights are renamed."""
    whole = tmp_path / "whole"
    model_of(kind, tie_word_embeddings=False).save_pretrained(whole)
    tiny_tokenizer().save_pretrained(whole)
    reduced = reduced_folder(whole, tmp_path / "reduced", IDS, has_t2d=False)
    expected, found = (load_lm(plan_of(str(folder), RUNTIMES["eager"]), VOCAB) for folder in (whole, reduced))
    is_kept_V = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(IDS[:-1]), True)
    wanted = logits_of(expected).masked_fill(~is_kept_V, -torch.inf)
    assert torch.allclose(logits_of(found), wanted, rtol=1e-9, atol=1e-9)


def test_a_second_start_has_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the file of packed weights: its head has as few rows."""
    monkeypatch.setenv(SETTING, "1")
    cache = tmp_path / "cache"
    monkeypatch.setattr("paradraft.sources.packed_file.cache_folder", lambda: cache)
    reduced = reduced_folder(Path(write_model(tmp_path / "whole", layers=2)), tmp_path / "reduced", IDS)
    first = logits_of(load_lm(plan_of(reduced, RUNTIMES["C++ int8"]), VOCAB))
    (file,) = cache.glob("weights-*.safetensors")
    before = file.stat().st_ino
    assert torch.equal(logits_of(load_lm(plan_of(reduced, RUNTIMES["C++ int8"]), VOCAB)), first)
    assert file.stat().st_ino == before


def test_a_relative_path_names_the_same_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards folders that are named as users name them: the file was searched in the folder of that name inside it, so
    that the head was refused as one of a wrong shape, and other models were read as a whole to be rounded."""
    reduced = Path(reduced_folder(Path(write_model(tmp_path / "whole", layers=2)), tmp_path / "reduced", IDS))
    monkeypatch.chdir(tmp_path)
    absolute, relative = (load_lm(plan_of(str(each), RUNTIMES["C++"]), VOCAB) for each in (reduced, "reduced"))
    assert torch.equal(logits_of(relative), logits_of(absolute))


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path) -> None:
    """Guards the messages: of a damaged map, a head that is also the embedding, and few rows without a map."""
    whole = Path(write_model(tmp_path / "whole", layers=2))
    runtime = RUNTIMES["eager"]
    wrong = reduced_folder(whole, tmp_path / "wrong", IDS, d2t=torch.zeros(len(IDS) - 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"^draft '\S*wrong': d2t is .* for each of the 16 rows of the output head$"):
        load_lm(plan_of(wrong, runtime), VOCAB)
    without = reduced_folder(whole, tmp_path / "without", IDS, has_t2d=False, d2t=None)
    with pytest.raises(ValueError, match=r"lm_head.weight has the shape \(16, 32\), not \(72, 32\)$"):
        load_lm(plan_of(without, runtime), VOCAB)
    tied = Path(reduced_folder(whole, tmp_path / "tied", IDS))
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"set tie_word_embeddings to false in its config\.json$"):
        load_lm(plan_of(str(tied), runtime), VOCAB)


def test_a_whole_head_needs_no_map(family: Path) -> None:
    """Control: without `d2t` the head is the whole one."""
    assert len(load_target(str(family / "target"), RUNTIMES["eager"]).lm.model.lm_head.weight) == VOCAB + 8
