"""Values of options: parsed, or checked before anything is loaded."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paradraft.placement import usable_cpus
from paradraft.tree import Tree
from paradraft.wording import number_of


def tree_of(budget: int | None, paths: str | None) -> Tree | None:
    """Draft tree of `--tree-budget` or `--tree-paths`."""
    if budget is not None and paths is not None:
        raise ValueError("give either --tree-budget or --tree-paths")
    if paths is None:
        return None if budget is None else Tree(budget=budget)
    try:
        ranks = tuple(tuple(int(rank) for rank in path.split(".")) for path in paths.split())
    except ValueError:
        raise ValueError(f'--tree-paths {paths!r}: write ranks with dots between them, such as "0 1 0.0"') from None
    return Tree(paths=ranks)


def biases_of(pairs: list[str]) -> dict[int, float]:
    """Parses the values of `--logit-bias`.

    >>> biases_of(["17=-2.5", "3=-inf"])
    {17: -2.5, 3: -inf}
    """
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias {pair}: write TOKEN_ID=NUMBER, such as 17=-2.5 or 17=-inf") from None
        if token_id in biases:
            raise ValueError(f"--logit-bias {pair}: token {token_id} has a bias already, give it one")
        biases[token_id] = value
    return biases


def key_in(variable: str | None, option: str = "--api-key-env") -> str | None:
    """API key in an environment variable; None for no key. Raises ValueError, naming `option`, if it holds none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{option} {variable}: there is no key in this environment variable")
    return key


def check_png(file: Path | None) -> None:
    """Raises ValueError unless the file is a .png and matplotlib is installed."""
    if file is None:
        return
    if file.suffix != ".png":
        raise ValueError(f"--plot {file}: name a .png file")
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot {file}: matplotlib draws it, pip install 'paradraft[bench]'")


def use_threads(threads: int | None) -> None:
    """Sets torch's thread count; None leaves it. Raises ValueError if the process has fewer CPUs."""
    if threads is None:
        return
    cpus = usable_cpus()
    if threads > cpus:
        raise ValueError(f"--threads {threads}: this process has {number_of(cpus, 'CPU')}, use at most as many")
    import torch

    torch.set_num_threads(threads)


def variables_of(text: str | None) -> dict[str, Any]:
    """Variables of the chat template in `--chat-template-kwargs`."""
    from paradraft.sources.records import read_object

    return read_object(text or "{}", "--chat-template-kwargs", '{"enable_thinking": false}')
