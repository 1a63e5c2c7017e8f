"""Names of methods in tables and pictures, with folders that are too long for them."""

from __future__ import annotations

from typing import Any

from paradraft.bench.labels import LABELS, full_paths, labels
from paradraft.bench.report.page import page
from paradraft.bench.report.plot import description
from paradraft.bench.report.summary import notes
from paradraft.bench.spec import Method
from paradraft.drafters import drafter_names, takes_draft, traits_of
from paradraft.engine.speculation import Speculation
from tests.support.bench_result import figures, result

HOME = "/home/somebody/experiments/2026-11-24"


def named(*specs: str) -> dict[str, dict[str, Any]]:
    return {spec: figures(spec.partition(":")[0]) for spec in specs}


def test_long_folders_are_shortened_and_told_in_full() -> None:
    """Guards against names that take half of a table, and against folders that nobody can find again."""
    methods = named(f"pard:draft={HOME}/run/final:k=4", "ar")
    assert list(labels(methods).values()) == ["PARD, …/run/final, k=4", "AR+"]
    assert full_paths(methods) == [f"…/run/final: {HOME}/run/final"] == notes(methods)[:1]


def test_short_folders_and_ids_stay_as_they_are() -> None:
    """Guards names that can be read, and those of Hugging Face, whose two parts belong together."""
    methods = named("pard:draft=build/demo/pard", "pard:draft=someone/a-model-with-quite-a-long-name-4b")
    assert list(labels(methods).values()) == [
        "PARD, build/demo/pard",
        "PARD, someone/a-model-with-quite-a-long-name-4b",
    ]
    assert full_paths(methods) == []


def test_shortened_folders_stay_unlike_each_other() -> None:
    """Guards two drafts of one run that would have one name."""
    methods = named(
        *(f"pard:draft={HOME}/{run}/pard/step-400" for run in ("first", "second")), "pard:draft=pard/step-400"
    )
    assert list(labels(methods).values()) == [
        "PARD, …/first/pard/step-400", "PARD, …/second/pard/step-400", "PARD, pard/step-400",
    ]  # fmt: skip
    assert len(set(labels(methods).values())) == 3
    nested = named(f"pard:draft={HOME}/a/b", f"pard:draft=/other/place{HOME}/a/b")
    assert len(set(labels(nested).values())) == 2


def test_drafter_settings_that_are_folders_are_shortened_too() -> None:
    """Guards `autoregressive:prompts=FOLDER`."""
    assert list(labels(named(f"autoregressive:prompts={HOME}/ppd/best")).values()) == ["VSD, prompts=…/ppd/best"]


def test_page_and_picture_have_the_same_names() -> None:
    """Guards charts whose names push the bars aside, and a page that does not say what was measured."""
    found = result()
    spec = f"pard:draft={HOME}/run/final"
    found["methods"][spec] = figures("pard")
    assert "PARD, …/run/final: " in description(found["methods"])
    assert "draft=/home" not in page(found) and f"…/run/final: {HOME}/run/final" in page(found)


def test_a_method_is_known_by_its_label() -> None:
    """Guards whoever types what a table shows: VSD, n-gram, AR+."""
    for name, label in LABELS.items():
        assert Method.parse(label).name == name
    assert Method.parse("n-gram:max_ngram=3").speculation == Speculation(drafter="ngram:max_ngram=3", lengths="fixed")
    known = {name: label for name in drafter_names() if (label := traits_of(name).label) is not None}
    assert known == {"autoregressive": "VSD", "pard": "PARD", "pard2": "PARD-2", "dflash": "DFlash", "ngram": "n-gram"}
    for name, label in known.items():
        assert Method.parse(label).name == name
        assert Speculation(drafter=label).drafter == name
        assert takes_draft(label) == takes_draft(name)
