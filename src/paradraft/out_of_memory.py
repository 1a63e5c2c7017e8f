"""Errors that say that memory has run out: Python, torch and CUDA's libraries each have their own."""

from __future__ import annotations

SIGNS = ("out of memory", "allocate memory", "ALLOC_FAILED")
"""What such a `RuntimeError` says: of a GPU, of a CPU, and of a library that asks for itself."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there is no more memory.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    (True, True)
    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    >>> is_out_of_memory(RuntimeError("shape '[2]' is invalid for input of size 3")), is_out_of_memory(ValueError())
    (False, False)
    """
    if isinstance(error, RuntimeError):  # torch's own class for a GPU's is one too
        return any(sign in str(error) for sign in SIGNS)
    return isinstance(error, MemoryError)
