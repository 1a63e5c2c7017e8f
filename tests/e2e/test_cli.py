"""What all commands have in common: the help, and what they say where something is missing."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import time
from importlib import metadata

import pytest
import typer

from paradraft.cli.command_list import COMMANDS, app
from tests.e2e.conftest import Paradraft, assert_mistake
from tests.support.quick import mostly_slow


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["generate"],
        ["init-draft"],
        ["train"],
        ["train", "pard"],
        ["regenerate"],
        ["trim"],
        ["merge"],
        ["bench"],
        ["plan"],
        ["audit"],
    ],
)
def test_help(paradraft: Paradraft, command: list[str]) -> None:
    """Guards against options without a word of help in the list, and against names that are cut off."""
    outcome = paradraft(*command, "--help")
    assert outcome.code == 0
    assert "Usage: paradraft" in outcome.out
    assert outcome.err == ""
    found = typer.main.get_command(app)
    for name in command:
        found = found.get_command(None, name) if hasattr(found, "commands") else found  # `pard` is what `train` trains
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
        assert "What to train: dflash, eagle, eagle_parallel, hydra, medusa, medusa_parallel, pard" in told
    assert_mistake(paradraft("train", "medussa", "recipe.yaml"), "unknown training 'medussa': use one of dflash")
    assert_mistake(paradraft("train", "pard"), "train pard: name a recipe")


def test_no_arguments_show_the_help(paradraft: Paradraft) -> None:
    """Guards against an empty complaint: typer's own way to do this is a mistake with no message."""
    assert "generate" in paradraft().out


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["train"], ["frobnicate"], ["bench"]])
def test_incomplete_command(paradraft: Paradraft, arguments: list[str]) -> None:
    """Guards against typer's own complaints, which are boxes of several lines."""
    assert_mistake(paradraft(*arguments))


@pytest.mark.parametrize(("option", "value"), [("--max-new-tokens", "0"), ("--seed", "many"), ("-k", "1.5")])
def test_a_wrong_number_is_in_the_complaint(paradraft: Paradraft, option: str, value: str) -> None:
    """Guards scripts, whose value comes from a variable: typer's own words leave it out."""
    outcome = paradraft("generate", "--target", "pocket", "--prompt", "x", option, value)
    assert_mistake(outcome, option, f"not '{value}'")


def test_the_list_of_commands_says_what_their_help_says() -> None:
    """Guards the list, for which no command is imported."""
    found = typer.main.get_command(app)
    for name, help_text in COMMANDS.items():
        told = " ".join(found.get_command(None, name).help.split())
        assert told.startswith(help_text.removesuffix(".")), f"{name} begins its help otherwise"


def test_the_version(paradraft: Paradraft) -> None:
    outcome = paradraft("--version")
    assert (outcome.code, outcome.out) == (0, f"paradraft {metadata.version('paradraft')}\n")


HEAVY = ("torch", "transformers", "numpy", "huggingface_hub")
REPORT = f"print('imported', *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
BEGIN = f"import atexit, sys; atexit.register(lambda: {REPORT})"
RUN = f"{BEGIN}\nsys.argv[0] = 'paradraft'; from paradraft.cli import main; main()"
TASK = ["--target", "pocket", "--prompt", "x"]
MISTAKES = [
    ["generate", *TASK, "--temperature", "-1"],
    ["generate", *TASK, "--drafter", "ngramm"],
    ["generate", *TASK, "--lengths", "long"],
    ["generate", *TASK, "-k", "0"],
    ["generate", *TASK, "--max-new-tokens", "none"],
    ["chat", "--target", "pocket", "--verify", "exact"],
    ["serve", "--target", "pocket", "--max-batch", "0"],
    ["serve", "--target", "pocket", "--engine", "none"],
    ["regenerate", "--prompts", "x", "--out", "y", "--top-p", "2"],
    ["train", "medussa", "recipe.yaml"],
    ["bench", "--target", "pocket", "--batch-size", "0"],
    ["plan", "--target", "pocket", "-k", "x"],
    ["simulate", "--target-ms", "-1", "--draft-ms", "1", "--acceptance", "0.5"],
    ["simulate", "--target-ms", "1", "--draft-ms", "1", "--acceptance", "5"],
    ["export", "a", "b", "--target", "pocket", "--to", "vllm", "-k", "0"],
    ["audit", "--target", "pocket", "--dtype", "float8"],
]


