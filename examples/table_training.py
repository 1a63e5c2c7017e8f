"""The training of `table_drafter.py`: which token follows which, as a table of low rank.

It shows the whole contract of a file in `paradraft/train/drafters`: a class of recipes, a trainee, and `build`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from paradraft.data.samples import Sample
from paradraft.formats.folder import whole_folder
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sources.loading import load_config, locate
from paradraft.train.objectives.batch import Drop, TrainingBatch, collate
from paradraft.train.objectives.chunks import rows_at_once
from paradraft.train.objectives.row_loss import RowLoss, loss_of_rows
from paradraft.train.recipe import Recipe
from paradraft.train.trainee import RunData


class TableRecipe(Recipe):
    """Settings of `paradraft train table`."""

    rank: int = Field(default=32, ge=1, description="rank of the table")


class Table(nn.Module):
    """What is trained, and its loss.

    Args:
        rows: of the target's embedding.
        rank: of the table.
        row_loss: what a row learns.
    """

    def __init__(self, rows: int, rank: int, row_loss: RowLoss) -> None:
        super().__init__()
        self.row_loss = row_loss
        self.embedding = nn.Embedding(rows, rank)
        self.lm_head = nn.Linear(rank, rows, bias=False)

    def forward(self, batch: TrainingBatch, weights_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Trainee.objective`."""
        return loss_of_rows(
            self.embedding(batch.tokens),
            batch,
            weights_K,
            self.row_loss if self.training else self.row_loss.unweighted,
            head=lambda hidden_mD, depths_m: self.lm_head(hidden_mD),
            teacher=None,
            chunk=rows_at_once(self.lm_head.out_features, batch.tokens.device),
            trained=list(self.parameters()),
        ).sums


class TableTrainee:
    """The table in training, see `Trainee`."""

    depths = 1
    drafter = "table"
    k = 4
    notes = ()

    def __init__(self, objective: Table, max_tokens: int) -> None:
        self.objective = objective
        self.max_tokens = max_tokens

    def collate(self, groups: list[list[Sample]], generators: list[list[torch.Generator]]) -> TrainingBatch:
        """Real tokens only: nothing is masked, and nothing is dropped."""
        return collate(groups, Drop(k=1, r=1.0, r_min=1.0, mask_id=None), generators)

    def check_target(self, name: str, target: Target, runtime: Runtime) -> None:
        """Raises ValueError if the target has more tokens than the table."""
        if target.lm.vocab_size > self.objective.lm_head.out_features:
            raise ValueError(f"target {name!r} has {target.lm.vocab_size} tokens, model has fewer: use one family")

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes the table, and a `config.json`."""
        with whole_folder(folder) as new:
            save_file({name: weight.cpu().contiguous() for name, weight in weights.items()}, new / "model.safetensors")
            config = {"model_type": "table", "rank": self.objective.lm_head.in_features}
            (new / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


def build(recipe: TableRecipe, data: RunData) -> TableTrainee:
    """A table with random weights, as large as the vocabulary of the recipe's model.

    Raises:
        ValueError: there is no such model, or it does not know all tokens of the data.
    """
    config = load_config(locate(recipe.model, recipe.ROLES["model"]))
    if data.largest >= config.vocab_size:
        raise ValueError(f"model {recipe.model!r} knows {config.vocab_size} tokens, the data hold token {data.largest}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        table = Table(config.vocab_size, recipe.rank, recipe.row_loss)
    return TableTrainee(table.to(data.device), config.max_position_embeddings)
