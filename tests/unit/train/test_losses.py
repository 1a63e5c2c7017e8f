from __future__ import annotations

import math

import pytest
import torch

from paradraft.train.losses import IGNORED, depth_accuracy, depth_cross_entropy

R, V = 30, 7


def case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (R,), generator=generator)
    depths = torch.randint(4, (R,), generator=generator)
    labels[torch.rand(R, generator=generator) < 0.3] = IGNORED
    return torch.randn(R, V, generator=generator) * 3, labels, depths


def one_loss(logits: list[float], label: int) -> float:
    return math.log(sum(map(math.exp, logits))) - logits[label]


def naive(logits: torch.Tensor, labels: torch.Tensor, depths: torch.Tensor) -> dict[int, list[float]]:
    losses: dict[int, list[float]] = {}
    for row, label, depth in zip(logits.tolist(), labels.tolist(), depths.tolist(), strict=True):
        if label != IGNORED:
            losses.setdefault(depth, []).append(one_loss(row, label))
    return losses


@pytest.mark.parametrize("seed", range(4))
def test_losses_equal_a_double_loop(seed: int) -> None:
    """Guards Eq. 8: a mean within each depth, then over depths; ignored rows count nowhere."""
    logits, labels, depths = case(seed)
    losses = naive(logits, labels, depths)
    per_depth = sum(sum(some) / len(some) for some in losses.values()) / len(losses)
    token_mean = sum(map(sum, losses.values())) / sum(map(len, losses.values()))
    assert depth_cross_entropy(logits, labels, depths, "per_depth").item() == pytest.approx(per_depth, rel=1e-5)
    assert depth_cross_entropy(logits, labels, depths, "token_mean").item() == pytest.approx(token_mean, rel=1e-5)


@pytest.mark.parametrize("reduction", ["per_depth", "token_mean"])
def test_a_teacher_that_is_sure_is_a_label(reduction: str) -> None:
    """Guards distillation: with all probability on the label it is cross-entropy; ignored rows count nowhere."""
    logits, labels, depths = case(3)
    certain = torch.nn.functional.one_hot(labels.clamp(min=0), V).float()
    expected = depth_cross_entropy(logits, labels, depths, reduction)
    assert torch.allclose(depth_cross_entropy(logits, labels, depths, reduction, certain), expected)


def test_a_drafter_that_agrees_with_its_teacher_has_nothing_to_learn() -> None:
    """Guards the direction of the divergence: the gradient is (drafter - teacher) per row, whatever the tokens were."""
    logits, labels, depths = case(4)
    teacher = torch.randn(R, V, generator=torch.Generator().manual_seed(9)).softmax(-1)
    teacher[:5] = logits[:5].softmax(-1)
    logits.requires_grad_()
    depth_cross_entropy(logits, labels, depths, "token_mean", teacher).backward()
    real = labels != IGNORED
    expected = (logits.detach().softmax(-1) - teacher) * real[:, None] / real.sum()
    torch.testing.assert_close(logits.grad, expected)
    assert logits.grad[:5].abs().max() < 1e-7


@pytest.mark.parametrize("reduction", ["per_depth", "token_mean"])
def test_ignored_rows_have_no_gradient(reduction: str) -> None:
    """Guards against learning from the prompt."""
    logits, labels, depths = case(0)
    labels[depths == 2] = IGNORED
    logits.requires_grad_()
    loss = depth_cross_entropy(logits, labels, depths, reduction)
    loss.backward()
    assert (logits.grad[labels == IGNORED] == 0).all()
    assert (logits.grad[labels != IGNORED] != 0).any(1).all()


def test_a_depth_of_ignored_rows_alone_does_not_lower_the_mean() -> None:
    """Guards short answers, where late depths have no label: the mean is over the depths that have one."""
    logits, labels, depths = case(0)
    labels[depths == 2] = IGNORED
    losses = naive(logits, labels, depths)
    assert sorted(losses) == [0, 1, 3]
    expected = sum(sum(some) / len(some) for some in losses.values()) / 3
    assert depth_cross_entropy(logits, labels, depths, "per_depth").item() == pytest.approx(expected, rel=1e-5)


def test_nothing_to_learn_is_zero_and_not_nan() -> None:
    """Guards against a NaN that destroys the weights when a batch has no label."""
    logits, labels, depths = case(0)
    for reduction in ("per_depth", "token_mean"):
        assert depth_cross_entropy(logits, torch.full_like(labels, IGNORED), depths, reduction) == 0


def test_loss_is_computed_in_float32() -> None:
    """Guards against a softmax over bfloat16 logits."""
    logits, labels, depths = case(1)
    half = logits.bfloat16()
    expected = depth_cross_entropy(half.float(), labels, depths, "per_depth")
    assert torch.equal(depth_cross_entropy(half, labels, depths, "per_depth"), expected)


def test_accuracy_equals_a_loop() -> None:
    """Guards the numbers on the screen: hits and rows per depth, ignored rows in neither; unused depths are 0."""
    logits, labels, depths = case(2)
    expected = [[0.0] * 6, [0.0] * 6]
    for row, label, depth in zip(logits, labels.tolist(), depths.tolist(), strict=True):
        if label != IGNORED:
            expected[0][depth] += float(row.argmax() == label)
            expected[1][depth] += 1
    assert depth_accuracy(logits, labels, depths, 6).tolist() == expected
