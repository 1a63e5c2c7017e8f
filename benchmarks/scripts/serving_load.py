"""How fast servers are under load, with and without a drafter: paradraft's, llama.cpp's and vLLM's, same weights.

    make vllm llama-server
    python benchmarks/scripts/serving_load.py --target MODEL.gguf --tokenizer FOLDER --json FILE.json
    python benchmarks/scripts/serving_load.py --target FOLDER --json FILE.json
    paradraft export pocket build/for-vllm --target pocket --to vllm -k 4 --no-measure
    python benchmarks/scripts/serving_load.py --json FILE.json
    python benchmarks/scripts/serving_load.py --shape smollm2-135m --json FILE.json

A file is compared with llama.cpp's server, a folder and the others with vLLM. The load generator is vLLM's own (`vllm
bench serve`), run by the Python of vLLM's environment: it keeps a number of clients busy, each with one streamed
request at a time, and times tokens and the chunks of streams. All servers are started first and sleep (SIGSTOP) but
for the one whose turn it is; they take turns at each number of clients, so that all meet the same machine. No server
keeps what it has read, since a turn asks what the turns before it asked. A file or a folder is asked chats. A shape has
random weights, the same for all servers, and random prompts. Such a model repeats itself, which flatters n-grams.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx2
from rich.progress import track

VLLM_PYTHON = Path("build/vllm/bin/python")
LLAMA_SERVER = Path("build/llama-server/llama-server")
CHATS = Path("benchmarks/prompts/chat.jsonl")
ROOM = 512
"""Tokens of a request and its answer."""
EXPORTED = Path("build/for-vllm")
NAME = "load"
"""What all servers call the model."""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
GENERATOR = """
import json, os, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print("ready", file=replies, flush=True)
for line in sys.stdin:
    print(json.dumps(main(parser.parse_args(json.loads(line))), default=str), file=replies, flush=True)
"""
"""`vllm bench serve` again and again: importing it takes longer than a turn."""
KEPT = (
    "completed", "failed", "duration", "total_output_tokens", "output_throughput", "p50_ttft_ms", "p99_ttft_ms",
    "p50_itl_ms", "p99_itl_ms", "p50_tpot_ms", "p99_tpot_ms",
)  # fmt: skip
"""Of what it says of a turn. TTFT is the time to the first chunk, ITL the time between chunks."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What all servers are asked.

    Args:
        target: the folder or the file of the model.
        tokenizer: the folder that has its tokenizer.
        prompts: a JSONL file of {"prompt": …}.
        is_chat: whether they are questions of chats.
        tokens: most tokens of an answer.
        temperature: 0 is greedy.
        requests: of a turn, for each client.
    """

    target: str
    tokenizer: str
    prompts: Path
    is_chat: bool
    tokens: int
    temperature: float
    requests: int


class Server:
    """One server, asleep until it is its turn.

    Args:
        command: starts it, but for the port.
        log: what it says.
    """

    def __init__(self, command: Sequence[str], log: IO[bytes]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [*command, "--port", str(port)], env=QUIET | os.environ, stdout=log, stderr=log, start_new_session=True
        )

    def wait(self) -> None:
        """Waits until it answers, and lets it sleep."""
        for _ in range(1800):
            if self._process.poll() is not None:
                raise SystemExit(f"a server has ended with code {self._process.returncode}")
            try:
                if httpx2.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return self._signal(signal.SIGSTOP)
            except httpx2.HTTPError:
                time.sleep(0.5)
        raise SystemExit("a server does not answer")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, it runs."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Ends it and the processes that it has started."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=15)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Generator:
    """The load generator, in a process of its own."""

    def __init__(self, log: IO[bytes]) -> None:
        self._process = subprocess.Popen(
            [VLLM_PYTHON, "-c", GENERATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=QUIET | os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the load generator has failed: is vLLM installed (make vllm)?")
        return line

    def turn(self, server: Server, load: Load, clients: int, requests: int) -> dict[str, Any]:
        """Keeps clients busy until all requests are answered."""
        assert self._process.stdin is not None
        options = {
            "--backend": "openai-chat" if load.is_chat else "openai", "--base-url": server.url, "--model": NAME,
            "--endpoint": "/v1/chat/completions" if load.is_chat else "/v1/completions",
            "--tokenizer": load.tokenizer, "--dataset-name": "custom", "--dataset-path": load.prompts,
            "--custom-output-len": load.tokens, "--num-prompts": requests, "--max-concurrency": clients,
            "--temperature": load.temperature, "--percentile-metrics": "ttft,tpot,itl,e2el",
            "--metric-percentiles": "50,99",
        }  # fmt: skip
        arguments = [str(word) for pair in options.items() for word in pair]
        flags = ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm", "--save-detailed"]
        flags += ["--header", "Connection=close"]  # llama-server closes connections in the midst of requests
        with server.awake():
            print(json.dumps(arguments + flags), file=self._process.stdin, flush=True)
            said = json.loads(self._read())
        if said["failed"]:
            errors = {error for error in said.get("errors", ()) if error}
            raise SystemExit(f"{said['failed']} requests to {server.url} have failed: {errors}")
        return {name: float(said[name]) for name in KEPT}

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate()


def ours_with(load: Load, drafters: Sequence[str], most: int, *options: str) -> dict[str, list[str]]:
    """Our servers of a file or folder by their names: without a drafter, and with some, as options of `serve`."""
    ours = [sys.executable, "-m", "paradraft", "serve", "--target", load.target, "--served-model-name", NAME]
    ours += ["--max-batch", str(most), *options]
    found = {"paradraft": [*ours, "--drafter", "none"]}
    return found | {f"paradraft, {drafter}": [*ours, "--drafter", *drafter.split()] for drafter in drafters}


def llama_servers(load: Load, draft: str | None, most: int) -> dict[str, list[str]]:
    """llama.cpp's servers of a GGUF file by their names: without a draft model, and with one if there is any."""
    theirs = [str(LLAMA_SERVER), "--model", load.target, "--alias", NAME, "--parallel", str(most)]
    theirs += ["--ctx-size", str(ROOM * most), "--threads", str(os.cpu_count()), "--no-cache-prompt"]
    theirs += ["--cache-ram", "0"]
    found = {"llama-server": theirs}
    if draft is not None:
        found["llama-server, draft model"] = [*theirs, "--spec-type", "draft-simple", "--model-draft", draft]
    return found


