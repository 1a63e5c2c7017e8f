"""What a path head could win on a drafter: recall of the right token, and the draft length of an oracle.

python benchmarks/scripts/head_oracle.py dflash RECIPE --start DRAFTER --set model=TARGET --json FILE

Reads held-out samples as in training. At each anchor the drafter's K predictions are compared with the text: with the
tokens that the target wrote, that is what greedy drafts are compared with. A length is 1 plus the tokens in a row that
are the likeliest, or among the likeliest 4 or 16: so far comes a head at best that only chooses among these.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml

from paradraft.bench.report.summary import write_json
from paradraft.environment import describe_machine
from paradraft.train import recipe_class, trainee_module
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.run import setup

RANKS = (1, 4, 16)


def main() -> None:
    """Prints the shares and lengths, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--start", required=True, help="the trained drafter")
    parser.add_argument("--set", nargs="*", default=[], help="settings in place of the recipe's")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    module = trainee_module(given.drafter)
    settings = yaml.safe_load(given.recipe.read_text()) | dict(map(_setting, given.set))
    settings |= {"start": given.start, "held_out": given.samples, "feature_cache_gb": 0, "r": 1.0}
    recipe = recipe_class(module).model_validate(settings)
    prepared = setup.prepare(recipe, module.build, torch.device("cpu"), processes=1)
    trainee, K = prepared.trainee, prepared.trainee.depths
    counts, right, chains = torch.zeros(K), {rank: torch.zeros(K) for rank in RANKS}, {rank: [0, 0] for rank in RANKS}
    for sample in prepared.held_out:
        batch = trainee.collate([[sample]], [[torch.Generator().manual_seed(0)]])
        ranks = ranks_of(trainee.objective, batch)
        depths, anchors, labels = batch.depths[0], (batch.positions - batch.depths)[0], batch.labels[0]
        table = torch.full((int(anchors.max()) + 1, K), -1)
        table[anchors, depths] = torch.where(labels == IGNORED, -1, ranks)
        whole = table[(table >= 0).all(1)]
        for rank in RANKS:
            hits = (whole < rank).int()
            right[rank] += hits.sum(0)
            chains[rank][0] += int(hits.cumprod(1).sum())
            chains[rank][1] += len(whole)
        counts += len(whole)
    result = {
        "anchors": int(counts[0]),
        "recall": {rank: (right[rank] / counts).tolist() for rank in RANKS},
        "length": {rank: 1 + hits / anchors for rank, (hits, anchors) in chains.items()},
    }
    print(json.dumps(result, indent=1))
    if given.json:
        settings = {name: str(value) for name, value in settings.items()}
        write_json(given.json, {"machine": describe_machine("cpu"), "settings": settings, **result})


@torch.no_grad()
def ranks_of(objective: Any, batch: Any) -> torch.Tensor:
    """`[R]` rank of each row's label among its logits, from 0; as many as there are ids where it cannot be drafted."""
    layers = objective.target_layers
    with torch.autocast("cpu", torch.bfloat16, enabled=objective.bf16):
        hidden = objective.hidden(batch, objective.target.states(batch.texts, layers))
        logits = objective.head(hidden[0], batch.depths[0]).float()
    vocab_map = objective.target.vocab_map
    labels = batch.labels[0].clamp(min=0)
    rows = labels if vocab_map is None else vocab_map.rows_of(labels)
    own = logits.gather(1, rows.clamp(min=0)[:, None])
    return torch.where(rows < 0, logits.shape[1], (logits > own).sum(1))


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, yaml.safe_load(value)


if __name__ == "__main__":
    main()
