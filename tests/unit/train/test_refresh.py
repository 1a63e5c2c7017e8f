"""A drafter that goes on learning from a log of rounds."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from paradraft.data import newest_answers
from paradraft.data.newest_answers import FEWEST, LoggedAnswer, newest_lines, split
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.train import refresh
from paradraft.train.refresh import Adaptation, Refresh
from paradraft.train.run.progress import Progress
from paradraft.train.run.provenance import RECORD, read_record
from tests.support.drafts import train_head

EXACT = Runtime(dtype="float64", compiled=False)
ANSWERS = 60
WORDS = ("hello", "world", "abc", "xyz", "the", "cat", "dog")


def quiet(_: object) -> None:
    pass


@pytest.fixture(scope="module")
def drafter(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that have learnt next to nothing."""
    folder = tmp_path_factory.mktemp("heads") / "medusa"
    train_head(family, "medusa", folder, k=3, steps=1, lr=1e-4)
    return folder


@pytest.fixture(scope="module")
def log(family: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an engine that decodes with it."""
    file = tmp_path_factory.mktemp("log") / "rounds.jsonl"
    with load(str(family / "target"), drafter="medusa", draft=str(drafter), k=3, runtime=EXACT) as engine:
        engine.log_rounds(file)
        generator = random.Random(0)
        prompts = ["".join(generator.choices(WORDS, k=3)) for _ in range(ANSWERS)]
        samplings = [Sampling(temperature=0.8, seed=seed) for seed in range(ANSWERS)]
        engine.generate(prompts, max_new_tokens=40, sampling=samplings)
    return file


def adaptation(drafter: Path, log: Path, out: Path, *settings: str, **more: Any) -> Adaptation:
    return Adaptation(
        drafter=drafter,
        log=log,
        out=out,
        refresh_every=30,
        window=ANSWERS,
        settings=("answer_tokens=16", *settings),
        **more,
    )


def refreshed(online: Adaptation, report: Any = quiet) -> Refresh:
    with online.locked():
        return online.refresh(report, quiet)


def in_use(online: Adaptation) -> Path:
    return online.folder_of(online.newest)


def test_a_better_drafter_replaces_the_one_before(drafter: Path, log: Path, tmp_path: Path) -> None:
    """Guards what is in use: the folder that `newest.json` names, whose run began with the drafter before."""
    online = adaptation(drafter, log, tmp_path / "out", "lr=1e-2", "steps=20")
    assert online.waiting == ANSWERS and in_use(online) == drafter
    reports: list[object] = []
    first = refreshed(online, reports.append)
    assert first.is_better and first.number == 1 and first.before < first.after
    assert first.before.acceptance_length is not None and "tokens per target pass" in first.in_words
    assert any(isinstance(report, Progress) for report in reports)
    assert online.waiting == 0 and in_use(online) == tmp_path / "out" / "refresh-0001"
    assert read_record(in_use(online))["recipe"]["start"] == str(drafter)
    again = adaptation(drafter, log, tmp_path / "out", "lr=1e-2", "steps=20")
    second = refreshed(again)
    assert second.number == 2 and second.before.held_out_loss == pytest.approx(first.after.held_out_loss)
    if second.is_better:
        assert read_record(in_use(again))["recipe"]["start"] == str(tmp_path / "out" / "refresh-0001")
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left <= {"newest.json", "adapt.lock", "refresh-0001", "refresh-0002"}, "no text of a user is left"


def test_a_drafter_that_is_not_better_is_not_taken(drafter: Path, log: Path, tmp_path: Path) -> None:
    """Guards a refresh that harms: far too large steps, and the drafter stays."""
    online = adaptation(drafter, log, tmp_path / "out", "lr=30", "steps=4", "max_grad_norm=null")
    result = refreshed(online)
    assert not result.is_better and result.after == result.before and "not better" in result.in_words
    assert in_use(online) == drafter and online.waiting == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"newest.json", "adapt.lock"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no memory")], ids=["Ctrl-C", "mistake"])
def test_a_refresh_that_is_stopped_leaves_nothing(
    drafter: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Guards users' texts, and a half-trained drafter in use."""
    online = adaptation(drafter, log, tmp_path / "out")

    def stopped(recipe: Any, *_: object, **__: object) -> bool:
        (tmp_path / "out" / "refresh-0001").mkdir()
        files = [source.path for source in recipe.data]
        assert {stat.S_IMODE(file.parent.stat().st_mode) for file in files} == {0o700}
        raise error

    monkeypatch.setattr(refresh.launch, "train", stopped)
    with pytest.raises(type(error)):
        refreshed(online)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"newest.json", "adapt.lock"}
    assert online.waiting == ANSWERS and in_use(online) == drafter


