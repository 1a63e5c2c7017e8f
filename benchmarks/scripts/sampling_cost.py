"""What choosing tokens costs: by the size of the vocabulary, and as a share of the rounds of real models.

    python benchmarks/scripts/sampling_cost.py --json FILE.json

"torch" is the way of GPUs and of passes that torch computes, "cpp" that of passes in C++. They take turns and draw the
same tokens. Logits by size fall like Zipf's law with noise on it. In rounds everything counts as "rest" that is neither
a pass of a model nor a prompt; "draw" (from logits to tokens, of both models) and "allowed" (ids that pad the
vocabulary) are parts of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from round_parts import Parts, TimedPass

from paradraft.bench.report.summary import write_json
from paradraft.bench.synthetic import rounds
from paradraft.core import Request
from paradraft.drafters import load_drafter
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.environment import describe_machine
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.build import kernel_names
from paradraft.models.forward.cpu.draw import CpuSampling, draw
from paradraft.models.runtime import Runtime
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.sources.target_loading import load_target

SETTINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "top-p": Sampling(temperature=0.8, top_p=0.95),
    "top-k, top-p": Sampling(temperature=0.7, top_k=20, top_p=0.8),
}
IN_ROUNDS = ("greedy", "temperature", "top-p")
VOCABULARIES, POSITIONS, POSITIONS_DRAWN = (4096, 32000, 151936), (1, 6), 200
WAYS = ("torch", "cpp")
REAL = Path("build/real")
PROMPT = """<|im_start|>user
Write a Python class for a binary search tree with insert, delete and traversal, and explain it.<|im_end|>
<|im_start|>assistant
"""


def logits_like_text(vocab_size: int, positions: int) -> torch.Tensor:
    """`[1, positions, V]`."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) + 1.0 for _ in range(positions)])
    return (torch.randn(ranks.shape, generator=generator) - 2.2 * ranks.log())[None]


def by_vocabulary(runs: int, threads: int) -> dict[str, Any]:
    """Medians in ms of drawing the tokens of some positions, and how often C++ left them to torch."""
    found: dict[str, Any] = defaultdict(dict)
    faster = {"torch": None, "cpp": CpuSampling(threads=threads)}
    for vocab_size in VOCABULARIES:
        for number in POSITIONS:
            logits, depths = logits_like_text(vocab_size, number), torch.arange(number)[None]
            for name, setting in SETTINGS.items():
                times: dict[str, list[float]] = {way: [] for way in WAYS}
                for run in range(runs + 1):
                    # A seed that was not used before, or noise would be there already.
                    request = Request(tokens=[1] * (10 * run + 1), sampling=replace(setting, seed=run))
                    drawn = {}
                    for way in WAYS:
                        sampler = Sampler([request], faster=faster[way])
                        begun_s = time.perf_counter()
                        drawn[way] = sampler.draw(logits, depths)
                        times[way].append((time.perf_counter() - begun_s) * 1000)
                    assert torch.equal(*drawn.values())
                medians = {way: statistics.median(each[1:]) for way, each in times.items()}
                found[str(vocab_size)][f"{name}, {number}"] = {"median_ms": medians, "runs_ms": times}
                text = ", ".join(f"{way} {median:.3f} ms" for way, median in medians.items())
                print(f"{vocab_size} ids, {name}, {number} positions: {text}", flush=True)
    return found


def undecided(draws: int) -> float:
    """The share of draws with top-p that C++ leaves to torch, one by one at many positions."""
    logits, sampling = logits_like_text(32000, POSITIONS_DRAWN), SETTINGS["top-p"]
    places = ((at % POSITIONS_DRAWN, torch.tensor([[at]])) for at in range(draws))
    return sum(draw(logits[:, at : at + 1], [sampling], place, threads=1) is None for at, place in places) / draws


