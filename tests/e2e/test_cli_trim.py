"""`paradraft trim` as a user meets it: a draft that reads less and changes no text, or one line about a mistake."""

from __future__ import annotations

import re
import shlex
import string
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.train.init import vocabulary_size
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.e2e.conftest import EXACT, MISTAKE, Paradraft, assert_mistake
from tests.e2e.test_cli_init_draft import no_larger_files
from tests.support import gguf_files
from tests.support.drafts import draft_of
from tests.support.jsonl import write_lines
from tests.support.kinds import model_of

PROMPTS = ("a", "hello", "abcabcabc", "The0quick1brown", "xyz", "B5C6")
ROWS = VOCAB + 8


@pytest.fixture(autouse=True)
def few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times few passes."""
    monkeypatch.setattr(vocabulary_size, "TIMES", 3)
    monkeypatch.setattr(vocabulary_size, "WARM_UP", 1)


@pytest.fixture(scope="module")
def answers(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target says."""
    engine = load(str(family / "target"), drafter="none", runtime=Runtime(dtype="float64", compiled=False))
    asked = [first + second for first in string.ascii_lowercase for second in "ab"]
    found = engine.generate(asked, max_new_tokens=24, sampling=Sampling(temperature=0.6, seed=3))
    file = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    write_lines(
        file,
        [{"prompt": one, "response": answer.text} for one, answer in zip(asked, found, strict=True) if answer.text],
    )
    return file


def number_in(out: str, row: str) -> tuple[float, float]:
    """The two numbers of a row of the table."""
    found = re.search(rf"^{row} +([\d.,]+)%? +([\d.,]+)%?$", out, re.MULTILINE)
    assert found, out
    before, after = (float(each.replace(",", "")) for each in found.groups())
    return before, after


@pytest.mark.parametrize("name", ["autoregressive", "pard", "pard2"])
def test_a_trimmed_draft_reads_less_and_changes_no_text(
    paradraft: Paradraft, family: Path, answers: Path, tmp_path: Path, name: str
) -> None:
    """Guards the whole way, from answers to texts: the printed command decodes with the folder, the texts at T = 0 and
    at T = 0.8 are the target's, drafts are accepted, and the table says what was written."""
    out = tmp_path / "my draft"
    draft = family / "draft" if name == "autoregressive" else draft_of(family, name)
    made = paradraft("trim", draft, "--out", out, "--counts", answers, "--size", 40)
    assert made.code == 0 and "timing passes" in made.err
    stored = load_file(out / "model.safetensors")
    assert len(stored["lm_head.weight"]) == len(stored["d2t"]) == int(stored["t2d"].sum()) == 40
    assert bool(stored["t2d"][tiny_tokenizer().eos_token_id])
    assert number_in(made.out, "rows of the head") == (ROWS, 40)
    before, after = number_in(made.out, "head, MB per pass")
    assert after < before or (before, after) == (0.0, 0.0), "these heads have 9 kB"
    assert number_in(made.out, "counted tokens")[1] > 70
    assert number_in(made.out, "tokens kept aside")[1] > 50
    asked = shlex.split(made.out.splitlines()[-1].removeprefix("next: "))
    assert asked[asked.index("--drafter") + 1] == name
    asked[asked.index("TARGET")] = str(family / "target")
    for temperature in (0, 0.8):
        settings = ["--prompt", "abcabc", "--max-new-tokens", 16, "--temperature", temperature, "--seed", 2, *EXACT]
        plain = paradraft("generate", "--target", family / "target", "--drafter", "none", *settings)
        drafted = paradraft(*asked[1:], *settings, "--lengths", "fixed")
        assert drafted.out == plain.out
        assert float(drafted.err.rpartition("acceptance length ")[2].split()[0]) > 1.1


