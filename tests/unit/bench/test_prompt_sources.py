"""Where the prompts of a run are from, as titles and files say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer

from paradraft.bench.setup import USUAL, ChatFormat, held_out_prompts, prompts_for, source_of
from paradraft.cli.command_list import app
from paradraft.data.prompt_source import DEFAULT, PIPE, RANDOM
from tests.support import json_models


def test_a_run_knows_where_its_prompts_are_from(tmp_path: Path) -> None:
    """Guards against shipped prompts that pass for the user's, and random ones that pass for texts."""
    assert source_of(None, "pocket") == DEFAULT
    assert source_of(Path("mine.jsonl"), "pocket") == "mine.jsonl"
    assert source_of(None, "shape:tiny-target") == RANDOM
    os.mkfifo(tmp_path / "63")
    assert source_of(tmp_path / "63", "pocket") == PIPE


def test_a_run_needs_no_number_of_prompts(tmp_path: Path) -> None:
    """Guards against a complaint about a default that the user has not set."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert prompts_for("pocket", None, tokens=1, file=file) == ["a", "b"]
    assert len(prompts_for("shape:tiny-target", None, tokens=1, file=None)) == USUAL


def test_prompts_are_asked_in_a_chat(tmp_path: Path) -> None:
    """Guards figures of an instruct model, which answers a bare text with nothing."""
    json_models.write(tmp_path)
    folder, file = tmp_path / "target", tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n')
    (plain,), (asked,) = (
        held_out_prompts(None, file, str(folder), chat=chat) for chat in (None, ChatFormat(system="b"))
    )
    assert plain == "a" and asked != "a" and asked.index("b") < asked.index("a")


@pytest.mark.parametrize("command", ["bench", "plan", "audit"])
def test_the_help_names_the_default_prompts(command: str) -> None:
    """Guards against a default that only the source tells of."""
    group = typer.main.get_command(app)
    one = group.get_command(None, command)  # type: ignore[attr-defined]
    (option,) = [parameter for parameter in one.params if parameter.name == "prompts"]
    assert f"By default {DEFAULT}." in option.help
