"""The drafter "auto": what drafts for a model when the user names none."""

from __future__ import annotations

from dataclasses import replace

from paradraft.engine.speculation import AUTO, Speculation
from paradraft.formats.gguf import is_gguf
from paradraft.formats.head import is_head, kind_of
from paradraft.formats.pard import declared_mask_id
from paradraft.models.names import POCKET, is_shape
from paradraft.sources.loading import config_of, locate

WITHOUT_MODEL = "suffix"
"""The drafter that needs nothing beside the target, and costs hardly anything where it drafts nothing."""
FORCED = "forced"
"""The drafter that drafts what a request's grammar leaves no choice about."""
SHIPPED = "pard"
"""The drafter that is shipped with the pocket target."""


def automatic(target: str, speculation: Speculation, *, has_grammars: bool = False) -> Speculation:
    """Replaces the drafter "auto" and sets the reason.

    A draft model that the user named is used as what it is, and a shipped one before a drafter without a model.

    Args:
        has_grammars: whether requests may have grammars.

    Raises:
        ValueError: there is no such draft model.
    """
    assert speculation.drafter == AUTO
    draft = speculation.draft
    if draft is not None:
        drafter, why = drafter_of(draft), f"drafts with {draft}"
    elif target == POCKET:
        drafter, why = SHIPPED, "is shipped with the pocket family"
    else:
        why = "needs no draft model, and drafts where that pays"
        drafter = f"{FORCED}+{WITHOUT_MODEL}" if has_grammars else WITHOUT_MODEL
    return replace(speculation, drafter=drafter, reason=f"drafter {drafter}: it {why}")


def drafter_of(draft: str) -> str:
    """The drafter that a draft model or a trained head is for; raises ValueError as `locate`."""
    folder = locate(draft, SHIPPED)
    if is_shape(folder):
        return "autoregressive"
    if not is_gguf(folder) and is_head(folder):
        return kind_of(folder)
    return "autoregressive" if declared_mask_id(config_of(folder)) is None else "pard"


def where_lengths_adapt(speculation: Speculation, *, is_exact: bool) -> Speculation:
    """Replaces a drafter that "auto" chose by none where draft lengths would not follow measured times.

    It stays if the user named a draft model, a length policy or a tree.

    Args:
        is_exact: see `Speculation.settled`.
    """
    if speculation.reason is None:
        return speculation
    is_named = speculation.draft is not None or speculation.tree is not None or speculation.lengths != AUTO
    if is_named or speculation.settled(drafts=True, is_exact=is_exact).lengths == "expected":
        return speculation
    reason = (
        "drafter none: here a seed's text would depend on draft lengths that follow measured times; name a drafter to "
        "draft as many tokens in every round"
    )
    return replace(speculation, drafter="none", reason=reason)
