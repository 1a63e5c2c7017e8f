"""`paradraft init-draft`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.options import option
from paradraft.models.runtime import DTYPES
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.train.init.init_draft import NewDraft
    from paradraft.train.init.init_from import InitFrom


def init_draft(
    target: options.Target,
    out: Annotated[Path, option("The folder to write; it must be empty or not exist.")],
    layers: Annotated[
        int | None,
        option(
            "Number of the target's layers to keep, evenly spaced, first and last included; by default a quarter. "
            "With --fresh: its layers, by default 6.",
        ),
    ] = None,
    every: Annotated[int | None, option("Keep each n-th layer of the target, and the last.")] = None,
    fresh: Annotated[bool, option("A small model with random weights instead.", "--fresh")] = False,
    hidden_size: Annotated[int | None, option("Its width; by default 256.")] = None,
    intermediate_size: Annotated[
        int | None,
        option(
            "Its width inside a layer's MLP: of the target's neurons those with the largest weights are kept, by "
            "default all. With --fresh: by default 8/3 of the hidden size.",
        ),
    ] = None,
    heads: Annotated[int | None, option("Its attention heads; by default 4.")] = None,
    seed: Annotated[int | None, option("Of its weights; by default 0.")] = None,
    source: Annotated[
        str | None,
        option("A small model of the same family, whose embedding is padded or cut to fit.", "--from"),
    ] = None,
    mask_token: Annotated[bool, option("Add a row for the mask token where the tokenizer leaves no id free.")] = True,
    dtype: Annotated[str | None, option(f"One of {', '.join(DTYPES)}; by default the target's.")] = None,
) -> None:
    """Make a draft to train for a target that has no small sibling.

    Its tokenizer is the target's, and so is the number of rows of its embedding.
    """
    with importing():
        from paradraft.train.init.init_draft import make

    origin = _origin(
        fresh, source, layers=layers, every=every, hidden_size=hidden_size, intermediate_size=intermediate_size,
        heads=heads, seed=seed,
    )  # fmt: skip
    made = make(target, out, origin, mask_token=mask_token, dtype=dtype)
    for line in _report(target, out, origin, made):
        print(line)


def _origin(fresh: bool, source: str | None, **settings: int | None) -> InitFrom:
    """Origin of the draft's weights; an option that would be ignored is an error."""
    from paradraft.train.init.init_from import PretrainedSibling, PrunedTarget, RandomInit

    set_options = {name: value for name, value in settings.items() if value is not None}
    options = {name: f"--{name.replace('_', '-')}" for name in set_options} | (
        {} if source is None else {"source": "--from"}
    )
    if fresh:
        for name in ("every", "source"):
            if name in options:
                raise ValueError(f"--fresh takes nothing over: leave {options[name]} out")
        return RandomInit(**set_options)
    for name in ("hidden_size", "heads", "seed"):
        if name in options:
            raise ValueError(f"{options[name]} is for --fresh: add it, or leave the option out")
    if source is None:
        return PrunedTarget(**set_options)
    for name in ("layers", "every", "intermediate_size"):
        if name in options:
            raise ValueError(f"--from keeps all layers as they are: leave {options[name]} out")
    return PretrainedSibling(name=source)


def _report(target: str, out: Path, origin: InitFrom, made: NewDraft) -> list[str]:
    from paradraft.train.init.init_from import PretrainedSibling, RandomInit

    match origin:
        case PretrainedSibling():
            source = origin.name
        case RandomInit():
            source = f"random weights, {number_of(origin.layers, 'layer')} of width {origin.hidden_size}"
        case _:
            source = f"layers {', '.join(map(str, made.layers))} of the target"
            if origin.intermediate_size is not None:
                source += f" with {origin.intermediate_size} neurons each"
    share = made.parameters / made.target_parameters
    lines = [
        f"target      {target}, {made.target_parameters:,} parameters",
        f"draft       {source}, {made.parameters:,} parameters, {share:.1%} of the target's",
        f"vocabulary  {made.rows} rows, the target has {made.target_rows}",
        f"mask token  {'none is free' if made.mask_id is None else f'{made.mask_id}, {made.mask_token}'}",
    ]
    if made.mask_id is None or made.rows > made.target_rows:
        candidates = ", ".join(made.elsewhere[-3:])
        fix = (
            f"for vLLM set mask_token_id in {made.recipes[-1]} to a special token that no text of yours holds, such as "
            f"{candidates}, before it is trained"
            if candidates
            else "its tokenizer has no special token to spare, so vLLM cannot serve a PARD drafter for it"
        )
        lines.append(f"note        the target leaves no id for a mask, and vLLM takes no more rows than it has: {fix}")
    lines.append(
        "data        the recipes learn the shipped texts, to try them; set data to what the target answers "
        "(paradraft regenerate)"
    )
    for index, recipe in enumerate(made.recipes):
        lines.append(f"{'' if index else 'next':<12}{shlex.join(['paradraft', 'train', 'pard', str(recipe)])}")
    return lines
