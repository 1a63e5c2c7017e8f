"""Labels against plain decoding, states against one pass over the text, and a fit that finds what is there."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest
import torch

from paradraft import load
from paradraft.core import Draft, Request
from paradraft.engine.engine import Engine
from paradraft.judge.fit import RECALL, fitted, head_of, states_of
from paradraft.judge.labels import Label, LabelledText, Labeller, MarkedQuestion, drafted_tokens
from paradraft.models.forward import FINAL_NORM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sources.loading import pocket_folder
from paradraft.sources.target_loading import load_target
from paradraft.text.final_number import final_number

MOST = 40
PROMPTS = [
    "x = [1, 2, 3]\ny = x[",
    "for i in range(10):\n    if i ==",
    "SIZE = 4\nWIDTH = ",
    "def f(n):\n    return n +",
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("pocket", drafter="autoregressive", k=4, kept_rows=4)


@pytest.fixture(scope="module")
def draft() -> Target:
    return load_target(str(pocket_folder("draft")), Runtime())


@pytest.fixture(scope="module")
def texts(engine: Engine, draft: Target) -> list[LabelledText]:
    """Labelled answers of prompts that the target itself answers "right", and of one that it answers wrongly."""
    prompts = [engine.prompt_tokens(prompt) for prompt in PROMPTS]
    answers = [final_number(answer.text) for answer in engine.generate(prompts, max_new_tokens=MOST)]
    assert None not in answers
    rights = [*map(Decimal, answers[:3]), Decimal(answers[3]) + 1]
    questions = [
        MarkedQuestion(id=str(at), prompt=prompt, right=right)
        for at, (prompt, right) in enumerate(zip(prompts, rights, strict=True))
    ]

    async def labelled() -> list[LabelledText]:
        return [text async for text in Labeller(engine, draft, max_new_tokens=MOST).label(questions)]

    return sorted(asyncio.run(labelled()), key=lambda text: text.id)


def test_labels_are_those_of_plain_decoding(engine: Engine, draft: Target, texts: list[LabelledText]) -> None:
    """Guards the labels: with each drafted token, and all harmless ones before it, the answer is decoded again without
    a drafter; and at all places without a label the draft model agrees with the text."""
    plain, tokenizer = load("pocket"), engine.target.tokenizer
    labels = [label for text in texts for label in text.labels]
    assert {label.is_harmless for label in labels} == {True, False} and len(labels) > 20
    for text in texts[:3]:
        prompt = text.tokens[: text.prompt]
        right = final_number(plain.generate(prompt, max_new_tokens=MOST).text)
        for label in text.labels:
            beginning = [*text.tokens[: label.position], label.token]
            room = text.prompt + MOST - len(beginning)
            rest = plain.generate(beginning, max_new_tokens=room).tokens if room else []
            answer = tokenizer.decode([*beginning, *rest][text.prompt :], skip_special_tokens=True)
            assert (final_number(answer) == right) is label.is_harmless
            assert (text.tokens[label.position] == label.token) is label.is_harmless
        drafted = drafted_tokens(draft, text.tokens, text.prompt)
        harmful = {label.position for label in text.labels if not label.is_harmless}
        differing = {text.prompt + at for at, token in enumerate(drafted) if token != text.tokens[text.prompt + at]}
        assert differing == harmful
    assert not texts[3].labels, "a wrong answer teaches nothing"


def test_texts_survive_json(texts: list[LabelledText]) -> None:
    assert [LabelledText.of_json(text.as_json()) for text in texts] == texts


def test_states_are_those_of_one_pass(engine: Engine, texts: list[LabelledText]) -> None:
    """Guards features of another token: each state is that of the text up to the labelled token, read at once."""
    target = load_target("pocket", Runtime())
    for text in texts[:3]:
        states = states_of(engine.target, text)
        assert len(states) == len(text.labels)
        for state, label in zip(states, text.labels, strict=True):
            target.start(of_rule=(FINAL_NORM,))
            target.join([Request(tokens=[*text.tokens[: label.position], label.token])])
            out = target.forward(Draft.empty(1, target.device))
            torch.testing.assert_close(state, out.hidden[FINAL_NORM][0, 0].float(), rtol=1e-4, atol=1e-4)


def test_long_stretches_without_labels_are_read_in_pieces(engine: Engine) -> None:
    """Guards texts where labels are farther apart than a pass is wide."""
    tokens = engine.prompt_tokens(PROMPTS[0]) * 20
    label = Label(position=len(tokens) - 2, token=7, is_harmless=False)
    assert label.position - 3 > 2 * engine.target.lm.width
    (state,) = states_of(engine.target, LabelledText(id="0", prompt=3, tokens=tokens, labels=[label]))
    target = load_target("pocket", Runtime())
    target.start(of_rule=(FINAL_NORM,))
    target.join([Request(tokens=[*tokens[: label.position], 7])])
    out = target.forward(Draft.empty(1, target.device))
    torch.testing.assert_close(state, out.hidden[FINAL_NORM][0, 0].float(), rtol=1e-4, atol=1e-4)


def test_a_fit_has_the_least_loss() -> None:
    """Guards the logistic regression: its loss has no slope, in the standardized weights and in the bias."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(200, 5, generator=generator) * torch.tensor([1.0, 9.0, 0.1, 1.0, 1.0]) + 3
    target = (states[:, 1] - 27 * states[:, 2] * 0.1 + torch.randn(200, generator=generator) > 3).double()
    weights, bias = fitted(states, target.bool(), 0.05)
    scale, mean = states.double().std(0), states.double().mean(0)
    slopes = (weights.double() * scale).requires_grad_()
    offset = torch.tensor(bias + float(weights.double() @ mean), dtype=torch.float64, requires_grad=True)
    logits = (states.double() - mean) / scale @ slopes + offset
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target) + 0.05 * slopes.square().sum()
    loss.backward()
    assert slopes.grad is not None and offset.grad is not None
    assert slopes.grad.abs().max() < 1e-4 and offset.grad.abs() < 1e-4


