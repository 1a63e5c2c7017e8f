"""Views: the first layers of a model, over its weights and its cache."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import PreTrainedModel

from paradraft.models.cached_rows import RowsView
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import compiled as compiled_passes
from paradraft.models.forward.pipeline import split
from paradraft.placement import stages_of
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import prefilled
from tests.support.kinds import KINDS, model_of
from tests.support.random_models import KINDS_OF_MODELS, random_model
from tests.support.replays import Recorder, replay_everything
from tests.support.trees import path_to, random_parents

PROMPTS = [[7], [3, 1, 4, 1, 5], [2, 0, 9, 9, 0, 1, 2, 3, 4]]


def cut(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A copy with its first layers alone, as `transformers` computes it."""
    model = copy.deepcopy(model)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return model


def drafted(lm: CausalLM, view: CausalLM) -> list[tuple[list[int], torch.Tensor]]:
    """Texts and the view's logits after them, for a tree after the prompts and for the token after an accepted path."""
    chooser, texts = random.Random(5), [list(row) for row in PROMPTS]
    prefilled(lm, texts)
    assert isinstance(view.cache, RowsView)
    view.start()
    view.cache.follow()
    parents = [[-1, *(parent + 1 for parent in random_parents(row, 3))] for row in range(3)]
    tokens = [[text[-1], *(chooser.randrange(VOCAB) for _ in range(3))] for text in texts]
    logits = view.forward(torch.tensor(tokens), torch.tensor(parents)).logits
    paths = [path_to(parents[row], 3) for row in range(3)]
    found = [
        (text[:-1] + [tokens[row][node] for node in path_to(parents[row], last)], logits[row, last])
        for row, text in enumerate(texts)
        for last in range(4)
    ]
    view.cache.accept_path(paths)
    read = [text[:-1] + [tokens[row][node] for node in paths[row]] for row, text in enumerate(texts)]
    logits = view.forward(torch.tensor([[5]] * 3)).logits
    return found + [([*text, 5], logits[row, 0]) for row, text in enumerate(read)]


def check_eager(model: PreTrainedModel, view: CausalLM, lm: CausalLM) -> None:
    expected = cut(model, view.model.config.num_hidden_layers)
    for text, logits in drafted(lm, view):
        with torch.inference_mode():
            fresh = expected(torch.tensor([text])).logits[0, -1, :VOCAB]
        torch.testing.assert_close(logits, fresh, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_logits_are_those_of_a_cut_model(kind: str) -> None:
    """Guards every architecture: layers, norm and head of the model, over the cache that the whole model has filled."""
    model = model_of(kind)
    lm = CausalLM(model, vocab_size=VOCAB, compiled=False, width=8)
    for layers in range(1, model.config.num_hidden_layers + 1):
        check_eager(model, lm.view(layers), lm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
def test_logits_in_cpp_are_those_of_a_cut_model(kind: str, dtype: torch.dtype) -> None:
    """Guards the passes in C++: to the last bit those of a model of these layers, which is checked against
    `transformers` when it is loaded."""
    model = random_model(kind, dtype=dtype)
    lm, alone = (CausalLM(each, vocab_size=VOCAB, width=8) for each in (model, cut(model, 2)))
    view = lm.view(2)
    assert lm.is_native and alone.is_native and view.is_native
    for text, logits in drafted(lm, view):
        last = prefilled(alone, [text])
        assert torch.equal(alone.forward(last).logits[0, 0], logits)


def other_norm(view: CausalLM) -> None:
    view.model.model._modules["norm"] = view.model.model.layers[0].input_layernorm
    view._compute._model = view.model


def one_more_layer(view: CausalLM) -> None:
    view._compute = view._compute.first(1)


@pytest.mark.parametrize("wrong", [other_norm, one_more_layer])
def test_wrong_layers_or_norm_are_seen(wrong: object) -> None:
    """Control of the comparisons above."""
    model = tiny_model(3, layers=3)
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.linspace(0.5, 2, 32))
    lm = CausalLM(model, vocab_size=VOCAB, compiled=False, width=8)
    check_eager(model, view := lm.view(2), lm)
    wrong(view)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        check_eager(model, view, lm)


def test_replayed_passes_of_both_keep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards recordings, which hold addresses of the cache and are by the shapes of inputs: those of a view are its
    own."""
    replay_everything(monkeypatch)
    model = tiny_model(3, layers=3)
    lm = CausalLM(model, vocab_size=VOCAB, compiled=True, width=8)
    view = lm.view(2)
    assert isinstance(view._compute, compiled_passes.CompiledPass) and view._compute.replays is not lm._compute.replays
    for _ in range(3):
        check_eager(model, view, lm)
        lm.forward(torch.tensor([[5]] * 3))
    assert Recorder.recorded


def test_rows_and_slots_are_those_of_the_whole() -> None:
    """Guards the view against slots or rows that the whole cache has given up, and the memory of a smaller cache."""
    lm = CausalLM(tiny_model(3, layers=3), vocab_size=VOCAB, width=8)
    view = lm.view(2)
    prefilled(lm, PROMPTS)
    view.cache.follow()
    view.forward(torch.tensor([[5]] * 3))
    before = view.cache.storage[0][0].data_ptr()
    lm.cache.keep(torch.tensor([2, 0]))
    lm.cache.join(4)
    view.cache.follow()
    assert view.cache.lengths == lm.cache.lengths == [8, 0, 0, 0, 0, 0] and len(view.cache.storage) == 2
    assert [keys.data_ptr() for keys, _ in view.cache.storage] == [keys.data_ptr() for keys, _ in lm.cache.storage[:2]]
    assert view.cache.storage[0][0].data_ptr() != before
    view.cache.advance([1] * 6)
    assert lm.cache.lengths == [8, 0, 0, 0, 0, 0] and view.cache.lengths == [9, 1, 1, 1, 1, 1]
    lm.cache.join(1, in_prefill=True)
    view.cache.follow()
    assert view.cache.lengths == [8, 0, 0, 0, 0, 0], "rows in prefill are not decoded"
    assert torch.equal(
        view.forward(torch.tensor([[5]] * 6)).logits[1:], view.forward(torch.tensor([[5]] * 6)).logits[1:]
    )


def test_what_no_answer_may_contain_is_not_drafted() -> None:
    """Guards reserved tokens, which are set for each batch, and forbidden ones."""
    lm = CausalLM(tiny_model(3), vocab_size=VOCAB, width=8)
    view = lm.view(1)
    lm.reserve([9])
    lm.forbid([8])
    prefilled(lm, [[1, 2]])
    view.cache.follow()
    logits = view.forward(torch.tensor([[2]])).logits[0, 0]
    assert logits.isneginf().nonzero().flatten().tolist() == [8, 9]


def test_stages_have_no_view() -> None:
    """Guards against a draft on the wrong device, or a slow way around."""
    model = tiny_model(3, layers=3)
    lm = CausalLM(model, vocab_size=VOCAB, stages=split(model, stages_of("cpu/cpu") or ()))
    with pytest.raises(ValueError, match="2 pipeline stages: the target's first layers cannot draft"):
        lm.view(1)