def test_all_rows_draft_as_before(paradraft: Paradraft, family: Path, answers: Path, tmp_path: Path) -> None:
    """Guards every step of the way at once: of bfloat16 weights, with all ids, not a token and not a round differs."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert paradraft("trim", family / "pard", "--out", whole, "--counts", answers, "--size", ROWS).code == 0
    assert paradraft("trim", whole, "--out", out, "--counts", answers, "--coverage", 1).code == 0
    found = []
    for draft in (whole, out):
        engine = load(str(family / "target"), drafter="pard", draft=str(draft), k=4, lengths="fixed")
        samplings = [Sampling(temperature=temperature, seed=5) for temperature in (0.0, 0.8)] * 3
        found.append([
            (answer.tokens, answer.stats.rounds)
            for answer in engine.generate(list(PROMPTS), max_new_tokens=20, sampling=samplings)
        ])  # fmt: skip
    tokens, rounds = ([[each[index] for each in of] for of in found] for index in (0, 1))
    assert tokens[0] == tokens[1]
    assert sum(rounds[1]) < 0.9 * sum(map(len, tokens[1]))


def test_a_size_is_chosen_by_times(
    paradraft: Paradraft, family: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the choice: the target's time is that of the named one, else an assumed one, and it is said which."""
    draft_time = vocabulary_size.PassTime(pass_s=2e-3, head_s=1.99e-3, head_bytes=9)
    monkeypatch.setattr(vocabulary_size, "draft_time", lambda draft, dtype: draft_time)
    target_time = vocabulary_size.PassTime(pass_s=1e-4, head_s=1e-5, head_bytes=9)
    monkeypatch.setattr(vocabulary_size, "target_time", lambda target: target_time)
    sizes = {}
    for name, options in (("assumed", []), ("named", ["--target", family / "target"])):
        made = paradraft("trim", family / "draft", "--out", tmp_path / name, "--counts", answers, *options)
        assert made.code == 0
        assert "this size gives most tokens per second" in made.out
        assert ("is assumed to take 20 ms" in made.out) == (name == "assumed")
        sizes[name] = number_in(made.out, "rows of the head")[1]
    assert sizes["named"] < sizes["assumed"] <= ROWS, "a target that takes less time makes the head dearer"


