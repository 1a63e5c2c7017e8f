"""Which passes have passed their self-check before, so that later loads of a model need not repeat it.

A pass is known by the logits of the check's text, to the last bit, and by all code and settings that they come from. Of
each there is an empty file `checked-*` in the user's cache; to delete those is safe at any time.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedModel

from paradraft.models.forward.cpu.build import cache_folder, instructions, is_private, library_key

VERSION = 4
"""Of the self-check."""
LEAST_S = 0.3
"""Checks that take less are repeated, and leave no file."""
MOST_DAYS = 30
"""After which a file is deleted that no load has asked for."""
_DAY_S = 24 * 60 * 60


def verdict_of(model: PreTrainedModel, probe: str) -> Path | None:
    """The file that says that a pass is right; None where there is no folder for it.

    Args:
        model: whose pass it is.
        probe: a digest of the logits.
    """
    folder = cache_folder()
    if folder is None or not is_private(folder, is_folder=True):
        return None
    code = VERSION, library_key(), instructions(), version("torch"), version("transformers")
    settings = [
        (place, type(module).__qualname__, name, value)
        for place, module in model.named_modules()
        for name, value in sorted(vars(module).items())
        if type(value) in (bool, int, float, str)
    ]
    key = repr((code, str(model.dtype), model.config.to_json_string(use_diff=False), settings, probe))
    return folder / f"checked-{hashlib.sha256(key.encode()).hexdigest()}"


def has_passed(verdict: Path | None) -> bool:
    """Whether the pass was found to be right before."""
    if verdict is None or not is_private(verdict):
        return False
    with suppress(OSError):
        os.utime(verdict)  # it is in use
    return True


def remember(verdict: Path | None, seconds: float) -> None:
    """Notes that a pass is right, if to find that out took long, and forgets others that are old.

    Args:
        verdict: its file.
        seconds: that the check took.
    """
    if verdict is None or seconds < LEAST_S:
        return
    with suppress(OSError):  # it is checked again then
        for other in verdict.parent.glob("checked-*"):
            if is_private(other) and time.time() - other.lstat().st_mtime > MOST_DAYS * _DAY_S:
                other.unlink(missing_ok=True)
        os.close(os.open(verdict, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
