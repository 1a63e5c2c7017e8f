"""PARD: drafts K tokens in one pass of the draft model (An et al. 2025, section 3.1, Eq. 5).

The pass reads the tokens committed since the last one, then K - 1 mask tokens. The last committed token predicts the
first drafted token and each mask one more. Masks never stay in the cache, and drafted tokens never enter it.

Shape letters: B rows of a batch, M pending tokens, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paradraft import ragged
from paradraft.core import Draft
from paradraft.drafters.parts.draft_loading import load_parallel_lm
from paradraft.drafters.parts.model_drafter import ModelDrafter
from paradraft.drafters.parts.one_pass import draft_of_pass
from paradraft.drafters.parts.path_heads.previous_token import PreviousTokenCorrection, PreviousTokenHead, load_head
from paradraft.drafters.parts.pending_tokens import PendingTokens, Windowed
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target, TargetFacts, gathered
from paradraft.ragged import upload
from paradraft.sources.loading import locate
from paradraft.traits import Serving, Traits


@dataclass(frozen=True, kw_only=True)
class Config(Windowed):
    """Settings of the drafter.

    Args:
        draft: Hugging Face id or folder of the PARD model; "pocket" is the shipped one.
    """

    draft: str


class PardDrafter(ModelDrafter):
    """One pass of a causal LM that was trained with mask tokens.

    Args:
        mask_id: its first mask token.
        masks: number of consecutive mask ids, one per position of the draft; the last for all later ones.
        previous: corrects the logits by the tokens drafted before, if the model has such a head.
    """

    traits = Traits(label="PARD", words="a parallel drafter", branching="tree", can_run_ahead=True)
    serving = Serving(vllm="draft_model", options={"parallel_drafting": True}, tensorrt="PARD", passes=" in one pass.")

    def __init__(
        self,
        lm: CausalLM,
        mask_id: int,
        masks: int = 1,
        *,
        previous: PreviousTokenHead | None = None,
        window: int | None = None,
    ) -> None:
        self._pending = PendingTokens(lm, window=window)
        super().__init__(lm, self._pending)
        self.models = (lm,)
        self._path_head = None if previous is None else PreviousTokenCorrection(lm, previous)
        self._layers = () if previous is None else (FINAL_NORM,)  # the states that it corrects
        self.mask_id = mask_id
        self.masks = masks
        self.reserved_tokens = tuple(range(mask_id, mask_id + masks))

    def reads(self, prompt: int) -> int:
        """See `Drafter`."""
        return self._pending.reads(prompt)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads [pending tokens, mask × (k - 1)] and draws all k tokens; skips rows of length 0.

        Worked example: 3 tokens are pending and k = 4. The pass reads c0 c1 c2 m m m; the logits of c2 and of the three
        masks are the draft, and c0 c1 c2 stay in the cache. The tokens of `after` are read between c2 and the masks,
        and do not stay.
        """
        device, k = self.lm.device, max(lengths)
        if k == 0:
            return Draft.empty(len(lengths), device)
        unread = self._pending.of(lengths)
        ahead: list[list[int]] = [[] for _ in lengths] if after is None else ragged.to_lists(after.tokens)
        sampler = self._sampler if after is None else self._sampler.after(ahead)
        if max(map(len, unread)) + max(map(len, ahead)) + k > self.lm.width:
            unread = self.lm.prefill(unread).last
        kept, unread = list(map(len, unread)), ragged.joined(unread, ahead)
        masks = [self.mask_id + min(index, self.masks - 1) for index in range(k - 1)]
        texts = [row + masks[: length - 1] if length else [] for row, length in zip(unread, lengths, strict=True)]
        reading = ragged.from_lists(texts, device)
        # After a row's last mask there is no token, so that nothing is computed for these logits.
        end = reading.shape[1] - 1
        rows_BK = upload([[min(max(len(row) - 1, 0) + i, end) for i in range(k)] for row in unread], device)
        out = self.lm.forward(reading, logit_rows=rows_BK, hidden_layers=self._layers)
        self.lm.cache.advance(kept)
        self._pending.drop(lengths)
        states_BKD = gathered(out.hidden[FINAL_NORM], rows_BK) if self._path_head else None
        return draft_of_pass(sampler, self._tree, out.logits, self._path_head, states_BKD)


def build(config: Config, target: Target | TargetFacts, runtime: Runtime) -> PardDrafter:
    """Loads the PARD model; its mask token is forbidden in the target's output too. Raises as `load_parallel_lm`."""
    lm, masks = load_parallel_lm(locate(config.draft, "pard"), target, runtime)
    previous = load_head(lm.model.config)
    return PardDrafter(lm, masks[0], len(masks), previous=previous, window=config.draft_window)
