from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing

from paradraft.data.dataset import load_samples
from paradraft.data.samples import Sample
from tests.conftest import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eos|>{% endgeneration %}"
    "{% elif m.role == 'user' %}{{ '+' + m.content + '+' }}{% else %}{{ raise_exception('no such role') }}{% endif %}"
    "{% endfor %}"
)
END_UNMARKED = TEMPLATE.replace("<|eos|>{% endgeneration %}", "{% endgeneration %}<|eos|>")
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
A, B, C, D, ASKED, PLUS, EOS = 1, 2, 3, 4, 27, 63, 0


def load(
    tmp_path: Path, *records: object, template: str | None = TEMPLATE, max_length: int = 100, **settings: object
) -> list[Sample]:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return load_samples([file], tokenizer, max_length=max_length, **settings)


def test_every_token_of_a_text_is_a_label(tmp_path: Path) -> None:
    """Guards against losing the end-of-text label: a drafter that never learns to stop."""
    file = tmp_path / "some.txt"
    file.write_text("abc")
    expected = [Sample(tokens=[A, B, C, EOS], is_label=[True] * 4)]
    assert load_samples([file], tiny_tokenizer(), max_length=9) == expected
    assert load(tmp_path, {"text": "abc"}) == expected


def test_samples_are_small() -> None:
    """Guards the memory of large data sets: lists of numbers take forty bytes a token."""
    sample = Sample(tokens=[100_000] * 1000, is_label=[True] * 1000)
    assert sys.getsizeof(sample.tokens) + sys.getsizeof(sample.is_label) < 5300
    assert Sample(tokens=sample.tokens, is_label=sample.is_label) == sample


def test_only_the_response_is_a_label(tmp_path: Path) -> None:
    """Guards against learning the prompt; the end-of-text is a label unless the answer was cut for length."""
    record = {"prompt": "ab", "response": "cd"}
    assert load(tmp_path, record, {**record, "finish_reason": "length"}, {**record, "finish_reason": "stop"}) == [
        Sample(tokens=[A, B, C, D, EOS], is_label=[False, False, True, True, True]),
        Sample(tokens=[A, B, C, D], is_label=[False, False, True, True]),
        Sample(tokens=[A, B, C, D, EOS], is_label=[False, False, True, True, True]),
    ]


def test_end_of_text_is_a_label_even_when_it_is_the_pad_token(tmp_path: Path) -> None:
    """Guards the oldest trap of training data: pad == eos silently drops every end-of-text from the labels."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}')
    (sample,) = load_samples([file], tokenizer, max_length=9)
    assert (sample.tokens[-1], sample.is_label[-1]) == (EOS, True)


@pytest.mark.parametrize("template", [TEMPLATE, END_UNMARKED])
def test_the_assistants_turns_are_labels(tmp_path: Path, template: str) -> None:
    """Guards against learning the user's turns, or losing the end of the assistant's."""
    turns = [("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "a")]
    (sample,) = load(
        tmp_path, {"messages": [{"role": role, "content": text} for role, text in turns]}, template=template
    )
    assert list(sample.tokens) == [PLUS, A, PLUS, B, C, EOS, PLUS, D, PLUS, A, EOS]
    assert list(sample.is_label) == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 2


@pytest.mark.parametrize("template", [TEMPLATE, END_UNMARKED, UNMARKED])
def test_nothing_is_learnt_behind_a_turn_that_was_cut(tmp_path: Path, template: str) -> None:
    """Guards against a drafter that learns to end turns in the middle of a sentence, because the template puts an end
    after every turn; the turns before it keep theirs."""
    turns = [("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "a ")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns], "finish_reason": "length"}
    asking = template.replace("'assistant' %}", "'assistant' %}A") + "{% if add_generation_prompt %}A{% endif %}"
    cut, whole = load(tmp_path, record, {**record, "finish_reason": "eos"}, template=asking)
    assert list(cut.tokens) == [PLUS, A, PLUS, ASKED, B, C, EOS, PLUS, D, PLUS, ASKED, A, PLUS]
    assert list(cut.is_label) == [False] * 4 + [True] * 3 + [False] * 4 + [True] * 2
    assert (whole.tokens[-1], whole.is_label[-1]) == (EOS, True)


def test_a_cut_that_has_no_turn_before_it_or_is_not_the_assistants(tmp_path: Path) -> None:
    """Guards the edges of the rule: nothing stands before the turn, or the last turn is the user's. A template that
    marks nothing does not say which of the tokens before such a turn are the target's."""
    only = {"messages": [{"role": "assistant", "content": "bc"}], "finish_reason": "length"}
    last = {"messages": [*only["messages"], {"role": "user", "content": "a"}], "finish_reason": "length"}
    cut, whole = load(tmp_path, only, last, template=TEMPLATE)
    assert cut == Sample(tokens=[B, C], is_label=[True] * 2)
    assert whole == Sample(tokens=[B, C, EOS], is_label=[True] * 3), "what follows the last turn teaches nothing"
    with pytest.raises(ValueError, match="nothing is a label in 2 samples"):
        load(tmp_path, only, last, template=UNMARKED)


