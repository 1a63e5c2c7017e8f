"""What PARD training sees against what PARD decoding sees."""

from __future__ import annotations

import argparse

import cod_cost
import pytest
import torch

from paradraft.data.samples import Sample
from paradraft.models.causal_lm import CausalLM
from paradraft.train.init.adaptation import add_mask_token
from paradraft.train.objectives.batch import Drop, TrainingBatch, collate
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.objectives.objective import Objective
from paradraft.train.objectives.row_loss import RowLoss, in_text_order
from paradraft.train.objectives.teacher import Teacher
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.support.decoding import prefilled
from tests.support.kinds import model_of

ROWS = VOCAB + 8
MASK = VOCAB + 1
TEXTS = [[7, 3, 0, 9, 9, 2, 5, 1, 0, 4, 6, 8], [1, 2, 3, 2, 1]]


def batch_of(r: float, k: int = 4, *, packed: bool = False, texts: list[list[int]] = TEXTS) -> TrainingBatch:
    samples = [Sample(tokens=text, is_label=[True] * len(text)) for text in texts]
    generators = [torch.Generator().manual_seed(text[0]) for text in texts]
    drop = Drop(k=k, r=r, r_min=0.2, mask_id=MASK)
    if packed:
        return collate([samples], drop, [generators])
    return collate([[sample] for sample in samples], drop, [[generator] for generator in generators])


def predictions(objective: Objective, batch: TrainingBatch) -> tuple[torch.Tensor, list[int]]:
    """The logits of all labelled rows as training computes them, and how many rows came at a time."""
    seen: list[torch.Tensor] = []
    logits_of = objective._logits
    objective._logits = lambda states: seen.append(logits_of(states)) or seen[-1]
    with torch.no_grad():
        objective(batch, torch.ones(8))
    return torch.cat(seen), list(map(len, seen))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "granite", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("r", [1.0, 0.6])
def test_training_predicts_what_decoding_computes(kind: str, r: float, packed: bool) -> None:
    """Guards the heart of PARD: a chain of training rows is exactly the draft pass after its anchor (float64), with
    samples side by side, or packed one after the other, where none may see another."""
    model, k = model_of(kind), 4
    lm = CausalLM(model, vocab_size=ROWS, compiled=False)
    batch = batch_of(r, k, packed=packed)
    logits, _ = predictions(Objective(model), batch)
    order = in_text_order(batch)
    group = order // batch.labels.shape[1]
    text = batch.documents.flatten()[order] if packed else group
    places = [tensor.flatten()[order].tolist() for tensor in (batch.positions, batch.depths, batch.labels)]
    rows = list(zip(text.tolist(), *places, strict=True))
    assert len(rows) == len(logits) and {depth for _, _, depth, _ in rows} == set(range(k))
    drafts = {}
    for sample, position, depth, label in rows:
        anchor = position - depth
        assert label == TEXTS[sample][position + 1]
        if (sample, anchor) not in drafts:
            last = prefilled(lm, [TEXTS[sample][: anchor + 1]])
            drafts[sample, anchor] = lm.forward(torch.cat([last, torch.full((1, k - 1), MASK)], dim=1)).logits[0]
    expected = torch.stack([drafts[sample, position - depth][depth] for sample, position, depth, _ in rows])
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [None, "forward_kl", "total_variation"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_logits_in_pieces_give_the_same_gradients(chunk: int, kind: str | None) -> None:
    """Guards the bound on memory: [rows, V] logits are never whole, and pieces change neither loss nor gradient."""
    batch = batch_of(0.6)
    weights = torch.tensor([1.0, 0.5, 0.25, 2.0])
    results = []
    for rows in (10**6, chunk):
        model = tiny_model(5)
        teacher = None if kind is None else Teacher(tiny_model(6), vocab_size=VOCAB, mask_id=MASK)
        objectives = [Objective(model, teacher=teacher, row_loss=RowLoss(kind=kind)) for _ in range(2)]
        for objective in objectives:
            objective.chunk = rows
        _, sizes = predictions(objectives[0], batch)
        assert max(sizes) == min(rows, int((batch.labels != IGNORED).sum()))
        loss, right, _ = objectives[1](batch, weights)
        loss.backward()
        results.append((loss.detach(), right, {name: p.grad for name, p in model.named_parameters()}))
    (loss, right, gradients), (other_loss, other_right, other_gradients) = results
    torch.testing.assert_close(loss, other_loss)
    assert torch.equal(right, other_right)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-6, atol=1e-9)


def test_rows_are_counted_by_depth() -> None:
    """Guards the accuracies on the screen, against a model that is right about one token and about no other."""
    batch = batch_of(1.0)
    model = tiny_model(5)
    with torch.no_grad():
        _, right, _ = Objective(model)(batch, torch.ones(4))
    logits, _ = predictions(Objective(model), batch)
    order = in_text_order(batch)
    hits = logits.argmax(-1) == batch.labels.flatten()[order]
    expected = [int(hits[batch.depths.flatten()[order] == depth].sum()) for depth in range(4)]
    assert right.tolist() == expected
    assert batch.labels_by_depth(4).tolist() == [15, 13, 11, 9]


