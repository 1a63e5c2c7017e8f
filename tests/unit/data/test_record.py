"""What `paradraft record` keeps: the likeliest tokens at every place of an answer, as one pass gives them."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paradraft import load
from paradraft.core import Request
from paradraft.data.record import RecordProgress, read_text, record
from paradraft.drafters.recycle import Config, KnownPlaces
from paradraft.engine.engine import Engine
from paradraft.formats.likely_table import LikelyCounts, LikelyTable, read_table
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.sources import recorded

FACTS = {"answers": "1", "tokens": "2"}
RUNTIME = Runtime(dtype="float64", compiled=False)


@pytest.fixture(scope="module")
def plain(family: Path) -> Engine:
    return load(str(family / "target"), drafter="none", runtime=RUNTIME)


def shares_after(engine: Engine, tokens: list[int], number: int) -> dict[int, float]:
    """The likeliest tokens after a text, and their probabilities among each other."""
    logits = engine.target.lm.model(torch.tensor([tokens])).logits[0, -1, : engine.target.vocab_size]
    best = logits.topk(number)
    return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))


def without_equal_pairs(length: int) -> list[int]:
    """Random tokens, no two of which follow each other twice."""
    chooser, tokens = random.Random(length), [1]
    while len(tokens) < length:
        known = set(itertools.pairwise(tokens))
        tokens.append(chooser.choice([token for token in range(1, 51) if (tokens[-1], token) not in known]))
    return tokens


@pytest.mark.parametrize("length", [3, 20, 120])
def test_every_place_of_an_answer_is_read(plain: Engine, length: int) -> None:
    """Guards texts that are longer than a pass, and the first and last place of an answer."""
    tokens = without_equal_pairs(length)
    counts = LikelyCounts(most=4)
    read_text(plain.target, tokens, counts, first=2)
    table = counts.table({})
    for at in range(2, length):
        found = table.find((tokens[at - 2], tokens[at - 1]), 2)
        assert found is not None
        shares = {token: math.exp(share) for token, share in zip(*found, strict=True)}
        assert shares == pytest.approx(shares_after(plain, tokens[:at], 4), rel=1e-4)
    assert table.find((tokens[-2], tokens[-1]), 2) is None, "nothing follows the last token"


def test_shares_of_a_token_are_those_of_all_its_places(tmp_path: Path) -> None:
    """Guards sums, which the next run goes on with, against means of means and rounding; and the file."""
    first, whole = LikelyCounts(most=3), LikelyCounts(most=3)
    for counts in (first, whole):
        counts.add((3, 4), [7, 8], [math.log(3), 0.0])
    first.table(FACTS).write(tmp_path / "table")
    known = read_table(tmp_path / "table")
    assert known.facts == FACTS and (tmp_path / "table").stat().st_mode & 0o777 == 0o600
    second = LikelyCounts(most=3, known=known)
    for counts in (second, whole):
        counts.add((5, 4), [8, 9], [0.0, 0.0])
    assert second.table({}).find((0, 4), 1) == whole.table({}).find((0, 4), 1)
    tokens, shares = second.table({}).find((0, 4), 1) or ([], [])
    assert tokens[:2] in ([7, 8], [8, 7]) and [math.exp(each) for each in shares] == pytest.approx([0.75, 0.75, 0.5])
    assert second.table({}).find((5, 4), 2) is not None and second.table({}).find((4, 5), 2) is None


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    """Guards users against a corpus, a model or a missing file as the table."""
    (tmp_path / "text").write_text("no table", encoding="utf-8")
    with pytest.raises(ValueError, match="is no table: name a file that paradraft record has written"):
        read_table(tmp_path / "text")
    with pytest.raises(ValueError, match="does not exist"):
        Config(table=str(tmp_path / "gone"))


@pytest.mark.parametrize(
    "change",
    [
        {"keys": np.array([2, 1])},
        {"keys": np.array([1.0, 2.0])},
        {"keys": np.array(1)},
        {"tokens": np.array([[5], [6], [7]], np.int32)},
        {"tokens": np.array([5, 6], np.int32)},
        {"tokens": np.array([[5], [-1]], np.int32)},
        {"tokens": np.array([[5], [6]], np.float32)},
        {"shares": np.array([[0.5], [0.0]], np.float32)},
        {"shares": np.array([[0.5], [-0.1]], np.float32)},
        {"shares": np.array([[0.5], [np.nan]], np.float32)},
        {"facts": {"answers": "1"}},
        {"facts": {**FACTS, "tokens": "many"}},
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Guards answers against a table that fails in the middle of one."""
    whole: dict[str, Any] = {"keys": np.array([1, 2]), "tokens": np.array([[5], [6]], np.int32), "facts": FACTS}
    whole["shares"] = np.array([[0.5], [0.25]], np.float32)
    LikelyTable(**whole).write(tmp_path / "whole")
    assert read_table(tmp_path / "whole").find((9, 2), 1) == ([6], [math.log(0.25)])
    LikelyTable(**(whole | change)).write(tmp_path / "damaged")
    with pytest.raises(ValueError, match="is no table"):
        read_table(tmp_path / "damaged")


