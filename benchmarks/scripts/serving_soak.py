"""Whether the server stands minutes of everything: good, wrong, cancelled and oversized requests, and bursts of them.

    python benchmarks/scripts/serving_soak.py --json FILE.json
    python benchmarks/scripts/serving_soak.py --minutes 1 --most-growth 0.1
    python benchmarks/scripts/serving_soak.py --target MODEL.gguf --drafter auto --capacity 2048 --json FILE.json

It starts `paradraft serve`, and several clients send it a seeded mixture: completions and chats, long prompts and
short ones, streams and whole answers, fast readers and slow ones. The goals: every good answer is the one that
an engine without a drafter gave before, every wrong request gets the status and the parameter that it should, memory
stays flat after the warm-up, no answer is left over, and the server ends by a signal with exit code 0.
If a goal is missed it is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families
from serving_requests import JSON, Good, Request, answer_of, difference, good_requests, wrong_requests

import paradraft
from paradraft.bench.report.summary import write_json
from paradraft.environment import describe_machine
from paradraft.models.runtime import Runtime
from paradraft.serve.limits import Limits

SERVE = ["serve", "-k", "4", "--max-batch", "8", "--generation-config", "none", "--port", "0"]
LIMITS = Limits(max_batch=8)
"""Those of the server that `SERVE` starts."""
MOST_TOLD = 20
"""Of differences and unexpected answers, in the file."""
MOST_POINTS = 120
"""Of the series of memory, in the file."""
BURST = 72
"""Requests that are sent at once; most ask for several answers, and 72 answers are decoded or wait."""
IDLE_S, CLOSE_S = 30.0, 5.0
"""Seconds that the server has to become idle after the last request, and to close connections of clients that went."""


@dataclass
class Record:
    """What all clients have seen.

    Args:
        counts: requests by kind and by status; those that were told to come again are counted each time.
        compared: good answers.
        differences: of them from what they should be.
        unexpected: responses that should be others, and connections that broke.
        latencies_s: of good answers, from the request that was let in.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    compared: int = 0
    differences: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


