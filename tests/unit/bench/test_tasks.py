"""Questions of tasks: read, chosen, and put as the target expects them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from paradraft.bench.report.summary import mean_of
from paradraft.bench.tasks import TASKS, Questions, TaskQuestion, files_of, prompt_of, read_questions, tasks_of
from paradraft.text.tokenization import encode_prompt
from tests.conftest import tiny_tokenizer
from tests.support.jsonl import write_lines
from tests.support.tasks import RECORDS, write_task

BOS, ASKS = 52, "A"
TEMPLATE = (
    "Z{% for m in messages %}{{ m.role[0] }}{{ m.content }}+{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def chat_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """One that puts Z, its BOS, before every text, as its template does too."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="Z $A", special_tokens=[("Z", BOS)])
    tokenizer.chat_template = template
    return tokenizer


def choose(name: str, questions: list[tuple[str, ...]], number: int | None = None, **given: Any) -> Questions:
    settings = {"max_new_tokens": 4, "tokenizer": tiny_tokenizer(), "system": None, "capacity": 128, **given}
    return Questions.choose(TASKS[name], [TaskQuestion(turns=turns) for turns in questions], number, **settings)


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_reads_its_own_fields(name: str, tmp_path: Path) -> None:
    """Guards against asking a solution, a test or a reference instead of the question."""
    found = read_questions(TASKS[name], write_task(tmp_path, name))
    expected = {
        "humaneval": ("def f0(x):\n",), "gsm8k": ("what is 0",), "math500": ("compute 0",),
        "mtbench": ("ask 0", "and then"), "specbench": ("ask", "and then"),
    }  # fmt: skip
    assert len(found) == len(RECORDS[name]) and found[0].turns == expected[name]


def test_answers_are_marked_by_their_last_number(tmp_path: Path) -> None:
    """Guards shares of right answers against numbers in the middle of a text, and against ways to write a number."""
    questions = read_questions(TASKS["gsm8k"], write_task(tmp_path, "gsm8k"))
    assert [question.right for question in questions] == list(range(6))
    found = Questions.choose(
        TASKS["gsm8k"], questions, 4, max_new_tokens=4, tokenizer=tiny_tokenizer(), system=None, capacity=128
    )
    assert [int(number) for number in found.right if number is not None] == [0, 1, 3, 4]
    marks = found.work.right_share
    assert marks is not None
    assert marks(["So 3 - 3 = 0.", "It is $1.00", "1 of 3, that is 5", "3 4 5"]) == 0.5
    assert marks(["none", "", "1,003", "4,0"]) == 0.0
    assert choose("gsm8k", [("q",)]).work.right_share is None


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"text": "hello"}, "line 2: no field 'question'"),
        ({"question": " "}, "line 2: the question of task gsm8k must be a text"),
        ({"question": ["a", 3]}, "line 2: the question of task gsm8k must be a text"),
        ({"question": []}, "line 2: the question of task gsm8k must be a text"),
    ],
)
def test_a_record_without_a_question_is_named(record: dict[str, object], named: str, tmp_path: Path) -> None:
    """Guards against empty questions, which any model answers fast."""
    write_lines(tmp_path / "data.jsonl", [{"question": "a"}, record])
    with pytest.raises(ValueError, match=named):
        read_questions(TASKS["gsm8k"], tmp_path / "data.jsonl")


def test_a_task_without_a_dataset_says_where_its_file_is() -> None:
    """Guards against a search on Hugging Face for what is not there."""
    with pytest.raises(ValueError, match=r"specbench is no Hugging Face dataset: download https://\S+question.jsonl"):
        read_questions(TASKS["specbench"], None)


def test_the_instruction_and_one_bos_stand_around_a_question() -> None:
    """Guards against a second BOS, a prompt without the place of the answer, and a lost system message."""
    tokenizer = chat_tokenizer()
    prompt = prompt_of(TASKS["humaneval"], ["def f"], [], tokenizer, "s0")
    assert prompt == "Zss0+uComplete the code I provided.\ndef f+A"
    assert encode_prompt(prompt, tokenizer).count(BOS) == 1
    assert prompt_of(TASKS["humaneval"], ["def f"], [], tiny_tokenizer(), None) == "def f"
    assert prompt_of(TASKS["gsm8k"], ["1+1"], [], tiny_tokenizer(), None) == "Question: 1+1\nAnswer:"


def test_braces_of_a_question_stay() -> None:
    """Guards questions of LaTeX and code against being read as a format."""
    assert prompt_of(TASKS["math500"], [r"\frac{3}{x}"], [], chat_tokenizer(), None) == r"Zu\frac{3}{x}+A"


