"""Attention of training rows on CPUs: to the tokens of the text, and to the few rows of the same chain.

A row sees at most N tokens and C rows of its chain, of about C · N rows in all. With a dense mask, products are
computed with all rows, and in training that took half of the time. Here torch's flash kernel attends to the tokens, and
products of vectors to the chain; both results are joined by their log sums, as those of blocks are in ring attention
(Liu et al. 2023, 2310.01889). The kernel's backward pass is given the joined output and log sum, from which its
gradients are exact.

Shape letters: S groups, R rows, N keys of the text, C rows of a chain, H query heads, G of these for each of J key
heads, d head size, M some rows of all groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

CHAINS = "paradraft_chains"
"""The name of this attention implementation in `transformers`."""
HIDDEN = -1e30
"""Added to the score of a token that a row does not see: a row that sees none has a log sum so low that its share of
the joined output is 0, and no number is NaN."""


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The rows that each row sees in its chain, and the tokens among the keys.

    Args:
        members: `[S * R, C]` their indices among all rows; any where none is seen.
        sees: `[S * R, C]` whether the row sees it.
        tokens: `[S, N]` indices of the tokens' keys among those of the rows; None if they are before these.
    """

    members: Tensor
    sees: Tensor
    tokens: Tensor | None = None


class ChainMask(Tensor):
    """Additive mask `[S, 1, R, N]` of the text's tokens, with the rows' chains; for `transformers` a mask like any."""

    chains: Chains

    @classmethod
    def of(cls, sees_SRN: Tensor, chains: Chains, dtype: torch.dtype) -> Self:
        """The mask of what is seen, for scores of a dtype."""
        hidden = torch.full((), HIDDEN, dtype=dtype)
        mask = torch.where(sees_SRN[:, None], torch.zeros((), dtype=dtype), hidden).as_subclass(cls)
        mask.chains = chains
        return mask