class Client:
    """Sends requests one after the other, and looks at what comes back.

    Args:
        http: of the server.
        good: what it may ask.
        wrong: what it asks and is refused.
        seed: of its choices.
        record: what it has seen.
    """

    def __init__(
        self, http: httpx2.AsyncClient, good: Sequence[Good], wrong: Sequence[Request], seed: str, record: Record
    ) -> None:
        self._http, self._good, self._wrong = http, good, wrong
        self._chooser, self._record = random.Random(seed), record

    async def run(self, end_s: float) -> None:
        """Sends one request after the other until a time."""
        kinds = {self.ask_good: 50, self.ask_wrong: 25, self.leave: 20, self.ask_too_much: 5}
        while time.monotonic() < end_s:
            (ask,) = self._chooser.choices(list(kinds), list(kinds.values()))
            await ask()
            await asyncio.sleep(self._chooser.uniform(0.0, 0.05))

    async def burst(self, end_s: float, requests: int, every_s: float) -> None:
        """Sends more at once than the queue holds, again and again."""
        while time.monotonic() < end_s:
            await asyncio.gather(*(self.ask_good("burst") for _ in range(requests)))
            await asyncio.sleep(min(every_s, max(0.0, end_s - time.monotonic())))

    async def ask_good(self, kind: str = "good") -> None:
        """A request that is answered, to readers of which some are slow."""
        good = self._chooser.choice(self._good)
        body = self._body(good, streamed := self._chooser.random() < 0.5)
        pause_s = self._chooser.choice((0.0, 0.0, 0.0, 0.05)) if streamed else 0.0
        if (found := await self._exchange(kind, Request(content=body, status=200, path=good.path), pause_s)) is None:
            return
        self._record.compared += 1
        try:
            told = difference(good.wanted, answer_of(found, streamed))
        except (ValueError, LookupError, TypeError) as error:
            told = f"{type(error).__name__}: {error} in {found[-200:]!r}"
        if told is not None:
            self._record.differences.append(f"{body.decode()}: {told}")

    async def ask_wrong(self) -> None:
        """A request that is refused, and says which parameter is to blame."""
        wrong = self._chooser.choice(self._wrong)
        found = await self._exchange("wrong", wrong)
        if found is not None and (param := json.loads(found)["error"]["param"]) != wrong.param:
            self._record.unexpected.append(f"{wrong}: it names {param}")

    async def ask_too_much(self) -> None:
        """A body that is too long, with its length before it or without."""
        content = b'{"prompt": "' + b"a" * LIMITS.max_body_bytes + b'"}'
        await self._exchange("oversized", Request(content=content, status=413), in_pieces=self._chooser.random() < 0.5)

    async def leave(self) -> None:
        """A client that goes: in the middle of its body, before the first token, or in the middle of a stream."""
        how = self._chooser.choice(("in its body", "early", "in a stream"))
        good = self._chooser.choice(self._good)
        body = self._body(good, how == "in a stream" or self._chooser.random() < 0.5)
        try:
            if how == "in its body":
                await self._leave_body(body, good.path)
            elif how == "in a stream":
                await self._leave_stream(body, good.path)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._chooser.uniform(0.0, 0.05)):
                        await self._exchange("cancelled too late", Request(content=body, status=200, path=good.path))
        except (httpx2.HTTPError, OSError) as error:
            self._record.unexpected.append(f"cancelled, {body!r}: {type(error).__name__}: {error}")
        self._record.counts["cancelled", how] += 1

    async def _leave_body(self, body: bytes, path: str) -> None:
        _, writer = await asyncio.open_connection(self._http.base_url.host, self._http.base_url.port)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _leave_stream(self, body: bytes, path: str) -> None:
        """Reads a few events at most."""
        most = self._chooser.randint(1, 4)
        async with self._http.stream("POST", path, content=body, headers=JSON) as response:
            if response.status_code not in (200, 429):
                self._record.unexpected.append(f"cancelled, {body!r}: {response.status_code}")
            async for _ in response.aiter_lines():
                if (most := most - 1) == 0:
                    return

    def _body(self, good: Good, streamed: bool) -> bytes:
        """A request, with something that changes no text."""
        more: dict[str, Any] = {"speculation": self._chooser.choice((None, None, "off", 0, 1, 2, 3, 4))}
        if streamed:
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(good.body | more).encode()

    async def _exchange(
        self, kind: str, asked: Request, pause_s: float = 0.0, *, in_pieces: bool = False
    ) -> bytes | None:
        """The body of a response; None if it is not the one that it should be. Comes again if it is told to."""
        told = f"{kind}, {asked.method} {asked.path} {asked.content[:100]!r}"
        refused_s = time.monotonic()
        try:
            while True:
                begun_s = time.monotonic()
                status, again_s, found = await self._send(asked, pause_s, in_pieces)
                self._record.counts[kind, str(status)] += 1
                if status != 429 or time.monotonic() > refused_s + LIMITS.timeout_s:
                    break
                await asyncio.sleep(again_s * self._chooser.uniform(0.5, 1.5))
        except httpx2.HTTPError as error:
            self._record.counts[kind, type(error).__name__] += 1
            self._record.unexpected.append(f"{told}: {type(error).__name__}: {error}")
            return None
        if status != asked.status:
            self._record.unexpected.append(f"{told}: {status} in place of {asked.status}: {found[:300]!r}")
            return None
        if status == 200:
            self._record.latencies_s.append(time.monotonic() - begun_s)
        return found

    async def _send(self, asked: Request, pause_s: float, in_pieces: bool) -> tuple[int, float, bytes]:
        """Status, seconds after which to come again, and body of a response."""
        content = _pieces(asked.content) if in_pieces else asked.content
        async with self._http.stream(asked.method, asked.path, content=content, headers=asked.headers) as response:
            found = b""
            async for part in response.aiter_bytes():
                found += part
                await asyncio.sleep(pause_s)
        return response.status_code, float(response.headers.get("Retry-After", 1)), found


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), 2**16):
        yield content[begin : begin + 2**16]


