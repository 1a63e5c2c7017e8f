"""`paradraft merge` as a user meets it: the adapter of a draft becomes the draft, and that of a fine-tune the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paradraft.engine.automatic import automatic
from paradraft.engine.speculation import Speculation
from paradraft.formats.pard import PREVIOUS_TOKEN_HEAD
from paradraft.sources import recorded, shipped
from paradraft.sources.recorded import remember_drafter
from paradraft.train.init.merging import DRAFT, FOLDER, WEIGHTS, base_of
from tests.conftest import tiny_model, tiny_tokenizer
from tests.contract.test_every_trainee import recipe_for, train
from tests.e2e.conftest import Paradraft, assert_mistake
from tests.support import gguf_files
from tests.support.reduced_heads import reduced_folder

IDS = list(range(0, 64, 2))


def config_in(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


@pytest.mark.parametrize("base", ["draft", "reduced", "its whole", "untied", "a pard draft"])
@pytest.mark.parametrize("settings", [{}, {"previous_token_rank": 4, "draft_temperature": 0.8}], ids=str)
def test_the_adapter_of_a_draft_becomes_the_draft(
    paradraft: Paradraft, family: Path, tmp_path: Path, base: str, settings: dict[str, object]
) -> None:
    """Guards drafts that are passed on as adapters: to the last bit what the training wrote, mask, rows, norm and
    previous-token head included, from a trimmed base and from the whole one."""
    whole, out = family / "draft", tmp_path / "out"
    match base:
        case "untied":
            untied = tiny_model(1)
            untied.config.tie_word_embeddings = False
            untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.flip(0).contiguous())
            untied.save_pretrained(whole := tmp_path / "untied")
            tiny_tokenizer().save_pretrained(whole)
        case "a pard draft":
            first = recipe_for("pard", family, tmp_path / "first", k=3, distinct_masks=True)
            train("pard", first)
            whole = tmp_path / "first"
            settings = settings or {"k": 1}
    is_whole = base not in ("reduced", "its whole")
    model = whole if is_whole else Path(reduced_folder(whole, tmp_path / "reduced", IDS))
    teacher = {"teacher": str(family / "target")} if "draft_temperature" in settings else {}
    recipe = recipe_for(
        "pard", family, out, model=str(model), lora={"rank": 2},
        **{"k": 4, "distinct_masks": base != "a pard draft"} | teacher | settings,
    )  # fmt: skip
    train("pard", recipe)
    named = [] if is_whole else ["--base", whole if base == "its whole" else model]
    found = paradraft("merge", out / FOLDER, "--out", tmp_path / "merged", *named)
    assert found.code == 0, found.err
    assert ("--drafter pard" in found.out) is ("as a model" not in found.out) is ("k" not in settings)
    trained, merged = (load_file(each / "model.safetensors") for each in (out, tmp_path / "merged"))
    assert trained.keys() == merged.keys()
    for name, weight in trained.items():
        assert torch.equal(weight, merged[name]), name
    assert config_in(out) == config_in(tmp_path / "merged")
    before = load_file(whole / "model.safetensors")
    assert any(
        not torch.equal(weight.float(), merged[name].float()) for name, weight in before.items() if "proj" in name
    )
    if teacher:
        heads = [(each / PREVIOUS_TOKEN_HEAD).read_bytes() for each in (out, tmp_path / "merged")]
        assert heads[0] == heads[1]


def test_it_is_the_default_of_its_target(
    paradraft: Paradraft, family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `--target`, and the digest of a folder that is complete."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(recorded, "remember_drafter", remember_drafter)
    train("pard", recipe_for("pard", family, tmp_path / "out", k=3, lora={"rank": 2}))
    asked = ["merge", tmp_path / "out" / FOLDER, "--out", tmp_path / "merged", "--target"]
    gguf_files.tiny_model("qwen2").save_pretrained(tmp_path / "other")
    gguf_files.tiny_tokenizer().save_pretrained(tmp_path / "other")
    assert_mistake(paradraft(*asked, tmp_path / "other"), "use one of the same family")
    assert_mistake(paradraft(*asked, "gone"), "unknown model 'gone'")
    assert_mistake(paradraft(*asked, "pocket"), "it always drafts with its own")
    assert not (tmp_path / "merged").exists()
    found = paradraft(*asked, family / "target")
    assert found.code == 0 and "drafts with it from now on" in found.out
    chosen = automatic(str(family / "target"), Speculation(drafter="auto"))
    assert chosen.draft == str(tmp_path / "merged") and "pard" in chosen.drafter and chosen.k == 3


def test_a_shipped_adapter_is_named_to_whoever_can_use_it(
    paradraft: Paradraft, family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards users who do not know that there is a draft for their model: the reason of "auto" has the command, for
    the folder and for a GGUF file of it, and for no other model."""
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path / "shipped")
    targets = {name: tmp_path / name for name in ("mine", "other")}
    models = [gguf_files.tiny_model("qwen2", seed=seed) for seed in (3, 4)]
    for folder, model in zip(targets.values(), models, strict=True):
        model.save_pretrained(folder)
        gguf_files.tiny_tokenizer().save_pretrained(folder)
    gguf_files.write_gguf(gguf := tmp_path / "mine.gguf", models[0])
    train("pard", recipe_for("pard", family, tmp_path / "out", k=3, lora={"rank": 2}))
    shutil.copytree(tmp_path / "out" / FOLDER, tmp_path / "shipped" / "tiny")
    (tmp_path / "shipped" / "tiny" / shipped.FILE).write_text(
        json.dumps({"target": shipped.norm_digest(str(targets["mine"]))}), encoding="utf-8"
    )
    for target in (targets["mine"], gguf):
        reason = str(automatic(str(target), Speculation(drafter="auto")).reason)
        assert f"is shipped: paradraft merge tiny --out FOLDER --target {target}" in reason
    for target in (targets["other"], "pocket", "shape:llama-3.2-1b"):
        assert "is shipped: paradraft merge" not in str(automatic(str(target), Speculation(drafter="auto")).reason)
    found = paradraft("merge", "tiny", "--out", tmp_path / "merged")
    assert found.code == 0 and (tmp_path / "merged" / "model.safetensors").is_file()


