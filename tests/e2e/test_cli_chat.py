"""Conversations on the command line: `paradraft chat`, `generate --chat`, and prompt files with messages."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from paradraft.cli.commands.chat import Conversation
from paradraft.cli.terminal import has_styles
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from tests.conftest import tiny_tokenizer
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake
from tests.support.quick import mostly_slow
from tests.support.screen import Screen

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if m.role == 'wrong' %}{{ m.content + 3 }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{{ '0' if short is defined and short else '' }}{% endif %}"
)
SAMPLING = Sampling(temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def chatting(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a chat template."""
    folder = tmp_path_factory.mktemp("chatting") / "target"
    shutil.copytree(family / "target", folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def instructed(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as an instruct model: its texts end with the token that ends the assistant's turns."""
    folder = tmp_path_factory.mktemp("instructed") / "target"
    shutil.copytree(family / "target", folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}{% endfor", "{{ m.content }}<|eos|>{% endfor")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(chatting: Path) -> Engine:
    return load(str(chatting), runtime=Runtime(dtype="float64"), kept_rows=1)


def told_by(engine: Engine, text: str, tokens: int = 12, sampling: Sampling = SAMPLING) -> str:
    """The answer to what the template writes, which has no BOS here."""
    return engine.generate(text, max_new_tokens=tokens, sampling=sampling).text


def test_a_conversation_is_asked_through_the_template(engine: Engine) -> None:
    """Guards `Engine.chat`: the template's text, its variables, and parts of type text."""
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    found = engine.chat(messages, max_new_tokens=12, sampling=SAMPLING)
    assert found.text == told_by(engine, "<system>be<user>hi<assistant>")
    found = engine.chat(messages, max_new_tokens=12, sampling=SAMPLING, chat_template_kwargs={"short": True})
    assert found.text == told_by(engine, "<system>be<user>hi<assistant>0")
    streamed = engine.stream(engine.chat_tokens(messages), max_new_tokens=12, sampling=SAMPLING)
    assert "".join(chunk.text for chunk in streamed) == told_by(engine, "<system>be<user>hi<assistant>")


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages: use a list such as"),
        ("hi", "messages: use a list such as"),
        (["hi"], "message 1 is 'hi': use {\"role\""),
        ([{"content": "hi"}], "message 1 has no role"),
        ([{"role": "user", "content": 5}], "message 1 has the content 5: give a text"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "the last message is the assistant's",
        ),
        ([{"role": "tool", "content": "a"}], "template refuses this conversation: no tools here"),
        ([{"role": "wrong", "content": "a"}], "template fails at this conversation (TypeError: "),
        ([{"role": "user", "content": "ab\ud800"}], "message 1 is not UTF-8 text: look at its character 3"),
    ],
)
def test_conversations_that_cannot_be_asked(engine: Engine, messages: list[dict[str, str]], named: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # compared below
        engine.chat(messages)
    assert named in str(raised.value)


def test_a_model_without_a_template(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards all ways to ask a conversation against words in the wrong form."""
    engine, file = load(str(family / "target"), runtime=Runtime(dtype="float64")), tmp_path / "prompts.jsonl"
    with pytest.raises(ValueError, match="the model has no chat template, so it cannot be asked conversations"):
        engine.chat([{"role": "user", "content": "a"}])
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    for command in (
        ["chat"],
        ["generate", "--chat", "--prompt", "a"],
        ["generate", "--prompts", file],
        ["audit", "--drafter", "ngram", "--prompts", file, "--num-prompts", 1],
        ["bench", "--methods", "ar", "--prompts", file, "--num-prompts", 1],
    ):
        assert_mistake(paradraft(*command, "--target", family / "target"), "the model has no chat template")


def test_a_drafter_that_does_not_pay_is_said_at_the_end(
    paradraft: Paradraft, chatting: Path, poor_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a conversation with a drafter that makes answers slower: the last line says so, and what to try."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand?\n"))
    options = ["--target", chatting, *EXACT, "--drafter", "autoregressive", "--draft", poor_draft, "-k", 4]
    outcome = paradraft("chat", *options, "--max-new-tokens", 50, "--temperature", 1, "--seed", 4)
    _, *answers, last = outcome.err.splitlines()
    assert len(answers) == 2 and all("tokens per pass" in line for line in answers)
    assert last.startswith("note: drafting made this ") and last.endswith("try --lengths expected, or --drafter none")


def test_generate_asks_in_a_chat(paradraft: Paradraft, chatting: Path, engine: Engine, tmp_path: Path) -> None:
    """Guards `--chat` with and without a system prompt, files with both kinds of records, and the standard input."""
    own = [
        "generate", "--target", chatting, "--drafter", "none", *EXACT, "--temperature", 0.9, "--seed", 3,
        "--max-new-tokens", 12,
    ]  # fmt: skip
    assert paradraft(*own, "--chat", "--prompt", "hi").out == told_by(engine, "<user>hi<assistant>") + "\n"
    outcome = paradraft(*own, "--chat", "--system", "be", "--prompt", "hi")
    assert outcome.out == told_by(engine, "<system>be<user>hi<assistant>") + "\n"
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "a"}], "id": 7}\n{"prompt": "b"}\n')
    for more, prompts in (
        ([], ["<user>a<assistant>", "b"]),
        (["--chat"], ["<user>a<assistant>", "<user>b<assistant>"]),
    ):
        lines = paradraft(*own, "--prompts", file, "--json", *more).out.splitlines()
        assert [json.loads(line)["text"] for line in lines] == [told_by(engine, prompt) for prompt in prompts]
    assert json.loads(lines[0])["id"] == 7
    outcome = paradraft(
        *own, "--prompts", file, "--json", "--chat-template-kwargs", '{"short": true}'
    )  # fmt: skip
    assert json.loads(outcome.out.splitlines()[0])["text"] == told_by(engine, "<user>a<assistant>0")
    outcome = paradraft(*own, "--system", "be", "--prompt", "hi")
    assert outcome.out == told_by(engine, "<system>be<user>hi<assistant>") + "\n", "who gives --system wants a chat"
    assert_mistake(
        paradraft(*own, "--prompt", "a", "--system", "b", "--no-chat"), "--system is what a chat begins with: leave it"
    )
    assert_mistake(
        paradraft(*own, "--prompts", file, "--chat-template-kwargs", '{"long": 1}'), "has no variable 'long'"
    )
    outcome = paradraft(*own, "--no-chat", "--prompt", "a", "--chat-template-kwargs", '{"short": true}')
    assert outcome.err.startswith("warning: --chat-template-kwargs has no effect without conversations")


def test_instruct_models_are_asked_in_a_chat(
    paradraft: Paradraft, instructed: Path, chatting: Path, family: Path, engine: Engine, tmp_path: Path
) -> None:
    """Guards a newcomer's first prompt: an instruct model that continues it answers nothing. Base models continue, with
    a template or without; what is said decides, and else a line says what was chosen, where there was a choice."""
    own = ["generate", "--drafter", "none", *EXACT, "--temperature", 0.9, "--seed", 3, "--max-new-tokens", 12]
    asked, continued = told_by(engine, "<user>hi<|eos|><assistant>"), told_by(engine, "hi")
    assert asked != continued
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi"}\n{"prompt": "hi"}\n')
    for target, more, answer, line in (
        (instructed, [], asked, "paradraft: this is an instruct model, prompts are asked as in a chat; --no-chat"),
        (instructed, ["--chat"], asked, ""),
        (instructed, ["--no-chat"], continued, ""),
        (chatting, [], continued, "paradraft: prompts are continued: the model has a chat template"),
        (chatting, ["--no-chat"], continued, ""),
        (family / "target", [], continued, ""),
    ):
        outcome = paradraft(*own, "--target", target, "--prompt", "hi", *more)
        assert outcome.out == ("" if answer == asked else "hi") + answer + "\n"
        assert (line in outcome.err) and outcome.err.count("paradraft: ") == bool(line)
        outcome = paradraft(*own, "--target", target, "--prompts", file, "--json", *more)
        assert [json.loads(found)["text"] for found in outcome.out.splitlines()] == [answer, answer]
        assert outcome.err.count("paradraft: ") == bool(line)
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    outcome = paradraft(*own, "--target", chatting, "--prompts", file, "--json")
    assert outcome.err.count("paradraft: ") == 0, "conversations leave no choice"


def test_an_empty_answer_says_why(
    paradraft: Paradraft, chatting: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards whoever takes it for a fault: the model ended at once, or with a stop string."""
    own = ["generate", "--target", chatting, *EXACT, "--no-chat", "--prompt", "hi", "--max-new-tokens", 8]
    ends = ["--logit-bias", "0=100"]
    assert "\nparadraft: the answer is empty: the model ended it at once\n" in "\n" + paradraft(*own, *ends).err
    stop = ["--stop", told_by(engine, "hi", sampling=Sampling())[0]]
    assert "paradraft: the answer is empty: it began with a text that ends it\n" in paradraft(*own, *stop).err
    assert "empty" not in paradraft(*own).err
    talk = Conversation(engine, Sampling(logit_bias={0: 100.0}), system=None, variables={}, max_new_tokens=8)
    talk.ask("hi")
    assert "paradraft: the answer is empty: the model ended it at once\n" in capsys.readouterr().err


def test_prompts_from_the_standard_input(
    paradraft: Paradraft, family: Path, chatting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = ["--drafter", "autoregressive", "--draft", family / "target"]
    for command in (["audit", *drafting], ["bench", "--methods", "ar", "--runs", 1, "--no-compile"], ["generate"]):
        text = '{"messages": [{"role": "user", "content": "a"}]}\n'
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        number = [] if command == ["generate"] else ["--num-prompts", 1]
        outcome = paradraft(*command, "--target", chatting, *number, "--prompts", "-", "--max-new-tokens", 4)
        assert outcome.code == 0, outcome.err


def test_audit_and_bench_ask_conversations(
    paradraft: Paradraft, chatting: Path, engine: Engine, tmp_path: Path
) -> None:
    """Guards what is measured: the text that the template writes."""
    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text('{"messages": [{"role": "user", "content": "ab"}]}\n')
    asked = ["--target", chatting, "--prompts", prompts, "--num-prompts", 1, "--max-new-tokens", 6]
    outcome = paradraft("audit", "--drafter", "ngram", *asked, "--dtype", "float32")
    assert outcome.code == 0 and "PASS" in outcome.out
    outcome = paradraft("bench", "--methods", "ar", "--runs", 1, "--no-compile", *asked, "--json", result)
    assert outcome.code == 0, outcome.err
    assert json.loads(result.read_text())["example"]["prompt"] == "<user>ab<assistant>"


def test_a_conversation_with_a_person(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards history, all commands, and that a mistake does not end the conversation."""
    lines = iter(
        ["hi", "", "so", "/drafter off", "so", "/reset", "/seed 4", "hi", "/nothing", "/seed x", "/top-p", "/help"]
    )
    monkeypatch.setattr("builtins.input", asking := Asking(lines))
    Conversation(engine, SAMPLING, system="be", variables={}, max_new_tokens=12).run()
    out, err = capsys.readouterr()
    first = told_by(engine, "<system>be<user>hi<assistant>")
    second = told_by(engine, before := f"<system>be<user>hi<assistant>{first}<user>so<assistant>")
    third = told_by(engine, f"{before}{second}<user>so<assistant>")
    fourth = told_by(engine, "<system>be<user>hi<assistant>", sampling=Sampling(temperature=0.9, seed=4))
    assert out == "".join(f"{answer}\n" for answer in (first, second, third, fourth)) and asking.is_over
    told = [line for line in err.splitlines() if not line.startswith("[")]
    assert told[:3] == ["Drafter off.", "The conversation is forgotten.", "Seed 4."]
    assert told[3].startswith("paradraft: there is no command '/nothing'")
    assert told[4].startswith("paradraft: there is no command '/seed x'")
    assert told[5] == "paradraft: /top-p needs a number, such as /top-p 1" and told[6].startswith("/reset")


def test_settings_are_changed_between_answers(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards each setting, what is said of it, and that a wrong one changes nothing."""
    talk = Conversation(engine, SAMPLING, system=None, variables={}, max_new_tokens=12)
    for lines, sampling, said in (
        (["/temperature 0"], Sampling(), "Temperature 0 (greedy)."),
        (["/temperature 0.7", "/seed 5"], Sampling(temperature=0.7, seed=5), "Seed 5."),
        (["/top-p 0.8"], Sampling(temperature=0.7, seed=5, top_p=0.8), "Temperature 0.7, top-p 0.8, seed 5."),
        (["/top-k 5", "/min-p 0.1", "/top-p 1"], Sampling(temperature=0.7, seed=5, top_k=5, min_p=0.1),
         "Temperature 0.7, top-k 5, min-p 0.1, seed 5."),
        (["/top-k 0", "/min-p 0", "/repetition-penalty 1.5", "/presence-penalty 1", "/frequency-penalty 2"],
         Sampling(temperature=0.7, seed=5, repetition_penalty=1.5, presence_penalty=1, frequency_penalty=2),
         "Temperature 0.7, repetition-penalty 1.5, presence-penalty 1, frequency-penalty 2, seed 5."),
    ):  # fmt: skip
        assert [talk.command(line) for line in lines][-1] == said
        for wrong in ("/temperature -1", "/top-p x", "/top-k 1.5", "/min-p 2", "/temperature", "/seed x", "/top_p 1"):
            with pytest.raises(ValueError, match=r"temperature|give a number|top_k|min_p|no command"):
                talk.command(wrong)
        talk.command("/reset")
        talk.ask("hi")
        assert capsys.readouterr().out == told_by(engine, "<user>hi<assistant>", sampling=sampling) + "\n"
    drawn = [talk.command("/seed") for _ in range(2)]
    assert drawn[0] != drawn[1] and all(line.startswith("Seed ") for line in drawn)
    for name in ("/temperature", "/top-p", "/top-k", "/min-p", "/repetition-penalty", "/seed"):
        assert name in talk.command("/help")


def test_a_chat_samples_as_the_model_asks(
    paradraft: Paradraft, chatting: Path, family: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the settings of generation_config.json, options that win one by one, and seeds: one that is drawn is
    shown, and repeats the answers with a drafter and without. `generate` stays greedy."""
    folder = tmp_path / "target"
    shutil.copytree(chatting, folder)
    settings = {"eos_token_id": 0, "temperature": 0.9, "top_k": 9, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    drafting = ["--drafter", "autoregressive", "--draft", family / "draft"]

    def talk(*more: object) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        outcome = paradraft("chat", "--target", folder, *EXACT, "--max-new-tokens", 12, *more)
        assert outcome.code == 0, outcome.err
        return outcome.out.strip("\n"), outcome.err

    def told(**sampling: float) -> str:
        return told_by(engine, "<user>hi<assistant>", sampling=Sampling(**sampling))

    asked = {"temperature": 0.9, "top_k": 9, "repetition_penalty": 1.2}
    answer, err = talk()
    found = re.search(r"^paradraft: temperature 0.9, top-k 9, repetition-penalty 1.2, seed (\d+); --gen", err, re.M)
    assert found is not None and answer == told(**asked, seed=int(found[1])) and "warning" not in err
    assert talk("--seed", found[1])[0] == talk("--seed", found[1], *drafting)[0] == answer
    assert talk("--seed", 4, "--top-k", 0)[0] == told(**asked | {"top_k": 0}, seed=4)
    assert talk("--temperature", 0)[0] == told(repetition_penalty=1.2)
    answer, err = talk("--generation-config", "none")
    assert answer == told() and "paradraft: temp" not in err
    assert talk("--generation-config", "none", "--temperature", 0.9, "--seed", 4)[0] == told(temperature=0.9, seed=4)
    outcome = paradraft("generate", "--target", folder, *EXACT, "--chat", "--prompt", "hi", "--max-new-tokens", 12)
    assert outcome.out == told() + "\n" and "repetition_penalty=1.2, which only chat and serve obey" in outcome.err
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "top_p": 3}')
    outcome = paradraft("chat", "--target", folder, *EXACT)
    assert_mistake(outcome, f"{folder}: in its generation config top_p=3", "--generation-config none leaves it out")


class Asking:
    """Stands for a person who asks these lines and leaves."""

    def __init__(self, lines: object) -> None:
        self.lines, self.is_over = lines, False

    def __call__(self, prompt: str) -> str:
        for line in self.lines:
            return line
        self.is_over = True
        raise EOFError


def test_the_next_turn_reads_only_what_is_new(chatting: Path) -> None:
    """Guards the cache of the last answer: a long conversation is not read again with each turn."""
    engine = load(str(chatting), runtime=Runtime(dtype="float64"), kept_rows=1)
    talk = Conversation(engine, Sampling(), system="be", variables={}, max_new_tokens=8)
    talk.ask("hi")
    before, read = engine.target.lm.cache.starts, []
    prefill = engine.target.lm.prefill
    engine.target.lm.prefill = lambda rows, *rest: read.append(list(map(len, rows))) or prefill(rows, *rest)
    talk.ask("so")
    # What follows the last token that is kept: the answer's last token, and "<user>so<assistant>".
    assert before < engine.target.lm.cache.starts and read[0][0] <= len("<user>so<assistant>") + 2


def test_a_conversation_that_is_too_long(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(engine, Sampling(), system="x" * 150, variables={}, max_new_tokens=8)
    with pytest.raises(ValueError, match=r"the conversation has \d+ tokens, and the model has room for 128: /reset"):
        talk.ask("hi")
    assert len(talk.messages) == 1


@pytest.mark.parametrize(
    ("more", "is_green"),
    [({}, True), pytest.param({"NO_COLOR": "1"}, False, marks=pytest.mark.slow)],
    ids=["", "NO_COLOR"],
)
def test_a_terminal(family: Path, chatting: Path, engine: Engine, more: dict[str, str], is_green: bool) -> None:
    """Guards all of an answer's letters, colours, the line at the bottom, and Ctrl-C, which ends an answer, not the
    program; NO_COLOR too."""
    told = told_by(engine, "<user>hi<assistant>", 90, Sampling(temperature=0.9, seed=4))
    assert len(told) > 80, "it wraps"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    process = subprocess.Popen(
        [sys.executable, "-m", "paradraft", "chat", "--target", str(chatting), "--drafter", "autoregressive",
         "--draft", str(family / "target"), "--dtype", "float64", "--temperature", "0.9", "--seed", "4",
         "--max-new-tokens", "90"],
        stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True, env=os.environ | {"TERM": "xterm"} | more,
    )  # fmt: skip
    os.close(theirs)
    try:
        read_until(ours, b"> ")
        for _ in range(20):  # one that comes before Python waits for a key is noticed at the next key
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            if select.select([ours], [], [], 1)[0]:
                break
        read_until(ours, b"leaves.")
        os.write(ours, b"hi\n")
        shown = read_until(ours, b"% drafted]")
        assert (b"\x1b[32m" in shown) == is_green
        assert b"\x1b[1;23r" in shown and b"\x1b[r" in shown, "a line is spared, and given back"
        rows = screen_of(shown.decode().rpartition("[")[0])
        assert rows[-len(rows_of(told)) :] == rows_of(told)
        os.write(ours, b"/quit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def rows_of(answer: str) -> list[str]:
    """An answer as a terminal of 60 columns shows it."""
    return screen_of(answer.replace("\n", "\r\n"))


def screen_of(sent: str) -> list[str]:
    screen = Screen(60, 24)
    screen.feed(sent)
    return screen.lines


def read_until(terminal: int, wanted: bytes) -> bytes:
    """What a program has written, up to what is waited for."""
    found, end_s = b"", time.monotonic() + 60
    while wanted not in found:
        assert select.select([terminal], [], [], max(end_s - time.monotonic(), 0))[0], f"only {found!r}"
        found += os.read(terminal, 4096)
    return found


def test_an_answer_is_interrupted(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards what was said until Ctrl-C: it stays in the conversation."""
    talk = Conversation(engine, Sampling(temperature=0.9), system=None, variables={}, max_new_tokens=60)
    stream = engine.stream

    def interrupted(*given: object, **settings: object) -> object:
        for number, chunk in enumerate(stream(*given, **settings)):
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            yield chunk

    engine.stream = interrupted
    try:
        talk.ask("hi")
    finally:
        del engine.stream
    assert len(talk.messages[1]["content"]) == 4
    assert "4 tokens" in (err := capsys.readouterr().err) and err.endswith(", interrupted]\n")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
)
def test_colours(settings: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    assert not has_styles(stream)
    stream.isatty = lambda: True
    assert has_styles(stream) == wanted


@pytest.mark.parametrize("closed", mostly_slow(["<&-", ">&-"], quick=["<&-"]))
def test_without_input_or_output(chatting: Path, closed: str) -> None:
    """Guards whatever starts the program without them: a traceback."""
    command = f"{sys.executable} -m paradraft chat --target {chatting} --drafter none {closed}"
    found = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stderr) == (0, "")
