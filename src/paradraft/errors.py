"""Argument checks and out-of-memory detection."""

from __future__ import annotations

import operator
import reprlib
from numbers import Real


class OtherTokensError(ValueError):
    """A model has other tokens than the one that it is to be used with."""


def whole_number(name: str, value: object) -> int:
    """Checks that a user's value is an integer of Python or numpy; True and 2.0 are not.

    Raises:
        ValueError: it is not.

    >>> whole_number("seed", 7)
    7
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]  # anything else raises TypeError
        except TypeError:
            pass
    raise ValueError(f"{name}={one_line(value)}: use a whole number")


def real_number(name: str, value: object) -> float:
    """Checks that a user's value is a real number of Python or numpy; True and "0.7" are not.

    Raises:
        ValueError: it is not.

    >>> real_number("temperature", 1)
    1.0
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise ValueError(f"{name}={one_line(value)}: use a number")


def one_line(value: object) -> str:
    """Formats a value for a message: its beginning and its end, in one line.

    >>> one_line([[1.9, 2]]), one_line({"a": 1})
    ('[[1.9, 2]]', "{'a': 1}")
    """
    return " ".join(reprlib.repr(value).split())


class DrafterLostError(RuntimeError):
    """The drafter's process has ended, has failed, or does not answer."""


SIGNS = ("out of memory", "allocate memory", "ALLOC_FAILED")
"""Substrings of a `RuntimeError` for lack of memory: of a GPU, of a CPU, and of a library that allocates itself."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there is no more memory.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    (True, True)
    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    >>> is_out_of_memory(RuntimeError("shape '[2]' is invalid for input of size 3")), is_out_of_memory(ValueError())
    (False, False)
    """
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError is a subclass
        return any(sign in str(error) for sign in SIGNS)
    return isinstance(error, MemoryError)
