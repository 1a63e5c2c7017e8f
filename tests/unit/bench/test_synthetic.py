"""Verdicts that are drawn: by the rates, by (seed, position), and only where a benchmark asks for them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from paradraft.bench.spec import Method
from paradraft.bench.synthetic import SyntheticAcceptance
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.tree import ABSENT
from paradraft.verify import match, rule_names
from tests.support.decoding import sampler

RATES = (0.9, 0.6, 0.2)


def sampler_of(rows: int, *, seed: int = 0, tokens: int = 4) -> Sampler:
    return sampler([[1] * tokens] * rows, [Sampling(seed=seed + row) for row in range(rows)])


def drawn(draft: Draft, made: Sampler) -> Verdict:
    """The verdict where the target itself accepts nothing and says 8."""
    logits = torch.zeros(len(draft.tokens), draft.tokens.shape[1] + 1, 10)
    logits[..., 8] = 1.0
    return SyntheticAcceptance(rates=RATES).instead_of(match.verify)(draft, TargetOut(logits=logits, hidden={}), made)


def accepted_of(verdict: Verdict) -> torch.Tensor:
    """`[B]` the tokens that each row accepts."""
    return torch.tensor(list(map(len, verdict.paths)))


def chain(rows: int, length: int = 3) -> Draft:
    return Draft.chain(torch.arange(1, length + 1).expand(rows, length).clone())


def test_rates_are_shares_of_all_drafts() -> None:
    """Guards the meaning of a rate, and draws that are not independent of each other: false alarms, by Hoeffding's
    inequality, in one of a million runs with other seeds."""
    rows = 20_000
    accepted = accepted_of(drawn(chain(rows), sampler_of(rows)))
    allowed = math.sqrt(math.log(2 * len(RATES) / 1e-6) / (2 * rows))
    for place, rate in enumerate(RATES):
        assert abs((accepted > place).double().mean().item() - rate) < allowed


def test_a_verdict_is_whole() -> None:
    """Guards against verdicts that no rule could give: gaps in the path, or a next token out of nowhere."""
    verdict = drawn(chain(50), sampler_of(50))
    assert set(map(len, verdict.paths)) == {0, 1, 2, 3}
    for path, tokens in zip(verdict.paths, verdict.tokens, strict=True):
        assert path == list(range(len(path)))
        assert tokens == [*range(1, len(path) + 1), 8]


def test_a_verdict_is_a_function_of_seed_and_position() -> None:
    """Guards against runs that cannot be repeated, and against rounds that all decide alike."""
    first = accepted_of(drawn(chain(50), sampler_of(50)))
    assert torch.equal(accepted_of(drawn(chain(50), sampler_of(50))), first)
    assert not torch.equal(accepted_of(drawn(chain(50), sampler_of(50, seed=100))), first)
    assert not torch.equal(accepted_of(drawn(chain(50), sampler_of(50, tokens=5))), first)
    alone = [accepted_of(drawn(chain(1), sampler_of(1, seed=row))).item() for row in range(50)]
    assert alone == first.tolist()


def test_nothing_is_accepted_that_was_not_drafted() -> None:
    """Guards rows with shorter drafts than their neighbours, and rounds without a draft."""
    draft = chain(50)
    draft.tokens[:, 1:] = ABSENT
    assert set(map(len, drawn(draft, sampler_of(50)).paths)) == {0, 1}
    nothing = drawn(Draft.empty(2, torch.device("cpu")), sampler_of(2))
    assert nothing.tokens == [[8], [8]]


def test_the_work_is_done() -> None:
    """Guards against a benchmark that leaves out the verification that it replaces."""
    calls = []

    def rule(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        calls.append(out)
        return match.verify(draft, out, sampler)

    out = TargetOut(logits=torch.zeros(1, 4, 10), hidden={})
    SyntheticAcceptance(rates=RATES).instead_of(rule)(chain(1), out, sampler_of(1))
    assert calls == [out]


def test_no_user_of_the_library_can_ask_for_it(family: Path) -> None:
    """Guards the promise of lossless answers: the rule has no name, and says of itself that it is not lossless."""
    assert set(rule_names()) == {"block", "judge", "match", "rejection", "typical"}
    with pytest.raises(ValueError, match="verify='synthetic'"):
        load(str(family / "target"), verify="synthetic", runtime=Runtime(dtype="float64"))


@pytest.mark.parametrize("spec", ["pard:k=3", "autoregressive:k=3", "pard:k=3:verify=rejection"])
def test_answers_have_their_length_and_the_rounds_of_their_prompts(family: Path, spec: str) -> None:
    """Guards against answers that an end token cuts, and against rounds of a prompt that depend on its batch."""
    method = Method.parse(spec, dtype="float64")
    name = {"name": method.name, "draft": str(family / "pard")}
    engine = load(
        str(family / "target"),
        drafter=name["name"],
        draft=name["draft"],
        runtime=Runtime(dtype="float64"),
        lengths="fixed",
    )
    drafting = Engine(engine.target, engine.drafter, method.speculation)
    answer = SyntheticAcceptance(rates=(0.8, 0.5, 0.3)).answerer(drafting)
    prompts = ["abcabcabc", "helloworld", "The0quick"]
    alone = [answer([prompt], 30, GREEDY) for prompt in prompts]
    together = answer(prompts, 30, GREEDY)
    assert [len(tokens) for tokens in together.tokens] == [30, 30, 30]
    assert together.stats is not None
    rounds = [one.stats.rounds for one in alone if one.stats is not None]
    assert together.stats.rounds == sum(rounds)
    assert len(set(rounds)) > 1, "all prompts have the same verdicts"
    assert together.delivered_s is not None and [len(row) for row in together.delivered_s] == rounds
    assert all(row == sorted(row) and 0 < row[0] for row in together.delivered_s)
    assert set(together.passes) == {"target", "draft"}


@pytest.mark.parametrize(
    ("text", "named"),
    [("0.5,0.9", "rate 2"), ("1.5", "0 to 1"), ("nan", "0 to 1"), ("0.9,", "write rates"), ("-0.1", "0 to 1")],
)
def test_rates_that_cannot_be(text: str, named: str) -> None:
    """Guards against conditional rates taken for shares of all drafts, and against typing errors."""
    with pytest.raises(ValueError, match=named):
        SyntheticAcceptance.parse(text)
