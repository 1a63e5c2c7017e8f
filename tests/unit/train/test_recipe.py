from __future__ import annotations

from pathlib import Path

import pytest

from paradraft.data.mix import Source
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.recipe_file import load_recipe

TEXT = "model: some/model\ndata: [a.txt, b.jsonl]\nout: there\nsteps: 100\n"


def load(tmp_path: Path, *overrides: str, text: str = TEXT) -> PardRecipe:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    return load_recipe(PardRecipe, file, list(overrides))


def test_defaults_are_those_of_the_paper(tmp_path: Path) -> None:
    """Guards the published numbers: K = 8, r = 0.7, r_min = 0.2; and the average that won on the pocket family."""
    recipe = load(tmp_path)
    assert (recipe.k, recipe.r, recipe.r_min, recipe.average) == (8, 0.7, 0.2, "token_mean")
    assert recipe.data == [Path("a.txt"), Path("b.jsonl")] and recipe.out == Path("there")


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("lr=1e-3", "lr", 1e-3), ("lr=0.001", "lr", 1e-3), ("lr=1E-3", "lr", 1e-3), ("steps=1e2", "steps", 100),
        ("bf16=false", "bf16", False), ("bf16=true", "bf16", True), ("optimizer=muon", "optimizer", "muon"),
        ("average=per_depth", "average", "per_depth"), ("schedule=cosine", "schedule", "cosine"),
        ("betas=[0.8, 0.99]", "betas", (0.8, 0.99)), ("max_grad_norm=null", "max_grad_norm", None),
        ("max_grad_norm=0", "max_grad_norm", None), ("max_grad_norm=0.5", "max_grad_norm", 0.5),
        ("long=split", "long", "split"),
        ("loss=cross_entropy", "loss", "cross_entropy"), ("out=elsewhere/e=1", "out", Path("elsewhere/e=1")),
        ("data=[c.txt]", "data", [Path("c.txt")]), ("data=c.txt", "data", [Path("c.txt")]),
        ("data={path: c.txt, weight: 2}", "data", [Source(path=Path("c.txt"), weight=2)]),
        ("data=[c.txt, {path: d.txt, most: 5}]", "data", [Path("c.txt"), Source(path=Path("d.txt"), most=5)]),
        ("report_to=wandb", "report_to", ["wandb"]),
        ("mask_token_id=null", "mask_token_id", None), ("k=12", "k", 12),
    ],
)  # fmt: skip
def test_overrides(tmp_path: Path, override: str, field: str, value: object) -> None:
    """Guards against 1e-3 read as text, true as text, and a value that holds an equals sign."""
    assert getattr(load(tmp_path, override), field) == value
    assert getattr(load(tmp_path, f"{field}=9", override), field) == value, "the last override wins"


def test_a_group_of_settings_is_overridden_one_by_one(tmp_path: Path) -> None:
    """Guards against `lora.rank=4` that throws the file's other adapter settings away, or changes nothing."""
    both = load(tmp_path, "lora.rank=4", text=TEXT + "lora: {alpha: 5}\n").lora
    assert both is not None and (both.rank, both.alpha) == (4, 5)
    alone = load(tmp_path, "lora.rank=4").lora
    assert alone is not None and (alone.rank, alone.alpha) == (4, 32)


def test_a_teacher_is_learnt_by_forward_kl_unless_told_otherwise(tmp_path: Path) -> None:
    """Guards against a teacher that is loaded and ignored."""
    assert load(tmp_path).divergence is None
    assert load(tmp_path, "teacher=t").divergence == "forward_kl"
    assert load(tmp_path, "teacher=t", "loss=total_variation").divergence == "total_variation"
    with pytest.raises(ValueError, match="leave teacher out"):
        load(tmp_path, "teacher=t", "loss=cross_entropy")


