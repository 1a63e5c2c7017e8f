"""PPD training: which prompt token sees what, against passes over one chain at a time, and what is counted and kept."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from paradraft.data.samples import Sample
from paradraft.drafters.ppd import PpdDrafter
from paradraft.engine.loader import load
from paradraft.formats.head import WEIGHTS
from paradraft.models.forward import FINAL_NORM
from paradraft.models.quantization import stored_bytes
from paradraft.models.runtime import Runtime
from paradraft.train import memory
from paradraft.train.drafters import ppd
from paradraft.train.drafters.ppd import RANKS, PpdObjective, PpdRecipe, PpdTrainee
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.run import launch, setup
from tests.conftest import VOCAB

TEXTS = [[1, 2, 3, 1, 2, 3, 1, 2, 3], [5, 4, 5, 4, 5, 6], [7, 8, 9, 7, 8, 9, 7]]


def recipe_for(family: Path, out: Path, **settings: object) -> PpdRecipe:
    data = out.parent / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("helloworld" * 6, "abcabcabc" * 4)))
    given = {
        "model": str(family / "target"), "data": [data], "out": out, "steps": 4, "samples_per_step": 2, "lr": 0.1,
        "max_length": 24, "bf16": False, "device": "cpu", "held_out": 0, "log_every": 1, "anchors": 0.8,
    }  # fmt: skip
    return PpdRecipe.model_validate(given | settings)


def prepared(recipe: PpdRecipe) -> PpdTrainee:
    trainee = setup.prepare(recipe, ppd.build, torch.device("cpu"), processes=1).trainee
    assert isinstance(trainee, PpdTrainee)
    return trainee


def batch_of(trainee: PpdTrainee, groups: list[list[int]]) -> TrainingBatch:
    samples = [
        [Sample(tokens=TEXTS[index], is_label=[True] * len(TEXTS[index])) for index in group] for group in groups
    ]
    return trainee.collate(samples, [[torch.Generator().manual_seed(index) for index in group] for group in groups])


def states_of_chain(objective: PpdObjective, text: list[int], length: int) -> Tensor:
    """`[length, E, D]` what the model makes of all copies of the prompt tokens after a text, in one pass whose
    mask is written down pair by pair."""
    model, recipe = objective.target.model, objective.recipe
    words = model.get_input_embeddings()(torch.tensor([text]))
    members = [(number, copy) for number in range(length) for copy in range(recipe.copies)]
    vectors = torch.stack([objective.prompts["embeddings"][member] for member in members])[None].to(words.dtype)
    n, total = len(text), len(text) + len(members)
    sees = torch.zeros(total, total, dtype=torch.bool)
    sees[:n, :n] = torch.ones(n, n, dtype=torch.bool).tril()
    sees[n:, :n] = True
    for own, other in itertools.product(range(len(members)), repeat=2):
        (number, copy), (number_, copy_) = members[own], members[other]
        sees[n + own, n + other] = {
            "ensemble": copy == copy_ and number_ <= number,
            "decoder": other <= own,
            "encoder": number_ <= number,
        }[recipe.visibility]
    positions = torch.tensor([[*range(n), *(n + number for number, _ in members)]])
    mask = torch.zeros(total, total).masked_fill(~sees, -1e9)[None, None]
    out = model.model(inputs_embeds=torch.cat([words, vectors], dim=1), attention_mask=mask, position_ids=positions)
    return out.last_hidden_state[0, n:].view(length, recipe.copies, -1)


@pytest.mark.parametrize("visibility", ["ensemble", "decoder", "encoder"])
@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[2, 0], [1]]])
def test_a_prompt_token_sees_its_text_and_its_chain(
    family: Path, tmp_path: Path, visibility: str, groups: list[list[int]]
) -> None:
    """Guards prompt tokens of other anchors, copies, samples or positions, in groups of samples and one by one."""
    trainee = prepared(recipe_for(family, tmp_path / "out", copies=2, visibility=visibility, aggregation="weights"))
    objective = trainee.objective
    assert isinstance(objective, PpdObjective)
    with torch.no_grad():
        objective.prompts["weights"].copy_(torch.tensor([[0.3, 0.7], [0.9, -0.2], [0.5, 0.4]]))
    batch = batch_of(trainee, groups)
    with torch.no_grad():
        cache = DynamicCache()
        found = objective._read_prompts(batch, cache, objective.target.read(batch.texts, cache))
        seen = 0
        for group, samples in enumerate(groups):
            for row in (batch.depths[group] > 0).nonzero()[:, 0].tolist():
                text = TEXTS[samples[int(batch.documents[group, row])]]
                number = int(batch.depths[group, row])
                anchor = int(batch.positions[group, row]) - number
                states = states_of_chain(objective, text[: anchor + 1], number)[-1]
                expected = (objective.prompts["weights"][number - 1][:, None] * states).sum(0)
                torch.testing.assert_close(found[group, row].float(), expected.float(), rtol=1e-3, atol=1e-4)
                assert int(batch.labels[group, row]) == text[anchor + number + 1]
                seen += 1
    assert seen > 20
    assert bool((batch.labels[batch.depths == 0] == IGNORED).all())


@pytest.mark.parametrize(
    "settings",
    [{}, {"copies": 3, "aggregation": "weights"}, {"prefix": 2}, {"exits": 2}, {"own_head": True},
     {"copies": 2, "visibility": "decoder"}, {"loss": "cross_entropy"}, {"change_rank": 2, "copies": 2}],
)  # fmt: skip
def test_only_prompt_tokens_are_trained(family: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """Guards weights of the model that move, and parameters that no gradient reaches; what the paper only measures is
    refused in decoding."""
    trainee = prepared(recipe_for(family, tmp_path / "out", **settings))
    objective = trainee.objective
    assert isinstance(objective, PpdObjective)
    names = {name for name, parameter in objective.named_parameters() if parameter.requires_grad}
    assert "prompts.embeddings" in names and all(name.startswith(("prompts.", "change.")) for name in names)
    begin_to_change(objective)
    loss, *_ = objective(batch_of(trainee, [[0], [1]]), torch.ones(4))
    loss.backward()
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert not any(parameter.requires_grad for parameter in objective.target.model.parameters())
    assert objective.recipe.is_decoded == (objective.recipe.measured_with is not None)
    trainee.save(tmp_path / "drafter", objective.state_dict())
    options = {"drafter": "ppd", "draft": str(tmp_path / "drafter"), "runtime": Runtime(compiled=False)}
    if objective.recipe.is_decoded:
        load(str(family / "target"), **options)
    else:
        with pytest.raises(ValueError, match="settings that are only measured"):
            load(str(family / "target"), **options)


def begin_to_change(objective: PpdObjective) -> None:
    """Sets the halves of a change that begin at 0, behind which the others have no gradient."""
    for name, weight in {} if objective.change is None else objective.change.items():
        if name.endswith("up"):
            torch.nn.init.normal_(weight.data, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("compiled", [None, False])
def test_a_change_is_for_prompt_tokens_alone(family: Path, tmp_path: Path, compiled: bool | None) -> None:
    """Guards the teacher, whose texts are read without the change, and decoding, which computes what was trained."""
    trainee = prepared(recipe_for(family, tmp_path / "out", change_rank=3))
    objective, batch = trainee.objective, batch_of(trainee, [[0], [1]])
    assert isinstance(objective, PpdObjective)
    with torch.no_grad():
        unchanged = objective.target.read(batch.texts)
        before = objective._read_prompts(batch, cache := DynamicCache(), objective.target.read(batch.texts, cache))
        begin_to_change(objective)
        read = objective.target.read(batch.texts, cache := DynamicCache())
        found = objective._read_prompts(batch, cache, read)
    assert torch.equal(read, unchanged)
    is_prompt = batch.depths > 0
    assert (found - before)[is_prompt].abs().amax(1).min() > 1e-3
    trainee.save(tmp_path / "drafter", objective.state_dict())
    engine = load(str(family / "target"), drafter="ppd", draft=str(tmp_path / "drafter"),
                  runtime=Runtime(dtype="float32", compiled=compiled))  # fmt: skip
    lm, drafter = engine.target.lm, engine.drafter
    assert isinstance(drafter, PpdDrafter) and lm.is_native == (compiled is None)
    ids = drafter._prompts._ids_PE[:, 0].tolist()
    lm.start()
    lm.cache.join(1)
    seen = 0
    for row in is_prompt[0].nonzero()[:, 0].tolist():
        number = int(batch.depths[0, row])
        text = TEXTS[0][: int(batch.positions[0, row]) - number + 1]
        out = lm.forward(torch.tensor([[*text, *ids[:number]]]), hidden_layers=(FINAL_NORM,)).hidden[FINAL_NORM]
        torch.testing.assert_close(out[0, -1].float(), found[0, row].float(), rtol=0.02, atol=0.02)  # in bf16
        seen += 1
    assert seen > 5


def test_prompt_tokens_begin_as_tokens(family: Path, tmp_path: Path) -> None:
    """They are started from ordinary embeddings."""
    objective = prepared(recipe_for(family, tmp_path / "out", copies=3)).objective
    assert isinstance(objective, PpdObjective)
    rows = objective.target.model.get_input_embeddings().weight.float()[:VOCAB]
    for vector in objective.prompts["embeddings"].flatten(0, 1):
        assert (rows - vector).abs().amax(1).min() == 0


@torch.no_grad()
def test_accuracy_is_that_of_held_out_rows(family: Path, tmp_path: Path) -> None:
    """Guards ranks that are off by one, and counts of training rows among those of held-out ones."""
    trainee = prepared(recipe_for(family, tmp_path / "out"))
    objective = trainee.objective
    assert isinstance(objective, PpdObjective)
    objective.train()
    objective(batch_of(trainee, [[1]]), torch.ones(4))
    assert objective.seen.sum() > 0
    objective.eval()
    batch, hits, seen = batch_of(trainee, [[0], [2]]), torch.zeros(3, RANKS), torch.zeros(3)
    objective(batch, torch.ones(4))
    objective.train()
    objective(batch_of(trainee, [[1]]), torch.ones(4))
    for group, row in (batch.depths > 0).nonzero().tolist():
        text, number = TEXTS[(0, 2)[group]], int(batch.depths[group, row])
        anchor = int(batch.positions[group, row]) - number
        state = states_of_chain(objective, text[: anchor + 1], number)[-1, 0]
        order = objective.target.model.lm_head(state)[:VOCAB].argsort(descending=True).tolist()
        rank = order.index(text[anchor + number + 1])
        hits[number - 1, rank : rank + 1] += rank < RANKS
        seen[number - 1] += 1
    assert torch.equal(objective.hits, hits) and torch.equal(objective.seen, seen)
    trainee.save(tmp_path / "drafter", objective.state_dict())
    told = json.loads((tmp_path / "drafter" / "config.json").read_text())["accuracy"]
    assert told[0][0] == pytest.approx(float((hits[0, 0] + 0.5) / (seen[0] + 1)), abs=1e-5)


def test_a_start_with_a_change_needs_its_rank(family: Path, tmp_path: Path) -> None:
    """Guards prompt tokens that were trained with a change against going on without it."""
    first = prepared(recipe_for(family, tmp_path / "out", change_rank=2))
    begin_to_change(first.objective)
    first.save(tmp_path / "first", first.objective.state_dict())
    for rank in (0, 3):
        with pytest.raises(ValueError, match="set change_rank=2"):
            prepared(recipe_for(family, tmp_path / "out", change_rank=rank, start=str(tmp_path / "first")))
    again = prepared(recipe_for(family, tmp_path / "out", change_rank=2, start=str(tmp_path / "first")))
    assert all(weight.abs().max() > 0 for name, weight in again.objective.change.items() if name.endswith("up"))
    file = tmp_path / "first" / WEIGHTS
    weights = load_file(file)
    weights["change.qkv_up"][0, 0, 0] = torch.nan
    save_file(weights, file)
    with pytest.raises(ValueError, match="change of attention is not finite"):
        load(str(family / "target"), drafter="ppd", draft=str(tmp_path / "first"))


def test_a_second_stage_begins_with_the_first(family: Path, tmp_path: Path) -> None:
    """B.4: the prompt tokens alone, then with a head of their own."""
    first = recipe_for(family, tmp_path / "first")
    launch.train(first, ppd.build, lambda report: None)
    second = prepared(recipe_for(family, tmp_path / "second", start=str(first.out), own_head=True)).objective
    kept = prepared(recipe_for(family, tmp_path / "other")).objective
    assert isinstance(second, PpdObjective) and isinstance(kept, PpdObjective)
    assert not torch.equal(second.prompts["embeddings"], kept.prompts["embeddings"])
    assert not second.prompts["head"].any()


def test_a_start_that_does_not_fit_is_told(family: Path, tmp_path: Path) -> None:
    first = recipe_for(family, tmp_path / "first")
    launch.train(first, ppd.build, lambda report: None)
    with pytest.raises(ValueError, match=r"start=.*has no weights that fit: name a drafter of the same size"):
        prepared(recipe_for(family, tmp_path / "second", start=str(first.out), copies=2))
    weights = load_file(first.out / WEIGHTS)
    name = next(iter(weights))
    weights[name].view(-1)[0] = torch.nan
    save_file(weights, first.out / WEIGHTS)
    with pytest.raises(ValueError, match=f"start=.*: {name} has NaN or infinite numbers: name an earlier checkpoint"):
        prepared(recipe_for(family, tmp_path / "third", start=str(first.out)))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing=true"),
        ({"exits": 3}, "exits=3: model .* has 2 layers"),
        ({"anchors": 0.0}, "anchors"),
        ({"copies": 0}, "copies"),
    ],
)
def test_settings_that_do_not_fit(family: Path, tmp_path: Path, settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        prepared(recipe_for(family, tmp_path / "out", **settings))


def test_a_base_in_four_bits(family: Path, tmp_path: Path) -> None:
    """Guards gradients that do not pass through the matrices, matrices that stay whole, and a drafter that only goes
    with the model in 4 bits."""
    losses = []
    for nf4 in (False, True):
        out = tmp_path / f"nf4-{nf4}"
        trainee = prepared(recipe_for(family, out, nf4=nf4, steps=30))
        layers = trainee.objective.target.model.model.layers
        stored = sum(stored_bytes(weight) for weight in layers.parameters())
        assert stored < 0.3 * 4 * sum(weight.numel() for weight in layers.parameters()) or not nf4
        reports = list[float]()
        launch.train(
            recipe_for(family, out, nf4=nf4, steps=30),
            ppd.build,
            lambda report, reports=reports: reports.append(report.loss),
        )
        losses.append((reports[0], reports[-1]))
        target = str(family / "target")
        drafted = load(target, drafter="ppd:size=8", draft=str(out), lengths="fixed").generate(
            [[5, 6, 7]], max_new_tokens=20
        )[0]
        assert drafted.tokens == load(target).generate([[5, 6, 7]], max_new_tokens=20)[0].tokens
    (first, last), (first_, last_) = losses
    assert first_ == pytest.approx(first, rel=0.2) and last_ < 0.95 * first_ and last < first


def test_less_memory_is_asked_for_a_base_in_four_bits(family: Path, tmp_path: Path) -> None:
    """Guards a run that would fit and is refused: the model of the recipe for 8B on a GPU of 24 GB."""
    found = []
    for nf4 in (False, True):
        recipe = recipe_for(family, tmp_path / "out", nf4=nf4)
        asked = list[memory.Estimate]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory.Estimate, "check", lambda estimate, device, asked=asked: asked.append(estimate))
            prepared(recipe)
        found.append(asked[0].models)
    model = load(str(family / "target")).target.lm.model
    weights = sum(weight.numel() for weight in model.model.layers.parameters())
    assert found[0] - found[1] == pytest.approx((4 - memory.NF4_BYTES) * weights)


def test_many_copies_are_measured(family: Path, tmp_path: Path) -> None:
    """Guards passes of measurements that are narrower than a prompt token has copies, found out after the training."""
    recipe = recipe_for(
        family, tmp_path / "out", copies=70, k=1, steps=1, held_out=1, prompts=1, answer_tokens=4, evaluate_every=1
    )
    launch.train(recipe, ppd.build, lambda report: None)
    assert (tmp_path / "out" / "model.safetensors").exists()
