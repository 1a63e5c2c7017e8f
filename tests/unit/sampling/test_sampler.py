"""Candidates have the distribution that they tell, and rows of a batch keep to themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from paradraft.core import Draft, Prompt, Verdict
from paradraft.ragged import from_lists
from paradraft.sampling.candidates import Candidates, assemble, best_first
from paradraft.sampling.distribution import draw, probabilities
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.tree import ABSENT, Tree
from tests.unit.sampling.test_distribution import chi_square, chi_square_limit, random_logits

ROWS, VOCAB = 20_000, 6
FIXED = Tree(paths=((0,), (1,), (2,)))


def prompt(samplings: tuple[Sampling, ...], **settings: object) -> Prompt:
    return Prompt(tokens=from_lists([[1, 2, 3]] * len(samplings)), sampling=samplings, **settings)


def many(**settings: object) -> tuple[Sampler, torch.Tensor]:
    """A batch whose rows differ in their seed alone, and its logits."""
    samplings = tuple(Sampling(temperature=0.9, seed=seed) for seed in range(ROWS))
    return Sampler(prompt(samplings, rule="rejection", **settings)), random_logits(1, 1, VOCAB).expand(ROWS, 2, VOCAB)


def test_siblings_have_the_distributions_that_they_tell() -> None:
    """Guards the rejection rule: the first candidate is a draw from q, the second from q without the first, and so on
    (chi-square, false alarm 1e-6 each)."""
    sampler, logits = many(tree=FIXED)
    found = sampler.candidates(logits, 0, 3)
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
    sampler, logits = many()
    drafted = sampler.candidates(logits, 0, 1).tokens[:, 0, 0]
    second = sampler.candidates(logits, 0, 1).tokens[:, 1, 0]
    q = probabilities(logits[:1], Sampling(temperature=0.9))[0, 0]
    ending = sampler.draw_next(q.expand(ROWS, VOCAB))
    expected = float((q * q).sum())
    limit = 4.9 * (expected * (1 - expected) / ROWS) ** 0.5
    for a, b in ((drafted, ending), (drafted, second), (second, ending)):
        assert abs(float((a == b).double().mean()) - expected) < limit
    numbers = sampler.acceptance_numbers(2)
    for a, b in ((numbers[:, 0], numbers[:, 1]), (numbers[:, 0], drafted.double()), (numbers[:, 1], ending.double())):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4.9 / ROWS**0.5


def test_no_random_number_is_used_in_two_rounds() -> None:
    """Guards the independence of rounds: behind another committed text all numbers are others."""
    sampler, logits = many()
    before = (sampler.candidates(logits, 0, 1).tokens, sampler.acceptance_numbers(3))
    path = torch.full((ROWS, 1), ABSENT)
    sampler.commit(
        Verdict.of(Draft.chain(torch.zeros(ROWS, 1, dtype=torch.long)), path, torch.zeros(ROWS, dtype=torch.long))
    )
    after = (sampler.candidates(logits, 0, 1).tokens, sampler.acceptance_numbers(3))
    q = probabilities(logits[:1], Sampling(temperature=0.9))[0, 0]
    same = float((before[0][:, 1] == after[0][:, 0]).double().mean())
    assert abs(same - float((q * q).sum())) < 0.02
    assert not torch.isclose(before[1], after[1]).any(1).all()


def test_match_draws_with_the_noise_of_the_position() -> None:
    """Guards the coupling: a draft model that equals the target is always right, at every depth and temperature."""
    samplings = tuple(Sampling(temperature=temperature, seed=seed) for seed, temperature in enumerate([0.0, 0.7, 1.3]))
    logits = random_logits(3, 4, VOCAB)
    sampler = Sampler(prompt(samplings))
    depths = torch.arange(4).expand(3, 4)
    expected = torch.stack([draw(logits[row : row + 1], 3 + depths[:1], samplings[row])[0] for row in range(3)])
    assert torch.equal(sampler.draw(logits, depths), expected)
    assert torch.equal(sampler.candidates(logits, 0, 1).tokens[..., 0], expected)
    tree = Sampler(prompt(samplings, tree=Tree(budget=9)))
    assert torch.equal(tree.candidates(logits, 0, 5).tokens[..., 0], expected)


def test_rows_have_settings_of_their_own() -> None:
    """Guards batches: every row gets what it gets alone, also after other rows have left."""
    samplings = (
        GREEDY,
        Sampling(temperature=0.9, top_k=2, seed=4),
        Sampling(repetition_penalty=3.0),
        Sampling(temperature=0.9, top_k=2, seed=5),
        Sampling(temperature=1.2, frequency_penalty=2.0, logit_bias={0: 1.0}, seed=6),
    )
    tokens = from_lists([[1], [2, 3], [3, 3, 3], [4] * 5, [5, 1]])
    whole = Sampler(Prompt(tokens=tokens, sampling=samplings))
    logits, depths = random_logits(5, 3, VOCAB), torch.arange(3).expand(5, 3)
    paths = torch.tensor([[ABSENT, ABSENT], [4, ABSENT], [4, 5]]).expand(5, 3, 2)
    rows = torch.arange(5)
    for staying in ([0, 1, 2, 3, 4], [1, 2, 4], [1]):
        whole.keep_rows(torch.searchsorted(rows, torch.tensor(staying)))
        rows = torch.tensor(staying)
        found = whole.scores(logits[rows], depths[rows], paths[rows])
        for place, row in enumerate(staying):
            alone = Sampler(Prompt(tokens=tokens[row : row + 1], sampling=samplings[row : row + 1]))
            one = slice(row, row + 1)
            assert torch.equal(found[place], alone.scores(logits[one], depths[one], paths[one])[0])


def test_processors_need_not_be_hashable() -> None:
    """Guards processors that are ordinary dataclasses."""

    @dataclass
    class Forbid:
        token: int

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)

    samplings = tuple(Sampling(processors=[Forbid(token)]) for token in (2, 3))
    sampler = Sampler(prompt(samplings))
    logits = torch.arange(4.0).expand(2, 1, 4)
    assert sampler.draw(logits, torch.zeros(2, 1, dtype=torch.long)).flatten().tolist() == [3, 2]


def test_settings_that_read_the_text_see_the_drafted_tokens() -> None:
    """Guards the acceptance of drafts under penalties: the second position knows what was drafted for the first."""
    sampling = Sampling(presence_penalty=100.0)
    logits = torch.tensor([[[3.0, 2.0, 1.0]] * 4])
    sampler = Sampler(Prompt(tokens=torch.tensor([[0]]), sampling=(sampling,)))
    assert sampler.candidates(logits, 0, 1).tokens.flatten().tolist() == [0, 1, 2, 0]
    assert sampler.candidates(logits[:, :2], 1, 1, torch.tensor([[0]])).tokens.flatten().tolist() == [1, 2]


def test_a_draft_of_settings_that_read_the_text_tells_how_sure_it_is() -> None:
    """Guards the length policy "confidence", which cuts nothing where a draft does not say how sure it is: every
    position is as sure as it is alone, after the tokens drafted before it."""
    sampling = Sampling(temperature=0.8, frequency_penalty=1.5, seed=3)
    logits = random_logits(1, 3, VOCAB)
    sampler = Sampler(prompt((sampling,), wants_confidence=True))
    found = sampler.candidates(logits, 0, 1)
    assert found.confidence is not None and found.confidence.shape == (1, 3)
    for place in range(3):
        p = sampler.probabilities(logits[:, place, None], found.tokens[:, None, :place, 0])
        torch.testing.assert_close(found.confidence[:, place], p.amax(-1)[:, 0])
        alone = sampler.candidates(logits[:, place, None], place, 1, found.tokens[:, :place, 0])
        assert torch.equal(alone.tokens[:, 0], found.tokens[:, place])


def test_an_answer_that_is_taken_up_again_is_penalized_from_its_beginning() -> None:
    """Guards streams that others have interrupted: what stands at the end of the prompt is a part of the answer, and
    so is what is committed, in every row its own."""
    sampler = Sampler(prompt((Sampling(presence_penalty=9.0),) * 2, answered=(0, 2)))
    logits, depths = torch.zeros(2, 1, VOCAB), torch.zeros(2, 1, dtype=torch.long)
    assert sampler.scores(logits, depths).tolist() == [[[0, 0, 0, 0, 0, 0]], [[0, 0, -9, -9, 0, 0]]]
    draft, path = Draft.chain(torch.tensor([[5], [1]])), torch.tensor([[0], [ABSENT]])
    sampler.commit(Verdict.of(draft, path, torch.tensor([0, 4])))
    assert sampler.scores(logits, depths).tolist() == [[[-9, 0, 0, 0, 0, -9]], [[0, 0, -9, -9, -9, 0]]]
    assert sampler.lengths_B.tolist() == [5, 4]


def test_processors_know_the_end_tokens() -> None:
    """Guards processors that follow a grammar, which has nothing to say after the end."""
    asked: list[list[int]] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.extend(ids.tolist())
        return scores

    sampler = Sampler(prompt((Sampling(processors=[processor]),), eos_ids=frozenset([4])))
    paths = torch.tensor([[[ABSENT], [4], [5]]])
    sampler.scores(random_logits(1, 3, VOCAB), torch.tensor([[0, 1, 1]]), paths)
    assert sorted(asked) == [[1, 2, 3], [1, 2, 3, 5]]


def test_processors_know_the_limit_of_their_row_after_others_have_left() -> None:
    """Guards processors that plan as many tokens as the limit: they are asked about no text beyond it, and about all
    within it, also where the rows before theirs have left."""
    asked: list[list[int]] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.extend(ids.tolist())
        return scores

    sampler = Sampler(prompt((Sampling(processors=[processor]),) * 3, limits=(9, 2, 1)))
    sampler.keep_rows(torch.tensor([1, 2]))
    paths = torch.tensor([[ABSENT, ABSENT], [4, ABSENT], [4, 5]]).expand(2, 3, 2)
    sampler.scores(random_logits(2, 3, VOCAB), torch.arange(3).expand(2, 3), paths)
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
    """Guards against tokens of probability 0 in a draft, and against branches behind side branches where none are."""
    log_probs = torch.tensor([[[-0.1, -torch.inf], [-0.2, -2.0]]])
    candidates = Candidates(tokens=torch.tensor([[[7, 8], [5, 6]]]), log_probs=log_probs, probs=None, confidence=None)
    fixed = assemble(candidates, Tree(paths=((0,), (1,), (0, 1), (1, 0))), aside=0.0)
    assert fixed.tokens.tolist() == [[7, ABSENT, 6, 5]]
    assert fixed.parents.tolist() == [[-1, -1, 0, 1]]
    grown_draft = assemble(candidates, Tree(budget=9), aside=0.5)
    assert sorted(grown_draft.tokens[0].tolist()) == [5, 6, 7]
