"""Drafts of a model by plain passes of `transformers`, as it was trained or with a fault of an engine.

Shape letters: R rounds, N tokens of a pass, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

TOKENS_AT_ONCE, ROWS_AT_ONCE = 8192, 32
"""Limits of a pass; each row has a few rows of logits, of 600 kB each where a vocabulary is large."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One pass of the target, as the server has streamed it.

    Args:
        prompt: how many tokens of `text` are the prompt.
        text: the tokens before this pass.
        following: the tokens of the answer from this pass on.
    """

    prompt: int
    text: list[int]
    following: list[int]
    accepted: int


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A draft model, and how an engine should use it.

    Args:
        mask_id: its mask token; None for a model that drafts one token per pass.
        known_ids: ids from there on are padding rows of the embedding.
        special: further ids that an engine could take for the mask, such as the end of a text.
        training_rows: most tokens of the rows that it was trained on; None if unknown.
        is_k_known: whether an engine drafts `k` tokens; else `k` is an upper limit.
    """

    model: PreTrainedModel
    k: int
    mask_id: int | None
    known_ids: int
    special: tuple[int, ...] = ()
    training_rows: int | None = None
    is_k_known: bool = True


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to draft with a model: as it was trained, or with a fault.

    Args:
        mask_id: the token in place of those to draft; None drafts one token per pass.
        shift: offset in rows at which drafts are compared.
        advances: whether the positions of the masks increase.
        forbids: whether padding rows are never drafted.
    """

    mask_id: int | None
    shift: int = 0
    advances: bool = True
    reads_prompt: bool = True
    forbids: bool = True
    changes: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def accepted_tokens(rounds: Sequence[Round], draft: DraftModel, mode: Mode) -> list[int]:
    """Number of drafted tokens that the answers continue with, `[R]`."""
    with _rebuilt(draft.model, mode.changes) as model:
        texts = [each.text if mode.reads_prompt else each.text[each.prompt :] for each in rounds]
        drafts_RK = (
            _one_pass(model, texts, draft, mode) if mode.mask_id is not None else _passes(model, texts, draft, mode)
        )
    accepted = []
    for each, tokens in zip(rounds, drafts_RK, strict=True):
        pairs = zip(tokens, each.following, strict=False)
        accepted.append(
            next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(each.following)))
        )
    return accepted


def _one_pass(model: PreTrainedModel, texts: Sequence[list[int]], draft: DraftModel, mode: Mode) -> list[list[int]]:
    """K tokens from one pass: the text, then masks; the text's last token predicts the first (PARD, section 3.1)."""
    masks = draft.k - 1 + max(mode.shift, 0)
    rows = [[*text, *[mode.mask_id or 0] * masks] for text in texts]
    positions = [
        [*range(len(text)), *(len(text) + (index if mode.advances else 0) for index in range(masks))] for text in texts
    ]
    begin = 0 if mode.shift < 0 else mode.shift
    keep = masks + 1 + max(-mode.shift, 0)
    return [likeliest[begin : begin + draft.k] for likeliest in _likeliest(model, rows, positions, keep, draft, mode)]


def _passes(model: PreTrainedModel, texts: Sequence[list[int]], draft: DraftModel, mode: Mode) -> list[list[int]]:
    grown = [list(text) for text in texts]
    for _ in range(draft.k):
        positions = [list(range(len(text))) for text in grown]
        for text, likeliest in zip(
            grown, _likeliest(model, grown, positions, 1 + max(-mode.shift, 0), draft, mode), strict=True
        ):
            text.append(likeliest[0])
    return [text[len(before) :] for text, before in zip(grown, texts, strict=True)]


def _likeliest(
    model: PreTrainedModel,
    rows: Sequence[list[int]],
    positions: Sequence[list[int]],
    keep: int,
    draft: DraftModel,
    mode: Mode,
) -> list[list[int]]:
    """The likeliest token after each of the last `keep` tokens of each row, `[R, keep]`.

    Rows are padded on the left, masked, so that the logits that are needed are the last.
    """
    tokens_of_row: dict[int, list[int]] = {}
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    while order:
        longest = len(rows[order[-1]])
        at_once = max(1, min(ROWS_AT_ONCE, TOKENS_AT_ONCE // longest))
        some, order = order[-at_once:], order[:-at_once]
        gaps = [longest - len(rows[index]) for index in some]
        tokens = [[0] * gap + rows[index] for gap, index in zip(gaps, some, strict=True)]
        position_ids = [[0] * gap + positions[index] for gap, index in zip(gaps, some, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        logits = model(
            torch.tensor(tokens, device=model.device), position_ids=torch.tensor(position_ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device), use_cache=False, logits_to_keep=keep,
        ).logits  # fmt: skip
        if mode.forbids:
            logits[..., draft.known_ids :] = -torch.inf
            if draft.mask_id is not None:
                logits[..., draft.mask_id] = -torch.inf
        tokens_of_row |= dict(zip(some, logits.argmax(2).tolist(), strict=True))
    return [tokens_of_row[index] for index in range(len(rows))]


@contextmanager
def _rebuilt(model: PreTrainedModel, changes: dict[str, Any]) -> Iterator[PreTrainedModel]:
    """The model with another config and the same weights."""
    if not changes:
        yield model
        return
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, attn_implementation=model.config._attn_implementation
        )
    own = dict(model.state_dict(keep_vars=True))
    other.load_state_dict({key: value for key, value in own.items() if key in other.state_dict()}, assign=True)
    for name, module in list(other.named_modules()):
        parent, _, last = name.rpartition(".")
        if "rotary_emb" in last:  # computed from the config, and not among the weights
            setattr(other.get_submodule(parent), last, type(module)(config).to(model.device))
    for name, buffer in list(other.named_buffers()):
        if buffer.is_meta:  # nor are these
            parent, _, last = name.rpartition(".")
            other.get_submodule(parent).register_buffer(last, model.get_buffer(name), persistent=False)
    yield other.to(model.dtype).eval()
