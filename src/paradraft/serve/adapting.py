"""A drafter that learns from its server's answers: a second process trains it, and the server takes what is better."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paradraft.decode.round_log import prepare
from paradraft.engine.automatic import automatic
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import AUTO, Speculation
from paradraft.errors import one_line
from paradraft.placement import usable_cpus
from paradraft.train.refresh import ENDS_WITH_INPUT, LOG, OUTPUT, Adaptation

MOST_BYTES = 2**26
"""Of `LOG`: some ten thousand answers."""
POLL_S, GRACE_S = 1.0, 2.0


def adaptation_of(
    target: str, speculation: Speculation, folder: Path, *, log: Path | None
) -> tuple[Adaptation, Speculation]:
    """The adaptation of the drafter of a server in a folder, and the speculation with its newest drafter.

    Args:
        log: of the answers; None for one in the folder.

    Raises:
        ValueError: there is no drafter that was trained here, it does not fit the folder, or the log cannot be written.
        OSError: the folder cannot be made.
    """
    if speculation.gamma is not None:
        raise ValueError("--adapt: with --gamma drafts begin before rounds do, leave one of them out")
    if speculation.drafter == AUTO:
        speculation = automatic(target, speculation, has_grammars=True)
    if speculation.draft is None:
        raise ValueError(f"--adapt {folder}: {speculation.drafter} is not trained, name a trained drafter by --draft")
    adaptation = Adaptation(drafter=Path(speculation.draft), log=log or folder / LOG, out=folder, target=target)
    folder.mkdir(parents=True, exist_ok=True)
    prepare(adaptation.log)
    return adaptation, replace(speculation, draft=str(adaptation.folder_of(adaptation.newest)))


class Adapting:
    """The second process, and the thread that waits for its drafters; a context manager that ends both.

    Args:
        say: prints a line for the user.
    """

    def __init__(self, adaptation: Adaptation, engine: Engine, say: Callable[[str], None]) -> None:
        self._engine, self._adaptation, self._say = engine, adaptation, say
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="adapting", daemon=True)

    def __enter__(self) -> Adapting:
        adaptation = self._adaptation
        is_own = adaptation.log == adaptation.out / LOG
        self._engine.log_rounds(adaptation.log, most_bytes=MOST_BYTES if is_own else None)
        command = [
            sys.executable, "-P", "-m", "paradraft", "adapt", str(adaptation.drafter), "--log", str(adaptation.log),
            "--out", str(adaptation.out), "--target", str(adaptation.target), "--threads",
            str(max(usable_cpus() // 2, 1)),
        ]  # fmt: skip
        with (adaptation.out / OUTPUT).open("ab") as output:
            # In another process group, so that Ctrl-C reaches the server alone, which drains first.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {ENDS_WITH_INPUT: "1"},
            )
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if self._process.stdin is not None:
            self._process.stdin.close()  # which ends it, and deletes what a refresh under way has written
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()

    def _watch(self) -> None:
        current, is_learning = Path(self._engine.speculation.draft or ""), True
        while not self._is_over.wait(POLL_S):
            try:
                newest = self._adaptation.newest
                if (folder := self._adaptation.folder_of(newest)) != current:
                    current = folder
                    self._engine.swap_drafter(folder)
                    self._say("drafting goes on with another drafter" if newest.last is None else newest.last.in_words)
                if is_learning and self._process.poll() is not None:
                    is_learning = False
                    self._say(f"the drafter learns no more: its process has ended, see {self._adaptation.out / OUTPUT}")
            except Exception as error:
                self._say(f"the drafter stays as it is: {one_line(error)}")
