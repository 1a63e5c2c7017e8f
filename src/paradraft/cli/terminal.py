"""The terminal: a streamed answer, coloured by where its tokens came from, and progress bars."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from huggingface_hub.utils.tqdm import enable_progress_bars
from rich.console import Console
from transformers.utils import logging

from paradraft.engine import Engine
from paradraft.sampling_params import Sampling

DIM, GREEN, PLAIN = "\x1b[2m", "\x1b[32m", "\x1b[0m"


def hide_progress_bars() -> None:
    """Turns off the bars of `transformers` for loading and saving; downloads keep theirs."""
    logging.disable_progress_bar()
    enable_progress_bars()


def stream_answer(
    engine: Engine, prompt: str, *, max_new_tokens: int, sampling: Sampling, stop: Sequence[str] = ()
) -> None:
    """Prints the prompt dim, drafted and accepted text green, the target's own tokens plain.

    A line with tokens per second and acceptance length goes to the standard error.

    Raises:
        ValueError: see `Engine.stream`.
    """
    chunks = engine.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)
    # Written as it is: a formatter would expand tabs and drop control characters.
    _write(prompt, DIM)
    for chunk in chunks:
        _write(chunk.drafted_text, GREEN)
        _write(chunk.own_text, "")
    stats = engine.clock.stats
    _write("\n", "")
    Console(stderr=True, highlight=False).print(
        f"{stats.tokens} tokens in {stats.total_s:.2f} s, {stats.tokens / stats.total_s:.0f} tokens/s, "
        f"acceptance length {stats.acceptance_length:.2f}"
    )


def _write(text: str, style: str) -> None:
    is_styled = bool(text and style) and sys.stdout.isatty()
    sys.stdout.write(f"{style}{text}{PLAIN}" if is_styled else text)
    sys.stdout.flush()
