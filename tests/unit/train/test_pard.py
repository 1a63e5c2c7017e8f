"""What PARD training sees against what PARD decoding sees."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paradraft.core import Prompt, Sampling
from paradraft.models.causal_lm import CausalLM
from paradraft.train.data import Sample
from paradraft.train.losses import IGNORED
from paradraft.train.pard import add_mask_token, collate, forward
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer

ROWS = VOCAB + 8
MASK = VOCAB + 1
TEXTS = [[7, 3, 0, 9, 9, 2, 5, 1, 0, 4, 6, 8], [1, 2, 3, 2, 1]]


def samples() -> list[Sample]:
    return [Sample(tokens=text, is_label=[True] * len(text)) for text in TEXTS]


def batch_of(r: float, k: int = 4, seed: int = 0):
    return collate(samples(), MASK, k=k, r=r, r_min=0.2, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("llama", [False, True])
@pytest.mark.parametrize("r", [1.0, 0.6])
def test_training_predicts_what_decoding_computes(llama: bool, r: float) -> None:
    """Guards the heart of PARD: a chain of training rows is exactly the draft pass after its anchor (float64)."""
    model, k = tiny_model(5, llama=llama), 4
    lm = CausalLM(model, vocab_size=ROWS, compiled=False)
    batch = batch_of(r, k)
    with torch.no_grad():
        logits, labels, depths = forward(model, batch)
    real = batch.labels != IGNORED
    where = list(zip(real.nonzero()[:, 0].tolist(), batch.positions[real].tolist(), depths.tolist(), strict=True))
    assert len(where) == len(logits) and {depth for _, _, depth in where} == set(range(k))
    drafts = {}
    for sample, position, depth in where:
        anchor = position - depth
        if (sample, anchor) not in drafts:
            text = TEXTS[sample][: anchor + 1]
            last = lm.start(Prompt(tokens=torch.tensor([text]), sampling=(Sampling(),)))
            drafts[sample, anchor] = lm.forward(torch.cat([last, torch.full((1, k - 1), MASK)], dim=1))[0]
    expected = torch.stack([drafts[sample, position - depth][depth] for sample, position, depth in where])
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    assert labels.tolist() == [TEXTS[sample][position + 1] for sample, position, _ in where]


def test_only_labels_count() -> None:
    """Guards against learning the prompt, against masks inside the prompt, where nothing is ever drafted, and against
    a shifted label flag: the flag is that of the next token."""
    sample = Sample(tokens=[1, 2, 3, 4, 5], is_label=[False, False, True, True, False])
    batch = collate([sample], MASK, k=2, r=1.0, r_min=0.0, generator=torch.Generator())
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 2, 3]
    assert batch.tokens[0].tolist() == [1, 2, 3, 4, MASK, MASK]
    assert batch.labels[0].tolist() == [IGNORED, 3, 4, IGNORED, 4, IGNORED]


def test_samples_of_a_batch_do_not_see_each_other_or_the_filling() -> None:
    """Guards against rows that only fill up: nobody sees them, they see themselves alone, and nothing becomes NaN."""
    batch = batch_of(0.6)
    R = int((batch.labels[1] != IGNORED).sum())
    size = batch.tokens.shape[1]
    assert R < size
    assert not batch.sees[1, 0, :R, R:].any()
    assert torch.equal(batch.sees[1, 0, R:], torch.eye(size, dtype=torch.bool)[R:])
    assert forward(tiny_model(5), batch)[0].isfinite().all()


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_no_dense_mask_is_built_before_dropping() -> None:
    """Guards against a (K N)^2 tensor: 1 GiB per sample at N = 1024 and K = 16."""
    n, k = 100, 16
    sample = Sample(tokens=[1] * (n + 1), is_label=[True] * (n + 1))
    generator = torch.Generator().manual_seed(0)
    with Largest() as dropped:
        batch = collate([sample], MASK, k=k, r=0.5, r_min=0.05, generator=generator)
    with Largest() as control:
        collate([sample], MASK, k=k, r=1.0, r_min=0.05, generator=generator)
    assert dropped.elements == batch.tokens.shape[1] ** 2 < (k * n) ** 2 / 10
    assert control.elements > (k * n) ** 2 / 2, "the control must see the dense mask"


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
    model = tiny_model(6)
    setattr(model.config, name, known)
    before = model.get_input_embeddings().weight.detach().clone()
    assert add_mask_token(model, tiny_tokenizer()) == known
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert model.config.mask_token_id == model.config.pard_token == known


@pytest.mark.parametrize("mask_id", [-1, ROWS])
def test_a_mask_token_outside_the_embedding_is_refused(mask_id: int) -> None:
    """Guards against an index error in the middle of training."""
    with pytest.raises(ValueError, match=f"mask_token_id={mask_id} is outside"):
        add_mask_token(tiny_model(6), tiny_tokenizer(), mask_id)


def test_eager_attention_obeys_the_mask_too() -> None:
    """Guards models without SDPA, which would silently train with every row seeing every other: then logits are off by
    whole units. Eager attention takes its softmax in float32 whatever the model's dtype, hence the tolerance."""
    model = tiny_model(5)
    with torch.no_grad():
        expected = forward(model, batch_of(0.6))[0]
        model.set_attn_implementation("eager")
        torch.testing.assert_close(forward(model, batch_of(0.6))[0], expected, rtol=1e-3, atol=1e-4)
