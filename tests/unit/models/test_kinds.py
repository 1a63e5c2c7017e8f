"""Every architecture that the model's own code computes: passes over trees, windows, and texts against `generate`."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.engine.loader import load
from paradraft.models.architectures import FAMILIES, context_of, spec_of
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.model import NativePass
from paradraft.models.forward.pipeline import split
from paradraft.models.runtime import Runtime
from paradraft.placement import stages_of
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support.decoding import prefilled
from tests.support.drafts import draft_of
from tests.support.kinds import KINDS, WINDOW, model_of
from tests.support.quick import mostly_slow
from tests.support.trees import path_to, random_parents


def test_all_are_tested() -> None:
    assert {kind.partition(" ")[0] for kind in KINDS} == set(FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_and_states_are_those_of_a_fresh_pass(kind: str) -> None:
    """Guards every architecture against masks, positions or caches that are not its own, up to its last position."""
    model, chooser = model_of(kind), random.Random(7)
    most = context_of(model.config)
    assert most == (WINDOW if kind == "ministral" or kind.endswith("with windows") else 96)
    lm = CausalLM(model, vocab_size=VOCAB, compiled=False, width=8)
    texts = [[chooser.randrange(VOCAB) for _ in range(length)] for length in (1, 9, most - 12)]
    prefilled(lm, texts)
    for _ in range(3):
        parents = [[-1, *(parent + 1 for parent in random_parents(chooser.randrange(99), 3))] for _ in texts]
        tokens = [[text[-1], *(chooser.randrange(VOCAB) for _ in range(3))] for text in texts]
        asked = torch.tensor(tokens), torch.tensor(parents)
        logits, hidden = lm.forward(*asked).logits, lm.forward(*asked, hidden_layers=[0, 2, -1]).hidden
        close(lm.head(hidden[-1]), logits)
        close(lm.forward(*asked, vectors=lm.embed(asked[0])).logits, logits)
        paths = []
        for row, text in enumerate(texts):
            for node in range(4):
                read = text[:-1] + [tokens[row][i] for i in path_to(parents[row], node)]
                with torch.inference_mode():
                    fresh = model(torch.tensor([read]), output_hidden_states=True)
                close(logits[row, node], fresh.logits[0, -1, :VOCAB])
                for layer, index in ((0, 0), (2, 2), (-1, -1)):
                    close(hidden[layer][row, node], fresh.hidden_states[index][0, -1])
            paths.append(path_to(parents[row], 3))
        lm.cache.accept_path(paths)
        for text, path, row in zip(texts, paths, tokens, strict=True):
            text[-1:] = [row[node] for node in path] + [chooser.randrange(VOCAB)]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    """Guards whoever names such a model: with and without a drafter, on the fastest passes there are, the text is that
    of `transformers`; and a text beyond the window is refused, not wrong."""
    model = model_of(kind, torch.float32)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    target, most = str(tmp_path / "target"), context_of(model.config)
    prompt = [token % VOCAB for token in range(1, most - 30)]
    whole = model.double().generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, suppress_tokens=list(range(VOCAB, VOCAB + 8))
    )
    expected = whole[0, len(prompt) :].tolist()
    drafters: list[dict[str, Any]] = [
        {"drafter": "none"},
        {"drafter": "ngram", "k": 3},
        {"drafter": "autoregressive", "draft": target, "k": 4, "tree": 6},
    ]
    for settings in drafters:
        engine = load(target, runtime=Runtime(device="cpu", dtype="float64"), **settings)
        assert engine.generate(prompt, max_new_tokens=30).tokens == expected
        with pytest.raises(ValueError, match=f"for {most}"):
            engine.generate(prompt, max_new_tokens=32)


@pytest.mark.parametrize("kind", ["granite", "gemma3_text with a softcap", "gemma3_text with windows", "qwen3_moe"])
def test_float32_texts_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    """Guards the dtype that such models are run in, in which experts are computed by other products than in float64,
    with prompts of several lengths in a batch."""
    model_of(kind, torch.float32).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    runtime = Runtime(device="cpu", dtype="float32")
    target = str(tmp_path / "target")
    engine = load(target, drafter="autoregressive", draft=target, k=3, tree=6, runtime=runtime, lengths="fixed")
    model = engine.target.lm.model
    assert not engine.target.lm.is_native
    assert not spec_of(model.config).has_experts or model.config._experts_implementation == "grouped_mm"
    prompts = [[7, 3, 9, 7, 3], [5], [1, 2, 1, 2, 1, 2, 1, 2]]
    settings = {"max_new_tokens": 20, "do_sample": False, "suppress_tokens": list(range(VOCAB, VOCAB + 8))}
    for prompt, answer in zip(prompts, engine.generate(prompts, max_new_tokens=20), strict=True):
        whole = model.generate(torch.tensor([prompt]), eos_token_id=list(engine.target.eos_ids), **settings)
        assert answer.tokens == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["granite", "gemma3_text with windows", "qwen3_moe"])
def test_stages_are_the_whole(kind: str) -> None:
    """Guards what a stage is told: the states that it reads are no embeddings, and its layers are not the first."""
    lms = []
    for places in (None, "cpu/cpu/cpu"):
        model = model_of(kind)
        stages = split(model, stages_of(places) or ()) if places else ()
        lms.append(CausalLM(model, vocab_size=VOCAB, compiled=False, stages=stages))
    tokens, layers = torch.tensor([[5, 3, 8, 1], [2, 2, 9, 4]]), [0, 1, 2, 3, 4, -1]
    for lm in lms:
        prefilled(lm, [[7, 1, 4], [6]])
    whole, parts = (lm.forward(tokens, hidden_layers=layers) for lm in lms)
    assert torch.equal(whole.logits, parts.logits)
    for layer in layers:
        assert torch.equal(whole.hidden[layer], parts.hidden[layer])


@pytest.mark.parametrize("kind", ["mistral", "mistral with windows"])
def test_mistral_is_computed_in_cpp(kind: str) -> None:
    """Guards the speed of a model whose layers are those of Llama."""
    lm = CausalLM(model_of(kind, torch.float32), vocab_size=VOCAB)
    assert isinstance(lm._compute, NativePass)


def test_a_window_without_a_size_is_refused() -> None:
    """Guards against silently wrong attention."""
    model = model_of("mistral")
    model.config.sliding_window = 0
    with pytest.raises(ValueError, match="sliding_window=0"):
        CausalLM(model, vocab_size=VOCAB, compiled=False)


SHOWN = [("granite", "eagle_parallel"), ("olmo2", "medusa")]
WHOLE = [kind for kind in KINDS if " with " not in kind and kind != "ministral"]
TRAINED = ["medusa", "hydra", "eagle", "medusa_parallel", "eagle_parallel", "ppd"]


@pytest.mark.parametrize(
    ("kind", "drafter"),
    mostly_slow(itertools.product(WHOLE, TRAINED), quick=SHOWN),
)
def test_drafters_are_trained_for_all(kind: str, drafter: str, tmp_path: Path) -> None:
    """Guards training against layers that are built in another order or have parts of other names."""
    model_of(kind).save_pretrained(tmp_path / "family" / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "family" / "target")
    target, draft = str(tmp_path / "family" / "target"), draft_of(tmp_path / "family", drafter)
    runtime = Runtime(device="cpu", dtype="float64")
    drafting = load(
        target,
        drafter="ppd:size=24" if drafter == "ppd" else drafter,
        draft=draft,
        k=4,
        runtime=runtime,
        lengths="fixed",
    )
    plain = load(target, runtime=runtime)
    for prompt in ("abcab", "hello"):
        answer = drafting.generate(prompt, max_new_tokens=24)
        assert answer.tokens == plain.generate(prompt, max_new_tokens=24).tokens
        assert answer.stats.nodes
