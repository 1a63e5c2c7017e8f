"""The verdicts of all audits, whoever decodes, and the exit codes of the command that prints them."""

from __future__ import annotations

PASS, TIES, FAIL, INCONCLUSIVE = "PASS", "PASS UP TO NUMERICAL TIES", "FAIL", "INCONCLUSIVE"


def exit_code(verdict: str) -> int:
    """0 for what has passed, else 1: it has failed, or what was compared is too little to show anything."""
    return 0 if verdict in (PASS, TIES) else 1