def test_mask_token_takes_an_unused_row_and_the_mean_embedding() -> None:
    """Guards against overwriting a token in use, and against an embedding that the model has never seen the like of."""
    model = tiny_model(6)
    before = model.get_input_embeddings().weight.detach().clone()
    assert add_mask_token(model, tiny_tokenizer()) == VOCAB
    after = model.get_input_embeddings().weight
    torch.testing.assert_close(after[VOCAB], before[:VOCAB].mean(0))
    after = after.detach().clone()
    after[VOCAB] = before[VOCAB]
    assert torch.equal(after, before)
    assert (model.config.pard_token, model.config.mask_token_id, model.config.spd_type) == (VOCAB, VOCAB, "pard")


def test_mask_token_is_added_where_no_row_is_free() -> None:
    """Guards against an index error, or a token in use, in models whose embedding is not padded."""
    model = tiny_model(6, rows=VOCAB)
    before = model.get_input_embeddings().weight.detach().clone()
    assert add_mask_token(model, tiny_tokenizer()) == VOCAB
    assert model.config.vocab_size == model.get_output_embeddings().weight.shape[0] == VOCAB + 1
    torch.testing.assert_close(model.get_input_embeddings().weight[VOCAB], before.mean(0))


def test_untied_output_row_is_initialised_too() -> None:
    """Guards models whose output matrix is not the embedding."""
    model = tiny_model(6)
    head = torch.nn.Parameter(torch.randn(ROWS, 32, dtype=torch.float64))
    model.get_output_embeddings().weight = head
    before = head.detach().clone()
    add_mask_token(model, tiny_tokenizer(), VOCAB + 2)
    torch.testing.assert_close(head[VOCAB + 2], before[:VOCAB].mean(0))


@pytest.mark.parametrize("known", [0, 5])
@pytest.mark.parametrize("name", ["pard_token", "mask_token_id"])
def test_a_known_mask_token_is_kept_with_its_embedding(name: str, known: int) -> None:
    """Guards training that goes on from a PARD model, AMD's too: its mask is trained already; id 0 is an id."""
    model, tokenizer = tiny_model(6), tiny_tokenizer()
    tokenizer.eos_token = "9"  # the tiny models' end is id 0
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    setattr(model.config, name, known)
    before = model.get_input_embeddings().weight.detach().clone()
    assert add_mask_token(model, tokenizer) == known
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert model.config.mask_token_id == model.config.pard_token == known


@pytest.mark.parametrize("mask_id", [-1, ROWS])
def test_a_mask_token_outside_the_embedding_is_refused(mask_id: int) -> None:
    """Guards against an index error in the middle of training."""
    with pytest.raises(ValueError, match=f"mask_token_id={mask_id} is outside"):
        add_mask_token(tiny_model(6), tiny_tokenizer(), mask_id)


def test_a_mask_token_that_is_a_text_is_refused() -> None:
    """Guards against a target that may not say a word of its own, because a drafter uses it as its mask."""
    with pytest.raises(ValueError, match="mask_token_id=5 is 'e'"):
        add_mask_token(tiny_model(6), tiny_tokenizer(), 5)


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_attention_obeys_the_mask(implementation: str, packed: bool) -> None:
    """Guards models without SDPA, which would silently train with every row seeing every other, and the block masks of
    flex_attention, which a CPU can run forwards only: logits would be off by whole units. Both take their softmax in
    float32 whatever the model's dtype, hence the tolerance."""
    model = tiny_model(5)
    batch = batch_of(0.6, packed=packed)
    expected, _ = predictions(Objective(model), batch)
    model.set_attn_implementation(implementation)
    with torch.compiler.set_stance("force_eager"):
        found, _ = predictions(Objective(model), batch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_the_mask_is_what_makes_the_difference() -> None:
    """The control of the test above: rows of another document change what is predicted where the rule is not obeyed."""
    model = tiny_model(5)
    packed = batch_of(0.6, packed=True)
    together = TrainingBatch(**{**vars(packed), "documents": torch.zeros_like(packed.documents)})
    assert (predictions(Objective(model), packed)[0] - predictions(Objective(model), together)[0]).abs().max() > 0.1


def test_the_recipe_that_measures_cod_runs_on_a_tiny_shape() -> None:
    """Guards a command for a GPU that no test would meet otherwise: K = 8 rows a token, and what COD leaves."""
    args = argparse.Namespace(shape="tiny-draft", tokens=40, steps=1, device="cpu")
    without, cod = (cod_cost.measure(setting, args) for setting in cod_cost.SETTINGS)
    assert without["rows"] == sum(40 - depth for depth in range(8))
    assert len(cod["step_s"]) == 1 and 2 < without["rows"] / cod["rows"] < 2.5


def test_a_mask_that_ends_texts_is_refused() -> None:
    """Guards against a drafter with which no answer ends: a mask is forbidden, and so is an end with the same id."""
    model = tiny_model(6)
    with pytest.raises(ValueError, match=r"mask token 0 \(<\|eos\|>\) ends a text"):
        add_mask_token(model, tiny_tokenizer(), 0)
    model.generation_config.eos_token_id = [0, VOCAB + 2]
    for settings in ({"mask_id": VOCAB + 2}, {"mask_id": VOCAB + 1, "masks": 3}):
        with pytest.raises(ValueError, match=f"mask token {VOCAB + 2}"):
            add_mask_token(model, tiny_tokenizer(), **settings)
    assert not hasattr(model.config, "pard_token")
    model.config.pard_token = VOCAB + 2
    with pytest.raises(ValueError, match=f"mask token {VOCAB + 2}"):
        add_mask_token(model, tiny_tokenizer())
