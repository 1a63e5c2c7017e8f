"""Hidden states out of a pass, vectors and added ids into it, in every backend."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.models import causal_lm
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM, eager
from paradraft.models.forward.cpu.model import NativePass
from paradraft.models.forward.cuda_graphs import Replays
from paradraft.ragged import to_lists
from paradraft.tree import ABSENT
from tests.support.decoding import empty_rows
from tests.support.random_models import KINDS_OF_MODELS, SIZES, random_model
from tests.support.replays import Recorder, replay_everything

LAYERS = (0, 1, 2, 3, FINAL_NORM)
"""All that a model of 3 layers has."""
BACKENDS = ("C++", "C++ bfloat16", "eager", "replayed")
EXACT = ("C++", "C++ bfloat16", "eager")
"""Backends that compute the same to the last bit for the same shapes, whatever else is asked for."""


def lm_of(
    backend: str, monkeypatch: pytest.MonkeyPatch, kind: str = "qwen3", size: tuple[int, ...] = SIZES[0]
) -> CausalLM:
    dtypes = {"C++": torch.float32, "C++ bfloat16": torch.bfloat16}
    model = random_model(kind, size, dtypes.get(backend, torch.float64))
    if backend == "replayed":
        replay_everything(monkeypatch)
    lm = CausalLM(model, vocab_size=model.config.vocab_size, compiled=backend != "eager")
    assert isinstance(lm._compute, NativePass) == (backend in dtypes)
    empty_rows(lm, 1)
    return lm


def tokens(count: int, rows: int = 1) -> Tensor:
    return torch.randint(1, 60, (rows, count), generator=torch.Generator().manual_seed(count))


def own_states(model: PreTrainedModel, text: Tensor) -> dict[int, Tensor]:
    """Those of `transformers`, in float64; a copy's, because it leaves hooks in the model."""
    model = copy.deepcopy(model).double()
    before_norm: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    *states, last = model(text, output_hidden_states=True, use_cache=False).hidden_states
    return {**dict(enumerate(states)), len(states): before_norm[0], FINAL_NORM: last}


