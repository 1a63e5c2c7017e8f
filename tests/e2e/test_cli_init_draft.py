"""`paradraft init-draft` as a user meets it: a draft that can be trained and used, or one line about a mistake."""

from __future__ import annotations

import json
import resource
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoConfig, T5Config

from paradraft.models.architectures import FAMILIES
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake
from tests.support.quick import mostly_slow

WAYS: dict[str, list[object]] = {
    "cut": ["--layers", 1],
    "narrow": ["--layers", 1, "--intermediate-size", 20],
    "every": ["--every", 1],
    "fresh": ["--fresh", "--layers", 1, "--hidden-size", 16, "--heads", 2, "--intermediate-size", 24, "--seed", 5],
    "from": ["--from", "draft"],
}


def few_steps(folder: Path) -> list[object]:
    """Lets a written recipe take one step, on words that the tiny tokenizer knows."""
    data = folder / "data.jsonl"
    data.write_text('{"text": "abcabcabcabc"}\n{"text": "helloworldhello"}\n{"text": "xyzxyz"}\n', encoding="utf-8")
    return [f"data={data}", "epochs=null", "steps=1", "warmup_steps=0", "samples_per_step=1", "held_out=1"]


@pytest.mark.parametrize("way", mostly_slow(WAYS, quick=["cut", "fresh"]))
def test_a_draft_can_be_used_and_trained(paradraft: Paradraft, family: Path, tmp_path: Path, way: str) -> None:
    """Guards the way from a target alone to a PARD drafter: what is printed is what was made, the draft serves as an
    ordinary one, and each printed command runs, from a recipe that is there to the line for vLLM."""
    out = tmp_path / "my draft"
    options = [family / option if option == "draft" else option for option in WAYS[way]]
    made = paradraft("init-draft", "--target", family / "target", "--out", out, *options)
    assert (made.code, made.err) == (0, "")
    parameters = tiny_model(1).num_parameters()
    assert f"{parameters:,} parameters" in made.out and f"{VOCAB + 8} rows, the target has {VOCAB + 8}" in made.out
    assert f"mask token  {VOCAB}, a free row" in made.out
    assert ("layers 0 of the target" in made.out) == (way in ("cut", "narrow"))
    assert ("with 20 neurons each" in made.out) == (way == "narrow")
    asked = ["--target", family / "target", "--prompt", "abcabc", "--max-new-tokens", 12, *EXACT]
    plain = paradraft("generate", *asked)
    assert paradraft("generate", *asked, "--drafter", "autoregressive", "--draft", out).out == plain.out
    at = made.out.index("next ")
    commands = [shlex.split(line) for line in made.out[at:].removeprefix("next ").splitlines()]
    assert len(commands) == (1 if way == "from" else 2), "what has no weights of a draft learns to be one first"
    for command in commands:
        assert command[:3] == ["paradraft", "train", "pard"] and Path(command[3]).is_file()
        trained = paradraft(*command[1:], *few_steps(tmp_path))
        assert (trained.code, trained.err) == (0, "")
        generate, _, serve = map(shlex.split, trained.out.splitlines()[-3:])
        assert paradraft(*generate[1:-1], "abcabc", "--max-new-tokens", 12, *EXACT).out == plain.out
        assert serve[0] == "vllm"
    drafter = tmp_path / "my draft-pard"
    assert AutoConfig.from_pretrained(drafter).mask_token_id == VOCAB


NAMES = ("<repo>", "<file>", "<empty>")


def with_special_tokens(folder: Path, *unsaid: str) -> Path:
    """A target whose rows are all in use, with special tokens of which these were never said: their rows are equal."""
    model, tokenizer = tiny_model(1, rows=VOCAB + len(NAMES)), tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    at = [VOCAB + NAMES.index(name) for name in unsaid]
    with torch.no_grad():
        model.get_input_embeddings().weight[at] = 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", [["--layers", 1], ["--fresh", "--layers", 1, "--hidden-size", 16, "--heads", 2]])
def test_the_way_to_vllm_does_not_end(paradraft: Paradraft, tmp_path: Path, way: list[object]) -> None:
    """Guards targets without a row to spare, such as SmolLM2: the mask is a special token that the target never says,
    the rows stay the target's from the first command to the last, and vLLM's check takes the drafter as it is."""
    target, out = with_special_tokens(tmp_path / "target", "<repo>", "<empty>"), tmp_path / "draft"
    made = paradraft("init-draft", "--target", target, "--out", out, *way)
    assert f"mask token  {VOCAB + 2}, <empty>, which the target never learnt to say" in made.out
    assert f"{VOCAB + 3} rows, the target has {VOCAB + 3}" in made.out and "vLLM" not in made.out
    few = few_steps(tmp_path)
    assert paradraft("train", "pard", out / "ordinary.yaml", *few).code == 0
    trained = paradraft("train", "pard", out / "pard.yaml", *few)
    assert f"mask token {VOCAB + 2}, about" in trained.out
    assert trained.out.splitlines()[-1].startswith("vllm serve ")
    serve = ["serve", "--engine", "vllm", "--target", target, "--drafter", "pard", "--draft", f"{out}-pard"]
    assert paradraft(*serve, "--dry-run").code == 0
    config = AutoConfig.from_pretrained(f"{out}-pard")
    assert (config.mask_token_id, config.vocab_size) == (VOCAB + 2, VOCAB + 3)


