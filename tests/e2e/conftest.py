"""Runs the command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from paradraft import cli
from paradraft.drafters import takes_draft
from tests.conftest import tiny_model, tiny_tokenizer
from tests.support.drafts import draft_of

EXACT = ["--dtype", "float64"]
MISTAKE, INTERRUPTED = 2, 130


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: object
    out: str
    err: str


Paradraft = Callable[..., Outcome]


@pytest.fixture
def paradraft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paradraft:
    """Runs the command line in this process."""

    def command(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["paradraft", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(code=stopped.value.code, out=captured.out, err=captured.err)

    return command


def assert_mistake(outcome: Outcome, *named: object) -> None:
    """Exit code 2, one line on the standard error that names what is wrong, nothing else."""
    assert outcome.code == MISTAKE
    assert outcome.out == ""
    assert outcome.err.startswith("paradraft: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    for part in named:
        assert str(part) in outcome.err


@pytest.fixture(scope="session")
def poor_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of the tiny target's size that has nothing to do with it."""
    folder = tmp_path_factory.mktemp("poor") / "draft"
    tiny_model(2).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def drafting(family: Path, name: str) -> list[object]:
    """The options that name a target and a drafter of the tiny family."""
    folder = family / "draft" if name == "autoregressive" else draft_of(family, name)
    draft = ["--draft", folder] if takes_draft(name) else []
    planned = {"ppd": "ppd:size=24"}  # without a size, and with nothing planned, it warns
    return ["--target", family / "target", "--drafter", planned.get(name, name), *draft, *EXACT]
