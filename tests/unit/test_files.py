"""Where results go: what is refused before the work, and what stays as it was."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from paradraft.files import check_outputs, write_output


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    """Guards against a link that is replaced by a file, while the file that it names keeps the old result."""
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "result.json", tmp_path / "link.json"
    link.symlink_to(file)
    for content in (b"first", b"second"):
        check_outputs(link)
        write_output(link, content)
        assert link.is_symlink()
        assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]


def test_a_pipe_stays_and_gets_the_content(tmp_path: Path) -> None:
    """Guards against a device or pipe that is replaced by a file, which root may do to any of them."""
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    check_outputs(pipe)
    write_output(pipe, b"content")
    reader.join()
    assert pipe.is_fifo()
    assert got == [b"content"]


def test_the_check_leaves_nothing_behind(tmp_path: Path) -> None:
    """Guards against an empty result of a run that fails later, and against an old result that is lost."""
    old = tmp_path / "old.json"
    old.write_text("old")
    check_outputs(old, tmp_path / "new.json", None)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against half a result, and half a file beside it."""
    file = tmp_path / "result.json"
    file.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        write_output(file, b"new")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an hour of measuring for a result that cannot be kept."""
    with pytest.raises(ValueError, match="it is a folder"):
        check_outputs(tmp_path)
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'"):
        check_outputs(tmp_path / "nowhere" / "x.json")
    broken = tmp_path / "broken.json"
    broken.symlink_to(tmp_path / "nowhere" / "x.json")
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'"):
        check_outputs(broken)
    with pytest.raises(ValueError, match="takes no new file"):
        check_outputs(tmp_path / ("x" * 250))
    file = tmp_path / "kept.json"
    file.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="no permission"):
        check_outputs(file)


def test_two_results_need_two_files(tmp_path: Path) -> None:
    """Guards against two results of which the second silently replaces the first, by whatever names they go."""
    file, link = tmp_path / "x.png", tmp_path / "link.png"
    link.symlink_to(file)
    for other in (file, link, tmp_path / "." / "x.png"):
        with pytest.raises(ValueError, match="one file: name two"):
            check_outputs(file, other)
    check_outputs(file, tmp_path / "y.png")
