"""What PARD-2 training sees against what PARD-2 decoding sees, and against PARD."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.core import Request
from paradraft.data.samples import Sample
from paradraft.decode.generation import Generation
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.forward import ForwardOut
from paradraft.models.runtime import Runtime
from paradraft.train.drafters.pard2 import Pard2Recipe, Pard2Trainee
from paradraft.train.objectives.row_loss import in_text_order
from tests.conftest import VOCAB
from tests.contract.test_every_trainee import prepare, recipe_for, train
from tests.support.decoding import requests
from tests.unit.train.drafters.test_pard import predictions

LAYERS = [1, -1]


def trainee_of(family: Path, out: Path, **settings: Any) -> Pard2Trainee:
    """A trainee whose weights are no longer zeros."""
    trainee = prepare("pard2", recipe_for("pard2", family, out, k=4, target_layers=LAYERS, **settings)).trainee
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in trainee.objective.parameters():
            weight += 0.2 * weight.std().clamp(min=0.1) * torch.randn(weight.shape, generator=generator)
            weight.copy_(weight.bfloat16())
    assert isinstance(trainee, Pard2Trainee)
    return trainee


@pytest.mark.parametrize("settings", [{}, {"previous_token_rank": 6}, {"distinct_masks": True}])
@pytest.mark.parametrize("compiled", [False, True])
def test_decoding_computes_what_is_trained(
    family: Path, tmp_path: Path, settings: dict[str, Any], compiled: bool
) -> None:
    """Guards states that training pairs with other tokens than decoding does: the drafter would lose acceptance and
    nothing else. Its draft, taken as the text, is what the trained rows after the prompt predict."""
    trainee = trainee_of(family, tmp_path / "out", state_scale=0.5, **settings)
    objective = trainee.objective.eval()
    trainee.save(tmp_path / "drafter", objective.state_dict())
    runtime = Runtime(dtype="float32", compiled=compiled)
    draft = str(tmp_path / "drafter")
    drafted = load(str(family / "target"), drafter="pard2", draft=draft, k=4, runtime=runtime, lengths="fixed")
    batch, others = drafted.new_batch(), 0
    for prompt in ([5], [7, 9, 11, 13, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], [8] * 70):
        batch.clear()
        batch.join([Generation(Request(tokens=prompt))])
        guess = batch.drafter.propose([4]).tokens[0].tolist()
        text = Sample(tokens=prompt + guess, is_label=[True] * (len(prompt) + 4))
        rows = trainee.collate([[text]], [[torch.Generator()]])
        for added in (objective.added, None):
            objective.added, whole = added, objective.added
            logits, _ = predictions(objective, rows)
            objective.added = whole
            order = in_text_order(rows)
            is_after = (rows.positions - rows.depths).flatten()[order] == len(prompt) - 1
            assert rows.depths.flatten()[order][is_after].tolist() == [0, 1, 2, 3]
            predicted = logits[is_after][:, :VOCAB].argmax(-1).tolist()
            assert added is None or predicted == guess
            others += predicted != guess
    assert others, "the states decide no token, and this test could not fail"


def logits_of(engine: Engine) -> list[torch.Tensor]:
    """The logits of all tokens in the draft model's passes, while three answers of two tokens to thirty are decoded."""
    made: list[torch.Tensor] = []
    forward = engine.drafter.lm.forward

    def noted(tokens_BN: torch.Tensor, *args: Any, logit_rows: torch.Tensor, **kwargs: Any) -> ForwardOut:
        out = forward(tokens_BN, *args, logit_rows=logit_rows, **kwargs)
        made.append(out.logits[tokens_BN.gather(1, logit_rows) >= 0])
        return out

    engine.drafter.lm.forward = noted
    batch = engine.new_batch()
    batch.join(list(map(Generation, requests([[5, 6], [1, 2, 3, 4], [9] * 70], limits=[30, 2, 20]))))
    while not batch.is_finished:
        batch.step()
    return made


@pytest.mark.parametrize(
    "runtime",
    [
        Runtime(dtype="float64", compiled=False),
        Runtime(dtype="bfloat16", compiled=False),
        Runtime(dtype="float32"),
        Runtime(dtype="bfloat16"),
        Runtime(dtype="bfloat16", draft_dtype="int8"),
    ],
)
def test_without_weights_it_is_pard_to_the_last_bit(family: Path, tmp_path: Path, runtime: Runtime) -> None:
    """Guards the start of training, and one drafter for both: with W = 0 all logits are those of PARD; and a folder
    with states drafts without them as PARD."""
    trainee = prepare("pard2", recipe_for("pard2", family, tmp_path / "out", k=4)).trainee
    trainee.save(tmp_path / "zeros", trainee.objective.state_dict())
    found = []
    for drafter in ("pard", "pard2"):
        draft = str(tmp_path / "zeros")
        engine = load(str(family / "target"), drafter=drafter, draft=draft, k=4, runtime=runtime, lengths="fixed")
        found.append(logits_of(engine))
    assert len(found[0]) == len(found[1]) > 5
    for own, of_pard in zip(*found, strict=True):
        assert torch.equal(own, of_pard)


