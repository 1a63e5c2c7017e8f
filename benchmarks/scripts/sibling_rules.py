"""Tokens per pass by verification rule, shape and way to draw siblings, at equal numbers of nodes.

    python benchmarks/scripts/sibling_rules.py --drafter pard --json benchmarks/FILE.json

A spine has two tokens at each depth, after the best path. Siblings are drawn without replacement (RSD-C), or "greedy":
all but the last are the likeliest, and the last is drawn from the rest (Hu et al. 2025). "RSD-S" keeps the two best
paths of a depth by stochastic beam search (Jeon et al. 2024), for drafters that predict all depths in one pass. Grown
trees hold the likeliest paths, with the target's noise under `match`. Both replacements live in this file only.
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
from paradraft.core import Draft
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
            counted = Compared(rule, None)
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
            print(found[-1], flush=True)
    write(args, {"cases": found}, "drafter", "prompts", "seeds", "tokens")


if __name__ == "__main__":
    main()
