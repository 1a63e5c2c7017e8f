from __future__ import annotations

import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paradraft.core import INVALID
from paradraft.sampling.distribution import best_token, filtered_logits, penalized_logits, probabilities
from paradraft.sampling_params import LogitsProcessor, Sampling
from paradraft.tree import ABSENT
from tests.support.drawing import draw


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int, z: float = 4.753) -> float:
    """Wilson & Hilferty 1931; exceeded with probability 1e-6 at z = 4.753."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6, top_k=5, seed=3),
        Sampling(temperature=1.5, top_p=0.7, seed=-4),
    ],
)
def test_draws_have_the_distribution_p(settings: Sampling) -> None:
    """Guards losslessness itself: draws over many positions follow p (chi-square, false alarm 1e-6)."""
    logits = random_logits(1, 1, 9)
    p = probabilities(logits, settings)[0, 0].double()
    tokens = draw(logits.expand(1, 40_000, 9), torch.arange(40_000)[None], settings)
    counts = torch.bincount(tokens[0], minlength=9).double()
    possible = p > 0
    assert counts[~possible].sum() == 0
    assert chi_square(counts[possible], p[possible]) < chi_square_limit(int(possible.sum()) - 1)


def test_chi_square_sees_a_wrong_distribution() -> None:
    """Control of the test above: draws at temperature 1.1 must not pass for draws at temperature 1."""
    logits = random_logits(1, 1, 9)
    p = probabilities(logits, Sampling(temperature=1.0))[0, 0]
    tokens = draw(logits.expand(1, 40_000, 9), torch.arange(40_000)[None], Sampling(temperature=1.1))
    assert chi_square(torch.bincount(tokens[0], minlength=9).double(), p) > chi_square_limit(8)


def test_draws_over_seeds_have_the_distribution_p() -> None:
    """Guards against seeds that share their numbers: the first token over 2000 seeds (false alarm 1e-6)."""
    logits = random_logits(1, 1, 6)
    p = probabilities(logits, Sampling(temperature=1.0))[0, 0]
    tokens = [draw(logits, torch.tensor([[7]]), Sampling(temperature=1.0, seed=seed)).item() for seed in range(2000)]
    counts = torch.bincount(torch.tensor(tokens), minlength=6).double()
    assert chi_square(counts, p) < chi_square_limit(5)


@pytest.mark.parametrize("k", [1, 2, 7, 30, 50])
def test_top_k_equals_transformers(k: int) -> None:
    """Guards against another treatment of ties or of k beyond the vocabulary than users know."""
    logits = random_logits(4, 30).round(decimals=0)  # many ties
    expected = TopKLogitsWarper(top_k=k)(None, logits / 0.7)
    assert torch.equal(filtered_logits(logits[None], Sampling(temperature=0.7, top_k=k))[0], expected)


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_equals_transformers(p: float) -> None:
    """Guards against dropping the token that crosses p, or every token when the first already crosses it."""
    logits = random_logits(20, 30)
    expected = TopPLogitsWarper(top_p=p)(None, logits / 1.3)
    assert torch.equal(filtered_logits(logits[None], Sampling(temperature=1.3, top_p=p))[0], expected)


def test_top_p_that_is_reached_exactly_takes_no_more() -> None:
    """Guards the smallest nucleus: one of two equal tokens reaches a half, as in `transformers`."""
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]], dtype=torch.float64)
    found = filtered_logits(logits, Sampling(temperature=1.0, top_p=0.5))
    assert found.tolist() == [[[0.0, -torch.inf, -torch.inf]]]


def test_top_k_and_top_p_apply_in_the_order_of_transformers() -> None:
    """Guards against top-p computed before top-k: p is a share of what top-k left."""
    logits = random_logits(20, 30)
    expected = TopPLogitsWarper(top_p=0.8)(None, TopKLogitsWarper(top_k=6)(None, logits / 0.9))
    assert torch.equal(filtered_logits(logits[None], Sampling(temperature=0.9, top_k=6, top_p=0.8))[0], expected)


@pytest.mark.parametrize("p", [1e-6, 0.05, 0.5, 1.0])
def test_min_p_equals_transformers(p: float) -> None:
    """Guards against a share of 1 instead of a share of the likeliest token's probability."""
    logits = random_logits(20, 30)
    expected = MinPLogitsWarper(min_p=p)(None, logits / 1.3)
    assert torch.equal(filtered_logits(logits[None], Sampling(temperature=1.3, min_p=p))[0], expected)


TEXTS = torch.tensor([[[3, 3, 5, ABSENT, 0, 5], [3, 3, 5, ABSENT, ABSENT, 1]], [[2, ABSENT, 4, 2, ABSENT, ABSENT]] * 2])
"""Two rows of two positions; of row 0 two tokens are the prompt, of row 1 one."""
PROMPT_LENGTHS = torch.tensor([2, 1])


