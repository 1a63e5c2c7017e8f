"""What drafters without a model would have drafted in the recorded answers of the real models, and how fast that is.

    python benchmarks/scripts/replayed_drafts.py --data humaneval=FILE --data gsm8k=FILE --json benchmarks/FILE.json

Under the match rule the target's tokens depend on seed and position only, so that drafts can be compared with the
recorded text without a pass of the target: acceptance lengths are exact. Speeds are predicted from the measured costs
of passes on two machines, without prompts and without the drafter's time, which is in the file. "By value" verifies the
nodes that are worth their time, as `--lengths expected` does once it knows the costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paradraft.bench.report.summary import write_json
from paradraft.bench.tasks import TASKS, prompt_of, read_questions
from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.decode.lengths.valued_drafts import most_worth
from paradraft.drafters.ngram import Config as NgramConfig
from paradraft.drafters.ngram import NgramDrafter
from paradraft.drafters.suffix import Config, SuffixDrafter
from paradraft.environment import describe_machine
from paradraft.sources.loading import load_tokenizer
from paradraft.text.tokenization import encode_prompt
from paradraft.tree import ABSENT, Tree

DEVICE = torch.device("cpu")
FOLDER = Path(__file__).parents[1]
RECORDED = "real-{}-{}-{}_epyc-avx512-2cores_2026-11-25.json"
COSTS = {
    "AVX-512": "pass-costs-real-{}_epyc-avx512-2cores_2026-11-25.json",
    "AVX2": "pass-costs-real-{}_epyc-avx2-2cores_2026-11-26.json",
}
BINS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.01)
"""Bounds of values, for the share of nodes that was accepted."""
MODELS = {
    "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b-instruct.Q4_K_M.gguf",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf",
    "smollm2-135m": "smollm2-135m-instruct.Q4_1.gguf",
}
Method = tuple[Callable[[], Drafter], int, Tree | None, bool]
METHODS: dict[str, Method] = {
    **{f"ngram, K = {k}": (lambda: NgramDrafter(NgramConfig()), k, None, False) for k in (4, 8)},
    **{f"suffix, K = {k}": (lambda: SuffixDrafter(Config()), k, None, False) for k in (4, 8)},
    "ngram, by value": (lambda: NgramDrafter(NgramConfig()), 8, None, True),
    "suffix, by value": (lambda: SuffixDrafter(Config()), 8, None, True),
    "suffix, K = 16, by value": (lambda: SuffixDrafter(Config()), 16, None, True),
    "suffix, tree of 8, by value": (lambda: SuffixDrafter(Config()), 8, Tree(budget=8), True),
}
"""Drafter, K, tree, and whether drafts are cut by value."""


def answers_of(model: str, task: str, temperature: str, folder: Path, data: Path) -> list[tuple[list[int], list[int]]]:
    """The tokens of each prompt and of its recorded answer."""
    recorded = json.loads((FOLDER / RECORDED.format(model, task, temperature)).read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(str(folder / MODELS[model]))
    questions = read_questions(TASKS[task], data)
    prompts = [
        prompt_of(TASKS[task], questions[number - 1].turns, (), tokenizer, None)
        for number in recorded["task"]["questions"]
    ]
    if prompts[0] != recorded["example"]["prompt"]:
        raise SystemExit(f"replayed_drafts: {data} is not the data of {RECORDED.format(model, task, temperature)}")
    tokens = recorded["answers"]["ar"]["tokens"]
    return [(encode_prompt(prompt, tokenizer), answer) for prompt, answer in zip(prompts, tokens, strict=True)]


def cost_of(model: str, machine: str) -> Callable[[int], float]:
    """`cost_line` of a model on a machine."""
    return cost_line(FOLDER / COSTS[machine].format(model))


def cost_line(file: Path) -> Callable[[int], float]:
    """Milliseconds of a pass over some tokens, between the sizes that `pass_costs.py` has measured on a line."""
    (known,) = json.loads(file.read_text(encoding="utf-8"))["median_ms"].values()
    points = sorted((int(size), ms) for size, ms in known.items() if size.isdecimal())

    def cost(tokens: int) -> float:
        pairs = list(itertools.pairwise(points))
        (low, low_ms), (high, high_ms) = next((pair for pair in pairs if tokens <= pair[1][0]), pairs[-1])
        return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)

    return cost


def accepted(draft: Draft, answer: list[int]) -> list[int]:
    """The nodes of the drafted path that the answer begins with."""
    (tokens,), (parents,) = draft.lists
    children = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = []
    for token in answer:
        node = children.get((path[-1] if path else ABSENT, token))
        if node is None:
            break
        path.append(node)
    return path


def replay(
    method: Method,
    answers: list[tuple[list[int], list[int]]],
    cost: Callable[[int], float],
    bins: dict[float, list[float]],
) -> dict[str, Any]:
    """Figures of a method over all answers; adds to `bins` the nodes, their values and those accepted."""
    make, k, tree, is_cut = method
    rounds = tokens = drafted = 0
    target_ms = draft_s = 0.0
    for prompt, answer in answers:
        drafter, done = make(), 0
        drafter.start(Drafting(tree=tree), DEVICE)
        drafter.join([Request(tokens=prompt)], Committed(tokens=[prompt]))
        while done < len(answer):
            begun_s = time.perf_counter()
            draft = drafter.propose([k])
            draft_s += time.perf_counter() - begun_s
            (values,) = draft.values or ([],)
            if is_cut:
                counts, _ = most_worth([values], lambda nodes: cost(1 + nodes[0]))
                draft = draft.first(counts)
            path = accepted(draft, answer[done:-1])
            for node, value in enumerate(values[: draft.tokens.shape[1]]):
                into = bins.setdefault(next(bound for bound in BINS if value < bound), [0, 0.0, 0])
                into[0], into[1], into[2] = into[0] + 1, into[1] + value, into[2] + (node in path)
            new = answer[done : done + 1 + len(path)]
            drafter.commit(Committed(tokens=[new]))
            done, tokens, rounds = done + len(new), tokens + len(new), rounds + 1
            drafted += draft.tokens.shape[1]
            target_ms += cost(1 + draft.tokens.shape[1])
    return {
        "acceptance_length": tokens / rounds,
        "drafted_per_round": drafted / rounds,
        "predicted_speedup": cost(1) * tokens / target_ms,
        "propose_us": draft_s / rounds * 1e6,
    }


def main() -> None:
    """Replays all methods and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="TASK=FILE, the questions of a task")
    parser.add_argument("--models", type=Path, default=FOLDER.parent / "build" / "real")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    bins: dict[str, dict[float, list[float]]] = {name: {} for name in METHODS}
    for model, named, temperature in itertools.product(MODELS, given.data, ("t0", "t0.8")):
        task, _, file = named.partition("=")
        answers = answers_of(model, task, temperature, given.models, Path(file))
        for (name, method), machine in itertools.product(METHODS.items(), COSTS):
            figures = replay(method, answers, cost_of(model, machine), bins[name])
            found.setdefault(f"{model} {task} {temperature} {machine}", {})[name] = figures
            line = f"{model:20} {task:10} {temperature:5} {machine:8} {name:28}"
            print(line, *(f"{key} {value:.2f}" for key, value in figures.items()), flush=True)
    values = {
        name: [
            {"below": bound, "nodes": count, "mean_value": total / count, "accepted": hits / count}
            for bound, (count, total, hits) in sorted(of_method.items())
        ]
        for name, of_method in bins.items()
    }
    write_json(given.json, {"replayed": found, "values": values, "machine": describe_machine("cpu")})


if __name__ == "__main__":
    main()
