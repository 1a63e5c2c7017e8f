"""Answers of an engine in this process: the engine's own, whatever the batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from paradraft.data.local import InProcess
from paradraft.data.questions import ID, read_questions
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from tests.support.asking import ask, talk
from tests.support.interruption import interrupted

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|eos|>{% elif m.role == 'user' %}"
    "{{ '+' + m.content + '+' }}{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Z{% endif %}"
)
SAMPLING = Sampling(temperature=0.9, top_k=40, seed=5)


def engine_of(family: Path, drafter: str = "none", **runtime: Any) -> Engine:
    draft = None if drafter == "none" else str(family / drafter)
    loaded = load(
        str(family / "target"),
        drafter=drafter,
        draft=draft,
        runtime=Runtime(dtype="float64", **runtime),
        lengths="fixed",
    )
    loaded.target.tokenizer.chat_template = TEMPLATE
    return loaded


def chat(*contents: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": talk(*contents)}


def answerer(engine: Engine, **settings: Any) -> InProcess:
    chosen = {"target": "tiny", "sampling": SAMPLING, "max_new_tokens": 8, "batch_size": 3, **settings}
    return InProcess(engine=engine, **chosen)


RECORDS = [{"prompt": "hello"}, {"prompt": "a"}, {"prompt": "hello"}, chat("ab", "old", "c"), {"prompt": "xyz" * 9}]
RECORDS += [chat("q", "old", "r", "old")]


def test_answers_are_the_engines_own(family: Path, tmp_path: Path) -> None:
    """Guards the way from a line to the engine and back: text, seed, settings and finish reason."""
    engine = engine_of(family)
    prompts = tmp_path / "run" / "prompts.jsonl"
    _, answers = ask(answerer(engine), tmp_path / "run", *RECORDS[:3], samples=2)
    by_id = {answer[ID]: answer for answer in answers}
    assert len(by_id) == 6
    for question in read_questions(prompts, 2):
        sampling = replace(SAMPLING, seed=question.seed(SAMPLING.seed, 0))
        expected = engine.generate(question.record["prompt"], max_new_tokens=8, sampling=sampling)
        assert by_id[question.id]["response"] == expected.text
        assert by_id[question.id]["finish_reason"] == expected.finish_reason
    assert len({answer["response"] for answer in answers if answer["prompt"] == "hello"}) == 4


def test_the_batch_the_drafter_and_an_interruption_change_nothing(family: Path, tmp_path: Path) -> None:
    """Guards against answers that depend on what was answered beside them, or before a stop."""
    plain = answerer(engine_of(family), batch_size=1)
    expected = sorted(json.dumps(answer) for answer in ask(plain, tmp_path / "whole", *RECORDS)[1])
    drafted = answerer(engine_of(family, "pard"), batch_size=2)
    with interrupted(3), pytest.raises(KeyboardInterrupt):
        ask(drafted, tmp_path / "stopped", *RECORDS)
    assert 0 < (tmp_path / "stopped" / "out.jsonl").read_text().count("\n") < 6
    progress, answers = ask(drafted, tmp_path / "stopped", *RECORDS)
    assert progress.before > 0
    assert sorted(json.dumps(answer) for answer in answers) == expected


def test_a_conversation_goes_on_from_the_new_answers(family: Path, tmp_path: Path) -> None:
    """Guards the chat template: the generation prompt at the end, the new turns before it, the end of turn between."""
    engine = engine_of(family)
    engine.target.lm.model.generation_config.eos_token_id = list(range(0, 64, 2))  # nearly every turn ends by itself
    source = answerer(engine, max_new_tokens=30)
    _, (answer,) = ask(source, tmp_path, chat("ab", "old", "c"))
    (question,) = read_questions(tmp_path / "prompts.jsonl", 1)
    text, turns = "", []
    for number, said in enumerate(["+ab+", "+c+"]):
        text += f"{said}Z"
        sampling = replace(SAMPLING, seed=question.seed(SAMPLING.seed, number))
        turns.append(engine.generate(text, max_new_tokens=30, sampling=sampling).text)
        text = text.removesuffix("Z") + f"{turns[-1]}<|eos|>"
    assert [message["content"] for message in answer["messages"]] == ["ab", turns[0], "c", turns[1]]


@pytest.mark.parametrize(
    ("record", "asked"), [(chat("a"), [51, 63, 1, 63, 52]), ({"prompt": "a"}, [51, 1]), ({"prompt": "Ya"}, [51, 1])]
)
def test_one_bos_and_no_end(family: Path, tmp_path: Path, record: object, asked: list[int]) -> None:
    """Guards against two BOS tokens, where the tokenizer adds one to that of the template or of the prompt, and against
    an end after the question."""
    engine = engine_of(family)
    engine.target.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="Y $A <|eos|>", special_tokens=[("Y", 51), ("<|eos|>", 0)]
    )
    engine.target.tokenizer.chat_template = "Y" + TEMPLATE
    _, (answer,) = ask(answerer(engine), tmp_path, record)
    (question,) = read_questions(tmp_path / "prompts.jsonl", 1)
    sampling = [replace(SAMPLING, seed=question.seed(SAMPLING.seed, 0))]
    (expected,) = engine.generate([asked], max_new_tokens=8, sampling=sampling)
    assert expected.text == (answer["response"] if "response" in answer else answer["messages"][-1]["content"])


def test_the_template_is_told(family: Path, tmp_path: Path) -> None:
    """Guards the switches of chat templates on their way to the question, and one file of two kinds of answers; files
    of former versions, which had no such setting, go on."""
    engine = engine_of(family)
    engine.target.tokenizer.chat_template = TEMPLATE + "{% if loud %}Y{% endif %}"
    loud = answerer(engine, chat_template_kwargs={"loud": True})
    _, (answer,) = ask(loud, tmp_path / "loud", chat("a"))
    (question,) = read_questions(tmp_path / "loud" / "prompts.jsonl", 1)
    sampling = replace(SAMPLING, seed=question.seed(SAMPLING.seed, 0))
    assert answer["messages"][-1]["content"] == engine.generate("+a+ZY", max_new_tokens=8, sampling=sampling).text
    with pytest.raises(ValueError, match=r"chat_template_kwargs=\{'loud': True\}, and now it is None"):
        ask(answerer(engine), tmp_path / "loud", chat("a"))
    ask(answerer(engine), tmp_path / "plain", chat("a"))
    file = tmp_path / "plain" / "out.jsonl.settings.json"
    settings = json.loads(file.read_text())
    assert settings.pop("chat_template_kwargs") is None
    file.write_text(json.dumps(settings))
    assert ask(answerer(engine), tmp_path / "plain", chat("a"))[0].before == 1
    with pytest.raises(ValueError, match="the model's chat template has no variable 'lowd'"):
        answerer(engine, chat_template_kwargs={"lowd": True})


def test_a_conversation_without_room_ends_there(family: Path, tmp_path: Path) -> None:
    """Guards against an error in the middle of a long run, and against a turn that has no room to be finished."""
    engine = engine_of(family, capacity=30)
    engine.target.lm.model.generation_config.eos_token_id = list(range(1, 64))
    progress, (answer,) = ask(answerer(engine), tmp_path, chat("ab", "old", "c" * 20, "old"))
    assert len(answer["messages"]) == 2
    assert answer["finish_reason"] == "eos"
    assert progress.shortened == 1


@pytest.mark.parametrize(
    ("record", "template", "named"),
    [
        ({"prompt": "a" * 121}, TEMPLATE, "line 2: the prompt has 121 tokens and 8 are asked for"),
        (chat("a" * 125), TEMPLATE, "line 2: the prompt has 128 tokens"),
        (chat("a"), None, "line 2: 'tiny' has no chat template"),
        ({"messages": [{"role": "system", "content": "a"}, *talk("a")]}, TEMPLATE, "line 2: no such role"),
        (chat("a"), "", "line 2: "),
        (chat("a"), "{{ messages[7].content.x }}", "line 2: "),
        (chat("a", "b", "c"), "{% if messages|length > 2 %}{{ raise_exception('long') }}{% endif %}a", "line 2: long"),
    ],
)
def test_what_the_model_cannot_be_asked_is_found_before_any_work(
    family: Path, tmp_path: Path, record: object, template: str | None, named: str
) -> None:
    """Guards against an error after hours, and one that does not say which line."""
    engine = engine_of(family)
    engine.target.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2") as error:
        ask(answerer(engine), tmp_path, {"prompt": "a"}, record)
    assert named in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_another_target_of_the_same_name_is_refused(family: Path, tmp_path: Path) -> None:
    """Guards against a file of answers of a model before and after it was trained further in its folder."""

    def change(engine: Engine, number: int) -> None:
        list(engine.target.lm.model.parameters())[number].data.add_(1e-3)

    def retemplate(engine: Engine) -> None:
        engine.target.tokenizer.chat_template = "x"

    ask(answerer(engine_of(family)), tmp_path, {"prompt": "a"})
    changes: list[Callable[[Engine], None]] = [lambda e: change(e, 0), lambda e: change(e, -1), retemplate]
    for changed in changes:
        engine = engine_of(family)
        changed(engine)
        with pytest.raises(ValueError, match="digest of the target="):
            ask(answerer(engine), tmp_path, {"prompt": "a"})
    ask(answerer(engine_of(family, "pard")), tmp_path, {"prompt": "a"}, {"prompt": "b"})


def test_batches_of_like_length() -> None:
    """Guards against batches that wait for one long row: sorted within a window, and every question once."""
    from paradraft.data.local import _batches
    from paradraft.data.questions import Question

    sizes = [(place * 37) % 101 + 1 for place in range(200)]
    questions = [Question(place="", record={"prompt": "x" * size}, id=str(n)) for n, size in enumerate(sizes)]
    questions.append(Question(place="", record=chat("a", "b", "c"), id="talk"))
    batches = list(_batches(questions, 3))
    assert sorted(question.id for batch in batches for question in batch) == sorted(q.id for q in questions)
    spread = [
        max(lengths) - min(lengths) for lengths in ([len(q.record.get("prompt", "")) for q in b] for b in batches)
    ]
    assert sum(spread) < 300
