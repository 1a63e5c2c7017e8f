"""The rule `block` against the target's joint distribution, by enumeration, and wrong rules that must be caught."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from paradraft.core import INVALID, Draft, TargetOut, Verdict
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT
from paradraft.verify import block, rejection
from tests.support.decoding import sampler
from tests.support.enumeration import (
    SHAPES,
    VOCAB,
    Drafted,
    Scripted,
    Verify,
    error_of,
    joint_distribution,
    largest_error,
    mean_accepted,
    possible_drafts,
    q_of,
    rounds,
)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_accepts_no_less_than_rejection(shape: str) -> None:
    """Guards the reason for the rule: it accepts more wherever a path has two tokens that are drawn."""
    gain = mean_accepted(block.verify, shape) - mean_accepted(rejection.verify, shape)
    is_deep = shape not in ("one", "three siblings", "ragged")
    assert gain > 0.002 if is_deep else abs(gain) < 1e-12


def test_the_papers_example() -> None:
    """Guards the expectation of Sun et al. 2025, section 2: 11/9 tokens where `rejection` accepts 10/9."""
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    tokens = [[first, second] for first in (0, 1) for second in (0, 1)]
    weights = torch.tensor([q[first] * q[second] for first, second in tokens], dtype=torch.float64)
    p_BMV, probs = torch.tensor([[p] * 3] * 4).double(), torch.tensor([[q] * 2] * 4).double()
    out, draft = TargetOut(logits=p_BMV.log(), hidden={}), Draft.chain(torch.tensor(tokens), probs)
    numbers = (torch.arange(12).double() + 0.5) / 12  # the chances are multiples of 1 / 4
    means = {}
    for rule in (block, rejection):
        lengths = torch.zeros(4, dtype=torch.float64)
        for first in numbers.tolist():
            for second in numbers.tolist():
                chance_BN = torch.tensor([[first, second]] * 4, dtype=torch.float64)
                paths = rule.verify(draft, out, Scripted(p_BMV, chance_BN)).paths
                lengths += torch.tensor(list(map(len, paths))) / 144
        means[rule] = float((weights * lengths).sum())
    assert means[block] == pytest.approx(11 / 9, abs=1e-6) and means[rejection] == pytest.approx(10 / 9, abs=1e-6)


def test_deterministic_tokens_are_accepted_as_by_rejection() -> None:
    """Guards trees that grow: where no token is drawn, both rules accept a path with its probability."""
    for shape in SHAPES:
        drafts = possible_drafts(shape, sampled=False)
        lengths = [
            sum(end.weight * len(end.accepted) for end in rounds(rule.verify, shape, drafts))
            for rule in (block, rejection)
        ]
        assert lengths[0] == pytest.approx(lengths[1], abs=1e-12)


@pytest.mark.parametrize("place", [0, 1])
def test_logits_that_are_no_numbers_end_the_text(place: int) -> None:
    """Guards texts against tokens that nothing said: the path ends before the first such logits, with no token."""
    logits = torch.zeros(2, 3, 5)
    logits[0, place] = torch.nan
    probs = torch.full((2, 2, 5), 0.2).double()
    draft = Draft.chain(torch.tensor([[1, 2], [1, 2]]), probs)
    samplings = Sampling(temperature=1.0), Sampling(temperature=1.0)
    verdict = block.verify(draft, TargetOut(logits=logits, hidden={}), sampler([[1], [1]], samplings, draws="numbers"))
    assert verdict.tokens[0] == [*[1, 2][:place], INVALID]
    assert verdict.tokens[1][:2] == [1, 2] and verdict.tokens[1][2] >= 0


def test_a_draft_of_no_numbers_is_not_accepted() -> None:
    """Guards against token 0 where the draft model's distribution is NaN: the engine names the model."""
    probs = torch.full((1, 2, 5), torch.nan).double()
    draft = Draft.chain(torch.tensor([[INVALID, INVALID]]), probs)
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(9)]
    for sampling in samplings:
        verdict = block.verify(
            draft, TargetOut(logits=torch.zeros(1, 3, 5), hidden={}), sampler([[1]], [sampling], draws="numbers")
        )
        assert verdict.paths == [[]] and verdict.tokens[0][0] >= 0


def test_rows_of_other_shapes_do_not_change_a_row() -> None:
    """Guards batches: rows with other trees, absent nodes and penalties are judged as they are alone."""
    generator = torch.Generator().manual_seed(1)
    accepted = 0
    for seed in range(40):
        parents = [[-1, 0, 1, 2], [-1, -1, 0, 0], [-1, 0, -1, 2]]
        tokens = torch.randint(0, 6, (3, 4), generator=generator)
        tokens[1, 1] = (tokens[1, 0] + 1) % 6
        tokens[2, 2:] = ABSENT
        logits = torch.randn(3, 5, 6, generator=generator)
        probs = (logits[:, [0, 1, 2, 3]] / 2).double().softmax(-1)
        samplings = [Sampling(temperature=1.0, seed=seed + row, frequency_penalty=row / 2) for row in range(3)]
        draft = Draft(tokens=tokens, parents=torch.tensor(parents), probs=probs)
        prompts = [[1, 2, 3], [1, 2], [4]]
        whole = block.verify(draft, TargetOut(logits=logits, hidden={}), sampler(prompts, samplings, draws="numbers"))
        for row in range(3):
            some = slice(row, row + 1)
            one = Draft(tokens=tokens[some], parents=torch.tensor(parents[some]), probs=probs[some])
            alone = block.verify(
                one,
                TargetOut(logits=logits[some], hidden={}),
                sampler(prompts[some], samplings[some], draws="numbers"),
            )
            assert (alone.paths[0], alone.tokens[0]) == (whole.paths[row], whole.tokens[row])
        accepted += sum(map(len, whole.paths))
    assert accepted > 60, "a check in which nothing is accepted shows nothing"


