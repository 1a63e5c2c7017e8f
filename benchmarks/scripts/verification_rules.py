"""How many tokens a pass adds by verification rule, on the same drafts and in texts of each rule.

    python benchmarks/scripts/verification_rules.py --target FILE --draft FILE --data humaneval=FILE \\
        --data gsm8k=FILE --json benchmarks/FILE.json

Answers are chains of K sampled tokens per round. In each round of the rules `rejection` and `block` the mean number of
accepted tokens over the random numbers of verification is computed for both, from the drafted tokens and p and q. So
the rules are compared on the same drafts, in pairs without the noise of verification. Counts of each rule in its own
texts check the means; those of `match`, whose drafts share the target's noise, are counted only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from paradraft.bench.report.summary import write_json
from paradraft.bench.setup import held_out_prompts
from paradraft.bench.synthetic import rounds, without_ends
from paradraft.bench.tasks import TASKS, prompt_of, read_questions
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.drafters import load_drafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.environment import describe_machine
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.sources.target_loading import load_target
from paradraft.verify import load_rule

CHATS = Path(__file__).parents[1] / "prompts" / "chat.jsonl"
RULES = ("match", "rejection", "block")
SAMPLED = ("rejection", "block")


def of_rejection(p_MV: Tensor, q_NV: Tensor, tokens: list[int]) -> float:
    """The mean number of accepted tokens of a chain: a token needs all before it (Leviathan et al. 2023)."""
    mean, reached = 0.0, 1.0
    for node, token in enumerate(tokens):
        reached *= min(float(p_MV[node, token] / q_NV[node, token]), 1.0)
        mean += reached
    return mean


def of_block(p_MV: Tensor, q_NV: Tensor, tokens: list[int]) -> float:
    """The same by block verification (Sun et al. 2025, Alg. 2): the last token that passes its test ends the path."""
    chance, tests = 1.0, []
    for node, token in enumerate(tokens):
        chance = min(chance * float(p_MV[node, token] / q_NV[node, token]), 1.0)
        if node + 1 == len(tokens):
            tests.append(chance)
            break
        rest = float((chance * p_MV[node + 1] - q_NV[node + 1]).clamp(min=0.0).sum())
        tests.append(rest / (rest + 1 - chance) if rest else float(chance == 1.0))
    mean, none_below = 0.0, 1.0
    for length in range(len(tokens), 0, -1):
        mean += length * tests[length - 1] * none_below
        none_below *= 1 - tests[length - 1]
    return mean


class Compared:
    """A rule that notes the mean of both rules in each round of a whole chain, and else counts only.

    Args:
        k: tokens of a chain; None for trees, of which all that have a token count.
    """

    def __init__(self, rule: str, k: int | None) -> None:
        self._rule, self._k = load_rule(rule), k
        self.means: dict[str, list[float]] = {name: [] for name in SAMPLED}
        self.accepted: list[int] = []

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """The rule's verdict."""
        verdict = self._rule(draft, out, sampler)
        drafted = [sum(token >= 0 for token in tokens) for tokens in draft.lists[0]]
        whole = [row for row, count in enumerate(drafted) if (count > 0 if self._k is None else count == self._k)]
        self.accepted += [len(verdict.paths[row]) for row in whole]
        if self._k is not None and draft.probs is not None:
            p_BMV = sampler.probabilities(out.logits)
            for row in whole:
                for name, mean_of in zip(SAMPLED, (of_rejection, of_block), strict=True):
                    self.means[name].append(mean_of(p_BMV[row], draft.probs[row], draft.lists[0][row]))
        return verdict


def prompts_of(target: Target, source: str, data: list[str], number: int) -> list[str]:
    """As many prompts of each task, evenly spread, and of the chats; for the pocket family its own."""
    if not data:
        return held_out_prompts(number, None, source)
    named = [item.split("=", 1) for item in data]
    share = number // (len(named) + 1)
    prompts = []
    for name, file in named:
        questions = read_questions(TASKS[name], Path(file))
        some = questions[:: len(questions) // share][:share]
        prompts += [prompt_of(TASKS[name], question, (), target.tokenizer, None) for question in some]
    return prompts + held_out_prompts(number - len(prompts), CHATS, source)


def batches(
    prompts: list[str], seeds: int, rows: int, sampling: dict[str, Any]
) -> Iterator[tuple[list[str], list[Sampling]]]:
    """All prompts with all seeds, some at a time."""
    cases = [
        (prompt, Sampling(seed=100 * at + seed, **sampling))
        for seed in range(seeds)
        for at, prompt in enumerate(prompts)
    ]
    for first in range(0, len(cases), rows):
        some = cases[first : first + rows]
        yield [prompt for prompt, _ in some], [each for _, each in some]


def error_of(values: list[float]) -> float:
    """The standard error of a mean."""
    return statistics.stdev(values) / len(values) ** 0.5


def measured(
    engines: dict[str, Engine], prompts: list[str], args: argparse.Namespace, sampling: dict[str, Any]
) -> dict[str, Any]:
    """The figures of all rules."""
    found: dict[str, Any] = {}
    for name, engine in engines.items():
        rule = Compared(name, args.k)
        for some, samplings in batches(prompts, args.seeds, args.rows, sampling):
            with engine.in_round():
                for _ in rounds(engine.new_batch(verify=rule), some, args.tokens, samplings):
                    pass
        counted = [float(count) for count in rule.accepted]
        found[name] = {
            "rounds": len(counted),
            "tokens_per_pass": 1 + statistics.mean(counted),
            "standard_error": error_of(counted),
        }
        if rule.means["block"]:
            pairs = list(zip(*rule.means.values(), strict=True))
            gains = [block - rejection for rejection, block in pairs]
            found[name]["means_on_its_drafts"] = {
                each: 1 + statistics.mean(values) for each, values in rule.means.items()
            } | {"gain": statistics.mean(gains), "gain_standard_error": error_of(gains)}
        print(f"{sampling}, {name}: {found[name]}", flush=True)
    return found


def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--draft")
    parser.add_argument("--drafter", default="autoregressive")
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0.8,1")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--data", action="append", default=[], help="NAME=FILE of a task, for prompts in chats")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runtime = Runtime(device="cpu", capacity=1024 if args.data else None)
    target = load_target(args.target, runtime)
    without_ends(target)
    drafter = load_drafter(args.drafter, target, draft=args.draft, runtime=runtime)
    prompts = prompts_of(target, args.target, args.data, args.prompts)
    engines = {
        rule: Engine(
            target,
            drafter,
            Speculation(drafter=args.drafter, draft=args.draft, k=args.k, verify=rule, lengths="fixed"),
        )
        for rule in args.rules.split(",")
    }
    found = {
        temperature: measured(engines, prompts, args, {"temperature": float(temperature), "top_p": args.top_p})
        for temperature in args.temperatures.split(",")
    }
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "target", "draft", "data")}
        models = {key: Path(value).name for key, value in (("target", args.target), ("draft", args.draft)) if value}
        tasks = [item.split("=")[0] for item in args.data]
        write_json(
            args.json,
            {"machine": describe_machine("cpu"), **models, "tasks": tasks, **settings, "temperatures": found},
        )


if __name__ == "__main__":
    main()
