"""Weights of rows within their chains, against loops over the chains, and against the lengths whose slopes they are."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paradraft.data.samples import Sample
from paradraft.train.objectives.batch import Drop, TrainingBatch, collate
from paradraft.train.objectives.losses import IGNORED, row_weights
from paradraft.train.objectives.row_loss import RowLoss, loss_of_rows
from paradraft.train.objectives.selection import Selecting
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.objectives.weightings import ChainTable, weighting_of
from tests.conftest import VOCAB, tiny_model

WIDTH, K, ROWS = 6, 5, VOCAB + 8
NAMES = [
    "chain", "chain:power=0.5", "expected_length", "expected_length:by=text:floor=0.5",
    "expected_length:by=siblings:siblings=2", "first_error:boost=1.5:decay=0.7", "valid_prefix",
]  # fmt: skip
GROUPS = [[12, 9], [15], [4]]


def batch_of(groups: list[list[int]], *, k: int = K, r: float = 0.8, seed: int = 0, prompt: int = 3) -> TrainingBatch:
    """Rows of random texts of these lengths; of the longest, some tokens in the middle are no answer."""
    generator = torch.Generator().manual_seed(len(groups))
    samples = [
        [
            Sample(
                tokens=torch.randint(1, VOCAB, (length,), generator=generator).tolist(),
                is_label=[place >= prompt and not (length == 15 and 8 < place < 11) for place in range(length)],
            )
            for length in lengths
        ]
        for lengths in groups
    ]
    seeds = [[torch.Generator().manual_seed(100 * seed + length) for length in lengths] for lengths in groups]
    return collate(samples, Drop(k=k, r=r, r_min=0.2, mask_id=VOCAB + 1), seeds)


def chains_of(batch: TrainingBatch) -> list[list[tuple[int, int] | None]]:
    """The rows, group and index, of each chain by depth; None where there is no label or no row."""
    rows: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    for group, labels in enumerate(batch.labels):
        for row, label in enumerate(labels.tolist()):
            if label != IGNORED:
                place, depth = int(batch.text_indices[group, row]), int(batch.depths[group, row])
                rows.setdefault((group, place - depth), {})[depth] = (group, row)
    return [[own.get(depth) for depth in range(max(own) + 1)] for own in rows.values()]


def by_hand(name: str, base: list[float], gold: list[float], text: list[float], alpha: list[float],
            covered: list[float], right: list[bool]) -> list[float]:  # fmt: skip
    """Weights of the rows of a chain; values are 0 and `right` is False where there is none."""
    kind = name.partition(":")[0]
    weights = []
    for place in range(len(base)):
        if kind == "chain":
            weight = base[place] * math.prod(gold[:place]) ** (0.5 if "power" in name else 1.0)
        elif kind == "expected_length":
            share = text if "text" in name else covered if "siblings" in name else alpha
            if "floor" in name:
                share = [0.5 * each + 0.5 if own else 0.0 for each, own in zip(share, base, strict=True)]
            weight = sum(base[end] * math.prod(share[: end + 1]) for end in range(place, len(base)))
        else:
            first = right.index(False) if False in right else len(base)
            boost, decay = (1.5, 0.7) if kind == "first_error" else (0.0, 0.0)
            factor = 1.0 if place < first else 1 + boost if place == first else decay ** (place - first)
            weight = base[place] * factor
        weights.append(weight)
    return weights


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(tiny_model(1).float(), vocab_size=VOCAB, mask_id=VOCAB + 1)


def case(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = 3 * torch.randn(*batch.tokens.shape, WIDTH, generator=generator)
    return hidden.requires_grad_(), torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()


def losses(  # type: ignore[no-untyped-def]
    batch: TrainingBatch, teacher: Teacher | None, loss: RowLoss, base_K: Tensor, chunk: int
):
    hidden, weight = case(batch)
    found = loss_of_rows(
        hidden, batch, base_K, loss, head=lambda states, _: states @ weight.T, teacher=teacher, chunk=chunk,
        trained=[weight],
    )  # fmt: skip
    found.total.backward()
    return found, hidden.grad, weight.grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 10**6])
def test_weights_equal_loops_over_chains(teacher: Teacher, name: str, chunk: int) -> None:
    """Guards weights of another chain, sample or group; chains cut by chunks; chains that answers end, which no draft
    gets past; and gradients, which treat the weights as constants."""
    batch, base_K = batch_of(GROUPS), torch.tensor([1.0, 0.5, 0.8, 0.3, 0.7])
    loss = RowLoss(kind="acceptance", hard_share=0.25, weighting=weighting_of(name))
    found, of_hidden, of_head = losses(batch, teacher, loss, base_K, chunk)
    hidden, weight = case(batch)
    read = teacher.read(batch.texts)
    expected, total = torch.zeros_like(found.weights), torch.zeros(())
    seen = 0
    for chain in chains_of(batch):
        values: list[list[float]] = [[], [], [], [], []]
        right, of_rows = [], []
        for depth, place in enumerate(chain):
            if place is None:
                for each in values:
                    each.append(0.0)
                right.append(False)
                of_rows.append(None)
                continue
            group, row = place
            logits, label = hidden[group, row] @ weight.T, int(batch.labels[group, row])
            p = teacher.expects(read[group, batch.text_indices[group, row]][None], ROWS)[0].softmax(0)
            q = logits.softmax(0)
            allowed = p > 0
            within = q * allowed / q[allowed].sum()
            alpha = torch.minimum(p, within).sum()
            of_rows.append(-q[allowed].sum().log() - alpha.log() - 0.25 * logits.log_softmax(0)[label])
            covered = p[logits.topk(2).indices].sum()
            for each, value in zip(values, (base_K[depth], p[label], q[label], alpha, covered), strict=True):
                each.append(float(value.detach()))
            right.append(int(logits.argmax()) == label)
        for place, weighs, of_row in zip(chain, by_hand(name, *values, right), of_rows, strict=True):
            if place is not None and of_row is not None:
                expected[place] = weighs
                total = total + weighs * of_row
                seen += 1
    total.backward()
    assert seen == int((batch.labels != IGNORED).sum()) and sum(None in chain for chain in chains_of(batch)) > 0
    torch.testing.assert_close(found.weights, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.total.detach(), total.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_hidden, hidden.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(of_head, weight.grad, rtol=1e-3, atol=1e-5)


def test_rows_are_weighted_by_depth_alone_without_a_weighting() -> None:
    batch, base_K = batch_of(GROUPS), torch.tensor([1.0, 0.5, 0.8, 0.3, 0.7])
    found, *_ = losses(batch, None, RowLoss(kind=None), base_K, 7)
    assert torch.equal(found.weights, base_K[batch.depths] * (batch.labels != IGNORED))


def test_the_first_depth_with_labels_begins_a_chain() -> None:
    """Guards prompt tokens, whose chains begin behind a token without a loss: it must not end them."""
    batch = batch_of([[9]], r=1.0)
    later = replace(batch, labels=batch.labels.masked_fill(batch.depths == 0, IGNORED), first=1)
    loss = RowLoss(kind=None, weighting=weighting_of("expected_length:by=text"))
    found, *_ = losses(later, None, loss, torch.ones(K), 7)
    assert bool((found.weights > 0).eq(later.labels != IGNORED).all())
    none, *_ = losses(replace(later, first=0), None, loss, torch.ones(K), 7)
    assert not none.weights.any(), "the control: there the first token has no row, so no draft gets past it"


def test_acceptance_by_expected_length_has_the_slope_of_the_expected_length() -> None:
    """Guards the algebra of -E[τ], in float64: Σ_m b_m Π_{i≤m} α_i, built by autograd, has the same gradient."""
    generator = torch.Generator().manual_seed(2)
    chains, V = 7, 11
    logits, teacher = (2 * torch.randn(chains * K, V, dtype=torch.float64, generator=generator) for _ in range(2))
    own, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    base_K = torch.tensor([1.0, 0.5, 0.8, 0.3, 0.7], dtype=torch.float64)
    which, depths = torch.arange(chains).repeat_interleave(K), torch.arange(K).repeat(chains)
    loss = RowLoss(kind="acceptance", weighting=weighting_of("expected_length"))
    labels = torch.zeros_like(which)
    table = ChainTable(which, depths, base_K[depths], own.detach(), labels, labels == 0, teacher)
    assert loss.weighting is not None
    weights = table.rows(loss.weighting(table))
    (weights * loss.of(own, labels, teacher)).sum().backward()
    alpha = torch.minimum(plain.softmax(1), teacher.softmax(1)).sum(1).view(chains, K)
    (-(base_K * alpha.cumprod(1)).sum()).backward()
    torch.testing.assert_close(own.grad, plain.grad)


def test_dropped_rows_leave_the_expected_length_unbiased() -> None:
    """Guards COD: averaged within each depth, the rows that are kept stand for those that are dropped; with the mean
    over all rows, the control, they do not."""
    text = 14

    def total(r: float, seed: int, average: str) -> float:
        batch = batch_of([[text]], r=r, seed=seed, prompt=1)
        generator = torch.Generator().manual_seed(1)
        of_places = 3 * torch.randn(text, K, WIDTH, generator=generator)
        head = torch.randn(ROWS, WIDTH, generator=generator)
        base_K = row_weights(batch.labels_by_depth(K), average, torch.ones(K))
        found = loss_of_rows(
            of_places[batch.positions, batch.depths], batch, base_K,
            RowLoss(kind=None, weighting=weighting_of("expected_length:by=text:floor=0.6")),
            head=lambda states, _: states @ head.T, teacher=None, chunk=10**6, trained=[],
        )  # fmt: skip
        return float(found.total)

    for average, is_unbiased in (("per_depth", True), ("token_mean", False)):
        whole = total(1.0, 0, average)
        drawn = torch.tensor([total(0.5, seed, average) for seed in range(400)])
        error = float(drawn.std()) / math.sqrt(len(drawn))
        assert error < 0.02 * whole
        assert (abs(float(drawn.mean()) - whole) < 3 * error) == is_unbiased, average


def test_a_batch_without_labels_has_gradients_that_are_zero() -> None:
    """Guards several processes, which wait for the gradients of all weights: that of a process without labels too."""
    batch = batch_of(GROUPS)
    bare = replace(batch, labels=torch.full_like(batch.labels, IGNORED))
    found, of_hidden, of_head = losses(bare, None, RowLoss(kind=None), torch.ones(K), 7)
    assert not found.weights.any() and not found.right.any()
    assert of_hidden is not None and of_head is not None and not of_hidden.any() and not of_head.any()


def test_a_loss_without_its_teacher_is_refused() -> None:
    batch, weighting = batch_of(GROUPS), weighting_of("chain")
    for loss in (RowLoss(kind="forward_kl"), RowLoss(kind=None, weighting=weighting)):
        with pytest.raises(ValueError, match=r"needs a teacher's probabilities"):
            losses(batch, None, loss, torch.ones(K), 7)


def test_a_selector_decides_what_is_drafted() -> None:
    """Guards the first error: that of the token that is drafted, which a selector's scores choose."""
    batch = batch_of([[9]], r=1.0)
    batch = replace(batch, labels=batch.labels.masked_fill(batch.labels != IGNORED, 5))
    hidden, weight = case(batch)
    likely = torch.zeros(ROWS).index_fill(0, torch.tensor(5), 1.0).index_fill(0, torch.tensor(6), 2.0)

    def weights_with(select: Selecting | None) -> Tensor:
        return loss_of_rows(
            hidden,
            batch,
            torch.ones(K),
            RowLoss(kind=None, weighting=weighting_of("valid_prefix")),
            head=lambda states, _: 0 * states @ weight.T + likely,
            teacher=None,
            chunk=7,
            trained=[weight],
            select=select,
        ).weights

    right = weights_with(lambda read, logits, ids: logits + 1e3 * (ids == 5))
    assert torch.equal(right, (batch.labels != IGNORED).float())
    assert torch.equal(weights_with(None), right * (batch.depths == 0)), "without one, the first token is wrong"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("cat", "weighting=cat: use one of none, chain, expected_length, first_error, valid_prefix"),
        ("chain:power=-1", "weighting=chain:power=-1: power=-1.0: use 0 or more"),
        ("chain:by=text", "weighting=chain:by=text: 'by=text' is no setting=value of it; its settings are power"),
        ("expected_length:by=gold", "by='gold': use acceptance or text or siblings"),
        ("chain:power=nan", "weighting=chain:power=nan: power=nan: use 0 or more"),
        ("first_error:boost=inf", "boost=inf, decay=0.8: use a boost of 0 or more"),
        ("expected_length:floor=2", "weighting=expected_length:floor=2: floor=2.0: use 0 to 1"),
        ("expected_length:siblings=0", "weighting=expected_length:siblings=0: siblings=0: use 1 or more"),
        ("first_error:decay=1.5", "boost=0.0, decay=1.5: use a boost of 0 or more, and a decay of 0 to 1"),
        ("none:power=1", "weighting=none:power=1: use one of none, chain, expected_length, first_error, valid_prefix"),
    ],
)
def test_wrong_names_are_refused(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        weighting_of(name)