def test_scientific_numbers_inside_the_file(tmp_path: Path) -> None:
    """Guards against YAML 1.1, which reads 1e-3 as text."""
    assert load(tmp_path, text=TEXT + "lr: 1e-3\n").lr == 1e-3


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("stepps=3", "unknown recipe key 'stepps'; known are .*steps"), ("k=0", "'k'.*greater than or equal to 1"),
        ("r=0", "'r'"), ("r=1.5", "'r'"), ("r_min=-0.1", "'r_min'"), ("average=sum", "'average'.*token_mean"),
        ("loss=sum", "'loss'.*forward_kl"), ("loss=forward_kl", "loss=forward_kl: name a teacher"),
        ("epochs=2", "give either steps or epochs"), ("steps=null", "give either steps or epochs"),
        ("depth_weights=[1]", "depth_weights: 1 numbers for 8 depths"),
        ("held_out=0 & patience=2", "patience=2: nothing is held out to measure with, set held_out"),
        ("held_out=0 & evaluate_every=2", "evaluate_every=2: nothing is held out"),
        ("held_out=0 & target=pocket", "target=pocket: nothing is held out"),
        ("out=2026-99-99", "'out=2026-99-99': '2026-99-99' is not a YAML value"),
        ("columns={txt: a}", "columns: 'txt' is none of"),
        ("chat_template_kwargs=enable_thinking", "'chat_template_kwargs': input should be a valid dictionary"),
        ("chat_template_kwargs=[enable_thinking]", "'chat_template_kwargs': input should be a valid dictionary"),
        ("chat_template_kwargs={1: 2}", "'chat_template_kwargs.1.*should be a valid string"),
        ("chat_template_kwargs={today: 2026-11-21}", "'chat_template_kwargs.today': input was not a valid JSON value"),
        ("lora.ranks=3", "'lora.ranks'; known are rank"), ("lora.rank=0", "'lora.rank'"),
        ("report_to=[paper]", "'report_to.0'"),
        ("weighting=cat", "weighting=cat: use one of none, chain, expected_length, first_error, valid_prefix"),
        ("weighting=chain", "weighting=chain: only a teacher knows it, name one"),
        ("hard_share=0.1", "hard_share=0.1: the loss is the cross-entropy already, leave it out"),
        ("device=abacus", "'device'"), ("long=cut", "'long'.*truncate"), ("schedule=step", "'schedule'.*cosine"),
        ("betas=[0.9]", "'betas.1'"), ("betas=[0.9, 1]", "'betas.1'.*less than 1"),
        ("max_grad_norm=-1", "'max_grad_norm'"),
        ("optimizer=sgd", "'optimizer'.*muon"), ("steps=many", "'steps'"), ("steps=1.5", "'steps'"),
        ("data=[]", "'data'"),
        ("data=[{weight: 2}]", "'data.0.path' is missing"),
        ("data=[a, {path: b, wieght: 2}]", "unknown recipe key 'data.1.wieght'; known are path, weight, most"),
        ("data={path: b, weight: -1}", "'data.0.weight': input should be greater than or equal to 0, not -1"),
        ("data={path: b, weight: .inf}", "'data.0.weight': input should be"),
        ("data={path: b, most: 0}", "'data.0.most': input should be greater than or equal to 1, not 0"),
        ("data=[[a]]", "'data.0': input is not a valid path"),
        ("columns={file: a}", "columns: 'file' is none of"), ("columns={file: 3}", "'columns.file'"),
        ("steps", "'steps': write overrides as key=value"), ("out=[a", "'out=.a'"), ("max_length=1", "'max_length'"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(tmp_path: Path, override: str, complaint: str) -> None:
    """Guards against a setting that is silently ignored, and against a message without the key."""
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, *override.split(" & "))


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    """Guards against tracebacks out of the YAML library."""
    with pytest.raises(ValueError, match=r"none\.yaml' does not exist"):
        load_recipe(PardRecipe, tmp_path / "none.yaml", [])
    for text in ("- a\n", "just text", "", "a: [b", "1: 2\n" + TEXT, "a: 2026-99-99", "a: " + "[" * 5000):
        with pytest.raises(ValueError, match="recipe"):
            load(tmp_path, text=text)
    with pytest.raises(ValueError, match="'out' is missing"):
        load(tmp_path, text="model: m\ndata: [a]\nsteps: 3\n")


def test_fingerprint_tells_runs_apart(tmp_path: Path) -> None:
    """Guards against resuming another run; how often a run reports or saves, and where to, is no difference."""
    same = load(tmp_path).fingerprint
    assert load(tmp_path, "log_every=3", "save_every=4", "out=elsewhere").fingerprint == same
    assert load(tmp_path, "samples_per_pass=1", "pack=true", "gradient_checkpointing=true").fingerprint == same
    assert load(tmp_path, "bf16=false").fingerprint == same, "checkpoints know"
    others = (
        "lr=1e-3",
        "steps=101",
        "seed=1",
        "k=9",
        "model=m",
        "data=[a.txt]",
        "data=[a.txt, {path: b.jsonl, weight: 2}]",
        "data=[a.txt, {path: b.jsonl, most: 2}]",
        "r=0.71",
        "betas=[0.9, 0.99]",
        "schedule=constant",
        "max_grad_norm=2",
        "long=split",
    )
    for override in (*others, "chat_template_kwargs.enable_thinking=false"):
        assert load(tmp_path, override).fingerprint != same, override


def test_fingerprint_sees_the_bytes_of_the_data(tmp_path: Path) -> None:
    """Guards against going on from a checkpoint after the data was written anew under the same name."""
    data = tmp_path / "a.txt"
    found = []
    for text in ("one", "two", "one"):
        data.write_text(text)
        found.append(load(tmp_path, f"data=[{data}]").fingerprint)
    assert found[0] == found[2] != found[1]
    data.rename(tmp_path / "b.txt")
    assert load(tmp_path, f"data=[{tmp_path / 'b.txt'}]").fingerprint == found[0], "where it lies is no difference"


def test_fingerprint_sees_what_models_hold(tmp_path: Path) -> None:
    """Guards against going on from a checkpoint after a model was trained again in the same folder."""
    for role in ("model", "teacher", "target"):
        folder = tmp_path / role
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"one")
        before = load(tmp_path, f"{role}={folder}").fingerprint
        (folder / "history.jsonl").write_bytes(b"no part of the model")
        assert load(tmp_path, f"{role}={folder}").fingerprint == before
        (folder / "model.safetensors").write_bytes(b"two")
        assert load(tmp_path, f"{role}={folder}").fingerprint != before
    assert load(tmp_path, "model=pocket").model_hashes.keys() == {"model"}
