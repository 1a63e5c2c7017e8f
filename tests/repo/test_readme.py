"""Every `paradraft` command of README.md, docs/commands.md and docs/one_file.md runs.

Commands stand in blocks tagged ```` ```bash run ```` or ```` ```console run ````, one per line, with or without `$ `; a
backslash continues a line. They run in one process, in order, in a copy of the folder, without compilation. Sizes are
cut, and costs are measured once: what takes minutes in the README takes seconds here. Commands in blocks tagged
```` ```bash real ```` need the files of `make real-models`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from paradraft import cli
from paradraft.plan import costs

ROOT = Path(__file__).parents[2]
BLOCK = r"^```(?:bash|console) {tag}\n(?P<text>.*?)^```$"
AT_MOST = {"--num-prompts": 2, "--max-new-tokens": 12, "--runs": 1, "steps": 2}
BY_DEFAULT = {
    "audit": {"--max-new-tokens": 24},
    "bench": {"--max-new-tokens": 12, "--runs": 1},
    "generate": {"--max-new-tokens": 12},
}
"""What a command is told where the README leaves its sizes to it."""
TRAINING = ["warmup_steps=1", "samples_per_step=1", "held_out=4", "evaluate_every=2", "prompts=2", "answer_tokens=8"]
DOCUMENTS = ("README.md", "docs/commands.md", "docs/one_file.md")
COPIED = ("README.md", "recipes", "examples", "docs", "benchmarks")


def text_of(*documents: str) -> str:
    return "\n".join((ROOT / document).read_text(encoding="utf-8") for document in documents)


def commands(text: str, tag: str = "run") -> list[list[str]]:
    """The arguments of every command, `paradraft` itself left out."""
    blocks = re.finditer(BLOCK.format(tag=tag), text, re.MULTILINE | re.DOTALL)
    lines = "".join(match["text"] for match in blocks).replace("\\\n", " ").splitlines()
    calls = [shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines]
    return [call[1:] for call in calls if call[:1] == ["paradraft"]]


def cut(arguments: list[str]) -> list[str]:
    """The same command with smaller sizes."""
    result = list(arguments)
    for index, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if equals and key in AT_MOST:
            result[index] = f"{key}={min(int(value), AT_MOST[key])}"
        elif argument in AT_MOST:
            result[index + 1] = str(min(int(arguments[index + 1]), AT_MOST[argument]))
    if arguments[0] == "train" and "--template" not in arguments:
        result += TRAINING
    for option, size in BY_DEFAULT.get(arguments[0], {}).items():
        result += [option, str(size)] if option not in arguments else []
    return result


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of one command."""
    monkeypatch.setattr(sys, "argv", ["paradraft", *arguments])
    with pytest.raises(SystemExit) as stop, torch.compiler.set_stance("force_eager"):
        cli.main()
    return stop.value.code or 0


def test_commands_are_found_and_cut() -> None:
    """Control: comments, prompts, continued lines and other programs are read as meant."""
    run = "```bash run\n# note\n$ paradraft plan \\\n  --num-prompts 16 --runs=3  # note\nmake demo\n```\n"
    text = f"{run}```bash\nparadraft no\n```\n"
    assert commands(text) == [["plan", "--num-prompts", "16", "--runs=3"]]
    assert cut(commands(text)[0]) == ["plan", "--num-prompts", "2", "--runs=1"]
    assert cut(["bench", "--runs", "3"]) == ["bench", "--runs", "1", "--max-new-tokens", "12"]
    assert cut(["train", "pard", "steps=9"]) == ["train", "pard", "steps=2", *TRAINING]


def test_a_wrong_command_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a misspelt option and an unknown drafter must not exit with 0."""
    assert run(["generate", "--targt", "pocket"], monkeypatch) == 2
    assert run(["generate", "--target", "pocket", "--drafter", "nothing", "--prompt", "a"], monkeypatch) == 2


def test_the_readme_has_commands() -> None:
    """Guards against documents whose examples escape this test."""
    for document in DOCUMENTS:
        assert commands(text_of(document)), f"{document} has no ```bash run block"
        assert commands(text_of(document), "real"), f"{document} has no ```bash real block"


@pytest.mark.usefixtures("drawn")
def test_commands_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the README: what it tells people to type works, in the order in which it stands there."""
    monkeypatch.setattr(costs, "VISITS", 1)
    monkeypatch.setattr(costs, "LEAST_S", 0.0)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, tmp_path / name)
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.chdir(tmp_path)
    for command in commands(text_of(*DOCUMENTS)):
        code = run(cut(command), monkeypatch)
        captured = capsys.readouterr()
        assert code == 0, f"paradraft {shlex.join(command)} exits with {code}\n{captured.out}{captured.err}"
        assert "warning: " not in captured.err, f"paradraft {shlex.join(command)} has options without effect"


@pytest.mark.real
def test_commands_with_real_models_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the first commands that people try on a model that they know; a warning would mean the slow pass."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "real").symlink_to(ROOT / "build" / "real")
    monkeypatch.chdir(tmp_path)
    for command in commands(text_of(*DOCUMENTS), "real"):
        code = run(cut(command), monkeypatch)
        captured = capsys.readouterr()
        assert code == 0 and "warning: " not in captured.err, f"paradraft {shlex.join(command)}\n{captured.err}"
        assert captured.out.strip()


def test_what_was_never_run_is_said_where_it_is_first_named() -> None:
    """Guards users of AMD's drafters, who read a hundred lines later that the published weights were never tried."""
    assert "not on the published weights" in " ".join(text_of("README.md").split())
    before, _, after = text_of("docs/commands.md").partition("amd/PARD")
    assert "not on the published weights" in " ".join((before[-300:] + after[:300]).split())
