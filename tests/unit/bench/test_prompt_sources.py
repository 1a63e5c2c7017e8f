"""Where the prompts of a run are from, as titles and files say it."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from paradraft.bench.setup import source_of
from paradraft.cli.commands import app
from paradraft.data.prompt_source import DEFAULT, RANDOM


def test_a_run_knows_where_its_prompts_are_from() -> None:
    """Guards against shipped prompts that pass for the user's, and random ones that pass for texts."""
    assert source_of(None, "pocket") == DEFAULT
    assert source_of(Path("mine.jsonl"), "pocket") == "mine.jsonl"
    assert source_of(None, "shape:tiny-target") == RANDOM


@pytest.mark.parametrize("command", ["bench", "plan", "audit"])
def test_the_help_names_the_default_prompts(command: str) -> None:
    """Guards against a default that only the source tells of."""
    group = typer.main.get_command(app)
    one = group.get_command(None, command)  # type: ignore[attr-defined]
    (option,) = [parameter for parameter in one.params if parameter.name == "prompts"]
    assert f"By default {DEFAULT}." in option.help
