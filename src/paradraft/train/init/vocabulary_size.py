"""Size of a reduced vocabulary: what the first rows cover, what a pass of the draft costs, and the size that pays most.

Ids sorted by count make coverage a known function of the size, and a pass's time is linear in it; so every size is
looked at for the best.

Shape letters: U rows of a trimmed head, R rows of the head before, K drafted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.engine.speculation import Speculation
from paradraft.formats.pard import declared_mask_id
from paradraft.formats.vocab_map import ranked
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import Runtime
from paradraft.sources.load_plan import Checkpoint, LoadPlan, draft_plan, plan_of
from paradraft.sources.loading import tokenizer_of, tokens_of
from paradraft.sources.target_loading import load_lm
from paradraft.timing import typical

ACCEPTANCE = 0.8
"""Assumed chance that a drafted token is accepted, if the target's token has a row."""
TARGET_PASSES = 10
"""Assumed time of a target's pass, in passes of the whole draft, where no target is named."""
MOST_K = Speculation.k
"""Most tokens drafted in a round: the default of decoding."""
TIMES, WARM_UP, CONTEXT = 20, 3, 64
"""Timed passes, passes before them, and tokens that they read from the cache."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Share of a text's tokens that have a row, by the number of rows.

    Args:
        counted: `[R]` of the counted text, with 1, …, R rows, in the order of `VocabMap.of_counts`.
        held_out: `[R]` of text that was kept aside; None if there is none.
        least: rows that are always kept.
    """

    counted: Tensor
    held_out: Tensor | None
    least: int

    @classmethod
    def of(
        cls, counted_R: Tensor, held_out_R: Tensor, *, tokens: int, held_out_tokens: int, always: Sequence[int]
    ) -> Coverage:
        """Coverage of two texts by the ranking of the first.

        Args:
            counted_R, held_out_R: times that the id of each row is in a text.
            tokens, held_out_tokens: of the texts, those without a row included.
            always: rows that are always kept.

        >>> counts = torch.tensor([0, 3, 6]), torch.tensor([1, 0, 1])
        >>> both = Coverage.of(*counts, tokens=10, held_out_tokens=2, always=[0])
        >>> both.counted.tolist(), both.held_out.tolist(), both.least
        ([0.0, 0.6, 0.9], [0.5, 1.0, 1.0], 1)
        """
        order_R = ranked(counted_R, always)
        shares = [counts[order_R].cumsum(0).double() / max(of, 1) for counts, of in
                  ((counted_R, tokens), (held_out_R, held_out_tokens))]  # fmt: skip
        return cls(counted=shares[0], held_out=shares[1] if held_out_tokens else None, least=max(len(set(always)), 1))

    def size_of(self, share: float) -> int:
        """The fewest rows that cover this share of the counted text.

        Raises:
            ValueError: all rows do not, because the head lacks some already.

        >>> shares = torch.tensor([0.6, 0.9, 0.95], dtype=torch.float64)
        >>> Coverage(counted=shares, held_out=None, least=1).size_of(0.9)
        2
        """
        if share > float(self.counted[-1]):
            raise ValueError(f"coverage={share}: all rows cover {float(self.counted[-1]):.2%} of these answers")
        return max(int((self.counted < share).sum()) + 1, self.least)

    @property
    def of_new_text(self) -> Tensor:
        """`[R]` the estimate for other texts of the same kind: that of the text kept aside, which chose no id."""
        return self.counted if self.held_out is None else self.held_out


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Time of a pass of a model, and of its output head alone, whose weights have `head_bytes`."""

    pass_s: float
    head_s: float
    head_bytes: int


def draft_time(draft: Checkpoint, draft_dtype: str | None) -> PassTime:
    """The time of a draft model's pass on this machine: of `MOST_K` tokens if it drafts in one pass, else of one.

    Args:
        draft_dtype: as in decoding; weights in few bits are timed as they are stored.

    Raises:
        ValueError: it cannot be loaded here.
    """
    tokens = MOST_K if drafts_in_one_pass(draft) else 1
    runtime = Runtime(draft_dtype=None if draft.is_quantized else draft_dtype)
    return _measured(draft_plan(draft, runtime, width=tokens), tokens)


def target_time(target: str) -> PassTime:
    """The same of a target that verifies `MOST_K` tokens; raises ValueError if it cannot be loaded here."""
    return _measured(plan_of(target), MOST_K + 1)


def drafts_in_one_pass(draft: Checkpoint) -> bool:
    """Whether a draft model is a PARD drafter."""
    return declared_mask_id(draft.config) is not None


def _measured(plan: LoadPlan, tokens: int) -> PassTime:
    """Times passes of `tokens` tokens and as many logits, and the head alone, in turns."""
    checkpoint = plan.checkpoint
    vocab_size = tokens_of(checkpoint.config, tokenizer_of(checkpoint.folder, checkpoint.config))
    lm = load_lm(plan, vocab_size)
    lm.start()
    lm.cache.join(1)
    lm.prefill([[token % vocab_size for token in range(CONTEXT + 1)]])
    read_1N = torch.arange(tokens, device=lm.device)[None] % vocab_size
    states_1ND = lm.forward(read_1N, hidden_layers=(FINAL_NORM,)).hidden[FINAL_NORM]
    taken_s: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + TIMES):
        for times_s, work in zip(taken_s, (lambda: lm.forward(read_1N), lambda: lm.head(states_1ND)), strict=True):
            seconds = _seconds(lm, work)
            times_s += [seconds] if turn >= WARM_UP else []
    weight = lm.model.get_output_embeddings().weight
    size = weight.stored_bytes if isinstance(weight, QuantizedTensor) else weight.numel() * weight.itemsize
    pass_s, head_s = map(typical, taken_s)
    return PassTime(pass_s=pass_s, head_s=min(head_s, pass_s), head_bytes=size)


def _seconds(lm: CausalLM, work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
    return time.perf_counter() - began_s


@dataclass(frozen=True, kw_only=True)
class BestSize:
    """The size with the most tokens per second.

    Args:
        speed: tokens per second, divided by those of the whole head.
    """

    size: int
    speed: float


def best_size(
    coverage: Coverage, draft: PassTime, *, target_s: float, in_one_pass: bool, most: int = MOST_K
) -> BestSize:
    """The size with the most tokens per second, of all.

    A round drafts K tokens and verifies them in one pass of the target. A drafted token is accepted if the target's own
    has a row, and then in `ACCEPTANCE` of all cases: a = `ACCEPTANCE` · coverage(U). So with p passes of the draft a
    round yields 1 + a + … + a^K tokens in target_s + p · (rest_s + head_s · U / R) seconds. K is the best one for each
    size.

    Args:
        draft: of the whole head.
        target_s: of the target's pass.
        in_one_pass: p is 1, as in PARD, and not K.
        most: largest K.

    Source: Leviathan et al. 2023, Theorem 3.8, whose acceptance rate and cost here depend on the size, as the utility
    of vocabulary trimming by TPE does; the scan replaces its search.

    Half of the rows cover all, and take half of the head's time:

    >>> shares = torch.tensor([0.7, 1.0, 1.0, 1.0], dtype=torch.float64)
    >>> draft = PassTime(pass_s=2.0, head_s=1.0, head_bytes=8)
    >>> best_size(Coverage(counted=shares, held_out=None, least=1), draft, target_s=8.0, in_one_pass=False, most=1)
    BestSize(size=2, speed=1.0526315789473686)
    """
    rates_U = ACCEPTANCE * coverage.of_new_text
    rows = len(rates_U)
    sizes_U = torch.arange(1, rows + 1, dtype=torch.float64)
    draft_s_U = draft.pass_s - draft.head_s + draft.head_s * sizes_U / rows
    ks_K1 = torch.arange(1, most + 1, dtype=torch.float64)[:, None]
    tokens_KU = 1 + (rates_U**ks_K1).cumsum(0)
    passes_K1 = torch.ones_like(ks_K1) if in_one_pass else ks_K1
    speeds_U = (tokens_KU / (target_s + passes_K1 * draft_s_U)).amax(0)
    best = int(speeds_U[coverage.least - 1 :].argmax()) + coverage.least
    return BestSize(size=best, speed=float(speeds_U[best - 1] / speeds_U[-1]))
