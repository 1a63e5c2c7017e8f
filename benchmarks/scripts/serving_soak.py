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
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families
from serving_clients import LIMITS, Client, Record
from serving_requests import Good, Request, answer_of, difference, good_requests, wrong_requests

import paradraft
from paradraft.bench.report.summary import write_json
from paradraft.environment import describe_machine
from paradraft.models.runtime import Runtime

SERVE = ["serve", "-k", "4", "--max-batch", "8", "--generation-config", "none", "--port", "0"]
MOST_TOLD = 20
"""Of differences and unexpected answers, in the file."""
MOST_POINTS = 120
"""Of the series of memory, in the file."""
BURST = 72
"""Requests that are sent at once; most ask for several answers, and 72 answers are decoded or wait."""
IDLE_S, CLOSE_S = 30.0, 5.0
"""Seconds that the server has to become idle after the last request, and to close connections of clients that went."""


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