def test_a_template_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    """Guards against two BOS tokens, or two ends, where the tokenizer adds one to the one of the template."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="Z $A <|eos|>", special_tokens=[("Z", 52), ("<|eos|>", EOS)]
    )
    assert tokenizer("a")["input_ids"] == [52, A, EOS], "this tokenizer adds a BOS and an end"
    tokenizer.chat_template = "Z" + TEMPLATE
    file = tmp_path / "data.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')
    (sample,) = load_samples([file], tokenizer, max_length=20)
    assert list(sample.tokens) == [52, PLUS, A, PLUS, B, EOS]


@pytest.mark.parametrize("around", ["Z $A", "Z $A <|eos|>"])
def test_one_bos_at_the_beginning_and_one_end_at_the_end(tmp_path: Path, around: str) -> None:
    """Guards against an end between prompt and response, a BOS there, and two of either, where the tokenizer adds them
    itself or the text has them already."""
    tokenizer = tiny_tokenizer()
    special = [("Z", 52), ("<|eos|>", EOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=special)
    texts = [{"text": "ab"}, {"text": "Zab<|eos|>"}]
    answers = [{"prompt": "a", "response": "b"}, {"prompt": "Za", "response": "b<|eos|>"}]
    cut = {"prompt": "a", "response": "b", "finish_reason": "length"}
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in [*texts, *answers, cut]))
    samples = load_samples([file], tokenizer, max_length=20)
    assert [list(sample.tokens) for sample in samples] == [[52, A, B, EOS]] * 4 + [[52, A, B]]
    assert [sum(sample.is_label) for sample in samples] == [4, 4, 2, 2, 1]


def test_long_samples_are_split_and_pieces_without_labels_dropped(tmp_path: Path) -> None:
    """Guards against tokens at the border of two pieces, the end token above all, that no row learns to predict, and
    against pieces of nothing but prompt."""
    answer = {"prompt": "aaaaaa", "response": "bc"}
    with pytest.warns(UserWarning, match="long=split: 2 pieces begin in the middle of a conversation or an answer"):
        pieces = load(tmp_path, {"text": "abcda"}, answer, max_length=4, long="split")
    assert [list(piece.tokens) for piece in pieces] == [[A, B, C, D], [D, A, EOS], [A, A, A, B], [B, C, EOS]]
    assert [list(piece.is_label) for piece in pieces] == [[True] * 4, [True] * 3, [False] * 3 + [True], [True] * 3]


@pytest.mark.parametrize("long", ["auto", "truncate"])
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "+a+", "response": "bcda"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcda"}]},
    ],
)
def test_a_long_answer_keeps_its_prompt(tmp_path: Path, long: str, record: dict[str, object]) -> None:
    """Guards answers that are longer than a sample: the rest of one was a sample of its own, which began in the middle
    of the answer, without the prompt that the target reads there. It is left out, and a warning says how much."""
    with pytest.warns(UserWarning, match=r"1 of 2 samples are longer than max_length=5 and were truncated, 42\.9% of"):
        cut, short = load(tmp_path, record, {"prompt": "a", "response": "b"}, max_length=5, long=long)
    assert cut == Sample(tokens=[PLUS, A, PLUS, B, C], is_label=[False] * 3 + [True] * 2), "and it does not end here"
    assert short == Sample(tokens=[A, B, EOS], is_label=[False, True, True])


@pytest.mark.filterwarnings("error")
def test_what_fits_is_not_touched(tmp_path: Path) -> None:
    """Guards samples of just the length: nothing is lost, so nothing is said; a text is split without a word."""
    record = {"prompt": "ab", "response": "cd"}
    for long in ("auto", "truncate", "split"):
        assert load(tmp_path, record, max_length=5, long=long) == load(tmp_path, record)
    assert [list(piece.tokens) for piece in load(tmp_path, {"text": "abcd"}, max_length=3)] == [[A, B, C], [C, D, EOS]]


def test_a_long_text_may_be_truncated(tmp_path: Path) -> None:
    """Guards `long=truncate` for plain text."""
    with pytest.warns(UserWarning, match=r"truncated, 40\.0% of all labels"):
        assert load(tmp_path, {"text": "abcd"}, max_length=3, long="truncate") == [
            Sample(tokens=[A, B, C], is_label=[True] * 3)
        ]


def test_a_prompt_that_fills_a_sample_is_named(tmp_path: Path) -> None:
    """Guards against a run that is refused for one long prompt among a million, and against losing it in silence."""
    record, good = {"prompt": "aaaaaa", "response": "bc"}, {"prompt": "a", "response": "b"}
    with pytest.warns(UserWarning, match=r"1 samples were left out, because their prompt .* max_length=4 \(.*line 1\)"):
        assert load(tmp_path, record, good, max_length=4) == load(tmp_path, good)
    with pytest.raises(ValueError, match="nothing to learn"), pytest.warns(UserWarning, match="1 samples were left"):
        load(tmp_path, record, max_length=4)


@pytest.mark.parametrize(
    "line",
    [
        "{", "3", "[]", '{"txt": "a"}', '{"prompt": "a"}', '{"text": 3}', '{"prompt": "a", "response": null}',
        '{"messages": []}', '{"messages": ["a"]}', '{"conversations": [{"from": "gpt"}]}',
        '{"conversation": [{"assistant": "a"}]}', '{"conversation": [{"human": "a", "gpt": "b"}]}',
        '{"conversation": [{"human": 3}]}',
        '{"user": "a"}',
        '{"messages": [{"role": "judge", "content": "a"}]}', '{"messages": [{"content": "a"}]}', '{"messages": [3]}',
        '{"messages": [{"role": "user", "content": null}]}', '{"conversations": [{"from": ["gpt"], "value": "a"}]}',
    ],
)  # fmt: skip
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    """Guards against a traceback without a place in a file of a million lines."""
    with pytest.raises(ValueError, match=r"data\.jsonl, line 3: ."):
        load(tmp_path, {"text": "ab"}, "", line)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        pytest.param("[" * 100_000, "not JSON", id="nested"),
        (r'{"text": "\ud800"}', "not valid text"),
        (r'{"text": "a", "note": ["\ud800"]}', "not valid text"),
    ],
)
def test_what_no_tokenizer_reads_is_called_so(tmp_path: Path, line: str, problem: str) -> None:
    """Guards against a RecursionError, and against the tokenizer's complaint about its own types."""
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 3: {problem}"):
        load(tmp_path, {"text": "ab"}, "", line)


