"""`paradraft train pard` as a user meets it: a drafter, a stop, a mistake."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.live import Live
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from paradraft.cli.commands import train
from paradraft.data.mix import Source
from paradraft.sources import recorded
from paradraft.sources.recorded import remember_drafter
from paradraft.train.drafters.pard_recipe import ORDINARY_K, PardRecipe
from paradraft.train.init.adaptation import Lora
from paradraft.train.run.expectations import curves_in_words
from paradraft.train.run.progress import Evaluation, Progress
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.e2e.conftest import EXACT, INTERRUPTED, MISTAKE, Paradraft, assert_mistake

STEPS = 6
PARTS = 3
"""Files that one checkpoint calls `torch.save` for."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_all_settings_are_listed(paradraft: Paradraft) -> None:
    """Guards against a setting that a reader of the help cannot find, or that nobody explained."""
    outcome = paradraft("train", "pard", "--settings")
    assert outcome.code == 0
    listed = [line.split(" (")[0] for line in outcome.out.splitlines()]
    inner = {"data": Source, "lora": Lora}
    expected = [f"{group}.{name}" for group, kind in inner.items() for name in kind.model_fields]
    assert listed == [*PardRecipe.model_fields, *expected]
    assert "k (8): tokens that one draft pass" in outcome.out and "None" not in outcome.out


@pytest.fixture
def recipe(family: Path, tmp_path: Path) -> Path:
    data, file = tmp_path / "data.jsonl", tmp_path / "recipe.yaml"
    data.write_text('{"text": "abcabcabcabcabc"}\n{"text": "helloworldhelloworld"}\n' * 2, encoding="utf-8")
    file.write_text(
        f"""
        model: {family / "draft"}
        data: [{data}]
        out: {tmp_path / "never"}
        steps: {STEPS}
        samples_per_step: 2
        k: 3
        lr: 1e-3
        warmup_steps: 1
        bf16: false
        device: cpu
        log_every: 1
        save_every: 2
        """,
        encoding="utf-8",
    )
    return file


@pytest.mark.usefixtures("drawn")
def test_training_writes_a_drafter(family: Path, paradraft: Paradraft, recipe: Path, tmp_path: Path) -> None:
    """Guards the way from a recipe to an answer: overrides count, the result loads as a PARD drafter and as an
    ordinary model, and nothing is trained twice."""
    out = tmp_path / "drafter"
    trained = paradraft("train", "pard", recipe, f"out={out}", "lr=2e-3")
    assert trained.code == 0
    assert trained.err == ""
    assert f"step {STEPS}/{STEPS}" in trained.out
    assert not (tmp_path / "never").exists()
    config = AutoConfig.from_pretrained(out)
    assert (config.spd_type, config.pard_token, config.mask_token_id) == ("pard", VOCAB, VOCAB)
    asked = ["--target", family / "target", "--prompt", "abcabc", "--max-new-tokens", 12, *EXACT]
    plain = paradraft("generate", *asked)
    for drafter in ("pard", "autoregressive"):
        assert paradraft("generate", *asked, "--drafter", drafter, "--draft", out).out == plain.out
    AutoModelForCausalLM.from_pretrained(out).generate(torch.tensor([[1, 2]]), max_new_tokens=2, pad_token_id=0)
    again = paradraft("train", "pard", recipe, f"out={out}", "lr=2e-3")
    assert again.code == 0
    assert "already trained" in again.out