def at_once(arguments: list[str], code: str = RUN) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process that reports at its end which of `HEAVY` it has imported."""
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


LIBRARY = "import typer.rich_utils, pydantic"
"""Typer, with what it imports to show help and to refuse values: about two thirds of a mistake's time."""


def takes_twice_its_library(arguments: list[str], code: str = RUN) -> bool:
    """Whether a command takes twice the processor time of `LIBRARY`: the least of each counts, measured in turns until
    it does not, because other programs compute here too."""

    def cpu_s(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        at_once(arguments, code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    library_s, command_s = [], []
    for _ in range(10):
        library_s.append(cpu_s(LIBRARY))
        command_s.append(cpu_s(code))
        if min(command_s) < 2 * min(library_s):
            return False
    return True


def test_the_package_alone_imports_nothing_heavy() -> None:
    """Guards the first impression: torch and transformers take seconds to import."""
    code = f"{BEGIN}\nimport paradraft; assert paradraft.__version__ and 'load' in dir(paradraft)"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stderr == "imported\n"


HELP = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]


@pytest.mark.parametrize("arguments", mostly_slow(HELP, quick=[["--help"], ["serve", "--help"]]))
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Guards whoever asks for help against seconds of waiting."""
    outcome = at_once(arguments)
    assert (outcome.returncode, outcome.stderr) == (0, "imported\n")


@pytest.mark.parametrize(
    "arguments",
    [
        *mostly_slow(([name, "--nonsense"] for name in COMMANDS), quick=[["chat", "--nonsense"]]),
        *mostly_slow(MISTAKES, quick=MISTAKES),
    ],
)
def test_a_mistake_imports_nothing_heavy(arguments: list[str]) -> None:
    """Guards whoever mistypes an option or its value against seconds of waiting for the complaint."""
    outcome = at_once(arguments)
    complaint, report = outcome.stderr.splitlines()
    assert (outcome.returncode, report) == (2, "imported")
    assert complaint.startswith("paradraft: ")


@pytest.mark.parametrize("arguments", [["generate", "--help"], ["bench", "--nonsense"], MISTAKES[0]], ids=" ".join)
def test_help_and_mistakes_take_little_more_than_their_library(arguments: list[str]) -> None:
    """Guards against what takes long without being on the list of heavy libraries, on machines of any speed."""
    assert not takes_twice_its_library(arguments)


def test_what_is_imported_without_need_takes_too_long() -> None:
    """Control of the test above, with a library that no mistake needs and that takes eight times as long as its own."""
    assert takes_twice_its_library(MISTAKES[0], RUN.replace("import atexit", "import atexit, torch"))


@pytest.mark.parametrize("after_s", [0.05, 0.5, 1.5, 3.0])
def test_interrupted_while_it_imports(after_s: float) -> None:
    """Guards impatient people against a traceback of whatever library was being imported."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paradraft", "generate", "--target", "no/model", "--prompt", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    # It may end already, with the one line that it has to say.
    is_done = process.returncode in (2, -signal.SIGINT) and "no/model" in err and err.count("\n") == 1
    # Before Python has read our first file, its own answer to Ctrl-C is what comes.
    is_early = after_s < 0.1 and process.returncode in (-signal.SIGINT, 1)
    assert is_done or is_early or (process.returncode, err) == (130, "paradraft: interrupted\n"), err


def test_all_that_is_public_is_there() -> None:
    import paradraft

    assert all(getattr(paradraft, name).__doc__ for name in paradraft.__all__)
    with pytest.raises(AttributeError, match="module 'paradraft' has no attribute 'nothing'"):
        paradraft.nothing  # noqa: B018


@pytest.mark.parametrize(("typed", "told"), [("generat", "use generate\n"), ("xyz", "use one of generate, chat, ")])
def test_a_command_that_is_none(paradraft: Paradraft, typed: str, told: str) -> None:
    """Guards whoever mistypes."""
    assert_mistake(paradraft(typed), f"unknown command '{typed}': {told}")