def vllm_servers(load: Load, draft: str | None, k: int, most: int, dtype: str) -> dict[str, list[str]]:
    """vLLM's servers of a folder by their names: without a drafter and with one.

    Args:
        load: has the target.
        draft: the PARD model of ours; None drafts n-grams.
        k: tokens drafted per round.
        most: most clients.
        dtype: of the weights.
    """
    theirs = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", load.target]
    theirs += ["--served-model-name", NAME, "--dtype", dtype, "--max-model-len", str(ROOM), "--max-num-seqs", str(most)]
    theirs += ["--no-enable-prefix-caching"]
    speculative: dict[str, Any] = (
        {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        if draft is None
        else {"method": "draft_model", "model": str(EXPORTED), "parallel_drafting": True}
    )
    return {
        "vllm": theirs,
        "vllm, drafter": [
            *theirs, "--speculative-config", json.dumps(speculative | {"num_speculative_tokens": k}),
        ],
    }  # fmt: skip


def shape_of_disk(shape: str, folder: Path) -> tuple[str, Path]:
    """A model with random weights and its prompts, as all servers load them.

    Args:
        shape: its name.
        folder: where they are written, unless they are there.

    Returns:
        The folder of the model, and the file of prompts.
    """
    import torch

    from paradraft.bench.setup import random_prompts
    from paradraft.models.names import PREFIX
    from paradraft.sources.presets import id_tokenizer, random_model

    name, prompts = PREFIX + shape, folder / "prompts.jsonl"
    if not prompts.exists():
        random_model(name, dtype=torch.bfloat16, device="cpu").save_pretrained(folder)
        id_tokenizer(name).save_pretrained(folder)
        rows = [json.dumps({"prompt": text}) for text in random_prompts(name, 64, 96)]
        prompts.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(folder), prompts


def questions(source: Path, path: Path) -> Path:
    """Writes conversations of one question as the generator reads them."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps({"prompt": row["messages"][-1]["content"]}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def summary(turns: dict[str, dict[int, list[dict[str, Any]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over turns, and tokens per second against our server without a drafter in the same turns."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, by_clients in turns.items():
        found[name] = {}
        for clients, each in by_clients.items():
            medians = {key: statistics.median(turn[key] for turn in each) for key in KEPT}
            plain = turns["paradraft"][clients]
            pairs = zip(each, plain, strict=True)
            medians["against_paradraft"] = statistics.median(
                one["output_throughput"] / other["output_throughput"] for one, other in pairs
            )
            medians["itl_p99_by_p50"] = statistics.median(turn["p99_itl_ms"] / turn["p50_itl_ms"] for turn in each)
            found[name][str(clients)] = medians
    return found


def main() -> None:
    """Reads the options, measures, prints a table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="random weights of this shape, with n-grams; by default the pocket family")
    parser.add_argument("--target", help="a GGUF file or a folder; by default the pocket family")
    parser.add_argument("--tokenizer", help="folder with the tokenizer of a file")
    parser.add_argument("--prompts", type=Path, default=CHATS, help="questions for a file or a folder")
    parser.add_argument(
        "--drafters", default="auto", help="of ours for a file or a folder, with ; between them, as 'pard --draft D'"
    )
    parser.add_argument("--draft", help="draft model of llama-server")
    parser.add_argument("--k", "-k", type=int, default=4)
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="of a turn, for each client")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", default="", help="servers by their names, with ; between them")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    given = parser.parse_args()
    from paradraft.bench.report.summary import write_json
    from paradraft.environment import describe_machine
    from paradraft.sources.loading import pocket_folder

    clients = [int(number) for number in given.clients.split(",")]
    draft = None
    if given.target:
        target, prompts = given.target, questions(given.prompts, Path("build") / "load-questions.jsonl")
    elif given.shape:
        target, prompts = shape_of_disk(given.shape, Path("build") / given.shape)
    else:
        target, prompts = str(pocket_folder("target")), pocket_folder("prompts.jsonl")
        draft = str(pocket_folder("pard"))
    load = Load(
        target=target, tokenizer=given.tokenizer or target, prompts=prompts, is_chat=bool(given.target),
        tokens=given.tokens, temperature=given.temperature, requests=given.requests,
    )  # fmt: skip
    most = max(clients)
    if target.endswith(".gguf"):
        wanted = ours_with(load, given.drafters.split(";"), most) | llama_servers(load, given.draft, most)
    else:
        drafter = "ngram" if draft is None else f"pard --draft {draft}"
        drafters = given.drafters.split(";") if given.target else [drafter, f"{drafter} --lengths expected"]
        wanted = ours_with(load, drafters, most, "--dtype", given.dtype, "-k", str(given.k))
        wanted |= vllm_servers(load, draft, given.k, most, given.dtype)
    if given.only:
        wanted = {name: wanted[name] for name in given.only.split(";")}
    turns: dict[str, dict[int, list[dict[str, Any]]]] = {name: {number: [] for number in clients} for name in wanted}
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        servers = {}
        for name, command in track(wanted.items(), "servers"):
            servers[name] = Server(command, log)
            stack.callback(servers[name].end)
            servers[name].wait()
        generator = Generator(log)
        stack.callback(generator.end)
        for server in servers.values():  # all shapes of passes are met once
            for number in (max(clients), 1):
                generator.turn(server, load, number, number)
        for number in clients:
            # Few clients are slow: as many requests as make a turn of about the same length.
            requests = max(given.requests * number, 8)
            for _ in track(range(given.turns), f"{number} clients"):
                for name, server in servers.items():
                    turns[name][number].append(generator.turn(server, load, number, requests))
    found = summary(turns)
    for name, by_clients in found.items():
        for count, row in by_clients.items():
            speed = f"{row['output_throughput']:7.0f} tokens/s ({row['against_paradraft']:.2f})"
            print(
                f"{name:40} {count:>3} clients {speed}  "
                f"first {row['p50_ttft_ms']:.0f} / {row['p99_ttft_ms']:.0f} ms  "
                f"between {row['p50_itl_ms']:.1f} / {row['p99_itl_ms']:.1f} ms ({row['itl_p99_by_p50']:.1f})"
            )
    if given.json:
        settings = {name: value for name, value in vars(given).items() if name not in ("json", "only")}
        settings["prompts"] = str(given.prompts) if given.target else prompts.name
        shown = {
            name: " ".join(command).replace(sys.executable, "python").replace(f"{Path.cwd()}/", "")
            for name, command in wanted.items()
        }
        whole = {"machine": describe_machine("cpu"), **settings, "servers": shown, "summary": found, "turns": turns}
        write_json(given.json, whole)


if __name__ == "__main__":
    main()
