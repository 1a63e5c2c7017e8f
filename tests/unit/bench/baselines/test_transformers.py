"""Peers of `transformers`: the same tokens, and counts that add up."""

from __future__ import annotations

import pytest
import torch

from paradraft.bench.result import BatchResult
from paradraft.bench.spec import Method
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import GREEDY, Sampling
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer

PROMPTS = ["abcabcabc", "q"]
TOKENS = 24


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A target and a draft without embedding rows that no token has, which `transformers` would take for tokens."""
    root = tmp_path_factory.mktemp("family")
    for name in ("target", "draft"):
        model = tiny_model(1, rows=VOCAB)
        with torch.no_grad():
            for parameter in model.parameters() if name == "draft" else ():
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    draft = str(root / "draft")
    return load(
        str(root / "target"), drafter="autoregressive", draft=draft, runtime=Runtime(dtype="float64"), lengths="fixed"
    )


def answer(engine: Engine, spec: str, prompt: str, tokens: int = TOKENS, sampling: Sampling = GREEDY) -> BatchResult:
    return Method.parse(spec).answerer(engine.target, engine.drafter)([prompt], tokens, sampling)


@pytest.mark.parametrize("spec", ["hf", "hf-assisted:k=4:confidence=0", "hf-assisted:k=3", "hf-prompt-lookup:k=5"])
def test_peers_give_the_tokens_of_plain_decoding(engine: Engine, spec: str) -> None:
    """Guards the comparison: peers that answer something else, or whose rounds do not make up their answers."""
    for prompt in PROMPTS:
        found = answer(engine, spec, prompt)
        assert found.tokens == [engine.generate(prompt, max_new_tokens=TOKENS).tokens]
        assert found.delivered_s is not None
        (arrived_s,) = found.delivered_s
        assert arrived_s == sorted(arrived_s) and 0 < arrived_s[0] and arrived_s[-1] <= found.total_s
        assert len(arrived_s) == (len(found.tokens[0]) if spec == "hf" else len(found.accepted[0]))  # type: ignore[index]
        if spec == "hf":
            assert found.counts is None and found.accepted is None
            continue
        assert found.counts is not None and found.accepted is not None
        (accepted,) = found.accepted
        assert sum(accepted) + len(accepted) == found.counts.tokens == len(found.tokens[0])
        assert found.counts.rounds == len(accepted)
        assert sum(found.counts.accepted) == sum(accepted)
        assert all(kept <= made for kept, made in zip(found.counts.accepted, found.counts.drafted, strict=True))


def test_the_confidence_decides_where_a_draft_ends(engine: Engine) -> None:
    """Guards the two settings that are reported, and the draft model that other methods share."""
    before = engine.drafter.lm.model.generation_config.to_dict()
    whole, short = (answer(engine, f"hf-assisted:k=4:confidence={at}", PROMPTS[0]).counts for at in (0, 0.9))
    assert whole is not None and short is not None
    # Every round drafts all of k, but for the last ones, which have no room.
    assert whole.drafted[0] - whole.drafted[3] <= 4
    assert sum(short.drafted) / short.rounds < sum(whole.drafted) / whole.rounds
    assert engine.drafter.lm.model.generation_config.to_dict() == before


def test_an_answer_ends_at_its_end(engine: Engine) -> None:
    """Guards the count of tokens: `transformers` must know the target's end tokens when it drafts too."""
    whole = engine.generate(PROMPTS[0], max_new_tokens=TOKENS).tokens
    engine.target.lm.model.generation_config.eos_token_id = whole[15]
    try:
        expected = whole[: whole.index(whole[15]) + 1]
        for spec in ("hf", "hf-assisted:k=4:confidence=0", "hf-prompt-lookup:k=5"):
            assert answer(engine, spec, PROMPTS[0]).tokens == [expected]
    finally:
        engine.target.lm.model.generation_config.eos_token_id = 0


def test_every_row_of_a_batch_tells_when_its_tokens_came(engine: Engine) -> None:
    """Guards latencies in batches, where one row ends before the other and is filled up."""
    whole = [engine.generate(prompt, max_new_tokens=TOKENS).tokens for prompt in PROMPTS]
    engine.target.lm.model.generation_config.eos_token_id = whole[0][5]
    try:
        plain = Method.parse("hf:batch=2").answerer(engine.target, engine.drafter)
        found = plain(PROMPTS, TOKENS, GREEDY)
    finally:
        engine.target.lm.model.generation_config.eos_token_id = 0
    assert found.delivered_s is not None and len({len(answer) for answer in found.tokens}) == 2
    assert [len(row) for row in found.delivered_s] == [len(answer) for answer in found.tokens]


def test_sampled_answers_have_rounds_too(engine: Engine) -> None:
    """Guards peers at a temperature, where `transformers` takes another way through its code."""
    for spec in ("hf-assisted:k=4:confidence=0", "hf-prompt-lookup:k=5"):
        found = answer(engine, spec, PROMPTS[0], 20, Sampling(temperature=0.7, seed=1))
        assert len(found.tokens[0]) <= 20 and found.counts is not None and found.counts.tokens == len(found.tokens[0])


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("hf-assisted:batch=2", "one prompt at a time"),
        ("hf-prompt-lookup:batch=4", "one prompt at a time"),
        ("hf-assisted:confidence=1.5", "confidence='1.5'"),
        ("hf-assisted:confidence=high", "confidence='high'"),
        ("hf-assisted:confidence=nan", "confidence='nan'"),
        ("hf:confidence=0", "settings of hf are dtype, batch"),
        ("hf-prompt-lookup:draft=x", "settings of hf-prompt-lookup"),
        ("vllm:k=4", "settings of vllm are dtype, batch"),
        ("vllm-pard:tree=4", "settings of vllm-pard"),
    ],
)
def test_settings_that_a_peer_does_not_have_are_refused(spec: str, named: str) -> None:
    """Guards against settings that a peer would ignore."""
    with pytest.raises(ValueError, match="method ") as raised:
        Method.parse(spec)
    assert named in str(raised.value)


def test_peers_that_differ_in_a_setting_differ() -> None:
    """Guards the two confidences in one run, and the default by another name."""
    default, same, other = (Method.parse(f"hf-assisted{rest}") for rest in ("", ":confidence=0.4", ":confidence=0"))
    assert default == same != other
