"""The help of a command in sections."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from paradraft.cli.command_list import COMMANDS, app
from paradraft.cli.options import OPTIONS
from paradraft.cli.sections import COMMON, FIRST, SECTIONS

NEWCOMER = {
    "generate": ["--target", "--drafter", "--prompt", "--prompts", "--max-new-tokens", "--temperature"],
    "chat": ["--target", "--drafter", "--max-new-tokens", "--temperature"],
    "bench": ["--target", "--methods", "--prompts", "--max-new-tokens", "--temperature"],
    "plan": ["--target", "--drafter", "--prompts", "--max-new-tokens", "--temperature"],
    "audit": ["--target", "--drafter", "--prompts", "--max-new-tokens", "--temperature"],
    "regenerate": ["--target", "--drafter", "--prompts", "--out", "--max-new-tokens"],
    "serve": ["--target", "--drafter", "--max-new-tokens"],
}


def help_of(command: str, columns: int = 80) -> str:
    outcome = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [command, "--help"])
    assert outcome.exit_code == 0
    return outcome.output


def listed(text: str) -> dict[str, list[str]]:
    """The names of the options by section, in their order."""
    parts = re.split(r"^([A-Z][a-z ]+):$", text, flags=re.MULTILINE)[1:]
    return {
        name: re.findall(r"^  (?:-\w, )?(--?[\w-]+)", body, flags=re.MULTILINE)
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("command", NEWCOMER)
def test_what_a_newcomer_needs_comes_first(command: str) -> None:
    """Guards against a first option that one person in a hundred needs."""
    first = NEWCOMER[command]
    assert listed(help_of(command))[COMMON][: len(first)] == first


@pytest.mark.parametrize("command", COMMANDS)
def test_sections_hold_every_option_once(command: str) -> None:
    """Guards against an option that the sections lose, sections in another order, and lines that a terminal cuts."""
    text = help_of(command)
    sections = listed(text)
    found = typer.main.get_command(app).get_command(None, command)
    options = [parameter for parameter in found.params if parameter.param_type_name == "option"]
    shown = [name for section, names in sections.items() if section != "Arguments" for name in names]
    assert len(shown) == len(options) + 1, "one of them is --help"
    order = [name for name in SECTIONS if name in sections]
    assert list(sections) == order or list(sections) in (["Options"], ["Arguments", "Options"])
    assert max(map(len, text.splitlines())) <= 80


def test_fields_of_a_dataclass_are_together() -> None:
    """Guards the sections of the options that commands share."""
    sections = listed(help_of("audit"))
    for section, kind in zip(("Drafting", "Sampling"), OPTIONS, strict=False):
        apart = {f"--{name.replace('_', '-')}" for name in FIRST}
        names = {f"--{name.replace('_', '-')}" for name in OPTIONS[kind]} - apart - {"--logit-bias"}
        assert set(sections[section]) == names
