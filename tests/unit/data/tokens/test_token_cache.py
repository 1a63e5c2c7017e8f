"""Tokens that are made in many processes and kept are the very ones that a plain loop makes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import psutil
import pyarrow
import pytest
import torch
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from paradraft.data.dataset import load_samples
from paradraft.data.samples import Sample, prompt_of
from paradraft.data.tokens import token_cache
from paradraft.data.tokens.token_cache import TokenCache
from paradraft.data.tokens.tokenized import Tokenized
from paradraft.sources import records
from paradraft.train.objectives.batch import Drop, collate
from tests.conftest import tiny_tokenizer
from tests.support.jsonl import write_lines

TEMPLATE = (
    "{% if loud %}Z{% endif %}{{ strftime_now('%d') }}{% for m in messages %}"
    "{{ ('+' if m.role == 'user' else '') + m.content }}{% endfor %}"
)
MONDAY = date(2026, 11, 23)
TALK = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
RECORDS: list[Any] = [
    {"text": "abcdefghijklmno"}, {"prompt": "ab", "response": "cdcdcdcdcdcdcd"}, {"prompt": "ab", "response": "x"},
    {"messages": TALK, "note": {"of": ["any", 3]}}, {"prompt": "a" * 30, "response": "b"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r" * 20}]},
]  # fmt: skip


def tokenizer_with(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenCache:
    """Keeps the tokens of small files too, which one process makes in many steps."""
    monkeypatch.setattr(token_cache, "BATCH", 2)
    return TokenCache(folder=tmp_path / "cache", processes=1, small_bytes=0)


def outcome(source: Path, cache: TokenCache | None = None, **settings: Any) -> tuple[object, list[str]]:
    """The samples with their groups, or what is said instead; and the warnings."""
    given = {"tokenizer": tokenizer_with(), "max_length": 8, "day": MONDAY, **settings}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            samples = load_samples([source], cache=cache, **given)
        except ValueError as error:
            return str(error), [str(warning.message) for warning in said]
    told = [(list(sample.tokens), list(sample.is_label), sample.group) for sample in samples]
    return told, [str(warning.message) for warning in said]


def entries(cache: TokenCache) -> list[Path]:
    assert cache.folder is not None
    return sorted(file for file in cache.folder.iterdir() if file.suffix != ".lock")


def no_tokens(*_: object) -> None:
    raise AssertionError("tokenized again")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("long", ["auto", "truncate", "split"])
def test_kept_tokens_are_those_of_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, long: str
) -> None:
    """Guards tokens, labels, groups, their order and every warning; and that the second start tokenizes nothing."""
    monkeypatch.setattr(token_cache, "BATCH", 7)
    file = tmp_path / "data.jsonl"
    write_lines(file, RECORDS * 9)
    cache = TokenCache(folder=tmp_path / "cache", processes=processes, small_bytes=0)
    plain = outcome(file, long=long)
    assert len(plain[0]) > 40 and plain[1], "control: there is something to compare"
    assert outcome(file, cache, long=long) == plain
    (entry,) = entries(cache)
    assert len(list(entry.rglob("*.arrow"))) == 1, "and of the records no copy is left"
    monkeypatch.setattr(token_cache, "tokenized", no_tokens)
    assert outcome(file, cache, long=long) == plain


BROKEN: dict[str, list[Any]] = {
    "first": [{"txt": "a"}, *RECORDS],
    "later": [*RECORDS, {"prompt": 3, "response": "a"}, {"txt": "b"}],
    "json": [*RECORDS, "{", *RECORDS],
    "record before json": [*RECORDS, {"txt": "a"}, *RECORDS, "{"],
    "unlabelled": [{"text": "ab"}, {"prompt": "a", "response": "", "finish_reason": "length"}],
    "nothing": [{"prompt": "a" * 9, "response": "b"}],
    "empty": [""],
}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_wrong_is_said_in_the_same_words(tmp_path: Path, cache: TokenCache, kind: str, processes: int) -> None:
    """Guards against another record that is named than the first broken one, and against a mistake that is kept as if
    it were the end of the data."""
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in BROKEN[kind]))
    plain = outcome(file)
    assert isinstance(plain[0], str)
    cache = replace(cache, processes=processes)
    assert outcome(file, cache) == outcome(file, cache) == plain


def test_a_broken_record_ends_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: TokenCache) -> None:
    """Guards against the broken record of a later process, which may be met first; and against tokenizing a million
    records to say that the third is broken."""
    file = tmp_path / "data.jsonl"
    write_lines(file, [*RECORDS * 3, {"txt": "a"}, *RECORDS * 50, {"txt": "b"}])
    read: list[int] = []
    batches = token_cache._batches
    monkeypatch.setattr(token_cache, "_batches", lambda *given: (read.append(1) or batch for batch in batches(*given)))
    assert outcome(file, replace(cache, processes=2)) == outcome(file)
    assert "line 19" in str(outcome(file)[0])
    assert 10 <= len(read) < 20, "of the 160 batches"


def wider(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens(["mn"])
    return tokenizer


CHANGES: dict[str, dict[str, Any]] = {
    "tokenizer": {"tokenizer": wider(tokenizer_with())},
    "template": {"tokenizer": tokenizer_with("Q" + TEMPLATE)},
    "variables": {"chat_template_kwargs": {"loud": True}},
    "columns": {"columns": {"text": "other"}},
    "date_string": {"date_string": "7"},
    "day": {"day": date(2026, 11, 24)},
    "max_length": {"max_length": 9},
    "long": {"long": "split"},
    "end_ids": {"end_ids": [5]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_tokens_changes_their_name(tmp_path: Path, cache: TokenCache, change: str) -> None:
    """Guards against tokens of other settings, which would be learnt without a word."""
    file = tmp_path / "data.jsonl"
    write_lines(file, [{**record, "other": "xyz"} for record in RECORDS])
    outcome(file, cache)
    outcome(file, cache)
    assert len(entries(cache)) == 1, "control: the same settings have one name"
    assert outcome(file, cache, **CHANGES[change]) == outcome(file, **CHANGES[change])
    assert len(entries(cache)) == 2


def test_other_content_and_other_versions_change_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: TokenCache
) -> None:
    """Guards data that was written anew under its name, in the same second and with the same size; libraries that
    tokenize otherwise; and what is skipped, which is chosen from the same tokens."""
    file = tmp_path / "data.jsonl"
    for number, text in enumerate(("abc", "abd"), start=1):
        write_lines(file, [{"text": text}])
        os.utime(file, (0, 0))
        assert outcome(file, cache) == outcome(file)
        assert len(entries(cache)) == number
    outcome(file, cache, skip_unlabelled=True)
    assert len(entries(cache)) == 2
    monkeypatch.setattr(token_cache, "version", lambda name: "9")
    outcome(file, cache)
    assert len(entries(cache)) == 3
    monkeypatch.setattr(token_cache, "CODE", token_cache.CODE[1:])
    outcome(file, cache)
    assert len(entries(cache)) == 4


@pytest.mark.parametrize("damage", ["cut", "flipped", "lost", "no manifest", "foreign", "a file"])
def test_damaged_tokens_are_noticed_and_made_anew(tmp_path: Path, cache: TokenCache, damage: str) -> None:
    """Guards against half of the data, or other data, after a crash, a full disk or a copy that failed."""
    file = tmp_path / "data.jsonl"
    write_lines(file, RECORDS)
    plain = outcome(file, cache)
    (entry,) = entries(cache)
    (tokens,), manifest = entry.rglob("*.arrow"), entry / token_cache.MANIFEST
    content = tokens.read_bytes()
    if damage == "cut":
        tokens.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        tokens.write_bytes(content[:-90] + bytes([content[-90] ^ 1]) + content[-89:])
    elif damage == "lost":
        tokens.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "foreign":
        told = json.loads(manifest.read_text())
        told["identity"]["max_length"] += 1
        manifest.write_text(json.dumps(told))
    else:
        shutil.rmtree(entry)
        entry.write_bytes(b"?")
    samples, (warning, *rest) = outcome(file, cache)
    assert warning.startswith(f"the tokens kept in {entry} cannot be used (")
    assert warning.endswith("): they are made anew")
    assert (samples, rest) == plain
    assert outcome(file, cache) == plain, "and what was made is whole"


@pytest.mark.parametrize("processes", [1, 2])
def test_what_a_killed_process_left_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: TokenCache, processes: int
) -> None:
    """Guards against half of the data after kill -9, and against processes of the killed one that stay, and hold its
    lock: a start after it waited for them."""
    file = tmp_path / "data.jsonl"
    write_lines(file, RECORDS)
    cache = replace(cache, processes=processes)
    make, plain = token_cache.row_of, outcome(file)

    def hang(record: Tokenized) -> dict[str, Any]:
        if record.place.endswith("line 6"):
            (tmp_path / "reached").touch()
            time.sleep(60)
        return make(record)

    if not (child := os.fork()):
        token_cache.row_of = hang  # type: ignore[assignment]
        outcome(file, cache)
        os._exit(0)
    while not (tmp_path / "reached").exists():
        time.sleep(0.01)
    workers = psutil.Process(child).children(recursive=True)
    assert bool(workers) == (processes > 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not psutil.wait_procs(workers, timeout=20)[1], "they end with their parent"
    (left,) = entries(cache)
    assert left.suffix == ".new" and any(left.iterdir())
    start_s = time.monotonic()
    assert outcome(file, cache) == plain
    assert time.monotonic() - start_s < 30
    assert [entry.suffix for entry in entries(cache)] == [""]


def test_one_of_several_processes_tokenizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: TokenCache) -> None:
    """Guards a node of eight GPUs, where each process tokenized all data: the others read what the first has made."""
    file, log = tmp_path / "data.jsonl", tmp_path / "log"
    write_lines(file, RECORDS)
    make = token_cache._make

    def logged(*given: Any) -> Any:
        with log.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return make(*given)

    monkeypatch.setattr(token_cache, "_make", logged)
    plain, children = outcome(file), []
    for _ in range(3):
        if not (child := os.fork()):
            os._exit(0 if outcome(file, cache) == plain else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    assert len(log.read_text().splitlines()) == 1


def test_a_process_that_dies_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback of `datasets`, and against tokens without the part of the process that died."""
    monkeypatch.setattr(token_cache, "BATCH", 2)
    monkeypatch.setattr(token_cache, "tokenized", lambda *_: os._exit(9))
    file = tmp_path / "data.jsonl"
    write_lines(file, RECORDS)
    cache = TokenCache(folder=tmp_path / "cache", processes=2, small_bytes=0)
    said = str(outcome(file, cache)[0])
    assert said.startswith(f"training data '{file}' cannot be tokenized in 2 processes (")
    assert said.endswith("): free memory, or start on fewer CPUs, as with taskset")
    assert entries(cache) == []


