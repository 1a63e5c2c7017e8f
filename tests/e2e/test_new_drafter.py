"""A newcomer's drafter with its training: two files, no other file touched."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paradraft import drafters, train
from paradraft.drafters import drafter_names
from paradraft.train import trainee_names
from tests.contract import test_every_trainee as contract
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake
from tests.support.packages import install

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(params=["file", "package"])
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example `table`, as files beside ours, and as another package."""
    sources = {name: (EXAMPLES / f"table_{name}.py") for name in ("drafter", "training")}
    before = set(sys.modules)
    if request.param == "file":
        for package, name in ((drafters, "drafter"), (train.drafters, "training")):
            folder = tmp_path / package.__name__
            folder.mkdir()
            shutil.copy(sources[name], folder / "table.py")
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    else:
        modules = {f"theirs_{name}": file.read_text(encoding="utf-8") for name, file in sources.items()}
        points = {"drafters": {"table": "theirs_drafter"}, "train": {"table": "theirs_training"}}
        install(tmp_path / "theirs", "theirs", monkeypatch, modules=modules, **points)
    yield
    for name in set(sys.modules) - before:
        if name.endswith(".table") or name.startswith("theirs_"):
            del sys.modules[name]


@pytest.mark.usefixtures("table")
def test_a_new_drafter_is_trained_and_decodes(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the promise of two files: `train NAME` and `--drafter NAME` find them, recipes, settings and help too, and
    nothing else is to be edited."""
    assert "table" in drafter_names() and "table" in trainee_names()
    data, recipe, out = tmp_path / "data.jsonl", tmp_path / "recipe.yaml", tmp_path / "out"
    data.write_text(json.dumps({"text": "abcabcabcabcabc"}) + "\n", encoding="utf-8")
    recipe.write_text(
        f"model: {family / 'target'}\ndata: [{data}]\nout: {out}\nsteps: 30\nsamples_per_step: 1\nlr: 3e-2\n"
        "warmup_steps: 1\nbf16: false\ndevice: cpu\nlog_every: 10\nheld_out: 0\n",
        encoding="utf-8",
    )
    listed = paradraft("train", "table", "--settings")
    assert listed.code == 0 and "rank (32): rank of the table" in listed.out and "mask_token_id" not in listed.out
    assert_mistake(paradraft("train", "table", recipe, "k=3"), "unknown recipe key 'k'; known are", "rank")
    trained = paradraft("train", "table", recipe, "rank=8")
    assert (trained.code, trained.err) == (0, "")
    assert f"drafter written to {out}" in trained.out
    asked = ["--target", family / "target", "--prompt", "abcabc", "--max-new-tokens", 12, *EXACT]
    plain = paradraft("generate", *asked)
    for drafter in ("table", "table:longest=2"):
        drafted = paradraft("generate", *asked, "--drafter", drafter, "--draft", out)
        assert drafted.code == 0 and drafted.out == plain.out
    assert_mistake(paradraft("generate", *asked, "--drafter", "table:longest=0", "--draft", out), "longest=0")
    assert_mistake(paradraft("train", "tabel", recipe), "unknown training 'tabel': use one of dflash", "ppd, table")
    assert "already trained" in paradraft("train", "table", recipe, "rank=8").out


@pytest.mark.parametrize("table", ["file", pytest.param("package", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.usefixtures("table")
def test_the_contract_holds_for_it(family: Path, tmp_path: Path) -> None:
    """Guards the contract itself: it can be kept by a trainee that is not PARD."""
    contract.test_recipes_explain_themselves("table")
    contract.test_the_result_decodes_losslessly(family, tmp_path / "decodes", "table")
    contract.test_a_resumed_run_equals_a_whole_one(family, tmp_path / "resumed", "table")
    contract.test_a_text_is_memorised(family, tmp_path / "memorised", "table")
    contract.test_a_loss_is_a_sum_over_samples(family, tmp_path / "sum", "table", {}, [[2, 0], [1]])
    contract.test_saving_twice_gives_the_same_files(family, tmp_path / "twice", "table")