class Case:
    """A target, plain or with a draft model."""

    def __init__(self, target: Path, draft: Path | None, k: int) -> None:
        self.seconds: Parts = defaultdict(float)
        runtime = Runtime(device="cpu", capacity=1024)
        loaded = load_target(str(target), runtime)
        TimedPass(loaded.lm, "target", self.seconds)
        if draft is None:
            self.engine = Engine(loaded, NoDrafter(), Speculation(k=1))
        else:
            drafter = load_drafter("autoregressive", loaded, draft=str(draft), runtime=runtime)
            TimedPass(drafter.models[0], "draft", self.seconds)
            self.engine = Engine(loaded, drafter, Speculation(drafter="autoregressive", draft=str(draft), k=k))
        lms = [loaded.lm] if draft is None else [loaded.lm, drafter.models[0]]
        assert all(lm.is_native for lm in lms), "passes must be in C++"

    def _timed(self, name: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            begun_s = time.perf_counter()
            out = function(*given, **named)
            self.seconds[name] += time.perf_counter() - begun_s
            return out

        return call

    def answer(self, way: str, setting: Sampling, seed: int, tokens: int) -> tuple[Parts, list[int]]:
        """The parts of a round in ms, and the text."""
        self.seconds.clear()
        with ExitStack() as stack:
            if way == "torch":
                stack.enter_context(mock.patch.object(CausalLM, "sampling", None))
            for owner, name in ((Sampler, "draw"), (CausalLM, "allowed")):
                timed = self._timed(name, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            batch = self.engine.new_batch()
            stack.enter_context(self.engine.in_round())
            outputs = list(rounds(batch, [PROMPT], tokens, [replace(setting, seed=seed)]))
        parts, stats = dict(self.seconds), batch.clock.stats
        passes = sum(value for name, value in parts.items() if name.endswith("_pass"))
        prompts = sum(value for name, value in parts.items() if name.endswith("_prompt"))
        parts |= {"passes": passes, "rest": stats.total_s - passes - prompts}
        each = {name: value / stats.rounds * 1000 for name, value in parts.items()}
        return each, [token for output in outputs for token in output.tokens[0]]

    def measure(self, runs: int, tokens: int) -> dict[str, Any]:
        """Both ways in turns, by setting."""
        found = {}
        for name in IN_ROUNDS:
            turns: dict[str, list[Parts]] = {way: [] for way in WAYS}
            for run in range(-1, runs):
                answers = {way: self.answer(way, SETTINGS[name], max(run, 0), tokens) for way in WAYS}
                assert answers["torch"][1] == answers["cpp"][1], "the texts must be the same"
                if run >= 0:  # the first one warms up
                    for way in WAYS:
                        turns[way].append(answers[way][0])
            found[name] = {way: summary(each) for way, each in turns.items()}
        return found


def summary(turns: list[Parts]) -> dict[str, Any]:
    """Medians of the parts of a round in ms, and what is no pass as a share of a round."""
    ms = {part: statistics.median(turn.get(part, 0.0) for turn in turns) for part in turns[0]}
    shares = [turn["rest"] / (turn["rest"] + turn["passes"]) for turn in turns]
    return {"ms": ms, "rest_share": statistics.median(shares), "rest_shares": shares}


def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=REAL / "qwen2.5-coder-1.5b-instruct.Q4_K_M.gguf")
    parser.add_argument("--draft", type=Path, default=REAL / "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf")
    parser.add_argument("--draws", type=int, default=50000)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--answers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of drawing by the size of the vocabulary")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    vocabularies, share = by_vocabulary(args.runs, args.threads), undecided(args.draws)
    print(f"left to torch: {share:.3%} of draws with top-p", flush=True)
    torch.set_num_threads(threads)
    cases = {
        "draft, plain": (args.draft, None, 1),
        "target, plain": (args.target, None, 1),
        "K = 3": (args.target, args.draft, 3),
        "K = 5": (args.target, args.draft, 5),
    }
    measured = {}
    for name, case in cases.items():
        measured[name] = Case(*case).measure(args.answers, args.tokens)
        for setting, ways in measured[name].items():
            for way, found in ways.items():
                text = ", ".join(f"{part} {ms:.2f}" for part, ms in sorted(found["ms"].items()))
                print(f"{name}, {setting}, {way}: rest {found['rest_share']:.1%} of a round; {text}", flush=True)
    if args.json:
        write_json(
            args.json,
            {
                "machine": describe_machine("cpu") | {"kernels": kernel_names()},
                "arguments": {key: str(value) for key, value in vars(args).items() if key != "json"},
                "vocabularies": vocabularies,
                "left_to_torch": share,
                "rounds": measured,
            },
        )


if __name__ == "__main__":
    main()
