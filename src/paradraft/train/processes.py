"""What the processes of one run agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import gather_object


@contextmanager
def as_one(accelerator: Accelerator) -> Iterator[None]:
    """Lets a mistake that one process finds end all of them, with the same words.

    Otherwise the others would wait for it, and only the main process speaks. What is done inside must not wait for
    other processes itself.

    Raises:
        ValueError: one was raised inside, in any process; of several that of the first process.
    """
    if accelerator.num_processes == 1:
        yield
        return
    mistake: str | None = None
    try:
        yield
    except ValueError as error:
        mistake = str(error)
    mistakes = [found for found in gather_object([mistake]) if found is not None]
    if mistakes:
        raise ValueError(mistakes[0])
