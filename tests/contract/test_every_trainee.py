"""What everything that can be trained must do. The files in `train/` are found, not named: a new one is tested by
itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paradraft.core import Request
from paradraft.data.samples import Sample
from paradraft.decode.generation import Generation
from paradraft.drafters import drafter_class, drafter_names, split_settings, takes_draft
from paradraft.engine.loader import load
from paradraft.formats.path_heads import SELECTED
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.train import recipe_class, trainee_module, trainee_names
from paradraft.train.drafters.heads import HeadRecipe
from paradraft.train.init.init_draft import make
from paradraft.train.init.init_from import PrunedTarget
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.recipe import Recipe
from paradraft.train.run import launch, setup
from paradraft.train.run.progress import Progress, Report
from paradraft.train.trainee import Trainee
from tests.conftest import VOCAB
from tests.support.gguf_files import tiny_model, write_gguf
from tests.support.quick import mostly_slow

HEADS = [
    name
    for name in trainee_names()
    if issubclass(recipe_class(trainee_module(name)), HeadRecipe) and not drafter_class(name).traits.depends_on_rounds
]
"""The drafters on the target's states which draft at once; of others this is tested with the drafter."""
SETTINGS = [
    ("medusa", {"own_heads": True, "layers": 2}),
    ("medusa_parallel", {"reads": "embedding"}),
    ("medusa_parallel", {"mask_state": "learned", "distinct_masks": False}),
    ("eagle_parallel", {"mask_state": "learned", "layers": 2, "init": "last", "final_norm": False}),
    ("eagle", {"init": "random", "loss": "forward_kl"}),
    ("eagle", {"target_layers": [0, 2, -1], "own_steps": 3}),
    ("eagle", {"for_vllm": True}),
    ("eagle", {"for_vllm": True, "own_steps": 3, "layers": 2}),
    ("eagle_parallel", {"previous_token_rank": 6, "target_layers": [1]}),
    ("medusa_parallel", {"previous_token_rank": 5, "target_layers": [-1, 1]}),
    ("medusa_parallel", {"previous_token_rank": 5, "reads": "embedding"}),
    ("dflash", {"layers": 1, "target_layers": [-1], "mask_token_id": 4}),
    ("dflash", {"previous_token_rank": 5, "draft_vocab_size": 20}),
    ("dflash", {"markov_rank": 5, "draft_vocab_size": 20}),
    ("dflash", {"markov_rank": 5, "causal": False}),
    ("dflash", {"selector_rank": 5, "draft_vocab_size": 20}),
    ("dflash", {"selector_rank": 5, "anchor_first": False, "causal": False}),
    ("eagle_parallel", {"markov_rank": 5}),
    ("eagle_parallel", {"selector_rank": 5, "draft_vocab_size": 12}),
    ("medusa_parallel", {"markov_rank": 4, "draft_vocab_size": 12}),
    ("medusa_parallel", {"selector_rank": 6}),
    ("dflash", {"anchor_first": False}),
    ("dflash", {"anchor_first": False, "causal": False, "markov_rank": 3}),
    ("medusa", {"draft_vocab_size": 12}),
    ("medusa", {"draft_vocab_size": 12, "own_heads": True}),
    ("hydra", {"head_rank": 6}),
    ("eagle", {"draft_vocab_size": 12, "own_steps": 3}),
    ("eagle_parallel", {"draft_vocab_size": 12, "head_rank": 6}),
    ("eagle_parallel", {"draft_vocab_size": 20, "previous_token_rank": 6}),
]
"""What else of these drafters must be computed in decoding as it was trained."""
CHAINED = [
    ("eagle", {"own_steps": 3}),
    ("pard", {"previous_token_rank": 4}),
    ("eagle_parallel", {"previous_token_rank": 4}),
    ("dflash", {"previous_token_rank": 4}),
    ("dflash", {"anchor_first": False}),
    ("dflash", {"selector_rank": 4}),
    ("eagle_parallel", {"selector_rank": 4, "draft_vocab_size": 12}),
    ("medusa_parallel", {"markov_rank": 4}),
    ("pard", {"weighting": "expected_length:by=text"}),
    ("dflash", {"weighting": "valid_prefix"}),
    ("eagle_parallel", {"weighting": "chain", "loss": "acceptance", "regression": 0.5}),
    ("medusa", {"weighting": "expected_length", "loss": "acceptance", "hard_share": 0.5}),
    ("ppd", {"weighting": "first_error:boost=1", "loss": "total_variation"}),
]
"""Settings with which a row reads what was computed for another."""
EXACT = Runtime(dtype="float64", compiled=False)
TEXTS = ("helloworld" * 6, "abcabcabc" * 4)


