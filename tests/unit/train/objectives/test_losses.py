from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from paradraft.train.objectives.losses import IMPOSSIBLE, Divergence, cross_entropy, divergence, row_weights

R, V, K = 30, 7, 5
KINDS = get_args(Divergence)


def case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (R,), generator=generator)
    depths = torch.randint(4, (R,), generator=generator)
    return torch.randn(R, V, generator=generator) * 3, labels, depths


def softmax(logits: list[float]) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(logit) / total for logit in logits]


def kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)


def by_hand(p: list[float], q: list[float], kind: str) -> float:
    mixture = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p) if all(p) else math.inf,
        "jensen_shannon": (kl(p, mixture) + kl(q, mixture)) / 2,
        "total_variation": 1 - sum(map(min, p, q)),
        "acceptance": -math.log(sum(map(min, p, q))),
    }[kind]


@pytest.mark.parametrize("reduction", ["per_depth", "token_mean"])
@pytest.mark.parametrize("importance", [[1.0] * K, [2.0, 1.0, 0.0, 0.5, 3.0]])
@pytest.mark.parametrize("seed", range(3))
def test_losses_equal_a_double_loop(seed: int, importance: list[float], reduction: str) -> None:
    """Guards Eq. 8: a mean within each depth, then over depths, each as important as it is said to be; a depth without
    labels (4 here) counts nowhere."""
    logits, labels, depths = case(seed)
    weights = row_weights(torch.bincount(depths, minlength=K), reduction, torch.tensor(importance))
    found = (weights[depths] * cross_entropy(logits, labels)).sum().item()
    losses: dict[int, list[float]] = {}
    for row, label, depth in zip(logits.tolist(), labels.tolist(), depths.tolist(), strict=True):
        losses.setdefault(depth, []).append(-math.log(softmax(row)[label]))
    if reduction == "per_depth":
        above = sum(importance[d] * sum(some) / len(some) for d, some in losses.items())
        below = sum(importance[d] for d in losses)
    else:
        above = sum(importance[d] * sum(some) for d, some in losses.items())
        below = sum(importance[d] * len(some) for d, some in losses.items())
    assert found == pytest.approx(above / below, rel=1e-5)


@pytest.mark.parametrize("reduction", ["per_depth", "token_mean"])
def test_weights_of_all_rows_add_up_to_one(reduction: str) -> None:
    """Guards the size of a step against depths of one row, or of none."""
    labels, importance = torch.tensor([5, 1, 0, 2, 1]), torch.tensor([1.0, 2.0, 4.0, 0.5, 1.0])
    weights = row_weights(labels, reduction, importance)
    assert (weights * labels).sum().item() == pytest.approx(1.0)
    share = importance * (labels > 0 if reduction == "per_depth" else labels)
    torch.testing.assert_close(weights * labels, share / share.sum())


