"""llama.cpp's server with an exported block drafter: our text, and as many accepted tokens as here."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paradraft.core import Request
from paradraft.decode.generation import Generation
from paradraft.engine.loader import load
from paradraft.export.gguf import write_gguf
from paradraft.export.handoff import hand_off
from paradraft.formats.head import read_checkpoint, write_head
from paradraft.formats.path_heads import SELECTOR_OUTPUT, SELECTOR_RANK
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_model, load_tokenizer, locate
from tests.contract.test_every_trainee import recipe_for, train

SERVER = Path("build/llama-server/llama-server")
pytestmark = [
    pytest.mark.llama_cpp,
    pytest.mark.skipif(not SERVER.is_file(), reason="needs make llama-server"),
]
K, TOKENS = 4, 40
RUNTIME = Runtime(dtype="float32")
KINDS: dict[str, dict[str, Any]] = {
    "causal, anchor first": {},
    "Markov head, some ids": {"markov_rank": 16, "draft_vocab_size": 1024},
    "as DSpark": {"causal": False, "markov_rank": 32},
    "as DFlash": {"causal": False, "anchor_first": False, "draft_vocab_size": 2048},
    "as DFlash 2": {"causal": False, "anchor_first": False, "selector_rank": 32},
    "causal selector, some ids": {"anchor_first": False, "selector_rank": 16, "draft_vocab_size": 1024},
}
PROMPTS = ("def add(a, b):\n", "class Queue:\n    def __init__(self):\n", "for i in range(10):\n    print(")


@contextmanager
def served(target: Path, draft: Path, log: Path, kind: str) -> Iterator[str]:
    """The address of a server that drafts K tokens by a kind of llama.cpp's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [
        "-m", target, "-md", draft, "--spec-type", kind, "--spec-draft-n-max", K, "--spec-draft-p-min", 0,
        "-c", 512, "-np", 1, "-t", 1, "--port", port, "--no-warmup",
        "-lv", 5, "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32",
    ]  # fmt: skip
    with log.open("wb") as output, subprocess.Popen([SERVER, *map(str, options)], stdout=output, stderr=output) as run:
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(300):
                assert run.poll() is None, log.read_text(errors="replace")[-3000:]
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(0.2)
            yield address
        finally:
            run.terminate()


def answer(address: str, prompt: list[int]) -> dict[str, Any]:
    """What the server answers, greedily, to tokens."""
    asked = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0.0, "cache_prompt": False, "return_tokens": True}
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def our_drafts(draft: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[Round]]]:
    """The answers, and their rounds but the first, in which llama.cpp drafts nothing."""
    engine = load("pocket", drafter="dflash", draft=str(draft), k=K, runtime=RUNTIME, lengths="fixed")
    answers, drafts = [], []
    for prompt in prompts:
        first = engine.generate([prompt], max_new_tokens=1)[0].tokens
        batch, rounds = engine.new_batch(), list[Round]()
        generation = Generation(Request(tokens=[*prompt, *first], max_new_tokens=TOKENS - 1))
        batch.join([generation])
        while not generation.is_finished:
            draft_of_round, before = batch.drafter.propose([K]).tokens[0].tolist(), len(generation.tokens)
            batch.step()
            rounds.append(Round(draft_of_round, len(generation.tokens) - before - 1))
        answers.append([*first, *generation.tokens])
        drafts.append(rounds)
    return answers, drafts


class Round(NamedTuple):
    """A draft, empty where a log has none, and how many of its tokens were accepted."""

    draft: list[int]
    accepted: int


TIE = 0.001
"""Probabilities of tokens that are apart by no more may come in another order with other roundings."""