def test_what_is_shipped_can_be_read() -> None:
    """Guards the files of the package."""
    assert [one.folder.name for one in shipped.all_shipped()] == ["qwen2.5-coder-1.5b"]
    for one in shipped.all_shipped():
        assert base_of(one.folder) and (one.folder / WEIGHTS).is_file() and (one.folder / DRAFT).is_file()
        assert len(one.target) == len(str(shipped.norm_digest("pocket")))


@pytest.fixture(scope="module")
def tuned(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tune of the target, as PEFT writes it."""
    folder = tmp_path_factory.mktemp("tuned") / "adapter"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    tuned.save_pretrained(folder)
    return folder


def test_a_fine_tune_becomes_a_model(paradraft: Paradraft, family: Path, tuned: Path, tmp_path: Path) -> None:
    """Guards users of PEFT, whose logits the merged model has."""
    found = paradraft("merge", tuned, "--out", tmp_path / "merged")
    assert found.code == 0 and "as a model: paradraft chat --target" in found.out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = base(ids).logits
        wanted = PeftModel.from_pretrained(base, tuned)(ids).logits
        found_logits = merged(ids).logits
    assert (wanted - before).abs().max() > 20 * (wanted - found_logits).abs().max()
    answered = paradraft("generate", "--target", tmp_path / "merged", "--prompt", "abc", "--max-new-tokens", 4)
    assert answered.code == 0


@pytest.mark.parametrize("kind", ["head", "embedding", "more tokens", "trimmed base", "weights of few bits"])
def test_a_fine_tune_of_another_kind(paradraft: Paradraft, family: Path, tmp_path: Path, kind: str) -> None:
    """Guards adapters of a head that is the embedding too, of added tokens, and bases that are not plain folders."""
    base = tmp_path / "base"
    tokenizer = gguf_files.tiny_tokenizer()
    model = gguf_files.tiny_model("qwen2")
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    targets = {"head": ["q_proj", "lm_head"], "embedding": ["q_proj", "embed_tokens"]}.get(kind, ["q_proj", "v_proj"])
    if kind == "more tokens":
        tokenizer.add_tokens(["<new>"])
        tokenizer.chat_template = "{{ 'of the tune' }}"
        model.resize_token_embeddings(len(model.get_input_embeddings().weight) + 3)
        tokenizer.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(1)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter", save_embedding_layers=kind == "more tokens")
    with torch.no_grad():
        wanted = tuned.eval()(ids).logits
    if kind == "weights of few bits":
        gguf_files.write_gguf(tmp_path / "base.gguf", gguf_files.tiny_model("qwen2"))
        base = tmp_path / "base.gguf"
    if kind == "trimmed base":
        base = Path(reduced_folder(base, tmp_path / "reduced", IDS))
        wanted = wanted[:, :, IDS]
    found = paradraft("merge", tmp_path / "adapter", "--base", base, "--out", tmp_path / "merged")
    assert found.code == 0, found.err
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    if kind == "trimmed base":
        assert (weights["d2t"] + torch.arange(len(IDS))).tolist() == IDS
        return
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        differences = [(logits - wanted).abs().max() for logits in (merged(ids).logits, before)]
    assert 10 * differences[0] < differences[1]
    assert ("lm_head.weight" in weights) is (kind in ("head", "embedding"))
    if kind == "more tokens":
        assert "of the tune" in (tmp_path / "merged" / "chat_template.jinja").read_text(encoding="utf-8")


def test_mistakes(paradraft: Paradraft, family: Path, tuned: Path, tmp_path: Path) -> None:
    """Guards users: one line, and no folder is left behind."""
    out = ["--out", tmp_path / "merged"]
    assert_mistake(paradraft("merge", family / "draft", *out), "is no adapter: it has no adapter_config.json")
    assert_mistake(paradraft("merge", tmp_path / "gone", *out), "and shipped are qwen2.5-coder-1.5b")
    assert_mistake(paradraft("merge", family / "draft", *out, "--base", family / "draft"), "is no adapter: it has no")
    assert_mistake(paradraft("merge", tuned, *out, "--base", "gone"), "unknown model 'gone'")
    assert_mistake(paradraft("merge", tuned, "--out", family / "draft"), "is not empty")
    tiny_model(3, layers=1).save_pretrained(tmp_path / "one")
    tiny_tokenizer().save_pretrained(tmp_path / "one")
    others = ("pocket", tmp_path / "one")
    for other in others:
        assert_mistake(paradraft("merge", tuned, *out, "--base", other), "its layers are not those of")
    assert_mistake(paradraft("generate", "--target", tuned, "--prompt", "a"), "is an adapter: `paradraft merge")
    assert_mistake(paradraft("merge", tuned, "--out", "pocket"), "is the name of a model")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(family / "target")
    get_peft_model(model, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "prompts"
    )
    assert_mistake(paradraft("merge", tmp_path / "prompts", *out), "has no weights to merge")
    train("pard", recipe_for("pard", family, tmp_path / "out", k=3, lora={"rank": 2}))
    adapter = tmp_path / "out" / FOLDER
    assert_mistake(paradraft("merge", tmp_path / "out", *out), f"name {str(adapter)!r}")
    for other in others:
        assert_mistake(paradraft("merge", adapter, *out, "--base", other), "the adapter was trained on a model whose")
    renormed = tiny_model(1)
    torch.nn.init.uniform_(renormed.model.norm.weight, 0.5, 2.0)
    renormed.save_pretrained(tmp_path / "renormed")
    tiny_tokenizer().save_pretrained(tmp_path / "renormed")
    assert_mistake(paradraft("merge", adapter, *out, "--base", tmp_path / "renormed"), "another final norm")
    shutil.copytree(adapter, tmp_path / "damaged")
    for name in (WEIGHTS, DRAFT):
        kept = (tmp_path / "damaged" / name).read_bytes()
        (tmp_path / "damaged" / name).write_bytes(kept[:40])
        assert_mistake(paradraft("merge", tmp_path / "damaged", *out), "cannot load adapter")
        for bad in (torch.nan, torch.inf):
            tensors = load_file(adapter / name)
            next(each for each in tensors.values() if each.is_floating_point()).view(-1)[-1] = bad
            save_file(tensors, tmp_path / "damaged" / name)
            assert_mistake(paradraft("merge", tmp_path / "damaged", *out), name, "has NaN or infinite numbers")
        (tmp_path / "damaged" / name).write_bytes(kept)
    (tmp_path / "damaged" / "adapter_config.json").write_text("[]", encoding="utf-8")
    assert_mistake(paradraft("merge", tmp_path / "damaged", *out), "is no adapter")
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    for wrong, said in (
        ({"base_model_name_or_path": None}, "names no base model: give --base"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path in its adapter_config.json is 5"),
        ({"base_model_name_or_path": "gone"}, "--base names the model that the adapter was trained on"),
        ({"peft_type": "NOPE"}, "peft_type in its adapter_config.json is 'NOPE'"),
    ):
        (tmp_path / "damaged" / "adapter_config.json").write_text(json.dumps(config | wrong))
        assert_mistake(paradraft("merge", tmp_path / "damaged", *out), said)
    (tmp_path / "damaged" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "damaged" / DRAFT).unlink()
    assert_mistake(paradraft("merge", tmp_path / "damaged", *out), f"has no {DRAFT}", "copy it whole")
    (tmp_path / "damaged" / WEIGHTS).unlink()
    assert_mistake(paradraft("merge", tmp_path / "damaged", *out), "save it as safetensors")
    with pytest.raises(ValueError, match="the output head is the embedding here"):
        train("pard", recipe_for("pard", family, tmp_path / "tied", k=3, lora={"targets": ["q_proj", "lm_head"]}))
    assert not (tmp_path / "merged").exists()
