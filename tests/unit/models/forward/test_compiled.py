"""Compiled passes: the same results at every width, and eager where there is no compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from paradraft.models import causal_lm
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import choice, compiled
from paradraft.models.forward.compiled import compile_pass
from paradraft.models.quantization import quantize
from paradraft.tree import ABSENT
from tests.conftest import tiny_model
from tests.support.decoding import empty_rows, prefilled
from tests.support.kinds import model_of

PASSES: list[tuple[list[list[int]], list[int] | None]] = [
    ([[8]], None),
    ([[9, 10, 11]], None),
    ([[9, 10, 11, 12]], [-1, 0, 0, 1]),
    ([[12]], None),
    ([[13, 14, 15, 16, 17, 18, 19, 20, 21]], None),
    ([[8], [9], [10]], None),
    ([[9, 10, 11], [12, -1, -1], [13, 14, -1]], None),
    ([[9, 10, 11]] * 3, [-1, 0, 0]),
]
"""Tokens of passes, and the parents of those that are trees."""


@pytest.fixture(autouse=True)
def _no_passes_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves everything to `torch.compile`, as it is on GPUs."""
    monkeypatch.setattr(choice, "can_serve", lambda _: False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_compiled_passes_equal_eager_ones(dtype: torch.dtype) -> None:
    """Guards against a graph that is wrong for some shape, loses what it wrote into the cache, or reads another
    model's weights. `transformers` computes norms and rotations in float32 whatever the dtype, and compiling reorders
    them, hence the tolerance."""
    models = [tiny_model(seed).to(dtype) for seed in (3, 4)]
    pairs = [[CausalLM(model, vocab_size=64, compiled=flag) for flag in (False, True)] for model in models]
    all_lms = [lm for pair in pairs for lm in pair]
    rows = 0
    for tokens, parents in PASSES + PASSES[:2]:
        if len(tokens) != rows:
            rows = len(tokens)
            for lm in all_lms:
                prefilled(lm, [[5, 6, 7, 8]] * rows)
        tree = None if parents is None else torch.tensor([parents] * rows)
        for pair in pairs:
            plain, fast = (lm.forward(torch.tensor(tokens), tree).logits for lm in pair)
            there = torch.tensor(tokens) != ABSENT
            torch.testing.assert_close(fast[there], plain[there], rtol=1e-5, atol=1e-5)
        for lm in all_lms:
            lm.cache.advance([1] * rows)


def few_bits() -> PreTrainedModel:
    model = tiny_model(3).float()
    quantize(model, 8)
    model.model.layers[1].self_attn.scaling *= 2
    return model


@pytest.mark.parametrize("make", [few_bits, lambda: model_of("qwen3_moe")])
def test_what_cannot_be_compiled_as_a_whole_is_not_compiled(make: Callable[[], PreTrainedModel]) -> None:
    """Guards against other tokens without a word: products of few bits, and experts one by one, cut what is compiled,
    and the piece that was made for one layer was taken for another's: logits were up to 5 off."""
    model = make()
    fast, plain = (CausalLM(model, vocab_size=64, compiled=flag) for flag in (True, False))
    expected = plain.forward(prefilled(plain, [[5, 6, 7, 8]])).logits
    with pytest.warns(UserWarning, match="compilation failed, decoding goes on uncompiled"):
        found = fast.forward(prefilled(fast, [[5, 6, 7, 8]])).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_prompts_are_read_by_the_passes_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against prompts that are read otherwise than eagerly, and against minutes of compiling for each length."""
    monkeypatch.setattr(causal_lm, "PREFILL_CHUNK", 48)
    plain, fast = (CausalLM(tiny_model(7), vocab_size=64, compiled=flag) for flag in (False, True))
    before = counters["stats"]["unique_graphs"]
    for lengths in ([1], [2], [3], [100], [65], [1, 1], [2, 50, 1], [97, 3], [49]):
        rows = [[place % 60 + 1 for place in range(length)] for length in lengths]
        logits = [lm.forward(prefilled(lm, rows)).logits for lm in (plain, fast)]
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] - before == 2, "one for a row, one for more"


@pytest.mark.slow
def test_what_is_asked_for_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rounds against compiling: hidden layers, vectors and added ids cost one more graph for a row and one for
    more, for each choice of them, and no choice changes the graph of another. Traced only, which decides that."""
    compile_all = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **named: compile_all(*given, **named, backend="eager"))
    monkeypatch.setattr(causal_lm, "PREFILL_CHUNK", 48)
    plain, fast = (CausalLM(tiny_model(7), vocab_size=64, compiled=flag) for flag in (False, True))
    embedding = plain.model.get_input_embeddings()
    counts = []
    for layers, has_vectors, has_added in [
        ((), False, False), ((-1, 1), False, False), ((2,), True, False), ((), False, True), ((), False, False),
    ]:  # fmt: skip
        if has_added:
            for lm in (plain, fast):
                assert lm.add_embeddings(torch.ones(2, embedding.weight.shape[1]).cumsum(0))[0] == len(embedding.weight)
        before = counters["stats"]["unique_graphs"]
        for rows, length, width in [(1, 9, 1), (1, 100, 5), (1, 60, 7), (3, 9, 4), (2, 70, 6), (4, 3, 1)]:
            prompt = (torch.arange(rows * length) % 60 + 1).view(rows, length)
            tokens = (torch.arange(rows * width) % 50 + 3).view(rows, width)
            if has_added:
                tokens[:, -1] = len(embedding.weight) + 1
            outs = []
            for lm in (plain, fast):
                empty_rows(lm, rows)
                read = lm.prefill(prompt.tolist(), layers, embedding(prompt) if has_vectors else None)
                vectors = embedding(tokens) if has_vectors else None
                out = lm.forward(tokens, hidden_layers=layers, vectors=vectors)
                assert tuple(read.hidden) == tuple(out.hidden) == layers
                outs.append([out.logits, *read.hidden.values(), *out.hidden.values()])
            for ours, theirs in zip(*outs, strict=True):
                torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
        counts.append(counters["stats"]["unique_graphs"] - before)
    assert counts == [2, 2, 2, 2, 0]


