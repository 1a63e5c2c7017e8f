"""How long a short request waits for its first token while a server reads long prompts, in versions of the code.

git worktree add build/before COMMIT
python benchmarks/scripts/long_prompts.py MODEL --trees build/before,. --json FILE.json

A turn has a stream that runs, four long prompts, and a short request a moment later. It gives the time to the first
token of the short request (beside it that of the same request alone), the worst gap of the running stream and its
median, and the time until the last of the long prompts has its first token (beside it that of one after the other
alone, four times the time of one). The servers take turns; those that wait are stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2

from paradraft.bench.report.summary import write_json
from paradraft.environment import describe_machine

LONG, WORDS, TURNS = 4, 1500, 5
COMMON = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
SHORT = "What is the capital of France?"


class Server:
    """A server of one version of the code, which is stopped unless it is asked."""

    def __init__(self, tree: str, model: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = ["--target", model, "--drafter", "none", "--port", str(port)]
        command = [sys.executable, "-m", "paradraft", "serve", *options]
        source = {**os.environ, "PYTHONPATH": str(Path(tree).resolve() / "src")}
        self.process = subprocess.Popen(command, env=source, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                httpx2.get(f"{self.url}/health").raise_for_status()
                break
            except httpx2.HTTPError:
                assert self.process.poll() is None, f"the server of {tree} has ended"
                time.sleep(0.2)
        self.sleep()

    def sleep(self) -> None:
        """Stops it."""
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)


async def streamed(client: httpx2.AsyncClient, prompt: str, tokens: int) -> list[float]:
    """Times of the events of a stream, in seconds after the request."""
    began_s, times = time.perf_counter(), []
    asked = {
        "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True, "temperature": 0,
    }  # fmt: skip
    async with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                times.append(time.perf_counter() - began_s)
    return times


def words(count: int, seed: int) -> str:
    """A text that no other begins like."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(COMMON) for _ in range(count))


async def turn(url: str, seed: int) -> dict[str, float]:
    """All requests of a turn; times in seconds."""
    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
        alone = await streamed(client, SHORT, 8)
        one = await streamed(client, words(WORDS, seed), 1)
        running = asyncio.create_task(streamed(client, "Write a long story about a lighthouse.", 1000))
        await asyncio.sleep(0.5)
        long = [asyncio.create_task(streamed(client, words(WORDS, seed + each), 1)) for each in range(1, LONG + 1)]
        await asyncio.sleep(0.2)
        short = await streamed(client, SHORT, 8)
        read = max(times[0] for times in await asyncio.gather(*long))
        events = await running
    gaps = [later - earlier for earlier, later in itertools.pairwise(events)]
    return {
        "short_alone_s": alone[0], "short_s": short[0],
        "gap_median_s": statistics.median(gaps), "gap_worst_s": max(gaps),
        "long_alone_s": LONG * one[0], "long_s": read,
    }  # fmt: skip


def main() -> None:
    """Lets the versions take turns, and writes their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--trees", default=".")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    servers = {tree: Server(tree, args.model) for tree in args.trees.split(",")}
    found: dict[str, list[dict[str, float]]] = {tree: [] for tree in servers}
    try:
        for number in range(TURNS):
            for tree, server in servers.items():
                server.wake()
                found[tree].append(asyncio.run(turn(server.url, 100 * number)))
                server.sleep()
                print(tree, {name: round(value, 3) for name, value in found[tree][-1].items()}, flush=True)
    finally:
        for server in servers.values():
            server.process.kill()
    medians = {
        tree: {name: statistics.median(each[name] for each in turns) for name in turns[0]}
        for tree, turns in found.items()
    }
    print(json.dumps(medians, indent=2))
    if args.json is not None:
        content: dict[str, Any] = {
            "model": args.model, "turns": found, "medians": medians, "machine": describe_machine("cpu")
        }  # fmt: skip
        write_json(args.json, content)


if __name__ == "__main__":
    main()
