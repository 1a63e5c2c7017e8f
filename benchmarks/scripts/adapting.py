"""What a drafter wins while its server answers requests of another kind than it was trained on.

    python benchmarks/scripts/adapting.py --target FILE --draft FOLDER --requests FILE.jsonl --folder FOLDER \\
        --json benchmarks/FILE.json

Starts `paradraft serve --adapt`, asks it the requests, a few at a time, and waits for the refresh under way. The file
has the refreshes with the number of requests that were answered before each, and the tokens per pass of the answers, in
the order in which they ended. Every drafter that was in use is kept in FOLDER/kept, for `draft_lengths.py`.

With `--turns` it measures instead what answers lose in speed while the drafter is trained: from `--log`, a log of an
earlier run, which gives the training process something to learn, it is stopped and goes on in turns of 16 requests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paradraft.bench.report.summary import write_json
from paradraft.environment import describe_machine

TURN = 16
"""Requests of a turn."""
WINDOW = 50
"""Answers whose tokens per pass are one figure."""


def ask(address: str, message: str, seed: int, args: argparse.Namespace) -> int:
    """Sends a request, waits for its answer, and returns its tokens."""
    body = {
        "model": Path(args.target).name.removesuffix(".gguf"), "messages": [{"role": "user", "content": message}],
        "max_tokens": args.tokens, "temperature": args.temperature, "seed": seed,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request, timeout=600))
    return int(answer["usage"]["completion_tokens"])


def turns(address: str, training: int, messages: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Speeds of the same requests with the training process, by its id, stopped and running."""
    figures, stat = [], Path(f"/proc/{training}/stat")
    for turn in range(args.turns):
        is_training = turn % 2 == 1
        os.kill(training, signal.SIGCONT if is_training else signal.SIGSTOP)
        used_s, began_s = cpu_s(stat), time.monotonic()
        with ThreadPoolExecutor(args.at_once) as executor:
            some = messages[turn // 2 * TURN :][:TURN]
            tokens = sum(executor.map(lambda pair: ask(address, pair[1], pair[0], args), enumerate(some)))
        seconds = time.monotonic() - began_s
        training_s = cpu_s(stat) - used_s
        figures.append({"is_training": is_training, "tokens": tokens, "seconds": seconds, "training_cpu_s": training_s})
        print(figures[-1], flush=True)
    os.kill(training, signal.SIGCONT)
    return figures


def cpu_s(stat: Path) -> float:
    """CPU time of a process with all its threads."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(served: Path, kept: Path, done: list[int], refreshes: list[dict[str, Any]], is_over: threading.Event) -> None:
    """Records each refresh, and copies its drafter."""
    began_s, newest = time.monotonic(), None
    while not is_over.wait(0.5):
        file = served / "newest.json"
        state = json.loads(file.read_bytes()) if file.exists() else {}
        if state.get("last") in (None, newest):
            continue
        newest = state["last"]
        refreshes.append({"requests": len(done), "seconds": time.monotonic() - began_s, **newest})
        if newest["after"]["step"]:
            shutil.copytree(served / state["drafter"], kept / state["drafter"])
        print(refreshes[-1], flush=True)


def lengths(log: Path) -> list[dict[str, float]]:
    """Tokens per pass of each `WINDOW` answers of a log whose rounds all draft."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    windows = [lines[start : start + WINDOW] for start in range(0, len(lines), WINDOW)]
    figures = []
    for last, window in enumerate(windows, start=1):
        tokens = sum(len(line["tokens"]) - line["prompt_tokens"] for line in window)
        rounds = sum(len(line["rounds"]) for line in window)
        figures.append({"answers": min(last * WINDOW, len(lines)), "tokens_per_pass": tokens / rounds})
    return figures


def main() -> None:
    """Runs the server and its requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--requests", type=Path, required=True, help="JSONL of messages")
    parser.add_argument("--behind", default="", help="text behind each message")
    parser.add_argument("--most", type=int, default=500)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("-k", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rest-s", type=float, default=200.0, help="time after the last answer")
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    messages = [json.loads(line)["messages"][0]["content"] + args.behind for line in args.requests.open()]
    random.Random(1).shuffle(messages)
    served, kept, said = args.folder / "served", args.folder / "kept", args.folder / "serve.log"
    kept.mkdir(parents=True)
    if args.log is not None:
        served.mkdir()
        shutil.copy(args.log, served / "rounds.jsonl")
    command = [
        sys.executable, "-m", "paradraft", "serve", "--target", args.target, "--draft", args.draft, "-k", str(args.k),
        "--lengths", "fixed", "--threads", str(args.threads), "--port", "0", "--adapt", str(served),
    ]  # fmt: skip
    done: list[int] = []
    refreshes: list[dict[str, Any]] = []
    is_over = threading.Event()
    with said.open("w") as output, subprocess.Popen(command, stderr=output) as server:
        while (address := re.search(r"at (http\S+);", said.read_text())) is None:
            time.sleep(1)
        if args.turns:
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            figures: dict[str, Any] = {"turns": turns(address[1], int(children[0]), messages, args)}
            server.terminate()
            write(args, figures)
            return
        watcher = threading.Thread(target=watch, args=(served, kept, done, refreshes, is_over))
        watcher.start()
        began_s = time.monotonic()
        with ThreadPoolExecutor(args.at_once) as executor:
            for seed, message in enumerate(messages[: args.most]):
                executor.submit(ask, address[1], message, seed, args).add_done_callback(lambda _: done.append(1))
        answered_s = time.monotonic() - began_s
        time.sleep(args.rest_s)
        is_over.set()
        watcher.join()
        server.terminate()
    write(args, {"answered_s": answered_s, "refreshes": refreshes, "answers": lengths(served / "rounds.jsonl")})


def write(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Writes the file."""
    if args.json is not None:
        names = {"target": Path(args.target).name, "draft": Path(args.draft).name, "requests": args.requests.name}
        keys = ("behind", "most", "k", "tokens", "temperature", "at_once", "threads")
        settings = {key: getattr(args, key) for key in keys}
        write_json(args.json, {"machine": describe_machine("cpu"), **names, **settings, **figures})


if __name__ == "__main__":
    main()
