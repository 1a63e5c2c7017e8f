"""Tokens per pass by verification rule, shape and way to draw siblings, at equal numbers of nodes.

    python benchmarks/scripts/sibling_rules.py --drafter pard --json benchmarks/FILE.json

A spine has two tokens at each depth, after the best path. Siblings are drawn without replacement (RSD-C), or "greedy":
all but the last are the likeliest, and the last is drawn from the rest (Hu et al. 2025). "RSD-S" keeps the two best
paths of a depth by stochastic beam search (Jeon et al. 2024), for drafters that predict all depths in one pass. Grown
trees hold the likeliest paths, with the target's noise under `match`. Both replacements live in this file only.

"share_of_optimum": of the two siblings of the first depth, by the p and q of each round, how often recursive rejection
accepts one, as a share of how often any rule could.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from sampled_answers import batches, loaded, options, standard_error, write
from torch import Tensor
from verification_rules import Compared

from paradraft.bench.synthetic import rounds
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.drafters import pard
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.sampling import sampler as sampling
from paradraft.sampling.drawing import token_at
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree

WIDTH = 2
NUMBERS = torch.Generator().manual_seed(0)


def greedy_siblings(q_BRV: Tensor, shares_BRC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In place of `without_replacement`: the likeliest tokens, and the last one drawn from the rest."""
    count = shares_BRC.shape[-1]
    best_BRC = q_BRV.topk(count - 1, dim=-1).indices
    rest_BRV = q_BRV.scatter(-1, best_BRC, 0.0)
    last_BR = token_at(rest_BRV, shares_BRC[..., -1])
    tokens = torch.cat([best_BRC, last_BR[..., None]], dim=-1)
    certain = torch.nn.functional.one_hot(best_BRC, q_BRV.shape[-1]).double()
    drawn = (rest_BRV / rest_BRV.sum(-1, keepdim=True).clamp(min=1e-300))[:, :, None]
    log_probs = torch.where(tokens < 0, -torch.inf, q_BRV.gather(-1, tokens.clamp(min=0)).log())
    return tokens, log_probs, torch.cat([certain, drawn], dim=2)