def recipe_for(name: str, family: Path, out: Path, **settings: object) -> Recipe:
    """A short run with what every recipe has."""
    data = out.parent / "data.jsonl"
    data.parent.mkdir(exist_ok=True)
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    kind = recipe_class(trainee_module(name))
    given = {
        "model": str(family / kind.ROLES["model"]), "data": [data], "out": out, "steps": 5, "samples_per_step": 2,
        "max_length": 24, "lr": 1e-2, "warmup_steps": 1, "bf16": False, "device": "cpu", "log_every": 1,
        "save_every": 2, "held_out": 0,
    }  # fmt: skip
    needed = [role for role in kind.ROLES if kind.model_fields[role].is_required()]
    given |= {role: str(family / kind.ROLES[role]) for role in needed}
    return kind.model_validate(given | settings)


def train(name: str, recipe: Recipe, report: Callable[[Report], None] = lambda report: None) -> bool:
    return launch.train(recipe, trainee_module(name).build, report)


def prepare(name: str, recipe: Recipe) -> setup.Preparation:
    return setup.prepare(recipe, trainee_module(name).build, torch.device("cpu"), processes=1)


def result(out: Path) -> dict[str, object]:
    """What a run leaves that does not depend on the time."""
    found: dict[str, object] = {file.name: file.read_bytes() for file in out.glob("*.safetensors")}
    lines = (out / "history.jsonl").read_text().splitlines()
    found["history"] = [
        {key: value for key, value in json.loads(line).items() if key not in ("rows_per_s", "left_s")} for line in lines
    ]
    found["config"] = (out / "config.json").read_bytes()
    return found


@pytest.mark.parametrize("name", trainee_names())
def test_recipes_explain_themselves(name: str) -> None:
    """Guards `paradraft train NAME --settings` against settings without a description, and roles that are no
    setting."""
    kind = recipe_class(trainee_module(name))
    assert all(field.description for field in kind.model_fields.values())
    assert kind.ROLES.keys() <= kind.model_fields.keys() and {"model", "target"} <= kind.ROLES.keys()


@pytest.mark.parametrize("name", trainee_names())
def test_it_learns_from_its_own_text(family: Path, tmp_path: Path, name: str) -> None:
    """Guards on-policy training of every drafter: it runs, its samples are not those of the data, and a run that is
    stopped within a period goes on bit by bit. One that learns no divergence is refused in a line."""
    kind, target = recipe_class(trainee_module(name)), str(family / "target")
    settings = {"target": target, "held_out": 1, "prompt_tokens": 6, "answer_tokens": 8, "source": "rollouts:every=4"}
    settings |= {"evaluate_every": 1}
    divergence = {"teacher": target, "loss": "forward_kl"}
    settings |= {name: value for name, value in divergence.items() if name in kind.model_fields}
    if recipe_for(name, family, tmp_path / "out", **settings).divergence is None:
        with pytest.raises(ValueError, match="source=rollouts:every=4: a drafter learns nothing from its own tokens"):
            prepare(name, recipe_for(name, family, tmp_path / "out", **settings))
        return
    whole, begun = (recipe_for(name, family, tmp_path / each, **settings) for each in ("whole", "begun"))
    train(name, whole)

    def stop(report: Report) -> None:
        if report.step == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(name, begun, stop)
    assert torch.load(begun.out / "checkpoint" / "step-00000002" / "custom_checkpoint_0.pkl")["continued"]
    train(name, begun)
    assert result(begun.out) == result(whole.out)


@pytest.mark.parametrize("name", trainee_names())
def test_it_learns_from_a_file_of_few_bits(tmp_path: Path, name: str) -> None:
    """Guards the person with one GGUF file: it teaches, it is measured with, and the drafter decodes with it."""
    target = str(tmp_path / "target.gguf")
    write_gguf(tmp_path / "target.gguf", tiny_model("llama"), "Q4_0")
    kind, settings = recipe_class(trainee_module(name)), {"model": target}
    if "teacher" in kind.ROLES:
        make(target, tmp_path / "cut", PrunedTarget(layers=1), dtype="float32")
        settings = {"model": str(tmp_path / "cut"), "teacher": target, "target": target}
    elif name != "ppd":
        settings |= {"loss": "forward_kl"}
    measured = {"held_out": 1, "evaluate_every": 5, "prompts": 1, "answer_tokens": 8, "prompt_tokens": 8}
    recipe = recipe_for(name, tmp_path, tmp_path / "out", **settings, **measured)
    reports: list[Report] = []
    train(name, recipe, reports.append)
    assert reports[-1].acceptance_length >= 1
    trainee = prepare(name, recipe).trainee
    drafted = load(target, drafter=trainee.drafter, draft=str(recipe.out), k=trainee.k, lengths="fixed")
    answers = [engine.generate(["hello"], max_new_tokens=24)[0] for engine in (load(target), drafted)]
    assert answers[0].tokens == answers[1].tokens and sum(answers[1].stats.drafted) > 0