def test_a_signal_ends_a_process_wherever_it_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a hang: the signal that ends a process came while it was starting, in code that swallowed the
    exception that it raised."""

    def swallow(*_: object) -> None:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(token_cache, "BATCH", 2)
    monkeypatch.setattr(token_cache, "tokenized", swallow)
    file = tmp_path / "data.jsonl"
    write_lines(file, RECORDS)
    cache = TokenCache(folder=tmp_path / "cache", processes=2, small_bytes=0)
    assert "cannot be tokenized in 2 processes" in str(outcome(file, cache)[0])


def test_a_folder_that_takes_nothing(tmp_path: Path) -> None:
    """Guards runs on machines whose cache is read-only or full: they train, and are told what it costs."""
    file = tmp_path / "data.jsonl"
    write_lines(file, RECORDS)
    samples, (warning, *rest) = outcome(file, TokenCache(folder=file / "cache", small_bytes=0))
    assert "cannot be kept in" in warning and "set HF_DATASETS_CACHE to a folder with room" in warning
    assert (samples, rest) == outcome(file)


def test_small_files_are_not_kept(tmp_path: Path) -> None:
    """Guards short runs against processes and files that cost more than they save."""
    file = tmp_path / "data.jsonl"
    write_lines(file, RECORDS)
    cache = TokenCache(folder=tmp_path / "cache")
    assert outcome(file, cache) == outcome(file)
    assert not (tmp_path / "cache").exists()


def test_tables_and_datasets_of_the_hub_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: TokenCache
) -> None:
    """Guards sources that are not lines, with columns that no sample is made of; and a dataset that has grown on the
    Hub, whose name stays."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(records.HfApi, "dataset_info", lambda *_, **__: None)
    loaded = datasets.load_dataset
    for number, text in enumerate(("abc", "abcd"), start=1):
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.table({"text": [text, "b"], "at": [date(2026, 1, 1)] * 2}), file)
        plain = [Sample(tokens=[*range(1, len(text) + 1), 0], is_label=[True] * (len(text) + 1))]
        plain += [Sample(tokens=[2, 0], is_label=[True] * 2)]
        table = loaded("parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "hub"))
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, table=table, **__: table)
        for source in (file, Path("some/data")):
            for _ in range(2):
                assert load_samples([source], tiny_tokenizer(), max_length=9, cache=cache) == plain
        assert len(entries(cache)) == 2 * number


