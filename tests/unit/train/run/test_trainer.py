from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from paradraft.data.dataset import load_samples
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.train.drafters.pard import build
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.optimizers import Optimizers
from paradraft.train.run import acceptance
from paradraft.train.run.launch import is_trained, train
from paradraft.train.run.progress import Evaluation, Progress
from paradraft.train.samples.dataset import BatchSampler
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.support.jsonl import write_lines
from tests.support.training import prepare_pard, train_pard


def recipe_for(family: Path, folder: Path, **settings: object) -> PardRecipe:
    data = folder / "data.txt"
    folder.mkdir(exist_ok=True)
    data.write_text("helloworld" * 6 + "abcabcabc" * 4)
    warmup_steps = 2 if (settings.get("steps") or 5) > 2 else 0
    defaults = {
        "steps": 5, "samples_per_step": 2, "k": 3, "max_length": 20, "lr": 3e-3, "warmup_steps": warmup_steps,
        "bf16": False, "log_every": 1, "save_every": 2, "optimizer": "muon", "device": "cpu", "held_out": 0,
    }  # fmt: skip
    given = {"model": str(family / "draft"), "data": [data], "out": folder / "out"}
    return PardRecipe(**{**given, **defaults, **settings})


class StoppedError(Exception):
    """What a test stops a run with."""


