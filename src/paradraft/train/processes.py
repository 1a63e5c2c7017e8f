"""What the processes of one run agree on, and how they end."""

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


def close(accelerator: Accelerator) -> None:
    """Closes what a run has open: its trackers, and NCCL's process group, which complains if it is left.

    Gloo's group is left to the end of the process. Its threads may still hold tensors of the last exchange; to let go
    of them they need the interpreter, and whoever deletes the group keeps it and waits for them.
    """
    if accelerator.device.type == "cuda":
        accelerator.end_training()
        return
    for tracker in accelerator.trackers:
        tracker.finish()