@pytest.mark.filterwarnings("error")
def test_mapped_samples_become_the_same_rows(tmp_path: Path, cache: TokenCache) -> None:
    """Guards against a copy of all data in every process, and against torch's warning of memory that is read only."""
    file = tmp_path / "data.jsonl"
    write_lines(file, [{"prompt": "ab", "response": "cde"}, {"text": "xyz"}])
    plain, mapped = (load_samples([file], tiny_tokenizer(), max_length=9, cache=which) for which in (None, cache))
    assert mapped == plain and all(isinstance(sample.tokens, memoryview) for sample in mapped)
    drop = Drop(k=2, r=1.0, r_min=1.0, mask_id=60)
    one, other = (
        collate([[sample] for sample in samples], drop, [[torch.Generator()] for _ in samples])
        for samples in (plain, mapped)
    )
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.labels, other.labels)


def test_what_is_kept_can_be_measured_with(tmp_path: Path, cache: TokenCache) -> None:
    """Guards all trainings on large files: a prompt is cut from a kept sample, whose labels are in the file's memory,
    and that was a traceback."""
    source = tmp_path / "data.jsonl"
    write_lines(source, RECORDS[1:2])
    (plain,), (kept,) = (
        load_samples([source], tokenizer_with(), max_length=64, day=MONDAY, cache=each) for each in (None, cache)
    )
    assert isinstance(kept.is_label, memoryview) and prompt_of(kept, most=9) == prompt_of(plain, most=9) != []


