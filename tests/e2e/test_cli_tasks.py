"""`paradraft bench --task` as a user meets it: one task, several, mistakes; and the recipes of the paper's tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipes.tables import run as paper_tables

from paradraft.environment import without_folder
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake
from tests.support.jsonl import write_lines
from tests.support.tasks import write_task

TABLES = Path(__file__).parents[2] / "recipes" / "tables"
QUICK = ["--methods", "ar,ngram:k=2", "--runs", 1, "--no-compile", *EXACT]


def test_several_tasks_and_their_mean(
    family: Path, paradraft: Paradraft, tmp_path: Path, quick_speeds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the whole way: questions of local files, second turns, figures of each task, and their mean."""
    monkeypatch.chdir(tmp_path)
    data = [f"--task-data={name}={write_task(tmp_path, name)}" for name in ("humaneval", "mtbench")]
    sizes = ["--num-prompts", 2, "--max-new-tokens", 6]
    asked = ["--task", "humaneval,mtbench", *data, *sizes, "--json", "out.json", "--system", "s"]
    found = paradraft("bench", "--target", family / "target", *QUICK, *asked)
    assert found.code == 0, found.err
    assert "warning: --system has no effect on a target without a chat template" in found.err
    assert "mtbench: run 1/1, prompt 4/4" in found.err
    file = json.loads(Path("out.json").read_text(encoding="utf-8"))
    human, chat = file["tasks"]["humaneval"], file["tasks"]["mtbench"]
    assert (human["arguments"]["num_prompts"], chat["arguments"]["num_prompts"]) == (2, 4)
    assert human["task"]["questions"] == [1, 4] and chat["task"]["turns"] == 4
    assert human["example"]["prompt"] == "def f0(x):\n"
    assert chat["methods"]["ngram:k=2"]["identical_to_ar"]
    assert str(tmp_path) not in json.dumps(human["machine"]["command"])
    assert file["title"].startswith("humaneval, mtbench: ")
    assert json.loads(found.out.splitlines()[-1])["mean"] == file["mean"]
    both = [one["methods"]["ar"]["tokens_per_s"]["median"] for one in (human, chat)]
    assert file["mean"]["ar"]["tokens_per_s"] == pytest.approx(sum(both) / 2)


def test_one_task_is_a_result_like_any_other(
    family: Path, paradraft: Paradraft, tmp_path: Path, quick_speeds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards report and plan, which read files of one task, and a set that shrinks without a word."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "data.jsonl", [{"question": "a"}, {"question": "b" * 120}, {"question": "c"}])
    asked = ["--task", "gsm8k", "--task-data", "data.jsonl", "--max-new-tokens", 6, "--json", "out.json"]
    found = paradraft("bench", "--target", family / "target", *QUICK, *asked, "--report", "page")
    assert found.code == 0, found.err
    assert "warning: task gsm8k: left out 1 question, too long" in found.err
    file = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert (file["task"]["questions"], file["task"]["left_out"]) == ([1, 3], [2])
    assert file["title"].startswith("gsm8k: ") and file["methods"]["ar"]["tokens"] <= 12
    assert "gsm8k: " in Path("page/index.html").read_text(encoding="utf-8")
    assert paradraft("report", "out.json", "again").code == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--task", "humanevil"], "unknown task 'humanevil': use some of humaneval, gsm8k"),
        (["--task", "gsm8k,gsm8k"], "comes twice"),
        (["--task", "gsm8k", "--prompts", "data.jsonl"], "one or the other"),
        (["--task", "specbench"], "download https://"),
        (["--task", "gsm8k", "--task-data", "none.jsonl"], "no file 'none.jsonl'"),
        (["--task", "humaneval", "--task-data", "data.jsonl"], "no field 'prompt'"),
        (
            ["--task", "gsm8k", "--task-data", "data.jsonl", "--num-prompts", 7],
            "num_prompts=7: task gsm8k has 6 questions",
        ),
        (["--task", "gsm8k", "--task-data", "data.jsonl", "--num-prompts", 0], "num_prompts=0"),
        (["--task", "gsm8k", "--task-data", "data.jsonl"], "only 0 fit into 128 tokens, with 512 new tokens"),
        (["--task", "gsm8k,math500", "--plot", "out.png"], "--plot and --report show one task"),
        (["--task", "gsm8k", "--target", "shape:tiny-target"], "reads no texts"),
    ],
)
def test_bad_task(
    family: Path,
    paradraft: Paradraft,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[Any],
    named: str,
) -> None:
    """Guards against mistakes that are found after minutes of loading, or never."""
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path, "gsm8k").rename("data.jsonl")
    assert_mistake(paradraft("bench", "--target", family / "target", *QUICK, "--json", "out.json", *arguments), named)
    assert not Path("out.json").exists()


