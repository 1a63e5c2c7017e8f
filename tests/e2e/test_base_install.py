"""What works after a plain `pip install`: in processes that do not find the libraries of the extras."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HIDE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def required(library: str, extras: Iterable[str] = ("",)) -> set[tuple[str, frozenset[str]]]:
    """The libraries that one names itself, with the extras of theirs that it asks for."""
    wanted = [Requirement(line) for line in requires(library) or ()]
    return {
        (canonicalize_name(one.name), frozenset({"", *one.extras}))
        for one in wanted
        if one.marker is None or any(one.marker.evaluate({"extra": name}) for name in extras)
    }


def in_base() -> set[str]:
    """What a plain install brings: paradraft, what it needs, and what that needs in turn."""
    reached: set[tuple[str, frozenset[str]]] = set()
    ahead = {("paradraft", frozenset({""}))}
    while ahead:
        reached |= ahead
        ahead = set().union(*(required(*one) for one in ahead)) - reached
    return {library for library, _ in reached}


def extras() -> set[str]:
    """Libraries that the extras for users name and the base install does not bring."""
    named = {library for library, _ in required("paradraft", ("train", "bench", "quantized", "serve"))}
    return named - in_base()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which no extra is installed."""
    assert {"accelerate", "datasets", "fastapi", "matplotlib", "peft", "torchao", "uvicorn"} <= extras()
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=extras()), encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def run(env: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paradraft", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


MEASURED = ("--target", "pocket", "--num-prompts", 1, "--max-new-tokens", 4, "--threads", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "--drafter", "pard", *MEASURED[:-2]),
        ("bench", "--methods", "ar,pard", "--runs", 1, *MEASURED),
        ("plan", "--k", 4, "--batch-size", 1, *MEASURED),
        ("generate", "--target", "pocket", "--drafter", "pard", "--prompt", "x", "--max-new-tokens", 4),
        ("serve", "--engine", "vllm", "--target", "pocket", "--drafter", "pard", "--dry-run"),
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_no_extra_is_needed(env: dict[str, str], arguments: tuple[object, ...]) -> None:
    """Guards whoever installs the package alone: `plan` and `audit` wanted psutil, and nothing said so before."""
    found = run(env, *arguments)
    assert found.returncode == 0, found.stderr


def test_a_draft_is_made_without_extras(env: dict[str, str], tmp_path: Path) -> None:
    """Guards `init-draft`, which had imported the library that trains on several devices."""
    found = run(env, "init-draft", "--target", "pocket", "--out", tmp_path / "draft", "--layers", 3)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "draft" / "config.json").is_file()


@pytest.mark.slow
def test_what_is_missing_is_named_with_its_extra(env: dict[str, str], tmp_path: Path) -> None:
    """Guards against work that ends in a traceback, or is found to lack a library only when all is done."""
    for arguments, said in [
        (("train", "pard", "recipe.yaml"), "peft is not installed: pip install 'paradraft[train]'"),
        (("serve", "--target", "pocket"), "uvicorn is not installed: pip install 'paradraft[serve]'"),
        (
            ("bench", "--methods", "ar", "--plot", tmp_path / "a.png", *MEASURED),
            "matplotlib draws it, pip install 'paradraft[bench]'",
        ),
    ]:
        found = run(env, *arguments)
        assert found.returncode == 2
        assert said in found.stderr
        assert found.stderr.count("\n") == 1