def chains_of(
    anchor: Tensor, depth: Tensor, document: Tensor, *, first: int, causal: bool = True, tokens: Tensor | None = None
) -> Chains:
    """The chains of rows `[S, R]`: those with the same document and anchor, from a depth on.

    Args:
        document: -1 for padding, which sees nothing.
        first: least depth of what is seen; smaller ones are tokens of the text.
        causal: whether a row sees only those up to itself.
        tokens: see `Chains`.
    """
    (S, R), device = anchor.shape, anchor.device
    depths, documents = int(depth.max()) + 1, int(document.max()) + 2
    groups = torch.arange(S, device=device)[:, None]
    chain_X = (((groups * documents + document + 1) * (int(anchor.max()) + 1)) + anchor).flatten()
    row_of = torch.full((int(chain_X.max()) + 1, depths), -1, device=device)
    row_of[chain_X, depth.flatten()] = torch.arange(S * R, device=device)
    members = row_of[chain_X, first:]
    places = torch.arange(first, depths, device=device)
    sees = (members >= 0) & (document.flatten() >= 0)[:, None]
    if causal:
        sees &= places <= depth.flatten()[:, None]
    return Chains(members=members.clamp(min=0), sees=sees, tokens=tokens)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with a `ChainMask`; with another mask that of SDPA. See `transformers.AttentionInterface`."""
    if not isinstance(attention_mask, ChainMask):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    if kwargs.get("softcap") is not None or kwargs.get("dropout"):
        raise ValueError("attention: this model has capped scores or dropout of attention, set attention=eager")
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    chains, N = attention_mask.chains, attention_mask.shape[-1]
    groups = query.shape[1] // key.shape[1]
    if chains.tokens is None:
        tokens, rows = ([each[:, :, some] for each in (key, value)] for some in (slice(N), slice(N, None)))
    else:
        index = chains.tokens[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
        tokens, rows = [each.gather(2, index) for each in (key, value)], [key, value]
    out_SHRd = _ChainAttention.apply(
        query, *(repeat_kv(each, groups) for each in tokens), *rows, attention_mask.as_subclass(Tensor), chains,
        query.shape[3] ** -0.5 if scaling is None else scaling,
    )  # fmt: skip
    return out_SHRd.transpose(1, 2).contiguous(), None


def _by_row(heads_SHRd: Tensor) -> Tensor:
    """`[S * R, H, d]` from `[S, H, R, d]`."""
    return heads_SHRd.transpose(1, 2).flatten(0, 1)


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, row_key: Tensor, row_value: Tensor, mask: Tensor,
        chains: Chains, scale: float,
    ) -> Tensor:  # fmt: skip
        S, H, R, d = query.shape
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scale
        )
        q_XJGd = _by_row(query).view(S * R, row_key.shape[1], -1, d)
        k_XJd, v_XJd = _by_row(row_key), _by_row(row_value)
        scores_CXH = torch.full((chains.sees.shape[1], S * R, H), -torch.inf, dtype=log_sum.dtype)
        for place, (seeing_M, seen_M) in enumerate(_pairs(chains)):
            products = (q_XJGd[seeing_M].to(log_sum.dtype) * k_XJd[seen_M][:, :, None].to(log_sum.dtype)).sum(-1)
            scores_CXH[place, seeing_M] = products.flatten(1) * scale
        of_tokens_XH = log_sum.transpose(1, 2).reshape(S * R, H)
        total_XH = torch.cat([of_tokens_XH[None], scores_CXH]).logsumexp(0)
        out_XHd = _by_row(out).to(log_sum.dtype) * (of_tokens_XH - total_XH).exp()[:, :, None]
        for place, (seeing_M, seen_M) in enumerate(_pairs(chains)):
            share_MJG1 = (scores_CXH[place] - total_XH)[seeing_M].exp().view(len(seeing_M), *q_XJGd.shape[1:3], 1)
            out_XHd.index_add_(0, seeing_M, (share_MJG1 * v_XJd[seen_M][:, :, None].to(log_sum.dtype)).flatten(1, 2))
        out = out_XHd.to(query.dtype).view(S, R, H, d).transpose(1, 2)
        total = total_XH.view(S, R, H).transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, row_key, row_value, mask, out, total, scores_CXH)
        ctx.chains, ctx.scale = chains, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, row_key, row_value, mask, out, total, scores_CXH = ctx.saved_tensors
        S, H, R, d = query.shape
        of_out = of_out.to(query.dtype)
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            of_out, query, key, value, out, total, 0.0, False, attn_mask=mask, scale=ctx.scale
        )
        heads = row_key.shape[1]
        q_XJGd, g_XJGd, out_XJGd = (_by_row(each).view(S * R, heads, H // heads, d) for each in (query, of_out, out))
        k_XJd, v_XJd = _by_row(row_key), _by_row(row_value)
        total_XH = total.transpose(1, 2).reshape(S * R, H)
        drift_XJG = (g_XJGd.to(total.dtype) * out_XJGd.to(total.dtype)).sum(-1)
        of_q_XHd = _by_row(of_query).to(total.dtype)
        of_k_XJd, of_v_XJd = (torch.zeros(S * R, heads, d, dtype=total.dtype) for _ in range(2))
        for place, (seeing_M, seen_M) in enumerate(_pairs(ctx.chains)):
            share_MJG = (scores_CXH[place] - total_XH)[seeing_M].exp().view(len(seeing_M), heads, -1)
            q_MJGd, g_MJGd = q_XJGd[seeing_M].to(total.dtype), g_XJGd[seeing_M].to(total.dtype)
            of_share_MJG = (g_MJGd * v_XJd[seen_M][:, :, None].to(total.dtype)).sum(-1)
            of_score_MJG1 = (share_MJG * (of_share_MJG - drift_XJG[seeing_M]) * ctx.scale)[..., None]
            of_v_XJd.index_add_(0, seen_M, (share_MJG[..., None] * g_MJGd).sum(2))
            of_k_XJd.index_add_(0, seen_M, (of_score_MJG1 * q_MJGd).sum(2))
            of_q_XHd.index_add_(0, seeing_M, (of_score_MJG1 * k_XJd[seen_M][:, :, None].to(total.dtype)).flatten(1, 2))

        def by_head(each_XHd: Tensor) -> Tensor:
            return each_XHd.view(S, R, -1, d).transpose(1, 2).to(query.dtype)

        return by_head(of_q_XHd), of_key, of_value, by_head(of_k_XJd), by_head(of_v_XJd), None, None, None


def _pairs(chains: Chains) -> list[tuple[Tensor, Tensor]]:
    """For each place of a chain, the rows `[M]` that see it and the rows there."""
    seeing = [sees.nonzero()[:, 0] for sees in chains.sees.unbind(1)]
    return [(rows, chains.members[rows, place]) for place, rows in enumerate(seeing)]


AttentionInterface.register(CHAINS, attention)
AttentionMaskInterface.register(CHAINS, sdpa_mask)
