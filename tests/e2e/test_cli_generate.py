"""`paradraft generate` as a user meets it: what it prints, and what it says about mistakes."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from paradraft.drafters import drafter_names
from paradraft.engine.speculation import MOST_DRAFTED
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake, drafting
from tests.support.jsonl import write_lines


@pytest.mark.parametrize(("verify", "is_lossless"), [("match", True), ("rejection", True), ("typical", False)])
def test_json_says_whether_an_answer_is_lossless(
    family: Path, paradraft: Paradraft, verify: str, is_lossless: bool
) -> None:
    """Guards against answers of a lossy rule that are taken for the target's own by whoever reads the file."""
    asked = ["--prompt", "abc", "--max-new-tokens", 4, "--temperature", 0.7, "--verify", verify, "--json"]
    outcome = paradraft("generate", *drafting(family, "pard"), *asked)
    assert json.loads(outcome.out)["lossless"] is is_lossless
    assert ("not lossless" in outcome.err) is not is_lossless


def test_a_drafter_learns_from_the_rounds_that_it_drafted(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the way from decoding to training: the log of one command is the data of the other."""
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("abc", "hello", "cab")))
    asked = ["--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 24, "--rounds", tmp_path / "rounds.jsonl"]
    assert paradraft("generate", *drafting(family, "pard"), "--lengths", "fixed", *asked).code == 0
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 3
    recipe = {
        "model": str(family / "pard"), "data": [{"path": str(tmp_path / "rounds.jsonl"), "anchors": "refused"}],
        "out": str(tmp_path / "out"), "steps": 2, "k": 3, "max_length": 30, "held_out": 0, "device": "cpu",
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert paradraft("train", "pard", tmp_path / "recipe.yaml").code == 0
    assert_mistake(
        paradraft(
            "generate", *drafting(family, "pard"), "--prompt", "abc", "--rounds", tmp_path / "no" / "rounds.jsonl"
        ),
        "cannot be written",
    )


@pytest.mark.parametrize("name", drafter_names())
def test_prompt_is_answered(family: Path, paradraft: Paradraft, name: str) -> None:
    """Guards against a drafter that changes the text, and against noise of the libraries: the standard output is
    prompt and answer, the standard error one line of statistics; before it `lookahead` says where it belongs, once."""
    plain = paradraft("generate", *drafting(family, "none"), "--prompt", "helloworld", "--max-new-tokens", 20)
    answer = paradraft("generate", *drafting(family, name), "--prompt", "helloworld", "--max-new-tokens", 20)
    assert answer.code == 0
    assert answer.out == plain.out
    assert answer.out.startswith("helloworld")
    assert len(answer.out) > len("helloworld\n")
    *before, last = answer.err.splitlines()
    assert "acceptance length" in last
    if name == "lookahead":
        assert before.pop(0).startswith(
            "paradraft: warning: lookahead makes passes of up to 57 tokens, for hardware on"
        )
    if name == "forced":
        assert before.pop(0).startswith("warning: --drafter has no effect without a JSON schema")
    assert before == []


@pytest.mark.parametrize("shown", [[], ["--json"]])
def test_a_drafter_that_does_not_pay_is_said_last(
    family: Path, poor_draft: Path, paradraft: Paradraft, shown: list[str]
) -> None:
    """Guards users who are slower with a drafter than without against never knowing it: here four passes of a draft of
    the target's size guess hardly a token. Nothing is said where nothing is drafted, or of a few rounds."""
    options = ["--target", family / "target", *EXACT, "--prompt", "helloworld", "--temperature", 1, *shown]
    slow = [*options, "--drafter", "autoregressive", "--draft", poor_draft, "-k", 4]
    *_, last = paradraft("generate", *slow, "--max-new-tokens", 40).err.splitlines()
    assert re.fullmatch(
        r"note: drafting made this (at least )?\d+\.\d x slower here: try --lengths expected, or --drafter none", last
    )
    assert "slower" not in paradraft("generate", *slow, "--max-new-tokens", 10).err
    assert "slower" not in paradraft("generate", *options, "--max-new-tokens", 40).err


def test_prompt_file_gives_an_object_per_line(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the promise that further keys of a prompt record come back, in order, untouched."""
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt": "hello", "task": {"id": 7}}, {"prompt": "abcabc", "note": "Grüße\u2028"}]
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n\n" for record in records), encoding="utf-8")
    options = ["--prompts", file, "--max-new-tokens", 12, "--json"]
    outcome = paradraft("generate", *drafting(family, "pard"), *options)
    assert outcome.code == 0
    assert outcome.err == ""
    answers = [json.loads(line) for line in outcome.out.split("\n")[:-1]]
    assert [{key: answer[key] for key in record} for answer, record in zip(answers, records, strict=True)] == records
    for answer in answers:
        assert set(answer) >= {"text", "tokens", "stats"}
        assert len(answer["tokens"]) == answer["stats"]["tokens"] <= 12
        assert answer["stats"]["acceptance_length"] >= 1


def test_a_terminal_without_the_characters(family: Path, paradraft: Paradraft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an answer that ends in the middle, and against JSON with escapes that JSON does not know."""
    for options in ([], ["--json"]):
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
        asked = ["--prompt", "Grüße 😀", "--max-new-tokens", 4]
        assert paradraft("generate", *drafting(family, "none"), *asked, *options).code == 0
        text = printed.getvalue().decode("ascii")
        assert json.loads(text)["prompt"] == "Grüße 😀" if options else text.startswith(r"Gr\xfc\xdfe \U0001f600")


def test_same_seed_same_text_with_every_drafter(family: Path, paradraft: Paradraft) -> None:
    """Guards the match rule on its way through the options: seed, temperature, top-k and top-p must all arrive."""

    def tokens(name: str, seed: int) -> list[int]:
        sampling = ["--temperature", 0.9, "--top-k", 30, "--top-p", 0.95, "--seed", seed]
        asked = ["--prompt", "hello", "--max-new-tokens", 24, "--json"]
        return json.loads(paradraft("generate", *drafting(family, name), "-k", 5, *asked, *sampling).out)["tokens"]

    expected = tokens("none", 3)
    assert all(tokens(name, 3) == expected for name in drafter_names())
    assert tokens("none", 4) != expected


def test_k_larger_than_the_room_left(family: Path, paradraft: Paradraft) -> None:
    """Guards against drafts that run over the end of the cache."""
    asked = ["--prompt", "hello", "--max-new-tokens", 9, "--json"]
    plain = paradraft("generate", *drafting(family, "none"), *asked)
    longest = paradraft("generate", *drafting(family, "pard"), "-k", MOST_DRAFTED, *asked, "--capacity", 14)
    assert json.loads(longest.out)["tokens"] == json.loads(plain.out)["tokens"]


def test_batches_give_the_texts_of_single_prompts(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards batches, trees, length policies, penalties and stops on their way through the options."""
    file = tmp_path / "prompts.jsonl"
    write_lines(file, [{"prompt": text} for text in ["hello", "a", "abcabcabc"]])
    asked = ["--prompts", file, "--max-new-tokens", 20, "--json", "--temperature", 0.8, "--seed", 3, "--min-p", 0.02]
    asked += ["--repetition-penalty", 1.1, "--frequency-penalty", 0.1, "--logit-bias", "5=-inf", "--stop", "q"]

    def answers(name: str, *options: object) -> list[dict[str, object]]:
        lines = paradraft("generate", *drafting(family, name), *asked, *options).out.splitlines()
        return [{key: json.loads(line)[key] for key in ("text", "tokens", "finish_reason")} for line in lines]

    plain = answers("none", "--batch-size", 1)
    assert len(plain) == 3
    for options in (["--batch-size", 2], ["--tree-budget", 9], ["--tree-paths", "0 1 0.0"], ["--lengths", "expected"]):
        assert answers("pard", *options) == plain
    assert all("q" not in answer["text"] for answer in plain)
    greedy = ["--temperature", 0, "--tree-budget", 9]
    assert answers("pard", "--verify", "rejection", *greedy) == answers("none", "--temperature", 0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", -1], "temperature=-1"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-p", 0], "top_p=0"),
        (["--top-k", -1], "top_k=-1"),
        (["--dtype", "float7"], "float7"),
        (["--device", "abacus"], "abacus"),
        (["--device", "meta"], "device='meta' cannot be used here"),
        (["--device", "privateuseone"], "privateuseone"),
        (["--prompt", "a\udcffb"], "not UTF-8 text: look at its character 2"),
        (["-k", 0], "k=0"),
        (["-k", 257], "k=257"),
        (["-k", "many"], "-k"),
        (["--capacity", 0], "capacity=0"),
        (["--capacity", 129], "capacity=129"),
        (["--max-new-tokens", 0], "--max-new-tokens"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "x" * 100, "--max-new-tokens", 29], "the prompt has 100 tokens"),
        (["--drafter", "oracle"], "oracle"),
        (["--draft", "some/model"], "some/model"),
        (["--prompts", "prompts.jsonl"], "--prompts"),
        (["--prompts", "prompts.jsonl", "--prompt", "x"], "--prompt"),
        (["--min-p", 2], "min_p=2"),
        (["--repetition-penalty", 0], "repetition_penalty=0"),
        (["--presence-penalty", "nan"], "presence_penalty=nan"),
        (["--logit-bias", "a=b"], "a=b"),
        (["--logit-bias", "7=inf"], "7: inf"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "token 5 has a bias already"),
        (["--logit-bias", "64=1", "--max-new-tokens", 4], "64 is not among the 64"),
        (["--logit-bias", "5.5=1"], "5.5=1"),
        (["--logit-bias", "5=nan"], "5: nan"),
        (["--temperature", "0,7"], "--temperature"),
        (["--seed", "1.5"], "--seed"),
        (["--stop", "", "--max-new-tokens", 4], "stop string is empty"),
        (["--stop", "a\udcff", "--max-new-tokens", 4], "half a character"),
        (["--verify", "magic"], "verify='magic'"),
        (["--lengths", "long"], "lengths='long'"),
        (["--batch-size", 0], "--batch-size"),
        (["--drafter", "none", "--tree-budget", 3], "chains only"),
        (["--tree-budget", 0], "--tree-budget"),
        (["--tree-budget", 5000], "5000 nodes"),
        (["--tree-budget", 3, "--tree-paths", "0"], "--tree-paths"),
        (["--tree-paths", "0 a"], "'0 a'"),
        (["--tree-paths", "0 1.0"], "(1, 0) is there without its parent"),
        (["--tree-paths", "0 99"], "(99,): use ranks from 0 to 15"),
        (["--frobnicate"], "--frobnicate"),
        (["surplus"], "surplus"),
        (["--drafter"], "--drafter"),
    ],
)
def test_bad_option(family: Path, paradraft: Paradraft, arguments: list[object], named: str) -> None:
    """Guards against tracebacks and boxes: every mistake is one line that names the value."""
    asked = [] if arguments[0] == "--prompt" else ["--prompt", "x"]
    assert_mistake(paradraft("generate", "--target", family / "target", *EXACT, *asked, *arguments), named)


def test_neither_prompt_nor_prompts(family: Path, paradraft: Paradraft) -> None:
    """Guards against waiting for input, or answering nothing and calling it success."""
    assert_mistake(paradraft("generate", "--target", family / "target", *EXACT), "--prompt")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b'{"prompt": "x"}\n\n{"prompt": \n', "line 3"),
        (b'{"prompt": "x"}\n["x"]\n', "line 2"),
        (b'{"prompt": ""}\n', "line 1"),
        (b'{"question": "x"}\n', "line 1"),
        (b'{"prompt": "x"}\n{"prompt": 5}\n', 'line 2: expected {"prompt": "some text"}'),
        (b'{"prompt": [1, 2]}\n', 'line 1: expected {"prompt": "some text"}'),
        (b'{"prompt": null}\n', 'line 1: expected {"prompt": "some text"}'),
        (b'{"prompt": "x"}\n{"prompt": "' + b"x" * 128 + b'"}\n', "prompt 2 has 128 tokens"),
        (b'{"prompt": "\xff"}\n', "UTF-8"),
        (b'{"prompt": "x", "score": NaN}\n', "line 1: not JSON, which has no NaN"),
        (b'{"prompt": "x", "score": [1e999]}\n', "line 1: not JSON, which has no NaN"),
    ],
)
def test_bad_prompt_file(family: Path, paradraft: Paradraft, tmp_path: Path, content: bytes, named: str) -> None:
    """Guards against answering the first prompts and failing at the third: all are checked before the first answer."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    assert_mistake(
        paradraft("generate", "--target", family / "target", *EXACT, "--prompts", file, "--max-new-tokens", 4), named
    )


def test_prompt_file_does_not_exist(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards against an error that does not say which file."""
    file = tmp_path / "prompts.jsonl"
    assert_mistake(paradraft("generate", "--target", family / "target", *EXACT, "--prompts", file), file)


def test_a_drafter_in_a_process_of_its_own(family: Path, paradraft: Paradraft) -> None:
    """Guards the options that place both sides, and mistakes in them."""
    cpus = os.sched_getaffinity(0)
    cpu = min(cpus)
    asked = ["--prompt", "helloworld", "--max-new-tokens", 20]
    plain = paradraft("generate", *drafting(family, "none"), *asked)
    ahead = [*drafting(family, "pard"), *asked, "--gamma", 4]
    answer = paradraft("generate", *ahead, "--draft-cpus", cpu, "--target-cpus", cpu)
    assert (answer.code, answer.out) == (0, plain.out)
    assert os.sched_getaffinity(0) == cpus
    for options, told in [
        (["--draft-cpus", 4000], "draft_cpus: there is no CPU 4000 for this process"),
        (["--target-cpus", "one"], "CPUs 'one'"),
        (["--draft-device", "abacus"], "abacus"),
        (["--draft-cpus", cpu, "--draft-timeout-s", 0], "draft_timeout_s=0"),
    ]:
        assert_mistake(paradraft("generate", *ahead, *options), told)
    assert_mistake(paradraft("generate", *ahead[:-2], "--draft-cpus", cpu), "set gamma too")
    warned = paradraft("generate", *ahead, "--draft-timeout-s", 3)
    assert "warning: --draft-timeout-s has no effect without --draft-cpus" in warned.err
    assert "warning: -k has no effect with --gamma" in paradraft("generate", *ahead, "-k", 3).err
