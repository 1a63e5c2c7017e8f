"""A teacher in few bits answers with the very pass that decodes."""

from __future__ import annotations

import pytest
import torch

from paradraft.data.samples import Sample
from paradraft.models.forward import FINAL_NORM
from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target
from paradraft.train.objectives import pass_teacher
from paradraft.train.objectives.batch import Drop, TrainingBatch, collate
from paradraft.train.objectives.losses import IMPOSSIBLE
from paradraft.train.objectives.pass_teacher import PassTeacher
from paradraft.train.objectives.teacher_loading import load_teacher
from tests.support.gguf_files import tiny_model, tiny_tokenizer, write_gguf

TEXTS = [[7, 3, 1, 9, 9, 2, 5, 1, 3, 4, 6, 8], [1, 2, 3, 2, 1], [4, 4, 8], [9, 1, 2, 3]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("few") / "target.gguf"
    write_gguf(path, tiny_model("llama"), "Q8_0")
    return str(path)


def teacher_of(file: str, mask_id: int | None = None) -> PassTeacher:
    teacher = load_teacher(
        file, tiny_tokenizer(), mask_id=mask_id, longest=12, largest=9, runtime=Runtime(device="cpu", dtype="float32")
    )
    assert isinstance(teacher, PassTeacher)
    return teacher


def batch_of(packed: bool) -> TrainingBatch:
    samples = [Sample(tokens=text, is_label=[True] * len(text)) for text in TEXTS]
    groups = [samples[:3], samples[3:]] if packed else [[sample] for sample in samples]
    generators = [[torch.Generator() for _ in group] for group in groups]
    return collate(groups, Drop(k=1, r=1.0, r_min=0.2, mask_id=None), generators)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask_id", [6, None])
def test_logits_are_those_of_decoding(
    file: str, packed: bool, mask_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what is learnt: to the last bit what the target says when it decodes, after each text's own tokens."""
    monkeypatch.setattr(pass_teacher, "SAMPLES", 3)
    teacher, lm, batch = teacher_of(file, mask_id), load_target(file).lm, batch_of(packed)
    read = teacher.read(batch.texts)
    places = [(0, 0), (0, 11), (0, 15), (1, 0)] if packed else [(row, 0) for row in range(4)]
    width = lm.model.config.vocab_size + 3
    for (group, first), tokens in zip(places, TEXTS, strict=True):
        count = len(tokens) - 1
        lm.start()
        lm.cache.join(1)
        expected = lm.forward(torch.tensor([tokens[:-1]])).logits[0]
        found = teacher.expects(read[group, first : first + count], width)
        allowed = [token for token in range(lm.vocab_size) if token != mask_id]
        assert torch.equal(found[:, allowed], expected[:, allowed])
        forbidden = [token for token in range(width) if token not in allowed]
        assert (found[:, forbidden] == IMPOSSIBLE).all()


def test_states_are_those_of_the_layers_that_were_asked_for(file: str) -> None:
    """Guards drafters on states: the order of layers, and zeros where a group is shorter than another."""
    teacher, lm, batch = teacher_of(file), load_target(file).lm, batch_of(packed=True)
    states = teacher.states(batch.texts, [1, FINAL_NORM, 0])
    lm.start()
    lm.cache.join(1)
    out = lm.forward(torch.tensor([TEXTS[1][:-1]]), hidden_layers=[0, 1, FINAL_NORM])
    expected = torch.cat([out.hidden[layer][0] for layer in (1, FINAL_NORM, 0)], dim=-1)
    assert torch.equal(states[0, 11:15], expected)
    assert not states[1, 3:].any() and states[1, :3].any()


def test_a_teacher_leaves_no_texts_in_memory(file: str) -> None:
    """Guards long runs: keys and values are those of a few samples."""
    teacher = teacher_of(file)
    for _ in range(3):
        teacher.read(batch_of(packed=False).texts)
        assert not teacher._lm.cache.lengths
