"""Wrong verification rules in place of right ones."""

from __future__ import annotations

import pytest

from paradraft.verify import Verify, rule_class


def replace_rule(monkeypatch: pytest.MonkeyPatch, name: str, verify: Verify) -> None:
    """Every rule of a name decides as `verify` does."""
    monkeypatch.setattr(rule_class(name), "__call__", lambda _, *arguments: verify(*arguments))
