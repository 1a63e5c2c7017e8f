"""`paradraft train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def _list_settings(wanted: bool) -> None:
    if not wanted:
        return
    from paradraft.train.recipe import Lora, PardRecipe

    for prefix, model in (("", PardRecipe), ("lora.", Lora)):
        for name, field in model.model_fields.items():
            default = "required" if field.is_required() else json.dumps(field.default).strip('"')
            print(f"{prefix + name} ({default}): {field.description}")
    raise typer.Exit


def pard(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings that replace the recipe's.")] = None,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings", help="List all settings of a recipe, and exit.", callback=_list_settings, is_eager=True
        ),
    ] = False,
) -> None:
    """Adapt a draft model into a PARD drafter. Run the same command again to resume.

    Ctrl-C and SIGTERM write a checkpoint after the current step and leave, with exit code 130 or 143; a second Ctrl-C
    leaves at once.
    """
    from paradraft.train.recipe_file import load_recipe
    from paradraft.train.run import run_with_display
    from paradraft.train.stopping import StoppedError

    try:
        run_with_display(load_recipe(recipe, overrides or []))
    except StoppedError as stop:
        raise typer.Exit(128 + stop.number) from None
