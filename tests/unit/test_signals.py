"""What SIGTERM does while something is half written."""

from __future__ import annotations

import itertools
import os
import signal
import threading

import pytest

from paradraft.signals import sigterm_raises
from tests.support.serving import until


def test_it_raises_in_the_block_and_nowhere_else() -> None:
    with pytest.raises(SystemExit) as ended, sigterm_raises():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_it_ends_a_fork_that_is_busy_in_c(in_a_thread: bool) -> None:
    """Guards whoever waits for the processes that tokenize: one of them waited in C, where no handler of Python's is
    called, and the signal that was to end it did nothing."""
    children: list[int] = []

    def fork() -> None:
        if not (child := os.fork()):
            sum(itertools.repeat(1, 10**12))
            os._exit(0)
        children.append(child)

    with sigterm_raises():
        thread = threading.Thread(target=fork)
        (thread.run if not in_a_thread else thread.start)()
        until(lambda: bool(children))
        os.kill(children[0], signal.SIGTERM)
        last_resort = threading.Timer(5.0, os.kill, (children[0], signal.SIGKILL))
        last_resort.start()
        ended = os.waitpid(children[0], 0)[1]
        last_resort.cancel()
    assert os.WTERMSIG(ended) == signal.SIGTERM
