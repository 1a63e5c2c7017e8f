"""`paradraft generate` with models that are missing, damaged, or no match."""

from __future__ import annotations

import ast
import copy
import io
import json
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sources import hub, loading
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

    monkeypatch.setattr(hub.HfApi, "model_info", unreachable)
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
        ("config.json", "[]", "Should have a `model_type` key in its config.json"),
        ("config.json", "3", "seems damaged (TypeError"),
        pytest.param("config.json", "[" * 100_000, "seems damaged (RecursionError", id="nested"),
        ("tokenizer.json", "{}", "seems damaged (KeyError: 'added_tokens')"),
        ("tokenizer.json", "null", "seems damaged (AttributeError"),
        ("generation_config.json", "[]", "seems damaged (TypeError"),
        ("generation_config.json", '{"eos_token_id": 7', "not a valid JSON file"),
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


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("config.json", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}),
        ("config.json", {"auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}),
        ("tokenizer_config.json", {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}),
    ],
    ids=["config", "model", "tokenizer"],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_code_of_a_folder_is_not_run(
    family: Path, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str,
    settings: dict[str, Any], role: str,
) -> None:  # fmt: skip
    """Guards `echo y | paradraft …`: the answer to a question of transformers ran a model's code, which was refused
    only then."""
    folder = shutil.copytree(family / "target", tmp_path / "model")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | settings))
    proof = tmp_path / "proof"
    (folder / "mine.py").write_text(f"open({str(proof)!r}, 'w').close()\nclass Config: pass\nModel = Mine = Config\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    models = ["--target", folder] if role == "target" else ["--target", family / "target", "--draft", folder]
    drafter = [] if role == "target" else ["--drafter", "autoregressive"]
    outcome = paradraft("generate", *models, *drafter, "--prompt", "x", "--max-new-tokens", 2, *EXACT)
    assert not proof.exists()
    assert sys.stdin.read() == "y\n" * 9, "nothing is asked"
    if "model_type" in settings:
        assert_mistake(outcome, folder, "custom code")
    else:  # an architecture that transformers has itself needs none of the folder's code
        assert outcome.code == 0


def test_no_load_trusts_the_code_of_a_folder() -> None:
    """Guards loads that are written later: the default asks on the terminal."""
    root = Path(__file__).parents[2]
    files = [file for folder in ("src", "recipes", "examples") for file in (root / folder).rglob("*.py")]
    calls = [
        call
        for file in files
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        # These have no code; adapters are read as safetensors.
        and not (isinstance(call.func.value, ast.Name) and call.func.value.id in ("GenerationConfig", "PeftModel"))
    ]
    assert len(calls) > 8
    for call in calls:
        trust = [word.value for word in call.keywords if word.arg == "trust_remote_code"]
        assert [ast.unparse(value) for value in trust] == ["False"], ast.unparse(call)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rotary embedding of the type 'dynamic', which is not supported"),
        ({"rope_type": "mrope"}, "rotary embedding of the type 'mrope', which is not supported"),
        ({"rope_type": "linear"}, "Missing required keys"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_rope_that_is_not_supported(
    family: Path, paradraft: Paradraft, tmp_path: Path, rope: dict[str, object], named: str, role: str
) -> None:
    """Guards texts that depended on the drafter, and a sound model that was called damaged."""
    folder = shutil.copytree(family / "draft", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | {"rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(settings))
    models = ["--target", folder] if role == "target" else ["--target", family / "target", "--draft", folder]
    drafter = [] if role == "target" else ["--drafter", "autoregressive"]
    assert_mistake(paradraft("generate", *models, *drafter, "--prompt", "x", *EXACT), folder, named)


WRONG_VALUES = (None, 0, -1, 1.5, "x", [], {})


def wrong_configs(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A config with each of its values replaced in turn, those inside the rope settings too."""
    for key in config:
        for value in WRONG_VALUES:
            yield f"{key}={value!r}", config | {key: value}
    for key in config["rope_parameters"]:
        for value in WRONG_VALUES:
            rope = config["rope_parameters"] | {key: value}
            yield f"rope_parameters.{key}={value!r}", config | {"rope_parameters": rope}


@pytest.fixture
def config(family: Path) -> dict[str, Any]:
    """The config of the tiny target, with the settings that Llama's and Qwen's have besides."""
    found = json.loads((family / "target" / "config.json").read_text())
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
            "truncate": True}  # fmt: skip
    more = {"auto_map": {}, "per_layer_config": None, "quantization_config": None, "mlp_bias": False,
            "pretraining_tp": 1, "num_labels": 2, "torch_dtype": "float32", "attn_implementation": None}  # fmt: skip
    return more | found | {"rope_parameters": rope}


def test_a_config_with_any_wrong_value(tmp_path: Path, config: dict[str, Any]) -> None:
    """Guards against tracebacks: each value of a config is replaced by others, and what is not served is a line."""
    refused: list[str] = []
    for name, wrong in wrong_configs(config):
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        try:
            loading.load_config(str(tmp_path))
        except ValueError as error:
            refused.append(f"{name}: {error}")
    assert len(refused) > 100
    assert [line for line in refused if str(tmp_path) not in line or "\n" in line] == []


@pytest.mark.parametrize("dtype", [{}, "bfloat17", "linear", 16, []])
def test_a_dtype_that_is_none(family: Path, tmp_path: Path, dtype: object) -> None:
    """Guards against a traceback where the checkpoint's dtype decides what passes compute in."""
    folder = shutil.copytree(family / "target", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    with pytest.raises(ValueError, match=re.escape(str(folder))) as told:
        load(str(folder))
    assert "\n" not in str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [None, False])
def test_a_model_with_any_wrong_value(
    family: Path, tmp_path: Path, config: dict[str, Any], compiled: bool | None
) -> None:
    """Guards as the test above: what is loaded also answers, and what is not says so in a line."""
    folder = shutil.copytree(family / "target", tmp_path / "model")
    served, refused = 0, []
    for name, wrong in wrong_configs(config):
        (folder / "config.json").write_text(json.dumps(copy.deepcopy(wrong)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(str(folder), runtime=Runtime(compiled=compiled)).generate("abc", max_new_tokens=3)
        except ValueError as error:
            refused.append(f"{name}: {error}")
        else:
            served += 1
    assert served > 50 and len(refused) > 100
    assert [line for line in refused if "\n" in line] == []
