"""Verification rules, which decide the accepted tokens. `match` and `rejection` are lossless, `typical` is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paradraft.verify.rules import Verify

NAMES = ("match", "rejection", "typical")
"""Names of all rules; their functions, which need torch, are in [rules.py](rules.py)."""
LOSSY = {
    "typical": "typical acceptance is not lossless: at temperatures above 0 the text is not distributed as the "
    "target's own"
}
"""Lossy rules and the warning for each."""


def rule_name(rule: str) -> str:
    """The name of a rule, without its settings.

    >>> rule_name("typical:delta=0.2")
    'typical'
    """
    return rule.partition(":")[0]


def check_rule_name(rule: str) -> None:
    """Raises ValueError if there is no rule of this name; settings are not checked."""
    if rule_name(rule) not in NAMES:
        raise ValueError(f"verify={rule!r}: use one of {', '.join(NAMES)}")


def load_rule(rule: str) -> Verify:
    """The rule of a name, optionally with settings, such as "typical:epsilon=0.05:delta=0.2"."""
    check_rule_name(rule)
    from paradraft.verify import typical
    from paradraft.verify.rules import RULES

    name, *settings = rule.split(":")
    values: dict[str, float] = {}
    known = list(typical.Typical.__dataclass_fields__) if name == "typical" else []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in known or key in values:
            hint = f"its settings are {', '.join(known)}, each at most once" if known else "it has no settings"
            raise ValueError(f"verify={rule!r}: {setting!r} is no setting=value of it; {hint}")
        try:
            values[key] = float(text)
        except ValueError:
            raise ValueError(f"verify={rule!r}: {key}={text!r} is no number") from None
    try:
        return typical.Typical(**values) if values else RULES[name]
    except ValueError as error:
        raise ValueError(f"verify={rule!r}: {error}") from None