def test_conversations_need_a_template(tmp_path: Path) -> None:
    """Guards against silently learning nothing from conversations."""
    record = {"messages": [{"role": "assistant", "content": "a"}]}
    with pytest.raises(ValueError, match="line 1: the model has no chat template"):
        load(tmp_path, record, template=None)


def test_a_template_without_marks_labels_what_the_assistant_adds(tmp_path: Path) -> None:
    """Guards the templates that most models ship: no generation mark, so the turns are told apart by their prefixes."""
    turns = [("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "a")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert load(tmp_path, record, template=UNMARKED) == load(tmp_path, record, template=TEMPLATE)


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path: Path) -> None:
    """Guards against cutting a JSON string at U+2028, which JSON allows inside it."""
    assert len(load(tmp_path, {"text": "a\u2028b"})[0].tokens) == 4


def test_what_the_template_is_told(tmp_path: Path) -> None:
    """Guards the switches of chat templates: set in every conversation, and a warning where there is none."""
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    template = "{% if loud == 'Z' %}Z{% endif %}" + TEMPLATE
    (sample,) = load(tmp_path, record, template=template, chat_template_kwargs={"loud": "Z"})
    assert list(sample.tokens) == [52, PLUS, A, PLUS, B, EOS]
    assert load(tmp_path, record, template=template) == load(tmp_path, record)
    text, answer = {"text": "ab"}, {"prompt": "a", "response": "b"}
    with pytest.warns(UserWarning, match="chat_template_kwargs is ignored without conversations"):
        load(tmp_path, text, answer, template=template, chat_template_kwargs={"loud": "Z"})


@pytest.mark.parametrize(
    ("variables", "template", "named"),
    [
        ({"lowd": True}, TEMPLATE, "chat_template_kwargs: the model's chat template has no variable 'lowd'"),
        ({"raise": True}, TEMPLATE, "has no variable 'raise'"),
        ({"lowd": True}, None, "has no variable 'lowd'"),
        ({"messages": []}, TEMPLATE, "chat_template_kwargs: 'messages' is not for you to set: leave it out"),
        ({"add_generation_prompt": True}, TEMPLATE, "'add_generation_prompt' is not for you to set"),
        ({"tools": []}, TEMPLATE, "'tools' is not for you to set"),
    ],
)
def test_what_the_template_cannot_be_told(
    tmp_path: Path, variables: dict[str, object], template: str | None, named: str
) -> None:
    """Guards against a misspelt switch, which the template would ignore, and against arguments of the library."""
    with pytest.raises(ValueError, match=f"^{named}" if named.startswith("chat") else named):
        load(tmp_path, {"text": "ab"}, template=template, chat_template_kwargs=variables)


def test_nothing_to_learn(tmp_path: Path) -> None:
    """Guards against a run over no data; a file that does not exist is named."""
    with pytest.raises(ValueError, match="nothing to learn"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"none\.txt' does not exist"):
        load_samples([tmp_path / "none.txt"], tiny_tokenizer(), max_length=9)


def test_samples_without_a_label_are_counted_and_named(tmp_path: Path) -> None:
    """Guards against silently learning from half of the data: conversations without an answer, empty responses."""
    good, empty = {"text": "ab"}, {"prompt": "ab", "response": "", "finish_reason": "length"}
    asked = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(
        ValueError, match=r"nothing is a label in 2 samples \(.*line 2, .*line 4\): remove them, or set"
    ):
        load(tmp_path, good, empty, good, asked)
    assert load(tmp_path, good, empty, good, asked, skip_unlabelled=True) == load(tmp_path, good, good)
    with pytest.raises(ValueError, match=r"in 9 samples \((.*line \d, ){5}…\)"):
        load(tmp_path, *[empty] * 9)
    with pytest.raises(ValueError, match="nothing to learn"):
        load(tmp_path, empty, skip_unlabelled=True)


def test_other_shapes_of_conversations(tmp_path: Path) -> None:
    """Guards data sets as they are published: ShareGPT's names, instruction and output columns, renamed columns."""
    expected = load(tmp_path, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]})
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bc"}]}
    assert load(tmp_path, shared) == expected
    assert load(tmp_path, {"user": "a", "assistant": "bc"}) == expected
    assert load(tmp_path, {"conversation": [{"human": "a", "assistant": "bc"}], "id": 3}) == expected
    columns = {"user": "instruction", "assistant": "output"}
    assert load(tmp_path, {"instruction": "a", "output": "bc"}, columns=columns) == expected
    assert load(tmp_path, {"code": "ab"}, columns={"text": "code"}) == load(tmp_path, {"text": "ab"})