def one_by_one(processor: object, logits: torch.Tensor) -> torch.Tensor:
    """What a processor of `transformers` makes of every position with its own text."""
    found = logits.clone()
    for row in range(2):
        for place in range(2):
            text = TEXTS[row, place]
            found[row, place] = processor(text[text != ABSENT][None], logits[row, place][None].clone())[0]
    return found


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0, 3.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    """Guards the sign (negative logits are multiplied), repeated tokens, filling taken for a token, and token 0."""
    logits = random_logits(2, 2, 7)
    found = penalized_logits(logits, Sampling(repetition_penalty=penalty), TEXTS, PROMPT_LENGTHS)
    assert torch.equal(found, one_by_one(RepetitionPenaltyLogitsProcessor(penalty), logits))


def test_presence_and_frequency_count_the_answer_alone() -> None:
    """Guards against penalties for what the prompt says, and against counting a token once."""
    logits = torch.zeros(2, 2, 7, dtype=torch.float64)
    sampling = Sampling(presence_penalty=10.0, frequency_penalty=1.0)
    found = -penalized_logits(logits, sampling, TEXTS, PROMPT_LENGTHS)
    assert found.tolist() == [
        [[11, 0, 0, 0, 0, 12, 0], [0, 11, 0, 0, 0, 11, 0]],
        [[0, 0, 11, 0, 11, 0, 0], [0, 0, 11, 0, 11, 0, 0]],
    ]


def test_processors_of_transformers_see_the_text_of_each_position() -> None:
    """Guards `LogitsProcessorList`: its members get the tokens before every position, in order, without filling."""
    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(1), RepetitionPenaltyLogitsProcessor(1.5)])
    logits = random_logits(2, 2, 7)
    found = penalized_logits(logits, Sampling(processors=processors), TEXTS, PROMPT_LENGTHS)
    assert torch.equal(found, one_by_one(processors, logits))
    assert found.isinf().sum(-1).tolist() == [[3, 3], [2, 2]]


def test_processors_are_not_asked_about_texts_after_the_end() -> None:
    """Guards processors that follow a grammar, or a plan of as many tokens as the limit: decoding never comes to a text
    that goes on after an end token or the limit. An end token in the prompt is no end."""
    seen = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.extend(ids.tolist())
        return scores + 1

    logits = torch.zeros(2, 3, 7)
    texts = [[[4, 3], [4, 5], [4, 5]], [[ABSENT, 4], [3, ABSENT], [5, 6]]]
    texts_BNT = torch.tensor([[[4, 3, *text] for text in texts[0]], [[4, 6, *text] for text in texts[1]]])
    found = penalized_logits(
        logits,
        Sampling(processors=[processor]),
        texts_BNT,
        torch.tensor([2, 1]),
        eos_ids=frozenset([3, 9]),
        limits_B=torch.tensor([3, 3]),
    )
    assert sorted(seen) == [[4, 3, 4, 5], [4, 3, 4, 5], [4, 6, 4]]
    assert found[..., 0].tolist() == [[0, 1, 1], [1, 0, 0]]