def test_a_template_that_asks_the_clock_in_its_own_way_is_of_one_day(
    tmp_path: Path, cache: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards dates: such a template writes today's whatever day the run began, and yesterday's had been kept."""

    class Later(date):
        @classmethod
        def today(cls) -> date:
            return cls(2027, 1, 2)

    source = tmp_path / "data.jsonl"
    write_lines(source, [{"messages": TALK}])
    tokenizer = tokenizer_with("{% set f = '%d' %}" + TEMPLATE.replace("strftime_now('%d')", "strftime_now(f)"))
    outcome(source, cache, tokenizer=tokenizer)
    first = len(entries(cache))
    monkeypatch.setattr(token_cache, "date", Later)
    outcome(source, cache, tokenizer=tokenizer)
    assert (first, len(entries(cache))) == (1, 2)


def test_a_null_is_no_text(tmp_path: Path) -> None:
    """Guards tables with a column for each form: answers were split as plain text, without a word."""
    source, without = tmp_path / "nulls.jsonl", tmp_path / "without.jsonl"
    rows = [{"prompt": "ab", "response": "cdcdcdcdcdcdcd"}, {"messages": TALK}]
    write_lines(source, [{"text": None, **row} for row in rows])
    write_lines(without, rows)
    assert outcome(source) == outcome(without)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_pickles_cannot_hold_is_named(tmp_path: Path, cache: TokenCache, processes: int) -> None:
    """Guards records that are nested too deep for other processes: a traceback, or advice to free memory."""
    source = tmp_path / "data.jsonl"
    nested = '{"messages": ' + "[" * 900 + "]" * 900 + "}\n"
    source.write_text('{"text": "ab"}\n' * 4 + nested, encoding="utf-8")
    said, _ = outcome(source, replace(cache, processes=processes))
    assert isinstance(said, str) and "line 5: " in said


def test_a_tokenizer_that_cannot_be_written_is_a_warning(
    tmp_path: Path, cache: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards full disks: the library that writes tokenizers raises nothing but `Exception`."""
    source = tmp_path / "data.jsonl"
    write_lines(source, RECORDS)

    def full(*_: object, **__: object) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    found, said = outcome(source, cache)
    assert found == outcome(source)[0] and any("No space left on device" in line for line in said)


def test_sigterm_while_tokens_are_made_tidies_up(
    tmp_path: Path, cache: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards clusters: the processes of a start that was ended were left, with 350 MB."""
    source = tmp_path / "data.jsonl"
    write_lines(source, RECORDS)
    monkeypatch.setattr(token_cache, "row_of", lambda _: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
    with pytest.raises(SystemExit) as ended:
        outcome(source, cache)
    assert ended.value.code == 128 + signal.SIGTERM and entries(cache) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_file_name_that_is_no_text_is_kept_like_others(tmp_path: Path, cache: TokenCache) -> None:
    """Guards names of other encodings: a cache that wrote them as text could not."""
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    write_lines(source, RECORDS)
    assert outcome(source, cache) == outcome(source, cache) == outcome(source)
    assert len(entries(cache)) == 1