@dataclass(frozen=True)
class Wrong:
    """Block verification of chains, after Alg. 2 of Sun et al. 2025, with one fault."""

    from_first_failure: bool = False
    """Stops at the first token that is not accepted, in place of going on to the last that is."""
    by_tokens: bool = False
    """Accepts by p / q of each token, with the residual of blocks (vllm-ascend#7807)."""
    plain_residual: bool = False
    """Draws the recovered token from max(p - q, 0), without P (vllm-ascend#7807)."""
    no_complement: bool = False
    """Leaves 1 - P out of the chance."""
    one_number: bool = False
    """Tests all tokens with one random number."""
    uncapped: bool = False
    """Lets P grow above 1."""
    late: bool = False
    """Reads p one place too late for P."""
    q_is_one: bool = False
    """Takes 1 for q in P, as code that misses the draft's distributions (vllm-ascend#7603)."""

    def __call__(self, draft: Draft, out: TargetOut, script: Scripted) -> Verdict:
        """Judges each row."""
        rows = [
            self._of_row(*row) for row in zip(*draft.lists, draft.probs, script.p_BMV, script.chance_BN, strict=True)
        ]
        script.left_BV = torch.stack([left for _, left in rows])
        return Verdict.of(draft, [list(range(count)) for count, _ in rows], [0] * len(rows))

    def _of_row(
        self, tokens: list[int], parents: list[int], q_NV: Tensor, p_MV: Tensor, number_N: Tensor
    ) -> tuple[int, Tensor]:
        assert parents == list(range(-1, len(tokens) - 1))
        N, chance, end = len(tokens), 1.0, 0
        left_V = (p_MV[0] - q_NV[0]).clamp(min=0.0)
        for node, token in enumerate(tokens):
            ratio = float(p_MV[node + 1 if self.late else node, token] / (1.0 if self.q_is_one else q_NV[node, token]))
            chance = chance * ratio if self.uncapped else min(chance * ratio, 1.0)
            p_V = p_MV[node + 1]
            rest_V = p_V if node + 1 == N else (chance * p_V - q_NV[node + 1]).clamp(min=0.0)
            total = float(rest_V.sum())
            accepts = (
                chance if node + 1 == N else total / max(total + (0.0 if self.no_complement else 1 - chance), 1e-300)
            )
            accepts = min(ratio, 1.0) if self.by_tokens else accepts
            if float(number_N[0 if self.one_number else node]) < accepts:
                end = node + 1
                is_plain = self.plain_residual and node + 1 < N
                left_V = (p_V - q_NV[node + 1]).clamp(min=0.0) if is_plain else rest_V
            elif self.from_first_failure or self.by_tokens:
                break
        return end, left_V / left_V.sum()


def test_the_algorithm_of_the_paper_is_the_rule() -> None:
    """Control of the wrong rules: without a fault it is exact, and accepts as many."""
    assert largest_error(Wrong(), "chain", sampled=True) < 1e-12
    assert mean_accepted(Wrong(), "chain") == pytest.approx(mean_accepted(block.verify, "chain"), abs=1e-12)


def shared_draws() -> list[Drafted]:
    """Drafts of the tree in which the children of both siblings hold the same token, drawn once."""
    q, drafts = torch.tensor(q_of(())), []
    for first in range(VOCAB):
        for second in {*range(VOCAB)} - {first}:
            for below in range(VOCAB):
                without = q.double().index_fill(0, torch.tensor([first]), 0.0)
                without = without / without.sum()
                weight = float(q[first] * without[second] * q[below])
                probs = [q.tolist(), without.tolist(), q.tolist(), q.tolist()]
                drafts.append(Drafted([first, second, below, below], weight, probs))
    return [draft for draft in drafts if draft.weight > 0]


def test_nodes_that_share_a_draw_are_caught() -> None:
    """Control: this rule rejects a node after a look below it, so draws must not be shared; `rejection` allows it."""
    errors = [error_of(joint_distribution(rounds(rule.verify, "tree", shared_draws()))) for rule in (rejection, block)]
    assert errors[0] < 1e-6 and errors[1] > 1e-3


def siblings_before_residual(draft: Draft, out: TargetOut, script: Scripted) -> Verdict:
    """Tries all children with the chance P of before the first rejection."""
    left, block._chance_left = block._chance_left, lambda chance_B, total_B: chance_B
    try:
        return block.verify(draft, out, script)
    finally:
        block._chance_left = left


def root_first(draft: Draft, out: TargetOut, script: Scripted) -> Verdict:
    """Tries nodes in the order of their indices."""
    turns, block._turns = block._turns, lambda children: [len(children), *range(len(children) - 1)]
    try:
        return block.verify(draft, out, script)
    finally:
        block._turns = turns


@pytest.mark.parametrize(
    ("wrong", "shape"),
    [
        *[(Wrong(**{name: True}), "chain") for name in Wrong.__dataclass_fields__],
        (siblings_before_residual, "siblings"),
        (siblings_before_residual, "tree"),
        (root_first, "chain"),
        (root_first, "tree"),
    ],
)
def test_wrong_rules_are_caught(wrong: Verify, shape: str) -> None:
    """Control: an enumeration that these rules pass would not guard losslessness."""
    assert largest_error(wrong, shape, sampled=True) > 1e-3
