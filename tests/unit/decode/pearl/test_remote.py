"""A drafter in another process: the same text, and an end to both sides whatever happens to one of them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.bench.setup import check
from paradraft.bench.spec import Benchmark, Method
from paradraft.core import Committed, Draft, Drafting, Request
from paradraft.decode.pearl.channel import Channel
from paradraft.decode.pearl.drafter_process import DraftServer
from paradraft.decode.pearl.remote import DrafterLostError, DrafterProcess, RemoteDrafter, Setup, versions
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement, cpus_of, on_cpus
from paradraft.sampling_params import Sampling
from paradraft.sources.target_loading import load_target
from tests.support.drafts import draft_of

RUNTIME = Runtime(dtype="float64", compiled=False)
TEXTS = ["hello", "abcabc", "T", "The0quick1"]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=1), Sampling(temperature=1.2, top_k=12, seed=2), Sampling()]
BOUND_S = 10.0
"""Within which a side notices that the other is gone, import and loading of this busy machine included."""


@pytest.fixture
def sides() -> Iterator[tuple[DrafterProcess, DraftServer]]:
    """The other side in a thread of this process, over a real connection."""
    ours, theirs = socket.socketpair()
    server = DraftServer(Channel(Connection(theirs.detach())))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    process = DrafterProcess(Placement(draft_timeout_s=30.0), Channel(Connection(ours.detach())))
    yield process, server
    process.close()
    thread.join(BOUND_S)
    assert not thread.is_alive()


@pytest.fixture
def other_side(sides: tuple[DrafterProcess, DraftServer]) -> DrafterProcess:
    return sides[0]


@pytest.fixture
def server(sides: tuple[DrafterProcess, DraftServer]) -> DraftServer:
    return sides[1]


def speculation_of(family: Path, name: str, gamma: int = 4) -> Speculation:
    return Speculation(drafter=name, draft=str(draft_of(family, name)), gamma=gamma)


def engine_of(
    process: DrafterProcess, family: Path, name: str, *, runtime: Runtime = RUNTIME, **settings: int
) -> Engine:
    target = load_target(str(family / "target"), runtime)
    speculation = speculation_of(family, name, **settings)
    return Engine(
        target, process.load(name, target.facts, draft=speculation.draft, runtime=runtime), speculation, kept_rows=2
    )


def process_of(engine: Engine) -> subprocess.Popen[bytes]:
    assert isinstance(engine.drafter, RemoteDrafter)
    process = engine.drafter._process._process
    assert process is not None
    return process


@pytest.mark.parametrize("name", ["autoregressive", "pard"])
def test_text_is_that_of_plain_decoding(other_side: DrafterProcess, family: Path, name: str) -> None:
    """Guards tokens, noise, rows that join and leave, and kept caches on their way to the other side."""
    runtime = Runtime(dtype="float32")
    plain = load(str(family / "target"), runtime=runtime)
    for gamma in (2, 7):
        engine = engine_of(other_side, family, name, runtime=runtime, gamma=gamma)
        settings: dict[str, Any] = {"max_new_tokens": 30, "sampling": SAMPLINGS, "batch_size": 3}
        found, expected = (each.generate(TEXTS, **settings) for each in (engine, plain))
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        follow = [[*range(1, 9), *answer.tokens, 5] for answer in expected[:2]]
        for _ in range(2):
            again, same = (each.generate(follow, max_new_tokens=15) for each in (engine, plain))
            assert [answer.tokens for answer in again] == [answer.tokens for answer in same]
            follow = [[*prompt, *answer.tokens, 6] for prompt, answer in zip(follow, same, strict=True)]
        local = load(str(family / "target"), drafter=name, draft=draft_of(family, name), gamma=gamma, runtime=runtime)
        alike = local.generate(TEXTS, **settings)
        assert [answer.accepted for answer in found] == [answer.accepted for answer in alike]


def test_what_is_kept_there_is_let_go(other_side: DrafterProcess, server: DraftServer, family: Path) -> None:
    """Guards the other side's memory, and what a second drafter keeps there against what the first lets go."""
    plain = load(str(family / "target"), runtime=RUNTIME)
    for _ in range(2):
        engine = engine_of(other_side, family, "autoregressive")
        for number in range(5):
            prompts = [[number, 1, 2], [number, 3, 4]]
            for _ in range(2):
                found, expected = (each.generate(prompts, max_new_tokens=6) for each in (engine, plain))
                assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
                prompts = [[*before, *answer.tokens] for before, answer in zip(prompts, found, strict=True)]
        gc.collect()
        assert 0 < len(server.saved) <= 2 * 2 + 2  # two rows of two engines, and what is not told yet


