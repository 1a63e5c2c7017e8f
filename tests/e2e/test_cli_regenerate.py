"""`paradraft regenerate` as a user meets it: a file of training data, a stop, a mistake."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from paradraft.client import openai_client
from paradraft.data.dataset import load_samples
from paradraft.data.questions import ID
from paradraft.sources import records
from tests.conftest import tiny_tokenizer
from tests.e2e.conftest import EXACT, INTERRUPTED, Paradraft, assert_mistake
from tests.support.endpoint_server import MODEL, Reply, Server
from tests.support.interruption import interrupted
from tests.support.jsonl import read_lines, write_lines

LINES = [{"prompt": "hello", "task": {"id": "7"}}, {"prompt": "abcabc"}, {"prompt": "x"}]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    write_lines(file, LINES)
    return file


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def here(family: Path, prompts: Path, out: Path) -> list[object]:
    asked = ["--prompts", prompts, "--out", out, "--max-new-tokens", 8, "--temperature", 0.9]
    return ["regenerate", "--target", family / "target", *EXACT, *asked]


def there(server: Server, prompts: Path, out: Path) -> list[object]:
    return ["regenerate", "--endpoint", server.url, "--model", MODEL, "--prompts", prompts, "--out", out]


def test_answers_here_are_training_data(family: Path, paradraft: Paradraft, prompts: Path, out: Path) -> None:
    """Guards the way through the options to a file that training reads: same answers with every drafter and batch,
    more samples are added to those that are there, and a run with nothing to do does nothing."""
    first = paradraft(*here(family, prompts, out))
    assert first.code == 0
    assert first.out == f"3 of 3 answers are in {out}, 3 of them new\n"
    assert first.err == "0/3 answers\n"
    assert sorted(answer["prompt"] for answer in read_lines(out)) == sorted(line["prompt"] for line in LINES)
    assert {"id": "7"} in [answer.get("task") for answer in read_lines(out)]
    assert len(load_samples([out], tiny_tokenizer(), max_length=99)) == 3
    drafter = ["--drafter", "pard", "--draft", family / "pard", "-k", 4, "--tree-budget", 6, "--lengths", "expected"]
    more = paradraft(*here(family, prompts, out), *drafter, "--samples", 2, "--batch-size", 2)
    assert more.out == f"6 of 6 answers are in {out}, 3 of them new\n"
    again = paradraft(*here(family, prompts, out), "--samples", 2)
    assert (again.code, again.out, again.err) == (0, f"6 of 6 answers are in {out}, 0 of them new\n", "")
    other = out.with_name("other.jsonl")
    paradraft(*here(family, prompts, other), "--samples", 2, "--batch-size", 1)
    assert sorted(map(str, read_lines(out))) == sorted(map(str, read_lines(other)))


def test_a_target_asks_itself(family: Path, paradraft: Paradraft, prompts: Path, tmp_path: Path) -> None:
    """Guards training data from one model and nothing else: its questions are kept, and more can be asked for."""
    target, out, questions = tmp_path / "target", tmp_path / "mine.jsonl", tmp_path / "mine.questions.jsonl"
    shutil.copytree(family / "target", target)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}A{{ m.content }}B{% endfor %}"
    tokenizer.save_pretrained(target)
    asked = ["regenerate", "--target", target, "--out", out, "--max-new-tokens", 6, *EXACT]
    first = paradraft(*asked, "--own-questions", 2)
    assert first.code == 0 and first.out == f"2 of 2 answers are in {out}, 2 of them new\n", first.err
    assert "2/2 questions" in first.err and len(read_lines(questions)) == 2
    more = paradraft(*asked, "--own-questions", 3)
    assert more.out == f"3 of 3 answers are in {out}, 1 of them new\n", more.err
    learnt = sorted(answer["messages"][0]["content"] for answer in read_lines(out))
    assert learnt == sorted(question["messages"][0]["content"] for question in read_lines(questions))
    assert len(load_samples([out], tokenizer, max_length=99)) == 3
    assert_mistake(paradraft(*asked, "--own-questions", 3, "--prompts", prompts), "give either --prompts (a file")
    assert_mistake(paradraft(*asked), "give either --prompts (a file of questions) or --own-questions")
    refused = paradraft(*asked, "--own-questions", 9, "--seed", 7, "--temperature", 1)
    assert_mistake(refused, "was written with")
    assert_mistake(paradraft(*asked, "--own-questions", 9, "--columns", '{"user": "q"}'), "own questions have no other")
    assert len(read_lines(questions)) == 3, "nothing was asked before it was refused"
    there = ["regenerate", "--endpoint", "http://localhost:1/v1", "--out", out, "--own-questions", 3]
    assert_mistake(paradraft(*there), "--own-questions 3 needs --target")


def test_answers_of_an_endpoint(
    paradraft: Paradraft, prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the options on their way to the requests: sampling, key, fields."""
    monkeypatch.setenv("KEY", " secret\n")
    sampling = ["--temperature", 0.5, "--top-k", 7, "--min-p", 0.1, "--max-new-tokens", 9]
    extra = ["--api-key-env", "KEY", "--request-fields", '{"repetition_penalty": 1.5}', "--concurrency", 2]
    with Server() as server:
        outcome = paradraft(*there(server, prompts, out), *sampling, *extra)
    assert outcome.code == 0
    assert outcome.out == f"3 of 3 answers are in {out}, 3 of them new\n"
    assert {answer["prompt"]: answer["response"] for answer in read_lines(out)} == {
        body["prompt"]: f"{body['prompt']}:{body['seed']}" for body in server.bodies
    }
    wanted = {"temperature": 0.5, "top_k": 7, "min_p": 0.1, "max_tokens": 9, "repetition_penalty": 1.5}
    assert all(body.items() >= wanted.items() for body in server.bodies)
    assert set(server.keys) == {"Bearer secret"}


