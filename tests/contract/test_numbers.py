"""Logits that are not numbers: an error with a sentence, and only for the texts that they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paradraft.drafters.ngram import Config, NgramDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import LogitsProcessor, Sampling
from paradraft.tree import ABSENT, Tree
from tests.support.decoding import empty_rows
from tests.support.random_models import random_model

RUNTIMES = [Runtime(dtype="float64", compiled=False), Runtime(dtype="float32")]
"""By torch, and in C++."""


def engine(family: Path, runtime: Runtime, **settings: object) -> Engine:
    return load(str(family / "target"), drafter="pard", draft=str(family / "pard"), k=4, runtime=runtime, **settings)


def poison(lm: CausalLM, token: int, value: float) -> None:
    """Gives a token an embedding that is no number, in the model and in what was copied from it; its logits stay."""
    model = lm.model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = value
    compiled = None if lm.is_native else False
    lm.__dict__.update(vars(CausalLM(model, vocab_size=lm.vocab_size, capacity=lm.capacity, compiled=compiled)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_a_text_does_not_see_cannot_reach_it(dtype: torch.dtype, value: float) -> None:
    """Guards a text against a rejected guess whose states are NaN: attention gave its values the weight 0, and 0 times
    NaN is NaN. In the same pass, in later passes over the same slots, and beside it in a batch."""
    clean, poisoned = (CausalLM(random_model().to(dtype), vocab_size=60, compiled=False) for _ in range(2))
    poison(poisoned, 7, value)
    for lm in (clean, poisoned):
        empty_rows(lm, 2)
    text = torch.tensor([[1, 2, 3, 4], [5, 6, 8, 9]])
    guesses, parents = torch.tensor([[10, 7, 11], [12, 13, ABSENT]]), torch.tensor([[-1, -1, 0], [-1, 0, 1]])
    for _ in range(3):
        found, expected = [], []
        for lm, logits in ((poisoned, found), (clean, expected)):
            logits.append(lm.forward(text).logits)
            lm.cache.advance([4, 4])
            logits.append(lm.forward(guesses, parents).logits[:, [0, 2]])
            lm.cache.advance([0, 0])
            logits.append(lm.forward(torch.tensor([[20], [21]])).logits)
            lm.cache.advance([1, 1])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        assert poisoned.forward(guesses, parents).logits[0, 1].isnan().all()
        poisoned.cache.advance([0, 0])


@pytest.mark.parametrize("runtime", RUNTIMES, ids=["torch", "C++"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"verify": "rejection"}, {"verify": "block"}, {"tree": Tree(budget=6)}],
    ids=["match", "rejection", "block", "tree"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_that_met_nan_says_so_and_goes_on(
    family: Path, runtime: Runtime, settings: dict[str, object], temperature: float
) -> None:
    """Guards against token 0 where there is none to choose, and against an engine whose cache stays full of NaN."""
    drafted = engine(family, runtime, **settings)
    sampling = Sampling(temperature=temperature, top_p=0.9, seed=1)
    before = drafted.generate("abc", max_new_tokens=8, sampling=sampling).tokens
    bad = drafted.target.tokenizer("z", add_special_tokens=False)["input_ids"][0]
    unused = bad not in before
    poison(drafted.target.lm, bad, torch.nan)
    with pytest.raises(ValueError, match=r"target's largest logit is NaN|states are not numbers"):
        drafted.generate("az", max_new_tokens=8, sampling=sampling)
    if unused:
        assert drafted.generate("abc", max_new_tokens=8, sampling=sampling).tokens == before


@pytest.mark.parametrize("runtime", RUNTIMES, ids=["torch", "C++"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"verify": "rejection"}, {"verify": "block"}, {"tree": Tree(budget=6)}],
    ids=["match", "rejection", "block", "tree"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_of_nan_is_named(
    family: Path, runtime: Runtime, settings: dict[str, object], temperature: float
) -> None:
    """Guards against a damaged drafter that only makes everything slow. Lengths are fixed: a drafter as large as its
    target may rightly draft nothing in eight tokens."""
    drafted = engine(family, runtime, lengths="fixed", **settings)
    bad = drafted.target.tokenizer("z", add_special_tokens=False)["input_ids"][0]
    poison(drafted.drafter.lm, bad, torch.nan)
    with pytest.raises(ValueError, match=r"draft model's largest logit is NaN|states are not numbers"):
        drafted.generate("abcz", max_new_tokens=8, sampling=Sampling(temperature=temperature, seed=1))


@pytest.mark.parametrize("runtime", RUNTIMES, ids=["torch", "C++"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
def test_a_processor_that_forbids_every_token(family: Path, runtime: Runtime, temperature: float, verify: str) -> None:
    """Guards against token 0, which is what the argmax of nothing but -inf gives."""
    target = load(str(family / "target"), runtime=runtime).target
    drafted = Engine(target, NgramDrafter(Config()), Speculation(k=3, verify=verify, lengths="fixed"))
    sampling = Sampling(temperature=temperature, processors=[lambda ids, scores: torch.full_like(scores, -torch.inf)])
    with pytest.raises(ValueError, match="forbids every token"):
        drafted.generate("abcabcabc", max_new_tokens=8, sampling=sampling)


def forbids_after(token: int) -> LogitsProcessor:
    """A processor that knows no way on after a token of the answer."""

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert int(ids.min()) >= 0, "processors are asked about tokens only"
        return scores.masked_fill((ids[:, 1:] == token).any(1, keepdim=True), -torch.inf)

    return process


@pytest.mark.parametrize(
    ("drafter", "runtime"),
    [
        pytest.param("autoregressive", RUNTIMES[0], marks=pytest.mark.slow),
        ("pard", RUNTIMES[0]),
        ("autoregressive", RUNTIMES[1]),
        ("pard", RUNTIMES[1]),
    ],
    ids=["autoregressive-torch", "pard-torch", "autoregressive-C++", "pard-C++"],
)
def test_guesses_may_lead_where_no_token_is_left(family: Path, runtime: Runtime, drafter: str) -> None:
    """Guards constraints with dead ends: the drafter goes into one where the target does not, or after the stop string
    that ends the text. In a batch, rows that have ended go on beside the others."""
    folder = str(family / "pard")
    drafted = load(str(family / "target"), drafter=drafter, draft=folder, k=4, runtime=runtime, lengths="fixed")
    plain = load(str(family / "target"), runtime=runtime)
    prompts = ["a", "b", "c", "d", "e", "f"]
    free = [answer.tokens for answer in plain.generate(prompts, max_new_tokens=12)]
    ends = free[0][3]
    stop = drafted.target.tokenizer.decode([ends])
    for token in {ends, 7, 20, 33}:
        samplings = [Sampling(temperature=0.5, seed=seed, processors=[forbids_after(token)]) for seed in range(6)]
        for prompt, sampling in zip(prompts, samplings, strict=True):
            settings = {"max_new_tokens": 12, "sampling": sampling, "stop": stop}
            try:
                expected = plain.generate(prompt, **settings).tokens
            except ValueError:
                with pytest.raises(ValueError, match=r"target's .* forbids every token"):
                    drafted.generate(prompt, **settings)
            else:
                assert drafted.generate(prompt, **settings).tokens == expected
    sampling = Sampling(processors=[forbids_after(ends)])
    together = drafted.generate(prompts, max_new_tokens=12, sampling=[sampling] + [Sampling()] * 5, stop=stop)
    assert together[0].finish_reason == "stop"
    alone = plain.generate(prompts, max_new_tokens=12, stop=stop)
    assert [answer.tokens for answer in together[1:]] == [answer.tokens for answer in alone[1:]]