def stochastic_beam(made: Sampler, tree: Tree | None, logits_BKV: Tensor, *_: Any) -> Draft:
    """In place of `draft_of_pass`: the `WIDTH` paths of each depth with the largest perturbed log-probabilities."""
    assert tree is not None
    depth = min(tree.nodes // WIDTH, logits_BKV.shape[1])
    q_BKV = made.probabilities(logits_BKV[:, :depth])
    rows = [_beam(q_KV) for q_KV in q_BKV]
    tokens, parents, probs = zip(*rows, strict=True)
    return Draft(tokens=torch.tensor(tokens), parents=torch.tensor(parents), probs=torch.stack(probs))


def _beam(q_KV: Tensor) -> tuple[list[int], list[int], Tensor]:
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[Tensor] = []
    beam = [(-1, 0.0, 0.0)]  # node, log-probability, perturbed
    for q_V in q_KV:
        found = []
        for node, log_prob, perturbed in beam:
            scores_V = (
                log_prob + q_V.log() - torch.rand(len(q_V), generator=NUMBERS, dtype=torch.float64).log().neg().log()
            )
            best = scores_V.topk(WIDTH)
            most = float(best.values[0])
            left_V = q_V
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                # The value, given that the largest is the parent's (Kool et al. 2019, section 4.1).
                inside = math.exp(-perturbed) - math.exp(-most) + math.exp(-value)
                given = -math.log(inside) if inside > 0 else math.inf
                found.append((given, node, token, log_prob + float(q_V[token].log()), left_V / left_V.sum()))
                left_V = left_V.index_fill(0, torch.tensor([token]), 0.0)
        kept = sorted(found, key=lambda one: -one[0])[:WIDTH]
        beam = []
        for given, node, token, log_prob, from_V in kept:
            beam.append((len(tokens), log_prob, given))
            tokens.append(token)
            parents.append(node)
            probs.append(from_V)
    return tokens, parents, torch.stack(probs)


class Shared(Compared):
    """Notes how often recursive rejection, and the best rule, accept one of two siblings of the first depth."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule, None)
        self.chances: list[tuple[float, float]] = []

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """The rule's verdict."""
        verdict = super().__call__(draft, out, sampler)
        if draft.probs is not None and draft.tokens.shape[1] > 1:
            p_BV = sampler.probabilities(out.logits[:, :1])[:, 0].double()
            for row, tokens in enumerate(draft.lists[0]):
                if min(tokens[:2]) >= 0:
                    p_V, q_V = p_BV[row], draft.probs[row, 0].double()
                    self.chances.append((accepted_of_two(p_V, q_V), most_of_two(p_V, q_V)))
        return verdict


def accepted_of_two(p_V: Tensor, q_V: Tensor) -> float:
    """The chance that recursive rejection accepts one of two tokens that are drawn without replacement."""
    in_q_V = q_V > 0
    first_V = torch.minimum(p_V, q_V)
    rest_V = (p_V - q_V).clamp(min=0.0)
    if not float(rest_V.sum()):
        return 1.0
    outside = float(rest_V[~in_q_V].sum())
    p_V, q_V, first_V, rest_V = (each[in_q_V] for each in (p_V, q_V, first_V, rest_V))
    rest_V = rest_V / (rest_V.sum() + outside)
    # A rejected token has p < q, so the rest leaves it out anyway.
    order = (rest_V / q_V).argsort()
    ratio_V, of_rest_V, of_q_V = (rest_V / q_V)[order], rest_V[order].cumsum(0), q_V[order].cumsum(0)
    grown_V = 1 / (1 - q_V).clamp(min=1e-12)
    below_V = torch.searchsorted(ratio_V, grown_V, right=True)
    from_rest_V, from_q_V = (torch.nn.functional.pad(each, (1, 0))[below_V] for each in (of_rest_V, of_q_V))
    second_V = from_rest_V + grown_V * (of_q_V[-1] - from_q_V)
    return float((first_V + (q_V - first_V) * second_V).sum())


def most_of_two(p_V: Tensor, q_V: Tensor) -> float:
    """The chance for the best rule: 1 + min over sets H of p(H) - Q(H), with Q(H) the chance that both tokens are in H.

    The least is among the sets of tokens with the smallest p / q (Hu et al. 2025); else this would be too large.
    """
    order = (p_V / q_V).nan_to_num(nan=torch.inf).argsort()
    p_V, q_V = p_V[order], q_V[order]
    odds_V = q_V / (1 - q_V).clamp(min=1e-12)
    both_V = q_V.cumsum(0) * odds_V.cumsum(0) - (q_V * odds_V).cumsum(0)
    return 1 + min(float((p_V.cumsum(0) - both_V).min()), 0.0)


@contextmanager
def drawing(siblings: str) -> Iterator[None]:
    """Draws siblings another way."""
    if siblings == "greedy":
        with mock.patch.object(sampling, "without_replacement", greedy_siblings):
            yield
    elif siblings == "RSD-S":
        with mock.patch.object(pard, "draft_of_pass", stochastic_beam):
            yield
    else:
        yield


def spine(nodes: int) -> Tree:
    """Two tokens at each depth."""
    return Tree(paths=tuple((0,) * depth + (rank,) for depth in range(nodes // 2) for rank in range(2)))


def cases(nodes: int, drafter: str) -> Iterator[tuple[str, str, str, int, Tree | None]]:
    """Rule, shape, siblings, K and tree."""
    for rule in ("match", "rejection", "block"):
        yield rule, "chain", "", nodes, None
        yield rule, "grown", "likeliest", nodes, Tree(budget=nodes)
        yield rule, "spine", "match" if rule == "match" else "RSD-C", nodes // 2, spine(nodes)
        if rule != "match":
            yield rule, "spine", "greedy", nodes // 2, spine(nodes)
            if drafter == "pard":
                yield rule, "beam", "RSD-S", nodes // 2, spine(nodes)


def main() -> None:
    """Measures and writes the file."""
    parser = options(__doc__, drafter="pard", prompts=16)
    parser.add_argument("--nodes", default="4,8,16")
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    target, drafter, prompts = loaded(args)
    found = []
    settings = itertools.product(args.temperatures.split(","), map(int, args.nodes.split(",")))
    for temperature, nodes in settings:
        for rule, shape, siblings, k, tree in cases(nodes, args.drafter):
            engine = Engine(
                target,
                drafter,
                Speculation(drafter=args.drafter, draft=args.draft, k=k, tree=tree, verify=rule, lengths="fixed"),
            )
            counted = Shared(rule) if (rule, siblings) == ("rejection", "RSD-C") else Compared(rule, None)
            with drawing(siblings), engine.in_round():
                for some, samplings in batches(prompts, args.seeds, args.rows, {"temperature": float(temperature)}):
                    for _ in rounds(engine.new_batch(verify=counted), some, args.tokens, samplings):
                        pass
            accepted = [float(count) for count in counted.accepted]
            found.append(
                {
                    "temperature": float(temperature), "nodes": nodes,
                    "rule": rule, "shape": shape, "siblings": siblings,
                    "tokens_per_pass": 1 + sum(accepted) / len(accepted), "standard_error": standard_error(accepted),
                }
            )  # fmt: skip
            if isinstance(counted, Shared):
                ours, most = map(sum, zip(*counted.chances, strict=True))
                found[-1]["share_of_optimum"] = ours / most
            print(found[-1], flush=True)
    write(args, {"cases": found}, "drafter", "prompts", "seeds", "tokens")


if __name__ == "__main__":
    main()
