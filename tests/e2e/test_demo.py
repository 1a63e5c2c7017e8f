from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples.demo import Size, demo


@pytest.mark.slow
def test_figures_of_weights_that_are_no_longer_shipped_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a demo that shows, after an update, what it measured before, or does all again without one."""
    monkeypatch.chdir(tmp_path)
    out, size = Path("demo"), Size(steps=1, prompts=1, tokens=4)
    assert demo(out, size)
    report = json.loads((out / "results.json").read_text())
    report["demo"]["family"]["pard"] = "of an earlier version"
    (out / "results.json").write_text(json.dumps(report))
    assert demo(out, size)
    assert "measured before" not in capsys.readouterr().out

    assert demo(out, size)
    assert "measured before" in capsys.readouterr().out