def test_bias_comes_first() -> None:
    """Guards the order of the settings, and the argument, which must not be changed in place."""
    logits = random_logits(2, 2, 7)
    kept = logits.clone()
    sampling = Sampling(logit_bias={3: 1.5, 0: float("-inf")}, repetition_penalty=2.0)
    biased = logits.clone()
    biased[..., 3] += 1.5
    biased[..., 0] = -torch.inf
    expected = penalized_logits(biased, Sampling(repetition_penalty=2.0), TEXTS, PROMPT_LENGTHS)
    assert torch.equal(penalized_logits(logits, sampling, TEXTS, PROMPT_LENGTHS), expected)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_bias_is_added_in_the_precision_of_the_logits(dtype: torch.dtype) -> None:
    """Guards near-ties: 0.1 in float64 is not 0.1 in float32, and bfloat16 would lose most of a bias."""
    logits = torch.full((1, 1, 3), 8.0, dtype=dtype)
    found = penalized_logits(logits, Sampling(logit_bias={1: 0.1}), TEXTS[:1, :1], PROMPT_LENGTHS[:1])
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(found, torch.tensor([[[8.0, torch.tensor(8.0, dtype=kind) + 0.1, 8.0]]], dtype=kind))
    assert penalized_logits(logits, Sampling(), TEXTS[:1, :1], PROMPT_LENGTHS[:1]).dtype == kind


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_processor_may_compute_in_another_dtype(dtype: torch.dtype) -> None:
    """Guards processors that hand back what they have computed in float64, or in half precision."""
    sampling = Sampling(processors=[lambda ids, scores: (scores + 1).to(dtype)])
    for given in (torch.float32, torch.float64):
        found = penalized_logits(torch.zeros(2, 2, 7, dtype=given), sampling, TEXTS, PROMPT_LENGTHS)
        assert torch.equal(found, torch.ones(2, 2, 7, dtype=given))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda ids, scores: scores[0], r"\(7,\)"),
        (lambda ids, scores: scores[:1], r"\(1, 7\)"),
        (lambda ids, scores: scores[:, :1], r"\(\d, 1\)"),
        (lambda ids, scores: scores[None], r"\(1, \d, 7\)"),
        (lambda ids, scores: scores.sum(), r"\(\)"),
        (lambda ids, scores: None, "None"),
        (lambda ids, scores: scores.tolist(), r"\[\["),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_processor_returns_logits_of_all_its_texts(wrong: LogitsProcessor, named: str, place: int) -> None:
    """Guards the text from processors that score one row: torch had filled all rows with it, of other requests and of
    other branches of a tree, so that the greedy text was not that of plain decoding."""
    processors = [lambda ids, scores: scores] * place + [wrong, lambda ids, scores: torch.zeros(len(ids), 7)]
    texts = torch.ones(2, 1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=f"a processor returned .*{named}.*: return .* \\(2, 7\\)"):
        penalized_logits(random_logits(2, 1, 7), Sampling(processors=processors), texts, torch.tensor([2, 2]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_position_without_numbers_spoils_no_other(bad: float) -> None:
    """Guards the other positions of a batch, and against a token that is chosen where none can be."""
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.8, min_p=0.01)
    logits = random_logits(2, 3, 7)
    spoilt = logits.clone()
    spoilt[0, 1, slice(None) if bad == -torch.inf else slice(2, 3)] = bad
    for function in (filtered_logits, probabilities):
        expected, found = function(logits, sampling), function(spoilt, sampling)
        expected[0, 1] = torch.nan
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    certain = probabilities(spoilt, Sampling())
    assert certain[0, 1].isnan().all() and certain.isnan().sum() == 7
    assert torch.equal(certain[1], probabilities(logits, Sampling())[1])


def test_top_p_of_one_keeps_all_tokens() -> None:
    """Guards tokens so unlikely that the others' probabilities add up to 1, as numbers of a computer do."""
    logits = torch.tensor([[[0.0, -60.0, -1.0]]], dtype=torch.float64)
    assert torch.equal(filtered_logits(logits, Sampling(temperature=1.0, top_p=1.0)), logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_best_token_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    """Guards the two ways to it, NumPy's and torch's: of equal tokens the first, and none where the largest score is
    no finite number."""
    inf, nan = torch.inf, torch.nan
    scores = torch.tensor(
        [
            [[0.0, 2.0, 2.0, 1.0], [3.0, -inf, 1.0, 3.0], [-inf, -inf, -1.0, -inf]],
            [[-inf, -inf, -inf, -inf], [0.0, nan, 9.0, -inf], [0.0, 1.0, inf, -inf]],
        ],
        dtype=dtype,
    )
    found = best_token(scores)
    assert found.dtype == torch.long
    assert found.tolist() == [[1, 0, 2], [INVALID, INVALID, INVALID]]
    nothing = best_token(scores[:, :0])
    assert nothing.shape == (2, 0) and nothing.dtype == torch.long


def test_temperature_zero_is_argmax() -> None:
    """Guards against noise or top-p leaking into greedy decoding."""
    logits = random_logits(2, 50, 12)
    greedy = Sampling(temperature=0.0, top_p=0.5, top_k=2, seed=9)
    assert torch.equal(draw(logits, torch.arange(100).view(2, 50), greedy), logits.argmax(-1))
    assert torch.equal(probabilities(logits, greedy).argmax(-1), logits.argmax(-1))
    assert torch.equal(probabilities(logits, greedy).sum(-1), torch.ones(2, 50))


def test_low_precision_is_sampled_in_float32() -> None:
    """Guards against a softmax in bfloat16, which loses the tail of the distribution."""
    logits = random_logits(1, 1, 8).bfloat16()
    assert filtered_logits(logits, Sampling(temperature=0.7)).dtype == torch.float32
    assert torch.equal(
        filtered_logits(logits, Sampling(temperature=0.7)), filtered_logits(logits.float(), Sampling(temperature=0.7))
    )


def same_text_in_any_number_of_passes(settings: Sampling, position_of_step: int) -> bool:
    """Whether drawing 40 positions at once equals drawing them in passes of 4."""
    logits = random_logits(1, 40, 12, seed=5)
    positions = torch.arange(40)[None]
    at_once = draw(logits, positions, settings)
    by_step = [
        draw(logits[:, start : start + 4], positions[:, start : start + 4] - position_of_step * start, settings)
        for start in range(0, 40, 4)
    ]
    return torch.equal(torch.cat(by_step, dim=1), at_once)


def test_noise_is_tied_to_the_position_and_not_to_the_step() -> None:
    """Guards the promise of the same text in any number of passes; noise that restarts each step must be caught."""
    settings = Sampling(temperature=1.0, seed=2)
    assert same_text_in_any_number_of_passes(settings, position_of_step=0)
    assert not same_text_in_any_number_of_passes(settings, position_of_step=1), "the control must fail"
