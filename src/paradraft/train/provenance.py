"""Where a drafter comes from: the record beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paradraft.machine import describe_machine
from paradraft.train.contents import revision_of
from paradraft.train.recipe import POCKET_ROLES, PardRecipe

RECORD = "train_command.json"


def write_record(recipe: PardRecipe, device: str, **results: object) -> None:
    """Writes `train_command.json` into `recipe.out`: recipe, data, models, command, versions, hardware, and
    what came out."""
    record = {
        "fingerprint": recipe.fingerprint,
        "recipe": recipe.model_dump(mode="json"),
        "data_sha256": recipe.data_hashes,
        "models": _models(recipe),
        "machine": describe_machine(device),
        **results,
    }
    recipe.out.mkdir(parents=True, exist_ok=True)
    file = recipe.out / RECORD
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """The record in a folder; empty if there is none."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _models(recipe: PardRecipe) -> dict[str, dict[str, str | None]]:
    """Which models these were: folders by what they held, those of Hugging Face by their revision."""
    names = {role: name for role in POCKET_ROLES if (name := getattr(recipe, role)) is not None}
    return {
        role: {"name": name, "sha256_sampled": recipe.model_hashes[role]}
        if role in recipe.model_hashes
        else {"name": name, "revision": revision_of(name)}
        for role, name in names.items()
    }
