"""One-line load errors; captures `transformers` output."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as hf_logging

from paradraft.errors import is_out_of_memory


@contextmanager
def loading_of(what: str) -> Iterator[None]:
    """Turns errors while loading `what` into ValueErrors with a one-line message; out of memory passes through."""
    try:
        yield
    except StrictDataclassError as error:
        raise ValueError(f"cannot load {what}: its config.json is wrong: {error.__cause__ or error}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {what}: {first_sentence(error)}") from None
    except Exception as error:  # with a damaged file `transformers` fails at the first unexpected value, in any way
        if is_out_of_memory(error):
            raise
        problem = f"{type(error).__name__}: {first_sentence(error)}"
        raise ValueError(f"cannot load {what}: one of its files seems damaged ({problem})") from None


@contextmanager
def without_bars() -> Iterator[None]:
    """Hides the progress bar of `transformers` for weights on disk; downloads keep theirs."""
    was_shown, were_shown = hf_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    hf_logging.disable_progress_bar()  # those of downloads too
    if were_shown:
        enable_progress_bars()
    try:
        yield
    finally:
        if was_shown:
            hf_logging.enable_progress_bar()
        if not were_shown:
            disable_progress_bars()


def is_no_table(record: logging.LogRecord) -> bool:
    """Whether a record is not `transformers`' load report (a table), which `load_model` replaces by a line."""
    return "LOAD REPORT" not in record.getMessage()


def some_of(problems: list[str]) -> str:
    """The first problem and the count of the others."""
    return problems[0] + (f", and {len(problems) - 1} more" if problems[1:] else "")


def first_sentence(error: Exception) -> str:
    """The first line of an error's message, or its class if there is no message."""
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
