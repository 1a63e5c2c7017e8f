"""Training of draft models whose output head has fewer rows than the vocabulary (`paradraft trim`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paradraft.data.samples import Sample
from paradraft.engine.loader import load
from paradraft.formats.vocab_map import D2T, VocabMap
from paradraft.models.runtime import Runtime
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.objectives.rows import attention_mask
from paradraft.train.objectives.teacher import Teacher
from tests.conftest import VOCAB, tiny_model
from tests.contract.test_every_trainee import prepare, recipe_for, train
from tests.support.reduced_heads import reduced_folder
from tests.unit.text.test_vocabulary import NAMES, never_said, with_special

IDS = list(range(0, 64, 2))


@pytest.fixture(scope="module")
def reduced(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reduced_folder(family / "draft", tmp_path_factory.mktemp("reduced") / "draft", IDS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"teacher": "target", "weighting": "chain"},
        {"teacher": "target", "previous_token_rank": 4},
        {"k": 1},
        {"lora": {"rank": 2}},
    ],
    ids=str,
)
def test_the_trained_draft_has_the_same_ids(
    family: Path, reduced: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    """Guards the rows and their map through training, saving and decoding: what is drafted has a row, and texts are the
    target's."""
    if "teacher" in settings:
        settings = settings | {"teacher": str(family / "target")}
    recipe = recipe_for("pard", family, tmp_path / "out", model=str(reduced), **({"k": 4} | settings))
    train("pard", recipe)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as stored:
        d2t, head = stored.get_tensor(D2T), stored.get_tensor("lm_head.weight")
    assert (d2t + torch.arange(len(d2t))).tolist() == IDS and len(head) == len(IDS)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] == len(IDS)
    name = "autoregressive" if settings.get("k") == 1 else "pard"
    runtime = Runtime(dtype="float64", compiled=False)
    texts = [
        load(str(family / "target"), drafter=drafter, draft=draft, k=4, runtime=runtime)
        .generate(["hello", "abcabc"], max_new_tokens=12)
        for drafter, draft in ((name, str(tmp_path / "out")), ("none", None))
    ]  # fmt: skip
    assert [each.tokens for each in texts[0]] == [each.tokens for each in texts[1]]


@pytest.mark.parametrize("is_untied", [False, True])
def test_its_mask_is_a_token_that_is_never_said(family: Path, tmp_path: Path, is_untied: bool) -> None:
    """Guards the target's text, in which the mask is forbidden: of the special tokens without a row in the head only
    those with untrained rows are fit, and without the original head nothing shows which these are."""
    model = tiny_model(3, rows=VOCAB + len(NAMES))
    with torch.no_grad():
        never_said("<file>", "<issue>", head=model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path / "whole")
    with_special(*NAMES).save_pretrained(tmp_path / "whole")
    reduced_folder(tmp_path / "whole", tmp_path / "reduced", IDS)
    if is_untied:
        weights = load_file(tmp_path / "reduced" / "model.safetensors")
        torch.nn.init.normal_(weights["model.embed_tokens.weight"])
        save_file(weights, tmp_path / "reduced" / "model.safetensors", metadata={"format": "pt"})
    recipe = recipe_for("pard", family, tmp_path / "out", model=str(tmp_path / "reduced"), k=3)
    if is_untied:
        with pytest.raises(ValueError, match="no untrained token for the mask: train it before it is trimmed"):
            prepare("pard", recipe)
    else:
        assert list(prepare("pard", recipe).trainee.masks) == [VOCAB + NAMES.index("<issue>")]


def test_only_tokens_with_a_row_are_learnt(family: Path, reduced: Path, tmp_path: Path) -> None:
    """Guards the loss: that of the distribution over the head's ids, where the next token is one of these; other rows
    count as wrong."""
    teacher = str(family / "target")
    recipe = recipe_for("pard", family, tmp_path / "out", model=str(reduced), k=3, teacher=teacher, r=1.0)
    trainee = prepare("pard", recipe).trainee
    objective, vocab_map = trainee.objective, VocabMap(to_target=torch.tensor(IDS))
    tokens = [4, 9, 12, 13, 20, 22, 35, 8, 8, 10]
    batch = trainee.collate([[Sample(tokens=tokens, is_label=[True] * 10)]], [[torch.Generator().manual_seed(0)]])
    weights_K = torch.tensor([1.0, 0.5, 0.25])
    with torch.no_grad():
        loss, right_K, _ = objective(batch, weights_K)
        whole = Teacher(objective.teacher.model, vocab_size=72, mask_id=None)
        expected, right = 0.0, torch.zeros(3)
        states = objective.model.model(
            inputs_embeds=objective.model.get_input_embeddings()(batch.tokens),
            attention_mask=attention_mask(batch.rows, objective.model), position_ids=batch.positions, use_cache=False,
        ).last_hidden_state[0]  # fmt: skip
        read = whole.read(batch.texts)[0]
        for row, label in enumerate(batch.labels[0].tolist()):
            if label == IGNORED or label not in IDS:
                continue
            q = (states[row] @ objective.model.lm_head.weight.T).float().log_softmax(0)
            p = whole.expects(read[batch.text_indices[0, row]][None], 72)[0, IDS].log_softmax(0)
            depth = int(batch.depths[0, row])
            expected += float(weights_K[depth] * (p.exp() * (p - q)).sum())
            right[depth] += int(vocab_map.to_target[q.argmax()]) == label
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert right_K.tolist() == right.tolist()
