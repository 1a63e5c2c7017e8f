"""PARD: all K tokens in one pass of the draft model (An et al. 2025, section 3.1, Eq. 5).

The pass reads the tokens committed since the last one, then K - 1 mask tokens. The last committed
token predicts the first drafted token and each mask one more. Masks never stay in the cache, and
drafted tokens never enter it.

Shape letters: B rows of a batch, M pending tokens, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from paradraft import ragged
from paradraft.core import Draft, Prompt, TargetOut, Verdict
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.tree import grow
from paradraft.models.loading import load_draft_lm, locate
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.models.tokenization import text_of
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates, assemble_from, candidates_needed
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree

CONFIG_KEYS = ("pard_token", "mask_token_id", "spd_type", "pard_masks")
"""What the config of a trained PARD model has and that of an ordinary one has not; `pard_masks` is read here only."""
ASIDE = 0.5
"""What an estimate is worth behind a side branch: a mask's candidates continue the likeliest tokens before it,
and those of a side branch are others."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        draft: Hugging Face id or folder of the PARD model; "pocket" is the shipped one.
    """

    draft: str


class PardDrafter:
    """One pass of a causal LM that was trained to see mask tokens.

    Args:
        lm: the draft model.
        mask_id: its mask token.
        masks: how many ids from there on are masks, each for one place of the draft; the last for all later ones.
    """

    needs_hidden: tuple[int, ...] = ()
    can_run_ahead = False
    can_branch = True
    can_branch_aside = True
    _sampler: Sampler

    def __init__(self, lm: CausalLM, mask_id: int, masks: int = 1) -> None:
        self.lm = lm
        self.mask_id = mask_id
        self.masks = masks
        self._tree: Tree | None = None
        self._pending: list[list[int]] = []

    def start(self, prompt: Prompt, out: TargetOut | None) -> None:
        """Remembers the prompts; they are read when a draft is wanted for the first time."""
        self._sampler, self._tree = Sampler(prompt), prompt.tree
        self.lm.clear(len(prompt.tokens))
        self._pending = ragged.to_lists(prompt.tokens)

    def propose(self, k: int, after: Draft | None = None) -> Draft:
        """Reads [pending tokens, mask × (k - 1)] and draws all k tokens.

        Worked example: 3 tokens are pending and k = 4. The pass reads c0 c1 c2 m m m; the logits
        of c2 and of the three masks are the draft, and c0 c1 c2 stay in the cache.
        """
        device = self.lm.device
        if k == 0:
            return Draft.empty(len(self._pending), device)
        if max(map(len, self._pending)) + k > self.lm.width:
            self._pending = self.lm.prefill(ragged.from_lists(self._pending, device)).tolist()
        numbers = [len(row) for row in self._pending]
        masks = [self.mask_id + min(place, self.masks - 1) for place in range(k - 1)]
        rows_BK = upload([range(number - 1, number - 1 + k) for number in numbers], device)
        reading = ragged.from_lists([row + masks for row in self._pending], device)
        logits_BKV = self.lm.forward(reading, logit_rows=rows_BK)
        self.lm.advance(numbers)
        self._pending = [[] for _ in numbers]
        number = candidates_needed(self._tree)

        def candidates_at(first: int, last: int, before_BD: Tensor | None) -> Candidates:
            return self._sampler.candidates(logits_BKV[:, first:last], first, number, before_BD)

        return assemble_from(candidates_at, k, self._tree, aside=ASIDE, faster=grow)

    def commit(self, verdict: Verdict, out: TargetOut) -> None:
        """All newly committed tokens are read in the next pass."""
        self._pending = ragged.joined(self._pending, ragged.to_lists(verdict.tokens))
        self._sampler.commit(verdict)

    def keep_rows(self, rows: Tensor) -> None:
        """Forgets the other rows."""
        self._pending = [self._pending[row] for row in rows.tolist()]
        self._sampler.keep_rows(rows)
        self.lm.keep_rows(rows)


def build(config: Config, target: Target, runtime: Runtime) -> PardDrafter:
    """Loads the PARD model; its mask token is forbidden in the target's output too.

    Warns:
        UserWarning: the mask token is a text, which the target can then no longer say.

    Raises:
        ValueError: it does not exist, its vocabulary does not fit the target's, its `config.json` names no mask
            token, or one that ends the target's texts.
    """
    lm = load_draft_lm(locate(config.draft, "pard"), target, runtime)
    mask_id = mask_token_id(lm.model.config, config.draft)
    masks = getattr(lm.model.config, "pard_masks", 1)
    check_ends_nothing(range(mask_id, mask_id + masks), target.eos_ids, target.tokenizer, config.draft)
    for token in range(mask_id, mask_id + masks):
        if (text := text_of(token, target.tokenizer)) is not None:
            warnings.warn(
                f"{config.draft}: its mask token {token} is {text!r}, which answers can then not contain: train a "
                "drafter without mask_token_id",
                stacklevel=2,
            )
        target.lm.forbid(token)
        lm.forbid(token)
    return PardDrafter(lm, mask_id, masks)


def check_ends_nothing(
    masks: range, ends: Collection[int | None], tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Raises ValueError if a mask token ends texts: a mask is never chosen, so answers would not end.

    Args:
        masks: the mask tokens.
        ends: the tokens that end a text.
        tokenizer: knows how the tokens are called.
        name: of the model that has the mask tokens.
    """
    if found := [token for token in masks if token in ends]:
        raise ValueError(
            f"{name}: its mask token {found[0]} ({tokenizer.convert_ids_to_tokens(found[0])}) ends a text "
            "(eos_token_id), so answers would never end: train a drafter with another mask_token_id"
        )


