"""Candidates have the distribution that they tell, and rows of a batch keep to themselves."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from paradraft.core import Drafting, Request, RequestError
from paradraft.sampling.candidates import Candidates, assemble, best_first
from paradraft.sampling.distribution import probabilities
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.tree import ABSENT, Tree
from tests.support.decoding import committed, requests, sampler
from tests.support.drawing import draw
from tests.unit.sampling.test_distribution import chi_square, chi_square_limit, random_logits

ROWS, VOCAB = 20_000, 6
FIXED = Tree(paths=((0,), (1,), (2,)))


def sampler_of(samplings: tuple[Sampling, ...], **settings: object) -> Sampler:
    return sampler([[1, 2, 3]] * len(samplings), samplings, **settings)


def many(**settings: object) -> tuple[Sampler, torch.Tensor]:
    """A batch whose rows differ in their seed alone, and its logits."""
    samplings = tuple(Sampling(temperature=0.9, seed=seed) for seed in range(ROWS))
    return sampler_of(samplings, draws="numbers", **settings), random_logits(1, 1, VOCAB).expand(ROWS, 2, VOCAB)


def test_siblings_have_the_distributions_that_they_tell() -> None:
    """Guards the rejection rule: the first candidate is a draw from q, the second from q without the first, and so on
    (chi-square, false alarm 1e-6 each)."""
    made, logits = many(tree=FIXED)
    found = made.candidates(logits, 0, 3)
    q = probabilities(logits[:1], Sampling(temperature=0.9))[0, 0]
    assert found.probs is not None
    torch.testing.assert_close(found.probs[:, 0, 0], q.expand(ROWS, VOCAB))
    first = torch.bincount(found.tokens[:, 0, 0], minlength=VOCAB).double()
    assert chi_square(first, q) < chi_square_limit(VOCAB - 1)
    for token in range(VOCAB):
        rows = found.tokens[:, 0, 0] == token
        left = q.clone()
        left[token] = 0.0
        left /= left.sum()
        torch.testing.assert_close(found.probs[rows, 0, 1], left.expand(int(rows.sum()), VOCAB))
        second = torch.bincount(found.tokens[rows, 0, 1], minlength=VOCAB).double()
        assert second[token] == 0
        others = torch.arange(VOCAB) != token
        assert chi_square(second[others], left[others]) < chi_square_limit(VOCAB - 2)


def test_chains_are_drawn_from_q_independently_of_the_target() -> None:
    """Guards the independence that the rejection rule needs: with the target's own noise, a draft and the token that
    ends the round would be the same (correlation of 20,000 pairs, false alarm 1e-6)."""
    made, logits = many()
    drafted = made.candidates(logits, 0, 1).tokens[:, 0, 0]
    second = made.candidates(logits, 0, 1).tokens[:, 1, 0]
    q = probabilities(logits[:1], Sampling(temperature=0.9))[0, 0]
    ending = made.draw_next(q.expand(ROWS, VOCAB))
    expected = float((q * q).sum())
    limit = 4.9 * (expected * (1 - expected) / ROWS) ** 0.5
    for a, b in ((drafted, ending), (drafted, second), (second, ending)):
        assert abs(float((a == b).double().mean()) - expected) < limit
    numbers = made.acceptance_numbers(2)
    for a, b in ((numbers[:, 0], numbers[:, 1]), (numbers[:, 0], drafted.double()), (numbers[:, 1], ending.double())):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4.9 / ROWS**0.5


def test_no_random_number_is_used_in_two_rounds() -> None:
    """Guards the independence of rounds: after another committed text all numbers are others."""
    made, logits = many()
    before = (made.candidates(logits, 0, 1).tokens, made.acceptance_numbers(3))
    made.commit(committed(*[[0]] * ROWS))
    after = (made.candidates(logits, 0, 1).tokens, made.acceptance_numbers(3))
    q = probabilities(logits[:1], Sampling(temperature=0.9))[0, 0]
    same = float((before[0][:, 1] == after[0][:, 0]).double().mean())
    assert abs(same - float((q * q).sum())) < 0.02
    assert not torch.isclose(before[1], after[1]).any(1).all()


def test_match_draws_with_the_noise_of_the_position() -> None:
    """Guards the coupling: a draft model that equals the target is always right, at every depth and temperature."""
    samplings = tuple(Sampling(temperature=temperature, seed=seed) for seed, temperature in enumerate([0.0, 0.7, 1.3]))
    logits = random_logits(3, 4, VOCAB)
    chains = sampler_of(samplings)
    depths = torch.arange(4).expand(3, 4)
    expected = torch.stack([draw(logits[row : row + 1], 3 + depths[:1], samplings[row])[0] for row in range(3)])
    assert torch.equal(chains.draw(logits, depths), expected)
    assert torch.equal(chains.candidates(logits, 0, 1).tokens[..., 0], expected)
    tree = sampler_of(samplings, tree=Tree(budget=9))
    assert torch.equal(tree.candidates(logits, 0, 5).tokens[..., 0], expected)


def hears_the_text(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of one sequence after the other: its scores depend on the whole text."""
    return scores + ids.sum(1, keepdim=True) * torch.arange(scores.shape[1]) / 10