class Server:
    """The server's process.

    Args:
        command: what it runs.
        log: where it writes.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log, self._begun_s = log, time.monotonic()
        with log.open("wb") as out:
            self._popen = subprocess.Popen([sys.executable, "-m", "paradraft", *command], stderr=out)
        self._process = psutil.Process(self._popen.pid)
        self.url = self._wait()

    def _wait(self) -> str:
        """The address, once it is there."""
        while (found := re.search(r"http://[\d.:]+", self.log.read_text(encoding="utf-8"))) is None:
            if self._popen.poll() is not None:
                raise SystemExit(f"the server has not started:\n{self.log.read_text(encoding='utf-8')}")
            time.sleep(0.1)
        httpx2.get(f"{found[0]}/health", timeout=LIMITS.timeout_s)  # it says where it is before it accepts
        return found[0]

    @property
    def rss_bytes(self) -> int:
        """Memory of the process and of its children."""
        return sum(each.memory_info().rss for each in [self._process, *self._process.children(recursive=True)])

    @property
    def files(self) -> int:
        """Open files and connections."""
        return int(self._process.num_fds())

    def end(self) -> int | None:
        """The exit code after a signal to end; None if it has not ended in time."""
        self._popen.send_signal(signal.SIGTERM)
        try:
            return self._popen.wait(LIMITS.drain_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Ends it in any case."""
        self._popen.kill()
        self._popen.wait()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is judged.

    Args:
        record: of the clients.
        rss_bytes: the server's memory again and again, after the warm-up.
        gauges: what should be 0 at the end, by name.
        last: what was different in the last good answer, from an idle server; None if nothing was.
        exit_code: after the signal; None if it did not end in time.
        log: of the server.
    """

    record: Record
    rss_bytes: list[int]
    gauges: dict[str, float]
    last: str | None
    exit_code: int | None
    log: str

    @property
    def fifths(self) -> tuple[float, float]:
        """Median memory in the first and in the last fifth of the time."""
        size = max(1, len(self.rss_bytes) // 5)
        return statistics.median(self.rss_bytes[:size]), statistics.median(self.rss_bytes[-size:])

    @property
    def growth(self) -> float:
        """Of the memory from the first to the last fifth, as a share."""
        first, last = self.fifths
        return last / first - 1.0

    def missed(self, most_growth: float) -> list[str]:
        """The goals that are missed, one line each."""
        record, found = self.record, []
        sent = {kind for kind, _ in record.counts}
        for kind in ("good", "wrong", "cancelled", "oversized", "burst"):
            if kind not in sent:
                found.append(f"no request of the kind {kind!r} was sent")
        if not record.counts["burst", "429"]:
            found.append("the queue was never full")
        if record.differences:
            found.append(f"{len(record.differences)} answers differ, the first: {record.differences[0]}")
        if record.unexpected:
            found.append(f"{len(record.unexpected)} responses are unexpected, the first: {record.unexpected[0]}")
        if self.growth > most_growth:
            found.append(f"memory has grown by {self.growth:.1%}, and {most_growth:.1%} is allowed")
        for name, count in self.gauges.items():
            if count:
                found.append(f"{name}: {count:g} at the end, when there should be none")
        if self.last is not None:
            found.append(f"the last answer: {self.last}")
        if self.exit_code != 0:
            told = "it has not ended in time" if self.exit_code is None else f"its exit code is {self.exit_code}"
            found.append(f"after SIGTERM: {told}")
        if "Traceback" in self.log or " while answering a request" in self.log:
            found.append("the server's log has an error")
        return found


def gauges_of(text: str) -> dict[str, float]:
    """What should be 0 when a server has nothing to do, from its /metrics."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    failed = [sample.value for sample in samples if sample.labels.get("finished_reason") == "error"]
    values = {sample.name: sample.value for sample in samples}
    return {
        "answers decoded": values["vllm:num_requests_running"],
        "answers waiting": values["vllm:num_requests_waiting"],
        "answers failed": sum(failed),
    }


async def _watch(server: Server, every_s: float, series: list[tuple[float, int]]) -> None:
    begun_s = time.monotonic()
    while True:
        series.append((time.monotonic() - begun_s, server.rss_bytes))
        await asyncio.sleep(every_s)


async def soak(
    server: Server, good: Sequence[Good], wrong: Sequence[Request], given: argparse.Namespace
) -> tuple[Record, list[tuple[float, int]], dict[str, float], str | None]:
    """Sends the mixture for some time, waits until the server is idle, and asks once more.

    Args:
        server: which answers.
        good: what it should answer.
        wrong: what it should refuse.
        given: the options.

    Returns:
        What the clients saw, memory by seconds, what should be 0 at the end, what is different in the last answer.
    """
    seconds, seed = 60 * given.minutes, given.seed
    record, series, files = Record(), list[tuple[float, int]](), server.files
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=given.clients, keepalive_expiry=2.0)
    async with httpx2.AsyncClient(base_url=server.url, timeout=LIMITS.timeout_s, limits=limits) as http:
        end_s = time.monotonic() + seconds
        watching = asyncio.create_task(_watch(server, min(6.0, seconds / 60), series))
        askers = [Client(http, good, wrong, f"{seed}-{number}", record) for number in range(given.clients)]
        bursts = Client(http, good, wrong, f"{seed}-bursts", record).burst(
            end_s, BURST, min(given.burst_s, seconds / 3)
        )
        await asyncio.gather(bursts, *(asker.run(end_s) for asker in askers))
        watching.cancel()
        idle_s = time.monotonic() + IDLE_S
        while any((gauges := gauges_of((await http.get("/metrics")).text)).values()) and time.monotonic() < idle_s:
            await asyncio.sleep(0.2)
        reply = await http.post(good[0].path, json=good[0].body)
        last = difference(good[0].wanted, answer_of(reply.content, False)) if reply.is_success else reply.text
    gauges["connections and files more than before"] = await _more_files(server, files)
    return record, series, gauges, last


