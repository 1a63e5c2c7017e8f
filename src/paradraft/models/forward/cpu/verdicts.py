"""Cache of self-check verdicts, so that later loads of a model need not repeat the check.

The key of a verdict is a digest of the logits of the check's text and of all code and settings that they depend on. A
verdict is an empty file `checked-*` in the user's cache, which can be deleted at any time.
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

VERSION = 5
"""Of the self-check."""
LEAST_S = 0.3
"""Shorter checks are repeated and not cached."""
MOST_DAYS = 30
"""Days without a use after which a file is deleted."""
_DAY_S = 24 * 60 * 60


def verdict_of(model: PreTrainedModel, probe: str) -> Path | None:
    """The file of the verdict on a pass with this digest of logits, existing or not; None without a private folder."""
    folder = cache_folder()
    if folder is None or not is_private(folder, is_folder=True):
        return None
    code = VERSION, library_key(), instructions(), version("torch"), version("transformers")
    settings = [
        (path, type(module).__qualname__, name, value)
        for path, module in model.named_modules()
        for name, value in sorted(vars(module).items())
        if type(value) in (bool, int, float, str)
    ]
    key = repr((code, str(model.dtype), model.config.to_json_string(use_diff=False), settings, probe))
    return folder / f"checked-{hashlib.sha256(key.encode()).hexdigest()}"


def has_passed(verdict: Path | None) -> bool:
    """Whether the pass has passed an earlier check."""
    if verdict is None or not is_private(verdict):
        return False
    with suppress(OSError):
        os.utime(verdict)  # marks its last use
    return True


def remember(verdict: Path | None, seconds: float) -> None:
    """Writes the verdict that a pass is right, if the check took at least `LEAST_S`, and deletes unused ones."""
    if verdict is None or seconds < LEAST_S:
        return
    with suppress(OSError):  # it is checked again then
        for other in verdict.parent.glob("checked-*"):
            if is_private(other) and time.time() - other.lstat().st_mtime > MOST_DAYS * _DAY_S:
                other.unlink(missing_ok=True)
        os.close(os.open(verdict, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
