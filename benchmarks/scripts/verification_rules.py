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
from typing import Any

from sampled_answers import batches, loaded, options, standard_error, write
from torch import Tensor

from paradraft.bench.synthetic import rounds
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.sampling.sampler import Sampler
from paradraft.verify import load_rule

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
            "standard_error": standard_error(counted),
        }
        if rule.means["block"]:
            pairs = list(zip(*rule.means.values(), strict=True))
            gains = [block - rejection for rejection, block in pairs]
            found[name]["means_on_its_drafts"] = {
                each: 1 + statistics.mean(values) for each, values in rule.means.items()
            } | {"gain": statistics.mean(gains), "gain_standard_error": standard_error(gains)}
        print(f"{sampling}, {name}: {found[name]}", flush=True)
    return found


def main() -> None:
    """Measures and writes the file."""
    parser = options(__doc__, drafter="autoregressive", prompts=64)
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--rules", default=",".join(RULES))
    args = parser.parse_args()
    target, drafter, prompts = loaded(args)
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
    write(args, {"temperatures": found}, "drafter", "k", "prompts", "seeds", "tokens", "top_p")


if __name__ == "__main__":
    main()
