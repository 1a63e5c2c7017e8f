"""`paradraft adapt`."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.terminal import console
from paradraft.cli.values import use_threads
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.train.refresh import Adaptation

POLL_S = 2.0
LOWEST = 19
"""The niceness of a process that runs where nothing else does."""
AUTOGROUP = Path("/proc/self/autogroup")
"""The niceness of a session."""


def take_lowest_priority() -> None:
    """Lets other processes go first.

    Linux shares CPUs out between sessions before niceness counts ("autogroup"), so a session that this process leads
    becomes nice as a whole: else a training beside a server would take half of the CPUs that the server uses.
    """
    if hasattr(os, "nice"):
        os.nice(LOWEST)
    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():
        for _ in range(10):
            try:
                AUTOGROUP.write_text(str(LOWEST))
            except BlockingIOError:  # an ordinary user may do so only a few times a second
                time.sleep(0.2)
            except OSError:  # no Linux, or one without it
                return
            else:
                return


def adapt(
    drafter: Annotated[Path, typer.Argument(metavar="DRAFTER", help="A folder that paradraft train wrote.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the drafter's recipe."),
    ] = None,
    *,
    log: Annotated[Path, options.option("Answers, as --rounds of serve, chat and generate writes them.")],
    out: Annotated[
        Path | None, options.option("Folder of the refreshed drafters; by default DRAFTER with -adapted behind.")
    ] = None,
    target: Annotated[
        str | None, options.option(f"What has answered, if not the target of the drafter's training: {options.TARGET}.")
    ] = None,
    refresh_every: Annotated[int, options.option("New answers that a refresh waits for.")] = 64,
    window: Annotated[int, options.option("How many of the newest answers a refresh learns.")] = 256,
    once: Annotated[bool, options.option("Refresh once, with the answers that are there, and end.", "--once")] = False,
    threads: options.Threads = None,
) -> None:
    """Let a drafter go on learning from the answers of a log of rounds, at the lowest priority.

    A refresh trains it a little on the newest answers, one in six held out, and is kept only if these are guessed
    better. Ctrl-C ends it; the same command goes on with the next refresh. paradraft serve --adapt runs it beside the
    server, which then drafts with the better drafter.
    """
    take_lowest_priority()
    with importing():
        from paradraft.train.refresh import ENDS_WITH_INPUT, Adaptation
        from paradraft.train.run.processes import StoppedError

    use_threads(threads)
    adaptation = Adaptation(
        drafter=drafter,
        log=log,
        out=out or drafter.resolve().with_name(f"{drafter.resolve().name}-adapted"),
        target=target,
        refresh_every=refresh_every,
        window=window,
        settings=tuple(overrides or ()),
    )
    if once:
        adaptation.check_log()
    with adaptation.locked():
        if os.environ.get(ENDS_WITH_INPUT):
            threading.Thread(target=_end_with_input, args=(adaptation.tidy,), daemon=True).start()
        try:
            _run(adaptation, once=once)
        except StoppedError as stop:
            raise typer.Exit(128 + stop.number) from None


def _run(adaptation: Adaptation, *, once: bool) -> None:
    from paradraft.cli.commands.train import line_of

    say, wanted = partial(console().print, soft_wrap=True), adaptation.refresh_every
    while True:
        if not once:
            _wait_for(wanted, adaptation, say)
        try:
            say(adaptation.refresh(lambda report: say(line_of(report)), say).in_words)
            wanted = adaptation.refresh_every
        except (ValueError, OSError) as error:
            if once:
                raise
            say(f"this refresh has failed: {error}")
            wanted = adaptation.waiting + adaptation.refresh_every
        if once:
            folder = adaptation.folder_of(adaptation.newest)
            say(f"decode with it by --draft {shlex.quote(str(folder))}")
            return


def _wait_for(wanted: int, adaptation: Adaptation, say: Callable[[str], None]) -> None:
    """Returns when the log has enough new answers."""
    if (waiting := adaptation.waiting) < wanted:
        say(f"{number_of(waiting, 'new answer')} in {adaptation.log}: the next refresh waits for {wanted}")
    # A log that has begun anew has fewer.
    while not (wanted <= adaptation.waiting or adaptation.refresh_every <= adaptation.waiting < waiting):
        time.sleep(POLL_S)


def _end_with_input(tidy: Callable[[], None]) -> None:
    """Ends this process with the one that started it, however that ends: the system closes the input then."""
    sys.stdin.read()
    tidy()
    os._exit(0)