def test_parquet_holds_the_same_records(tmp_path: Path) -> None:
    """Guards data sets as they are downloaded: rows of a Parquet file, whose missing values are None."""
    records = [{"prompt": "ab", "response": "cd"}, {"text": "abc"}]
    file = tmp_path / "data.parquet"
    keys = ("prompt", "response", "text")
    parquet.write_table(pyarrow.table({key: [record.get(key) for record in records] for key in keys}), file)
    assert load_samples([file], tiny_tokenizer(), max_length=9) == load(tmp_path, *records, max_length=9)
    file.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"data\.parquet' cannot be read: "):
        load_samples([file], tiny_tokenizer(), max_length=9)


JSON_RECORDS = [{"prompt": "ab", "response": "cd"}, {"conversation": [{"human": "a", "assistant": "b"}]}]


@pytest.mark.parametrize(
    ("text", "records"),
    [
        (json.dumps(JSON_RECORDS), JSON_RECORDS),
        (json.dumps(JSON_RECORDS, indent=2), JSON_RECORDS),
        (json.dumps({"version": 1, "tags": ["a"], "data": JSON_RECORDS}), JSON_RECORDS),
        ("\n".join(map(json.dumps, JSON_RECORDS)) + "\n", JSON_RECORDS),
        (json.dumps(JSON_RECORDS[0]), JSON_RECORDS[:1]),
        (json.dumps(JSON_RECORDS[0], indent=1), JSON_RECORDS[:1]),
        (json.dumps(JSON_RECORDS[1]), JSON_RECORDS[1:]),
    ],
    ids=["array", "indented", "wrapped", "lines", "one", "one, indented", "one, with a list in it"],
)
def test_json_files_are_read(tmp_path: Path, text: str, records: list[object]) -> None:
    """Guards `.json` files as they are published: arrays, an object around one, and lines as in AMD's own example."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    file = tmp_path / "data.json"
    file.write_text(text)
    assert load_samples([file], tokenizer, max_length=100) == load(tmp_path, *records)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a,b\n1,2\n", r"training data '.*data\.json' is not JSON"),
        (b"[1, 2", r"data\.json' is not JSON"),
        (b"", r"data\.json' is not JSON"),
        (b"[" * 100_000, r"data\.json' is not JSON"),
        (b'"\xff"', r"data\.json' is not UTF-8 text"),
        (b'[{"text": "a"}, 3]', r"data\.json, record 2: expected a JSON object"),
        (b'[{"text": "a"}, {"text": "\\ud800"}]', r"data\.json, record 2: not valid text"),
        (b'{"text": "a"}\n{"text": \n', r"data\.json, line 2: not JSON"),
        (b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', r"data\.json' has records under train, test: write"),
        (b'{"data": []}', r"data\.json, record 1: expected"),
        (b"3", r"data\.json, record 1: expected a JSON object"),
    ],
    ids=range(11),
)
def test_json_files_that_hold_no_records_are_named(tmp_path: Path, content: bytes, problem: str) -> None:
    """Guards against a traceback, and against a choice between two lists of records that nobody made."""
    (tmp_path / "data.json").write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        load_samples([tmp_path / "data.json"], tiny_tokenizer(), max_length=9)


def test_columns_count(tmp_path: Path) -> None:
    """Guards `columns` against records that have other readings too, and against names that are misspelt."""
    record = {"text": "abcd", "instruction": "a", "output": "bc"}
    columns = {"user": "instruction", "assistant": "output"}
    assert load(tmp_path, record, columns=columns) == load(tmp_path, {"user": "a", "assistant": "bc"})
    with pytest.raises(ValueError, match=r"line 1: there is no 'answr', which `columns` names; there are text, instr"):
        load(tmp_path, record, columns={"response": "answr"})


@pytest.mark.parametrize("name", ["data.csv", "data.ndjson", "data.JSONL", "data.jsonl.gz"])
def test_data_that_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    """Guards against learning the commas of a table as if they were the target's answers."""
    (tmp_path / name).write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"is not read, write \.jsonl or \.parquet"):
        load_samples([tmp_path / name], tiny_tokenizer(), max_length=9)


def test_lines_of_a_json_file_may_hold_other_line_breaks(tmp_path: Path) -> None:
    """Guards `.json` files that have a record in each line: the first one was cut at U+2028, and the file refused."""
    file = tmp_path / "data.json"
    file.write_text('{"text": "a\u2028b"}\n{"text": "c"}\n', encoding="utf-8")
    assert len(load_samples([file], tiny_tokenizer(), max_length=9)) == 2
