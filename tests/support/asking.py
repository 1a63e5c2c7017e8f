"""Asks whoever answers, and the client of a test server: questions and answers lie in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paradraft.data.endpoint import Endpoint
from paradraft.data.questions import read_questions
from paradraft.data.regenerate import Answerer, RegenerationProgress, regenerate
from paradraft.sampling_params import Sampling
from tests.support.endpoint_server import MODEL, Server
from tests.support.jsonl import read_lines, write_lines

SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=3)


def ask(
    answerer: Answerer, folder: Path, *records: object, samples: int = 1
) -> tuple[RegenerationProgress, list[dict[str, Any]]]:
    folder.mkdir(exist_ok=True)
    prompts, out = folder / "prompts.jsonl", folder / "out.jsonl"
    write_lines(prompts, records)
    progress = regenerate(answerer, read_questions(prompts, samples), out)
    return progress, read_lines(out)


def talk(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]


def client(server: Server, **settings: Any) -> Endpoint:
    chosen = {"model": MODEL, "sampling": SAMPLING, "max_new_tokens": 5, "concurrency": 4, "retries": 3, **settings}
    return Endpoint(url=server.url, **chosen)


def prompts(number: int) -> list[dict[str, str]]:
    return [{"prompt": f"p{place}"} for place in range(number)]
