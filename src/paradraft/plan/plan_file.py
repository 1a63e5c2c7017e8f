"""Reads what `paradraft plan --json` wrote: the K of each batch size, for those who serve by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paradraft.drafters import drafter_settings, split_settings
from paradraft.engine.speculation import MOST_DRAFTED, Speculation
from paradraft.errors import one_line
from paradraft.models.names import POCKET
from paradraft.verify import LOSSY, rule_name

ADVICE = "name a file that `paradraft plan --json` wrote for a drafter that drafts chains"


def read_chains(file: Path, target: str, speculation: Speculation) -> dict[int, int]:
    """The K of each batch size by a plan.

    Args:
        file: where it is.
        target: for which it must have been made.
        speculation: names the drafter and the draft model for which it must have been made.

    Returns:
        K by batch size, 0 where no draft pays.

    Raises:
        ValueError: it cannot be read, is no plan, or is one for others.
    """
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"--plan {file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--plan {file}: holds no JSON ({error}): {ADVICE}") from None
    asked = {"target": target, "drafter": speculation.drafter, "draft": speculation.draft}
    arguments = found.get("arguments") if isinstance(found, dict) else None
    is_plan = isinstance(arguments, dict) and all(isinstance(arguments.get(key), str | None) for key in asked)
    chains = _chains(found.get("chains")) if is_plan else None
    if chains is None or not isinstance(arguments, dict):
        raise ValueError(f"--plan {file}: is no plan: {ADVICE}")
    for name, ours in asked.items():
        theirs = arguments.get(name)
        if _same(name, theirs) != _same(name, ours):
            told = "none" if theirs is None else one_line(theirs)
            raise ValueError(f"--plan {file}: it was made for --{name} {told}, not {ours}: plan for this one")
    if rule_name(str(arguments.get("verify", "match"))) in LOSSY:
        raise ValueError(
            f"--plan {file}: it was made for --verify {arguments['verify']}, which accepts more than an engine does: "
            "plan with match"
        )
    return chains


def _chains(found: Any) -> dict[int, int] | None:
    """K by batch size; None if it is something else."""
    if not isinstance(found, dict) or not found:
        return None
    if not all(size.isdecimal() and int(size) >= 1 for size in found):
        return None
    if not all(type(k) is int and 0 <= k <= MOST_DRAFTED for k in found.values()):
        return None
    return {int(size): k for size, k in found.items()}


def _same(name: str, value: str | None) -> object:
    """What is compared of a setting: the file that a path leads to, and the settings that a drafter has."""
    if name == "drafter" and value is not None:
        return split_settings(value)[0], drafter_settings(value)
    if value is None or value == POCKET:
        return POCKET if name == "draft" else value
    return Path(value).resolve() if Path(value).is_dir() else value
