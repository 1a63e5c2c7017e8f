"""The false alarms of the test of a distribution are at most as many as it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from paradraft.audit import uniformity as module
from paradraft.audit.server.tables import Table
from paradraft.audit.uniformity import pit_values, uniformity

ALARMS = 0.1
"""False alarms that can be counted."""
AUDITS, MOST = 400, 60
"""How many audits of honest servers, and how many tokens each has at most."""
MANY = ALARMS * AUDITS + 4 * math.sqrt(ALARMS * (1 - ALARMS) * AUDITS)
"""More than so many false alarms come with a probability below 1e-4 if there are as many as allowed."""


@pytest.fixture(autouse=True)
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FALSE_ALARM", ALARMS)


def honest(seed: int) -> Tensor:
    return torch.rand(MOST, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unlucky(places: Tensor) -> Tensor:
    """As if the text had ended where the distance is nearest to its limit: an end may depend on the tokens."""
    found = [uniformity(places[:n]) for n in range(1, MOST + 1)]
    ratios = [each.distance / each.limit for each in found]
    return places[: 1 + max(range(MOST), key=ratios.__getitem__)]


def alarms(most: int | None, end: Callable[[Tensor], Tensor]) -> int:
    return sum(not uniformity(end(honest(seed)), most).is_uniform for seed in range(AUDITS))


@pytest.mark.slow
def test_answers_that_end_early_raise_no_more_alarms() -> None:
    """Guards the stated probability: the bound is for a fixed number, and where answers end depends on their tokens."""
    assert alarms(MOST, unlucky) < MANY
    assert alarms(MOST, lambda places: places) < MANY
    assert alarms(None, lambda places: places) < MANY
    assert alarms(None, unlucky) > MANY  # the control: the bound for a fixed number does not hold there


GROUPS = [{0, 8}, {3, 5, 7}]
"""Tokens that are not told apart."""


def texts(p_NC: Tensor, drawn_at: float, judged_at: float, *, cut: bool) -> Iterator[Tensor]:
    """The numbers of answers at some temperature, which end at token 0, or are cut in the last group as well."""
    table = Table(ids=torch.arange(p_NC.shape[1]), logprobs=p_NC.log())
    for seed in range(AUDITS):
        drawn = table.at_temperature(drawn_at).logprobs.exp()
        tokens = torch.multinomial(drawn, 1, generator=torch.Generator().manual_seed(seed))[:, 0].tolist()
        ends = [place for place, token in enumerate(tokens) if token == 0 or (cut and token in GROUPS[-1])]
        number = ends[0] + 1 if ends else len(tokens)
        part = table.at_temperature(judged_at).rows(0, number).merged(GROUPS, summed=True)
        generator = torch.Generator().manual_seed(AUDITS + seed)
        yield pit_values(part.logprobs.exp(), part.columns(tokens[:number]), generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cut", [False, True])
def test_tokens_that_are_not_told_apart_raise_no_more_alarms(temperature: float, cut: bool) -> None:
    """Guards ends, and names that several tokens have: they count as one, and their numbers are uniform."""
    p_NC = torch.randn(MOST, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(1)
    p_NC[:, 0] *= 0.1
    p_NC /= p_NC.sum(1, keepdim=True)
    found = list(texts(p_NC, temperature, temperature, cut=cut))
    assert sum(not uniformity(places, MOST).is_uniform for places in found) < MANY
    # Over all audits together, false alarms 1e-6; the control is drawn at another temperature.
    whole, control = torch.cat(found), torch.cat(list(texts(p_NC, 0.4 * temperature, temperature, cut=cut)))
    limits = [math.sqrt(math.log(2 / 1e-6) / (2 * len(places))) for places in (whole, control)]
    assert uniformity(whole).distance < limits[0] and uniformity(control).distance > limits[1]