def test_the_recipe_is_the_drafters_own(
    drafter: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the settings that decide what a drafter is, and the data: no answer is both learnt and measured."""
    monkeypatch.setattr(newest_answers, "SMALL_BYTES", 8000)
    taken: list[Any] = []
    sizes: list[int] = []

    def train(recipe: Any, *_: object, **__: object) -> bool:
        taken.append((recipe, [[json.loads(line) for line in source.path.open()] for source in recipe.data]))
        sizes.extend(source.path.stat().st_size for source in recipe.data)
        raise ValueError("enough")

    monkeypatch.setattr(refresh.launch, "train", train)
    with pytest.raises(ValueError, match="enough"):
        refreshed(adaptation(drafter, log, tmp_path / "out", "weight_decay=0.25"))
    recipe, parts = taken[0]
    learnt, held_out = (
        [line for part, source in zip(parts, recipe.data, strict=True) if source.weight == weight for line in part]
        for weight in (1, 0)
    )
    assert len(sizes) > 3 and max(sizes) < 8000, "no token cache keeps a text"
    own = read_record(drafter)["recipe"]
    assert (recipe.k, recipe.max_length, recipe.model) == (own["k"], own["max_length"], own["model"])
    assert recipe.lr == own["lr"] / 2 and recipe.weight_decay == 0.25
    prompts = [{tuple(line["tokens"][: line["prompt_tokens"]]) for line in lines} for lines in (learnt, held_out)]
    assert prompts[0].isdisjoint(prompts[1]) and len(learnt) + len(held_out) == ANSWERS


def test_mistakes(drafter: Path, log: Path, tmp_path: Path, family: Path) -> None:
    """Guards a traceback in a process that nobody watches."""
    with pytest.raises(ValueError, match=rf"draft' has no {RECORD}"):
        adaptation(family / "draft", log, tmp_path / "out")
    with pytest.raises(ValueError, match=f"refresh_every=3: a refresh needs at least {FEWEST}"):
        Adaptation(drafter=drafter, log=log, out=tmp_path / "out", refresh_every=3)
    with pytest.raises(ValueError, match="window=40: use at least the 64"):
        Adaptation(drafter=drafter, log=log, out=tmp_path / "out", window=40)
    refreshed(adaptation(drafter, log, tmp_path / "out", "lr=1e-9"))
    train_head(family, "medusa", tmp_path / "another", k=3, steps=1)
    with pytest.raises(ValueError, match="has refreshes of another drafter"):
        adaptation(tmp_path / "another", log, tmp_path / "out")
    (tmp_path / "out" / "newest.json").write_text("{")
    with pytest.raises(ValueError, match=r"newest.json cannot be read"):
        adaptation(drafter, log, tmp_path / "out")
    (tmp_path / "bad.jsonl").write_text('{"tokens": [1, 2]}\n' * FEWEST)
    online = adaptation(drafter, tmp_path / "bad.jsonl", tmp_path / "bad")
    with (
        pytest.raises(ValueError, match="the log has 0 answers"),
        pytest.warns(UserWarning, match=f"{FEWEST} lines of no"),
    ):
        refreshed(online)
    with pytest.raises(ValueError, match="unknown model"):
        adaptation(drafter, log, tmp_path / "no", target="no/such/model/here")


def test_a_log_that_begins_anew_is_read_from_its_beginning(drafter: Path, log: Path, tmp_path: Path) -> None:
    """Guards against waiting for ever after the log was moved away."""
    file = tmp_path / "rounds.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines))
    online = adaptation(drafter, file, tmp_path / "out", "lr=1e-9")
    refreshed(online)
    file.write_bytes(b"".join(lines[:5]) + lines[5][:-1])
    assert online.waiting == 5
    file.unlink()
    assert online.waiting == 0


@pytest.mark.parametrize("piece", [7, 50, 2**20])
@pytest.mark.parametrize("torn", [b"", b"torn"], ids=["whole", "torn"])
def test_the_newest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, torn: bytes) -> None:
    """Guards lines at the edges of pieces, and one that is being written."""
    monkeypatch.setattr(newest_answers, "PIECE", piece)
    generator = random.Random(piece)
    for count in (0, 1, 5, 40):
        lines = [b"x" * generator.randrange(30) + b"\n" for _ in range(count)]
        (tmp_path / "log").write_bytes(b"".join(lines) + torn)
        for most in (1, 3, 100):
            assert newest_lines(tmp_path / "log", most) == lines[-most:]


def lines_of(prompts: list[int]) -> list[LoggedAnswer]:
    rest = b'"prompt_tokens": 1, "begins": "", "rounds": [], "depths": [], "accepted": []'
    pairs = zip(prompts, range(999), strict=False)
    texts = [b'{"tokens": [%d, %d], %s}\n' % (*pair, rest) for pair in pairs]
    return [line for line in map(LoggedAnswer.of, texts) if line is not None]


@pytest.mark.parametrize("count", [FEWEST, 64, 256])
@pytest.mark.parametrize("prompts", [1, 5, 999])
def test_what_is_held_out_is_not_learnt(count: int, prompts: int) -> None:
    """Guards the measure: an answer is on one side only, the newest come first, and with many prompts a prompt stays on
    its side as the log grows."""
    lines = lines_of([index % prompts for index in range(count)])
    learnt, held_out = split(lines)
    assert len(learnt) >= count // 2 and len(held_out) >= min(6, count // 8)
    assert not {line.text for line in learnt} & {line.text for line in held_out}
    assert held_out == sorted(held_out, key=lines.index, reverse=True)
    more = lines_of([index % prompts for index in range(count + 99)])
    if prompts == 999 and count >= 64:
        assert not {line.text for line in split(more)[0]} & {line.text for line in held_out}


def test_too_few_answers() -> None:
    with pytest.raises(ValueError, match=f"the log has 3 answers to learn, a refresh needs {FEWEST}"):
        split(lines_of([1, 2, 3]))
    with pytest.raises(ValueError, match="too much alike"):
        split(lines_of([1])[:1] * FEWEST)


def test_another_target_is_fitted(family: Path, drafter: Path, log: Path, tmp_path: Path) -> None:
    """Guards a fine-tuned target: its states and answers are learnt and measured, and not those of its base."""
    online = adaptation(drafter, log, tmp_path / "out", target=str(family / "draft"))
    recipe = online._recipe()
    assert (recipe.model, recipe.measured_with) == (str(family / "draft"),) * 2
    with pytest.raises(ValueError, match="'model=x': a refresh sets model itself"):
        adaptation(drafter, log, tmp_path / "out", "model=x")


def test_files_of_others_stay(drafter: Path, log: Path, tmp_path: Path) -> None:
    """Guards a folder of the user's that has names like ours."""
    (tmp_path / "mine" / "answers").mkdir(parents=True)
    with pytest.raises(ValueError, match="mine' holds files of something else"):
        adaptation(drafter, log, tmp_path / "mine")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file' holds files of something else"):
        adaptation(drafter, log, tmp_path / "file")


def test_one_process_at_a_time(drafter: Path, log: Path, tmp_path: Path) -> None:
    online = adaptation(drafter, log, tmp_path / "out")
    with online.locked(), pytest.raises(ValueError, match="is in use by another run"), online.locked():
        pass