def test_a_row_too_many_is_said(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the user who will serve with vLLM: it is said now, with what to change in which file, and not after the
    training."""
    target = with_special_tokens(tmp_path / "target")
    options = ["init-draft", "--target", target, "--layers", 1, "--out"]
    added, rows = paradraft(*options, tmp_path / "added").out, VOCAB + 3
    assert f"{rows + 1} rows, the target has {rows}" in added and f"{rows}, an added row" in added
    fix = f"for vLLM set mask_token_id in {tmp_path / 'added' / 'pard.yaml'} to a special token that no text"
    assert fix in added and f"such as {VOCAB} (<repo>), {VOCAB + 1} (<file>), {VOCAB + 2} (<empty>)" in added
    kept = paradraft(*options, tmp_path / "kept", "--no-mask-token").out
    assert f"{rows} rows, the target has {rows}" in kept and "none is free" in kept and "for vLLM set" in kept
    tiny_model(1, rows=VOCAB).save_pretrained(tmp_path / "bare")
    tiny_tokenizer().save_pretrained(tmp_path / "bare")
    bare = paradraft("init-draft", "--target", tmp_path / "bare", "--layers", 1, "--out", tmp_path / "out").out
    assert "no special token to spare, so vLLM cannot serve a PARD drafter for it" in bare


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--layers", 3], "layers=3: the target has 2"),
        (["--layers", 0], "layers=0"),
        (["--every", 3], "every=3: the target has 2"),
        (["--every", 0], "every=0"),
        (["--layers", 1, "--every", 1], "either layers or every"),
        (["--hidden-size", 64], "--hidden-size is for --fresh"),
        (["--seed", 0], "--seed is for --fresh"),
        (["--intermediate-size", 0], "intermediate_size=0"),
        (["--intermediate-size", 49], "intermediate_size=49: the target's layers have 48"),
        (["--from", "draft", "--intermediate-size", 9], "leave --intermediate-size out"),
        (["--fresh", "--every", 2], "leave --every out"),
        (["--fresh", "--from", "draft"], "leave --from out"),
        (["--from", "draft", "--layers", 1], "leave --layers out"),
        (["--from", "draft", "--every", 1], "leave --every out"),
        (["--from", "no/such/model"], "no/such/model"),
        (["--fresh", "--hidden-size", 30, "--heads", 4], "heads=4 do not divide hidden_size=30"),
        (["--fresh", "--heads", 0], "heads=0"),
        (["--fresh"], "larger than the target"),
        (["--fresh", "--seed", -1], "seed=-1"),
        (["--dtype", "int4"], "dtype='int4'"),
        (["--target", "/no/such/target"], "/no/such/target"),
        (["--target", ""], "is not a model folder"),
        (["--layers", "many"], "--layers"),
    ],
)
def test_mistakes(paradraft: Paradraft, family: Path, tmp_path: Path, options: list[object], named: str) -> None:
    """Guards against a traceback, an option that is silently ignored, and an `out` folder left by a failed start."""
    out = tmp_path / "out"
    options = [family / option if option == "draft" else option for option in options]
    assert_mistake(paradraft("init-draft", "--target", family / "target", "--out", out, *options), named)
    assert not out.exists()


def test_out_is_taken(paradraft: Paradraft, family: Path, tmp_path: Path) -> None:
    """Guards the target itself, files, and folders below files."""
    before = {file.name: file.read_bytes() for file in (family / "target").iterdir()}
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for out, named in (
        (family / "target", "is not empty"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "below", "cannot be written"),
    ):
        assert_mistake(paradraft("init-draft", "--target", family / "target", "--out", out), named)
    assert {file.name: file.read_bytes() for file in (family / "target").iterdir()} == before


def test_unsupported_models(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards against minutes of loading before the architecture is looked at, and against a broken config."""
    folder = tmp_path / "model"
    T5Config().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    asked = ["init-draft", "--target", folder, "--out", tmp_path / "out"]
    assert_mistake(paradraft(*asked), f"is a t5 model; supported architectures are {', '.join(FAMILIES)}")
    tiny_model(1).config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(written | {"num_hidden_layers": "two"}), encoding="utf-8")
    assert_mistake(paradraft(*asked), "cannot load model", "num_hidden_layers")
    (folder / "config.json").write_text("{", encoding="utf-8")
    assert_mistake(paradraft(*asked), "cannot load model")
    assert not (tmp_path / "out").exists()


LARGEST_BYTES = 2**16
"""Less than the weights of the tiny draft, and more than any other file of it."""


@contextmanager
def no_larger_files() -> Iterator[None]:
    """Lets the system refuse larger files, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_that_the_disk_refuses_are_one_line(paradraft: Paradraft, family: Path, tmp_path: Path) -> None:
    """Guards against a traceback out of safetensors' Rust, and against half a draft: the system itself refuses."""
    asked = ["init-draft", "--target", family / "target", "--out", tmp_path / "draft"]
    with no_larger_files():
        outcome = paradraft(*asked)
    assert_mistake(outcome, f"{tmp_path / 'draft'}: ", "takes no file of this size", "run the same command again")
    assert not list(tmp_path.iterdir())
    assert paradraft(*asked).code == 0, "the limit was the reason"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_full_disk_is_one_line(
    paradraft: Paradraft, family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Guards each library that writes a file of the folder: every one has an exception of its own for a full disk. The
    file is a device that is always full."""
    make_folder = tempfile.mkdtemp

    def with_a_full_file(**settings: object) -> str:
        folder = make_folder(**settings)  # type: ignore[call-overload]
        Path(folder, file).symlink_to("/dev/full")
        return str(folder)

    monkeypatch.setattr(tempfile, "mkdtemp", with_a_full_file)
    outcome = paradraft("init-draft", "--target", family / "target", "--out", tmp_path / "draft")
    assert_mistake(outcome)
    assert outcome.err == (
        f"paradraft: {tmp_path / 'draft'}: no space is left on the disk: make room, and run the same command again\n"
    )
    assert not list(tmp_path.iterdir())
