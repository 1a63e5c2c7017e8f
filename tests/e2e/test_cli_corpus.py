"""A drafter's corpus on the command line: it changes no text, and every mistake is one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.conftest import EXACT, Paradraft, assert_mistake

ASKED = ["--prompt", "helloworld", "--max-new-tokens", 12]


def options(family: Path, corpus: object) -> list[object]:
    return ["--target", family / "target", *EXACT, *ASKED, "--drafter", f"suffix:corpus={corpus}"]


@pytest.mark.parametrize("name", ["my texts.txt", "my:texts.jsonl", "c++"])
def test_a_corpus_changes_no_text(family: Path, paradraft: Paradraft, tmp_path: Path, name: str) -> None:
    """Guards paths with spaces, colons and plus signs."""
    file = tmp_path / name
    file.write_text('{"answer": "helloworldhello"}\n' if name.endswith("jsonl") else "helloworldhello")
    plain = paradraft("generate", "--target", family / "target", *EXACT, *ASKED)
    drafted = paradraft("generate", *options(family, file))
    assert (drafted.code, drafted.out) == (plain.code, plain.out) == (0, plain.out)
    assert drafted.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"x", "has no text of 2 tokens"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n', "has no text of 2 tokens"),
        ("a.jsonl", b"\n\n", "has no text of 2 tokens"),
        ("a.bin", b"\x7fELF\xff\xfe", "is not UTF-8 text"),
        ("a.bin", b"\0\1\0\1", "contains NUL characters, so it is no text"),
        ("a.gz", b"abc", ".gz is not read"),
        ("a.jsonl", b'{"text": "ab"}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "ab"}\n["ab"]\n', "line 2: expected a JSON object"),
        ("a.jsonl", b'{"text": "ab"}\n{"prompt": "ab"}\n', "line 2: the record has no text"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "line 1: message 1"),
    ],
)
def test_no_corpus(family: Path, paradraft: Paradraft, tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    """Guards against tracebacks and answers without the corpus that was asked for: the line names file and fix."""
    file = tmp_path / name
    file.write_bytes(content)
    assert_mistake(paradraft("generate", *options(family, file)), file, problem, "name a text file in UTF-8")


def test_a_corpus_that_is_no_file(
    family: Path, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards mistakes that are seen before the weights are loaded, in a union too."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.txt").write_text("x" * 2**10)
    monkeypatch.setattr("paradraft.engine.loader.load_planned", lambda plan: pytest.fail("the weights were loaded"))
    monkeypatch.setattr("paradraft.drafters.parts.corpus.MOST_BYTES", 2**10 - 1)
    cases = {"none.txt": "does not exist", "": "is a folder", "pipe": "is no file"}
    cases |= {"large.txt": "has 0 MiB", "x" * 300: "does not exist"}
    for name, problem in cases.items():
        for spec in (tmp_path / name, f"{tmp_path / name}+ngram"):
            assert_mistake(paradraft("generate", *options(family, spec)), tmp_path / name, problem, "name a text file")
    assert_mistake(paradraft("generate", *options(family, "")), "corpus='' does not exist")


def test_a_path_with_a_setting_in_it(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the path that cannot be written: what follows a colon looks like another setting."""
    file = tmp_path / "a:b=c.txt"
    file.write_text("helloworld")
    assert_mistake(paradraft("generate", *options(family, file)), "'b=c.txt' is no setting=value of it")
