from __future__ import annotations

import pytest
import torch

from paradraft.train.optimizers import Optimizers
from tests.conftest import tiny_model


def optimizers(model: torch.nn.Module, *, muon_lr: float | None = None, **settings: float) -> Optimizers:
    return Optimizers(
        model, muon_lr=muon_lr, **{"lr": 0.1, "weight_decay": 0.0, "warmup_steps": 4, "steps": 12, **settings}
    )


def test_schedule_warms_up_and_decays_linearly() -> None:
    """Guards against a first step of rate 0, a step at full rate too early, and a last step without effect."""
    factors = [optimizers(tiny_model(0)).factor(step) for step in range(12)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


@pytest.mark.parametrize(("warmup", "steps"), [(0, 5), (5, 5), (50, 5), (0, 1), (1, 1)])
def test_schedule_of_short_runs(warmup: int, steps: int) -> None:
    """Guards against a division by zero, and rates outside (0, 1], when the warm-up is as long as the run."""
    tested = optimizers(tiny_model(0), warmup_steps=warmup, steps=steps)
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
    members = [p for optimizer, _ in tested._members for group in optimizer.param_groups for p in group["params"]]
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
