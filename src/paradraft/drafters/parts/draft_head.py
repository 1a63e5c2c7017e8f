"""The output head of drafters on the target's states: the target's own, some of its rows, or a small one.

Most of the time of such a drafter goes into the target's output head. `d2t` in its checkpoint names the ids of the rows
that it keeps (EAGLE-3, Li et al. 2025; VocabTrim, Goel et al. 2025; see `paradraft.formats.vocab_map`). A head of low
rank, up · down, has all ids or these (SlimSpec, 2605.10453).

Shape letters: U rows of the head, V target ids, D hidden size, X rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from paradraft.formats.block import OWN_HEAD
from paradraft.formats.head import Head
from paradraft.formats.vocab_map import D2T, T2D, VocabMap
from paradraft.models.causal_lm import CausalLM
from paradraft.models.output_head import finished
from paradraft.models.output_ids import OutputIds
from paradraft.models.quantized import of_outputs

DOWN, UP = "low_rank.down.weight", "low_rank.up.weight"
"""Weights `[X, D]` and `[U, X]` of a head of low rank."""


def draft_head(lm: CausalLM, head: Head) -> Callable[[Tensor], Tensor]:
    """A checkpoint's output head: a function from states `[…, D]` to logits as of `CausalLM.head`.

    Args:
        lm: the target.

    Raises:
        ValueError: the checkpoint's rows do not fit each other or the target.
    """
    own, (vocab_map, rows, ids) = lm.model.lm_head, drafted_ids(lm, head)
    if UP in head.weights:
        rank, width = max(len(head.weights.get(DOWN, ())), 1), own.weight.shape[1]
        down, up = lm.linear(head.tensor(DOWN, rank, width)), lm.linear(head.tensor(UP, rows, rank))
        return lambda states: ids.logits(finished(up(down(states)), lm.model.config))
    if OWN_HEAD in head.weights:
        stored = lm.linear(head.tensor(OWN_HEAD, rows, own.weight.shape[1]))
        return lambda states: ids.logits(finished(stored(states), lm.model.config))
    if vocab_map is None:
        return lm.head
    ids_U = vocab_map.to_target
    products = lm.linear(of_outputs(own.weight, ids_U), None if own.bias is None else of_outputs(own.bias, ids_U))
    return lambda states: ids.logits(finished(products(states), lm.model.config))


class DraftedIds(NamedTuple):
    """The ids of a checkpoint's output heads: their map, None for all; the number of rows; and their logits' places."""

    vocab_map: VocabMap | None
    rows: int
    output: OutputIds


def drafted_ids(lm: CausalLM, head: Head) -> DraftedIds:
    """The ids that a checkpoint drafts; raises ValueError as `draft_head`."""
    vocab_map, rows = None, len(lm.model.lm_head.weight)
    if D2T in head.weights:
        d2t, t2d = head.weights[D2T], head.weights.get(T2D)
        rows = len(d2t)
        vocab_map = VocabMap.stored(d2t, t2d, rows=rows, vocabulary=lm.vocab_size, name=head.name)
    return DraftedIds(vocab_map, rows, lm.ids.of_rows(vocab_map))
