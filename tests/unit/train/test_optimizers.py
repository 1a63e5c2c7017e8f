from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paradraft.train.optimizers import MOST_SKIPPED, Optimizers
from tests.conftest import tiny_model


def optimizers(model: torch.nn.Module, *, muon_lr: float | None = None, **settings: Any) -> Optimizers:
    return Optimizers(
        model, muon_lr=muon_lr, **{"lr": 0.1, "weight_decay": 0.0, "warmup_steps": 4, "steps": 12, **settings}
    )


def test_schedule_warms_up_and_decays_linearly() -> None:
    """Guards against a first step of rate 0, a step at full rate too early, and a last step without effect."""
    factors = [optimizers(tiny_model(0)).factor(step) for step in range(12)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


@pytest.mark.parametrize(
    ("schedule", "after_warmup"),
    [
        ("constant", [1] * 8),
        ("cosine", [1, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381]),
        ("warmup_stable_decay", [1] * 7 + [0.625]),
    ],
)
def test_other_schedules(schedule: str, after_warmup: list[float]) -> None:
    """Guards against a decay that begins too early, or falls below zero."""
    factors = [optimizers(tiny_model(0), schedule=schedule).factor(step) for step in range(12)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, *after_warmup], abs=1e-4)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "warmup_stable_decay"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 5), (5, 5), (50, 5), (0, 1), (1, 1)])
def test_schedule_of_short_runs(warmup: int, steps: int, schedule: str) -> None:
    """Guards against a division by zero, and rates outside (0, 1], when the warm-up is as long as the run."""
    tested = optimizers(tiny_model(0), warmup_steps=warmup, steps=steps, schedule=schedule)
    assert all(0 < tested.factor(step) <= 1 for step in range(steps))


def stepped(model: torch.nn.Module, tested: Optimizers, steps: range) -> list[torch.Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        tested.step(step)
        assert all(parameter.grad is None for parameter in model.parameters()), "gradients must be cleared"
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("muon_lr", [None, 0.05])
def test_every_parameter_is_trained_once(muon_lr: float | None) -> None:
    """Guards against a parameter that no optimizer has, or two have: the mask's embedding must learn too."""
    model = tiny_model(0)
    tested = optimizers(model, muon_lr=muon_lr)
    members = [p for optimizer, _ in tested._optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(members) == len({id(p) for p in members}) == len(list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert not any(map(torch.equal, stepped(model, tested, range(1)), before))


@pytest.mark.parametrize("muon_lr", [None, 0.05])
def test_only_hidden_matrices_decay(muon_lr: float | None) -> None:
    """Guards against decay of norms and embeddings, which pulls rare tokens to zero."""
    model = tiny_model(0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tested = optimizers(model, muon_lr=muon_lr, weight_decay=0.5, warmup_steps=0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tested.step(0)
    for name, parameter in model.named_parameters():
        decays = parameter.ndim == 2 and "embed" not in name
        assert torch.equal(parameter, before[name]) != decays, name


@pytest.mark.parametrize("muon_lr", [None, 0.05])
def test_saved_state_goes_on_exactly(muon_lr: float | None) -> None:
    """Guards resumed runs: momentum and step counts of every member are saved."""
    whole = tiny_model(0)
    expected = stepped(whole, optimizers(whole, muon_lr=muon_lr), range(6))
    model = tiny_model(0)
    first = optimizers(model, muon_lr=muon_lr)
    stepped(model, first, range(3))
    second = optimizers(model, muon_lr=muon_lr)
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, stepped(model, second, range(3, 6)), expected))


def with_gradients(model: torch.nn.Module, scale: float) -> float:
    """Sets gradients, and returns their norm."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()


@pytest.mark.parametrize("muon_lr", [None, 0.05])
def test_large_gradients_are_clipped(muon_lr: float | None) -> None:
    """Guards against one wild step that fills the moments for the next twenty: its gradients count no more than
    `max_grad_norm` allows, those of all parameters by the same factor, and the norm that is told is the one before."""
    clipped, small = tiny_model(0), tiny_model(0)
    norm = with_gradients(clipped, 3.0)
    with_gradients(small, 3.0 / norm)
    one = optimizers(clipped, muon_lr=muon_lr, max_grad_norm=1.0)
    other = optimizers(small, muon_lr=muon_lr)
    assert one.step(0) == pytest.approx(norm) and norm > 100
    assert other.step(0) == pytest.approx(1.0)
    for ours, theirs in zip(moments(one), moments(other), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=0)


def moments(tested: Optimizers) -> list[torch.Tensor]:
    return [
        value
        for member in tested.state_dict()
        for state in member["state"].values()
        for name, value in state.items()
        if name != "step"
    ]


@pytest.mark.parametrize("muon_lr", [None, 0.05])
@pytest.mark.parametrize("most", [None, 1e9])
def test_a_limit_that_is_not_reached_changes_no_bit(muon_lr: float | None, most: float | None) -> None:
    """Guards recipes that switch clipping off, and runs that began before there was any."""
    plain, tested = tiny_model(0), tiny_model(0)
    with_gradients(plain, 1.0)
    with_gradients(tested, 1.0)
    expected = [parameter.grad.clone() for parameter in plain.parameters()]
    limited = optimizers(tested, muon_lr=muon_lr, max_grad_norm=most)
    limited._clip_gradients()
    assert all(map(torch.equal, (parameter.grad for parameter in tested.parameters()), expected))


def test_gradients_that_are_no_numbers_change_nothing() -> None:
    """Guards the checkpoint after a step that went wrong: its weights would be no numbers either, for ever."""
    model = tiny_model(0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    tested = optimizers(model)
    for step in range(MOST_SKIPPED):
        with_gradients(model, float("nan"))
        assert math.isnan(tested.step(step))
        assert all(map(torch.equal, model.parameters(), before)) and not tested.state_dict()[0]["state"]
    with_gradients(model, 1.0)
    tested.step(MOST_SKIPPED)
    assert not any(map(torch.equal, model.parameters(), before))
    for step in range(MOST_SKIPPED):
        with_gradients(model, float("inf"))
        tested.step(step)
    with_gradients(model, float("nan"))
    with pytest.raises(ValueError, match="the norm of the gradients became nan in step 4: lower lr"):
        tested.step(3)


def test_betas_are_adamws() -> None:
    """Guards `betas`: they count with Muon too, for what AdamW trains."""
    for muon_lr in (None, 0.05):
        tested = optimizers(tiny_model(0), muon_lr=muon_lr, betas=(0.8, 0.99))
        assert tested._optimizers[-1][0].param_groups[0]["betas"] == (0.8, 0.99)
