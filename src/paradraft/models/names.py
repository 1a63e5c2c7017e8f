"""Names of models that are neither a folder nor on Hugging Face: the shipped family, and shapes with random weights."""

from __future__ import annotations

POCKET = "pocket"
"""The shipped family."""
PREFIX = "shape:"
"""How the name of a shape begins; see `paradraft.models.presets`."""


def is_shape(name: str) -> bool:
    """Whether a model name asks for a shape.

    >>> is_shape("shape:llama-3.1-8b"), is_shape("pocket")
    (True, False)
    """
    return name.startswith(PREFIX)


def check_has_weights(name: str) -> None:
    """Raises ValueError for a shape, where a model is needed that says something."""
    if is_shape(name):
        raise ValueError(f"{name!r} has random weights and says nothing: only `paradraft bench` takes it, to time it")
