"""The gain is a contract too: a drafter that is its target is always right, in every shape and with all settings.

A drafter that guesses worse than it could changes no token, so no test of losslessness sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paradraft.decode.generation import Generation
from paradraft.decode.stats import Clock, RoundOutput
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.drafters.pard import PardDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.models.target import Target
from paradraft.sampling.candidates import Candidates
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree
from paradraft.verify import rule_class, rule_names
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.contract.test_random_configurations import never_twice
from tests.support.decoding import Varying, requests, stepped, texts
from tests.support.judges import with_settings
from tests.support.random_models import random_model

OPENINGS = [1, 2, 3, 4]
"""Tokens that only prompts contain; what follows is a function of them and of the position."""
MASK, MASKS = VOCAB + 4, 3
PROMPTS = [[1], [2, 9, 4, 30, 7], [3, 1, 5], [1, 9, 3, 9, 9, 1, 3, 9, 9, 9, 9, 9]]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.3, top_k=12, seed=2),
    Sampling(temperature=1.0, top_p=0.8, seed=-3),
    Sampling(temperature=0.9, min_p=0.02, repetition_penalty=1.4, seed=4),
    Sampling(presence_penalty=2.0, frequency_penalty=1.0),
    Sampling(temperature=1.5, frequency_penalty=0.5, processors=(never_twice,), seed=5),
    Sampling(temperature=0.8, logit_bias={20: 2.0, 21: -torch.inf}, processors=(never_twice,), top_k=20, seed=6),
]
FIXED = Tree(paths=((0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)))
SHAPES = {"chain": None, "grown": Tree(budget=12), "small": Tree(budget=3), "fixed": FIXED}


def lm_of(model: torch.nn.Module, *, compiled: bool) -> CausalLM:
    return CausalLM(model, vocab_size=VOCAB, compiled=None if compiled else False, width=24)


def autoregressive(compiled: bool) -> tuple[Target, AutoregressiveDrafter]:
    """A small model that drafts for itself."""
    model = tiny_model(1).float() if compiled else tiny_model(1)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    target = Target(lm_of(model, compiled=compiled), tiny_tokenizer())
    return target, AutoregressiveDrafter(lm_of(model, compiled=compiled))


def pard(compiled: bool) -> tuple[Target, PardDrafter]:
    """A model whose masks predict as well as the tokens in their places: it hears no token but those of `OPENINGS`.

    All other tokens and the masks have one embedding, so it tells positions apart by how far they are from the
    openings. What is no mask and stands beside the masks has an embedding of its own.
    """
    model = random_model("llama", dtype=torch.float32 if compiled else torch.float64)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding *= 3.0
        alike = [*(set(range(VOCAB)) - set(OPENINGS)), *range(MASK, MASK + MASKS)]
        embedding[alike] = embedding[5].clone()
    target, drafter = Target(lm_of(model, compiled=compiled), tiny_tokenizer()), lm_of(model, compiled=compiled)
    for token in OPENINGS:
        target.lm.forbid([token])
        drafter.forbid([token])
    return target, PardDrafter(drafter, MASK, MASKS)


Pair = tuple[Target, AutoregressiveDrafter | PardDrafter]
PERFECT = {"autoregressive": autoregressive, "pard": pard}


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "compiled"])
def pairs(request: pytest.FixtureRequest) -> dict[str, Pair]:
    return {name: build(request.param) for name, build in PERFECT.items()}


class FairClock(Clock):
    """Says that drafting costs next to nothing, on any machine."""

    def lap(self, name: str) -> None:
        super().lap(name)
        self.last_s = {"prefill": 0.0, "draft": 0.01, "verify": 1.0, "other": 0.0}


def rounds_of(
    engine: Engine, prompts: list[list[int]], samplings: list[Sampling], limits: list[int]
) -> list[RoundOutput]:
    """All rounds of a batch."""
    batch = engine.new_batch()
    batch.join(list(map(Generation, requests(prompts, samplings, limits, eos_ids=engine.target.eos_ids))))
    batch.clock = FairClock()
    return stepped(batch, lambda: batch.is_finished)


def share_accepted(steps: list[RoundOutput]) -> float:
    """Of all drafted depths, the share that was accepted; 1 only if every draft was accepted down to its deepest."""
    assert all(a <= d for step in steps for a, d in zip(step.accepted, step.drafted, strict=True))
    return sum(sum(step.accepted) for step in steps) / sum(sum(step.drafted) for step in steps)


@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PERFECT)
def test_everything_is_accepted(pairs: dict[str, Pair], name: str, shape: str, rule: str, tmp_path: Path) -> None:
    """Guards the gain where the text shows nothing: noise of another position, penalties that do not see the draft, a
    mask that is none, q that is not p. In one batch, whose rows differ in all they can and end at different times."""
    tree = SHAPES[shape]
    # Under the rejection rule a tree that grows holds the likeliest tokens, so not always the one that is drawn.
    always = rule_class(rule).draws == "noise" or tree is None or tree.budget is None
    rule = with_settings(rule, tmp_path, pairs[name][0].lm.model.config.hidden_size)
    samplings = [sampling for sampling in SAMPLINGS if always or sampling.is_greedy]
    engine = Engine(*pairs[name], Speculation(k=4, tree=tree, verify=rule, lengths="fixed"))
    limits = [16, 9, 2, 1, 13, 11, 16, 6][: len(samplings)]
    steps = rounds_of(engine, (PROMPTS * 2)[: len(samplings)], samplings, limits)
    assert share_accepted(steps) == 1.0
    assert max(max(step.drafted) for step in steps) >= 2
    assert steps[0].nodes[0] == (4 if tree is None else tree.nodes), "the room of a tree is used"
    if shape in ("chain", "fixed"):
        assert steps[0].drafted == [min(4, limit - 1) for limit in limits]
        assert len(steps) == -(-max(limits) // 5)


@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("k", [1, 2, 5, 9])
@pytest.mark.parametrize("name", PERFECT)
def test_everything_is_accepted_at_any_length(
    pairs: dict[str, Pair], name: str, k: int, rule: str, tmp_path: Path
) -> None:
    """Guards masks that are counted wrongly, which is not seen while K is small, and what a round leaves for the next:
    one row alone."""
    rule = with_settings(rule, tmp_path, pairs[name][0].lm.model.config.hidden_size)
    steps = rounds_of(
        Engine(*pairs[name], Speculation(k=k, verify=rule, lengths="fixed")), PROMPTS[1:2], SAMPLINGS[1:2], [31]
    )
    assert share_accepted(steps) == 1.0
    assert [step.drafted[0] for step in steps[:-1]] == [k] * (30 // (k + 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PERFECT)
def test_everything_is_accepted_after_rounds_without_drafts(pairs: dict[str, Pair], name: str, shape: str) -> None:
    """Guards what a drafter has to catch up with: rows that draft again after some rounds, each as deep as it is asked,
    have all of it accepted at once."""
    engine = Engine(*pairs[name], Speculation(k=4, tree=SHAPES[shape], lengths="fixed"))
    batch = engine.new_batch(lengths=Varying(4))
    batch.join(list(map(Generation, requests(PROMPTS, SAMPLINGS[:4], [40] * 4, eos_ids=engine.target.eos_ids))))
    steps = stepped(batch, lambda: batch.is_finished)
    assert share_accepted(steps) == 1.0
    assert len({drafted for step in steps for drafted in step.drafted}) > 2


@pytest.mark.parametrize("lengths", ["heuristic", "expected", "confidence"])
@pytest.mark.parametrize("name", PERFECT)
def test_policies_grow_to_k(pairs: dict[str, Pair], name: str, lengths: str) -> None:
    """Guards the speed of a drafter that deserves to be trusted: every policy comes to ask it for all K tokens, in
    every row."""
    engine = Engine(*pairs[name], Speculation(k=4, lengths=lengths))
    # Cold enough to be above the threshold of "confidence" everywhere.
    samplings = [replace(sampling, temperature=0.02) for sampling in SAMPLINGS[:4]]
    rounds_of(engine, PROMPTS, samplings, [60] * 4)  # "expected" first learns what passes cost, and remembers it
    steps = rounds_of(engine, PROMPTS, samplings, [60] * 4)
    assert share_accepted(steps) == 1.0
    late = [drafted for step in steps[len(steps) // 4 : -1] for drafted in step.drafted]
    assert len(late) > 30 and late.count(4) >= 0.95 * len(late)


def later_noise(candidates: Callable[..., Candidates]) -> Callable[..., Candidates]:
    """Draws with the noise of the next position."""
    return lambda self, logits, depth, *more: candidates(self, logits, depth + 1, *more)


def forgotten_path(candidates: Callable[..., Candidates]) -> Callable[..., Candidates]:
    """Does not show penalties and processors what was drafted before."""

    def wrong(self: Sampler, logits: torch.Tensor, depth: int, number: int, path: object = None) -> Candidates:
        parts = [candidates(self, logits[:, i : i + 1], depth + i, number) for i in range(logits.shape[1])]
        return Candidates(
            tokens=torch.cat([part.tokens for part in parts], 1),
            log_probs=torch.cat([part.log_probs for part in parts], 1),
            probs=None,
            confidence=None,
        )

    return wrong


@pytest.mark.parametrize("name", PERFECT)
@pytest.mark.parametrize("wrong", [later_noise, forgotten_path])
def test_wrong_drafters_are_caught(name: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a contract that these drafters keep would not guard the gain."""
    monkeypatch.setattr(Sampler, "candidates", wrong(Sampler.candidates))
    engine, samplings = Engine(*PERFECT[name](False), Speculation(k=4, lengths="fixed")), SAMPLINGS[-4:]
    assert share_accepted(rounds_of(engine, PROMPTS, samplings, [20] * 4)) < 1.0


@pytest.mark.parametrize(("mask", "masks"), [(MASK - 1, MASKS), (MASK, MASKS + 1)])
def test_wrong_masks_are_caught(mask: int, masks: int) -> None:
    """Control of the model whose masks are perfect: the ids beside them are not."""
    target, drafter = pard(False)
    engine = Engine(target, PardDrafter(drafter.lm, mask, masks), Speculation(k=6, lengths="fixed"))
    assert share_accepted(rounds_of(engine, PROMPTS, SAMPLINGS[:4], [20] * 4)) < 0.9


@pytest.mark.parametrize("name", PERFECT)
def test_the_text_is_not_always_the_same_token(name: str) -> None:
    """Control of the models: a target that always says the same is guessed by any drafter."""
    steps = rounds_of(
        Engine(*PERFECT[name](False), Speculation(k=4, lengths="fixed")), PROMPTS, [Sampling()] * 4, [40] * 4
    )
    for tokens in texts(steps).values():
        assert len(set(tokens)) >= 3, tokens