def test_drafting_in_turn(other_side: DrafterProcess, family: Path) -> None:
    """Guards γ that is measured, for which both sides take turns."""
    target = load_target(str(family / "target"), RUNTIME)
    speculation = Speculation(
        drafter="autoregressive", draft=str(draft_of(family, "autoregressive")), k=4, lengths="fixed"
    )
    drafter = other_side.load("autoregressive", target.facts, draft=speculation.draft, runtime=RUNTIME)
    engine = Engine(target, drafter, replace(speculation, gamma="auto"))
    assert isinstance(engine.speculation.gamma, int)
    plain = load(str(family / "target"), runtime=RUNTIME).generate(TEXTS, max_new_tokens=20)
    in_turn = Engine(target, drafter, speculation).generate(TEXTS, max_new_tokens=20)
    assert [answer.tokens for answer in in_turn] == [answer.tokens for answer in plain]
    assert drafter.passes() > 0


def test_both_sides_tell_when_they_were_at_work(other_side: DrafterProcess, family: Path) -> None:
    engine = engine_of(other_side, family, "autoregressive")
    engine.generate("hello", max_new_tokens=20)
    sides = {side: [span for span in engine.spans if span.side == side] for side in ("target", "draft")}
    # At the end no window is wanted any more, and none is told of.
    assert len(sides["target"]) == engine.clock.stats.rounds == len(sides["draft"]) + 2
    for spans in sides.values():
        assert all(span.began_s <= span.ended_s for span in spans)
        assert [span.began_s for span in spans] == sorted(span.began_s for span in spans)