def test_interrupted_training_resumes(
    paradraft: Paradraft, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a checkpoint that is lost, torn or forgets something: stopped after step 5 and started again, a
    run goes on from step 4 and ends with the very weights of a run that was never stopped."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert paradraft("train", "pard", recipe, f"out={whole}").code == 0
    line = train.line_of

    def stop_at_step_5(progress: Progress) -> str:
        if progress.step == 5:
            raise KeyboardInterrupt
        return line(progress)

    with monkeypatch.context() as patched:
        patched.setattr(train, "line_of", stop_at_step_5)
        first = paradraft("train", "pard", recipe, f"out={stopped}")
    assert first.code == INTERRUPTED
    assert first.err == "paradraft: interrupted\n"
    assert sorted(place.name for place in (stopped / "checkpoint").iterdir()) == ["step-00000002", "step-00000004"]
    assert not (stopped / "config.json").exists()
    second = paradraft("train", "pard", recipe, f"out={stopped}")
    assert second.code == 0
    assert [text in second.out for text in ("step 4/", "step 5/", "step 6/")] == [False, True, True]
    expected, found = (load_file(folder / "model.safetensors") for folder in (whole, stopped))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_run_says_what_it_will_do_and_what_to_do_next(
    paradraft: Paradraft, recipe: Path, family: Path, tmp_path: Path
) -> None:
    """Guards the way from training to serving: what is printed can be pasted, and it decodes with what was trained."""
    out = tmp_path / "with a space"
    asked = ["train", "pard", recipe, f"out={out}", f"target={family / 'target'}", "held_out=1"]
    trained = paradraft(*asked)
    assert trained.code == 0, trained.err
    lines = trained.out.splitlines()
    assert lines[0].startswith("pard, K = 3: 3 samples of ")
    assert f" more held out; {STEPS} steps of 2 samples in float32; mask token {VOCAB}, about " in lines[0]
    assert lines[0].endswith(" GiB of memory on cpu")
    assert lines[1].startswith("before training: held-out loss ") and "tokens per target pass" in lines[1]
    kept = next(line for line in lines if line.startswith("kept: step "))
    assert kept.count(f" of {STEPS}, ") == 1 and kept.count("(before training ") == 2
    assert lines[-4] == "try it, measure it, serve it:"
    generate, bench, serve = map(shlex.split, lines[-3:])
    assert generate[0] == bench[0] == "paradraft"
    answer = paradraft(*generate[1:-1], "abc", "--max-new-tokens", 4, *EXACT)
    assert answer.code == 0, answer.err
    small = ["--num-prompts", 1, "--max-new-tokens", 4, "--runs", 1, "--no-compile", *EXACT, *prompts_of(tmp_path)]
    figures = paradraft(*bench[1:], *small)
    assert figures.code == 0, figures.err
    assert serve[:3] == ["vllm", "serve", str(family / "target")]
    config = json.loads(serve[-1])
    assert (config["model"], config["num_speculative_tokens"], config["parallel_drafting"]) == (str(out), 3, True)
    assert paradraft(*asked).out.splitlines()[-4:] == lines[-4:]


def test_the_target_drafts_with_what_was_trained(
    family: Path, paradraft: Paradraft, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the way from one file to faster answers: after a training no drafter has to be named."""
    (cache := tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(recorded, "cache_folder", lambda: cache)
    monkeypatch.setattr(recorded, "remember_drafter", remember_drafter)
    monkeypatch.setattr(train, "_drafts", lambda record: True)  # in six steps hardly any drafter becomes better
    out, target = tmp_path / "drafter", family / "target"
    trained = paradraft("train", "pard", recipe, f"out={out}", f"target={target}", "held_out=1")
    assert trained.code == 0, trained.err
    last = trained.out.splitlines()[-1]
    assert last == f"paradraft chat --target {target} drafts with it from now on, without --drafter"
    asked = ["generate", "--target", target, "--prompt", "abcabc", "--max-new-tokens", 12, "--dtype", "float32"]
    plain, drafted = paradraft(*asked, "--drafter", "none"), paradraft(*asked)
    assert drafted.out == plain.out and f"drafter suffix+pard: it drafts with {out}, the last" in drafted.err
    prompts = prompts_of(tmp_path)
    measured = paradraft("drafters", target, "--max-new-tokens", 4, "--no-compile", "--num-prompts", 1, *prompts)
    assert measured.code == 0, measured.err
    assert "suffix+pard:k=3" in json.loads(measured.out.splitlines()[-1])
    timed = paradraft("bench", "--target", target, "--methods", "ar,auto:k=2", "--runs", 1, "--max-new-tokens", 4,
                      "--no-compile", "--num-prompts", 1, *prompts)  # fmt: skip
    assert timed.code == 0, timed.err
    assert "suffix+pard:k=2:lengths=expected" in json.loads(timed.out.splitlines()[-1])
    (place := next(cache.glob("drafter-*"))).unlink()
    again = paradraft("train", "pard", recipe, f"out={out}", f"target={target}", "held_out=1")
    assert again.code == 0 and not place.exists(), "nothing was trained"
    sampled = ["--methods", "ar,auto", "--verify", "rejection", "--temperature", 0.8, "--runs", 1]
    assert remember_drafter(str(target), out, "pard", 3)
    drawn = paradraft("bench", "--target", target, *sampled, "--max-new-tokens", 4, "--no-compile", *prompts)
    assert drawn.code == 0, drawn.err


def test_only_a_drafter_that_guesses_better_is_kept() -> None:
    """Guards the drafter of an earlier training against a run that came to nothing, or was not measured."""
    for first, best, is_kept in [(1.0, 1.5, True), (1.5, 1.5, False), (1.0, 1.04, False), (None, 1.3, True)]:
        before = None if first is None else {"acceptance_length": first}
        assert train._drafts({"best": {"acceptance_length": best}, "before_training": before}) == is_kept
    assert not train._drafts({}) and not train._drafts({"best": {"acceptance_length": None}})


def test_a_run_says_early_what_it_will_take(paradraft: Paradraft, recipe: Path, family: Path, tmp_path: Path) -> None:
    """Guards whoever leaves a run alone for a night that takes a week: after three steps it says rows and time, with
    its evaluations, and what a recorded run of its kind has yielded."""
    asked = ["train", "pard", recipe, f"target={family / 'target'}", "held_out=1", "evaluate_every=2"]
    lines = paradraft(*asked, f"out={tmp_path / 'out'}").out.splitlines()
    (at,) = (index for index, line in enumerate(lines) if line.startswith("expected: "))
    after = next(index for index, line in enumerate(lines) if line.startswith("step 3/"))
    assert lines[at - 1].startswith(("step 2/", "step 2:")) and lines[at + 1 : after] == curves_in_words("pard")
    assert re.fullmatch(
        rf"expected: [\d,]+ rows in {STEPS} steps, \d+ s \(\d+ rows/s in .*; 3 evaluations of \d+ s\)", lines[at]
    )
    assert "benchmarks/" in lines[at + 1] and "Qwen2.5-Coder 1.5B" in lines[at + 2]
    short = paradraft(*asked, f"out={tmp_path / 'short'}", "steps=2").out
    assert "expected: " not in short


def with_rows(folder: Path, rows: int) -> Path:
    """A tiny model with so many rows of the embedding."""
    tiny_model(1, rows=rows).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_the_line_for_vllm_is_one_that_works(paradraft: Paradraft, recipe: Path, family: Path, tmp_path: Path) -> None:
    """Guards whoever pastes the last line: where vLLM would refuse the rows of the drafter, it is the command that
    mends them, and vLLM's check accepts what that has written. The card has the same line."""
    out, target = tmp_path / "out", with_rows(tmp_path / "target", VOCAB + 9)
    trained = paradraft("train", "pard", recipe, f"out={out}", f"target={target}", "held_out=1", "steps=1")
    assert trained.code == 0, trained.err
    line = shlex.split(trained.out.splitlines()[-1])
    assert line[:3] == ["paradraft", "export", str(out)]
    assert "paradraft export DRAFTER DRAFTER-vllm " in (out / "README.md").read_text()
    assert paradraft(*line[1:], "--no-measure").code == 0
    serve = ["serve", "--engine", "vllm", "--target", target, "--drafter", "pard", "-k", 3, "--dry-run", "--draft"]
    assert paradraft(*serve, line[3]).code == 0
    assert_mistake(paradraft(*serve, out), "run `paradraft export")


def test_no_line_is_printed_that_vllm_is_known_to_refuse(paradraft: Paradraft, recipe: Path, tmp_path: Path) -> None:
    """Guards the end of hours of training: a mask in a row that the target does not have is no drafter for vLLM, which
    is said before the first step, and after the last with what to do."""
    out, target, model = tmp_path / "out", tmp_path / "target", tmp_path / "model"
    with_rows(target, VOCAB), with_rows(model, VOCAB)
    asked = ["train", "pard", recipe, f"out={out}", f"model={model}", f"target={target}", "held_out=1", "steps=1"]
    lines = paradraft(*asked).out.splitlines()
    assert f"mask token {VOCAB}, in an added row that vLLM does not take" in lines[0]
    assert lines[-1].startswith(f"# vLLM cannot serve it: '{out}' uses mask token {VOCAB}, and ")
    assert lines[-1].endswith("train with mask_token_id set to a token of the target that no text holds")
    for text in ("\n".join(lines), (out / "README.md").read_text()):
        assert "vllm serve" not in text and "paradraft export" not in text
    serve = ["serve", "--engine", "vllm", "--target", target, "--drafter", "pard", "--draft", out, "--dry-run"]
    assert_mistake(paradraft(*serve), "train with mask_token_id")


def test_the_lines_for_an_ordinary_draft_work(paradraft: Paradraft, recipe: Path, family: Path, tmp_path: Path) -> None:
    """Guards `k: 1`: such a draft has no masks, so it is no PARD drafter."""
    out = tmp_path / "out"
    asked = ["train", "pard", recipe, f"out={out}", f"target={family / 'target'}", "k=1", "held_out=1", "steps=1"]
    generate, bench, serve = map(shlex.split, paradraft(*asked).out.splitlines()[-3:])
    assert paradraft(*generate[1:-1], "abc", "--max-new-tokens", 4, *EXACT).code == 0
    assert f"ar,autoregressive:k={ORDINARY_K}" in bench
    config = json.loads(serve[-1])
    assert "parallel_drafting" not in config and config["num_speculative_tokens"] == ORDINARY_K


def test_the_folder_has_a_model_card(paradraft: Paradraft, recipe: Path, family: Path, tmp_path: Path) -> None:
    """Guards a drafter that is given to others: the card says what it guesses, how well, and the lines that use it."""
    out = tmp_path / "out"
    assert paradraft("train", "pard", recipe, f"out={out}", f"target={family / 'target'}", "held_out=1").code == 0
    card, record = (out / "README.md").read_text(), json.loads((out / "train_command.json").read_text())
    assert card.startswith("---\nlibrary_name: paradraft\n") and "base_model" not in card, "no path of this machine"
    best, first = record["best"], record["before_training"]
    assert f"| {best['acceptance_length']:.2f} (before: {first['acceptance_length']:.2f}) |" in card
    assert " ".join(f"{share:.2f}" for share in best["by_position"]) in card and len(best["by_position"]) == 3
    lines = [shlex.split(line) for line in card.splitlines() if line.startswith(("paradraft ", "vllm "))]
    assert [line[1] for line in lines] == ["generate", "bench", "serve"]
    asked = [str(out) if word == "DRAFTER" else word for word in lines[0][1:-1]]
    assert paradraft(*asked, "abc", "--max-new-tokens", 4, *EXACT).code == 0


def test_a_terminal_shows_a_bar_and_lines_that_fit(recipe: Path, family: Path, tmp_path: Path) -> None:
    """Guards narrow terminals: a table of nine columns had been cut to dots."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None, height=20)
    progress = Progress(
        step=3, steps=6, loss=2.5, accuracy=(0.6,) + (0.25,) * 7, rows_per_s=9.0, left_s=65.0, grad_norm=1.0
    )
    held_out = Evaluation(step=3, loss=2.0, accuracy=(0.5, 0.2), acceptance_length=1.75, is_best=True)
    with Live(console=terminal, auto_refresh=False) as live:
        screen = train._Screen(live)
        for report in (progress, held_out, progress):
            screen.show(report)
    shown = terminal.file.getvalue()
    assert "step 3: held-out loss 2.000, 1.75 tokens per target pass, best so far" in shown
    assert "step 3/6" in shown and "1:05 left" in shown
    assert "loss 2.500  right by position .60 .25 .25 .25 .25 .25 .25" in shown


def test_without_a_target_there_is_a_word_to_replace(paradraft: Paradraft, recipe: Path, tmp_path: Path) -> None:
    """Guards against lines that name a model nobody has named."""
    lines = paradraft("train", "pard", recipe, f"out={tmp_path / 'out'}").out.splitlines()
    assert lines[-4].endswith("with the model whose text it is to guess as TARGET:")
    assert all(" TARGET " in line for line in lines[-3:])


def prompts_of(folder: Path) -> list[object]:
    file = folder / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n', encoding="utf-8")
    return ["--prompts", file]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 143)])
def test_a_run_that_is_asked_to_stop(
    paradraft: Paradraft, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """Guards the steps since the last checkpoint, the one line that says where the run stands, and the exit code by
    which a cluster knows that it was asked to stop."""
    out, line = tmp_path / "stopped", train.line_of

    def ask_at_step_2(progress: Progress) -> str:
        if progress.step == 2:
            os.kill(os.getpid(), number)
        return line(progress)

    with monkeypatch.context() as patched:
        patched.setattr(train, "line_of", ask_at_step_2)
        first = paradraft("train", "pard", recipe, f"out={out}")
    assert first.code == code
    assert first.err == ("paradraft: interrupted\n" if number == signal.SIGINT else "")
    place = out / "checkpoint"
    lines = first.out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("st")] == [
        *(f"step {step}/{STEPS}" for step in (1, 2, 3)),
        f"stopped after step 3 of {STEPS}, with a checkpoint in {place}: the same command goes on from there",
    ]
    assert lines[-1].startswith("stopped"), "nothing comes after it"
    second = paradraft("train", "pard", recipe, f"out={out}")
    assert second.code == 0
    assert [text in second.out for text in ("step 3/", "step 4/", "step 6/")] == [False, True, True]


def test_a_full_disk_is_one_line(
    paradraft: Paradraft, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback out of torch's C++ at three in the morning."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    monkeypatch.setattr(torch, "save", full)
    outcome = paradraft("train", "pard", recipe, f"out={tmp_path / 'out'}")
    assert outcome.code == MISTAKE
    assert outcome.err == (
        f"paradraft: {tmp_path / 'out'}: no space is left on the disk: make room, and the same command goes on from "
        "the last checkpoint\n"
    )


def test_a_damaged_checkpoint_is_a_warning(
    paradraft: Paradraft, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a run against its disk: a flipped bit in the newest checkpoint costs the steps since the one before, and
    in both it is a mistake in one line, not a traceback out of the unpickler."""
    out = tmp_path / "out"

    def stop_at_step_5(progress: Progress) -> str:
        if progress.step == 5:
            raise KeyboardInterrupt
        return ""

    def damage(step: int) -> None:
        file = out / "checkpoint" / f"step-{step:08d}" / "optimizer.bin"
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")

    with monkeypatch.context() as patched:
        patched.setattr(train, "line_of", stop_at_step_5)
        assert paradraft("train", "pard", recipe, f"out={out}").code == INTERRUPTED
    damage(4)
    with monkeypatch.context() as patched:
        patched.setattr(train, "line_of", lambda progress: f"again {stop_at_step_5(progress)}{progress.step}")
        second = paradraft("train", "pard", recipe, f"out={out}")
    assert second.err.splitlines()[0].startswith("paradraft: warning: ")
    assert "step-00000004/optimizer.bin is damaged" in second.err.splitlines()[0]
    assert second.out.splitlines()[0].endswith(" on cpu, going on after step 2")
    assert second.out.splitlines()[1] == "again 3"
    damage(4)
    damage(2)
    assert_mistake(paradraft("train", "pard", recipe, f"out={out}"), "step-00000002/optimizer.bin is damaged", "delete")


def test_stop_while_a_checkpoint_is_written(
    paradraft: Paradraft, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a half-written checkpoint: the one before stays, and the run goes on from it."""
    out = tmp_path / "drafter"
    save, saved = torch.save, list[int]()

    def save_half(state: dict[str, object], file: Path, **settings: object) -> None:
        saved.append(1)
        if len(saved) == PARTS + 1:
            Path(file).write_bytes(b"half")
            raise KeyboardInterrupt
        save(state, file, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", save_half)
        assert paradraft("train", "pard", recipe, f"out={out}").code == INTERRUPTED
    second = paradraft("train", "pard", recipe, f"out={out}")
    assert second.code == 0
    assert [text in second.out for text in ("step 2/", "step 3/")] == [False, True]


def test_checkpoint_of_another_recipe(
    paradraft: Paradraft, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against mixing two runs: the old checkpoint is neither used nor overwritten."""
    out = tmp_path / "drafter"

    def stop(progress: Progress) -> str:
        if progress.step == 3:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(train, "line_of", stop)
    assert paradraft("train", "pard", recipe, f"out={out}").code == INTERRUPTED
    before = contents(out)
    assert_mistake(paradraft("train", "pard", recipe, f"out={out}", "k=4"), "another recipe")
    assert contents(out) == before


def test_a_setting_that_is_ignored_is_named(paradraft: Paradraft, recipe: Path, tmp_path: Path) -> None:
    """Guards against a rate that someone tunes for days and nothing reads: the run goes on, and says so in one line."""
    outcome = paradraft("train", "pard", recipe, f"out={tmp_path / 'drafter'}", "muon_lr=1e-2", "steps=2")
    assert outcome.code == 0
    assert outcome.err == "paradraft: warning: muon_lr=0.01 is ignored without optimizer=muon\n"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("stpes=5", "stpes"),
        ("steps=0", "steps"),
        ("steps=many", "many"),
        ("lr=-1", "lr"),
        ("loss=none", "loss"),
        ("teacher=/no/such/model", "/no/such/model"),
        ("target=pocket", "nothing is held out"),
        ("held_out=99", "held_out=99"),
        ("k", "'k'"),
        ("data=[x", "[x"),
        ("data=[no-such-file]", "no-such-file"),
        ("model=/no/such/model", "/no/such/model"),
        ("mask_token_id=72", "72"),
        ("mask_token_id=0", "mask token 0 (<|eos|>) ends a text"),
        ("mask_token_id=1", "mask_token_id=1 is "),
        ("device=abacus", "abacus"),
    ],
)
def test_bad_recipe_value(paradraft: Paradraft, recipe: Path, tmp_path: Path, override: str, named: str) -> None:
    """Guards against a misspelt key that is silently ignored, and against an `out` folder left by a failed start."""
    assert_mistake(paradraft("train", "pard", recipe, override), named)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"model: [", "not YAML"),
        (b"just text", "key: value"),
        (b"", "key: value"),
        (b"model: x\n", "'data' is missing"),
        (b"1: 2\n", "1"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_bad_recipe_file(paradraft: Paradraft, tmp_path: Path, content: bytes, named: str) -> None:
    """Guards against the tracebacks of the YAML reader."""
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    assert_mistake(paradraft("train", "pard", file), named)


def test_a_recipe_to_begin_with(paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards whoever has the package and not its sources: the recipe is written, says how to use it, and can be read;
    a file of the user's stays as it is."""
    monkeypatch.chdir(tmp_path)
    outcome = paradraft("train", "pard", "--template", "qwen3")
    assert outcome.code == 0 and outcome.out.startswith("pard-qwen3.yaml is written: ")
    text = Path("pard-qwen3.yaml").read_text()
    assert "# paradraft train pard pard-qwen3.yaml data=FILE.jsonl" in text and "a card of 24 GB" in text
    assert_mistake(paradraft("train", "pard", "--template", "qwen3"), "pard-qwen3.yaml exists")
    assert paradraft("train", "eagle", "mine.yaml", "--template", "qwen3").code == 0
    assert "# paradraft train eagle mine.yaml " in Path("mine.yaml").read_text()
    assert_mistake(paradraft("train", "pard", "--template", "gpt2"), "--template gpt2", "use deepseek-r1-")
    assert_mistake(paradraft("train", "pard", "x.yaml", "k=2", "--template", "qwen3"), "'k=2' is for the training")
    assert not Path("x.yaml").exists()


@pytest.mark.parametrize("template", ["generic", "ordinary"])
def test_a_recipe_for_any_target(
    paradraft: Paradraft, family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """Guards whoever has a target that no recipe is named after: with the two names filled in it runs."""
    monkeypatch.chdir(tmp_path)
    assert paradraft("train", "pard", "mine.yaml", "--template", template).code == 0
    assert_mistake(paradraft("train", "pard", "mine.yaml"), "MODEL")
    text = Path("mine.yaml").read_text().replace("model: MODEL", f"model: {family / 'draft'}")
    Path("mine.yaml").write_text(text.replace("teacher: TARGET", f"teacher: {family / 'target'}"))
    Path("mine.jsonl").write_text('{"text": "abcabcabc"}\n{"text": "helloworld"}\n', encoding="utf-8")
    few = ["data=mine.jsonl", "epochs=null", "steps=1", "warmup_steps=0", "samples_per_step=1", "held_out=1", "out=out"]
    trained = paradraft("train", "pard", "mine.yaml", *few)
    assert (trained.code, trained.err) == (0, "")
    assert trained.out.splitlines()[-1].startswith("vllm serve ")


def test_the_shipped_text_needs_no_path(paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first training of somebody who has only installed the package."""
    monkeypatch.chdir(tmp_path)
    assert paradraft("train", "pard", "--template", "pocket").code == 0
    few = ["steps=1", "samples_per_step=1", "held_out=0", "max_length=256", "warmup_steps=1", "device=cpu"]
    outcome = paradraft("train", "pard", "pard-pocket.yaml", "out=out", *few)
    assert outcome.code == 0, outcome.err
    record = json.loads(Path("out/train_command.json").read_text())
    assert [Path(name).name for name in record["data_sha256"]] == ["text.jsonl"]


def test_recipe_does_not_exist(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards against an error that does not say which file."""
    assert_mistake(paradraft("train", "pard", tmp_path / "none.yaml"), tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"text": "abc"}\n{"text": \n', "line 2"),
        (b'{"text": "abc"}\n{"words": "abc"}\n', "line 2"),
        (b"", "nothing to learn"),
        (b'{"text": "\xff"}\n', "UTF-8"),
        (b'{"text": "abc"}\n' + b"[" * 100_000 + b"\n", "line 2"),
    ],
)
def test_bad_training_data(paradraft: Paradraft, recipe: Path, tmp_path: Path, content: bytes, named: str) -> None:
    """Guards against training on the lines that happened to be whole."""
    (tmp_path / "data.jsonl").write_bytes(content)
    assert_mistake(paradraft("train", "pard", recipe), named)
    assert not (tmp_path / "never").exists()


def test_out_is_a_file(paradraft: Paradraft, recipe: Path, tmp_path: Path) -> None:
    """Guards against training to the end and failing to write: the folder is made before the first step."""
    (tmp_path / "taken").write_text("mine", encoding="utf-8")
    assert_mistake(paradraft("train", "pard", recipe, f"out={tmp_path / 'taken'}"), tmp_path / "taken")
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "mine"
