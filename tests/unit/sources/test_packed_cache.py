"""Which packed files leave the cache: those of nothing, old ones, and no more than must; none of another name."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paradraft.sources import packed_cache
from paradraft.sources.packed_cache import MOST_DAYS, make_room, mark_as_read

Usage = namedtuple("Usage", "total used free")
GIB = 2**30


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "paradraft"
    folder.mkdir(mode=0o700)
    return folder


def packed(cache: Path, number: int, source: str = "", *, days: float = 0) -> Path:
    """A file as `packed_file` names it, that was read some days ago."""
    path = cache / f"weights-{number:016x}.safetensors"
    save_file({"x": torch.zeros(1024, dtype=torch.uint8)}, path, metadata={"source": source})
    path.chmod(0o600)
    os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    return path


def left(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def test_files_of_models_that_are_gone_leave(cache: Path, tmp_path: Path) -> None:
    """Guards the user's disk, which only grew; those of models that are there stay, and those of shapes, and itself."""
    model = tmp_path / "model"
    model.mkdir()
    gone = packed(cache, 1, str(tmp_path / "gone"))
    kept = {packed(cache, 2, str(model)).name, packed(cache, 3).name, packed(cache, 4, str(tmp_path / "gone")).name}
    mapped = torch.from_file(str(gone), shared=True, size=1024, dtype=torch.uint8)
    content = mapped.clone()
    make_room(cache / f"weights-{4:016x}.safetensors", 1000)
    assert left(cache) == kept
    assert torch.equal(mapped, content)  # a process that has it mapped does not notice


def test_files_that_are_not_read_any_more_leave(cache: Path) -> None:
    """Guards against the time of writing: a file that is read every day is never old."""
    old, read = packed(cache, 1, days=MOST_DAYS + 1), packed(cache, 2, days=MOST_DAYS + 1)
    young = packed(cache, 3, days=MOST_DAYS - 1)
    mark_as_read(read)
    make_room(cache / f"weights-{9:016x}.safetensors", 1000)
    assert not old.exists() and left(cache) == {read.name, young.name}


def test_the_longest_unread_leave_where_there_is_no_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards both bounds, and files that would be deleted although that makes no room."""
    names = [packed(cache, number, days=10 - number) for number in range(4)]
    size, new = names[0].stat().st_size, cache / f"weights-{9:016x}.safetensors"

    def with_disk(total: float, free: float) -> set[str]:
        before = len(left(cache))
        monkeypatch.setattr(
            packed_cache.shutil, "disk_usage", lambda _: Usage(total, 0, free + size * (before - len(left(cache))))
        )
        make_room(new, size)
        return left(cache)

    everything = {path.name for path in names}
    assert with_disk(total=100 * GIB, free=100 * GIB) == everything
    assert with_disk(total=100 * GIB, free=GIB // 2) == everything  # in vain
    assert with_disk(total=4 * 4 * size, free=100 * GIB) == {path.name for path in names[1:]}
    assert with_disk(total=100 * GIB, free=GIB - size) == {names[3].name}


def test_what_is_not_ours_or_is_being_written_stays(cache: Path, tmp_path: Path) -> None:
    """Guards other files of the folder, links, and a file that another process writes; one that a kill left goes."""
    for name in ("pass-123.so", "weights-mine.safetensors", f"weights-{1:016x}.txt"):
        shutil.copy(packed(cache, 7, days=100), cache / name)
    other = tmp_path / "elsewhere.safetensors"
    packed(cache, 7, days=100).rename(other)
    (cache / f"weights-{2:016x}.safetensors").symlink_to(other)
    begun, written = cache / f"weights-{3:016x}.new", cache / f"weights-{4:016x}.new"
    for path in (begun, written):
        path.touch(mode=0o600)
    damaged = cache / f"weights-{5:016x}.safetensors"
    damaged.write_bytes(b"nothing")
    damaged.chmod(0o600)
    before = left(cache)
    with written.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        make_room(cache / f"weights-{9:016x}.safetensors", 1000)
    assert left(cache) == before - {begun.name} and other.exists()
