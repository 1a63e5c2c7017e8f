"""The log of rounds: what it says of answers, and what training makes of it."""

from __future__ import annotations

import json
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.core import Request
from paradraft.data.dataset import load_samples
from paradraft.data.mix import Source
from paradraft.data.samples import BEGAN, REFUSED, Sample
from paradraft.data.tokens.token_cache import TokenCache
from paradraft.decode.generation import Generation
from paradraft.decode.round_log import COMPARED, record_of
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.train.objectives.batch import Drop, collate
from paradraft.train.objectives.losses import IGNORED
from tests.conftest import tiny_tokenizer

EXACT = Runtime(dtype="float64", compiled=False)
PROMPTS = ["helloworld", "abcabc", "hello"]
TREES: list[dict[str, Any]] = [{}, {"tree": 6}]


def engine_of(family: Path, **settings: Any) -> Engine:
    settings = {"drafter": "autoregressive", "k": 3, "lengths": "fixed"} | settings
    return load(str(family / "target"), draft=str(family / "draft"), runtime=EXACT, **settings)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("settings", TREES, ids=str)
def test_rounds_are_those_of_the_answers(family: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Guards places off by one or of another answer: each round begins where the one before ended, and its accepted
    tokens and the target's own lead to the next."""
    with engine_of(family, **settings) as engine:
        engine.log_rounds(tmp_path / "rounds.jsonl")
        sampling = [Sampling(temperature=0.8, seed=seed) for seed in range(3)]
        results = engine.generate(PROMPTS, max_new_tokens=20, sampling=sampling)
        written = {tuple(line["tokens"]): line for line in lines(tmp_path / "rounds.jsonl")}
    assert len(written) == len(results) and stat.S_IMODE((tmp_path / "rounds.jsonl").stat().st_mode) == 0o600
    refused = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens = tiny_tokenizer()(prompt)["input_ids"]
        line = written[(*tokens, *result.tokens)]
        assert line["prompt_tokens"] == len(tokens)
        assert line["begins"] == (prompt + result.text)[:COMPARED]
        assert line["rounds"][0] >= len(tokens) - 1 and line["rounds"] == sorted(set(line["rounds"]))
        for root, following, accepted in zip(line["rounds"], line["rounds"][1:], line["accepted"], strict=False):
            assert following >= root + accepted + 1, "a plain round may lie between"
        assert all(
            0 <= accepted <= depth <= 3 for accepted, depth in zip(line["accepted"], line["depths"], strict=True)
        )
        refused += sum(accepted < depth for accepted, depth in zip(line["accepted"], line["depths"], strict=True))
    assert refused


def result_ends(line: dict[str, Any]) -> list[int]:
    return [root + accepted + 1 for root, accepted in zip(line["rounds"], line["accepted"], strict=True)]


def test_all_rounds_of_a_chain_join(family: Path, tmp_path: Path) -> None:
    """Guards rounds that are left out: with a fixed length every round drafts, so they cover the whole answer."""
    with engine_of(family) as engine:
        engine.log_rounds(tmp_path / "rounds.jsonl")
        for text in engine.stream("helloworld", max_new_tokens=24):
            assert text is not None
    (line,) = lines(tmp_path / "rounds.jsonl")
    ends = result_ends(line)
    assert line["rounds"][1:] == ends[:-1]
    assert line["rounds"][0] <= line["prompt_tokens"] and ends[-1] >= len(line["tokens"]) - 2


def test_plain_answers_are_logged_without_rounds(family: Path, tmp_path: Path) -> None:
    """Guards a drafter that seldom pays, and needs answers to learn most: they do not depend on what it drafts."""
    with load(str(family / "target"), runtime=EXACT, drafter="none") as engine:
        engine.log_rounds(tmp_path / "rounds.jsonl")
        result = engine.generate("hello", max_new_tokens=4)
    (line,) = lines(tmp_path / "rounds.jsonl")
    assert line["tokens"][line["prompt_tokens"] :] == result.tokens and line["rounds"] == []
    source = Source(path=tmp_path / "rounds.jsonl")
    (sample,) = load_samples([source], tiny_tokenizer(), max_length=64, cache=TokenCache(folder=tmp_path / "cache"))
    assert list(sample.tokens) == line["tokens"] and not any(sample.rounds)


def test_a_full_log_is_put_aside(family: Path, tmp_path: Path) -> None:
    """Guards a disk against a server that runs for months: two files stay, and no line is lost in between."""
    file, written = tmp_path / "rounds.jsonl", []
    with engine_of(family) as engine:
        engine.log_rounds(file, most_bytes=300)
        for index in range(6):
            engine.generate("hello", max_new_tokens=20, sampling=Sampling(temperature=0.9, seed=index))
            written += [line for name in (file, tmp_path / "rounds.jsonl.1") if name.exists() for line in lines(name)]
    assert len({tuple(line["tokens"]) for line in written}) == 6
    assert {path.name for path in tmp_path.iterdir()} <= {"rounds.jsonl", "rounds.jsonl.1"}
    assert (tmp_path / "rounds.jsonl.1").stat().st_size < 900


def test_a_full_disk_ends_the_log_and_not_the_answer(family: Path, tmp_path: Path) -> None:
    """Guards answers of users against a file for training."""
    with engine_of(family) as engine:
        with pytest.raises(ValueError, match=r"rounds='.*nowhere.*' cannot be written: No such file"):
            engine.log_rounds(tmp_path / "nowhere" / "rounds.jsonl")
        engine.log_rounds("/dev/full")
        with pytest.warns(UserWarning, match=r"rounds are no longer written to /dev/full: No space left"):
            assert engine.generate("hello", max_new_tokens=6).tokens
        assert engine.generate("hello", max_new_tokens=6).tokens
    with (
        engine_of(family, gamma=2, k=2) as ahead,
        pytest.raises(ValueError, match="rounds: with gamma drafts begin before rounds do, leave gamma out"),
    ):
        ahead.log_rounds(tmp_path / "rounds.jsonl")


def test_the_file_can_be_moved_away(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what users wrote: a file that is made again, in the folder in which it was, is its owner's alone too."""
    monkeypatch.chdir(tmp_path)
    with engine_of(family) as engine:
        engine.log_rounds("rounds.jsonl")
        engine.generate("hello", max_new_tokens=6)
        (tmp_path / "rounds.jsonl").rename(tmp_path / "first.jsonl")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        engine.generate("hello", max_new_tokens=6)
    assert lines(tmp_path / "first.jsonl") == lines(tmp_path / "rounds.jsonl")
    assert stat.S_IMODE((tmp_path / "rounds.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("length", [30, 200_000])
def test_a_line_that_was_not_finished_is_removed(family: Path, tmp_path: Path, length: int) -> None:
    """Guards the log against the end of an earlier process, and files that are something else."""
    file, whole = tmp_path / "rounds.jsonl", json.dumps(LINE) + "\n"
    file.write_text(whole + '{"tokens":[' + "1" * length)
    with engine_of(family) as engine:
        engine.log_rounds(file)
        assert file.read_text() == whole
        engine.generate("hello", max_new_tokens=6)
        assert len(lines(file)) == 2
        file.write_text("notes")
        engine.log_rounds(file)
        assert file.read_text() == "notes"


def test_an_end_among_accepted_tokens_refuses_nothing() -> None:
    """Guards anchors of refused rounds against the last round of every answer: a draft that is right beyond the end."""
    generation = Generation(Request(id=0, tokens=[5, 6, 7], max_new_tokens=9, eos_ids=frozenset([2])))
    generation.emit([8, 9, 4], 2, drafted=3, depth=3)
    generation.emit([8], 0)
    generation.emit([8, 2, 9, 9], 3, drafted=3, depth=3)
    assert record_of(generation, tiny_tokenizer()) == {
        "tokens": [5, 6, 7, 8, 9, 4, 8, 8, 2], "prompt_tokens": 3, "begins": "efghidhhb", "rounds": [2, 6],
        "depths": [3, 2], "accepted": [2, 2],
    }  # fmt: skip


LINE = {
    "tokens": [5, 6, 7, 8, 9, 10, 11], "prompt_tokens": 3, "begins": "efghijk", "rounds": [2, 4], "depths": [3, 2],
    "accepted": [1, 2],
}  # fmt: skip


def samples_of(file: Path, anchors: str, *, cached: Path | None = None, max_length: int = 99) -> list[Sample]:
    cache = None if cached is None else TokenCache(folder=cached, small_bytes=0, processes=1)
    source = Source.model_validate({"path": file, "anchors": anchors})
    return load_samples([source], tiny_tokenizer(), max_length=max_length, cache=cache)


@pytest.mark.parametrize("is_cached", [False, True])
def test_drafts_are_trained_where_rounds_began(tmp_path: Path, is_cached: bool) -> None:
    """Guards the anchors on their way from a file, also through the token cache, beside records without rounds."""
    file, cached = tmp_path / "rounds.jsonl", tmp_path / "cache" if is_cached else None
    other = LINE | {"tokens": [5, 6, 7, 8], "begins": "efgh", "rounds": [2], "depths": [1], "accepted": [1]}
    file.write_text("".join(json.dumps(line) + "\n" for line in (LINE, other, LINE)))
    for anchors, expected in (
        ("all", [[0, 0, 1, 1, 1, 1], [0, 0, 1], [0, 0, 1, 1, 1, 1]]),
        ("rounds", [[0, 0, 1, 0, 1, 0], [0, 0, 1], [0, 0, 1, 0, 1, 0]]),
        ("refused", [[0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]]),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            samples = samples_of(file, anchors, cached=cached)
        said = [str(each.message) for each in caught if "such round" in str(each.message)]
        assert said == ([f"{file}: 1 of 3 answers have no such round"] if anchors == "refused" else [])
        assert [sample.may_draft().astype(int).tolist() for sample in samples] == expected, anchors
        assert list(samples[0].is_label) == [0, 0, 0, 1, 1, 1, 1]
    (cut, *_) = samples_of(file, "rounds", max_length=5)
    assert list(cut.tokens) == LINE["tokens"][:5] and cut.may_draft().astype(int).tolist() == [0, 0, 1, 0]
    file.write_text(json.dumps(other) + "\n")
    with pytest.raises(ValueError, match="anchors=refused: no answer has such a round"):
        samples_of(file, "refused", cached=cached)


@pytest.mark.parametrize("first", [0, 1])
def test_only_drafts_of_rounds_have_labels(first: int) -> None:
    """Guards drafts of other places, first tokens too, and prompt tokens, which begin a token before the root; rare
    anchors keep all their rows."""
    flags = [0, 0, BEGAN, 0, REFUSED, 0, 0]
    sample = Sample(tokens=range(5, 12), is_label=[False] * 3 + [True] * 4, rounds=flags, least_round=BEGAN)
    drop = Drop(k=3, r=0.5, r_min=0.1, mask_id=60, first=first)
    batch = collate([[sample]], drop, [[torch.Generator().manual_seed(0)]])
    learnt = batch.labels[0] != IGNORED
    places = sorted(
        zip((batch.positions - batch.depths)[0][learnt].tolist(), batch.depths[0][learnt].tolist(), strict=True)
    )
    # The first token of the answer has no round that begins a token before it: the prompt ends there.
    assert places == ([(2, 0), (2, 1), (2, 2), (4, 0), (4, 1)] if first == 0 else [(3, 0), (3, 1), (3, 2)])
    assert int((batch.depths[0] == 0).sum()) == 6, "all tokens are read"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"text": "hello"}, r"anchors=rounds is for a log of rounds, which --rounds writes"),
        (LINE | {"rounds": [1, 4]}, "a round begins at token 1"),
        (LINE | {"rounds": [2, 7]}, "a round begins at token 7"),
        (LINE | {"tokens": [5, -1, 7, 8, 9, 10, 11]}, "whole numbers from 0 on"),
        (LINE | {"tokens": [5, "a", 7, 8, 9, 10, 11]}, "whole numbers from 0 on"),
        (LINE | {"depths": [1]}, "as many depths and accepted as rounds"),
        (LINE | {"accepted": [4, 2]}, "the round at token 2 accepts 4 tokens of 3"),
        (
            LINE | {"begins": "efgh jk"},
            r"ids of the log are of another tokenizer, here .* 'efghijk' and not with 'efgh ",
        ),
        (LINE | {"tokens": [5, 6, 7, 8, 9, 10, 99]}, "are of another tokenizer"),
    ],
)
def test_broken_logs_are_refused(tmp_path: Path, line: dict[str, Any], told: str) -> None:
    file = tmp_path / "rounds.jsonl"
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=told):
        samples_of(file, "rounds")
