"""Reads the K by batch size from a file of `paradraft plan --json`, for serving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paradraft.drafters import drafter_settings, split_settings
from paradraft.engine.speculation import MOST_DRAFTED, Speculation
from paradraft.errors import one_line
from paradraft.models.names import POCKET
from paradraft.verify import warning_of

ADVICE = "name a file that `paradraft plan --json` wrote for a drafter that drafts chains"


def read_chains(file: Path, target: str, speculation: Speculation) -> dict[int, int]:
    """Reads a plan's K by batch size, 0 where no draft pays.

    Raises:
        ValueError: the file cannot be read, is no plan, or is one for another target, drafter or draft model.
    """
    try:
        plan = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"--plan {file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--plan {file}: holds no JSON ({error}): {ADVICE}") from None
    expected = {"target": target, "drafter": speculation.drafter, "draft": speculation.draft}
    arguments = plan.get("arguments") if isinstance(plan, dict) else None
    is_plan = isinstance(arguments, dict) and all(isinstance(arguments.get(key), str | None) for key in expected)
    chains = _chains(plan.get("chains")) if is_plan else None
    if chains is None or not isinstance(arguments, dict):
        raise ValueError(f"--plan {file}: is no plan: {ADVICE}")
    for name, ours in expected.items():
        theirs = arguments.get(name)
        if _same(name, theirs) != _same(name, ours):
            planned = "none" if theirs is None else one_line(theirs)
            raise ValueError(f"--plan {file}: it was made for --{name} {planned}, not {ours}: plan for this one")
    if warning_of(str(arguments.get("verify"))) is not None:
        raise ValueError(
            f"--plan {file}: it was made for --verify {arguments['verify']}, which accepts more than an engine does: "
            "plan with match"
        )
    return chains


def _chains(value: Any) -> dict[int, int] | None:
    """K by batch size; None if the value is malformed."""
    if not isinstance(value, dict) or not value:
        return None
    if not all(size.isdecimal() and int(size) >= 1 for size in value):
        return None
    if not all(type(k) is int and 0 <= k <= MOST_DRAFTED for k in value.values()):
        return None
    return {int(size): k for size, k in value.items()}


def _same(name: str, value: str | None) -> object:
    """A comparable form of an option: resolved paths, and a drafter with all its settings."""
    if name == "drafter" and value is not None:
        return split_settings(value)[0], drafter_settings(value)
    if value is None or value == POCKET:
        return POCKET if name == "draft" else value
    return Path(value).resolve() if Path(value).is_dir() else value