@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_states_are_the_models_own(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the names of the layers: those of `output_hidden_states`, and the last layer's before the final norm. The
    control is the layer before, which a count from 1 instead of 0 would return."""
    lm, text = lm_of(backend, monkeypatch, kind), tokens(40)
    expected = own_states(lm.model, text)
    limit = 0.03 if lm.model.dtype == torch.bfloat16 else 1e-5
    for _ in range(3):  # the third is replayed
        hidden = lm.forward(text, hidden_layers=LAYERS).hidden
    assert tuple(hidden) == LAYERS

    def error(layer: int, other: int) -> float:
        return float((hidden[layer].double() - expected[other]).square().mean().sqrt() / expected[other].std())

    assert all(hidden[layer].shape == expected[layer].shape and error(layer, layer) < limit for layer in LAYERS)
    assert all(error(layer, layer - 1) > 2 * limit for layer in LAYERS[1:4]) and error(3, FINAL_NORM) > 2 * limit


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["C++", "C++ bfloat16"])
def test_every_cut_batch_and_tree_has_the_same_bits(
    dtype: str, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards in states what is promised of logits. The control is a text that differs in its first token."""
    lm, text = lm_of(dtype, monkeypatch, size=size), tokens(30)

    def read(text: Tensor, parents: Tensor | None = None, *, keep: bool = True) -> Tensor:
        """`[B, N, layers, D]` states of a pass."""
        hidden = lm.forward(text, parents, hidden_layers=LAYERS).hidden
        if keep:
            lm.cache.advance((text != ABSENT).sum(1).tolist())
        return torch.stack(list(hidden.values()), dim=2)

    whole = read(text)
    for threads, widths in [(1, (1,) * 30), (2, (7, 1, 9, 13)), (7, (29, 1))]:
        lm._compute.threads = threads
        empty_rows(lm, 1)
        assert torch.equal(torch.cat([read(part) for part in text.split(widths, dim=1)], dim=1), whole)
    empty_rows(lm, 3)
    batch = torch.cat([tokens(30), text, tokens(31)[:, :30]])
    batch[0, 11:] = ABSENT
    batch[2, 0] += 1
    together = read(batch)
    assert torch.equal(together[1], whole[0]) and not torch.equal(together[2, 1:], whole[0, 1:])
    assert not together[0, 11:].any(), "no token, no state"
    empty_rows(lm, 1)
    read(text[:, :20])
    parents = [-1, 0, 0, 1, 2, 2, 4, 4, 7, 3]
    tree = read(text[:, 20:], torch.tensor([parents]), keep=False)
    for leaf in range(10):
        path = [leaf]
        while (parent := parents[path[0]]) >= 0:
            path.insert(0, parent)
        assert torch.equal(read(text[:, 20:][:, path], keep=False)[0, -1], tree[0, leaf])


@pytest.mark.parametrize("backend", EXACT)
def test_logits_do_not_depend_on_what_else_is_asked_for(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards texts against a drafter that reads states: all layers, some, one, and logits of few tokens, which must not
    be those of others."""
    lm, text = lm_of(backend, monkeypatch), tokens(12, rows=2)
    empty_rows(lm, 2)
    parents, rows = torch.tensor([[-1, 0, 0, 1, 2, 2, 4, 4, 7, 3, 3, 10]] * 2), torch.tensor([[11, 3, 3], [2, 5, 0]])
    for logit_rows in (None, rows):
        plain = lm.forward(text, parents, logit_rows)
        assert plain.hidden == {}
        for layers in (LAYERS, (2,), (3,), (FINAL_NORM,), (FINAL_NORM, 1)):
            out = lm.forward(text, parents, logit_rows, hidden_layers=layers)
            assert torch.equal(out.logits, plain.logits) and tuple(out.hidden) == layers
    heads = torch.nn.functional.linear(out.hidden[FINAL_NORM], lm.model.lm_head.weight.to(out.logits.dtype))
    torch.testing.assert_close(heads.gather(1, rows[:, :, None].expand_as(out.logits)), out.logits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_returns_what_a_single_pass_does(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards prompts of several chunks and rows of different lengths: states in their order, all but the last token's,
    and 0 where a row has ended."""
    lm, text, lengths = lm_of(backend, monkeypatch), tokens(30, rows=3), [30, 1, 12]
    for row, length in enumerate(lengths):
        text[row, length:] = ABSENT
    empty_rows(lm, 3)
    whole = lm.forward(text, hidden_layers=LAYERS).hidden
    monkeypatch.setattr(causal_lm, "PREFILL_CHUNK", 7)
    out = lm.prefill(to_lists(text), LAYERS)
    logits = lm.forward(torch.tensor(out.last)).logits
    assert out.last == [[int(row[length - 1])] for row, length in zip(text, lengths, strict=True)]
    assert tuple(out.hidden) == LAYERS
    for layer, states in out.hidden.items():
        assert states.shape == (3, 29, 64)
        for row, length in enumerate(lengths):
            expected = whole[layer][row, : length - 1]
            torch.testing.assert_close(states[row, : length - 1], expected, rtol=0 if lm.is_native else 1e-9, atol=0)
            assert not states[row, length - 1 :].any()
    empty_rows(lm, 3)
    plain = lm.prefill(to_lists(text))
    assert plain.hidden == {} and torch.equal(lm.forward(torch.tensor(plain.last)).logits, logits)
    empty_rows(lm, 1)
    empty = lm.prefill(to_lists(text[1:2, :1]), (2,)).hidden[2]
    assert empty.shape == (1, 0, 64) and empty.dtype == whole[2].dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_are_read_in_place_of_embeddings(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way in: the rows of the embedding give the same bits as their ids, in prompts, batches and trees. The
    control is other rows."""
    lm, prompt, text = lm_of(backend, monkeypatch), tokens(20, rows=2), tokens(6, rows=2)
    prompt[0, 13:] = ABSENT
    embedding, parents = lm.model.get_input_embeddings(), torch.tensor([[-1, 0, 0, 1, 2, 2]] * 2)
    found = []
    for change in (None, 1.0, -1.0):
        empty_rows(lm, 2)
        given = [None if change is None else change * embedding(ids.clamp(min=0)) for ids in (prompt, text)]
        lm.prefill(to_lists(prompt), vectors=given[0])
        for _ in range(3):  # the third is replayed
            out = lm.forward(text, parents, vectors=given[1], hidden_layers=(0, 2))
        found.append(out)
    by_id, same, other = found
    limit = 1e-9 if backend == "replayed" else 0.0
    torch.testing.assert_close(same.logits, by_id.logits, rtol=limit, atol=limit)
    assert torch.equal(other.hidden[0], -same.hidden[0])
    assert not torch.isclose(other.logits, by_id.logits).all(2).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_added_ids_are_read_and_never_chosen(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards prompt tokens: an added id is read as its vector, logits have no column for it, and passes without such an
    id have the bits that they had before. The control is the other added id."""
    lm, text = lm_of(backend, monkeypatch), tokens(9)
    rows = lm.model.get_input_embeddings().weight
    before = [lm.forward(text).logits for _ in range(3)][-1]
    added = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(lm.model.dtype)
    assert lm.add_embeddings(added[:1]) == range(len(rows), len(rows) + 1)
    assert lm.add_embeddings(added[1:]) == range(len(rows) + 1, len(rows) + 3)
    after = [lm.forward(text).logits for _ in range(3)][-1]
    assert torch.equal(after, before) and after.shape[2] == len(rows) == lm.vocab_size
    vectors = lm.model.get_input_embeddings()(text)
    vectors[0, 4:6] = added[1:]
    found = []
    for last in (2, 1):
        text[0, 4:6] = torch.tensor([len(rows) + 1, len(rows) + last])
        found.append([lm.forward(text).logits for _ in range(3)][-1])
    expected = [lm.forward(text, vectors=vectors).logits for _ in range(3)][-1]
    limit = 1e-9 if backend == "replayed" else 0.0
    torch.testing.assert_close(found[0], expected, rtol=limit, atol=limit)
    assert torch.equal(found[1][:, :5], found[0][:, :5]) and not torch.isclose(found[1], found[0])[:, 5:].all(2).any()
    text[0, 4] = len(rows) + 3
    with pytest.raises((AssertionError, IndexError)):
        lm.forward(text)


def test_embeddings_of_another_width_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory, and a user who trained them for another model."""
    lm = lm_of("eager", monkeypatch)
    for shape in ((2, 63), (64,), (0, 64)):
        with pytest.raises(ValueError, match=r"this model needs \[1 or more, 64\]"):
            lm.add_embeddings(torch.zeros(shape))


@pytest.mark.parametrize(("layers", "words"), [((4,), "hidden layer 4: use 0"), ((-2,), "-2"), ((1, 1), "only once")])
def test_layers_that_are_not_there_are_refused(
    layers: tuple[int, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a drafter whose checkpoint names layers of a deeper target."""
    lm = lm_of("C++", monkeypatch)
    for read in (lambda: lm.forward(tokens(3), hidden_layers=layers), lambda: lm.prefill(to_lists(tokens(3)), layers)):
        with pytest.raises(ValueError, match=words):
            read()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_done_for_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards plain decoding: without a request no buffer is made and the model's own forward runs. The control counts
    one such piece of work for each pass with a request."""
    lm, done = lm_of(backend, monkeypatch), []
    place, name = (NativePass, "_states") if lm.is_native else (eager, "layer_by_layer")
    work = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *given: (done.append(name), work(*given))[1])
    empty_rows(lm, 1)
    for layers in ((), (2,)):
        assert tuple(lm.prefill(to_lists(tokens(5)), layers).hidden) == layers
        assert tuple(lm.forward(tokens(4), hidden_layers=layers).hidden) == layers
        assert len(done) == 2 * len(layers)


def test_states_of_a_text_that_sees_nan_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards other branches and rows against a token whose states are no numbers, in every layer and backend."""
    for backend in ("C++", "eager"):
        lm = lm_of(backend, monkeypatch)
        embedding = lm.model.get_input_embeddings()
        vectors = embedding(tokens(4, rows=2))
        vectors[0, 1] = torch.nan
        empty_rows(lm, 2)
        hidden = lm.forward(tokens(4, rows=2), torch.tensor([[-1, 0, 0, 1]] * 2), hidden_layers=(1, 3), vectors=vectors)
        for states in hidden.hidden.values():
            assert states.isnan().all(2).tolist() == [[False, True, False, True], [False] * 4]
            assert states.isnan().any(2).tolist() == [[False, True, False, True], [False] * 4]


def test_recordings_of_different_layers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards CUDA graphs: passes of the same shapes that return the states of other layers. The control replays without
    telling them apart."""
    lm = lm_of("replayed", monkeypatch)
    text = tokens(5)
    expected = own_states(lm.model, text)

    def right() -> list[bool]:
        return [
            torch.allclose(lm.forward(text, hidden_layers=(layer,)).hidden[layer], expected[layer])
            for layer in (1, 2, 1, 2, 1, 2)
        ]

    assert all(right()) and Recorder.recorded == 2
    replay = Replays.__call__
    monkeypatch.setattr(Replays, "__call__", lambda self, *given, kind: replay(self, *given))
    lm._compute.forget()
    assert right() == [True, True, False, True, False, True], "each time that of layer 2"


@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_head_of_states_is_that_of_the_pass(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards drafters that read states: what the head makes of them is what the pass made of them, to the last bit in
    C++, and forbidden ids stay forbidden."""
    lm = lm_of(backend, monkeypatch, kind)
    lm.forbid([3])
    out = lm.forward(tokens(7), hidden_layers=(FINAL_NORM,))
    found = lm.head(out.hidden[FINAL_NORM])
    assert bool((found[..., 3] == -torch.inf).all()) and found.shape == out.logits.shape
    if backend.startswith("C++"):
        assert torch.equal(found, out.logits)
    else:
        torch.testing.assert_close(found, out.logits)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_layers_and_embeddings_of_a_drafter(
    backend: str, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards layers whose numbers of inputs and outputs are no multiples of anything, with a bias and without, and
    their bits, which must not depend on the rows beside."""
    lm = lm_of(backend, monkeypatch, size=size)
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(37, size[0], generator=generator), torch.randn(37, generator=generator)
    weight, bias = weight.bfloat16().float(), bias.bfloat16().float()
    inputs = torch.randn(3, 5, size[0], generator=generator).bfloat16().float()
    for added in (None, bias):
        layer = lm.linear(weight, added)
        expected = torch.nn.functional.linear(
            inputs.double(), weight.double(), None if added is None else added.double()
        )
        torch.testing.assert_close(layer(inputs).double(), expected, rtol=1e-4, atol=1e-4)
        if backend.startswith("C++"):
            assert torch.equal(layer(inputs)[1:2, 2:3], layer(inputs[1:2, 2:3]))
    ids = torch.tensor([[1, ABSENT], [2, 0]])
    found = lm.embed(ids)
    assert torch.equal(found[1, 0], lm.model.get_input_embeddings().weight[2]) and found.shape == (2, 2, size[0])
