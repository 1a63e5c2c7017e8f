"""The drafter "auto": the one that fits a draft, else one that cannot lose, and the reason."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config

from paradraft import load
from paradraft.cli import main
from paradraft.cli.commands.bench import BenchArgs
from paradraft.drafters import drafter_class
from paradraft.engine.automatic import LARGE, automatic, drafter_of
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.formats.likely_table import LikelyCounts
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import GREEDY
from paradraft.sources.loading import pocket_folder
from paradraft.sources.recorded import remember_drafter, table_file, table_name
from paradraft.tree import Tree

AUTO = Speculation(drafter="auto")


@pytest.mark.parametrize(("draft", "drafter"), [("pard", "pard"), ("draft", "autoregressive")])
def test_a_draft_is_used_as_what_it_is(family: Path, tmp_path: Path, draft: str, drafter: str) -> None:
    """Guards drafts that are named alone: by their config, and not by their folder's name."""
    renamed = tmp_path / "mine"
    renamed.symlink_to(family / draft)
    chosen = automatic(str(family / "target"), Speculation(drafter="auto", draft=str(renamed)))
    assert chosen.drafter == drafter and str(renamed) in str(chosen.reason)


@pytest.mark.parametrize(("draft", "drafter"), [("pard", "pard"), ("draft", "autoregressive")])
def test_a_draft_of_another_family_is_translated(family: Path, tmp_path: Path, draft: str, drafter: str) -> None:
    """Guards users who name any small model. Control: one with as many tokens is compared where it is loaded."""
    other = shutil.copytree(family / draft, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    words = [f"word{number}" for number in range(20)]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(words)
    tokenizer.save_pretrained(other)
    chosen = Speculation(drafter="auto", draft=str(other))
    assert automatic(str(family / "target"), chosen).drafter == drafter
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 9}))
    with_reason = automatic(str(family / "target"), chosen)
    assert with_reason.drafter == f"translated:of={drafter}" and "whose tokens are others" in str(with_reason.reason)


def test_a_draft_with_states_drafts_with_them(family: Path, tmp_path: Path) -> None:
    """Guards PARD-2 folders, which are PARD folders too."""
    folder = shutil.copytree(family / "pard", tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard2": True, "pard2_target_layers": [-1]}))
    assert drafter_of(str(folder)) == "pard2"


def test_a_published_block_is_no_small_model(family: Path, tmp_path: Path) -> None:
    """Guards folders of DFlash, whose config is Qwen3's."""
    Qwen3Config(architectures=["DFlashDraftModel"]).save_pretrained(tmp_path)
    assert drafter_of(str(tmp_path)) == "dflash"


@pytest.mark.parametrize("drafter", ["eagle_parallel", "ppd", "pard"])
def test_a_head_names_its_drafter(tmp_path: Path, drafter: str) -> None:
    """Guards checkpoints whose model_type is the drafter's name, and the shipped PARD model."""
    (tmp_path / "mine").symlink_to(pocket_folder(drafter))
    assert drafter_of(str(tmp_path / "mine")) == drafter


def test_without_a_draft_it_needs_no_model(family: Path) -> None:
    chosen = automatic(str(family / "target"), Speculation(drafter="auto", k=5, tree=Tree(budget=7)))
    assert chosen == Speculation(drafter="suffix", k=5, tree=Tree(budget=7)) and "suffix" in str(chosen.reason)
    served = automatic(str(family / "target"), AUTO, has_grammars=True)
    assert served.drafter == "forced+suffix" and drafter_class(served.drafter).traits.estimates
    assert automatic("pocket", AUTO).drafter == "pard"
    assert drafter_of("shape:llama-3.2-1b") == "autoregressive"


def sized(folder: Path, number: int) -> Path:
    """A model folder whose weights are a file of this many bytes, which takes no room."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(number)
    return folder


@pytest.mark.parametrize(
    ("size", "cpu", "drafter"),
    [(LARGE - 1, "AVX512", "suffix"), (LARGE, "AVX512", "suffix+recycle"), (LARGE, "AVX2", "suffix")],
)
def test_a_large_target_drafts_from_its_passes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, cpu: str, drafter: str
) -> None:
    """Guards small models, whose passes are too short for a drafter in Python that learns from each, and CPUs on which
    every drafted token costs."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    folder = str(sized(tmp_path / "model", size))
    assert automatic(folder, AUTO).drafter == drafter
    assert automatic(folder, AUTO, has_grammars=True).drafter == f"forced+{drafter}"


def test_a_recorded_table_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the user who has recorded one, also for a small model; one of another model is not taken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = sized(tmp_path / "first", 9), sized(tmp_path / "second", 10)
    name = table_name(str(first))
    assert name is not None
    file = table_file(name)
    file.parent.mkdir(parents=True, mode=0o700)
    counts = LikelyCounts(most=2)
    counts.add((3, 4), [7, 8], [1.0, 0.0])
    counts.table({"answers": "1", "tokens": "2"}).write(file)
    chosen = automatic(str(first), AUTO)
    assert chosen.drafter == f"suffix+recycle:table={name}" and "table recorded for this one" in str(chosen.reason)
    assert automatic(str(second), AUTO).drafter == "suffix"
    file.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="the recorded table is left out, because it cannot be read"):
        assert automatic(str(first), AUTO).drafter == "suffix"
    file.chmod(0o666)
    assert automatic(str(first), AUTO).drafter == "suffix", "others may have written it"


