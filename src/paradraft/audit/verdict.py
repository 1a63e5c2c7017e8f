"""Verdicts of all audits, and the exit codes of the command that prints them."""

from __future__ import annotations

PASS, TIES, FAIL, INCONCLUSIVE = "PASS", "PASS UP TO NUMERICAL TIES", "FAIL", "INCONCLUSIVE"


def exit_code(verdict: str) -> int:
    """0 if the audit passed, else 1: it failed, or too little was compared to show anything."""
    return 0 if verdict in (PASS, TIES) else 1