@pytest.mark.parametrize("name", trainee_names())
def test_the_result_decodes_losslessly(family: Path, tmp_path: Path, name: str) -> None:
    """Guards the way from training to decoding: the drafter that the trainee names loads what it saved, measured on the
    way, and the text stays the target's."""
    target = str(family / "target")
    measured = {"target": target, "held_out": 1, "evaluate_every": 5, "prompts": 1, "answer_tokens": 8}
    recipe = recipe_for(name, family, tmp_path / "out", prompt_tokens=8, **measured)
    reports: list[Report] = []
    assert train(name, recipe, reports.append)
    assert reports[-1].acceptance_length >= 1
    trainee = prepare(name, recipe).trainee
    assert split_settings(trainee.drafter)[0] in drafter_names() and takes_draft(trainee.drafter)
    plain = load(target, runtime=EXACT)
    drafted = load(target, drafter=trainee.drafter, draft=str(recipe.out), k=trainee.k, runtime=EXACT, lengths="fixed")
    for sampling in (Sampling(), Sampling(temperature=0.9, seed=5)):
        prompts = ["helloworldhello", "abcabcabcabcabc"]
        expected = plain.generate(prompts, max_new_tokens=24, sampling=sampling)
        answers = drafted.generate(prompts, max_new_tokens=24, sampling=sampling)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        assert sum(sum(answer.stats.drafted) for answer in answers) > 0


class StoppedError(Exception):
    """What the test below stops a run with."""


@pytest.mark.parametrize("name", trainee_names())
def test_a_resumed_run_equals_a_whole_one(family: Path, tmp_path: Path, name: str) -> None:
    """Guards state that no checkpoint holds, and random choices that depend on more than seed and step."""

    def stop(report: Report) -> None:
        if report.step == 3:
            raise StoppedError

    whole, stopped = (recipe_for(name, family, tmp_path / out) for out in ("whole", "stopped"))
    assert train(name, whole)
    with pytest.raises(StoppedError):
        train(name, stopped, stop)
    assert train(name, stopped)
    assert result(stopped.out) == result(whole.out)
    assert not train(name, stopped)


@pytest.mark.parametrize("name", mostly_slow(trainee_names(), quick=["pard", "eagle_parallel", "dflash", "ppd"]))
def test_a_text_is_memorised(family: Path, tmp_path: Path, name: str) -> None:
    """Guards labels that belong to other rows, and parameters that no gradient reaches."""
    losses: list[float] = []

    def note(report: Report) -> None:
        if isinstance(report, Progress):
            losses.append(report.loss)

    # A few embeddings alone cannot make a random model say a text.
    settings = {"own_head": True, "anchors": 1.0, "lr": 0.1} if name == "ppd" else {}
    train(name, recipe_for(name, family, tmp_path / "out", steps=160, log_every=20, **settings), note)
    assert losses[-1] < 0.6 * losses[0]


