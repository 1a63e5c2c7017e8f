"""The K of each batch size, as a server reads it from a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paradraft.engine.speculation import Speculation
from paradraft.plan.plan_file import read_chains

ARGUMENTS = {"target": "a/target", "drafter": "pard", "draft": "a/draft", "verify": "match"}
SPECULATION = Speculation(drafter="pard", draft="a/draft")


def written(folder: Path, **changed: Any) -> Path:
    file = folder / "plan.json"
    file.write_text(json.dumps({"arguments": ARGUMENTS, "chains": {"1": 6, "8": 0}} | changed), encoding="utf-8")
    return file


def test_the_chains_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the numbers, and plans that name the same things otherwise: another path, a setting's default."""
    assert read_chains(written(tmp_path), "a/target", SPECULATION) == {1: 6, 8: 0}
    (tmp_path / "a" / "draft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    elsewhere = Speculation(drafter="pard", draft=str(tmp_path / "a" / "draft"))
    assert read_chains(written(tmp_path), "a/target", elsewhere) == {1: 6, 8: 0}
    pocket = {"target": "pocket", "drafter": "ngram", "draft": None, "verify": "match"}
    asked = Speculation(drafter="ngram:max_ngram=3")
    assert read_chains(written(tmp_path, arguments=pocket), "pocket", asked) == {1: 6, 8: 0}
    assert read_chains(written(tmp_path, arguments=ARGUMENTS | {"draft": None}), "a/target", Speculation(
        drafter="pard", draft="pocket"
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"chains": {}}, "is no plan"),
        ({"chains": {"1": -1}}, "is no plan"),
        ({"chains": {"0": 1}}, "is no plan"),
        ({"chains": {"1": 2.5}}, "is no plan"),
        ({"chains": [1]}, "is no plan"),
        ({"arguments": None}, "is no plan"),
        ({"arguments": ARGUMENTS | {"drafter": 3}}, "is no plan"),
        ({"arguments": ARGUMENTS | {"target": "b"}}, "made for --target 'b', not a/target"),
        ({"arguments": ARGUMENTS | {"drafter": "ngram"}}, "made for --drafter 'ngram', not pard"),
        ({"arguments": ARGUMENTS | {"draft": None}}, "made for --draft none, not a/draft"),
        ({"arguments": ARGUMENTS | {"verify": "typical:delta=0.3"}}, "plan with match"),
    ],
)
def test_a_plan_for_others_is_refused(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    """Guards against a server that drafts by the plan of another drafter, and against tracebacks."""
    with pytest.raises(ValueError, match=told):
        read_chains(written(tmp_path, **changed), "a/target", SPECULATION)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"--plan .*plan.json"):
        read_chains(tmp_path / "plan.json", "a/target", SPECULATION)
    with pytest.raises(ValueError, match="cannot be read"):
        read_chains(tmp_path / "none.json", "a/target", SPECULATION)
