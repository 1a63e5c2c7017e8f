"""Drafts of a model by plain passes of `transformers`, as it was trained or with a fault of an engine.

Shape letters: R rounds, N tokens of a pass, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paradraft.audit.server.rounds import AuditedDraft, Round, accepted_of

NO_WINDOW = 2**20
"""Tokens of a sliding window that is longer than any text."""
TOKENS_AT_ONCE, ROWS_AT_ONCE = 8192, 32
"""Limits of a pass; each row has a few rows of logits, of 600 kB each where a vocabulary is large."""


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


@dataclass(frozen=True, kw_only=True)
class DraftModel(AuditedDraft):
    """A draft model.

    Args:
        mask_id: its mask token; None for a model that drafts one token per pass.
        known_ids: ids from there on are padding rows of the embedding.
    """

    model: PreTrainedModel
    mask_id: int | None
    known_ids: int

    @property
    def rows(self) -> int:
        """See `AuditedDraft`."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def is_quantized(self) -> bool:
        """See `AuditedDraft`."""
        return getattr(self.model.config, "quantization_config", None) is not None

    @property
    def sound(self) -> Mode:
        """See `AuditedDraft`."""
        return Mode(mask_id=self.mask_id)

    @torch.no_grad()
    def accepted(self, rounds: Sequence[Round], mode: Mode) -> list[int]:
        """See `AuditedDraft`."""
        with _rebuilt(self.model, mode.changes) as model:
            texts = [each.text if mode.reads_prompt else each.text[each.prompt :] for each in rounds]
            draft = _passes if mode.mask_id is None else _one_pass
            return accepted_of(rounds, draft(model, texts, self, mode))

    def faults(self) -> Iterator[tuple[str, Mode]]:
        """See `AuditedDraft`."""
        sound = self.sound
        if self.mask_id is not None:
            yield "one token a pass: the engine does not draft in parallel, set parallel_drafting", Mode(mask_id=None)
            near = (self.mask_id - 1, self.mask_id + 1, 0, self.model.config.vocab_size - 1)
            others = dict.fromkeys((*self.special, *near))
            for token in others:
                if token != self.mask_id and 0 <= token < self.model.config.vocab_size:
                    named = f"the mask token is {token}, not {self.mask_id}: compare mask_token_id in both configs"
                    yield f"wrong mask: {named}", replace(sound, mask_id=token)
            yield "masks at one position: the positions of the masks do not advance", replace(sound, advances=False)
        yield "shift by one: drafts are read a row too early", replace(sound, shift=-1)
        yield "shift by one: drafts are read a row too late", replace(sound, shift=1)
        yield (
            "random rows: ids that are no token are drafted, because rows that only fill the embedding up are random; "
            "let `paradraft export` write the folder",
            replace(sound, forbids=False),
        )
        yield "prompt unread: the draft reads only the answer, not the prompt", replace(sound, reads_prompt=False)
        if not self.is_quantized:  # such weights are of the model that has them
            for name, changes in _faults_of_config(self.model.config):
                yield name, replace(sound, changes=changes)


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


def _faults_of_config(config: PretrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Faults that a change of the config reproduces, with the same weights."""
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) is not None and (kinds is None or "sliding_attention" in kinds):
        yield (
            "sliding window: its layers run as full attention, good up to the window and then not",
            {"sliding_window": NO_WINDOW},
        )
    rope = getattr(config, "rope_parameters", None) or {}
    is_by_kind = bool(rope) and all(isinstance(value, dict) for value in rope.values())  # a rope for each kind of layer
    for theta in (10_000.0, 500_000.0, 1_000_000.0):
        plain = {"rope_type": "default", "rope_theta": theta}
        used = [rope[kind] for kind in set(kinds or ()) if kind in rope] if is_by_kind else [rope]
        if any(plain.items() - each.items() for each in used):
            yield (
                f"wrong rope: the engine rotates with rope_theta={theta:g} and no scaling: compare rope_parameters",
                {"rope_parameters": dict.fromkeys(rope, plain) if is_by_kind else plain},
            )
    if (layers := config.num_hidden_layers) > 1:
        yield (
            "layer off by one: the last layer of the draft is not run",
            {"num_hidden_layers": layers - 1} | ({"layer_types": kinds[: layers - 1]} if kinds else {}),
        )
