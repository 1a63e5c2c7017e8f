"""Whether drafting pays is said from times of the run itself, and only where it is clear."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paradraft.core import Draft
from paradraft.decode.batch import Batch
from paradraft.decode.lengths.draft_length import POLICIES, Fixed
from paradraft.decode.payoff import Compared, Payoff, Rounds
from paradraft.decode.pearl.pearl import AheadBatch
from paradraft.decode.stats import RoundTime
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.drafters.ngram import Config, NgramDrafter
from paradraft.drafters.parts.text_drafter import TextDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.sampling_params import Sampling
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import answers, requests, round_of, target_of

INSTEAD = ("--lengths expected", "--drafter none")
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], [3, 4, 5, 6]]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.2, seed=4)]


def decode(
    policy: Compared, rounds: int, *, accepted: float, drafted_s: float, plain_s: float = 0.010, noise: float = 0.0,
    seed: int = 0,
) -> list[int]:  # fmt: skip
    """Rounds of one row with these times, of which a share is longer by half; returns what was asked for in each."""
    chooser, asked = random.Random(seed), []
    policy.start(None, is_ragged=True)
    policy.join(requests([[1]], limits=10_000))
    for _ in range(rounds):
        (length,) = policy.next()
        kept = int(length > 0 and chooser.random() < accepted)
        seconds = (drafted_s if length else plain_s) * (1.5 if chooser.random() < noise else 1.0)
        policy.observe(round_of([kept], [length]), RoundTime(draft_s=0.0, verify_s=seconds, other_s=0.0))
        asked.append(length)
    return asked


def model(seed: int) -> CausalLM:
    return CausalLM(tiny_model(seed), vocab_size=VOCAB)


def compared(name: str = "fixed") -> Compared:
    return Compared(POLICIES[name](4), tries_plain=True)


@pytest.mark.parametrize("name", ["fixed", "heuristic", "confidence"])
def test_a_drafter_that_does_not_pay_is_said_with_the_measured_factor(name: str) -> None:
    """Guards the sentence, and its factor, which is that of a token and not of a round."""
    policy = compared(name)
    decode(policy, 100, accepted=1.0, drafted_s=0.120)
    assert policy.payoff.speedup == pytest.approx(1 / 6)
    assert policy.payoff.advice(INSTEAD) == (
        "drafting made this 6.0 x slower here: try --lengths expected, or --drafter none"
    )


def test_nothing_is_said_of_few_rounds() -> None:
    """Guards short answers, of which nothing is known."""
    policy = compared()
    decode(policy, Payoff.LEAST_ROUNDS - 1, accepted=0.0, drafted_s=1.0)
    assert policy.payoff.advice(INSTEAD) is None and policy.payoff.speedup is None


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("drafted_s", [0.012, 0.0145])
def test_no_false_alarm_on_a_busy_machine(noise: float, drafted_s: float) -> None:
    """Guards users whom drafting serves: it gains 25 % or 3 % here, while some rounds take half as long again.

    A fault that alarms in one run of ten passes with a probability of 0.5 % (0.9 ** 50).
    """
    for seed in range(50):
        policy = compared()
        decode(policy, 300, accepted=0.5, drafted_s=drafted_s, noise=noise, seed=seed)
        assert policy.payoff.advice(INSTEAD) is None


def test_a_clear_loss_is_seen_on_a_busy_machine() -> None:
    """The control of the test above: what is 1.4 times as slow is said, in nearly all runs."""
    said = 0
    for seed in range(50):
        policy = compared()
        decode(policy, 600, accepted=0.5, drafted_s=0.021, noise=0.3, seed=seed)
        said += policy.payoff.advice(INSTEAD) is not None
    assert said >= 45


def test_rounds_that_expected_saved_are_no_loss() -> None:
    """Guards `expected`, which tries drafts that do not pay and goes back to plain rounds: these are not slower."""
    policy = compared("expected")
    asked = decode(policy, 600, accepted=0.1, drafted_s=0.060)
    assert any(asked) and asked.count(0) > 500
    assert policy.payoff.advice(("--drafter none",)) is None


def test_a_policy_that_runs_plain_rounds_itself_is_left_alone() -> None:
    """Guards `expected` against tries beside its own."""
    policies = [Compared(POLICIES["expected"](4), tries_plain=tries) for tries in (False, True)]
    first, second = (decode(policy, 300, accepted=0.8, drafted_s=0.011) for policy in policies)
    assert first == second


def test_without_plain_rounds_the_factor_is_the_least_that_is_certain() -> None:
    """Guards runs in which no round may be plain: such a round takes at most as long as the target's part of others."""
    policy = Compared(Fixed(4), tries_plain=False)
    policy.start(None, is_ragged=True)
    policy.join(requests([[1]]))
    for number in range(40):
        policy.next()
        policy.observe(round_of([number % 2], [4]), RoundTime(draft_s=0.030, verify_s=0.009, other_s=0.001))
    assert policy.payoff.advice(INSTEAD) == (
        "drafting made this at least 2.7 x slower here: try --lengths expected, or --drafter none"
    )
    assert policy.payoff.speedup is None


