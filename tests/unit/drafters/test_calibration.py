"""A part of a union is left out where it does not pay: simulated rounds with known times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from paradraft.core import Draft
from paradraft.drafters.parts.calibration import Calibration
from paradraft.ragged import from_lists
from tests.support.decoding import requests

PLAIN_S = 0.1


@dataclass
class Simulation:
    """Rounds of a batch in which a draft of n rows takes `draft_s(n)`, each of its tokens `token_s`, and each token
    read before it `reading_s`.

    A draft has `accepted` right tokens, the other parts expect `others`; without it a round commits 1 + others.
    """

    accepted: int = 2
    others: float = 0.0
    draft_s: Callable[[int], float] = lambda rows: 0.05
    reading_s: float = 0.0067
    token_s: float = 0.0
    plain_s: float = PLAIN_S
    calibration: Calibration = field(default_factory=lambda: Calibration(is_slow=True))
    unread: list[int] = field(default_factory=list)
    goes_on: list[bool] = field(default_factory=list)
    drafting_s: list[float] = field(default_factory=list)
    """By round, the time of its drafts."""
    depths: list[int] = field(default_factory=list)
    """By round, the depth of its drafts."""

    def join(self, prompts: Sequence[int], limit: int = 10_000) -> Simulation:
        self.calibration.join(requests([[0] * length for length in prompts], limits=limit))
        self.unread, self.goes_on = [*self.unread, *prompts], [*self.goes_on, *(False for _ in prompts)]
        return self

    def run(self, rounds: int, disturbed: dict[int, float] | None = None) -> list[int]:
        """Returns the number of drafting rows of each round."""
        drafting, B = [], len(self.unread)
        for number in range(rounds):
            asked = self.calibration.lengths([4] * B, [self.others] * B, self.plain_s)
            rows = [row for row, length in enumerate(asked) if length]
            read = sum(self.unread[row] for row in rows if not self.goes_on[row])
            self.depths.append(max(asked))
            seconds = bool(rows) * (self.draft_s(len(rows)) + self.token_s * max(asked) + self.reading_s * read) + (
                disturbed or {}
            ).get(number, 0.0)
            tokens = from_lists([[1, 2, 3, 4][:length] for length in asked])
            self.calibration.nodes(Draft.chain(tokens, confidence=torch.full(tokens.shape, 0.9)), asked, 1.0)
            self.calibration.add_time(seconds)
            self.drafting_s.append(seconds)
            other = [9] * (1 + round(self.others))
            new = [[*range(1, self.accepted + 1), 9] if row in rows else other for row in range(B)]
            self.calibration.learn(new)
            for row in range(B):
                self.unread[row] = len(new[row]) + (0 if row in rows else self.unread[row])
            self.goes_on = [row in rows for row in range(B)]
            drafting.append(len(rows))
        return drafting

    def answer(self, prompt: int, rounds: int, limit: int = 10_000) -> list[int]:
        """The rounds of an answer, alone in a batch."""
        self.unread, self.goes_on = [], []
        self.calibration.start()
        return self.join([prompt], limit).run(rounds)


def test_a_disturbed_measurement_is_corrected() -> None:
    """Guards drafts for good: the only draft that was timed took six times as long as others."""
    simulation = Simulation(accepted=1).join([20])
    drafting = simulation.run(600, disturbed={1: 0.25})
    assert sum(drafting[:100]) < 20, "it seemed too dear"
    assert all(drafting[-100:])


def test_rows_share_the_time_of_a_draft() -> None:
    """Guards servers: one row alone pays for a pass that is hardly longer for eight."""
    simulation = Simulation(accepted=2, draft_s=lambda rows: 0.048 + 0.002 * rows).join([20])
    assert simulation.run(100)[-1] == 1
    assert simulation.join([20] * 7).run(100)[-1] == 8, "0.064 s cost the eight rows 5 tokens, and they gain 16"
    costly = Simulation(accepted=2, draft_s=lambda rows: 0.05 * rows).join([20])
    assert costly.run(100)[-1] == 1
    assert sum(costly.join([20] * 7).run(100)[50:]) < 5, "0.05 s cost them 4 tokens for 2"


@pytest.mark.parametrize("rounds", [15, 100])
def test_a_text_that_drafts_badly_does_not_end_drafts_of_others(rounds: int) -> None:
    """Guards short answers, of less than sixteen rounds: they are tried as long ones are."""
    simulation = Simulation(accepted=0)
    simulation.answer(20, 100)
    simulation.accepted = 4
    drafting = [sum(simulation.answer(20, rounds)) for _ in range(3000 // rounds)]
    assert sum(drafting) > 2000


@pytest.mark.parametrize(("prompt", "rounds"), [(600, 64), (8000, 64), (20, 1000)])
def test_trials_take_little_of_all_time(prompt: int, rounds: int) -> None:
    """Guards answers that a cheap part drafts well: trials, with the texts that they read, take 2 % of the time,
    however long a text is."""
    simulation = Simulation()
    simulation.answer(100, 50)
    simulation.others, simulation.drafting_s = 3.0, []
    for _ in range(20):
        simulation.answer(prompt, rounds)
    assert sum(simulation.drafting_s) < 0.025 * 20 * rounds * PLAIN_S
    assert any(simulation.drafting_s) is (prompt < 100)


def test_a_trial_that_took_longer_is_paid_for() -> None:
    """Guards machines that become slower: what a trial took counts, not the estimate."""
    simulation = Simulation()
    simulation.answer(100, 50)
    simulation.others, simulation.reading_s, simulation.drafting_s = 3.0, 0.2, []
    for _ in range(30):
        simulation.answer(20, 100)
    assert 0.0 < sum(simulation.drafting_s) < 0.03 * 3000 * PLAIN_S


def test_a_slow_first_text_does_not_count_for_all() -> None:
    """Guards first drafts of a process, in which a library is loaded, and warm-ups with fixed lengths."""
    simulation = Simulation(plain_s=0.0).join([1] * 8)
    simulation.run(4, disturbed={0: 20.0})
    simulation.plain_s = PLAIN_S
    assert all(simulation.answer(20, 50))
    cold = Simulation()
    cold.unread, cold.goes_on = [], []
    cold.join([10]).run(30, disturbed={0: 0.5})
    for _ in range(5):
        cold.answer(20, 30)
    assert all(cold.answer(20, 30))


def test_answers_that_end_soon_are_not_drafted_after_long_prompts() -> None:
    """Guards labels and other answers of some tokens, whose limit is high: reading costs more than they do."""
    simulation = Simulation()
    drafting = [sum(simulation.answer(600, 2)) for _ in range(30)]
    assert not any(drafting[12:])


def test_a_long_text_is_not_read_for_a_few_rounds() -> None:
    """Guards answers that repeat themselves after their first lines: in the first rounds only the slow part has drafts,
    and reading the prompt costs more than these few save."""
    simulation = Simulation()
    simulation.answer(20, 50)
    drafting = []
    for others in [3.0] * 20 + [0.0] * 60:
        simulation.others = 0.0
        first = simulation.answer(600, 4)
        simulation.others = others
        drafting.append(first + simulation.run(200))
    assert sum(map(any, drafting[10:20])) < 2, "4 s of reading save 4 rounds 1.5 tokens each: a trial at most"
    assert all(map(all, drafting[-20:])), "and here all 204 rounds"


def test_only_answers_that_leave_say_how_long_answers_are() -> None:
    """Guards batches, whose rows move when others leave."""
    simulation = Simulation().join([20])
    simulation.run(3)
    for _ in range(50):
        simulation.calibration.keep([0])
    simulation.calibration.keep([])
    assert simulation.join([400]).calibration.lengths([4], [0.0], PLAIN_S) == [4], "2.7 s save 40 rounds"


def test_confidence_may_be_no_number() -> None:
    """Guards all rows of an engine against a draft model with damaged weights in a union: it counts as unknown."""
    calibration = Calibration(is_slow=False)
    calibration.join(requests([[0]]))
    asked = calibration.lengths([2], [0.0], 0.0)
    draft = Draft.chain(from_lists([[5, 6]]), confidence=torch.tensor([[torch.nan, 0.9]]))
    (nodes,) = calibration.nodes(draft, asked, 1.0)
    assert [node.token for node in nodes] == [5, 6] and 0.0 < nodes[1].value < nodes[0].value < 1.0


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize(("token_s", "accepted", "depth"), [(0.0, 2, 4), (0.002, 2, 3), (0.002, 4, 4), (0.002, 1, 2)])
def test_a_draft_is_as_deep_as_pays(token_s: float, accepted: int, depth: int, is_slow: bool) -> None:
    """Guards drafts of one pass, and of several: a token more that is never accepted costs, if little. One is tried
    where it is not known to be refused: the one after the last that is accepted."""
    simulation = Simulation(accepted, token_s=token_s, calibration=Calibration(is_slow=is_slow)).join([20])
    simulation.run(200)
    assert set(simulation.depths[100:]) <= {depth - 1, depth}, "the depth, or one less once that is known"
    assert len(set(simulation.depths[:10])) > 1, "two depths are measured"


def test_the_first_draft_of_an_engine_is_timed() -> None:
    """Guards edits of long texts, the first of which drafts badly: the others are not read to find that out again."""
    simulation = Simulation(accepted=0, others=1.4)
    assert simulation.answer(600, 64)[:3] == [1, 1, 0]
    simulation.drafting_s = []
    for _ in range(20):
        simulation.answer(600, 64)
    assert not any(simulation.drafting_s)


def test_fixed_lengths_depend_on_no_earlier_text() -> None:
    """Guards comparisons of lengths in one run, in which methods share a drafter."""
    expected = Simulation(accepted=0, others=0.5, plain_s=0.0).answer(20, 300)
    used = Simulation(accepted=0, draft_s=lambda rows: 0.001)
    assert all(used.answer(20, 100))
    used.others, used.plain_s = 0.5, 0.0
    assert used.answer(20, 300) == expected and sum(expected[16:]) == 4