@pytest.mark.slow
def test_what_was_compiled_is_kept_for_these_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against minutes of compiling at every start, and against the packed weights of a model of the same shapes,
    such as the drafter before its last training step, which torch by itself would take."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tokens = torch.tensor([[5, 6, 7]])
    found: list[int] = []
    for seed in (5, 5, 6):
        before = counters["inductor"]["fxgraph_cache_hit"]
        model = tiny_model(seed).float()
        lms = [CausalLM(model, vocab_size=64, compiled=flag) for flag in (False, True)]
        for lm in lms:
            empty_rows(lm, 1)
        plain, fast = (lm.forward(tokens).logits for lm in lms)
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
        found.append(counters["inductor"]["fxgraph_cache_hit"] - before)
    assert found == [0, 1, 0]


def test_the_key_of_what_is_kept_has_all_tensors_in_it() -> None:
    """Guards against what was computed from another rotary embedding, which only a model's buffers tell apart, and
    against a key that never comes again."""
    models = [tiny_model(5), tiny_model(5), tiny_model(5), tiny_model(6)]
    models[2].get_buffer("model.rotary_emb.inv_freq").mul_(0.5)
    same, again, turned, other = (compiled._tag(model) for model in models)
    assert same == again and len({same, turned, other}) == 3


def test_without_a_compiler_it_warns_once_and_decodes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a crash, or a silent slowdown, on machines that cannot compile."""

    def broken(*args: object, **kwargs: object) -> object:
        def run(*tensors: torch.Tensor) -> torch.Tensor:
            raise torch._dynamo.exc.TorchDynamoException("no C++ compiler")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    run = compile_pass(lambda x: x + 1, torch.nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert run(torch.tensor(1)).item() == 2
    assert run(torch.tensor(2)).item() == 3