async def _more_files(server: Server, before: int) -> int:
    """How many more are open than before, a moment after the clients have gone."""
    end_s = time.monotonic() + CLOSE_S
    while server.files > before and time.monotonic() < end_s:
        await asyncio.sleep(0.1)
    return max(server.files - before, 0)


def _told(outcome: Outcome, series: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """What the file has of an outcome."""
    record, (first, last) = outcome.record, outcome.fifths
    counts: dict[str, dict[str, int]] = {}
    for (kind, status), count in sorted(record.counts.items()):
        counts.setdefault(kind, {})[status] = count
    hundredths = statistics.quantiles(record.latencies_s, n=100, method="inclusive")
    step = -(-len(series) // MOST_POINTS)
    return {
        "requests": counts,
        "compared": record.compared,
        "differences": {"count": len(record.differences), "first": record.differences[:MOST_TOLD]},
        "unexpected": {"count": len(record.unexpected), "first": record.unexpected[:MOST_TOLD]},
        "latency_s": {"p50": hundredths[49], "p99": hundredths[98]},
        "rss_bytes": {
            "first_fifth": first, "last_fifth": last, "growth": outcome.growth, "max": max(rss for _, rss in series),
            "at_s": [round(at_s, 1) for at_s, _ in series[::step]], "series": [rss for _, rss in series[::step]],
        },
        "left_at_the_end": outcome.gauges,
        "last_answer": outcome.last or "equal",
        "exit_code": outcome.exit_code,
    }  # fmt: skip


def _command(given: argparse.Namespace) -> list[str]:
    """Of the server."""
    named = {"target": given.target, "drafter": given.drafter, "draft": given.draft, "capacity": given.capacity}
    return [*SERVE, *(part for name, value in named.items() if value is not None for part in (f"--{name}", str(value)))]


def main() -> None:
    """Reads the options, soaks the server, judges, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--drafter", default="pard")
    parser.add_argument("--draft", help="a draft model, if the drafter has one")
    parser.add_argument("--capacity", type=int, help="tokens of prompt and answer; by default the model's limit")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=6, help="beside the one that sends bursts")
    parser.add_argument("--burst-s", type=float, default=15.0, help="seconds between bursts")
    parser.add_argument("--requests", type=int, default=60, help="distinct good ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", type=float, default=0.1, help="share of the time before memory counts")
    parser.add_argument("--most-growth", type=float, default=0.02, help="of memory, as a share")
    parser.add_argument("--note", help="about the machine, for the file")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    given = parser.parse_args()
    print(f"answering {given.requests} requests offline", flush=True)
    command = _command(given)
    engine = paradraft.load(given.target, drafter="none", runtime=Runtime(capacity=given.capacity))
    good, wrong = good_requests(engine, given.requests, given.seed), wrong_requests(engine)
    del engine
    with tempfile.TemporaryDirectory() as folder:
        server = Server(command, Path(folder) / "log")
        try:
            print(f"sending for {given.minutes:g} minutes to {server.url}", flush=True)
            record, series, gauges, last = asyncio.run(soak(server, good, wrong, given))
            exit_code = server.end()
        finally:
            server.kill()
        log = server.log.read_text(encoding="utf-8")
    warm = [rss for at_s, rss in series if at_s >= 60 * given.minutes * given.warm_up]
    outcome = Outcome(record=record, rss_bytes=warm, gauges=gauges, last=last, exit_code=exit_code, log=log)
    missed, told = outcome.missed(given.most_growth), _told(outcome, series)
    print(json.dumps({key: value for key, value in told.items() if key != "rss_bytes"}, indent=1))
    first, last_fifth = outcome.fifths
    print(f"memory: {first / 2**20:.1f} MiB, at the end {last_fifth / 2**20:.1f} MiB ({outcome.growth:+.2%})")
    if given.json:
        settings = {
            name: getattr(given, name)
            for name in ("minutes", "clients", "burst_s", "requests", "seed", "warm_up", "most_growth", "note")
        }
        write_json(
            given.json,
            {
                "machine": describe_machine("cpu"),
                "server": ["paradraft", *command],
                **settings,
                **told,
                "missed": missed,
            },
        )
    if missed:
        print(*(f"missed: {line}" for line in missed), "the server's log:", log, sep="\n", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
