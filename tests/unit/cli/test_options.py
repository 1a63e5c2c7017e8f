"""Options that stand for the fields of a dataclass."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from paradraft.cli import options
from paradraft.cli.options import OPTIONS, REQUIRED, Offer, with_options
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement
from paradraft.sampling_params import Sampling
from paradraft.serve.limits import Limits
from paradraft.tree import Tree

READ = {"tree": {"tree_budget", "tree_paths"}}
"""The options of a field, where they are not called like it."""
ONLY_IN_PYTHON = {
    Speculation: {"overlap", "reason"}, Sampling: {"processors"}, Runtime: {"width", "pad_to", "cuda_graphs"},
    Placement: set(), Limits: set(),
}  # fmt: skip
OTHER = Offer(without=("k", "lengths"), defaults={"drafter": REQUIRED, "verify": "rejection"}, helps={"draft": "Dr."})
Last = Annotated[int, typer.Option()]
Run = Callable[..., Any]
Seen = dict[str, Any]


def running(command: Run) -> Run:
    """Calls a command as from a terminal; what typer says of a mistake is in its `output`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def seen() -> Seen:
    return {}


@pytest.fixture
def everything(seen: Seen) -> Run:
    @with_options
    def command(*, first: int = 1, speculation: Speculation, sampling: Sampling, last: Last, runtime: Runtime) -> None:
        """Answers."""
        seen.update(first=first, speculation=speculation, sampling=sampling, last=last, runtime=runtime)

    return command


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_field_has_an_option(kind: Any) -> None:
    """Guards against a setting of the library that the command line cannot reach, and against an option of nothing."""
    names = {field.name for field in fields(kind)} - ONLY_IN_PYTHON[kind]
    assert set().union(*(READ.get(name, {name}) for name in names)) == set(OPTIONS[kind])
    assert all(option.help for option in OPTIONS[kind].values())


def test_all_dataclasses_are_read() -> None:
    """Guards against one whose options would reach the command as they are."""
    assert set(options.IN_TURN) == set(OPTIONS)


def test_what_is_not_said_is_as_in_the_library(everything: Run, seen: Seen) -> None:
    """Guards against two sets of defaults."""
    assert running(everything)("--last", 2).exit_code == 0
    assert seen == {
        "first": 1, "speculation": Speculation(), "sampling": Sampling(), "last": 2, "runtime": Runtime(),
    }  # fmt: skip


def test_options_become_settings(everything: Run, seen: Seen) -> None:
    """Guards every option on its way: each value differs from its default."""
    said = ["--drafter", "ngram", "--draft", "d", "-k", 3, "--verify", "rejection", "--lengths", "expected"]
    said += ["--tree-budget", 5, "--temperature", 0.5, "--top-k", 6, "--top-p", 0.7, "--min-p", 0.1]
    said += ["--repetition-penalty", 1.1, "--presence-penalty", 0.2, "--frequency-penalty", 0.3, "--seed", 7]
    said += ["--logit-bias", "4=1.5", "--logit-bias", "5=-inf", "--dtype", "float64", "--no-compile", "--capacity", 99]
    assert running(everything)(*said, "--last", 2, "--device", "cpu").exit_code == 0
    assert seen["speculation"] == Speculation(
        drafter="ngram", draft="d", k=3, verify="rejection", lengths="expected", tree=Tree(budget=5)
    )
    assert seen["sampling"] == Sampling(
        temperature=0.5, top_k=6, top_p=0.7, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, seed=7, logit_bias={4: 1.5, 5: -float("inf")},
    )  # fmt: skip
    assert seen["runtime"] == Runtime(device="cpu", dtype="float64", compiled=False, capacity=99)
    running(everything)("--last", 2, "--tree-paths", "0 1 0.0")
    assert seen["speculation"].tree == Tree(paths=((0,), (1,), (0, 0)))


def test_cpus_are_read() -> None:
    """Guards the placement of both sides on its way."""
    seen: Seen = {}

    @with_options
    def command(*, placement: Placement) -> None:
        """Answers."""
        seen.update(placement=placement)

    assert running(command)().exit_code == 0 and seen["placement"] == Placement()
    cpu = min(os.sched_getaffinity(0))
    said = ["--target-cpus", cpu, "--draft-cpus", cpu, "--draft-device", "cpu", "--draft-timeout-s", 3]
    assert running(command)(*said).exit_code == 0
    assert seen["placement"] == Placement(
        target_cpus=(cpu,), draft_cpus=(cpu,), draft_device="cpu", draft_timeout_s=3.0
    )


def test_a_wrong_value_is_the_mistake_that_the_library_names(everything: Run, seen: Seen) -> None:
    """Guards against checks that options go around; the command is not begun."""
    for said, complaint in (
        (["-k", 0], "k=0: draft 1 to 256"),
        (["--top-p", 0], "top_p=0"),
        (["--dtype", "float8"], "dtype='float8'"),
        (["--tree-budget", 3, "--tree-paths", "0"], "either --tree-budget or --tree-paths"),
    ):
        error = running(everything)("--last", 2, *said).exception
        assert isinstance(error, ValueError) and complaint in str(error)
    assert not seen


def test_a_command_may_differ(seen: Seen) -> None:
    """Guards the differences between commands: one command's are not another's, and the help says what counts."""

    @with_options
    def command(*, speculation: Annotated[Speculation, OTHER], runtime: Annotated[Runtime, options.COMPILED]) -> None:
        """Answers."""
        seen.update(speculation=speculation, runtime=runtime)

    run = running(command)
    assert run("--drafter", "pard").exit_code == 0
    assert seen == {"speculation": Speculation(drafter="pard", verify="rejection"), "runtime": Runtime(compiled=True)}
    assert run().exit_code == run("--drafter", "pard", "-k", 3).exit_code == 2
    told = " ".join(run("--help").output.split())
    assert "--draft <str> Dr." in told and "-k " not in told
    assert "judge:head=FILE of train-judge. [default: rejection]" in told
    assert "else by the models' own code. [default: compile]" in told
    assert "own code" not in OPTIONS[Runtime]["compiled"].help and OPTIONS[Speculation]["draft"].help != "Dr."


def test_options_stand_where_the_dataclass_stood(everything: Run) -> None:
    """Guards the order of the help."""
    names = list(inspect.signature(everything).parameters)
    expected = [*OPTIONS[Speculation], *OPTIONS[Sampling]]
    assert names == ["first", *expected, "last", *OPTIONS[Runtime]]
    assert everything.__doc__ == "Answers."


@pytest.mark.parametrize("offer", [Offer(without=("kk",)), Offer(defaults={"kk": 3}), Offer(helps={"kk": "K."})])
def test_a_difference_in_an_option_that_does_not_exist_is_a_bug(offer: Offer) -> None:
    """Guards against a misspelt name, by which a command would offer what it is to leave out."""

    def command(*, speculation: Speculation) -> None:
        """Answers."""

    command.__annotations__["speculation"] = Annotated[Speculation, offer]
    with pytest.raises(AssertionError):
        with_options(command)
