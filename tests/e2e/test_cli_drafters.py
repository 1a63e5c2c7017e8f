"""`paradraft drafters` as a user meets it: what fits a target, measured, and what else there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paradraft.drafters import drafter_names
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake
from tests.support.jsonl import write_lines

QUICK = ["--max-new-tokens", 8, "--no-compile", *EXACT]


def test_all_drafters_are_measured_or_have_a_reason(
    family: Path, paradraft: Paradraft, tmp_path: Path, quick_speeds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards users, who ask with their own work, against a drafter in neither list, and against another text."""
    monkeypatch.chdir(tmp_path)
    write_lines(Path("mine.jsonl"), [{"prompt": "abc"}, {"prompt": "abab"}])
    more = ["--draft", family / "pard", "-k", 3, "--prompts", "mine.jsonl", "--json", "out.json"]
    found = paradraft("drafters", family / "target", *QUICK, *more)
    assert found.code == 0, found.err
    file = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert [*file["methods"]] == ["ar", "pard", "suffix", "ngram", "recycle", "suffix+recycle"]
    assert all(figures["identical_to_ar"] for figures in file["methods"].values())
    assert all(file["methods"][name]["lengths"] == "expected" for name in ("pard", "suffix"))
    others = [name for names in file["not_measured"].values() for name in names]
    assert {*others, *file["methods"], "none"} == {*drafter_names(), "ar", "suffix+recycle"}
    assert "forced: for requests with a JSON schema" in found.out and "  exit, lookahead: " in found.out
    assert "2 requests" in found.out and json.loads(found.out.splitlines()[-1]) == file["methods"]


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("shape:tiny-target", [], "'shape:tiny-target' reads no texts, so what drafts well for it means nothing"),
        ("pocket", ["--num-prompts", 7], "num_prompts=7: use 1 to 6"),
        ("pocket", ["--draft", "gone"], "unknown model 'gone'"),
    ],
)
def test_mistakes(paradraft: Paradraft, target: str, more: list[object], message: str) -> None:
    """Guards users: one line before any weights are loaded."""
    assert_mistake(paradraft("drafters", target, *more), message)