KINDS = (
    Request(tokens=[1], max_new_tokens=9),
    Request(tokens=[2, 3], sampling=Sampling(temperature=0.9, top_k=2, seed=4), max_new_tokens=8),
    Request(tokens=[3, 3, 3], sampling=Sampling(repetition_penalty=3.0), max_new_tokens=7),
    Request(tokens=[4] * 5, sampling=Sampling(temperature=0.9, top_k=2, seed=5), max_new_tokens=6),
    Request(
        tokens=[5, 1],
        sampling=Sampling(temperature=1.2, frequency_penalty=2.0, logit_bias={0: 1.0}, seed=6),
        eos_ids=frozenset([4]),
    ),
    Request(tokens=[5, 1, 4, 4], sampling=Sampling(presence_penalty=1.0), answered=2),
    Request(tokens=[2, 2], sampling=Sampling(temperature=0.5, seed=7, processors=[hears_the_text]), max_new_tokens=4),
    Request(tokens=[2, 2], sampling=Sampling(processors=[hears_the_text]), eos_ids=frozenset([4]), max_new_tokens=3),
)
"""Requests that differ in all that a sampler looks at."""


def scores_of(made: Sampler, rows: list[int]) -> torch.Tensor:
    """What the rows, each of which is one of `KINDS`, say to logits of their own."""
    logits, depths = random_logits(len(KINDS), 3, VOCAB)[rows], torch.arange(3).expand(len(rows), 3)
    paths = torch.tensor([[ABSENT, ABSENT], [3, ABSENT], [3, 5]]).expand(len(rows), 3, 2)
    return made.scores(logits, depths, paths)


def alone(row: int, new: list[int]) -> torch.Tensor:
    """What one of `KINDS` says by itself, after its prompt and more tokens, given as an answer so far."""
    kind = KINDS[row]
    rest = replace(kind, tokens=kind.tokens + new, answered=kind.answered + len(new))
    return scores_of(Sampler([rest]), [row])[0]


def test_rows_have_settings_of_their_own() -> None:
    """Guards batches: every row gets what it gets alone, also after other rows have left, in any order."""
    whole = Sampler(KINDS)
    rows = list(range(len(KINDS)))
    for staying in (rows, [7, 1, 2, 4, 6, 5], [4, 1, 7], [1]):
        whole.keep(torch.tensor([rows.index(row) for row in staying]))
        rows = staying
        found = scores_of(whole, rows)
        for place, row in enumerate(rows):
            assert torch.equal(found[place], alone(row, []))


class Forgetful(Sampler):
    """Orders the texts, but not the settings."""

    def keep(self, rows: torch.Tensor) -> None:
        settings = self._requests[: len(rows)]
        super().keep(rows)
        self._serve(settings)


