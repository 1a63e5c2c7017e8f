"""GGUF files and packed folders, as targets and as drafts; and drafters that are exported to such files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from paradraft.drafters.parts.draft_loading import load_draft_lm
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.formats.folder import save_model
from paradraft.formats.pard import declare_masks
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import Runtime
from paradraft.plan import costs
from paradraft.sampling_params import Sampling
from paradraft.sources.target_loading import load_target
from tests.conftest import tiny_tokenizer as another_tokenizer
from tests.e2e.conftest import Paradraft, assert_mistake
from tests.support.gguf_files import FAMILIES, tiny_model, tiny_tokenizer, write_gguf
from tests.support.packed_models import write_packed
from tests.support.serving import MODEL, serving

PROMPTS = ["def f(x):\n    return x", "for i in range(", "print("]
PADDED = Runtime(pad_to=6)
"""Where C++ does not compute a pass, all passes have the same shape, as plain torch rounds otherwise in others."""
MASK = 303


def disturbed(family: str, folder: Path, *, mask: bool) -> Path:
    """A folder of `tiny_model`'s weights, with some noise, so that some drafts are accepted."""
    model = tiny_model(family)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
            weight.copy_(weight.bfloat16())
    if mask:
        declare_masks(model.config, MASK)
    save_model(folder, model.bfloat16(), tiny_tokenizer())
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target.gguf`, `draft.gguf` and `f32.gguf`, of one model; and folders `target`, `draft` and `pard` of it."""
    root = tmp_path_factory.mktemp("models")
    write_gguf(root / "target.gguf", tiny_model("qwen3"), "Q8_0")
    write_gguf(root / "draft.gguf", tiny_model("qwen3"), "Q4_0")
    write_gguf(root / "f32.gguf", tiny_model("qwen3"), "F32")
    save_model(root / "target", tiny_model("qwen3"), tiny_tokenizer())
    disturbed("qwen3", root / "draft", mask=False)
    disturbed("qwen3", root / "pard", mask=True)
    return root


def texts(engine: Engine, sampling: Sampling) -> list[list[int]]:
    return [answer.tokens for answer in engine.generate(PROMPTS, max_new_tokens=24, sampling=sampling)]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=4)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("target", ["target.gguf", "f32.gguf", "gptq", "awq"])
def test_texts_are_the_same_with_every_drafter(models: Path, tmp_path: Path, target: str, sampling: Sampling) -> None:
    """Guards losslessness of files: drafts of few bits and of all, in files and in folders, change no token."""
    name = models / target
    if target in ("gptq", "awq"):
        name = tmp_path / target
        write_packed(name, tiny_model("qwen3"), target)
    plain = texts(load(str(name), runtime=PADDED), sampling)
    assert len({tuple(tokens) for tokens in plain}) == len(PROMPTS) and all(len(tokens) == 24 for tokens in plain)
    for drafter, draft in (
        ("ngram", None), ("autoregressive", "draft"), ("autoregressive", "draft.gguf"), ("pard", "pard")
    ):  # fmt: skip
        engine = load(
            str(name),
            drafter=drafter,
            draft=None if draft is None else str(models / draft),
            k=5,
            runtime=PADDED,
            lengths="fixed",
        )
        found = engine.generate(PROMPTS, max_new_tokens=24, sampling=sampling)
        assert [one.tokens for one in found] == plain, (drafter, draft)
        if drafter == "autoregressive":
            assert sum(one.stats.rounds for one in found) < sum(len(one.tokens) for one in found)


def test_a_draft_has_a_precision_of_its_own(models: Path) -> None:
    """Guards that a draft of few bits is not rounded again, that another is int8, and that --draft-dtype holds."""
    target = load_target(str(models / "target.gguf"), PADDED)
    kinds = {}
    for draft, dtype in (("draft", None), ("draft", "float64"), ("draft.gguf", None)):
        runtime = Runtime(compiled=False, dtype="stored", device="cpu", draft_dtype=dtype)
        kinds[draft, dtype] = load_draft_lm(str(models / draft), target, runtime).model
    assert kinds["draft", None].lm_head.weight.bits == 8
    assert kinds["draft", "float64"].dtype == torch.float64
    assert isinstance(kinds["draft.gguf", None].lm_head.weight, QuantizedTensor)
    rounded = Runtime(compiled=False, draft_dtype="float32", device="cpu")
    with pytest.raises(ValueError, match=r"dtype='float32': the weights of .* are stored in few bits"):
        load_draft_lm(str(models / "draft.gguf"), target, rounded)
    unrounded = load_target(str(models / "target"), Runtime(dtype="float64", compiled=False))
    lm = load_draft_lm(str(models / "draft.gguf"), unrounded, Runtime(dtype="float64", device="cpu", compiled=False))
    assert isinstance(lm.model.lm_head.weight, QuantizedTensor)


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_drafter_drafts_the_same(
    paradraft: Paradraft, tmp_path: Path, family: str, dtype: str | None
) -> None:
    """Guards weights, tokens, template, ends and mask of the file, against the folder and as the package reads it."""
    save_model(tmp_path / "target", tiny_model(family), tiny_tokenizer())
    folder, out = disturbed(family, tmp_path / "pard", mask=True), tmp_path / "out"
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    done = paradraft(
        "export", folder, out, "--target", tmp_path / "target", "--to", "gguf", "-k", 5,
        "--prompts", tmp_path / "p.jsonl", "--num-prompts", 3, "--max-new-tokens", 16,
        *([] if dtype is None else ["--draft-dtype", dtype]),
    )  # fmt: skip
    assert done.code == 0, done.err
    assert {file.name for file in out.iterdir()} == {"model.gguf", "README.md"}
    fields = gguf.GGUFReader(out / "model.gguf").fields
    assert fields["tokenizer.ggml.mask_token_id"].contents() == fields["paradraft.pard_token"].contents() == MASK
    assert fields["tokenizer.chat_template"].contents() == tiny_tokenizer().chat_template
    engines = [
        load(
            str(tmp_path / "target"), drafter="pard", draft=str(draft), k=5,
            runtime=Runtime(dtype="float32", draft_dtype=own, compiled=False, pad_to=6),
            lengths="fixed",
        )
        for draft, own in ((out / "model.gguf", None if dtype else "bfloat16"), (folder, "bfloat16"))
    ]  # fmt: skip
    ours, theirs = (engine.generate(PROMPTS, max_new_tokens=24) for engine in engines)
    assert [one.tokens for one in ours] == [one.tokens for one in theirs]
    drafts = [engine.drafter.lm.model for engine in engines]  # type: ignore[attr-defined]
    if dtype is None:
        assert [one.accepted for one in ours] == [one.accepted for one in theirs]
        for name, weight in drafts[1].named_parameters():
            assert torch.equal(drafts[0].get_parameter(name), weight), name
    else:
        rounded, weight = (model.model.layers[0].mlp.up_proj.weight.detach() for model in drafts)
        raw = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0))
        assert torch.equal(rounded.dequantize(), expected.to(rounded.dtype))
        assert "rounded to Q8_0, from BF16" in done.out
    assert f"--draft {out}/model.gguf" in (out / "README.md").read_text() and "llama-server" in done.out


def test_generate_with_a_file(paradraft: Paradraft, models: Path) -> None:
    """Guards the whole way: a target and a draft that are files, with the default passes."""
    asked = ["generate", "--target", models / "target.gguf", "--prompt", PROMPTS[0], "--max-new-tokens", 12]
    done = paradraft(*asked, "--drafter", "autoregressive", "--draft", models / "draft.gguf", "-k", 3)
    assert done.code == 0, done.err
    named = paradraft(*asked, "--tokenizer", models / "target")
    assert named.code == 0, named.err
    assert done.out.startswith(named.out.splitlines()[0])


def test_a_tokenizer_is_named_for_a_file_whose_own_is_not_known(
    paradraft: Paradraft, models: Path, tmp_path: Path
) -> None:
    """Guards files of a family whose split is not known here: refused with the option that helps, which then does."""
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), "Q8_0", more={"tokenizer.ggml.pre": "new-one"})
    asked = ["generate", "--target", tmp_path / "m.gguf", "--prompt", PROMPTS[0], "--max-new-tokens", 12]
    assert_mistake(paradraft(*asked), "new-one", "--tokenizer")
    named = paradraft(*asked, "--tokenizer", models / "target")
    assert named.code == 0, named.err
    assert (
        named.out.splitlines()[0]
        == paradraft(
            "generate", "--target", models / "target.gguf", "--prompt", PROMPTS[0], "--max-new-tokens", 12
        ).out.splitlines()[0]
    )
    assert_mistake(paradraft(*asked, "--tokenizer", tmp_path / "none"), tmp_path / "none")
    another_tokenizer().save_pretrained(tmp_path / "other")
    assert_mistake(paradraft(*asked, "--tokenizer", tmp_path / "other"), "other tokens than tokenizer")
    alone = tmp_path / "alone"
    tiny_tokenizer().save_pretrained(alone)
    assert paradraft(*asked, "--tokenizer", alone).out.splitlines()[0] == named.out.splitlines()[0]
    save_model(tmp_path / "small", tiny_model("qwen3", vocab_size=40), another_tokenizer())
    assert_mistake(paradraft("generate", "--target", tmp_path / "small", "--prompt", "x", "--tokenizer", alone), "rows")


def test_files_are_audited(paradraft: Paradraft, models: Path, tmp_path: Path) -> None:
    """Guards the audit, whose own pass must multiply weights of few bits as they are defined: with rounded inputs."""
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    done = paradraft(
        "audit", "--target", models / "target.gguf", "--drafter", "autoregressive", "--draft", models / "draft.gguf",
        "-k", 4, "--prompts", tmp_path / "p.jsonl", "--num-prompts", 2, "--max-new-tokens", 12, "--shape-invariant",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["verdict"] == "PASS"


def test_files_are_served(models: Path) -> None:
    """Guards conversations with a file, whose template must be the one in its metadata, and drafts of a second file."""
    engine = load(
        str(models / "target.gguf"), drafter="autoregressive", draft=str(models / "draft.gguf"), k=3, lengths="fixed"
    )
    talk: list[Any] = [{"role": "user", "content": "print("}]
    expected = engine.generate(tiny_tokenizer().apply_chat_template(talk)["input_ids"], max_new_tokens=12)
    with serving(engine) as server:
        asked = server.client().chat.completions.create(model=MODEL, messages=talk, max_tokens=12, temperature=0)
    assert asked.choices[0].message.content == expected.text
    assert asked.usage is not None and asked.usage.completion_tokens == len(expected.tokens) > 0


def test_a_file_chats(paradraft: Paradraft, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"print(\n/exit\n")))
    done = paradraft("chat", "--target", models / "target.gguf", "--max-new-tokens", 8)
    assert done.code == 0, done.err


def test_files_are_measured_and_planned(
    paradraft: Paradraft, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `bench` and `plan`, which count the bytes of weights and time passes of one and of several tokens."""
    monkeypatch.setattr(costs, "VISITS", 1)
    monkeypatch.setattr(costs, "LEAST_S", 0.0)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    asked = [
        "--target", models / "target.gguf", "--draft", models / "draft.gguf", "--prompts", tmp_path / "p.jsonl",
        "--num-prompts", 2, "--max-new-tokens", 8,
    ]  # fmt: skip
    report = tmp_path / "bench.json"
    benched = paradraft(
        "bench", *asked, "--methods", "ar,autoregressive:k=2", "--runs", 1, "--json", report
    )  # fmt: skip
    assert benched.code == 0, benched.err
    found = json.loads(report.read_text())["methods"]["autoregressive:k=2"]
    assert found["dtype"] == "stored" and found["tokens"] == 16 and found["acceptance_length"] > 1
    planned = paradraft("plan", *asked, "--drafter", "autoregressive", "-k", "1-2", "--batch-size", 1)
    assert planned.code == 0, planned.err


def test_mistakes_with_files(paradraft: Paradraft, models: Path, tmp_path: Path) -> None:
    """Guards that each gives one line and exit code 2, before anything is loaded or written."""
    whole, cut, text = models / "target.gguf", tmp_path / "cut.gguf", tmp_path / "notes.txt"
    cut.write_bytes(whole.read_bytes()[:-100])
    text.write_text("hello, these are some notes")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.gguf").write_bytes(whole.read_bytes())
    asked = ["--prompt", "x", "--max-new-tokens", 4]
    for target, told in (
        (tmp_path / "none.gguf", "there is no such file"), (cut, "cut off"), (text, "no GGUF file"),
        (tmp_path / "folder", "folder/x.gguf"),
    ):  # fmt: skip
        assert_mistake(paradraft("generate", "--target", target, *asked), target, told)
    few = ["generate", "--target", whole, *asked]
    assert_mistake(paradraft(*few, "--dtype", "int8"), "dtype='int8'", "few bits")
    assert_mistake(paradraft(*few, "--drafter", "pard", "--draft", models / "draft.gguf"), "names no mask token")
    assert_mistake(paradraft(*few, "--drafter", "medusa", "--draft", models / "draft.gguf"), "it is a file")
    assert_mistake(paradraft(*few, "--draft-dtype", "int9", "--drafter", "ngram"), "draft_dtype='int9'")
    save_model(tmp_path / "other", tiny_model("qwen3"), another_tokenizer())
    options = ["--drafter", "autoregressive", "--draft", models / "draft.gguf"]
    assert_mistake(
        paradraft("generate", "--target", tmp_path / "other", *asked, *options), "other tokens than the target"
    )


def test_what_cannot_be_exported_is_refused(
    paradraft: Paradraft, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards that nothing is left half-written."""
    out = tmp_path / "out"
    asked = [out, "--target", models / "target", "--to", "gguf", "--no-measure"]
    assert_mistake(paradraft("export", models / "pard", *asked, "--draft-dtype", "float64"), "float64", "int8")
    assert_mistake(
        paradraft("export", models / "draft.gguf", *asked), "few bits", "name the model that it was made from"
    )
    save_model(tmp_path / "word", tiny_model("qwen3"), another_tokenizer())
    word = [out, "--target", tmp_path / "word", "--to", "gguf", "--no-measure"]
    assert_mistake(paradraft("export", tmp_path / "word", *word), "no BPE of bytes")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert_mistake(paradraft("export", models / "pard", *asked), "pip install 'paradraft[gguf]'")
    assert not out.exists() and not [*tmp_path.glob("*.new")]


def test_packed_weights_that_are_damaged(paradraft: Paradraft, tmp_path: Path) -> None:
    write_packed(tmp_path / "m", tiny_model("llama"), "gptq")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["model.layers.0.mlp.down_proj.scales"]
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    assert_mistake(paradraft("generate", "--target", tmp_path / "m", "--prompt", "x"), "down_proj has no scales")
