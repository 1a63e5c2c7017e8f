"""What all commands have in common: the help, and what they say where something is missing."""

from __future__ import annotations

import re

import pytest
import typer

from paradraft import cli
from tests.e2e.conftest import Paradraft, assert_mistake


@pytest.mark.parametrize(
    "command",
    [[], ["generate"], ["init-draft"], ["train"], ["train", "pard"], ["regenerate"], ["bench"], ["plan"], ["audit"]],
)
def test_help(paradraft: Paradraft, command: list[str]) -> None:
    """Guards against options without a word of help in the list, and against names that are cut off."""
    outcome = paradraft(*command, "--help")
    assert outcome.code == 0
    assert "Usage: paradraft" in outcome.out
    assert outcome.err == ""
    found = typer.main.get_command(cli.app)
    for name in command:
        found = found.commands[name] if hasattr(found, "commands") else found  # `pard` is what `train` trains
    shown = re.sub(r"\W+", "", re.sub(r"\[[^]]*\]", "", outcome.out))
    for parameter in found.params:
        text = getattr(parameter, "help", None)
        assert text, f"{parameter.name} has no help"
        names = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name]
        assert all(name in outcome.out for name in names), f"{parameter.name} is not named"
        assert re.sub(r"\W+", "", text) in shown, f"{parameter.name} is not explained"


def test_what_can_be_trained_is_listed(paradraft: Paradraft) -> None:
    """Guards `train --help`, with a name too, a name that does not exist, and a recipe that is missing."""
    for command in (["train"], ["train", "pard"]):
        told = " ".join(paradraft(*command, "--help").out.split())
        assert "What to train: eagle, eagle_parallel, hydra, medusa, medusa_parallel, pard" in told
    assert_mistake(paradraft("train", "medussa", "recipe.yaml"), "unknown training 'medussa': use one of eagle")
    assert_mistake(paradraft("train", "pard"), "train pard: name a recipe")


def test_no_arguments_show_the_help(paradraft: Paradraft) -> None:
    """Guards against an empty complaint: typer's own way to do this is a mistake with no message."""
    assert "generate" in paradraft().out


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["train"], ["frobnicate"], ["bench"]])
def test_incomplete_command(paradraft: Paradraft, arguments: list[str]) -> None:
    """Guards against typer's own complaints, which are boxes of several lines."""
    assert_mistake(paradraft(*arguments))
