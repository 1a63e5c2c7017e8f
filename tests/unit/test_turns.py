"""Who may use an engine, and who waits."""

from __future__ import annotations

import threading
import time

import pytest

from paradraft import turns
from paradraft.turns import Turn, Turns


def in_another_thread(engine: Turns) -> float:
    """How long a request of another thread waits for its round, in seconds."""
    waited: list[float] = []

    def request() -> None:
        begun, turn = time.monotonic(), Turn()
        with engine.round(turn):
            waited.append(time.monotonic() - begun)
        engine.end(turn)

    thread = threading.Thread(target=request)
    thread.start()
    thread.join(10)
    return waited[0]


def test_a_request_knows_whether_others_came_between() -> None:
    """Guards streams against caches that are another request's."""
    engine, first, second = Turns(), Turn(), Turn()
    with engine.round(first) as is_unchanged:
        assert not is_unchanged
    with engine.round(first) as is_unchanged:
        assert is_unchanged
    with engine.round(second):
        pass
    engine.end(second)
    with engine.round(first) as is_unchanged:
        assert not is_unchanged


def test_others_wait_for_a_stream_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a service against one reader who takes nothing: others get the engine after a while, and at once when
    the stream has ended."""
    monkeypatch.setattr(turns, "PATIENCE_S", 0.2)
    engine, stream = Turns(), Turn()
    with engine.round(stream):
        pass
    assert 0.1 < in_another_thread(engine) < 5.0
    with engine.round(stream):
        pass
    engine.end(stream)
    assert in_another_thread(engine) < 0.1


def test_nobody_waits_for_himself() -> None:
    """Guards processors that ask the engine which called them: such a thread would stand still."""
    engine = Turns()
    with engine.round(Turn()), pytest.raises(ValueError, match="load a second engine"), engine.round(Turn()):
        pass


def test_an_error_ends_the_round() -> None:
    """Guards an engine against being locked for ever by an answer that failed."""
    engine = Turns()
    turn = Turn()
    with pytest.raises(KeyError), engine.round(turn):
        raise KeyError
    engine.end(turn)
    assert in_another_thread(engine) < 0.1
