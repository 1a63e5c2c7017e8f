"""Settings of drafters on the target's states that the contract suites do not go through."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from paradraft.data.samples import Sample
from paradraft.engine.loader import load
from paradraft.models.output_head import sizes_of
from paradraft.models.runtime import Runtime
from paradraft.train import trainee_module
from paradraft.train.drafters.draft_layers import UNSURE
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.run import launch, setup
from tests.contract.test_every_trainee import SETTINGS, recipe_for
from tests.support.kinds import model_of

EXACT = Runtime(dtype="float64", compiled=False)


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_every_setting_trains_and_decodes(family: Path, tmp_path: Path, name: str, settings: dict[str, object]) -> None:
    """Guards settings on their way from a recipe to text that stays the target's; that decoding reads them as training
    did, the contract shows."""
    recipe = recipe_for(name, family, tmp_path / "out", steps=3, k=4, **settings)
    launch.train(recipe, trainee_module(name).build, lambda report: None)
    drafted = load(str(family / "target"), drafter=name, draft=str(recipe.out), k=4, runtime=EXACT, lengths="fixed")
    plain = load(str(family / "target"), runtime=EXACT)
    prompts = ["helloworld", "abcabc"]
    answers = drafted.generate(prompts, max_new_tokens=20)
    assert [a.tokens for a in answers] == [a.tokens for a in plain.generate(prompts, max_new_tokens=20)]


@pytest.mark.parametrize("name", ["eagle", "eagle_parallel"])
def test_more_layers_than_the_target_has(family: Path, tmp_path: Path, name: str) -> None:
    """Guards the remedy that is named for them, and a config.json that tells of layers that are not there."""
    recipe = recipe_for(name, family, tmp_path / "out", steps=1, k=3, layers=4, init="random")
    launch.train(recipe, trainee_module(name).build, lambda report: None)
    options = {"drafter": name, "draft": str(recipe.out), "k": 3, "runtime": EXACT}
    assert load(str(family / "target"), **options).generate("hello", max_new_tokens=8).tokens
    config = json.loads((recipe.out / "config.json").read_text())
    (recipe.out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**7}))
    with pytest.raises(ValueError, match=r"its config.json has 10000000 layers, its weights 4: train it again"):
        load(str(family / "target"), **options)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    ("name", "layers"), [("eagle", [-1]), ("eagle_parallel", [-1]), ("eagle_parallel", [1, -1]), ("eagle", [1, 2])]
)
def test_new_layers_begin_unsure(family: Path, tmp_path: Path, name: str, kind: str, layers: list[int]) -> None:
    """Guards the first hour of a run against unlearning: layers that hardly change an input repeat the last token, as
    sure as the target is. Gemma's norms add 1 to their weights, and its embeddings are scaled."""
    shutil.copytree(family / "target", tmp_path / "target")
    model_of(kind).save_pretrained(tmp_path / "target")
    recipe = recipe_for(
        name, family, tmp_path / "out", k=2, model=str(tmp_path / "target"), target_layers=layers
    )  # fmt: skip
    objective = setup.prepare(recipe, trainee_module(name).build, torch.device("cpu"), processes=1).trainee.objective
    embeddings, states = sizes_of(objective.target.model)
    states = 1.0 if layers == [1, 2] else states  # RMS-normalized, because they are from before the final norm
    with torch.no_grad():
        both = [torch.full((32,), embeddings), torch.zeros(32)], [torch.zeros(32), torch.full((32,), states)]
        for each in both:
            torch.testing.assert_close(objective.fc(torch.cat(each)), torch.full((32,), embeddings))
        own = objective.norm(torch.ones(1, 32))
        torch.testing.assert_close(own, UNSURE * objective.target.model.model.norm(torch.ones(1, 32)))


@pytest.mark.parametrize("weighting", ["none", "valid_prefix"])
def test_rows_are_regressed_where_their_token_cannot_be_drafted(family: Path, tmp_path: Path, weighting: str) -> None:
    """Guards EAGLE's second loss with few ids: states of all tokens of the text are learnt; with a weighting those rows
    that it weights, and of no other loss, and evaluations are those without it."""
    settings = {"k": 3, "draft_vocab_size": 6, "regression": 1.0, "classification": 0.0, "weighting": weighting}
    recipe = recipe_for("eagle_parallel", family, tmp_path / "out", **settings)
    trainee = setup.prepare(recipe, trainee_module("eagle_parallel").build, torch.device("cpu"), processes=1).trainee
    sample = Sample(tokens=list(range(1, 15)), is_label=[True] * 14)
    batch, objective = trainee.collate([[sample]], [[torch.Generator().manual_seed(0)]]), trainee.objective
    weights_K = torch.tensor([1.0, 0.5, 0.25])
    with torch.no_grad():
        states = objective.features.states(batch.texts)
        hidden = objective.hidden(batch, states)
        gathered = states.gather(1, batch.text_indices[:, :, None].expand_as(hidden))
        each = torch.nn.functional.smooth_l1_loss(hidden, gathered, reduction="none").mean(-1)
        whole = (weights_K[batch.depths] * (batch.labels != IGNORED) * each).sum()
        torch.testing.assert_close(objective.eval()(batch, weights_K)[0], whole)
        total, _, weight = objective.train()(batch, weights_K)
        drafted = objective.target.vocab_map.rows_of(batch.labels) >= 0
        assert 0 < weight <= (weights_K[batch.depths] * drafted).sum() < weights_K[batch.depths].sum()
        if weighting == "none":
            torch.testing.assert_close(total, whole)
        else:
            assert 0 < total < (weights_K[batch.depths] * drafted * each).sum()