@pytest.mark.parametrize("reduction", ["per_depth", "token_mean"])
def test_nothing_to_learn_is_zero_and_not_nan(reduction: str) -> None:
    """Guards against a NaN that destroys the weights when a step has no label."""
    assert row_weights(torch.zeros(K, dtype=torch.long), reduction, torch.ones(K)).tolist() == [0.0] * K


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_equal_a_loop(kind: str) -> None:
    """Guards the direction of each divergence and its unit, and the surprise at tokens that are never chosen."""
    logits, _, _ = case(1)
    teacher = torch.randn(R, V, generator=torch.Generator().manual_seed(9)) * 3
    teacher[:, 4] = IMPOSSIBLE
    allowed = [token for token in range(V) if token != 4]
    found = divergence(logits, teacher, kind)
    for row in range(R):
        p, q = softmax(teacher[row, allowed].tolist()), softmax(logits[row, allowed].tolist())
        others = -math.log(1 - softmax(logits[row].tolist())[4])
        assert found[row].item() == pytest.approx(by_hand(p, q, kind) + others, rel=1e-4, abs=1e-6)
        if kind == "forward_kl":
            over_all = kl(softmax(teacher[row].tolist()), softmax(logits[row].tolist()))
            assert found[row].item() == pytest.approx(over_all, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_never_chosen_are_unlearnt(kind: str) -> None:
    """Guards engines, which draft whatever is likeliest, against rows that no token uses and that have drifted up,
    because nothing held them down. The shipped drafter had come to that."""
    logits, _, _ = case(2)
    teacher = logits.clone()
    teacher[:, -2:] = -torch.inf
    logits = logits.clone().requires_grad_()
    for _ in range(200):
        (slope,) = torch.autograd.grad(divergence(logits, teacher, kind).sum(), logits)
        logits = (logits - 2.0 * slope).detach().requires_grad_()
    assert logits.softmax(-1)[:, -2:].sum(-1).max() < 0.02
    assert (logits.argmax(-1) < V - 2).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_agrees_with_its_teacher_has_nothing_to_learn(kind: str) -> None:
    """Guards against a loss, or a NaN, where both are the same."""
    logits, _, _ = case(4)
    teacher = torch.randn(R, V, generator=torch.Generator().manual_seed(9))
    teacher[:5] = logits[:5]
    teacher[:, -1] = -torch.inf
    logits[:, -1] = -30.0
    logits.requires_grad_()
    losses = divergence(logits, teacher, kind)
    losses.sum().backward()
    assert losses[:5].abs().max() < 1e-6 < losses[5:].min()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert logits.grad[:, -1].abs().max() < 1e-6
    if kind == "forward_kl":
        # KL(p || q) falls where q goes towards p, token by token.
        p, q = teacher.softmax(-1), logits.detach()[:, :-1].softmax(-1)
        torch.testing.assert_close(logits.grad[:, :-1], q - p[:, :-1])
    if kind not in ("total_variation", "acceptance"):  # whose slopes jump there
        assert logits.grad[:5].abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_forbidden", [False, True])
def test_slopes_are_those_of_autograd(kind: str, has_forbidden: bool) -> None:
    """Guards the slopes that are written by hand, against those of plain formulas, in float64."""
    generator = torch.Generator().manual_seed(3)
    logits, teacher = (2 * torch.randn(R, 50, dtype=torch.float64, generator=generator) for _ in range(2))
    teacher[:, ::7] = IMPOSSIBLE if has_forbidden else teacher[:, ::7]
    own, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    scale = torch.linspace(0.5, 2, R, dtype=torch.float64)
    (scale * divergence(own, teacher, kind)).sum().backward()
    allowed = teacher[0] > IMPOSSIBLE
    log_p = teacher[:, allowed].log_softmax(1)
    log_q, others = plain[:, allowed].log_softmax(1), -plain.log_softmax(1)[:, allowed].logsumexp(1)
    p, q = log_p.exp(), log_q.exp()
    alpha = torch.minimum(p, q).sum(1)
    mixture = ((p + q) / 2).log()
    expected = {
        "forward_kl": (p * (log_p - log_q)).sum(1),
        "reverse_kl": (q * (log_q - log_p)).sum(1),
        "jensen_shannon": ((p * (log_p - mixture)).sum(1) + (q * (log_q - mixture)).sum(1)) / 2,
        "total_variation": 1 - alpha,
        "acceptance": -alpha.log(),
    }[kind] + others
    (scale * expected).sum().backward()
    torch.testing.assert_close(divergence(own, teacher, kind), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own.grad, plain.grad, rtol=1e-8, atol=1e-10)


def test_acceptance_is_what_total_variation_leaves() -> None:
    """Guards the two against each other, where no id is forbidden, and the loss of an untrained drafter, whose α is
    below the least float32: total variation has no slope there, -log α has that of cross-entropy."""
    logits, labels, _ = case(5)
    teacher = case(6)[0]
    apart = divergence(logits, teacher, "total_variation")
    torch.testing.assert_close(torch.exp(-divergence(logits, teacher, "acceptance")), 1 - apart)
    sure = torch.full((R, V), -1e3).scatter(1, labels[:, None], 0.0)
    far = (40 * logits).requires_grad_()
    for kind, found in (("acceptance", cross_entropy(far, labels)), ("forward_kl", cross_entropy(far, labels))):
        torch.testing.assert_close(divergence(far, sure, kind), found, rtol=1e-5, atol=1e-4)
        (slope,) = torch.autograd.grad(divergence(far, sure, kind).sum(), far)
        (wanted,) = torch.autograd.grad(cross_entropy(far, labels).sum(), far)
        torch.testing.assert_close(slope, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1, 20, 60, 300])
def test_overlaps_of_sure_models_equal_those_in_float64(scale: int) -> None:
    """Guards α of drafters that give nearly all to forbidden tokens, or nothing to what the teacher may say: products
    of probabilities that float32 does not have."""
    generator = torch.Generator().manual_seed(4)
    logits, teacher = (scale * torch.randn(200, 30, generator=generator) for _ in range(2))
    teacher[:, ::3] = IMPOSSIBLE
    for kind in ("acceptance", "total_variation"):
        own, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
        found, expected = divergence(own, teacher, kind), divergence(exact, teacher.double(), kind)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(own.grad.double(), exact.grad, rtol=1e-3, atol=1e-4)


def test_a_sampled_baseline_changes_no_slope() -> None:
    """Guards the docstring: TVD++'s reward is 1 where q < p, less its mean; the expectation over all tokens of its
    policy gradient is total variation's gradient, with any baseline."""
    logits, teacher = case(7)[0].double().requires_grad_(), case(8)[0].double()
    p, log_q = teacher.softmax(1), logits.log_softmax(1)
    reward = (log_q.exp() < p).double()
    for baseline in (0.0, float(reward.mean())):
        (slope,) = torch.autograd.grad((-(log_q.exp().detach() * (reward - baseline)) * log_q).sum(), logits)
        (wanted,) = torch.autograd.grad(divergence(logits, teacher, "total_variation").sum(), logits)
        torch.testing.assert_close(slope, wanted)
        log_q = logits.log_softmax(1)


def test_divergences_of_certain_models_are_finite() -> None:
    """Guards against log 0: a trained target is often sure of one token."""
    sure = torch.tensor([[80.0, 0.0, -90.0]])
    other = torch.tensor([[-70.0, 90.0, 0.0]], requires_grad=True)
    for kind in KINDS:
        loss = divergence(other, sure, kind).sum()
        (slope,) = torch.autograd.grad(loss, other)
        assert loss.isfinite() and slope.isfinite().all(), kind
    assert divergence(other, sure, "jensen_shannon").item() == pytest.approx(math.log(2))
    assert divergence(other, sure, "total_variation").item() == pytest.approx(1)


def test_losses_are_computed_in_float32() -> None:
    """Guards against a softmax over bfloat16 logits."""
    logits, labels, _ = case(1)
    half = logits.bfloat16()
    assert torch.equal(cross_entropy(half, labels), cross_entropy(half.float(), labels))
    for kind in KINDS:
        assert torch.equal(
            divergence(half, half.roll(1, 0), kind), divergence(half.float(), half.roll(1, 0).float(), kind)
        )