def joins_and_leaves(made: Sampler, chooser: random.Random, rounds: int = 8) -> None:
    """Rows join, get tokens and leave by chance; fails where a row does not get what it gets alone."""
    rows: list[tuple[int, list[int]]] = []
    for _ in range(rounds):
        joining = chooser.sample(range(len(KINDS)), chooser.randint(0 if rows else 1, 3))
        made.join([KINDS[row] for row in joining])
        rows += [(row, []) for row in joining]
        found = scores_of(made, [row for row, _ in rows])
        for place, (row, new) in enumerate(rows):
            assert torch.equal(found[place], alone(row, new)), KINDS[row]
        numbers = [len(KINDS[row].tokens) + len(new) for row, new in rows]
        assert made.lengths_B.tolist() == numbers
        more = [[chooser.randrange(4) for _ in range(chooser.randint(1, 3))] for _ in rows]
        made.commit(committed(*more))
        rows = [(row, new + tokens) for (row, new), tokens in zip(rows, more, strict=True)]
        staying = [place for place in range(len(rows)) if chooser.random() < 0.7] or [0]
        chooser.shuffle(staying)
        made.keep(torch.tensor(staying))
        rows = [rows[place] for place in staying]


@pytest.mark.parametrize("seed", range(6))
def test_rows_may_join_and_leave_at_any_time(seed: int) -> None:
    """Guards rows that join later: texts, limits, ends and noise are those that they have alone, whatever is beside
    them, and of rows whose settings read no text too once others do."""
    joins_and_leaves(Sampler(), random.Random(seed))


def test_settings_in_the_wrong_order_are_caught() -> None:
    """Control of the schedules: a sampler whose rows are ordered in part."""
    with pytest.raises(AssertionError):
        joins_and_leaves(Forgetful(), random.Random(0), rounds=20)


def test_the_settings_of_a_row_reach_the_rejection_rule() -> None:
    """Guards the rule's random numbers and q: they too are those that the row has alone, after joining and leaving."""
    kinds = [KINDS[row] for row in (0, 1, 3, 4)]
    whole = Sampler(kinds[:2], drafting=Drafting(draws="numbers"))
    whole.join(kinds[2:])
    whole.keep(torch.tensor([3, 1, 2]))
    logits = random_logits(4, 2, VOCAB)[[3, 1, 2]]
    probs = whole.probabilities(logits)
    found, numbers, ending = whole.candidates(logits, 0, 1), whole.acceptance_numbers(3), whole.draw_next(probs[:, 0])
    for place, row in enumerate((3, 1, 2)):
        one = Sampler([kinds[row]], drafting=Drafting(draws="numbers"))
        own = logits[place : place + 1]
        assert torch.equal(one.probabilities(own)[0], probs[place])
        assert torch.equal(one.candidates(own, 0, 1).tokens[0], found.tokens[place])
        assert torch.equal(one.candidates(own, 0, 1).probs[0], found.probs[place])
        assert torch.equal(one.acceptance_numbers(3)[0], numbers[place])
        assert torch.equal(one.draw_next(probs[place : place + 1, 0])[0], ending[place])


def test_an_error_of_a_processor_names_its_requests() -> None:
    """Guards the other requests of a batch, and of two with one processor both are to blame."""

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    samplings = [Sampling(), Sampling(processors=[fails]), Sampling(temperature=1.0), Sampling(processors=[fails])]
    made = sampler([[1]] * 4, samplings)
    with pytest.raises(RequestError, match="KeyError for requests") as caught:
        made.draw(random_logits(4, 1, VOCAB), torch.zeros(4, 1, dtype=torch.long))
    assert list(caught.value.requests) == [1, 3] and isinstance(caught.value.cause, KeyError)
    made.keep(torch.tensor([2, 0]))
    made.draw(random_logits(2, 1, VOCAB), torch.zeros(2, 1, dtype=torch.long))


def test_processors_need_not_be_hashable() -> None:
    """Guards processors that are ordinary dataclasses."""

    @dataclass
    class Forbid:
        token: int

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)

    samplings = tuple(Sampling(processors=[Forbid(token)]) for token in (2, 3))
    made = sampler_of(samplings)
    logits = torch.arange(4.0).expand(2, 1, 4)
    assert made.draw(logits, torch.zeros(2, 1, dtype=torch.long)).flatten().tolist() == [3, 2]