class LoggedRound(NamedTuple):
    """Of each drafted token the likeliest candidates with their probabilities, if any; and the accepted tokens."""

    candidates: list[dict[int, float]]
    accepted: int

    def is_of(self, mine: Round) -> bool:
        """Whether the same was drafted, up to a place where two candidates are as likely, and accepted."""
        for token, found in zip(mine.draft, self.candidates, strict=False):
            best = max(found, key=lambda each: found[each])
            if token != best:
                return found.get(token, 0.0) >= found[best] - TIE and self.accepted == mine.accepted
        return self.accepted == mine.accepted


def their_rounds(log: str) -> list[LoggedRound]:
    """The rounds in a log, whose blocks begin at the first place that drafts; it has no drafts of selectors."""
    found: list[list[dict[int, float]]] = []
    first = None
    for rank, place, token, share in re.findall(r"draft candidate +(\d), pos +(\d+): +(\d+) \( *([\d.]+)\)", log):
        if rank == "0":
            first = int(place) if first is None else first
            found += [[]] if int(place) == first else []
            found[-1].append({})
        found[-1][-1][int(token)] = float(share)
    accepted = [int(count) for count in re.findall(r"\| accepted (\d+)/\d+ draft tokens, new", log)]
    found = found or [[]] * len(accepted)
    assert len(found) - len(accepted) in (0, 1), "an answer may end before the last draft is verified"
    return [LoggedRound(*each) for each in zip(found, accepted, strict=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_drafts_what_we_draft(family: Path, tmp_path: Path, kind: str) -> None:
    """Guards layers, positions and places that are shifted by one, and heads that are left out: a server that drafts
    badly says nothing. Controls are a drafter that reads the states of other layers, and another selector."""
    folder = locate("pocket", "target")
    model, tokenizer = load_model(folder, Runtime(device="cpu", dtype="float32")), load_tokenizer(folder)
    write_gguf(tmp_path / "target.gguf", model, tokenizer, dtype="float32", name="target")
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    settings = {"model": "pocket", "data": [str(Path("src/paradraft/pocket/text.jsonl"))], "k": K, "steps": 40}
    settings |= {"samples_per_step": 8, "max_length": 128, "optimizer": "muon", "muon_lr": 2e-2, "lr": 2e-3}
    train("dflash", recipe_for("dflash", family, tmp_path / "head", **settings, **KINDS[kind]))
    head = read_checkpoint(str(tmp_path / "head"))
    wrong = {"others": replace(head, config=head.config | {"target_layers": head.config["target_layers"][::-1]})}
    if SELECTOR_RANK in head.config:
        rolled = {SELECTOR_OUTPUT: head.weights[SELECTOR_OUTPUT].roll(1, 0)}
        wrong["rolled"] = replace(head, weights=head.weights | rolled)
    for name, other in wrong.items():
        (tmp_path / name).mkdir()
        write_head(tmp_path / name, other)
    answers, expected = our_drafts(tmp_path / "head", prompts)
    is_same = {}
    for name in ("head", *wrong):
        done = hand_off(
            str(tmp_path / name), "pocket", "gguf", tmp_path / f"{name}-out", k=K, prompts=[], max_new_tokens=1,
            runtime=Runtime(dtype="float32", draft_dtype="float32"),
        )  # fmt: skip
        (spec,) = re.findall(r"--spec-type (\S+)", done.launch)
        compared, same = 0, 0
        for number, prompt in enumerate(prompts):
            log = tmp_path / f"{name}-{number}.log"
            with served(tmp_path / "target.gguf", tmp_path / f"{name}-out" / "model.gguf", log, spec) as address:
                reply = answer(address, prompt)
            assert reply["tokens"] == answers[number], "drafts do not change a text"
            for mine, theirs in zip(expected[number][:-1], their_rounds(log.read_text(errors="replace")), strict=False):
                compared += 1
                is_round = theirs.is_of(mine)
                assert theirs.candidates or spec == "draft-dflash"
                same += is_round
                if not is_round and name != "head":
                    break  # the rounds are not the same from here on
        assert compared > (40 if name == "head" else 0)
        is_same[name] = same == compared
    assert is_same == {name: name == "head" for name in is_same}
