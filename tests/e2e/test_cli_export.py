"""`paradraft export`: a folder that an engine loads, and refusals of what it cannot serve."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.formats.folder import save_model
from paradraft.formats.pard import RANK, declare_masks
from paradraft.formats.pard2 import PROJECTION
from paradraft.models.runtime import Runtime
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake
from tests.support.drafts import draft_of
from tests.support.serving import until


@pytest.fixture
def prompts(tmp_path: Path) -> list[object]:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n{"prompt": "abcabc"}\n', encoding="utf-8")
    return ["--prompts", file, "--num-prompts", 2, "--max-new-tokens", 16, "-k", 3, *EXACT]


def padded(family: Path, folder: Path, rows: int) -> Path:
    """The tiny target with so many rows of the embedding."""
    model = AutoModelForCausalLM.from_pretrained(family / "target")
    model.resize_token_embeddings(rows, mean_resizing=False)
    save_model(folder, model, AutoTokenizer.from_pretrained(family / "target"))
    return folder


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "transformers"])
def test_the_folder_is_what_the_engine_loads(
    paradraft: Paradraft, family: Path, tmp_path: Path, prompts: list[object], engine: str
) -> None:
    """Guards the hand-off: as many rows as the target has, one mask token by both names, the target's ends and tokens,
    the same drafts as before, and figures that come from these very files."""
    target, out = padded(family, tmp_path / "target", VOCAB + 9), tmp_path / "out"
    done = paradraft("export", draft_of(family, "pard"), out, "--target", target, "--to", engine, *prompts)
    assert done.code == 0, done.err
    config = AutoConfig.from_pretrained(out)
    before = AutoConfig.from_pretrained(draft_of(family, "pard"))
    assert before.vocab_size != config.vocab_size == VOCAB + 9
    assert config.mask_token_id == config.pard_token == before.pard_token
    assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"] == tiny_tokenizer()("abc")["input_ids"]
    drafter = "pard" if engine in ("vllm", "tensorrt-llm") else "autoregressive"
    runtime = Runtime(dtype="float64")
    engines = [load(str(target), drafter=drafter, draft=str(folder), k=3, runtime=runtime, lengths="fixed")
               for folder in (out, draft_of(family, "pard"))]  # fmt: skip
    ours, theirs = (each.generate(["hello", "abcabc"], max_new_tokens=16) for each in engines)
    plain = Engine(engines[0].target, NoDrafter(engines[0].drafter.reserved_tokens), Speculation(k=1))
    assert [one.tokens for one in ours] == [
        one.tokens for one in plain.generate(["hello", "abcabc"], max_new_tokens=16)
    ]
    assert [one.accepted for one in ours] == [one.accepted for one in theirs]
    length = sum(one.stats.tokens for one in ours) / sum(one.stats.rounds for one in ours)
    assert f"{length:.2f} tokens per target pass here" in done.out
    card = (out / "README.md").read_text()
    assert f"| tokens per pass of the target | {length:.2f} |" in card and "the same text as without it" in card
    assert done.out.splitlines()[-1] in card and "has 64 rows" not in card
    if engine == "tensorrt-llm":
        told = yaml.safe_load((out / "speculative.yaml").read_text())["speculative_config"]
        assert told == {"decoding_type": "PARD", "max_draft_len": 3, "speculative_model": str(out)}
    if engine == "vllm":
        told = json.loads(done.out.splitlines()[-1].split(" --speculative-config ")[1].strip("'"))
        assert (told["model"], told["num_speculative_tokens"], told["parallel_drafting"]) == (str(out), 3, True)


def test_added_rows_are_never_drafted(paradraft: Paradraft, family: Path, tmp_path: Path) -> None:
    """Guards padding: a row with a logit of its own would be drafted by engines, which know no unused rows."""
    target, out = padded(family, tmp_path / "target", VOCAB + 20), tmp_path / "out"
    asked = ["export", family / "draft", out, "--target", target, "--to", "vllm", "--no-measure"]
    assert paradraft(*asked).code == 0
    logits = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)(torch.arange(1, 40)[None]).logits
    assert logits.shape[-1] == VOCAB + 20 and int(logits.argmax(-1).max()) < VOCAB + 8, "rows of its own"
    assert '"parallel_drafting"' not in (out / "README.md").read_text(), "an ordinary draft has no masks"


def test_what_an_engine_cannot_serve_is_refused(
    paradraft: Paradraft, family: Path, tmp_path: Path, prompts: list[object]
) -> None:
    """Guards whoever serves: an engine that loads a folder and accepts nothing says nothing."""
    target, out = family / "target", tmp_path / "out"

    def asked(draft: object, engine: str = "vllm", *, of: Path = target, into: Path = out) -> list[object]:
        return ["export", draft, into, "--target", of, "--to", engine, *prompts]

    medusa = draft_of(family, "medusa")
    assert_mistake(paradraft(*asked(medusa, "sglang")), "SGLang has no Medusa", "serve it with para")
    assert_mistake(paradraft(*asked(medusa), "-k", 12), "k=12", "has 9 heads")
    assert_mistake(paradraft(*asked(draft_of(family, "eagle"))), "train it with for_vllm=true")
    assert_mistake(paradraft(*asked(draft_of(family, "hydra"))), "is of the kind hydra", "train a PARD drafter")
    assert_mistake(paradraft(*asked(family / "draft", into=tmp_path / "dflash-1")), "'dflash' in its name")
    assert_mistake(paradraft(*asked(family / "draft", "llama.cpp")), "--to llama.cpp: use one of vllm, sglang")
    assert_mistake(paradraft(*asked(tmp_path / "none")), "unknown model")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("x")
    assert_mistake(paradraft(*asked(family / "draft", into=taken)), "is not empty: delete it")
    assert [file.name for file in taken.iterdir()] == ["mine"]
    assert_mistake(paradraft(*asked(family / "draft", into=taken / "mine")), "mine' is a file: choose a folder")
    assert_mistake(paradraft(*asked(family / "draft", into=taken / "mine" / "out")), "mine' is a file: choose a folder")
    assert_mistake(paradraft(*asked(family / "draft"), "-k", 5000), "-k", "256")
    many = tiny_model(2, rows=VOCAB + 4)
    declare_masks(many.config, VOCAB, 3)
    save_model(tmp_path / "many", many, tiny_tokenizer())
    assert_mistake(paradraft(*asked(tmp_path / "many")), "has 3 mask tokens, and vllm knows one")
    outside = tiny_model(2, rows=VOCAB + 4)
    declare_masks(outside.config, VOCAB + 3)
    save_model(tmp_path / "outside", outside, tiny_tokenizer())
    small = padded(family, tmp_path / "small", VOCAB)
    assert_mistake(paradraft(*asked(tmp_path / "outside", of=small)), f"uses mask token {VOCAB + 3}", "mask_token_id")
    assert not out.exists()


def test_a_drafter_on_the_targets_states(
    paradraft: Paradraft, family: Path, tmp_path: Path, prompts: list[object]
) -> None:
    """Guards the hand-off of heads: measured as they are handed off, in their own words, for one target."""
    out = tmp_path / "out"
    done = paradraft("export", draft_of(family, "medusa"), out, "--target", family / "target", "--to", "vllm", *prompts)
    assert done.code == 0, done.err
    card = (out / "README.md").read_text()
    assert "3 tokens a round, each by a head of its own" in card and "belongs to this target alone" in card
    told = json.loads(done.out.splitlines()[-1].split(" --speculative-config ")[1].strip("'"))
    assert told == {"method": "medusa", "model": str(out), "num_speculative_tokens": 3}
    runtime = Runtime(dtype="float64")
    engine = load(
        str(family / "target"),
        drafter="medusa",
        draft=str(draft_of(family, "medusa")),
        k=3,
        runtime=runtime,
        lengths="fixed",
    )
    answers = engine.generate(["hello", "abcabc"], max_new_tokens=16)
    length = sum(one.stats.tokens for one in answers) / sum(one.stats.rounds for one in answers)
    assert f"{length:.2f} tokens per target pass here" in done.out


def test_the_head_stays_here(paradraft: Paradraft, family: Path, tmp_path: Path, prompts: list[object]) -> None:
    """Guards the figures of the card: with a head that the engine does not read, more would be accepted here."""
    out = tmp_path / "out"
    done = paradraft("export", "pocket", out, "--target", "pocket", "--to", "vllm", *prompts[:-4], "-k", 3)
    assert done.code == 0, done.err
    assert "Its head, which tells masks the tokens before them, is left out" in done.out
    assert not hasattr(AutoConfig.from_pretrained(out), RANK) and not list(out.glob("*/"))


def test_the_states_stay_here(paradraft: Paradraft, family: Path, tmp_path: Path, prompts: list[object]) -> None:
    """Guards PARD-2 folders elsewhere: engines get the PARD drafter that they are too, and its figures."""
    out, draft = tmp_path / "out", draft_of(family, "pard2")
    done = paradraft("export", draft, out, "--target", family / "target", "--to", "vllm", *prompts)
    assert done.code == 0, done.err
    assert "It drafts without the target's states, which only paradraft gives it." in done.out
    config = AutoConfig.from_pretrained(out).to_dict()
    assert config["spd_type"] == "pard" and not [key for key in config if key.startswith("pard2")]
    assert not (out / PROJECTION).exists()
    runtime = Runtime(dtype="float64")
    bare = load(str(family / "target"), drafter="pard", draft=draft, k=3, runtime=runtime, lengths="fixed")
    answers = bare.generate(["hello", "abcabc"], max_new_tokens=16)
    length = sum(one.stats.tokens for one in answers) / sum(one.stats.rounds for one in answers)
    assert f"{length:.2f} tokens per target pass here" in done.out


@pytest.mark.slow
def test_sigterm_leaves_nothing_half_written(family: Path, tmp_path: Path) -> None:
    """Guards disks: the folder that was being written and measured stayed, with a copy of the model in it."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out" / "drafter"
    prompts.write_text('{"prompt": "hello"}\n' * 500, encoding="utf-8")
    out.parent.mkdir()
    asked = ["export", family / "draft", out, "--target", family / "target", "--to", "vllm", "--prompts", prompts,
             "--num-prompts", 500, "--max-new-tokens", 200, *EXACT]  # fmt: skip
    command = [sys.executable, "-c", "from paradraft.cli import main; main()", *map(str, asked)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        until(lambda: any(out.parent.iterdir()), 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list(out.parent.iterdir()) == []
