"""What a drafter wins while its server answers requests of another kind than it was trained on.

    python benchmarks/scripts/adapting.py --target FILE --draft FOLDER --requests FILE.jsonl --folder FOLDER \\
        --json benchmarks/FILE.json

Starts `paradraft serve --adapt`, asks it the requests, a few at a time, and waits for the refresh under way. The file
has the refreshes with the number of requests that were answered before each, and the tokens per pass of the answers, in
the order in which they ended. Every drafter that was in use is kept in FOLDER/kept, for `draft_lengths.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
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

WINDOW = 50
"""Answers whose tokens per pass are one figure."""


def ask(address: str, message: str, seed: int, args: argparse.Namespace) -> None:
    """Sends a request, and waits for its answer."""
    body = {
        "model": Path(args.target).name.removesuffix(".gguf"), "messages": [{"role": "user", "content": message}],
        "max_tokens": args.tokens, "temperature": args.temperature, "seed": seed,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=600).read()


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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    messages = [json.loads(line)["messages"][0]["content"] + args.behind for line in args.requests.open()]
    random.Random(1).shuffle(messages)
    served, kept, said = args.folder / "served", args.folder / "kept", args.folder / "serve.log"
    kept.mkdir(parents=True)
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
    if args.json is not None:
        names = {"target": Path(args.target).name, "draft": Path(args.draft).name, "requests": args.requests.name}
        settings = {key: getattr(args, key) for key in ("behind", "most", "k", "tokens", "temperature", "at_once")}
        figures = {"answered_s": answered_s, "refreshes": refreshes, "answers": lengths(served / "rounds.jsonl")}
        write_json(args.json, {"machine": describe_machine("cpu"), **names, **settings, **figures})


if __name__ == "__main__":
    main()
