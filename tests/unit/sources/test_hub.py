"""GGUF files of Hugging Face repositories, by name, from a local server that speaks the hub's protocol."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from paradraft.sources import hub
from paradraft.sources.loading import locate
from tests.support.gguf_files import tiny_model, write_gguf
from tests.support.hub_server import COMMIT, Hub, asked_of, serving

REPO = "some-one/Tiny-GGUF"
Q4, Q8 = "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"
PARTS = [f"big/big-Q6_K-0000{part}-of-00002.gguf" for part in (1, 2)]
SIZE = 300_000


def bytes_of(seed: int) -> bytes:
    return random.Random(seed).randbytes(SIZE)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a few repositories, and an empty cache."""
    files = {name: bytes_of(seed) for seed, name in enumerate(("mmproj-F16.gguf", "README.md", Q8, Q4, *PARTS))}
    both = {"config.json": b"{}", "model.safetensors": b"", Q8: b""}
    several = {"a-Q5_K_M.gguf": b"", "b-Q5_K_M.gguf": b"", "b-Q2_K.gguf": b""}
    found = Hub(
        {REPO: files, "some-one/both": both, "some-one/several": several, "some-one/gated": {Q4: b"x"}},
        gated=frozenset({"some-one/gated"}),
    )
    with serving(found), asked_of(found, cache=tmp_path / "hub", patch=monkeypatch):
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what is received is written in such pieces
        monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
        yield found


def locate_again(name: str) -> str:
    """As another process does, which has not asked before."""
    hub.located.cache_clear()
    return locate(name, "target")


@pytest.mark.parametrize(
    "name", [f"{REPO}:Q4_K_M", f"{REPO}:q4_k_m", f"{REPO}:{Q4}", f"{REPO}:{Q4.upper()}", REPO], ids=str
)
def test_a_file_is_fetched_once(server: Hub, name: str) -> None:
    """Guards names as llama.cpp's `-hf` takes them, and a cache that other programs share."""
    path = Path(locate(name, "target"))
    assert path.name == Q4 and path.parent.name == COMMIT and path.read_bytes() == bytes_of(3)
    assert path == Path(file_download.hf_hub_download(REPO, Q4))  # where others look for it
    assert locate_again(name) == locate(name, "target") == str(path)
    assert [asked.range for asked in server.downloads()] == [None]
    assert not [*Path(constants.HF_HUB_CACHE).rglob("*.incomplete")]


def test_a_lost_connection_is_taken_up_again(server: Hub) -> None:
    """Guards an hour's download on a bad line: what has arrived is not asked for again."""
    server.endings = [100_000, 50_000]
    assert Path(locate(f"{REPO}:Q8_0", "target")).read_bytes() == bytes_of(2)
    assert [asked.range for asked in server.downloads()] == [None, "bytes=100000-", "bytes=150000-"]


def test_an_interrupted_command_goes_on(server: Hub) -> None:
    """Guards the bytes of a command that has ended: the hub's own client deletes them and begins anew."""
    server.endings = [100_000, 0]
    with pytest.raises(ValueError, match=rf"cannot fetch '{Q8}' of '{REPO}' .*the same command goes on") as caught:
        locate(f"{REPO}:Q8_0", "target")
    assert "\n" not in str(caught.value)
    assert Path(locate_again(f"{REPO}:Q8_0")).read_bytes() == bytes_of(2)
    assert [asked.range for asked in server.downloads()] == [None, "bytes=100000-", "bytes=100000-"]


@pytest.mark.parametrize("left", [b"no" * 50_000, b"no" * SIZE], ids=["other bytes", "too many"])
def test_damaged_bytes_are_not_kept(server: Hub, left: bytes) -> None:
    """Guards a file that was half written when the power was lost: it would be loaded for ever."""
    server.endings = [0]
    with pytest.raises(ValueError, match="cannot fetch"):
        locate(f"{REPO}:Q8_0", "target")
    (part,) = Path(constants.HF_HUB_CACHE).rglob("*.incomplete")
    part.write_bytes(left)
    if len(left) < SIZE:
        with pytest.raises(ValueError, match="arrived damaged"):
            locate_again(f"{REPO}:Q8_0")
    assert Path(locate_again(f"{REPO}:Q8_0")).read_bytes() == bytes_of(2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{REPO}:Q4_K", f"'{REPO}' has no GGUF file 'Q4_K': there are {PARTS[0]}, {Q4}, {Q8}"),
        (f"{REPO}:other.gguf", f"has no GGUF file 'other.gguf': there are {PARTS[0]}, {Q4}, {Q8}"),
        (f"{REPO}:mmproj-F16.gguf", "has no GGUF file"),
        (f"{REPO}:Q6_K", f"has '{PARTS[0]}' in 2 parts, which are not read: name another file"),
        (f"{REPO}:{PARTS[1]}", "has no GGUF file"),
        ("some-one/several:Q5_K_M", "2 files of Q5_K_M: name one, such as some-one/several:a-Q5_K_M.gguf or"),
        ("some-one/both:Q4_K_M", f"there are {Q8}"),
        ("some-one/gated:Q4_K_M", "'some-one/gated' is gated: accept its conditions at http://127.0.0.1"),
        ("some-one/missing:Q4_K_M", "unknown model 'some-one/missing:Q4_K_M': there is no such file or folder and no"),
        ("some-one/missing", "unknown model 'some-one/missing': there is no such file or folder and no such Hugging"),
        ("some one/x:Q8_0", "it is no Hugging Face id"),
    ],
)
def test_wrong_names_say_what_there_is(server: Hub, name: str, said: str) -> None:
    """Guards users who would look for the right name on the hub's pages."""
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        locate(name, "target")
    assert "\n" not in str(caught.value)
    assert not server.downloads()


def test_without_the_default_the_first_file_is_taken(server: Hub) -> None:
    """Guards repositories without `Q4_K_M`; one with other weights too is a folder, as before."""
    assert Path(locate("some-one/several", "target")).name == "a-Q5_K_M.gguf"
    assert locate("some-one/both", "target") == "some-one/both"


def test_the_cache_serves_offline(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines without a network, and those that must not use it."""
    path = locate(f"{REPO}:Q4_K_M", "target")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert locate_again(f"{REPO}:Q4_K_M") == locate_again(REPO) == path
    with pytest.raises(ValueError, match=f"has no GGUF file 'Q8_0': there are {Q4}$"):
        locate_again(f"{REPO}:Q8_0")
    with pytest.raises(ValueError, match=r"cannot be asked for it .*offline"):
        locate_again("some-one/several:Q2_K")
    assert not server.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert locate_again(f"{REPO}:Q4_K_M") == path


def test_local_names_come_first(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards local files whose names have a colon, and paths as Windows writes them."""
    monkeypatch.chdir(tmp_path)
    local = Path("some-one/Tiny-GGUF:Q4_K_M")
    local.parent.mkdir()
    write_gguf(local, tiny_model("qwen3"), "Q8_0")
    os.rename(local, "C:model.gguf")
    os.link("C:model.gguf", local)
    assert locate(str(local), "target") == str(local)
    assert locate("C:model.gguf", "target") == "C:model.gguf"
    for path in ("C:\\models\\a.gguf", "C:/models/a.gguf", "/models/a:b.gguf", "models/a.gguf"):
        with pytest.raises(ValueError, match="there is no such file"):
            locate(path, "target")
    assert not server.asked