def test_an_error_there_is_told_here_and_the_next_request_is_served(
    other_side: DrafterProcess, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards answers that belong to an earlier question: after an error, all is ignored until rows begin anew."""
    engine = engine_of(other_side, family, "autoregressive")
    expected = load(str(family / "target"), runtime=RUNTIME).generate("hello", max_new_tokens=20).tokens
    real = Draft.chain

    def failing(tokens: torch.Tensor, *given: Any, **named: Any) -> Draft:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no drafts today")
        return real(tokens, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "chain", failing)
        for _ in range(2):
            with pytest.raises(DrafterLostError, match="no drafts today"):
                engine.generate("hello", max_new_tokens=20)
    assert engine.generate("hello", max_new_tokens=20).tokens == expected


def warmer(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits / 1.3


class UnreadableError(Exception):
    """What the other side finds when it reads a processor."""


class Unreadable:
    """A processor that can be sent, and not be read."""

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def __reduce__(self) -> tuple[Any, ...]:
        return read_by_nobody, ()


def read_by_nobody() -> None:
    raise UnreadableError("not here")


def test_processors_that_the_other_side_does_not_have(
    other_side: DrafterProcess, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards processors that a user's script defines: the other process could not read them, and was gone for good."""
    engine, plain = engine_of(other_side, family, "pard"), load(str(family / "target"), runtime=RUNTIME)
    settings: dict[str, Any] = {"temperature": 0.8, "seed": 1}

    def text(engine: Engine, *processors: Any) -> list[int]:
        return engine.generate("hello", max_new_tokens=20, sampling=Sampling(processors=processors, **settings)).tokens

    expected = text(plain, warmer)
    assert text(engine, warmer) == expected
    with monkeypatch.context() as patch:
        patch.setattr(warmer, "__module__", "__main__")
        with pytest.warns(UserWarning, match="processors .* are not known to the drafter's process"):
            assert text(engine, warmer) == expected
    with pytest.warns(UserWarning, match="are not known"):
        assert text(engine, lambda ids, logits: logits / 1.3) == expected
    with pytest.raises(DrafterLostError, match="the drafter's process has failed: UnreadableError: not here"):
        text(engine, Unreadable())
    assert text(engine, warmer) == expected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"versions": {"paradraft": "0.0.1"}}, "the target's side has paradraft 0.0.1, the drafter's paradraft"),
        ({"draft": "no/such/folder"}, "no/such/folder"),
        ({"capacity": 10_000}, "has room for"),
        ({"vocab_size": 5_000}, "knows"),
    ],
)
def test_what_does_not_fit_is_told(other_side: DrafterProcess, family: Path, change: dict[str, Any], told: str) -> None:
    target = load_target(str(family / "target"), RUNTIME)
    facts = {name: value for name, value in change.items() if name in vars(target.facts)}
    setup = Setup(
        drafter="pard", draft=str(draft_of(family, "pard")), runtime=RUNTIME, versions=versions(),
        target=replace(target.facts, **facts),
    )  # fmt: skip
    with pytest.raises(ValueError, match=told):
        RemoteDrafter(other_side, replace(setup, **{name: change[name] for name in change if name not in facts}))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, within the bound."""
    ends_s = time.monotonic() + BOUND_S
    while time.monotonic() < ends_s:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


CHILD = """
import os, sys
from paradraft import Placement, load
from paradraft.models.runtime import Runtime
engine = load(sys.argv[1], drafter="autoregressive", draft=sys.argv[1], gamma=4,
    runtime=Runtime(dtype="float64", compiled=False), placement=Placement(draft_cpus=(min(os.sched_getaffinity(0)),)))