def test_a_drafter_that_is_hardly_ever_right_is_said() -> None:
    """Guards wrong drafts where plain rounds would be as slow: 200 rounds whose drafts gave hardly a token more."""
    policy = compared()
    decode(policy, 199, accepted=0.02, drafted_s=0.0101)
    assert policy.payoff.advice(INSTEAD) is None
    decode(policy, 60, accepted=0.02, drafted_s=0.0101)
    assert (said := policy.payoff.advice(INSTEAD)) is not None
    assert said.endswith("tokens each: try another drafter, or --drafter none")
    useful = compared()
    decode(useful, 400, accepted=0.2, drafted_s=0.0101)
    assert useful.payoff.advice(INSTEAD) is None


def test_old_rounds_count_less() -> None:
    """Guards a server that has run for long: both sides forget alike, so that the ratio stays."""
    rounds = Rounds()
    for number in range(5 * Rounds.LAST):
        if number % 60 == 0:
            rounds.plain.add(0.010)
        rounds.add(0.020, 0.020, 1.5)
    assert rounds.taken.count <= Rounds.LAST and rounds.is_plain_known
    assert rounds.worth * rounds.plain.mean_s / rounds.taken.total_s == pytest.approx(0.75)


def test_tries_are_few_and_depend_on_no_time() -> None:
    """Guards the speed of drafters that pay, and runs of several processes, which must decide alike."""
    asked = decode(compared(), 2000, accepted=0.5, drafted_s=0.001)
    assert asked == decode(compared(), 2000, accepted=0.5, drafted_s=1.0, noise=0.5)
    assert asked[: Compared.EVERY + 4] == [4] * Compared.EVERY + [0] * Compared.TRIED + [4]
    assert asked.count(0) < 0.03 * len(asked)


class TriesOften(Compared):
    EVERY = 5


class NoDrafts(TextDrafter):
    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        return Draft.empty(len(lengths), self.device)


@pytest.mark.parametrize("kind", [Batch, AheadBatch])
def test_tries_change_no_token(kind: type[Batch]) -> None:
    """Guards the text where some rounds are plain, drafting in turns and ahead; and that such rounds are timed."""
    target = target_of(model(1))
    asked = requests(PROMPTS, SAMPLINGS, [60, 60, 60])
    plain = answers(Batch(target, NoDrafts(), lengths=Fixed(0)), asked)
    policy = TriesOften(Fixed(3), tries_plain=True)
    assert answers(kind(target, AutoregressiveDrafter(model(2)), lengths=policy), asked) == plain
    assert sum(rounds.plain.count for rounds in policy.payoff.of_size.values()) >= 2


@pytest.mark.parametrize(("verify", "tries"), [("match", True), ("rejection", False)])
def test_an_engine_tries_plain_rounds_only_where_no_text_changes(verify: str, tries: bool) -> None:
    """Guards the rejection rule, with which another length of a draft is another text."""
    target, drafter = target_of(model(1)), AutoregressiveDrafter(model(2))
    speculation = Speculation(k=2, verify=verify, lengths="fixed")
    sampling = Sampling(temperature=1.0, seed=5)
    tried, fixed = (Engine(target, drafter, speculation, tries_plain=each) for each in (True, False))
    results = [engine.generate([5, 6, 7], max_new_tokens=60, sampling=sampling) for engine in (tried, fixed)]
    assert results[0].tokens == results[1].tokens
    assert (results[0].stats.nodes < results[1].stats.nodes) is tries


def test_an_engine_without_tries_drafts_in_every_round() -> None:
    """Guards the library's own engines: every round of a fixed length has a draft."""
    engine = Engine(target_of(model(1)), NgramDrafter(Config()), Speculation(k=2, lengths="fixed"))
    engine.generate([5, 6, 7] * 4, max_new_tokens=60)
    assert engine.payoff.rounds and not any(one.plain.count for one in engine.payoff.of_size.values())