def test_a_trained_drafter_is_used(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the user who has trained one: it drafts as what it is, no deeper than it was trained, beside what drafts
    from the text, for its target alone, and as long as it is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, other, mine = str(family / "target"), str(family / "draft"), tmp_path / "mine"
    shutil.copytree(pocket_folder("eagle_parallel"), mine)
    k = json.loads((mine / "config.json").read_text())["k"]
    assert automatic(target, AUTO).drafter == "suffix"
    assert remember_drafter(target, mine, "eagle_parallel", k)
    chosen = automatic(target, Speculation(drafter="auto", k=k + 3))
    assert (chosen.drafter, chosen.draft, chosen.k) == ("suffix+eagle_parallel", str(mine), k)
    assert "trained for this model" in str(chosen.reason)
    assert automatic(target, Speculation(drafter="auto", k=2)).k == 2
    assert automatic(target, AUTO, has_grammars=True).drafter == "forced+suffix+eagle_parallel"
    assert automatic(target, Speculation(drafter="auto", verify="rejection")).drafter == "eagle_parallel"
    assert automatic(target, Speculation(drafter="auto", draft=str(family / "pard"))).drafter == "pard"
    assert automatic(other, AUTO) == Speculation(drafter="suffix")
    (place,) = (tmp_path / "cache" / "paradraft").glob("drafter-*")
    for tree in (Tree(budget=6), Tree(paths=((0,), (0, 0)))):
        assert automatic(target, Speculation(drafter="auto", tree=tree)).drafter == "eagle_parallel"
    deep = Tree(paths=tuple((0,) * depth for depth in range(1, k + 2)))
    assert automatic(target, Speculation(drafter="auto", k=k + 1, tree=deep)).drafter == "suffix"
    place.chmod(0o666)
    assert automatic(target, AUTO).drafter == "suffix", "others may have written it"
    place.chmod(0o600)
    for damaged in (b"", b"\xff", b"[]", b"{}"):
        kept = place.read_bytes()
        place.write_bytes(damaged)
        assert automatic(target, AUTO) == Speculation(drafter="suffix")
        place.write_bytes(kept)
    (mine / "config.json").write_text("{}", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"left out, because '.*mine' was moved or changed"):
        assert automatic(target, AUTO) == Speculation(drafter="suffix")
    shutil.rmtree(mine)
    with pytest.warns(UserWarning, match="train again, or delete"):
        assert automatic(target, AUTO) == Speculation(drafter="suffix")
    assert remember_drafter(other, family / "pard", "pard", 8)
    assert automatic(other, AUTO).drafter == "suffix+pard"
    assert not remember_drafter("shape:llama-3.2-1b", family / "pard", "pard", 8)


def test_a_trained_drafter_with_trees_of_its_own_drafts_alone(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards ppd, which cannot be joined, nor given a tree."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = str(family / "target")
    assert remember_drafter(target, pocket_folder("ppd"), "ppd", 3)
    assert automatic(target, AUTO).drafter == "ppd"
    assert automatic(target, Speculation(drafter="auto", tree=Tree(budget=6))).drafter == "suffix"


def test_a_trained_drafter_can_be_used_with_any_umask(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards users whose files their group may write, by default."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        assert remember_drafter(str(family / "target"), family / "pard", "pard", 8)
    finally:
        os.umask(before)
    assert automatic(str(family / "target"), AUTO).drafter == "suffix+pard"


def test_a_drafter_that_is_named_drafts_no_deeper_than_it_can(tmp_path: Path) -> None:
    """Guards `--draft FOLDER` alone: the default of K is more than some trainings have."""
    mine = tmp_path / "mine"
    shutil.copytree(pocket_folder("eagle_parallel"), mine)
    config = json.loads((mine / "config.json").read_text())
    for key in ("k", "num_heads"):
        changed = {name: value for name, value in config.items() if name != "k"} | {key: 3}
        (mine / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        assert automatic("pocket", Speculation(drafter="auto", draft=str(mine))).k == 3


def test_a_shape_drafts_from_the_text() -> None:
    """Guards targets without a file, which have no size and no digest."""
    assert automatic("shape:llama-3.2-1b", AUTO).drafter == "suffix"


def test_it_drafts_in_exact_passes_and_says_so(family: Path) -> None:
    """Guards the default of `load`: passes in C++ draft, with lengths that follow measured times."""
    engine = load(str(family / "target"), dtype="float32")
    assert engine.target.lm.is_native and engine.speculation.drafter == "suffix"
    assert engine.speculation.lengths == "expected" and engine.speculation.reason is not None


@pytest.mark.parametrize(
    ("settings", "drafter"),
    [
        ({}, "none"),
        ({"verify": "rejection"}, "none"),
        ({"lengths": "fixed"}, "suffix"),
        ({"tree": 6}, "suffix"),
    ],
)
def test_it_does_not_draft_where_it_could_lose(family: Path, settings: dict[str, str], drafter: str) -> None:
    """Guards passes by torch, whose logits depend on the width: there lengths may not follow times, unless named."""
    engine = load(str(family / "target"), runtime=Runtime(compiled=False, dtype="float64"), **settings)  # type: ignore[arg-type]
    assert engine.speculation.drafter == drafter == type(engine.drafter).__module__.rpartition(".")[2]
    assert engine.speculation.reason is not None and f"drafter {drafter}" in engine.speculation.reason


def test_a_named_draft_stays(family: Path) -> None:
    """Guards a user's draft, which is used even where lengths are fixed."""
    runtime = Runtime(compiled=False, dtype="float64")
    engine = load(str(family / "target"), draft=str(family / "pard"), runtime=runtime)
    assert engine.speculation.drafter == "pard" and engine.speculation.lengths == "fixed"


def test_rows_of_a_rule_that_draws_are_plain(family: Path) -> None:
    """Guards the rejection rule in C++, whose seeds would give other texts at other lengths."""
    engine: Engine = load(str(family / "target"), verify="rejection", dtype="float32")
    assert engine.target.lm.is_native and engine.speculation.drafter == "none"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gamma", "4"], "name the drafter that drafts ahead"),
        (["--draft", "missing/folder/of/mine"], "missing/folder/of/mine"),
        (["--drafter", "automatic"], "unknown drafter 'automatic'"),
        (["--drafter", "auto:k=4"], "'auto' has no settings, joins no other"),
        (["--drafter", "auto+ngram"], "'auto' has no settings, joins no other"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["paradraft", "generate", "--target", "pocket", "--prompt", "a", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("methods", "specs"),
    [
        ("ar,auto", ["ar", "suffix:lengths=expected"]),
        ("auto:k=4:lengths=fixed", ["suffix:k=4:lengths=fixed"]),
        ("auto:draft=shape:llama-3.2-1b:k=2", ["autoregressive:draft=shape:llama-3.2-1b:k=2:lengths=expected"]),
        ("automatic", ["automatic"]),
    ],
)
def test_a_benchmark_names_what_auto_takes(family: Path, methods: str, specs: list[str]) -> None:
    """Guards the results, whose methods are named by drafter and settings."""
    args = BenchArgs(
        target=str(family / "target"), methods=methods, speculation=Speculation(lengths="fixed"), sampling=GREEDY,
        runtime=Runtime(),
    )  # fmt: skip
    assert [spec for spec, _ in args.specs] == specs


def test_a_benchmark_names_the_setting_that_auto_lacks(family: Path) -> None:
    """Guards users who never typed the drafter that "auto" is."""
    args = BenchArgs(
        target=str(family / "target"), methods="auto:wrong=3", speculation=Speculation(), sampling=GREEDY,
        runtime=Runtime(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"method 'auto:wrong=3': 'wrong' is no setting of auto"):
        _ = args.specs
