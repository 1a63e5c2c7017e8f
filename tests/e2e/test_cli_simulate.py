"""`paradraft simulate`: a table, a line of JSON, and mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Paradraft, assert_mistake

ASKED = ["--target-ms", 110, "--draft-ms", 20]


def test_methods_are_predicted(paradraft: Paradraft) -> None:
    outcome = paradraft("simulate", *ASKED, "--acceptance", 0.95, "--parallel-acceptance", "0.9,0.8,0.7")
    assert outcome.code == 0, outcome.err
    found = {one["method"]: one for one in json.loads(outcome.out.splitlines()[-1])}
    assert list(found) == ["AR+", "VSD", "PEARL", "PARD", "PEARL + PARD"]
    assert found["AR+"]["tokens_per_s"] == pytest.approx(1000 / 110)
    assert "PEARL" in outcome.out and f"{found['PEARL']['speedup']:.2f}x" in outcome.out
    mirrored = paradraft("simulate", *ASKED, "--acceptance", 0.95, "--exit-share", 0.5, "--named-share", 0.8)
    assert "Mirror-SD" in mirrored.out and "Mirror-SD" not in outcome.out.replace("PEARL, Mirror-SD", "")
    assert "--branch-cost has no effect" in paradraft("simulate", *ASKED, "--acceptance", 0.95, "--branch-cost", 2).err
    told = "warning: --window-ms has no effect without --parallel-acceptance"
    assert told in paradraft("simulate", *ASKED, "--acceptance", 0.95, "--window-ms", 9).err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--acceptance", "x"], "--acceptance x"),
        (["--acceptance", "0.5,0.6"], "--acceptance 0.5,0.6"),
        (["--acceptance", "1.5"], "--acceptance 1.5"),
        (["--acceptance", ""], "--acceptance"),
        (["--acceptance", "0.5", "--target-ms", 0], "--target-ms 0"),
        (["--acceptance", "0.5", "--draft-ms", "inf"], "--draft-ms inf"),
        (["--acceptance", "0.5", "--verify-ms", "nan"], "--verify-ms nan"),
        (["--acceptance", "0.5", "--rest-ms", -1], "--rest-ms -1"),
        (["--acceptance", "0.5", "--contention", 0.2], "--contention 0.2"),
        (["--acceptance", "0.5", "--exit-share", 2, "--named-share", 0.5], "--exit-share 2"),
        (["--acceptance", "0.5", "--exit-share", 0.5], "--named-share"),
        (["--acceptance", "0.5", "--branch-cost", 0.5], "--branch-cost 0.5"),
    ],
)
def test_mistakes(paradraft: Paradraft, options: list[object], named: str) -> None:
    assert_mistake(paradraft("simulate", *ASKED, *options), named)


def test_json_is_for_programs(paradraft: Paradraft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards people who read a table on a terminal against a line of JSON below it, unless they ask for it."""
    asked, file = [*ASKED, "--acceptance", 0.95], tmp_path / "out.json"
    piped = json.loads(paradraft("simulate", *asked).out.splitlines()[-1])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = paradraft("simulate", *asked, "--json", file)
    assert "PEARL" in shown.out and "{" not in shown.out
    assert json.loads(file.read_text(encoding="utf-8"))["predicted"] == piped
    assert json.loads(paradraft("simulate", *asked, "--json", "-").out.splitlines()[-1]) == piped
    assert_mistake(paradraft("simulate", *asked, "--json", tmp_path), "cannot be written")
