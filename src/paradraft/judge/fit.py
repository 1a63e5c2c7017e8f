"""Fits the head of the rule `judge` to labels.

Shape letters: N labels, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from paradraft.core import Draft, Request, Verdict
from paradraft.formats.judge_head import JudgeHead
from paradraft.judge.labels import LabelledText
from paradraft.models.forward import FINAL_NORM
from paradraft.models.target import Target

FOLDS = 5
PENALTIES = (1e-2, 1e-1, 1.0, 10.0)
"""Weights of the squared norm in the loss, per label, of which the best is chosen."""
RECALL = 0.9
"""Share of the harmful tokens that the head rejects (AutoJudge)."""


def states_of(target: Target, text: LabelledText) -> Tensor:
    """The target's states `[N, D]` after its last norm, at the labelled tokens of a text."""
    target.start(of_rule=(FINAL_NORM,))
    target.join([Request(tokens=text.tokens[: text.prompt])])
    at, states = text.prompt, []
    for label in text.labels:
        while label.position - at >= target.lm.width - 1:
            at = _read(target, text.tokens[at : at + target.lm.width - 1], at)
        between = text.tokens[at : label.position]
        out = target.forward(_chain(target, [*between, label.token]))
        states.append(out.hidden[FINAL_NORM][0, len(between) + 1].float())
        target.commit(Verdict(paths=[list(range(len(between)))], tokens=[text.tokens[at : label.position + 1]]), out)
        at = label.position + 1
    return torch.stack(states)


def _chain(target: Target, tokens: list[int]) -> Draft:
    return Draft.chain(torch.tensor([tokens], dtype=torch.long, device=target.device))


def _read(target: Target, tokens: list[int], at: int) -> int:
    out = target.forward(_chain(target, tokens[:-1]))
    target.commit(Verdict(paths=[list(range(len(tokens) - 1))], tokens=[tokens]), out)
    return at + len(tokens)


def fitted(states_ND: Tensor, is_harmless_N: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Weights and bias of the logistic regression whose mean loss plus `penalty` times the squared norm is least, with
    the norm that of the weights for standardized states."""
    states_ND, target_N = states_ND.double(), is_harmless_N.double()
    mean_D, scale_D = states_ND.mean(0), states_ND.std(0).clamp(min=1e-6)
    inputs_ND = (states_ND - mean_D) / scale_D
    weights_D = torch.zeros(inputs_ND.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights_D, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        total = binary_cross_entropy_with_logits(inputs_ND @ weights_D + bias, target_N)
        total = total + penalty * weights_D.square().sum()
        total.backward()
        return float(total.detach())

    optimizer.step(loss)
    weights_D = weights_D.detach() / scale_D
    return weights_D.float(), float(bias.detach() - weights_D @ mean_D)


def out_of_fold(states_ND: Tensor, is_harmless_N: Tensor, text_N: Tensor, penalty: float) -> Tensor:
    """Logits `[N]` of labels, each by a head that is fitted to the labels of other texts."""
    logits_N = torch.zeros(len(text_N), dtype=torch.float64)
    for fold in range(FOLDS):
        is_held_N = text_N % FOLDS == fold
        weights_D, bias = fitted(states_ND[~is_held_N], is_harmless_N[~is_held_N], penalty)
        logits_N[is_held_N] = states_ND[is_held_N].double() @ weights_D.double() + bias
    return logits_N


def head_of(states: Sequence[Tensor], texts: Sequence[LabelledText], facts: dict[str, str]) -> JudgeHead:
    """The head of labelled texts.

    Penalty and threshold are chosen by the estimates that each label has from a head fitted to other texts: the penalty
    with the least loss, and the threshold that rejects `RECALL` of the harmful tokens.

    Raises:
        ValueError: some fold has labels of one kind only.
    """
    is_harmless_N = torch.tensor([label.is_harmless for text in texts for label in text.labels])
    text_N = torch.tensor([at for at, text in enumerate(texts) for _ in text.labels])
    kinds = {(bool(harmless), int(fold)) for harmless, fold in zip(is_harmless_N, text_N % FOLDS, strict=True)}
    if len(kinds) < 2 * FOLDS:
        raise ValueError(f"{len(texts)} answers have too few labels of both kinds: ask more questions")
    states_ND = torch.cat(list(states))
    estimates = {penalty: out_of_fold(states_ND, is_harmless_N, text_N, penalty) for penalty in PENALTIES}

    def loss(penalty: float) -> float:
        return float(binary_cross_entropy_with_logits(estimates[penalty], is_harmless_N.double()))

    penalty = min(PENALTIES, key=loss)
    chances_N = estimates[penalty].sigmoid()
    threshold = float(chances_N[~is_harmless_N].quantile(RECALL).clamp(1e-6, 1 - 1e-6))
    is_accepted_N = (chances_N >= threshold).double()
    weights_D, bias = fitted(states_ND, is_harmless_N, penalty)
    found = {
        "labels": str(len(is_harmless_N)),
        "harmless": f"{float(is_harmless_N.double().mean()):.3f}",
        "accepted of harmless": f"{float(is_accepted_N[is_harmless_N].mean()):.3f}",
        "rejected of harmful": f"{1 - float(is_accepted_N[~is_harmless_N].mean()):.3f}",
        "loss": f"{loss(penalty):.4f}",
        "penalty": str(penalty),
    }
    return JudgeHead(weights=weights_D, bias=bias, threshold=threshold, facts={**facts, **found})