def mask_token_id(model_config: PretrainedConfig, name: str) -> int:
    """The mask token that a PARD folder declares: `mask_token_id`, or `pard_token` as AMD's do.

    Raises:
        ValueError: there is none, or it is outside the embedding.
    """
    found = declared_mask_id(model_config)
    if found is None:
        raise ValueError(
            f"{name} names no mask token (pard_token in config.json): train one with `paradraft train pard`"
        )
    last = found + getattr(model_config, "pard_masks", 1) - 1
    if not 0 <= found <= last < model_config.vocab_size:
        outside = found if not 0 <= found < model_config.vocab_size else last
        raise ValueError(f"{name}: mask token {outside} is outside the embedding of {model_config.vocab_size} rows")
    return found


def declared_mask_id(model_config: PretrainedConfig) -> int | None:
    """What a model's config says is its mask token; None if it says nothing.

    Raises:
        ValueError: it says what is no token id.

    Example:
        >>> declared_mask_id(PretrainedConfig(pard_token=7)), declared_mask_id(PretrainedConfig())
        (7, None)
    """
    found = getattr(model_config, "mask_token_id", None)
    found = getattr(model_config, "pard_token", None) if found is None else found
    if found is not None and type(found) is not int:
        raise ValueError(f"{model_config.name_or_path}: the mask token in its config.json is {found!r}, not a token id")
    return found


def declare_masks(model_config: PretrainedConfig, mask_id: int, masks: int = 1) -> None:
    """Writes into a config what engines know a PARD model by.

    Args:
        model_config: changed in place.
        mask_id: the mask token.
        masks: how many ids from there on are masks.

    Example:
        >>> config = PretrainedConfig(pard_masks=3)
        >>> declare_masks(config, 7)
        >>> [getattr(config, key, None) for key in CONFIG_KEYS]
        [7, 7, 'pard', None]
    """
    forget_masks(model_config)
    model_config.pard_token = model_config.mask_token_id = mask_id
    model_config.spd_type = "pard"
    if masks > 1:
        model_config.pard_masks = masks


def forget_masks(model_config: PretrainedConfig) -> None:
    """Takes that out of a config, for a model that is none, or none any more."""
    for key in CONFIG_KEYS:
        if hasattr(model_config, key):
            delattr(model_config, key)