def test_dropped_samples_are_trained_without_states(family: Path, tmp_path: Path) -> None:
    """Guards the half of training for serving without states: the loss of a dropped sample is PARD's, that of others is
    not, and evaluations drop none."""
    trainee = trainee_of(family, tmp_path / "out", state_dropout=0.5, state_scale=1.0, weighting="none")
    objective, whole = trainee.objective.train(), trainee.objective.added
    text, weights = Sample(tokens=list(range(1, 12)), is_label=[True] * 11), torch.ones(4)
    kinds = set()
    for seed in range(12):
        batch = trainee.collate([[text]], [[torch.Generator().manual_seed(seed)]])
        with torch.no_grad():
            own = float(objective.train()(batch, weights)[0])
            evaluated = float(objective.eval()(batch, weights)[0])
            objective.added = None
            of_pard = float(objective(batch, weights)[0])
            objective.added = whole
        assert evaluated != of_pard and own in (evaluated, of_pard)
        kinds.add(own == of_pard)
    assert kinds == {True, False}
    pair = trainee.collate([[text, text]], [[torch.Generator().manual_seed(seed) for seed in (0, 1)]])
    assert pair.is_bare is not None
    for document in (0, 1):
        alone = trainee.collate([[text]], [[torch.Generator().manual_seed(document)]])
        assert alone.is_bare is not None
        assert pair.is_bare[pair.documents == document].unique().tolist() == alone.is_bare.unique().tolist()


def test_training_goes_on_from_a_folder_with_states(family: Path, tmp_path: Path) -> None:
    """Guards a second run on other data: it begins with the projection of the first, unless it reads other layers."""
    first = recipe_for("pard2", family, tmp_path / "first", k=4, target_layers=LAYERS)
    train("pard2", first)
    config = json.loads((first.out / "config.json").read_text())
    assert config["pard2_target_layers"] == LAYERS and config["pard2_target_dim"] == 64
    again = {"model": str(first.out), "k": 4}
    same = prepare("pard2", recipe_for("pard2", family, tmp_path / "same", target_layers=LAYERS, **again)).trainee
    other = prepare("pard2", recipe_for("pard2", family, tmp_path / "other", target_layers=[0], **again)).trainee
    assert same.objective.added.target_proj.weight.abs().max() > 0
    assert other.objective.added.target_proj.weight.abs().max() == 0
    train("pard", recipe_for("pard", family, tmp_path / "bare", **again))
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert config["spd_type"] == "pard" and not [key for key in config if key.startswith("pard2")]


def test_text_alone_can_be_learnt_with_the_targets_states(family: Path, tmp_path: Path) -> None:
    """Guards losses that read no probabilities: the teacher is still read, for its states."""
    for settings in ({"weighting": "none"}, {"weighting": "expected_length:by=text"}):
        trainee_of(family, tmp_path / "out", loss="cross_entropy", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_layers": [2]}, "target_layers: 2 is no layer of teacher .*: use 0 to 1, or -1"),
        ({"target_layers": [-2]}, "-2 is no layer"),
        ({"target_layers": [-1, -1]}, "name each layer once"),
        ({"k": 1}, "greater than or equal to 2"),
        ({"lora": {"rank": 4}}, "lora: the adapters of a draft that reads states are not stored"),
    ],
)
def test_impossible_settings_are_refused(family: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    """Guards layers that the target lacks, and a result that could not be stored."""
    with pytest.raises(ValueError, match=message):
        prepare("pard2", recipe_for("pard2", family, tmp_path / "out", **settings))


@pytest.mark.parametrize(
    ("layers", "expected"), [(2, [-1]), (8, [-1, 1]), (24, [-1, 17, 9, 1]), (36, [-1, 29, 21, 13])]
)
def test_default_layers_are_amds(layers: int, expected: list[int]) -> None:
    """Guards the layers of a recipe that names none: -1, -8, -16, -24 of AMD, as far as the target has them."""
    recipe = Pard2Recipe(model="m", teacher="t", data=["d"], out="o", steps=1)
    assert recipe.layers_of(type("Config", (), {"num_hidden_layers": layers})()) == expected
    hf = [index for index in (-1, -8, -16, -24) if layers + 1 + index > 0]
    assert [layers if layer == -1 else layer for layer in expected] == [layers + 1 + index for index in hf]
