"""Typical acceptance: accepts tokens by a threshold on p (Cai et al. 2024, Medusa, section 2.3.1; an option of PPD,
Chen et al. 2024, section 3). **Not lossless**: at temperatures above 0 the text has another distribution than the
target's. Greedy text is the target's own.

A token x is accepted if p(x) > min(epsilon, delta * exp(-H(p))), H the entropy of p after temperature and filters: the
higher the entropy, the less likely tokens are accepted. Of all accepted paths the longest becomes text; of several the
likeliest. The target's own next token is drawn from p as usual.

Shape letters: B rows of a batch, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.parents import depths_of_places, logit_rows, path_to, texts_before
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Draws
from paradraft.tree import ABSENT
from paradraft.verify import Rule


@dataclass(frozen=True, kw_only=True)
class Typical(Rule):
    """The rule, with its thresholds; the defaults are Medusa's.

    Args:
        epsilon: upper bound of the threshold, in (0, 1].
        delta: threshold at entropy 0, in (0, 1].
    """

    draws: ClassVar[Draws] = "likeliest"
    warning: ClassVar[str | None] = (
        "typical acceptance is not lossless: at temperatures above 0 the text is not distributed as the target's own"
    )
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name}={value}: use a number above 0, up to 1")

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """Decides the accepted tokens and the recovered or bonus token.

        Worked example: p is 0.5, 0.3 and 0.2, so exp(-H) is 0.36, and the threshold is min(0.107, 0.09).

        >>> from paradraft.core import Request
        >>> from paradraft.sampling_params import Sampling
        >>> logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 2, 3)
        >>> sampler = Sampler([Request(tokens=[1], sampling=Sampling(temperature=1.0))])
        >>> draft = Draft.chain(torch.tensor([[2]]))
        >>> Typical()(draft, TargetOut(logits=logits, hidden={}), sampler).paths
        [[0]]
        >>> Typical(epsilon=0.4, delta=0.9)(draft, TargetOut(logits=logits, hidden={}), sampler).paths
        [[]]
        """
        texts = texts_before(draft.tokens, draft.parents) if sampler.reads_text else None
        p_BMV = sampler.probabilities(out.logits, texts)
        entropy_BM = -torch.special.xlogy(p_BMV, p_BMV).sum(-1)
        least_BM = torch.clamp(self.delta * (-entropy_BM).exp(), max=self.epsilon)
        # The target's probability of each node, after its parent.
        parents_BN = draft.parents.clamp(min=-1) + 1
        rows_B1 = torch.arange(len(p_BMV), device=p_BMV.device)[:, None]
        p_BN = p_BMV[rows_B1, parents_BN, draft.tokens.clamp(min=0)]
        is_typical_BN = (p_BN > least_BM.gather(1, parents_BN)) & (draft.tokens != ABSENT)
        rows = zip(draft.lists[1], is_typical_BN.tolist(), p_BN.tolist(), strict=True)
        paths = [longest(*row) for row in rows]
        drawn = sampler.draw(out.logits, depths_of_places(draft.tokens, draft.parents), texts).tolist()
        last = [own[logit_rows(path)[-1]] for own, path in zip(drawn, paths, strict=True)]
        return Verdict.of(draft, paths, last)


def longest(parents: list[int], kept: list[bool], chances: list[float]) -> list[int]:
    """The longest path of kept nodes; of several the one with the largest product of probabilities.

    >>> longest([-1, -1, 0, 1], [True, True, True, True], [0.6, 0.3, 0.2, 0.5])
    [1, 3]
    """
    best: tuple[int, float, int] = (0, 1.0, -1)
    ends: dict[int, tuple[int, float, int]] = {-1: best}
    for node, (parent, is_kept, chance) in enumerate(zip(parents, kept, chances, strict=True)):
        if is_kept and parent in ends:
            depth, product, _ = ends[parent]
            ends[node] = (depth + 1, product * chance, node)
            best = max(best, ends[node], key=lambda end: end[:2])
    return path_to(best[2], parents)


RULE = Typical