def test_task_options_need_a_task(family: Path, paradraft: Paradraft, tmp_path: Path, quick_speeds: None) -> None:
    """Guards against data that a user believes in and that nothing reads."""
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "abc"}])
    asked = ["--prompts", tmp_path / "prompts.jsonl", "--num-prompts", 1, "--max-new-tokens", 4, "--task-data", "x"]
    found = paradraft("bench", "--target", family / "target", *QUICK, *asked)
    assert found.code == 0 and "warning: --task-data has no effect without --task" in found.err


@pytest.mark.parametrize("file", sorted(TABLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_recipes_of_tables_are_commands(
    file: Path,
    paradraft: Paradraft,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards recipes that nobody can run here: their commands are read as meant, down to the target that is not there,
    and the paper's numbers are one for each task."""
    paper_tables.main([str(file), "--out", "build/table", "--dry-run"])
    table = yaml.safe_load(file.read_text(encoding="utf-8"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(table["rows"])
    assert all(len(paper) == len(table["tasks"]) for row in table["rows"] for paper in row["paper"].values())
    assert all(f"draft={row['pard']}" in line for row, line in zip(table["rows"], lines, strict=True))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paradraft.sources.load_plan.locate", lambda target, _: refuse(target))
    paper_tables.main([str(file), "--out", ".", "--dry-run", "--models", "pocket"])
    command = capsys.readouterr().out.split()
    assert "--task" in command and "draft=" not in " ".join(command)
    assert_mistake(paradraft(*command[1:]), "asked for pocket")


def refuse(target: str) -> str:
    raise ValueError(f"asked for {target}")


def measured(command: list[str], speed: float) -> dict[str, Any]:
    """What `paradraft bench` would write: the first draft length is the faster one."""
    specs = command[command.index("--methods") + 1].split(",")
    figures = {
        spec: {"tokens_per_s": {"median": speed * (2 + len(specs) - place)}, "identical_to_ar": True}
        for place, spec in enumerate(specs)
    }
    machine = {
        "command": ["python", *map(without_folder, command)],
        "gpu": "A GPU",
        "cpu": "",
        "date": "2026-11-21T12:00",
    }
    one = {"methods": figures, "machine": machine, "arguments": {"num_prompts": 80, "max_new_tokens": 512, "runs": 1}}
    return {"tasks": dict.fromkeys(command[command.index("--task") + 1].split(","), one)}


def test_a_table_is_run_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards hours of a GPU: what is done is kept, what failed is named and tried again, and settings do not mix."""
    ran: list[str] = []

    def run(command: list[str]) -> int:
        ran.append(command[command.index("--target") + 1])
        if "DeepSeek" in ran[-1] and len(ran) == 2:
            return 1
        Path(command[command.index("--json") + 1]).write_text(json.dumps(measured(command, 10.0)), encoding="utf-8")
        return 0

    asked = [str(TABLES / "table-1.yaml"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="failed: DSQ 7B"):
        paper_tables.main(asked, run)
    assert "| DSQ 7B | PARD | not run | - |" in (tmp_path / "table.md").read_text(encoding="utf-8")
    paper_tables.main(asked, run)
    assert len(ran) == 4 and "DeepSeek" in ran[3]
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    # Seven methods: the second has 80 tokens/s, the third, VSD's fastest, 70, and the sixth, PARD's, 40.
    assert "| L3.1 8B | AR+ | - | 80.0 | 1.00x | 80.0 | 1.00x | 80.0 | 1.00x | 80.0 | 1.00x |" in text
    assert "| L3.1 8B | PARD | k=8:draft=" not in text
    assert "| L3.1 8B | PARD | k=8 | 40.0 | 0.50x (3.35x) | 40.0 | 0.50x (4.08x) |" in text
    with pytest.raises(SystemExit, match="made by another command"):
        paper_tables.main([*asked, "--num-prompts", "3"], run)
    with pytest.raises(SystemExit, match=r"no row \['L4'\]"):
        paper_tables.main([*asked, "--only", "L4"], run)