def test_a_table_of_other_tokens_is_refused(family: Path, tmp_path: Path) -> None:
    """Guards passes against ids that the target lacks."""
    counts = LikelyCounts(most=1)
    counts.add((3, 4), [10**6], [0.0])
    counts.table(FACTS).write(tmp_path / "table")
    with pytest.raises(ValueError, match="has tokens that the target lacks: it is of another model"):
        load(str(family / "target"), drafter=f"recycle:table={tmp_path / 'table'}", runtime=RUNTIME)


def test_a_model_of_the_hub_has_a_name(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards targets that are named by their Hugging Face id: the files in its cache count, as for a folder."""
    config = str(family / "target" / "config.json")
    monkeypatch.setattr(recorded, "locate", lambda name, role: name)
    monkeypatch.setattr(recorded, "try_to_load_from_cache", lambda name, file: config if name == "org/known" else None)
    assert recorded.table_name("org/known") == recorded.table_name(str(family / "target"))
    assert recorded.table_name("org/unknown") is None and recorded.recorded_for("org/unknown") is None


def test_prompts_that_are_too_long_are_left_out(plain: Engine) -> None:
    """Guards a night's work against one prompt, and a run without any that fits against an empty table."""
    written: list[LikelyTable] = []
    settings: dict[str, Any] = {"known": None, "facts": {}, "max_new_tokens": 12, "sampling": Sampling()}
    settings |= {"write": written.append, "report": lambda progress: None}
    table = record(plain, [[1] * 120, [5, 6, 7]], **settings)
    assert table.facts == {"answers": "2", "tokens": "12"} and len(written) == 1
    with pytest.raises(ValueError, match="no prompt fits: the target has room for 128 tokens"):
        record(plain, [[1] * 120], **settings)
    assert len(written) == 1


def test_a_run_goes_on_where_one_was_stopped(plain: Engine) -> None:
    """Guards the hours of a table: what was read is written when the work stops, and the next run asks what comes next;
    both together are as one run."""
    prompts, settings = [[5, 6, 7], [8, 9], [1, 2, 3]], Sampling(temperature=0.8, seed=3)

    def run(prompts: list[list[int]], known: LikelyTable | None, stop: int | None = None) -> LikelyTable:
        written: list[LikelyTable] = []

        def report(progress: RecordProgress) -> None:
            if progress.answers == stop:
                raise KeyboardInterrupt

        try:
            record(
                plain, prompts, known=known, facts={"target": "t"}, max_new_tokens=12, sampling=settings,
                write=written.append, report=report,
            )  # fmt: skip
        except KeyboardInterrupt:
            assert stop is not None
        return written[-1]

    whole, begun = run(prompts, None), run(prompts, None, stop=2)
    assert begun.facts == {"target": "t", "answers": "2", "tokens": "24"}
    both = run(prompts[2:], begun)
    assert both.facts == whole.facts == {"target": "t", "answers": "3", "tokens": "36"}
    assert both.keys.tolist() == whole.keys.tolist() and len(whole.keys) > 20
    assert both.shares.sum(1).tolist() == pytest.approx(whole.shares.sum(1).tolist(), rel=0.02)


def test_the_row_comes_before_the_table() -> None:
    """Guards the order of what is known: two tokens before one, and of each the row's own pass before the table."""
    counts = LikelyCounts(most=8)
    counts.add((3, 4), [10], [0.0])
    counts.add((5, 6), [11], [0.0])
    row = KnownPlaces(Request(tokens=[3, 4]), Config(floor=0.0), counts.table({}), has_noise=False)
    assert [node.token for node in row.draft(1, None)] == [10]
    row.commit([9, 6], None, 0)
    assert [node.token for node in row.draft(1, None)] == [11], "by the last token alone"
