from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paradraft.data.samples import Sample
from paradraft.models.runtime import Runtime
from paradraft.train.drafters.medusa import MedusaHeads, MedusaRecipe
from paradraft.train.objectives.batch import Drop, collate
from paradraft.train.objectives.losses import IMPOSSIBLE
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.objectives.teacher_loading import load_teacher
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.support.kinds import model_of

ROWS = VOCAB + 8
TEXTS = [[7, 3, 0, 9, 9, 2, 5, 1, 0, 4, 6, 8], [1, 2, 3, 2, 1]]


@pytest.mark.parametrize("mask_id", [5, VOCAB + 1, None])
@pytest.mark.parametrize("width", [ROWS, ROWS + 5])
@pytest.mark.parametrize("packed", [False, True])
def test_a_teacher_answers_for_the_token_of_each_label(width: int, mask_id: int | None, packed: bool) -> None:
    """Guards against logits one token off or of another sample, and against any for ids that decoding forbids: the mask
    and rows that only pad the embedding."""
    model = tiny_model(6)
    samples = [Sample(tokens=text, is_label=[True] * len(text)) for text in TEXTS]
    generators = [torch.Generator(), torch.Generator()]
    drop = Drop(k=1, r=1.0, r_min=0.2, mask_id=None)
    groups = [samples] if packed else [[sample] for sample in samples]
    batch = collate(groups, drop, [generators] if packed else [[generator] for generator in generators])
    teacher = Teacher(model, vocab_size=VOCAB, mask_id=mask_id)
    read = teacher.read(batch.texts)
    allowed = [token for token in range(VOCAB) if token != mask_id]
    for text, tokens in enumerate(TEXTS):
        for position in range(len(tokens) - 1):
            place = (0, text * (len(TEXTS[0]) - 1) + position) if packed else (text, position)
            answer = teacher.expects(read[place][None], width)[0]
            logits = model(torch.tensor([tokens[: position + 1]])).logits[0, -1]
            torch.testing.assert_close(answer[allowed], logits[allowed].float())
            assert len(answer) == width
            assert (answer <= IMPOSSIBLE).sum() == width - len(allowed)


@pytest.mark.parametrize("kind", ["granite", "gemma3_text with a softcap"])
def test_what_teachers_and_heads_expect_is_the_models_own(kind: str) -> None:
    """Guards logits that a model divides or squeezes after its head."""
    model, tokens = model_of(kind), torch.tensor([[5, 3, 8]])
    with torch.no_grad():
        expected, states = model(tokens).logits[0], model.model(tokens).last_hidden_state[0]
        teacher = Teacher(model, vocab_size=ROWS, mask_id=None)
        torch.testing.assert_close(teacher.expects(states, ROWS), expected.float())
        recipe = MedusaRecipe(model="m", data=["d"], out="o", steps=1, k=2)
        heads, own = (MedusaHeads(teacher, recipe.model_copy(update={"own_heads": own})) for own in (False, True))
        torch.testing.assert_close(heads.head(states, torch.zeros(3, dtype=torch.long)), expected)
        if kind == "granite":  # heads of their own begin as the model's
            begun = own.double().head(states, torch.zeros(3, dtype=torch.long))
            torch.testing.assert_close(begun, expected, rtol=1e-5, atol=1e-5)


def load_for(family: Path, longest: int, name: str | None = None) -> Teacher:
    name = str(family / "target") if name is None else name
    return load_teacher(name, tiny_tokenizer(), mask_id=VOCAB, longest=longest, largest=VOCAB - 1, runtime=Runtime())


def test_a_loaded_teacher_is_the_model_and_is_not_trained(family: Path) -> None:
    """Guards against gradients, and their memory, for a model that only answers."""
    teacher = load_for(family, longest=128)
    assert teacher.vocab_size == VOCAB
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


@pytest.mark.parametrize(
    ("name", "longest", "message"),
    [
        ("pocket", 9, "teacher 'pocket' has another vocabulary than the model: use one of the same family"),
        ("no/such/folder", 9, "teacher: unknown model 'no/such/folder'"),
        (None, 129, "has room for 128 tokens, a sample has 129: set max_length=128"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(family: Path, name: str | None, longest: int, message: str) -> None:
    """Guards against probabilities of other tokens, and those of a model beyond its context."""
    with pytest.raises(ValueError, match=message):
        load_for(family, longest, name)


def test_a_teacher_without_a_row_for_a_token_is_refused(family: Path) -> None:
    """Guards against an index error in the middle of a run: tokens added to a draft's tokenizer are none of the
    teacher's, though both are of one family."""
    settings = {"mask_id": None, "longest": 9, "runtime": Runtime()}
    load_teacher(str(family / "target"), tiny_tokenizer(), largest=VOCAB + 7, **settings)
    with pytest.raises(
        ValueError, match=r"teacher '.*target' has an embedding of 72 rows, and the data holds token 72"
    ):
        load_teacher(str(family / "target"), tiny_tokenizer(), largest=VOCAB + 8, **settings)
