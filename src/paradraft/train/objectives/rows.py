"""Training rows of parallel drafters, their attention mask, and COD (conditional drop).

A sample of tokens becomes rows (position, depth). A row of depth 0 is the real token at its position. A row of depth
i is the mask token at its position, i steps after its *anchor*, the last real token it sees: anchor = position -
depth. Every row predicts the token after its position. In PARD the chain of rows with one anchor equals a draft pass
after that anchor (An et al. 2025, section 3.2.1 and Fig. 4); ParallelSpec and PPD share the rule.

K depths give K times as many rows as tokens. Later depths matter less, so COD (section 3.2.2, Alg. 1) keeps only
N * max(r^i, r_min) rows of depth i (Eq. 9-11; the paper counts depths from 1, we from 0). A row is kept only if the
previous row of its chain, (position - 1, depth - 1), was kept: then every kept row has all its keys.

Shape letters: R rows; `…` is an optional batch axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.train.objectives.chain_attention import CHAINS, ChainMask, chains_of

FILLING = -1
"""The document index of padding rows."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a sample, of several packed samples, or of a batch.

    Args:
        position: `[…, R]` index of the row's token in its sample.
        depth: `[…, R]` 0 for real tokens, i for the i-th mask after its anchor.
        document: `[…, R]` index of the packed sample, or `FILLING`.
    """

    position: Tensor
    depth: Tensor
    document: Tensor

    def __post_init__(self) -> None:
        assert self.position.ndim in (1, 2)
        assert self.position.shape == self.depth.shape == self.document.shape
        assert bool((self.depth >= 0).all() and (self.anchor >= 0).all())

    @staticmethod
    def of_sample(position: Tensor, depth: Tensor) -> Rows:
        """Rows `[R]` of a single sample."""
        return Rows(position=position, depth=depth, document=torch.zeros_like(position))

    @property
    def anchor(self) -> Tensor:
        """`[…, R]` position of the last real token that each row sees."""
        return self.position - self.depth


def may_attend(
    anchor: Tensor, depth: Tensor, document: Tensor, other_position: Tensor, other_depth: Tensor, other_document: Tensor
) -> Tensor:
    """Whether a row attends to another: it sees real tokens up to its anchor, and its chain's masks up to itself."""
    real = (other_depth == 0) & (other_position <= anchor)
    same_chain = (other_position - other_depth == anchor) & (other_depth <= depth)
    return (document == other_document) & (real | same_chain)


PAIRS = 2**24
"""Pairs of rows for which the mask is computed at a time."""


def attention_rule(rows: Rows) -> Tensor:
    """`[…, R, R]` boolean attention mask: whether a row (first index) attends to another (second index).

    Padding rows see each other, so that no softmax is empty.

    Worked example: three tokens and the masks (1, 1), after token 0, and (2, 2), after it.

    >>> rows = Rows.of_sample(position=torch.tensor([0, 1, 2, 1, 2]), depth=torch.tensor([0, 0, 0, 1, 2]))
    >>> rows.anchor.tolist()
    [0, 1, 2, 0, 0]
    >>> attention_rule(rows).int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 0, 0, 1, 0],
            [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    own = rows.anchor, rows.depth, rows.document
    return of_pairs(may_attend, own, (rows.position, rows.depth, rows.document))


def of_pairs(rule: Callable[..., Tensor], queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
    """`[…, Q, R]` what a rule says of all pairs of queries and keys, with properties `[…, Q]` and `[…, R]` of each.

    A rule needs half a dozen temporary matrices, so it is applied to some queries at a time.
    """
    Q, others = queries[0].shape[-1], [key[..., None, :] for key in keys]
    sees = torch.empty(*queries[0].shape, keys[0].shape[-1], dtype=torch.bool, device=queries[0].device)
    block = max(PAIRS // max(keys[0].numel(), 1), 1)
    for some in (slice(start, start + block) for start in range(0, Q, block)):
        sees[..., some, :] = rule(*(query[..., some, None] for query in queries), *others)
    return sees


def mask_function(rows: Rows) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Mask function for `flex_attention`, of batch, head, query and key indices; rows are `[S, R]`."""
    position, depth, document = rows.position, rows.depth, rows.document

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = position[batch, query] - depth[batch, query], depth[batch, query], document[batch, query]
        return may_attend(*own, position[batch, key], depth[batch, key], document[batch, key])

    return sees