def test_the_second_turn_quotes_the_targets_own_answer() -> None:
    """Guards against second turns that follow nothing, or another question's answer."""
    asked: list[tuple[list[str], int]] = []

    def answer(prompts: list[str], limit: int) -> list[str]:
        asked.append((prompts, limit))
        return [f"said{len(asked)}{place}" for place in range(len(prompts))]

    questions = choose("mtbench", [("p", "q"), ("r",), ("s", "t")], tokenizer=chat_tokenizer())
    assert questions.count == 5
    assert questions.prompts(answer) == ["Zup+A", "Zup+asaid10+uq+A", "Zur+A", "Zus+A", "Zus+asaid11+ut+A"]
    assert asked == [(["Zup+A", "Zus+A"], 4)], "nobody is asked for answers that no prompt quotes"
    plain = choose("mtbench", [("p", "q")]).prompts(answer)
    assert plain[1] == "Question: p\nAnswer: said20\n\nQuestion: q\nAnswer:"


def test_questions_are_spread_over_the_data() -> None:
    """Guards Spec-Bench, whose categories stand one after the other: the first 80 would all be of one."""
    found = choose("gsm8k", [(f"q{number}",) for number in range(480)], 6)
    assert found.numbers == (1, 81, 161, 241, 321, 401)
    assert found.turns[1] == ("q80",)
    assert choose("gsm8k", [("q",)] * 480).count == 80
    assert choose("gsm8k", [("q",)] * 7).count == 7


def test_what_does_not_fit_is_left_out_and_named() -> None:
    """Guards against a run of an hour that ends at its longest question, and a set that changes in silence."""
    long = "x" * 125
    found = choose("humaneval", [("a",), (long,), ("b",)])
    assert (found.numbers, found.left_out) == ((1, 3), (2,))
    assert "left out 1 question, too long for the target with 4 new tokens: 2" in str(found.warning())
    assert found.as_json()["left_out"] == [2]
    assert choose("humaneval", [("a",)]).warning() is None
    with pytest.raises(ValueError, match="3 questions are asked for, but of 3 only 2 fit into 128 tokens, with 4 new"):
        choose("humaneval", [("a",), (long,), ("b",)], 3)
    with pytest.raises(ValueError, match="only 0 fit"):
        choose("humaneval", [(long,)])
    two_turns = choose("mtbench", [("a", "b")], capacity=42 + 4 * 2)
    assert two_turns.left_out == ()
    with pytest.raises(ValueError, match="only 0 fit"):
        choose("mtbench", [("a", "b")], capacity=41 + 4 * 2)


def test_a_template_that_refuses_says_so() -> None:
    """Guards against a traceback of the template engine."""
    tokenizer = chat_tokenizer("{{ raise_exception('no system messages here') }}")
    with pytest.raises(ValueError, match=r"task gsm8k: the target's chat template refuses .* no system messages here"):
        prompt_of(TASKS["gsm8k"], ["a"], [], tokenizer, "s")


def test_names_and_files(tmp_path: Path) -> None:
    """Guards against data of one task that is read as another's."""
    file = write_task(tmp_path, "gsm8k")
    gsm8k, math = tasks_of("gsm8k, math500")
    assert files_of([gsm8k], [str(file)]) == files_of([gsm8k, math], [f"gsm8k={file}"]) == {"gsm8k": file}
    for tasks, given, named in (
        ([gsm8k, math], [str(file)], "write gsm8k=FILE"),
        ([math], [f"gsm8k={file}"], "not among the tasks"),
        ([gsm8k], [str(file), str(file)], "a file already"),
        ([gsm8k], ["gsm8k=none.jsonl"], "no file 'none.jsonl'"),
    ):
        with pytest.raises(ValueError, match=named):
            files_of(tasks, given)


def test_the_mean_is_the_papers() -> None:
    """Guards against a mean of ratios: 258.0, 311.5 and 253.7 over 77.0, 76.4 and 76.9 is 3.57 (PARD, Table 1)."""

    def figures(speed: float, base: float, same: bool = True) -> dict[str, Any]:
        found = {"method": "pard", "tokens_per_s": {"median": speed}, "speedup_vs_ar": speed / base}
        found |= {"speedup_vs_fastest_ar": speed / base / 2, "acceptance_length_first_32": 1.5}
        return {**found, "speedup_vs_hf": None, "acceptance_length": 2.0, "identical_to_ar": same}

    speeds = ((258.0, 77.0), (311.5, 76.4), (253.7, 76.9))
    mean = mean_of({str(place): {"pard": figures(*pair)} for place, pair in enumerate(speeds)})["pard"]
    assert mean["tokens_per_s"] == pytest.approx(274.4)
    assert f"{mean['speedup_vs_ar']:.2f}" == "3.57" and mean["acceptance_length_first_32"] == 1.5
    assert mean["speedup_vs_fastest_ar"] == pytest.approx(mean["speedup_vs_ar"] / 2)
    assert mean["speedup_vs_hf"] is None and mean["identical_to_ar"]
    mixed = {"a": {"pard": figures(2.0, 1.0)}, "b": {"pard": figures(2.0, 1.0, same=False)}}
    assert mean_of(mixed)["pard"]["identical_to_ar"] is False