def test_settings_that_read_the_text_see_the_drafted_tokens() -> None:
    """Guards the acceptance of drafts under penalties: the second position knows what was drafted for the first."""
    sampling = Sampling(presence_penalty=100.0)
    logits = torch.tensor([[[3.0, 2.0, 1.0]] * 4])
    made = sampler([[0]], sampling)
    assert made.candidates(logits, 0, 1).tokens.flatten().tolist() == [0, 1, 2, 0]
    assert made.candidates(logits[:, :2], 1, 1, torch.tensor([[0]])).tokens.flatten().tolist() == [1, 2]


def test_a_draft_of_settings_that_read_the_text_tells_how_sure_it_is() -> None:
    """Guards the length policy "confidence", which cuts nothing where a draft does not say how sure it is: every
    position is as sure as it is alone, after the tokens drafted before it."""
    sampling = Sampling(temperature=0.8, frequency_penalty=1.5, seed=3)
    logits = random_logits(1, 3, VOCAB)
    made = sampler_of((sampling,), wants_confidence=True)
    found = made.candidates(logits, 0, 1)
    assert found.confidence is not None and found.confidence.shape == (1, 3)
    for place in range(3):
        p = made.probabilities(logits[:, place, None], found.tokens[:, None, :place, 0])
        torch.testing.assert_close(found.confidence[:, place], p.amax(-1)[:, 0])
        alone = made.candidates(logits[:, place, None], place, 1, found.tokens[:, :place, 0])
        assert torch.equal(alone.tokens[:, 0], found.tokens[:, place])


def test_an_answer_that_is_taken_up_again_is_penalized_from_its_beginning() -> None:
    """Guards streams that others have interrupted: what stands at the end of the prompt is a part of the answer, and
    so is what is committed, in every row its own."""
    penalized = Sampling(presence_penalty=9.0)
    made = Sampler([Request(tokens=[1, 2, 3], sampling=penalized, answered=answered) for answered in (0, 2)])
    logits, depths = torch.zeros(2, 1, VOCAB), torch.zeros(2, 1, dtype=torch.long)
    assert made.scores(logits, depths).tolist() == [[[0, 0, 0, 0, 0, 0]], [[0, 0, -9, -9, 0, 0]]]
    made.commit(committed([5, 0], [4]))
    assert made.scores(logits, depths).tolist() == [[[-9, 0, 0, 0, 0, -9]], [[0, 0, -9, -9, -9, 0]]]
    assert made.lengths_B.tolist() == [5, 4]


def test_processors_know_the_end_tokens() -> None:
    """Guards processors that follow a grammar, which has nothing to say after the end."""
    asked: list[list[int]] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.extend(ids.tolist())
        return scores

    made = Sampler([Request(tokens=[1, 2, 3], sampling=Sampling(processors=[processor]), eos_ids=frozenset([4]))])
    paths = torch.tensor([[[ABSENT], [4], [5]]])
    made.scores(random_logits(1, 3, VOCAB), torch.tensor([[0, 1, 1]]), paths)
    assert sorted(asked) == [[1, 2, 3], [1, 2, 3, 5]]


def test_processors_know_the_limit_of_their_row_after_others_have_left() -> None:
    """Guards processors that plan as many tokens as the limit: they are asked about no text beyond it, and about all
    within it, also where the rows before theirs have left."""
    asked: list[list[int]] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.extend(ids.tolist())
        return scores

    made = Sampler(requests([[1, 2, 3]] * 3, Sampling(processors=[processor]), (9, 2, 1)))
    made.keep(torch.tensor([1, 2]))
    paths = torch.tensor([[ABSENT, ABSENT], [4, ABSENT], [4, 5]]).expand(2, 3, 2)
    made.scores(random_logits(2, 3, VOCAB), torch.arange(3).expand(2, 3), paths)
    assert sorted(asked) == [[1, 2, 3], [1, 2, 3], [1, 2, 3, 4]]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 100])
