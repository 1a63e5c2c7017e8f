"""Options of all commands side by side: one name for one thing, in the same words."""

from __future__ import annotations

from collections import defaultdict

import pytest
import typer

from paradraft.cli.command_list import COMMANDS, app

NARROWER = {
    "--target", "--batch-size", "--max-new-tokens", "--num-prompts", "--system", "--drafter", "--tree-budget", "--runs",
    "--compile", "--no-compile", "--dtype", "--draft-dtype", "--k", "-k", "--json", "--prompts", "--temperature",
    "--samples", "--chat",
}  # fmt: skip
"""Options that mean the same thing everywhere, of which a command says more, such as when it is of use."""
OTHERS = {
    "--endpoint": "audit asks a server for what it judges, regenerate for what it keeps",
    "--engine": "audit starts one and judges it, serve lets it answer",
    "--acceptance": "plan reads a file, simulate rates",
    "--api-key-env": "regenerate sends the key, serve wants it",
    "--seed": "of init-draft: that of its weights",
    "--methods": "bench runs methods, report selects them",
    "--out": "init-draft writes a folder, regenerate a file",
}
"""Options that commands have for different things."""


def helps() -> dict[str, dict[str, str]]:
    """By option and command, what the help says."""
    group, found = typer.main.get_command(app), defaultdict[str, dict[str, str]](dict)
    for command in COMMANDS:
        for parameter in group.get_command(None, command).params:  # type: ignore[attr-defined]
            for name in [*parameter.opts, *parameter.secondary_opts]:
                if name.startswith("-"):
                    found[name][command] = parameter.help or ""
    return found


def test_an_option_has_the_same_words_in_all_commands() -> None:
    """Guards readers who know an option from another command: what differs does so on purpose, and is listed here."""
    differing = {name for name, of in helps().items() if len(set(of.values())) > 1}
    assert differing - NARROWER - {*OTHERS} == set()
    assert {*OTHERS} <= differing, "these are alike by now: take them from the list"


def test_no_two_options_are_one_thing_in_singular_and_plural() -> None:
    """Guards against `--tree-budget` here and `--tree-budgets` there, but for old names of one option."""
    found = helps()
    for name in found.keys() - {"--prompt"}:  # a text, where --prompts is a file
        for command in found.get(f"{name}s", ()):
            assert command in found[name], f"{command} has {name}s, others have {name}"


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("plan", {"-k", "--k"}), ("bench", {"-k", "--k"}), ("generate", {"-k", "--k"}),
        ("plan", {"--tree-budget", "--tree-budgets"}), ("audit", {"--samples", "--seeds"}),
    ],
)  # fmt: skip
def test_old_names_go_on_working(command: str, names: set[str]) -> None:
    """Guards commands that stand in scripts and in the results that this project ships."""
    group = typer.main.get_command(app)
    parameters = group.get_command(None, command).params  # type: ignore[attr-defined]
    assert any(names == {*parameter.opts} for parameter in parameters)
