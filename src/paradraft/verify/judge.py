"""Judge decoding: accepts drafted tokens that are not the target's if a trained head takes them for harmless (Bachmann
et al. 2025, "Judge Decoding"; labels without annotators by Garipov et al. 2025, "AutoJudge"). **Not lossless**, at any
temperature.

The head reads the target's last state at a drafted token, which the pass that verifies the token computes anyway. The
target's own tokens are accepted as by the rule `match`, and come before others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from paradraft.core import INVALID, Draft, TargetOut, Verdict
from paradraft.formats.judge_head import JudgeHead, read_judge
from paradraft.models.forward import FINAL_NORM
from paradraft.models.target import Target
from paradraft.parents import depths_of_places, texts_before
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Draws
from paradraft.tree import ABSENT
from paradraft.verify import Rule
from paradraft.verify.match import verdict_of


@dataclass(frozen=True, kw_only=True)
class Judge(Rule):
    """The rule.

    Args:
        head: file of `paradraft train-judge`.
        threshold: least probability of being harmless, in (0, 1), with which a token is accepted; None for the head's.
    """

    draws: ClassVar[Draws] = "noise"
    warning: ClassVar[str | None] = (
        "judge decoding is not lossless: it accepts drafted tokens that a trained head takes for harmless"
    )
    hidden_layers: ClassVar[tuple[int, ...]] = (FINAL_NORM,)
    head: str = ""
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not self.head:
            raise ValueError("it needs a head: write judge:head=FILE, a file of `paradraft train-judge`")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ValueError(f"threshold={self.threshold}: use a number between 0 and 1")
        self._judge  # noqa: B018  # a head that cannot be read is an error now

    @cached_property
    def _judge(self) -> JudgeHead:
        return read_judge(Path(self.head))

    def check(self, target: Target) -> None:
        """See `Rule`."""
        size, own = target.lm.model.config.hidden_size, len(self._judge.weights)
        if size != own:
            raise ValueError(f"head={self.head!r} reads states of {own} numbers, this target has {size}: train another")

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """Decides the accepted tokens and the recovered or bonus token."""
        texts = texts_before(draft.tokens, draft.parents) if sampler.reads_text else None
        depths = depths_of_places(draft.tokens, draft.parents)
        drawn_BM = sampler.draw(out.logits, depths, texts)
        parents_BN = draft.parents.clamp(min=-1) + 1
        own_BN = drawn_BM.gather(1, parents_BN)
        is_own_BN = draft.tokens == own_BN
        worth_BN = self._judge.harmless(out.hidden[FINAL_NORM][:, 1:])
        least = self._judge.threshold if self.threshold is None else self.threshold
        is_judged_BN = (worth_BN >= least) & ~is_own_BN & (own_BN != INVALID) & (draft.tokens != ABSENT)
        if bool(is_judged_BN.any()):  # then none that the settings of a request forbid
            rows_B1 = torch.arange(len(draft.tokens), device=draft.tokens.device)[:, None]
            scores_BMV = sampler.scores(out.logits, depths, texts)
            is_judged_BN &= scores_BMV[rows_B1, parents_BN, draft.tokens.clamp(min=0)].isfinite()
        worth_BN = worth_BN.where(is_judged_BN, 0.0).masked_fill(is_own_BN & (draft.tokens != ABSENT), 2.0)
        paths = [best_path(*row) for row in zip(draft.lists[1], worth_BN.tolist(), strict=True)]
        return verdict_of(draft, paths, drawn_BM.tolist())


def best_path(parents: list[int], worth: list[float]) -> list[int]:
    """From the root on, always the child that is worth most, as long as it is worth something.

    >>> best_path([-1, -1, 1, 1, 3], [0.9, 2.0, 0.0, 0.5, 0.0])
    [1, 3]
    """
    path: list[int] = []
    best: dict[int, int] = {}
    for node, (parent, value) in enumerate(zip(parents, worth, strict=True)):
        if value > 0 and (parent not in best or value > worth[best[parent]]):
            best[parent] = node
    node = -1
    while node in best:
        node = best[node]
        path.append(node)
    return path


RULE = Judge