@pytest.mark.parametrize("is_faster", [False, True])
def test_a_trimmed_pass_that_is_no_faster_is_named(
    paradraft: Paradraft, family: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    """Guards the owner of a file of few bits: its trimmed folder reads more beside the head, and may take longer."""
    times = iter([2e-3, 1e-3 if is_faster else 3e-3])
    monkeypatch.setattr(
        vocabulary_size,
        "draft_time",
        lambda draft, dtype: vocabulary_size.PassTime(pass_s=next(times), head_s=1e-3, head_bytes=9),
    )
    made = paradraft("trim", family / "draft", "--out", tmp_path / "out", "--counts", answers, "--size", 9)
    assert made.code == 0 and ("a pass is no faster than before" in made.out) is not is_faster


def test_few_bits(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards GGUF files: it is said that the weights are numbers now, in which dtype the folder was timed, and that
    rows were filled up."""
    gguf_files.write_gguf(tmp_path / "draft.gguf", gguf_files.tiny_model("qwen2"), "Q8_0")
    write_lines(tmp_path / "few.jsonl", [{"prompt": "def", "response": " f(x)"}])
    made = paradraft(
        "trim", tmp_path / "draft.gguf", "--out", tmp_path / "out", "--counts", tmp_path / "few.jsonl", "--size", 30
    )
    assert made.code == 0
    assert "are bfloat16 now: it was timed in int8" in made.out and "--draft-dtype int8" in made.out
    assert "none kept aside" in made.out and "the other rows are those of the lowest ids" in made.out


def test_a_draft_that_cannot_run_here_is_trimmed(paradraft: Paradraft, answers: Path, tmp_path: Path) -> None:
    """Guards drafts that are trimmed for another machine: the folder is written, and a line says why no pass was timed;
    where the size depends on times, it is an error."""
    model_of("qwen3_moe").save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    asked = ["trim", tmp_path / "draft", "--counts", answers, "--draft-dtype", "int8", "--out"]
    made = paradraft(*asked, tmp_path / "out", "--size", 40)
    assert made.code == 0 and "not timed, before: " in made.out and "experts" in made.out
    assert "head, MB in bfloat16" in made.out
    assert len(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]) == 40
    failed = paradraft(*asked, tmp_path / "other")
    assert (failed.code, failed.out) == (MISTAKE, "") and "experts" in failed.err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--size", 0], "--size"),
        (["--size", ROWS + 1], f"size={ROWS + 1}: use 1 to {ROWS} tokens"),
        (["--coverage", 0], "--coverage 0.0: use a number above 0, at most 1"),
        (["--coverage", 1.5], "--coverage 1.5: use a number above 0, at most 1"),
        (["--coverage", "nan"], "--coverage nan"),
        (["--size", 9, "--coverage", 0.9], "--size 9 and --coverage 0.9: give one of them"),
        (["--size", 9, "--target", "pocket"], "leave --size and --coverage out"),
        (["--target", "pocket"], "into other tokens than the target: use one of the same family"),
        (["--target", "no/such/model"], "no/such/model"),
        (["--draft-dtype", "int3"], "draft_dtype='int3'"),
        (["--counts", "no.jsonl"], "no.jsonl"),
    ],
)
def test_mistakes(
    paradraft: Paradraft, family: Path, answers: Path, tmp_path: Path, options: list[object], named: str
) -> None:
    """Guards against a traceback, an option that is silently ignored, and an `out` folder left by a failed start."""
    counts = [] if "--counts" in options else ["--counts", answers]
    outcome = paradraft("trim", family / "draft", "--out", tmp_path / "out", *counts, *options)
    assert outcome.code == MISTAKE and outcome.out == ""
    assert named in outcome.err.splitlines()[-1] and "Traceback" not in outcome.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "answers.jsonl"),
        ([{"prompt": "a", "response": ""}], None),
        ([{"prompt": "a"}], "answers.jsonl, line 1"),
    ],
)
def test_files_without_answers(
    paradraft: Paradraft, family: Path, tmp_path: Path, lines: list[object], named: str | None
) -> None:
    """Guards rows that are chosen by nothing. An empty answer is one: its end token counts."""
    write_lines(tmp_path / "answers.jsonl", lines)
    asked = ["trim", family / "draft", "--out", tmp_path / "out", "--size", 9, "--counts", tmp_path / "answers.jsonl"]
    outcome = paradraft(*asked)
    if named is None:
        assert outcome.code == 0 and "counted: 1 answer of 1 token," in outcome.out
    else:
        assert_mistake(outcome, named)
        assert not (tmp_path / "out").exists()


def test_drafts_that_cannot_be_trimmed(paradraft: Paradraft, family: Path, answers: Path, tmp_path: Path) -> None:
    """Guards drafters on the target's states, which are trained with such a head, shapes, and answers with tokens that
    the draft cannot read."""
    tiny_model(1, rows=20).save_pretrained(tmp_path / "few")
    tiny_tokenizer().save_pretrained(tmp_path / "few")
    for draft, *named in (
        (draft_of(family, "medusa"), "drafts on its target's states", "train it with draft_vocab_size"),
        ("shape:llama-3.2-1b", "has random weights"),
        (tmp_path / "few", "has an embedding of 20 rows, and the data holds token"),
        ("/no/such/model", "/no/such/model"),
    ):
        outcome = paradraft("trim", draft, "--out", tmp_path / "out", "--counts", answers, "--size", 9)
        assert (outcome.code, outcome.out) == (MISTAKE, "")
        assert all(part in outcome.err for part in named), outcome.err
    assert not (tmp_path / "out").exists()


def test_out_is_taken(paradraft: Paradraft, family: Path, answers: Path, tmp_path: Path) -> None:
    """Guards the draft itself, and other folders with files."""
    before = {file.name: file.read_bytes() for file in (family / "draft").iterdir()}
    outcome = paradraft("trim", family / "draft", "--out", family / "draft", "--counts", answers, "--size", 9)
    assert_mistake(outcome, "is not empty")
    assert {file.name: file.read_bytes() for file in (family / "draft").iterdir()} == before


def test_weights_that_the_disk_refuses_are_one_line(paradraft: Paradraft, answers: Path, tmp_path: Path) -> None:
    """Guards against half a draft."""
    tiny_model(1, layers=5).save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    asked = ["trim", tmp_path / "draft", "--out", tmp_path / "out", "--counts", answers, "--size", 60]
    with no_larger_files():
        outcome = paradraft(*asked)
    assert outcome.code == MISTAKE and "takes no file of this size" in outcome.err
    assert [folder.name for folder in tmp_path.iterdir()] == ["draft"]
    assert paradraft(*asked).code == 0, "the limit was the reason"
