"""`paradraft generate` with models that are missing, damaged, or no match."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig

from paradraft.models import loading
from paradraft.models.runtime import Runtime
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake


def test_unknown_model(family: Path, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the retries of the hub's client, which take a minute and many lines, and against messages about
    a missing tokenizer where the model is missing."""
    asked = ["--prompt", "x", *EXACT]
    assert_mistake(paradraft("generate", "--target", tmp_path / "nothing", *asked), tmp_path / "nothing")
    assert_mistake(paradraft("generate", "--target", tmp_path, *asked), tmp_path, "config.json")

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(loading.HfApi, "model_info", unreachable)
    assert_mistake(paradraft("generate", "--target", "no-such/model", *asked), "no-such/model", "no network")
    draft = ["--drafter", "pard", "--draft", "no-such/model"]
    assert_mistake(paradraft("generate", "--target", family / "target", *asked, *draft), "no-such/model")


def test_damaged_weights(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards against the traceback of an interrupted download."""
    tiny_tokenizer().save_pretrained(tmp_path)
    AutoConfig.from_pretrained(family / "target").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((family / "target" / "model.safetensors").read_bytes()[:1000])
    assert_mistake(paradraft("generate", "--target", tmp_path, "--prompt", "x", *EXACT), tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", "[]", "seems damaged (TypeError"),
        ("config.json", "3", "seems damaged (TypeError"),
        pytest.param("config.json", "[" * 100_000, "seems damaged (RecursionError", id="nested"),
        ("tokenizer.json", "{}", "seems damaged (KeyError: 'added_tokens')"),
        ("tokenizer.json", "null", "seems damaged (AttributeError"),
        ("generation_config.json", "[]", "seems damaged (TypeError"),
    ],
)
def test_damaged_files(family: Path, paradraft: Paradraft, tmp_path: Path, file: str, content: str, named: str) -> None:
    """Guards against tracebacks: what is wrong with a file is found wherever transformers first uses it."""
    folder = shutil.copytree(family / "target", tmp_path / "model")
    (folder / file).write_text(content)
    assert_mistake(paradraft("generate", "--target", folder, "--prompt", "x", *EXACT), folder, named)


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("intermediate_size", 64, "has the shape (32, 48), not (32, 64), and 5 more"),
        ("num_hidden_layers", 3, "layers.2.input_layernorm.weight is missing, and 10 more"),
    ],
)
def test_weights_that_do_not_fit_the_config(
    family: Path, paradraft: Paradraft, tmp_path: Path, setting: str, value: int, named: str
) -> None:
    """Guards against a table of 80 lines, and against random numbers for weights that are not there."""
    folder = shutil.copytree(family / "target", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | {setting: value, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(settings))
    assert_mistake(paradraft("generate", "--target", folder, "--prompt", "x", *EXACT), folder, named)
    draft = ["--drafter", "autoregressive", "--draft", folder, "--prompt", "x"]
    assert_mistake(paradraft("generate", "--target", family / "target", *EXACT, *draft), folder, named)


def test_weights_that_are_not_used(family: Path, tmp_path: Path) -> None:
    """Guards against a model that silently has fewer layers than its file."""
    folder = shutil.copytree(family / "target", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match=r"not used: model.layers.1.* and 10 more"):
        loading.load_model(str(folder), Runtime(dtype="float64"))


@pytest.mark.parametrize("drafter", ["autoregressive", "pard"])
def test_draft_of_another_family(family: Path, paradraft: Paradraft, tmp_path: Path, drafter: str) -> None:
    """Guards against drafts whose token ids mean other text: the answers stay right, so nobody would notice."""
    small, other = tmp_path / "small", tmp_path / "other"
    for folder, rows in ((small, VOCAB // 2), (other, VOCAB + 8)):
        tiny_model(1, rows=rows).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    file = other / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    vocab = settings["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    file.write_text(json.dumps(settings), encoding="utf-8")
    asked = ["--target", family / "target", "--drafter", drafter, "--prompt", "x", *EXACT]
    assert_mistake(paradraft("generate", *asked, "--draft", small), small, VOCAB // 2, VOCAB)
    assert_mistake(paradraft("generate", *asked, "--draft", other), other, "other tokens")


def test_draft_is_missing(family: Path, paradraft: Paradraft) -> None:
    """Guards against the pocket draft being taken for another family's target."""
    asked = ["--target", family / "target", "--drafter", "pard", "--prompt", "x", *EXACT]
    assert_mistake(paradraft("generate", *asked), "pard", "draft")


def test_pard_folder_without_a_mask_token(family: Path, paradraft: Paradraft) -> None:
    """Guards against an ordinary model taken for a PARD drafter."""
    asked = ["--target", family / "target", "--drafter", "pard", "--draft", family / "draft", "--prompt", "x", *EXACT]
    assert_mistake(paradraft("generate", *asked), family / "draft", "mask token")


@pytest.mark.parametrize("value", ["abc", 3.5, True, [7]])
def test_pard_folder_with_a_mask_token_that_is_none(
    family: Path, paradraft: Paradraft, tmp_path: Path, value: object
) -> None:
    """Guards against a complaint about an int that names no file, and against 3.5 taken for token 3."""
    folder = shutil.copytree(family / "draft", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | {"pard_token": value}
    (folder / "config.json").write_text(json.dumps(settings))
    asked = ["--target", family / "target", "--drafter", "pard", "--draft", folder, "--prompt", "x", *EXACT]
    assert_mistake(paradraft("generate", *asked), folder, f"is {value!r}, not a token id")
