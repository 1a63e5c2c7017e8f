"""The folder of a new draft, whatever it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from paradraft.engine.loader import load
from paradraft.formats import folder
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.init.adaptation import add_mask_token
from paradraft.train.init.init_draft import make
from paradraft.train.init.init_from import InitFrom, PretrainedSibling, PrunedTarget, RandomInit
from paradraft.train.recipe_file import load_recipe
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support import gguf_files
from tests.support.targets import EXACT, KINDS, read, write_model

ORIGINS = {"cut": PrunedTarget(layers=2), "fresh": RandomInit(layers=1, hidden_size=16, heads=2), "sibling": None}


@pytest.fixture(params=list(ORIGINS))
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> InitFrom:
    found = ORIGINS[request.param]
    return PretrainedSibling(name=write_model(tmp_path / "small", layers=1)) if found is None else found


def test_the_folder_is_an_ordinary_one(tmp_path: Path, origin: InitFrom) -> None:
    """Guards what engines read beside the weights: chat template, ends of texts, the target's dtype; a new draft calls
    no token a mask, so that it is not taken for a trained drafter."""
    target = write_model(tmp_path / "target", mask_token_id=3, spd_type="pard", pard_masks=2)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(target)
    GenerationConfig(eos_token_id=[0, 5], do_sample=True, temperature=0.6).save_pretrained(target)
    out = tmp_path / "deep" / "out"
    made = make(target, out, origin)
    config = AutoConfig.from_pretrained(out)
    assert config.dtype == torch.float64
    assert not {"mask_token_id", "pard_token", "spd_type", "pard_masks"} & config.to_dict().keys()
    assert GenerationConfig.from_pretrained(out).eos_token_id == [0, 5]
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert [folder.name for folder in out.parent.iterdir()] == ["out"]
    assert add_mask_token(read(out), AutoTokenizer.from_pretrained(out)) == made.mask_id == VOCAB
    plain = load(target, runtime=EXACT).generate("hello", max_new_tokens=20).tokens
    for drafter in ("autoregressive", "pard"):
        if drafter == "pard":
            with pytest.raises(ValueError, match="names no mask token"):
                load(target, drafter=drafter, draft=str(out), runtime=EXACT, lengths="fixed")
        else:
            engine = load(target, drafter=drafter, draft=str(out), k=3, runtime=EXACT, lengths="fixed")
            assert engine.generate("hello", max_new_tokens=20).tokens == plain


def test_dtype_is_the_targets_or_the_one_asked_for(tmp_path: Path, origin: InitFrom) -> None:
    """Guards against a draft of twice the size, and against weights of another dtype than the config says."""
    target = write_model(tmp_path / "target")
    make(target, tmp_path / "out", origin, dtype="bfloat16")
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype='int8': use one of"):
        make(target, tmp_path / "other", origin, dtype="int8")


def test_a_row_is_added_where_none_is_free(tmp_path: Path, origin: InitFrom) -> None:
    """Guards embeddings without a spare row: training has a mask token, or the rows stay those of the target."""
    target = write_model(tmp_path / "target", rows=VOCAB)
    made = make(target, tmp_path / "added", origin)
    assert (made.mask_id, made.rows, made.target_rows, made.mask_token) == (VOCAB, VOCAB + 1, VOCAB, "an added row")
    added = read(tmp_path / "added")
    torch.testing.assert_close(added.lm_head.weight[VOCAB], added.lm_head.weight[:VOCAB].mean(0))
    assert add_mask_token(added, tiny_tokenizer()) == VOCAB and added.config.vocab_size == VOCAB + 1
    made = make(target, tmp_path / "kept", origin, mask_token=False)
    assert (made.mask_id, made.rows) == (None, VOCAB)


@pytest.mark.parametrize("content", ["file in it", "file", "hidden"])
def test_nothing_is_overwritten(tmp_path: Path, origin: InitFrom, content: str) -> None:
    """Guards other people's models: checked before the target is even looked for. An empty folder is free."""
    out = tmp_path / "out"
    file = out if content == "file" else out / (".git" if content == "hidden" else "config.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(ValueError, match="is a file" if content == "file" else "is not empty"):
        make("/no/such/target", out, origin)
    assert file.read_text() == "mine"
    file.unlink()
    make(write_model(tmp_path / "target"), out, origin)
    assert (out / "config.json").is_file()


def test_a_failure_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: InitFrom
) -> None:
    """Guards against a draft that is half there: the next command would train it."""
    target = write_model(tmp_path / "target")

    def full(*arguments: object, **settings: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(folder.PreTrainedTokenizerBase, "save_pretrained", full)
        with pytest.raises(OSError, match="No space"):
            make(target, tmp_path / "out", origin)
    assert not list(tmp_path.glob("out*"))
    make(target, tmp_path / "out", origin)


def test_a_format_that_is_not_read_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """Guards the message; a fresh draft takes nothing of such weights, not even the setting."""
    target = write_model(tmp_path / "target")
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "hqq"}}))
    (tmp_path / "target" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="quantization_config"):
        make(target, tmp_path / "out", PrunedTarget(layers=2))
    with pytest.raises(ValueError, match="quantization_config"):
        make(write_model(tmp_path / "whole"), tmp_path / "out", PretrainedSibling(name=target))
    make(target, tmp_path / "out", RandomInit(layers=1, hidden_size=16, heads=2), dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_layers_of_a_gguf_file_become_numbers(tmp_path: Path, kind: str) -> None:
    """Guards drafts from the one file that a user has: the cut layers are what the file says, in floats."""
    whole = gguf_files.tiny_model("llama", width=256)
    expected = gguf_files.write_gguf(tmp_path / "target.gguf", whole, kind)
    made = make(str(tmp_path / "target.gguf"), tmp_path / "out", PrunedTarget(layers=1), dtype="float32")
    assert made.layers == (0,)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    for name, weight in model.model.layers[0].named_parameters():
        wanted = expected.model.layers[0].get_parameter(name)
        torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-7, msg=name)
    recipe = yaml.safe_load((tmp_path / "out" / "pard.yaml").read_text())
    assert recipe["teacher"] == str(tmp_path / "target.gguf")


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    """Guards against a draft of a target that cannot be decoded here."""
    target = write_model(tmp_path / "t", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    with pytest.raises(ValueError, match="sliding-window"):
        make(target, tmp_path / "out", PrunedTarget(layers=2))


def test_the_recipes_fit_the_models(tmp_path: Path) -> None:
    """Guards recipes that the training would refuse: their samples leave room for the answers that measure a drafter,
    and a target whose weights are of few bits teaches like any other."""
    target = write_model(tmp_path / "target")
    made = make(target, tmp_path / "out", PrunedTarget(layers=2))
    ordinary, pard = (load_recipe(PardRecipe, file, []) for file in made.recipes)
    assert (ordinary.k, ordinary.model, pard.model) == (1, str(tmp_path / "out"), str(ordinary.out))
    assert ordinary.max_length == pard.max_length == 128 - pard.answer_tokens
    assert (pard.teacher, pard.target, pard.mask_token_id) == (target, None, made.mask_id)
    config = tmp_path / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    made = make(target, tmp_path / "fresh", RandomInit(layers=1, hidden_size=16, heads=2), dtype="float32")
    pard = load_recipe(PardRecipe, made.recipes[-1], [])
    assert (pard.teacher, pard.target, pard.divergence) == (target, None, "forward_kl")


def test_sampling_settings_without_do_sample_are_written(tmp_path: Path) -> None:
    """Guards published models whose generation config `transformers` reads but refuses to write again: that would be
    noticed after hours of training, when the drafter is saved."""
    target = write_model(tmp_path / "target")
    settings = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": [0, 5]}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(settings))
    make(target, tmp_path / "out", PrunedTarget(layers=2))
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [0, 5]


def test_parameters_are_counted_once_where_matrices_are_shared(tmp_path: Path) -> None:
    """Guards the printed share: a tied head is no second matrix, and the target is counted without its weights."""
    for kind in KINDS:
        target = write_model(tmp_path / kind, kind)
        made = make(target, tmp_path / f"{kind}-out", PrunedTarget(layers=2))
        assert made.target_parameters == read(target).num_parameters()
        assert made.parameters == read(tmp_path / f"{kind}-out").num_parameters()


def test_a_folder_with_the_name_of_the_unfinished_one_is_kept(tmp_path: Path) -> None:
    """Guards a user's folder `out.new`: a model is put together under another name before it gets its own."""
    target, mine = write_model(tmp_path / "target"), tmp_path / "out.new" / "mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    make(target, tmp_path / "out", PrunedTarget(layers=2))
    assert mine.read_text() == "mine" and read(tmp_path / "out").num_parameters()
    assert {folder.name for folder in tmp_path.iterdir()} == {"target", "out", "out.new"}


def test_a_target_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Guards against the empty tokenizer that `transformers` makes for a Qwen folder without the files."""
    target = write_model(tmp_path / "target")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "target" / file).unlink()
    with pytest.raises(ValueError, match="no tokens but special ones"):
        make(target, tmp_path / "out", PrunedTarget(layers=2))