def made_texts(number: int) -> list[LabelledText]:
    generator = torch.Generator().manual_seed(number)
    return [
        LabelledText(
            id=str(at), prompt=1, tokens=[0] * 40,
            labels=[
                Label(position=place, token=1, is_harmless=bool(torch.rand(1, generator=generator) < 0.7))
                for place in range(1, 21)
            ],
        )
        for at in range(number)
    ]  # fmt: skip


def test_the_threshold_rejects_most_harmful_tokens_of_other_texts() -> None:
    """Guards the promise of the head: where states say enough it accepts most harmless tokens and rejects `RECALL` of
    the harmful ones, of texts that it has not seen; where they say nothing it accepts few more than by chance."""
    generator = torch.Generator().manual_seed(1)

    def states(texts: list[LabelledText], signal: float) -> list[torch.Tensor]:
        return [
            torch.randn(len(text.labels), 16, generator=generator)
            + signal * torch.tensor([[float(label.is_harmless)] + [0.0] * 15 for label in text.labels])
            for text in texts
        ]

    seen, unseen = made_texts(60), made_texts(61)
    for signal, least, most in ((4.0, 0.95, 1.0), (0.0, 0.0, 0.2)):
        head = head_of(states(seen, signal), seen, {})
        chances = head.harmless(torch.cat(states(unseen, signal)))
        is_harmless = torch.tensor([label.is_harmless for text in unseen for label in text.labels])
        accepted = (chances >= head.threshold).double()
        assert least <= float(accepted[is_harmless].mean()) <= most
        assert 0.05 * (signal > 0) < float(accepted[~is_harmless].mean()) < 1 - RECALL + 0.06
        claimed = float(head.facts["accepted of harmless"])
        assert claimed == pytest.approx(float(accepted[is_harmless].mean()), abs=0.03 if signal else 0.12)


def test_too_few_labels_are_refused() -> None:
    texts = made_texts(3)
    with pytest.raises(ValueError, match="3 answers have too few labels of both kinds: ask more questions"):
        head_of([torch.randn(20, 4) for _ in texts], texts, {})
    with pytest.raises(ValueError, match="0 answers"):
        head_of([], [], {})


def test_a_draft_of_another_family_is_refused(engine: Engine, family: object) -> None:
    other = load_target(f"{family}/draft", Runtime(dtype="float64"))
    with pytest.raises(ValueError, match="another vocabulary than the target"):
        Labeller(engine, other, max_new_tokens=4)
