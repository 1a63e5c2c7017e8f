"""`paradraft train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pard(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings that replace the recipe's.")] = None,
) -> None:
    """Adapt a draft model into a PARD drafter. Run the same command again to resume."""
    from paradraft.train.recipe_file import load_recipe
    from paradraft.train.run import run_with_display

    run_with_display(load_recipe(recipe, overrides or []))