def test_a_grown_tree_takes_the_most_promising_paths(budget: int) -> None:
    """Guards the best-first search against trying out all paths."""
    chances = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.05], [0.9, 0.05, 0.01]]
    logs = torch.tensor(chances).log().tolist()
    aside = 0.5

    def worth(path: tuple[int, ...]) -> float:
        value = 1.0
        for depth, rank in enumerate(path):
            value *= chances[depth][rank] * (aside if any(path[:depth]) else 1.0)
        return value

    everything = [(a,) for a in range(3)]
    everything += [(*path, b) for path in list(everything) for b in range(3)]
    everything += [(*path, c) for path in everything if len(path) == 2 for c in range(3)]
    best = sorted(everything, key=worth, reverse=True)[:budget]
    found = best_first(logs, budget, aside=aside)
    assert sorted(map(worth, found), reverse=True) == pytest.approx(sorted(map(worth, best), reverse=True))
    assert all(path[:-1] in found for path in found if path[:-1]), "a parent is missing"


def test_absent_candidates_become_absent_nodes() -> None:
    """Guards against tokens of probability 0 in a draft, and against branches after side branches where none are."""
    log_probs = torch.tensor([[[-0.1, -torch.inf], [-0.2, -2.0]]])
    candidates = Candidates(tokens=torch.tensor([[[7, 8], [5, 6]]]), log_probs=log_probs, probs=None, confidence=None)
    fixed = assemble(candidates, Tree(paths=((0,), (1,), (0, 1), (1, 0))), aside=0.0)
    assert fixed.tokens.tolist() == [[7, ABSENT, 6, 5]]
    assert fixed.parents.tolist() == [[-1, -1, 0, 1]]
    grown_draft = assemble(candidates, Tree(budget=9), aside=0.5)
    assert sorted(grown_draft.tokens[0].tolist()) == [5, 6, 7]


def test_rows_of_several_settings_see_their_own_drafted_tokens() -> None:
    """Guards verification in batches of several settings: a row's penalties count what was drafted in it."""
    samplings = [
        Sampling(presence_penalty=9.0),
        Sampling(repetition_penalty=5.0),
        Sampling(presence_penalty=9.0),
        GREEDY,
    ]
    logits, depths = random_logits(4, 2, VOCAB), torch.tensor([[1, 2]] * 4)
    paths = torch.tensor([[[1, ABSENT], [1, 2]], [[3, ABSENT], [3, 0]], [[4, ABSENT], [4, 4]], [[5, ABSENT], [5, 1]]])
    together = sampler([[0]] * 4, samplings)
    for row, sampling in enumerate(samplings):
        only = slice(row, row + 1)
        alone = sampler([[0]], sampling)
        assert torch.equal(
            together.scores(logits, depths, paths)[only], alone.scores(logits[only], depths[:1], paths[only])
        )
        assert torch.equal(together.probabilities(logits, paths)[only], alone.probabilities(logits[only], paths[only]))


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_candidates_are_the_same_a_few_at_a_time(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards large vocabularies on a CPU, where rows and positions are computed a few at a time: each keeps its own
    settings, random numbers and place."""
    rows, positions, vocabulary = 5, 6, 50
    samplings = [Sampling(temperature=0.8 * (row % 2), seed=row) for row in range(rows)]
    made = sampler([[1] * (row + 1) for row in range(rows)], samplings, rule=rule, tree=Tree(budget=9))
    made._wants_confidence = True
    logits = random_logits(rows, positions, vocabulary)
    whole = made.candidates(logits, 2, 4)
    for numbers in (1, vocabulary, 4 * vocabulary, positions * vocabulary, 2 * positions * vocabulary):
        monkeypatch.setattr("paradraft.sampling.sampler.CACHED", numbers)
        found = made.candidates(logits, 2, 4)
        assert torch.equal(found.tokens, whole.tokens)
        torch.testing.assert_close(found.log_probs, whole.log_probs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.confidence, whole.confidence, rtol=1e-12, atol=1e-12)
