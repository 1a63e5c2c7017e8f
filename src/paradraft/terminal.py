"""A streamed answer on the terminal, coloured by where its tokens came from."""

from __future__ import annotations

from huggingface_hub.utils.tqdm import enable_progress_bars
from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from paradraft.api import Engine
from paradraft.core import Sampling

DRAFTED_STYLE = "green"


def hide_progress_bars() -> None:
    """Turns off the bars of `transformers` for loading and saving; downloads keep theirs."""
    logging.disable_progress_bar()
    enable_progress_bars()


def stream_answer(engine: Engine, prompt: str, *, max_new_tokens: int, sampling: Sampling) -> None:
    """Prints the prompt dim, drafted and accepted text green, the target's own tokens plain.

    A line with tokens per second and acceptance length goes to the standard error.

    Raises:
        ValueError: see `Engine.stream`.
    """
    console = Console(highlight=False, soft_wrap=True)
    chunks = engine.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling)
    console.print(Text(prompt, style="dim"), end="")
    for chunk in chunks:
        console.print(Text(chunk.drafted_text, style=DRAFTED_STYLE) + Text(chunk.own_text), end="")
    stats = engine.clock.stats
    console.print()
    Console(stderr=True, highlight=False).print(
        f"{stats.tokens} tokens in {stats.total_s:.2f} s, {stats.tokens / stats.total_s:.0f} tokens/s, "
        f"acceptance length {stats.acceptance_length:.2f}"
    )