print(engine.drafter._process._process.pid, *engine.generate("hello", max_new_tokens=9).tokens, flush=True)
sys.stdin.read()
"""


def test_a_side_that_does_not_read_is_given_up() -> None:
    """Guards requests that wait for ever where no more fits between the two sides."""
    ours, theirs = socket.socketpair()
    process = DrafterProcess(Placement(draft_timeout_s=0.5), Channel(Connection(ours.detach())))
    began_s = time.monotonic()
    with theirs, pytest.raises(DrafterLostError, match=r"has said nothing for 0\.5 s and was given up"):
        tell_much(process)
    assert time.monotonic() - began_s < BOUND_S


def tell_much(process: DrafterProcess) -> None:
    for _ in range(100):
        process.tell("join", [Request(tokens=[1] * 10_000)])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPUs cannot be chosen here")
def test_a_side_that_is_killed_or_hangs_ends_the_other(family: Path) -> None:
    """Guards requests that wait for ever, and processes that are left behind."""
    cpu = min(os.sched_getaffinity(0))
    target = str(family / "target")
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:  # which is killed while its drafter waits for it, at the end of this test
        placement = Placement(draft_cpus=(cpu,), draft_timeout_s=1.0)
        engine = load(target, drafter="autoregressive", draft=target, gamma=4, runtime=RUNTIME, placement=placement)
        process = process_of(engine)
        assert os.sched_getaffinity(process.pid) == {cpu}
        plain = load(target, runtime=RUNTIME).generate("hello", max_new_tokens=40).tokens
        assert engine.generate("hello", max_new_tokens=40).tokens == plain

        with closing(engine.stream("hello", max_new_tokens=60)) as chunks:  # type: ignore[type-var]
            next(chunks)
            process.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            with pytest.raises(DrafterLostError, match="has said nothing for 1 s and was ended"):
                list(chunks)
        assert time.monotonic() - began_s < BOUND_S and is_gone(process.pid)
        with pytest.raises(DrafterLostError, match="was ended: load the models anew"):
            engine.generate("hello", max_new_tokens=40)

        engine = load(target, drafter="autoregressive", draft=target, gamma=4, runtime=RUNTIME, placement=placement)
        process = process_of(engine)
        with closing(engine.stream("hello", max_new_tokens=60)) as chunks:  # type: ignore[type-var]
            next(chunks)
            process.kill()
            with pytest.raises(DrafterLostError, match="has ended, exit code -9"):
                list(chunks)

        assert process.poll() is not None
        assert other.stdout is not None
        pid, *tokens = map(int, other.stdout.readline().split())
        assert tokens == plain[: len(tokens)] and len(tokens) == 9
        other.kill()
        assert is_gone(pid)


def test_an_engine_that_is_dropped_leaves_no_process(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the drafter's process against a `random.py` in the folder where the user is, too."""
    (tmp_path / "random.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    target = str(family / "target")
    placement = Placement(draft_cpus=(min(os.sched_getaffinity(0)),))
    engine = load(target, drafter="autoregressive", draft=target, gamma=4, runtime=RUNTIME, placement=placement)
    assert engine.generate("hello", max_new_tokens=8).tokens
    process = process_of(engine)
    assert process.poll() is None
    pid = process.pid
    del engine, process
    gc.collect()
    assert is_gone(pid)


def test_placements() -> None:
    assert cpus_of("0-2,5+9") == (0, 1, 2, 5, 9) and cpus_of(None) is None
    for text in ("", "a", "3-1", "-1", "0,,1", "0-99999"):
        with pytest.raises(ValueError, match="CPUs"):
            cpus_of(text)
    before = os.sched_getaffinity(0)
    with on_cpus((min(before),)):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    for wrong, told in [
        ({"target_cpus": (max(before) + 1,)}, f"target_cpus: there is no CPU {max(before) + 1} for this process"),
        ({"draft_cpus": ()}, "draft_cpus="),
        ({"draft_cpus": [0]}, "draft_cpus="),
        ({"draft_timeout_s": 0}, "draft_timeout_s=0"),
        ({"draft_timeout_s": float("inf")}, "draft_timeout_s=inf"),
        ({"draft_timeout_s": "x"}, "draft_timeout_s='x'"),
    ]:
        with pytest.raises(ValueError, match=told):
            Placement(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of its own, to draft ahead: set gamma too"):
        load("pocket", drafter="pard", placement=Placement(draft_cpus=(min(before),)), lengths="fixed")
    with pytest.raises(ValueError, match=r"placement='1': use a Placement"):
        load("pocket", drafter="pard", gamma=4, placement="1")  # type: ignore[arg-type]


TWO_SIDES = """
import os, signal, sys, time
from pathlib import Path
from paradraft import Placement, load
from paradraft.decode.pearl.remote import DrafterLostError
from paradraft.models.runtime import Runtime
target, note = sys.argv[1], Path(sys.argv[2])
if os.environ["RANK"] == "1":
    note.write_text(str(os.getpid()))
engine = load(target, drafter="autoregressive", draft=target, gamma=4,
    runtime=Runtime(dtype="float64", compiled=False), placement=Placement(draft_timeout_s=2.0))
print(*engine.generate("hello", max_new_tokens=40).tokens, flush=True)
os.kill(int(note.read_text()), signal.SIGSTOP)
try:
    engine.generate("hello", max_new_tokens=40)
except DrafterLostError as error:
    print(error, flush=True)
os.kill(int(note.read_text()), signal.SIGKILL)
os._exit(0)
"""


def test_two_sides_that_torchrun_starts(family: Path, tmp_path: Path) -> None:
    """Guards the way over a network: the same text, and an end when the other side hangs."""
    script, target = tmp_path / "sides.py", str(family / "target")
    script.write_text(TWO_SIDES)
    outcome = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", "localhost:0", str(script), target, str(tmp_path / "pid")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    plain = load(target, runtime=RUNTIME).generate("hello", max_new_tokens=40).tokens
    answer, told = outcome.stdout.splitlines()
    assert list(map(int, answer.split())) == plain
    assert told.startswith("the drafter's process has said nothing for 2 s and was given up: end it on its machine"), (
        outcome.stderr
    )
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_more_than_two_sides_are_refused(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "3")
    target = str(family / "target")
    with pytest.raises(ValueError, match="torchrun has started 3 processes: a target and its drafter are 2"):
        load(target, drafter="autoregressive", draft=target, gamma=4, runtime=RUNTIME)
    load(target, runtime=RUNTIME)


def test_a_benchmark_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two processes that wait for one another, as both measure."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    benchmark = Benchmark(target="pocket", methods=[Method.parse("ar")], sampling=Sampling(), runtime=RUNTIME, runs=1)
    with pytest.raises(ValueError, match="a benchmark is one process: start it without torchrun"):
        check(benchmark, 1)


@contextlib.contextmanager
def handled(number: signal.Signals, handler: Callable[..., None]) -> Iterator[None]:
    """Inside, a signal is handled so."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture(scope="module")
def remote(family: Path) -> Iterator[Engine]:
    """An engine whose drafter has its own process; the draft is the target."""
    target = str(family / "target")
    placement = Placement(draft_device="cpu", draft_timeout_s=30.0)
    with load(target, drafter="autoregressive", draft=target, gamma=4, runtime=RUNTIME, placement=placement) as engine:
        yield engine


@pytest.mark.parametrize("turns", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_interrupted_anywhere(family: Path, remote: Engine, turns: int) -> None:
    """Guards a notebook whose user stops an answer: the channel stays in step, whatever was being sent or read."""
    listening: list[int] = []

    def interrupt(*_: object) -> None:
        if listening:  # an answer may have ended before its turn comes to be interrupted
            raise KeyboardInterrupt

    with handled(signal.SIGINT, interrupt):
        plain = load(str(family / "target"), runtime=RUNTIME)
        expected, interrupted = plain.generate("hello", max_new_tokens=24).tokens, 0
        for turn in range(turns):
            timer = threading.Timer(0.001 + 0.028 * turn / turns, signal.raise_signal, [signal.SIGINT])
            timer.start()
            try:
                listening.append(turn)
                remote.generate("hello", max_new_tokens=24)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                listening.clear()
            timer.join()
            assert remote.generate("hello", max_new_tokens=24).tokens == expected
    assert interrupted


def test_a_late_answer_is_no_answer_to_the_next_question(remote: Engine) -> None:
    """Guards windows against those of a question whose answer nobody has waited for."""
    drafter = remote.drafter
    drafter.start(Drafting(), torch.device("cpu"))
    drafter.join([Request(id=0, tokens=[1, 2, 3], max_new_tokens=9)], Committed(tokens=[[1, 2, 3]]))
    drafter.begin([5], None)
    assert drafter.propose([2]).tokens.shape == (1, 2)
    drafter.begin([5], None)
    assert isinstance(drafter.passes(), int)


def test_a_fork_does_not_end_the_drafter(remote: Engine) -> None:
    """Guards programs that fork, as data loaders do, after their models were loaded."""
    expected = remote.generate("hello", max_new_tokens=12).tokens
    if not (child := os.fork()):
        weakref.finalize._exitfunc()  # what the interpreter does at its end
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert remote.generate("hello", max_new_tokens=12).tokens == expected


def test_two_processes_of_torchrun_meet_once(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first process against waiting for a second one that has ended."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("paradraft.decode.pearl.channel._MET", [True])
    with pytest.raises(ValueError, match="load one only"):
        load(str(family / "target"), drafter="autoregressive", draft=str(family / "draft"), gamma=4, runtime=RUNTIME)
