"""Verification rules decide the accepted tokens: one file each, found by its name, or a module of another package.

A rule is written `name` or `name:setting=value:…`, such as `typical:delta=0.2`. A file names its class as `RULE`; the
settings are the fields of the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from paradraft.plugins import find_module, module_names, parse_settings
from paradraft.sampling_params import Draws

if TYPE_CHECKING:
    from paradraft.core import Draft, TargetOut, Verdict
    from paradraft.models.target import Target
    from paradraft.sampling.sampler import Sampler

GROUP = "paradraft.verify"
"""Entry points by which other packages add rules."""
Verify = Callable[["Draft", "TargetOut", "Sampler"], "Verdict"]


class Rule:
    """A verification rule: a frozen dataclass whose fields are its settings; lossless unless it says otherwise.

    Attributes:
        draws: how drafters draw for it; see `paradraft.core.Drafting`.
        is_of_vllm: whether vLLM verifies by it when it samples.
        same_tokens: whether a seed gives the same tokens with every draft, and so without one.
        warning: how its text differs from the target's; None if it is lossless.
        hidden_layers: layers of the target whose states at all nodes it reads, numbered as in
            `paradraft.models.forward.Forward`.
    """

    draws: ClassVar[Draws]
    is_of_vllm: ClassVar[bool] = False
    same_tokens: ClassVar[bool] = False
    warning: ClassVar[str | None] = None
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def check(self, target: Target) -> None:
        """Raises ValueError if the rule cannot verify with this target."""

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """Decides the accepted tokens and the recovered or bonus token."""
        raise NotImplementedError


def rule_names() -> list[str]:
    """Files in `paradraft/verify`, and the rules of other packages."""
    return module_names(__path__, GROUP)


def rule_name(rule: str) -> str:
    """The name of a rule, without its settings.

    >>> rule_name("typical:delta=0.2")
    'typical'
    """
    return rule.partition(":")[0]


def check_rule_name(rule: str) -> None:
    """Raises ValueError if there is no rule of this name; settings are not checked."""
    if rule_name(rule) not in rule_names():
        raise ValueError(f"verify={rule!r}: use one of {', '.join(rule_names())}")


def rule_class(rule: str) -> type[Rule]:
    """The class of a rule; imports torch.

    Raises:
        ValueError: there is no such rule.
    """
    check_rule_name(rule)
    kind: type[Rule] = find_module(rule_name(rule), __name__, __path__, GROUP).RULE
    return kind


def warning_of(rule: str) -> str | None:
    """How the text of a rule differs from the target's; None if it is lossless, or unknown, as one of another package
    that is named in a file may be."""
    return rule_class(rule).warning if rule_name(rule) in rule_names() else None


def load_rule(rule: str) -> Rule:
    """The rule of a name, optionally with settings, such as "typical:epsilon=0.05:delta=0.2".

    Raises:
        ValueError: there is no such rule, or a setting is wrong.
    """
    kind = rule_class(rule)
    values = parse_settings(rule.split(":")[1:], kind, f"verify={rule!r}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"verify={rule!r}: {error}") from None