def passes(trainee: Trainee) -> tuple[list[Sample], Callable[[list[list[int]]], TrainingBatch]]:
    """Samples, and what makes a batch of groups of them by their numbers."""
    texts = [[1, 2, 3, 1, 2, 3, 1, 2, 3], [5, 4, 5, 4, 5, 6], [7, 8, 9, 7, 8, 9, 7]]
    samples = [Sample(tokens=text, is_label=[True] * len(text)) for text in texts]

    def batch(groups: list[list[int]]) -> TrainingBatch:
        seeds = [[torch.Generator().manual_seed(index) for index in group] for group in groups]
        return trainee.collate([[samples[index] for index in group] for group in groups], seeds)

    return samples, batch


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in trainee_names()), *CHAINED])
@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[2, 0], [1]]])
def test_a_loss_is_a_sum_over_samples(
    family: Path, tmp_path: Path, name: str, settings: dict[str, object], groups: list[list[int]]
) -> None:
    """Guards accumulation, packing and several processes: what a sample adds to loss, counts and gradients must not
    depend on the samples beside it."""
    trainee = prepare(name, recipe_for(name, family, tmp_path / "out", **settings)).trainee
    _, batch_of = passes(trainee)
    weights_K = torch.linspace(1.0, 0.5, trainee.depths)
    objective = trainee.objective.train()

    def measured(batches: list[TrainingBatch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        objective.zero_grad()
        losses, rights, weights = zip(*(objective(batch, weights_K) for batch in batches), strict=True)
        sum(losses).backward()
        gradients = [p.grad.clone() for p in objective.parameters() if p.grad is not None]
        labels_K = sum(batch.labels_by_depth(trainee.depths) for batch in batches)
        return torch.stack([sum(losses).detach(), sum(weights)]), sum(rights), labels_K, gradients

    alone = measured([batch_of([[index]]) for index in range(3)])
    together = measured([batch_of(groups)])
    torch.testing.assert_close(together[0], alone[0])
    assert together[1].tolist() == alone[1].tolist() and together[2].tolist() == alone[2].tolist()
    assert together[2].shape == together[1].shape == (trainee.depths,) and bool((together[1] <= together[2]).all())
    assert alone[3] and any(gradient.abs().max() > 0 for gradient in alone[3])
    for found, expected in zip(together[3], alone[3], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in HEADS), *SETTINGS])
@pytest.mark.parametrize("compiled", [False, True])
def test_decoding_computes_what_is_trained(
    family: Path, tmp_path: Path, name: str, settings: dict[str, object], compiled: bool
) -> None:
    """Guards states, embeddings and masks that training pairs in another way than decoding does: such a drafter loses
    acceptance and nothing else. Its draft, taken as the text, is what the trained rows after the prompt predict."""
    trainee = prepare(name, recipe_for(name, family, tmp_path / "out", k=4, **settings)).trainee
    objective = trainee.objective.eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += (
                0.2 * parameter.std().nan_to_num(0.1).clamp(min=0.1) * torch.randn(parameter.shape, generator=generator)
            )
            parameter.copy_(parameter.bfloat16())
    trainee.save(tmp_path / "drafter", objective.state_dict())
    runtime = Runtime(dtype="float32", compiled=compiled)
    drafted = load(
        str(family / "target"), drafter=name, draft=str(tmp_path / "drafter"), k=4, runtime=runtime, lengths="fixed"
    )
    batch = drafted.new_batch()
    for prompt in ([5], [7, 9, 11, 13, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]):
        batch.clear()
        batch.join([Generation(Request(tokens=prompt))])
        draft = batch.drafter.propose([4]).tokens[0].tolist()
        if settings.get("for_vllm") and len(prompt) == 1:
            assert not draft, "the first token is never read"
            continue
        text = Sample(tokens=prompt + draft, is_label=[True] * (len(prompt) + 4))
        rows = trainee.collate([[text]], [[torch.Generator()]])
        with torch.no_grad():
            hidden = objective.hidden(rows, objective.target.states(rows.texts, objective.target_layers))
            logits = objective.head(hidden.flatten(0, 1), rows.depths.flatten())[:, :VOCAB]
            predicted = logits.argmax(-1)
            if objective.select is not None:
                best, ids = logits.topk(min(SELECTED, logits.shape[1]), dim=-1)
                scores = objective.select(hidden.flatten(0, 1), best, ids)
                predicted = ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            if (vocab_map := objective.target.vocab_map) is not None:
                predicted = vocab_map.to_target[predicted]
        is_after = (rows.positions - rows.depths).flatten() == len(prompt) - 1
        depths = rows.depths.flatten()[is_after].tolist()
        assert depths == list(range(trainee.depths))
        assert predicted[is_after].tolist() == draft[: trainee.depths]


@pytest.mark.parametrize("name", trainee_names())
def test_saving_twice_gives_the_same_files(family: Path, tmp_path: Path, name: str) -> None:
    """Guards the result of a run that is stopped while it writes: it is written again, and must be the same; and saving
    leaves the weights in training as they are."""
    trainee = prepare(name, recipe_for(name, family, tmp_path / "out")).trainee
    before = {key: value.clone() for key, value in trainee.objective.state_dict().items()}
    for folder in ("one", "two"):
        trainee.save(tmp_path / folder, trainee.objective.state_dict())
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()} for folder in ("one", "two"))
    assert one == two and "config.json" in one
    after = trainee.objective.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
