"""The verification rules: which drafted tokens become text. `match` and `rejection` are lossless, `typical` is not."""

from __future__ import annotations

from collections.abc import Callable

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.sampling.sampler import Sampler
from paradraft.verify import match, rejection, typical

Verify = Callable[[Draft, TargetOut, Sampler], Verdict]
RULES: dict[str, Verify] = {"match": match.verify, "rejection": rejection.verify, "typical": typical.Typical()}
"""The rules by name."""
LOSSY = {"typical": typical.TOLD}
"""Those that change the text, and what is to be said of them."""


def rule_name(rule: str) -> str:
    """The name of a rule, without its settings.

    >>> rule_name("typical:delta=0.2")
    'typical'
    """
    return rule.partition(":")[0]


def load_rule(rule: str) -> Verify:
    """The rule of a name, with settings if wanted, such as "typical:epsilon=0.05:delta=0.2".

    Raises:
        ValueError: there is no such rule or setting.
    """
    name, *settings = rule.split(":")
    if name not in RULES:
        raise ValueError(f"verify={rule!r}: use one of {', '.join(RULES)}")
    values: dict[str, float] = {}
    known = list(typical.Typical.__dataclass_fields__) if name == "typical" else []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in known or key in values:
            told = f"its settings are {', '.join(known)}, each at most once" if known else "it has no settings"
            raise ValueError(f"verify={rule!r}: {setting!r} is no setting=value of it; {told}")
        try:
            values[key] = float(text)
        except ValueError:
            raise ValueError(f"verify={rule!r}: {key}={text!r} is no number") from None
    try:
        return typical.Typical(**values) if values else RULES[name]
    except ValueError as error:
        raise ValueError(f"verify={rule!r}: {error}") from None
