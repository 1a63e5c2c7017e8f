"""What vLLM is told to draft with, and draft models that it could not load."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from paradraft.engine.speculation import Speculation
from paradraft.export.vllm import installed_python, speculative_config
from paradraft.formats.folder import save_model
from paradraft.formats.pard import declare_masks
from paradraft.sources.loading import pocket_folder
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.support.drafts import draft_of
from tests.support.reduced_heads import reduced_folder
from tests.support.small_tokenizers import byte_level


def config(family: Path, drafter: str, draft: Path | None = None, k: int = 3) -> object:
    speculation = Speculation(drafter=drafter, draft=None if draft is None else str(draft), k=k, lengths="fixed")
    return speculative_config(speculation, str(family / "target"))


def test_the_drafters_that_vllm_has(family: Path) -> None:
    """Guards the keys that vLLM reads; without `parallel_drafting` a PARD model would draft one token a pass there."""
    draft = str(family / "draft")
    assert config(family, "none") is None
    assert config(family, "autoregressive", family / "draft") == {
        "method": "draft_model", "model": draft, "num_speculative_tokens": 3,
    }  # fmt: skip
    assert config(family, "pard", family / "pard", k=5) == {
        "method": "draft_model", "model": str(family / "pard"), "parallel_drafting": True, "num_speculative_tokens": 5,
    }  # fmt: skip
    assert config(family, "ngram:max_ngram=4") == {
        "method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1, "num_speculative_tokens": 3,
    }  # fmt: skip
    shipped = speculative_config(Speculation(drafter="autoregressive", lengths="fixed"), str(pocket_folder("target")))
    assert shipped is not None and shipped["model"] == str(pocket_folder("draft"))


def test_a_plan_has_a_k_for_each_batch_size(family: Path) -> None:
    """Guards against the K of -k beside a plan, and against a server that drafts nothing at any batch size."""
    speculation = Speculation(drafter="pard", draft=str(family / "pard"), k=9, lengths="fixed")
    made = speculative_config(speculation, str(family / "target"), {1: 4, 8: 0})
    assert made is not None and made["num_speculative_tokens"] == 4
    assert made["num_speculative_tokens_per_batch_size"] == [[1, 1, 4], [2, 8, 0]]
    with pytest.raises(ValueError, match=r"no K pays .* --drafter none"):
        speculative_config(speculation, str(family / "target"), {1: 0})


def test_what_vllm_could_not_load_is_refused(family: Path, tmp_path: Path) -> None:
    """Guards whoever would wait for a minute, or serve a drafter of which nothing is ever accepted."""
    with pytest.raises(
        ValueError, match=r"no drafter 'lookahead': use autoregressive, dflash, eagle, medusa, ngram, pard or none"
    ):
        config(family, "lookahead")
    with pytest.raises(ValueError, match="no settings of autoregressive"):
        config(family, f"autoregressive:prompts={draft_of(family, 'ppd')}", family / "draft")
    with pytest.raises(ValueError, match="no mask token"):
        config(family, "pard", family / "draft")
    with pytest.raises(ValueError, match="reads the states of its target: name its drafter"):
        config(family, "autoregressive", Path(str(draft_of(family, "medusa"))))
    with pytest.raises(ValueError, match="'shape:tiny-draft' has random weights"):
        config(family, "autoregressive", Path("shape:tiny-draft"))
    many = tiny_model(2)
    declare_masks(many.config, VOCAB, 3)
    save_model(tmp_path / "many", many, tiny_tokenizer())
    with pytest.raises(ValueError, match="has 3 mask tokens, and vLLM knows one"):
        config(family, "pard", tmp_path / "many")
    save_model(tmp_path / "small", tiny_model(2, rows=VOCAB), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"64 rows and .* one of 72.* `paradraft export .*small OUT .* --to vllm`"):
        config(family, "autoregressive", tmp_path / "small")
    save_model(tmp_path / "other", tiny_model(2), byte_level())
    with pytest.raises(ValueError, match="another vocabulary"):
        config(family, "autoregressive", tmp_path / "other")
    shutil.copytree(family / "draft", tmp_path / "my-Eagle3-draft")
    with pytest.raises(ValueError, match="'eagle3' in its name"):
        config(family, "autoregressive", tmp_path / "my-Eagle3-draft")


@pytest.mark.parametrize("drafter", ["autoregressive", "pard"])
def test_a_trimmed_draft_is_refused(family: Path, tmp_path: Path, drafter: str) -> None:
    """Guards the line that a training prints for vLLM, which takes the head of a draft model for a whole one."""
    draft = reduced_folder(Path(str(draft_of(family, drafter))), tmp_path / "draft", range(9))
    with pytest.raises(ValueError, match="has an output head for 9 of its 72 tokens, and vLLM reads a whole one"):
        speculative_config(Speculation(drafter=drafter, draft=draft, k=3, lengths="fixed"), str(family / "target"))


def test_the_python_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the usual places, of which the first is below the working directory, and a name that is misspelt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert installed_python(None) is None
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    for first, found in (
        (f"#!{sys.executable}", Path(sys.executable)),
        (f"#!{tmp_path}/python3", None),
        ("#!/bin/sh", None),
        ("\x7fELF", None),
    ):
        command.write_text(f"{first}\nimport vllm\n", encoding="utf-8")
        command.chmod(0o755)
        assert installed_python(None) == found
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "packages" / "vllm" / "__init__.py").touch()
    with monkeypatch.context() as also:
        also.syspath_prepend(tmp_path / "packages")
        assert installed_python(None) == Path(sys.executable)
    assert installed_python(None) is None
    with pytest.raises(ValueError, match="there is no such file"):
        installed_python(tmp_path / "python")
    (tmp_path / "build/vllm/bin").mkdir(parents=True)
    (tmp_path / "build/vllm/bin/python").touch()
    assert installed_python(None) == Path("build/vllm/bin/python")