def test_own_heads_are_those_of_the_depth(family: Path, tmp_path: Path) -> None:
    """Guards rows of one head that another one answers."""
    recipe = recipe_for("medusa", family, tmp_path / "out", k=3, own_heads=True)
    objective = setup.prepare(
        recipe, trainee_module("medusa").build, torch.device("cpu"), processes=1
    ).trainee.objective
    with torch.no_grad():
        for number, head in enumerate(objective.lm_heads):
            head.weight.fill_(float(number + 1))
    logits = objective.head(torch.ones(4, 32), torch.tensor([2, 0, 1, 2]))
    assert logits[:, 0].tolist() == [96.0, 32.0, 64.0, 96.0]


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("eagle", {"layers": 3}, "layers=3: model .* has 2 to begin with, set init=random"),
        ("eagle", {"target_layers": [1, 3]}, "target_layers: model .* has no layer 3, use -1 to 2"),
        ("eagle_parallel", {"target_layers": [1, 1]}, "target_layers=.*: name each layer once"),
        (
            "eagle_parallel",
            {"max_length": 500},
            "the model has room for 128 tokens, a sample has 500: set max_length=128",
        ),
        ("eagle", {"model": "gemma", "for_vllm": True}, "Mistral's layers cannot stand beside a gemma3_text model"),
        ("eagle", {"start": "no/such/folder"}, "start: unknown model 'no/such/folder'"),
        ("medusa", {"start": "pocket"}, "start: the shipped family has no medusa drafter"),
        ("eagle", {"feature_cache_gb": 1e5}, "feature_cache_gb=100000: the disk of .* has"),
        ("medusa", {"target": "draft", "held_out": 1}, "is not the model whose states are read"),
        ("hydra", {"head_rank": 33}, "head_rank=33: the states of model .* have 32 numbers, use fewer"),
        ("eagle_parallel", {"draft_vocab_size": 73}, "draft_vocab_size=73: model .* has 72 tokens"),
    ],
)
def test_mistakes_are_one_line(family: Path, tmp_path: Path, name: str, settings: dict[str, object], told: str) -> None:
    """Guards users: what cannot be trained is refused before the first step."""
    folders = {"draft": str(family / "draft"), "gemma": str(tmp_path / "gemma")}
    settings = {key: folders.get(str(value), value) for key, value in settings.items()}
    if settings.get("model") == folders["gemma"]:
        shutil.copytree(family / "target", tmp_path / "gemma")
        model_of("gemma3_text").save_pretrained(tmp_path / "gemma")
    recipe = recipe_for(name, family, tmp_path / "out", **settings)
    recipe.data[0].write_text(json.dumps({"text": "abc" * 200}) + "\n" + json.dumps({"text": "xyz" * 9}) + "\n")
    with pytest.raises(ValueError, match=told) as error:
        launch.train(recipe, trainee_module(name).build, lambda report: None)
    assert "\n" not in str(error.value)


def test_something_must_be_learnt(family: Path, tmp_path: Path) -> None:
    """Guards a run in which no loss has a weight, which ended with a drafter that had learnt nothing."""
    with pytest.raises(ValueError, match="nothing would be learnt"):
        recipe_for("eagle", family, tmp_path / "out", regression=0, classification=0)


@pytest.mark.parametrize("other", [{"target_layers": [1, -1]}, {"final_norm": False}])
def test_vllm_has_not_all(family: Path, tmp_path: Path, other: dict[str, object]) -> None:
    """Guards a training of hours whose drafter could then not be exported."""
    with pytest.raises(ValueError, match=f"for_vllm=true: .* leave {next(iter(other))} out"):
        recipe_for("eagle", family, tmp_path / "out", for_vllm=True, **other)


@pytest.mark.parametrize("other", [{"gradient_checkpointing": True}, {"attention": "flex_attention", "device": "cuda"}])
def test_passes_with_a_cache_cannot_do_all(family: Path, tmp_path: Path, other: dict[str, object]) -> None:
    """Guards runs that would end in a traceback, or train something else."""
    with pytest.raises(ValueError, match="own_steps=2: its passes have a cache, leave"):
        recipe_for("eagle", family, tmp_path / "out", own_steps=2, **other)


def test_settings_without_effect_are_named(family: Path, tmp_path: Path) -> None:
    """Guards a choice that is silently ignored."""
    recipe = recipe_for("medusa_parallel", family, tmp_path / "out", reads="embedding", mask_state="learned")
    with pytest.warns(UserWarning, match="mask_state=learned is ignored without reads=state"):
        setup.prepare(recipe, trainee_module("medusa_parallel").build, torch.device("cpu"), processes=1)