def stop_after(step: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.step == step:
            raise StoppedError

    return report


@pytest.mark.parametrize("settings", [{"optimizer": "muon"}, {"optimizer": "adamw", "bf16": True}])
def test_a_resumed_run_ends_with_the_same_weights(family: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """Guards against a resumed run that repeats, skips or reorders steps, or forgets its momentum."""
    whole, stopped = (recipe_for(family, tmp_path / name, **settings) for name in ("whole", "stopped"))
    stopped = stopped.model_copy(update={"data": whole.data})
    expected: list[Progress] = []
    train_pard(whole, expected.append)
    with pytest.raises(StoppedError):
        train_pard(stopped, stop_after(3))
    assert not is_trained(stopped)
    resumed: list[Progress] = []
    train_pard(stopped, resumed.append)
    assert [progress.step for progress in resumed] == [3, 4, 5], "the last checkpoint was after step 2"
    # The written weights are rounded to bfloat16; the losses are not, and see every bit.
    assert [progress.loss for progress in resumed] == [progress.loss for progress in expected[2:]]
    ours, theirs = (load_file(recipe.out / "model.safetensors") for recipe in (stopped, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    start = load_file(family / "draft" / "model.safetensors")
    assert not any(torch.equal(ours[name], start[name].to(ours[name].dtype)) for name in ours), "everything has learnt"


def test_steps_without_finite_gradients_are_skipped(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a night's run against one bad step: it is said, counts in no report, and changes nothing."""
    clip = Optimizers._clip_gradients
    norms = iter([None, float("nan"), None, float("inf"), None])

    def clipped(optimizers: Optimizers) -> float | None:
        norm = clip(optimizers)
        return norm if (wrong := next(norms)) is None else wrong

    monkeypatch.setattr(Optimizers, "_clip_gradients", clipped)
    reports: list[Progress] = []
    said: list[str] = []
    recipe = recipe_for(family, tmp_path)
    train(recipe, build, reports.append, announce=said.append)  # type: ignore[arg-type]
    assert [report.step for report in reports] == [1, 3, 5]
    assert all(math.isfinite(report.loss) and math.isfinite(report.grad_norm or 0) for report in reports)
    skipped = [line for line in said if "skipped" in line]
    assert skipped == [f"step {step} is skipped: its gradients are not finite" for step in (2, 4)]


def test_the_result_is_a_pard_drafter_and_an_ordinary_model(family: Path, tmp_path: Path) -> None:
    """Guards the folder that engines read: the keys of config.json, both ways to load it, and bf16 weights."""
    recipe = recipe_for(family, tmp_path, steps=2)
    train_pard(recipe, lambda progress: None)
    assert is_trained(recipe)
    config = json.loads((recipe.out / "config.json").read_text())
    assert (config["pard_token"], config["mask_token_id"], config["spd_type"]) == (VOCAB, VOCAB, "pard")
    model = AutoModelForCausalLM.from_pretrained(recipe.out)
    assert model.dtype == torch.bfloat16
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    target, exact = str(family / "target"), Runtime(dtype="float64", compiled=False)
    engine = load(target, drafter="pard", draft=str(recipe.out), k=3, runtime=exact, lengths="fixed")
    assert engine.drafter.mask_id == VOCAB
    plain = load(target, runtime=exact).generate("hello", max_new_tokens=12).tokens
    assert engine.generate("hello", max_new_tokens=12).tokens == plain


def test_a_mask_for_each_depth(family: Path, tmp_path: Path) -> None:
    """Guards the ablation of shared and distinct masks: as many rows learn as there are masks, drafting reads them in
    the order of training, and the text stays the target's."""
    recipe = recipe_for(family, tmp_path, k=4, distinct_masks=True, steps=4, lr=3e-2, optimizer="adamw")
    train_pard(recipe, lambda report: None)
    embedding = AutoModelForCausalLM.from_pretrained(recipe.out).get_input_embeddings().weight.detach().float()
    one, two, three = embedding[VOCAB : VOCAB + 3]
    assert min((a - b).abs().max() for a, b in ((one, two), (two, three), (one, three))) > 0.02, "all began as one"
    exact = Runtime(dtype="float64", compiled=False)
    engine = load(str(family / "target"), drafter="pard", draft=str(recipe.out), k=6, runtime=exact, lengths="fixed")
    assert (engine.drafter.mask_id, engine.drafter.masks) == (VOCAB, 3)
    read: list[list[int]] = []
    forward = engine.drafter.lm.forward
    engine.drafter.lm.forward = lambda tokens, **rows: (read.append(tokens[0].tolist()), forward(tokens, **rows))[1]
    plain = load(str(family / "target"), runtime=exact).generate("hello", max_new_tokens=12).tokens
    assert engine.generate("hello", max_new_tokens=12).tokens == plain
    assert read[0][-5:] == [VOCAB, VOCAB + 1, VOCAB + 2, VOCAB + 2, VOCAB + 2]
    with pytest.raises(ValueError, match="distinct_masks: 9 ids from 64 on are not all free"):
        prepare_pard(recipe_for(family, tmp_path, k=10, distinct_masks=True))


def test_k_of_one_trains_an_ordinary_draft(family: Path, tmp_path: Path) -> None:
    """Guards the ordinary drafts of a family: the loss is plain next-token cross-entropy, and no mask token appears."""
    recipe = recipe_for(family, tmp_path, k=1, steps=1, samples_per_step=1)
    reports: list[Progress] = []
    train_pard(recipe, reports.append)
    samples = load_samples(recipe.data, tiny_tokenizer(), max_length=recipe.max_length)
    (sample,) = BatchSampler(samples, per_step=1, seed=0).samples_of(0)
    before = AutoModelForCausalLM.from_pretrained(family / "draft", dtype=torch.float32)
    tokens = torch.tensor([sample.tokens])
    assert reports[0].loss == pytest.approx(before(tokens, labels=tokens).loss.item(), abs=1e-6)
    config = json.loads((recipe.out / "config.json").read_text())
    assert not {"pard_token", "mask_token_id", "spd_type"} & config.keys()
    assert config["vocab_size"] == before.config.vocab_size


def test_an_ordinary_draft_may_begin_as_a_parallel_one(family: Path, tmp_path: Path) -> None:
    """Guards engines, and our own, which know a PARD drafter by its config: after steps without masks it is none."""
    several = recipe_for(family, tmp_path / "masks", k=3, distinct_masks=True, steps=1)
    train_pard(several, lambda report: None)
    assert json.loads((several.out / "config.json").read_text())["pard_masks"] == 2
    recipe = recipe_for(family, tmp_path / "ordinary", model=str(several.out), k=1, steps=1)
    train_pard(recipe, lambda report: None)
    config = json.loads((recipe.out / "config.json").read_text())
    assert not {"pard_token", "mask_token_id", "spd_type", "pard_masks"} & config.keys()


def test_training_lowers_the_loss_at_every_depth(family: Path, tmp_path: Path) -> None:
    """Guards against labels or masks that are shifted by one: ten-letter text must soon be predictable."""
    reports: list[Progress] = []
    recipe = recipe_for(family, tmp_path, steps=30, samples_per_step=4, log_every=10, lr=1e-2, muon_lr=3e-2)
    train_pard(recipe, reports.append)
    assert [progress.step for progress in reports] == [10, 20, 30]
    assert reports[-1].loss < reports[0].loss / 2
    assert len(reports[-1].accuracy) == 3 and min(reports[-1].accuracy) > 0.6


def test_a_teacher_is_learnt(family: Path, tmp_path: Path) -> None:
    """Guards distillation end to end: the drafter moves towards the teacher's probabilities, not the text's tokens."""
    teacher = tmp_path / "teacher"
    tiny_model(7).save_pretrained(teacher)
    tiny_tokenizer().save_pretrained(teacher)
    taught = recipe_for(family, tmp_path / "taught", teacher=str(teacher), steps=30, lr=1e-2, muon_lr=3e-2)
    alone = recipe_for(family, tmp_path / "alone", steps=30, lr=1e-2, muon_lr=3e-2)
    ids = torch.tensor([tiny_tokenizer()("helloworldhello")["input_ids"]])

    def answer(folder: Path | str) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(ids).logits.detach().log_softmax(-1)

    def distance(folder: Path) -> float:
        expected = answer(teacher)
        return (expected.exp() * (expected - answer(folder))).sum(-1).mean().item()

    for recipe in (taught, alone):
        train_pard(recipe, lambda progress: None)
    before = distance(family / "draft")
    assert distance(taught.out) < before / 2 < before < distance(alone.out)


def losses_of(recipe: PardRecipe) -> list[float]:
    reports: list[Progress | Evaluation] = []
    train_pard(recipe, reports.append)
    return [report.loss for report in reports if isinstance(report, Progress)]


def test_gradients_are_clipped(family: Path, tmp_path: Path) -> None:
    """Guards `max_grad_norm`: the first gradients of a new drafter are large, and the history says how large. A limit
    that is never reached gives the very losses of a run without one."""
    runs = {}
    for name, most in (("clipped", 0.1), ("free", None), ("high", 1e9)):
        reports: list[Progress] = []
        train_pard(recipe_for(family, tmp_path / name, max_grad_norm=most, optimizer="adamw", lr=1e-2), reports.append)
        runs[name] = reports
    losses = {name: [report.loss for report in reports] for name, reports in runs.items()}
    assert losses["free"] == losses["high"] and losses["free"][0] == losses["clipped"][0]
    assert losses["free"] != losses["clipped"]
    assert runs["free"][0].grad_norm == runs["clipped"][0].grad_norm > 1
    history = (tmp_path / "free" / "out" / "history.jsonl").read_text().splitlines()
    assert json.loads(history[0])["grad_norm"] == runs["free"][0].grad_norm


@pytest.mark.parametrize(
    ("settings", "weighting"),
    [
        ({"samples_per_pass": 1}, "none"),
        ({"samples_per_pass": 1}, "expected_length:by=text"),
        ({"samples_per_pass": 2}, "valid_prefix"),
        ({"pack": True}, "none"),
        ({"pack": True}, "first_error"),
        ({"gradient_checkpointing": True}, "none"),
    ],
)
def test_less_memory_gives_the_same_losses(
    family: Path, tmp_path: Path, settings: dict[str, object], weighting: str
) -> None:
    """Guards accumulation, packing and checkpointing: how a step is cut into passes must not change what is learnt,
    also when the passes have different numbers of labels, or rows of other weights."""
    common = {"samples_per_step": 3, "average": "per_depth", "optimizer": "adamw", "max_length": 33}
    common["weighting"] = weighting
    whole = losses_of(recipe_for(family, tmp_path / "whole", **common))
    assert losses_of(recipe_for(family, tmp_path / "cut", **common, **settings)) == pytest.approx(whole, rel=1e-5)


def test_epochs_are_counted_in_samples(family: Path, tmp_path: Path) -> None:
    """Guards `epochs`: 97 tokens in pieces of 20 are 6 samples, so two epochs of 4 a step are 3 steps."""
    assert len(losses_of(recipe_for(family, tmp_path, steps=None, epochs=2, samples_per_step=4))) == 3


@pytest.mark.usefixtures("drawn")
def test_the_best_drafter_is_kept(family: Path, tmp_path: Path) -> None:
    """Guards the evidence: acceptance lengths are measured by decoding with the drafter as shipped, the best is what
    `out` holds in the end, a run that gets worse stops early, and the record says so."""
    recipe = recipe_for(
        family, tmp_path, target=str(family / "target"), steps=40, held_out=2, evaluate_every=2, patience=3, prompts=2,
        prompt_tokens=4, answer_tokens=24, lr=1e-2, muon_lr=5e-2,
    )  # fmt: skip
    reports: list[Progress | Evaluation] = []
    train_pard(recipe, reports.append)
    measured = [report for report in reports if isinstance(report, Evaluation)]
    lengths = [report.acceptance_length for report in measured]
    best = max(lengths)
    worth = [(report.acceptance_length, -report.loss) for report in measured]
    assert [report.is_best for report in measured] == [x > max(worth[:i], default=(0, 0)) for i, x in enumerate(worth)]
    assert len(worth) - 1 - worth.index(max(worth)) == 3 and measured[-1].step < 40, "the draft began as the target"
    record = json.loads((recipe.out / "train_command.json").read_text())
    assert (record["best"]["acceptance_length"], record["steps_done"]) == (best, measured[-1].step)
    assert (measured[0].step, record["before_training"]["acceptance_length"]) == (0, lengths[0])
    assert len(measured[0].by_position) == recipe.k
    assert record["recipe"]["lr"] == 1e-2 and record["data_sha256"].keys() == {str(recipe.data[0])}
    prepared = prepare_pard(recipe)
    again = prepared.acceptance(prepared.loader(torch.device("cpu")))
    assert again is not None and again.of(recipe.out).length == best
    assert (recipe.out / "curves.png").read_bytes()[1:4] == b"PNG"
    history = [json.loads(line) for line in (recipe.out / "history.jsonl").read_text().splitlines()]
    assert [entry["acceptance_length"] for entry in history if "acceptance_length" in entry] == lengths
    assert not (recipe.out / "checkpoint").exists()


@pytest.mark.usefixtures("drawn")
def test_a_run_that_goes_on_shows_its_curves(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a training of hours: its picture can be looked at before it ends."""
    monkeypatch.setattr("paradraft.train.run.trainer.PICTURE_S", 0.0)
    recipe = recipe_for(family, tmp_path, held_out=2, evaluate_every=2, steps=6)
    with pytest.raises(StoppedError):
        train_pard(recipe, stop_after(3))
    assert (recipe.out / "curves.png").read_bytes()[1:4] == b"PNG"


def test_held_out_samples_are_not_learnt(family: Path, tmp_path: Path) -> None:
    """Guards the evidence against samples that are in both halves."""
    recipe = recipe_for(family, tmp_path, held_out=2)
    prepared = prepare_pard(recipe)
    everything = load_samples(recipe.data, tiny_tokenizer(), max_length=recipe.max_length)
    assert len(prepared.held_out) == 2 and len(prepared.samples) == len(everything) - 2
    for sample in everything:
        assert (sample in prepared.samples) != (sample in prepared.held_out)
    with pytest.raises(ValueError, match="held_out=6 leaves nothing to learn of 6 samples"):
        prepare_pard(recipe_for(family, tmp_path, held_out=6))


def test_adapters_are_merged_and_the_mask_learns(family: Path, tmp_path: Path) -> None:
    """Guards LoRA: an ordinary folder comes out, its matrices changed by no more than the rank, and of the embedding
    the mask's row alone, which would else stay a row that means nothing."""
    recipe = recipe_for(family, tmp_path, lora={"rank": 2}, optimizer="adamw", steps=8, lr=3e-2)
    train_pard(recipe, lambda report: None)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (family / "draft", recipe.out)
    )
    assert before.state_dict().keys() == after.state_dict().keys()
    change = (after.model.layers[0].mlp.up_proj.weight - before.model.layers[0].mlp.up_proj.weight).detach()
    sizes = torch.linalg.svdvals(change)
    assert sizes[1] > 5 * sizes[2], "the rest is the rounding to bfloat16"
    rows = (after.get_input_embeddings().weight - before.get_input_embeddings().weight).detach().abs().amax(1)
    learnt = rows > 0.02
    assert learnt.nonzero().tolist() == [[VOCAB]]
    with pytest.raises(ValueError, match="lora: "):
        train_pard(recipe_for(family, tmp_path / "no", lora={"targets": ["none"]}), lambda report: None)


def test_reports_go_to_a_tracker(family: Path, tmp_path: Path) -> None:
    """Guards `report_to`: losses, accuracies and acceptance lengths arrive at the steps they belong to."""
    recipe = recipe_for(
        family, tmp_path, report_to=["tensorboard"], target=str(family / "target"), held_out=1, steps=4,
        evaluate_every=2, prompt_tokens=4, answer_tokens=6,
    )  # fmt: skip
    reports: list[Progress | Evaluation] = []
    train_pard(recipe, reports.append)
    events = EventAccumulator(str(recipe.out / "logs" / "paradraft"))
    events.Reload()
    for tag, kind, value in (
        ("train/loss", Progress, lambda report: report.loss),
        ("train/accuracy_2", Progress, lambda report: report.accuracy[2]),
        ("held_out/acceptance_length", Evaluation, lambda report: report.acceptance_length),
    ):
        expected = {report.step: value(report) for report in reports if isinstance(report, kind)}
        assert {event.step: event.value for event in events.Scalars(tag)} == pytest.approx(expected), tag


def test_a_teacher_with_a_longer_context_measures_too(family: Path, tmp_path: Path) -> None:
    """Guards drafts of a short context: the target reads no further than both can."""
    target = tiny_model(1)
    target.config.max_position_embeddings = 512
    target.save_pretrained(tmp_path / "long")
    tiny_tokenizer().save_pretrained(tmp_path / "long")
    settings = {"teacher": str(tmp_path / "long"), "held_out": 2, "evaluate_every": 1, "steps": 1}
    reports: list[Progress | Evaluation] = []
    train_pard(recipe_for(family, tmp_path, prompt_tokens=4, answer_tokens=8, **settings), reports.append)
    assert reports[-1].acceptance_length >= 1


def test_of_equal_lengths_the_smaller_loss_is_the_best(family: Path, tmp_path: Path) -> None:
    """Guards against keeping the first drafter for ever where few prompts cannot tell drafters apart."""
    settings = {"target": str(family / "target"), "held_out": 2, "evaluate_every": 1, "steps": 6, "lr": 1e-2}
    recipe = recipe_for(family, tmp_path, prompt_tokens=4, answer_tokens=8, **settings)
    reports: list[Progress | Evaluation] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance.AcceptanceMeter, "of", lambda self, folder: acceptance.Decoded(length=1.5))
        train_pard(recipe, reports.append)
    measured = [report for report in reports if isinstance(report, Evaluation)]
    best = [report for report in measured if report.is_best][-1]
    assert best.loss == min(report.loss for report in measured) and best.step > 1


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("drawn")
def test_a_run_says_nothing_that_a_user_cannot_mend(family: Path, tmp_path: Path) -> None:
    """Guards the terminal against what libraries tell their own developers, again and again."""
    everything = {"lora": {"rank": 2}, "gradient_checkpointing": True, "pack": True, "samples_per_pass": 2}
    measured = {"held_out": 2, "evaluate_every": 2, "teacher": str(family / "target"), "answer_tokens": 6}
    recipe = recipe_for(family, tmp_path, optimizer="adamw", steps=3, **everything, **measured)
    assert train_pard(recipe, lambda report: None)


def test_adapters_begin_as_the_seed_says(family: Path, tmp_path: Path) -> None:
    """Guards repeatable LoRA runs: the adapters' first values must not come from whatever ran before."""
    losses = [
        losses_of(recipe_for(family, tmp_path / name, lora={"rank": 2}, optimizer="adamw", lr=3e-2, seed=seed))
        for name, seed in (("a", 3), ("b", 3))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_all_ends_of_the_model_are_learnt(family: Path, tmp_path: Path, file: str) -> None:
    """Guards ends that only the configs name, as Llama's do: after a marked turn each of them is a label, and a model
    without a generation config has those of its config."""
    model = shutil.copytree(family / "draft", tmp_path / "model")
    if file == "config.json":
        (model / "generation_config.json").unlink()
    settings = json.loads((model / file).read_text()) | {"eos_token_id": [0, 52]}
    (model / file).write_text(json.dumps(settings))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ m.end }}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    data = tmp_path / "data.jsonl"
    write_lines(data, [{"messages": [{"role": "assistant", "content": "ab", "end": end}]} for end in ("Z", "Y")])
    prepared = prepare_pard(recipe_for(family, tmp_path, model=str(model), data=[data]))
    assert [list(sample.tokens) for sample in prepared.samples] == [[1, 2, 52], [1, 2]]