def test_the_template_is_told(family: Path, paradraft: Paradraft, prompts: Path, out: Path) -> None:
    """Guards the option on its way to a server and to a model here, and against a switch that has no effect and does
    not say so."""
    told = ["--chat-template-kwargs", '{"enable_thinking": false}']
    with Server() as server:
        assert "no effect without conversations" in paradraft(*there(server, prompts, out), *told).err
        write_lines(prompts, [{"user": "hello"}])
        asked = there(server, prompts, out.with_name("told.jsonl"))
        assert "no effect" not in paradraft(*asked, *told).err
    assert server.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert_mistake(paradraft(*here(family, prompts, out), *told), "no variable 'enable_thinking'")


def test_questions_of_a_table(family: Path, paradraft: Paradraft, tmp_path: Path, out: Path) -> None:
    """Guards the way from `--columns` to the answers, and that a second run finds them."""
    file = tmp_path / "prompts.parquet"
    lines = [{"question": line["prompt"], "n": datetime(2026, 11, 21)} for line in LINES]
    parquet.write_table(pyarrow.Table.from_pylist(lines), file)
    asked = [*here(family, file, out), "--columns", '{"prompt": "question"}']
    assert paradraft(*asked).out == f"3 of 3 answers are in {out}, 3 of them new\n"
    assert paradraft(*asked).out == f"3 of 3 answers are in {out}, 0 of them new\n"
    assert sorted(answer["prompt"] for answer in read_lines(out)) == sorted(line["prompt"] for line in LINES)
    assert_mistake(paradraft(*here(family, file, out)), "row 1: expected either")


