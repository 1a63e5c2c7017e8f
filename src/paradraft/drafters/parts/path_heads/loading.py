"""The head of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paradraft.drafters.parts.draft_head import drafted_ids
from paradraft.drafters.parts.path_heads.head import PathHead
from paradraft.drafters.parts.path_heads.markov import MarkovCorrection
from paradraft.drafters.parts.path_heads.previous_token import PreviousTokenCorrection, previous_token_head
from paradraft.drafters.parts.path_heads.selector import Selector
from paradraft.formats.head import Head
from paradraft.formats.path_heads import MARKOV_RANK, PREVIOUS_TOKEN_RANK, RANKS, SELECTOR_RANK
from paradraft.models.causal_lm import CausalLM


def load_path_head(target: CausalLM, head: Head, output_head: Callable[[Tensor], Tensor]) -> PathHead | None:
    """The head that draws tokens from the logits of `output_head`; None if the checkpoint has none.

    Raises:
        ValueError: it has several, or its weights are damaged.
    """
    if len(found := [name for name in RANKS if name in head.config]) > 1:
        raise ValueError(f"draft {head.name!r}: {' and '.join(found)} in its config.json, for one head: train it again")
    if PREVIOUS_TOKEN_RANK in head.config:
        return PreviousTokenCorrection(target, previous_token_head(head), output_head, drafted_ids(target, head).output)
    if MARKOV_RANK in head.config:
        return MarkovCorrection(target, head)
    if SELECTOR_RANK in head.config:
        return Selector(target, head)
    return None