def conditional_drop(
    n: int, *, k: int, r: float, r_min: float, generator: torch.Generator, may_draft: Tensor | None = None
) -> Rows:
    """Draws the rows of a sample by COD.

    Args:
        n: positions with a next token to predict, at least 1.
        k: count of depths, 0 to k - 1, and of tokens that a draft pass predicts.
        r: share of rows that each depth keeps of the previous one, in (0, 1].
        r_min: least share that a depth keeps of the positions that masks may follow, in [0, 1].
        may_draft: `[n]` whether masks may follow each position; by default all. Only positions before an answer's
            tokens need masks: nothing is drafted inside a prompt.

    Returns:
        Rows ordered by depth, then position.

    Worked example: 8 positions, 3 depths, r = 0.5. Depth 0 keeps all 8, depth 1 keeps 4 of the 7
    rows that follow a kept one, depth 2 keeps 2 of those that follow these 4.

    >>> rows = conditional_drop(8, k=3, r=0.5, r_min=0.2, generator=torch.Generator().manual_seed(0))
    >>> rows.position[rows.depth == 0].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> rows.position[rows.depth == 1].tolist(), rows.position[rows.depth == 2].tolist()
    ([1, 4, 5, 6], [6, 7])
    """
    position = torch.arange(n)
    positions, depths = [position], [torch.zeros_like(position)]
    if may_draft is not None:
        position = position[may_draft]
    anchors = len(position)
    for depth in range(1, k):
        candidates = position[position + 1 < n] + 1
        kept = min(len(candidates), round(anchors * max(r**depth, r_min)))
        choice = torch.randperm(len(candidates), generator=generator)[:kept].sort().values
        position = candidates[choice]
        positions.append(position)
        depths.append(torch.full_like(position, depth))
    return Rows.of_sample(torch.cat(positions), torch.cat(depths))


FLEX = "flex_attention"
"""The attention implementation that skips masked blocks. It has no backward pass on CPUs, where chains are skipped."""


def fastest_attention(config: PretrainedConfig, *, on_gpu: bool) -> str:
    """The fastest implementation of attention that computes what a model's config says: no kernel of ours drops scores,
    and on CPUs none caps them."""
    if getattr(config, "attention_dropout", 0.0):
        return "sdpa"
    if on_gpu:
        return FLEX
    return CHAINS if getattr(config, "attn_logit_softcapping", None) is None else "eager"


def attention_mask(rows: Rows, model: PreTrainedModel) -> Tensor | BlockMask:
    """Attention mask of rows `[S, R]`: a block mask for flex_attention; with chains `[S, 1, R, N]` over real tokens;
    else `[S, 1, R, R]`, see `as_mask`."""
    implementation = model.config._attn_implementation
    if implementation == FLEX:
        S, R = rows.position.shape
        return create_block_mask(mask_function(rows), S, None, R, R, device=rows.position.device)
    if implementation != CHAINS or not bool(rows.depth.any()):
        return as_mask(attention_rule(rows), model)
    own = rows.anchor, rows.depth, rows.document
    is_token = (rows.depth == 0) & (rows.document != FILLING)
    places = torch.arange(rows.depth.shape[1], device=rows.depth.device)
    tokens = pad_sequence([places[mine] for mine in is_token], batch_first=True)
    fill = pad_sequence([rows.document[group][mine] for group, mine in enumerate(is_token)], True, FILLING - 1)
    keys = rows.position.gather(1, tokens), rows.depth.gather(1, tokens), fill
    chains = chains_of(*own, first=1, tokens=tokens)
    return ChainMask.of(of_pairs(may_attend, own, keys), chains, mask_dtype(model))


def as_mask(sees_SQR: Tensor, model: PreTrainedModel) -> Tensor:
    """Attention mask `[S, 1, Q, R]` from `[S, Q, R]` booleans: boolean, or additive.

    Eager attention would take booleans for 0 and 1. SDPA converts booleans itself, but in every layer, and keeps each
    result for the backward pass; on CPUs, where masks are large, all layers share one additive mask.
    """
    sees, implementation = sees_SQR[:, None], model.config._attn_implementation
    if implementation == "eager":
        return _additive(sees, model.dtype, torch.finfo(model.dtype).min)
    if implementation in ("sdpa", CHAINS) and sees.device.type == "cpu":
        return _additive(sees, mask_dtype(model), -torch.inf)
    return sees


def mask_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of an additive mask on a CPU: that of the scores."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else model.dtype


def _additive(sees: Tensor, dtype: torch.dtype, hidden: float) -> Tensor:
    """Additive mask: 0 where a row is seen, `hidden` elsewhere."""
    return torch.where(
        sees, torch.zeros((), dtype=dtype, device=sees.device), torch.full((), hidden, dtype=dtype, device=sees.device)
    )