def test_an_unknown_dataset(paradraft: Paradraft, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the retries of the hub's client, and against a message about models."""

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(records.HfApi, "dataset_info", unreachable)
    asked = ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--out", out, "--prompts", "no-such/data:test"]
    assert_mistake(paradraft("regenerate", *asked), "prompt file 'no-such/data'", "no network")


def test_a_prompt_without_an_answer_is_reported_and_asked_again(
    paradraft: Paradraft, prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards scripts that trust the exit code, and users who must know which prompt it was."""
    monkeypatch.setattr(openai_client, "BACKOFF_S", 0.001)
    with Server(lambda asked, _: Reply(status=500, body={"message": "oh"}) if asked == "abcabc" else None) as server:
        outcome = paradraft(*there(server, prompts, out), "--retries", 2)
        assert outcome.code == 1
        assert outcome.out == f"2 of 3 answers are in {out}, 2 of them new\n"
        assert f"no answer to {prompts}, line 2: status 500: oh\n" in outcome.err
        assert "1 answer missing; the same command asks again" in outcome.err
        assert server.seen["abcabc"] == 3
        server.script = lambda asked, number: None
        assert paradraft(*there(server, prompts, out)).out == f"3 of 3 answers are in {out}, 1 of them new\n"


def test_an_interrupted_run_says_how_to_go_on(family: Path, paradraft: Paradraft, prompts: Path, out: Path) -> None:
    """Guards Ctrl-C: what was written stays, and the user is told so."""
    with interrupted(2):
        outcome = paradraft(*here(family, prompts, out), "--batch-size", 1)
    assert outcome.code == INTERRUPTED
    assert f"stopped; {out} keeps what was written, and the same command goes on" in outcome.err
    assert len(read_lines(out)) == 1
    outcome = paradraft(*here(family, prompts, out))
    assert outcome.out == f"3 of 3 answers are in {out}, 2 of them new\n"


def test_other_settings_and_prompts_are_refused(family: Path, paradraft: Paradraft, prompts: Path, out: Path) -> None:
    """Guards against one file of two kinds of answers."""
    assert paradraft(*here(family, prompts, out)).code == 0
    before = out.read_bytes()
    assert_mistake(paradraft(*here(family, prompts, out), "--temperature", 0.8), "temperature=0.9, and now it is 0.8")
    assert_mistake(paradraft(*here(family, prompts, out), "--seed", 1), "seed=0, and now it is 1")
    assert_mistake(paradraft(*here(family, prompts, out), "--dtype", "float32"), "dtype='float64'")
    with Server() as server:
        assert_mistake(paradraft(*there(server, prompts, out)), "model=None, and now it is 'tiny'")
    prompts.write_text('{"prompt": "other"}\n')
    assert_mistake(paradraft(*here(family, prompts, out)), "line 1 answers what is not asked now")
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--endpoint", "http://127.0.0.1:9/v1"], "either --target"),
        (["--model", "x"], "--model has no use with --target"),
        (["--concurrency", 2], "--concurrency has no use with --target"),
        (["--samples", 0], "samples=0"),
        (["--temperature", 0, "--samples", 2], "--samples 2"),
        (["--temperature", -1], "temperature=-1"),
        (["--max-new-tokens", 0], "--max-new-tokens"),
        (["--max-new-tokens", 123], "line 2: the prompt has 6 tokens"),
        (["--out", "no-such-folder/out.jsonl"], "no-such-folder"),
        (["--out", "."], "'.'"),
        (["--prompts", "no-such-file.jsonl"], "no-such-file.jsonl' does not exist"),
        (["--prompts", os.devnull], "does not exist"),
        (["--drafter", "oracle"], "oracle"),
        (["--batch-size", 0], "--batch-size"),
    ],
)
def test_a_mistake_here(
    family: Path, paradraft: Paradraft, prompts: Path, out: Path, arguments: list[object], named: str
) -> None:
    """Guards against tracebacks, and against a file that a mistake leaves behind."""
    assert_mistake(paradraft(*here(family, prompts, out), *arguments), named)
    assert [file.name for file in out.parent.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "127.0.0.1:9/v1 cannot be reached"),
        (["--endpoint", "somewhere"], "'somewhere'"),
        (["--drafter", "pard"], "--drafter has no use with --endpoint"),
        (["-k", 3], "-k has no use with --endpoint"),
        (["--compile"], "--compile has no use with --endpoint"),
        (["--concurrency", 0], "--concurrency"),
        (["--timeout", 0], "timeout_s=0"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (["--request-fields", "{"], "not JSON"),
        pytest.param(["--request-fields", "[" * 100_000], "--request-fields: not JSON", id="nested"),
        (["--request-fields", "3"], "JSON object"),
        (["--request-fields", '{"stop": "x"}'], "'stop'"),
        (["--chat-template-kwargs", "enable_thinking"], "--chat-template-kwargs: not JSON"),
        (["--chat-template-kwargs", "false"], 'expected a JSON object such as {"enable_thinking": false}'),
        (["--columns", "{"], "--columns: not JSON"),
        (["--columns", "user"], "--columns: not JSON"),
        (["--columns", '["user"]'], '--columns: expected a JSON object such as {"user": "instruction"}'),
        (["--columns", '{"question": "q"}'], "columns: 'question' is none of text, prompt, response, messages, user"),
        (["--columns", '{"user": 3}'], "columns: 'user' is 3: give the name"),
        (["--columns", '{"user": "q"}'], "line 1: there is no 'q', which `columns` names; there are prompt, task"),
    ],
)
def test_a_mistake_there(paradraft: Paradraft, prompts: Path, out: Path, arguments: list[object], named: str) -> None:
    """Guards against tracebacks, options that are silently ignored, and a file that a mistake leaves behind."""
    asked = ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--prompts", prompts, "--out", out]
    assert_mistake(paradraft("regenerate", *asked, *arguments), named)
    assert [file.name for file in out.parent.iterdir()] == ["prompts.jsonl"]


def test_neither_target_nor_endpoint_nor_model(paradraft: Paradraft, prompts: Path, out: Path) -> None:
    """Guards against guessing who shall answer."""
    asked = ["--prompts", prompts, "--out", out]
    assert_mistake(paradraft("regenerate", *asked), "either --target")
    assert_mistake(paradraft("regenerate", *asked, "--endpoint", "http://127.0.0.1:9/v1"), "--model")


def test_a_file_that_is_no_file_of_answers(family: Path, paradraft: Paradraft, prompts: Path) -> None:
    """Guards the prompts themselves, named as --out."""
    before = prompts.read_bytes()
    assert_mistake(paradraft(*here(family, prompts, prompts)), "name another --out")
    assert prompts.read_bytes() == before


@pytest.mark.slow
def test_a_killed_process_goes_on(family: Path, tmp_path: Path, out: Path) -> None:
    """Guards the promise with a real process and real kills, one of them early: nothing twice, nothing missing, and the
    answers of a run that was left alone."""
    prompts, number = tmp_path / "prompts.jsonl", 60
    write_lines(prompts, [{"prompt": f"hello{place}"} for place in range(number)])

    def start(file: Path) -> subprocess.Popen[bytes]:
        options = [*here(family, prompts, file), "--batch-size", 2, "--max-new-tokens", 20]
        return subprocess.Popen([sys.executable, "-c", "from paradraft.cli import main; main()", *map(str, options)])

    whole = tmp_path / "whole.jsonl"
    assert start(whole).wait() == 0
    for fewest in (1, 20):
        process = start(out)
        while not out.exists() or out.read_bytes().count(b"\n") < fewest:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 20 <= out.read_bytes().count(b"\n") < number
    assert start(out).wait() == 0
    assert sorted(map(str, read_lines(out))) == sorted(map(str, read_lines(whole)))
    assert len({answer[ID] for answer in read_lines(out)}) == number
