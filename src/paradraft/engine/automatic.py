"""The drafter "auto": what drafts for a model when the user names none."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from paradraft.drafters import PLUS, traits_of
from paradraft.drafters.parts.draft_loading import check_draft
from paradraft.engine.speculation import AUTO, Speculation
from paradraft.errors import OtherTokensError
from paradraft.formats.gguf import is_gguf
from paradraft.formats.head import is_head, kind_of, trained_k
from paradraft.formats.likely_table import read_table
from paradraft.formats.pard import declared_mask_id
from paradraft.formats.pard2 import reads_states
from paradraft.formats.published_block import is_published_block, published_k
from paradraft.models.names import POCKET, is_shape
from paradraft.sources.load_plan import Checkpoint
from paradraft.sources.loading import config_of, locate
from paradraft.sources.recorded import TrainedDrafter, bytes_on_disk, drafter_for, recorded_for, table_file
from paradraft.sources.shipped import command_for
from paradraft.sources.target_loading import facts_of
from paradraft.verify import rule_class

FROM_TEXT = "suffix"
"""The drafter that needs nothing beside the target, and costs hardly anything where it drafts nothing."""
FROM_PASSES = "recycle"
"""The drafter that learns from the target's passes."""
LARGE = 2**28
"""Bytes of weights from which on a pass is so long that 0.2 to 0.4 ms for `FROM_PASSES` hardly count."""
FAST = "AVX512"
"""Instructions with which five tokens take 1.07 times as long as one, with AVX2 2.5 times. The tokens of `FROM_PASSES`
are less likely than those from the text, so they pay where they are nearly free."""
FORCED = "forced"
"""The drafter that drafts what a request's grammar leaves no choice about."""
TRANSLATED = "translated"
"""The drafter of draft models with other tokens than the target."""
BLOCKS = "dflash"
"""The drafter of published folders whose layers draft a block on the target's states."""
SHIPPED = "pard"
"""The drafter that is shipped with the pocket target."""


def automatic(
    target: str, speculation: Speculation, *, has_grammars: bool = False, tokenizer: str | None = None
) -> Speculation:
    """Replaces the drafter "auto" and sets the reason.

    A draft model that the user named is used as what it is, one that is shipped or was trained for the target before a
    drafter without a model.

    Args:
        has_grammars: whether requests may have grammars.
        tokenizer: another one than the target's own.

    Raises:
        ValueError: there is no such draft model.
    """
    assert speculation.drafter == AUTO
    draft, k = speculation.draft, speculation.k
    if draft is not None:
        drafter, why = drafter_of(draft), f"drafts with {draft}"
        if traits_of(drafter).can_run_ahead and not _has_tokens_of(target, draft, tokenizer):
            drafter, why = f"{TRANSLATED}:of={drafter}", f"{why}, whose tokens are others"
        if speculation.tree is None:
            folder = locate(draft, SHIPPED)
            most = (
                trained_k(folder) if _is_head(folder) else published_k(config_of(folder)) if drafter == BLOCKS else None
            )
            k = min(k, most or k)
    elif target == POCKET:
        drafter, why = SHIPPED, "is shipped with the pocket family"
    elif (trained := drafter_for(target)) is not None and _can_draft(trained, speculation):
        drafter = _beside_text(trained.name, target, speculation, has_grammars=has_grammars)
        draft, k = trained.folder, min(k, trained.k or k)
        why = f"drafts with {draft}, the last one trained for this model"
    else:
        drafter, table = without_model(target)
        drafter = f"{FORCED}{PLUS}{drafter}" if has_grammars else drafter
        uses = ", uses the table recorded for this one" if table is not None else ""
        why = f"needs no draft model{uses}, and drafts where that pays"
        if (command := command_for(target)) is not None:
            why += f"; a draft that was trained for it, or for what it is tuned from, is shipped: {command}"
    return replace(speculation, drafter=drafter, draft=draft, k=k, reason=f"drafter {drafter}: it {why}")


def _can_draft(trained: TrainedDrafter, speculation: Speculation) -> bool:
    """Whether a trained drafter drafts trees like the wanted one, if any."""
    if speculation.tree is None:
        return True
    is_deep = trained.k is not None and (speculation.tree.depth or 0) > trained.k
    return traits_of(trained.name).branching == "tree" and not is_deep


def _beside_text(name: str, target: str, speculation: Speculation, *, has_grammars: bool) -> str:
    """A trained drafter joined with what needs no model, or alone if it cannot be joined."""
    if speculation.tree is not None or rule_class(speculation.verify).draws != "noise":
        return name
    if traits_of(name).branching == "own":
        return name
    without, *settings = without_model(target)[0].split(":")
    parts = [*([FORCED] if has_grammars else []), without, name]
    return ":".join([PLUS.join(parts), *settings])


def without_model(target: str) -> tuple[str, str | None]:
    """The drafter for a target without a draft model, and the recorded table that it has."""
    if (table := recorded_for(target)) is not None:
        file = table_file(table)
        try:
            read_table(file)
            return both(table), table
        except ValueError:
            warnings.warn(
                f"the recorded table is left out, because it cannot be read: delete {str(file)!r}, and record again",
                stacklevel=2,
            )
    is_worth_it = torch.backends.cpu.get_cpu_capability() == FAST and bytes_on_disk(target) >= LARGE
    return both(None) if is_worth_it else FROM_TEXT, None


def both(table: str | None) -> str:
    """The drafter that drafts from the text and from the target's passes.

    Args:
        table: see `paradraft.sources.recorded.table_file`; None for none.
    """
    return f"{FROM_TEXT}{PLUS}{FROM_PASSES}{'' if table is None else f':table={table}'}"


def drafter_of(draft: str) -> str:
    """The drafter that a draft model or a trained head is for; raises ValueError as `locate`."""
    folder = locate(draft, SHIPPED)
    if is_shape(folder):
        return "autoregressive"
    if _is_head(folder):
        return kind_of(folder)
    config = config_of(folder)
    if is_published_block(config):
        return BLOCKS
    if declared_mask_id(config) is None:
        return "autoregressive"
    return "pard2" if reads_states(config) else "pard"


def _has_tokens_of(target: str, draft: str, tokenizer: str | None) -> bool:
    """Whether a draft model has the target's tokens, as it is likely if it has as many: then they are compared later,
    and no tokenizer is loaded here, which takes a second for a GGUF file."""
    whole, model = Checkpoint.find(target), Checkpoint.find(draft, SHIPPED)
    if whole.config.vocab_size == model.config.vocab_size:
        return True
    try:
        check_draft(model, facts_of(whole, tokenizer))
    except OtherTokensError:
        return False
    return True


def _is_head(folder: str) -> bool:
    return not is_shape(folder) and not is_gguf(folder) and is_head(folder)


def where_lengths_adapt(speculation: Speculation, *, is_exact: bool) -> Speculation:
    """Replaces a drafter that "auto" chose by none where draft lengths would not follow measured times.

    It stays if the user named a draft model, a length policy or a tree, or trained a drafter for the target.

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
