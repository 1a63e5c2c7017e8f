"""Names of models that are neither a folder nor on Hugging Face: the shipped family, and shapes with random weights."""

from __future__ import annotations

POCKET = "pocket"
"""The shipped family."""
PREFIX = "shape:"
"""Prefix of the name of a shape, see `paradraft.sources.presets`."""


def is_shape(name: str) -> bool:
    """Whether a model name is that of a shape.

    >>> is_shape("shape:llama-3.1-8b"), is_shape("pocket")
    (True, False)
    """
    return name.startswith(PREFIX)


def short_name(name: str) -> str:
    """A model's name for a title: the last part of a path; a Hugging Face id unchanged.

    >>> [short_name(name) for name in ("build/real/qwen.Q4_K_M.gguf", "models/qwen.gguf", "Qwen/Qwen3-8B", "/m/qwen/")]
    ['qwen.Q4_K_M.gguf', 'qwen.gguf', 'Qwen/Qwen3-8B', 'qwen']
    """
    is_id = name.count("/") == 1 and name[0] not in "./~" and not name.endswith(".gguf")
    return name if is_id else name.rstrip("/").rpartition("/")[2] or name


def check_has_weights(name: str) -> None:
    """Raises ValueError for a shape, because its random weights give no meaningful text."""
    if is_shape(name):
        raise ValueError(f"{name!r} has random weights and says nothing: only `paradraft bench` takes it, to time it")
