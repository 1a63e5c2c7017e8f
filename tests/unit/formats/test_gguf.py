"""Headers of GGUF files: whole ones as the `gguf` package reads them, and damaged ones, each with a line."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from paradraft.formats.gguf import read_gguf
from tests.support.gguf_files import tiny_model, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    more = {"general.some_flags": [True, False], "general.some_numbers": [-1, 2], "general.big": 7, "general.of": "ä"}
    write_gguf(path, tiny_model("llama"), "Q8_0", more=more)
    return path


def test_metadata_and_places_are_those_of_the_package(file: Path) -> None:
    """Guards our own parser, which is there because theirs takes seconds for a real vocabulary."""
    theirs, ours = gguf.GGUFReader(file), read_gguf(str(file), vocabulary=True)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == expected
    places = {
        name: (tensor.kind, tensor.shape, tensor.start, tensor.size_bytes) for name, tensor in ours.tensors.items()
    }
    assert places == {
        tensor.name: (
            tensor.tensor_type.value, tuple(tensor.shape.tolist()[::-1]), tensor.data_offset, tensor.n_bytes
        )
        for tensor in theirs.tensors
    }  # fmt: skip
    for tensor in theirs.tensors:
        assert ours.bytes_of(tensor.name).numpy().tobytes() == tensor.data.tobytes()


def test_a_vocabulary_is_left_out_unless_it_is_wanted(file: Path) -> None:
    assert "tokenizer.ggml.tokens" not in read_gguf(str(file)).metadata
    assert read_gguf(str(file)).metadata["tokenizer.ggml.pre"] == "gpt-2"


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.1, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_refused(file: Path, tmp_path: Path, share: float) -> None:
    """Guards downloads that ended early, in the header and in the weights."""
    path, whole = tmp_path / "cut.gguf", file.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"cut off|has .* bytes"):
        read_gguf(str(path))


@pytest.mark.parametrize(
    ("at", "written", "told"),
    [
        (0, b"GGML", "it begins with b'GGML'"),
        (0, b"PK\x03\x04", "no GGUF file"),
        (4, struct.pack("<I", 1), "of version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**60), "cut off or damaged"),
        (16, struct.pack("<Q", 2**60), "cut off or damaged"),
        (24, struct.pack("<Q", 2**50), "cut off or damaged"),
    ],
)
def test_a_wrong_header_is_refused(file: Path, tmp_path: Path, at: int, written: bytes, told: str) -> None:
    path, whole = tmp_path / "wrong.gguf", bytearray(file.read_bytes())
    whole[at : at + len(written)] = written
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=told):
        read_gguf(str(path))


def test_any_damage_of_a_header_gives_a_file_or_a_line(file: Path, tmp_path: Path) -> None:
    """Guards that nothing but ValueError comes of any bytes: no memory that a wrong length asks for."""
    whole, chooser, path = file.read_bytes(), random.Random(4), tmp_path / "any.gguf"
    header = read_gguf(str(file)).tensors
    first = min(tensor.start for tensor in header.values())
    refused, told = 0, list[str]()
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(chooser.randint(1, 3)):
            damaged[chooser.randrange(first)] = chooser.randrange(256)
        path.write_bytes(damaged)
        try:
            read_gguf(str(path), vocabulary=True)
        except ValueError as error:
            refused += str(error).count("\n") == 0
            told.append(str(error))
    assert refused == len(told) > 20


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "q2.gguf", "llama")
    raw = np.zeros((2, 84), dtype=np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"'blk\.0\.ffn_up\.weight' is of the type Q2_K.*Q8_0 or Q4_K_M"):
        read_gguf(str(tmp_path / "q2.gguf"))


def test_one_of_several_parts_is_refused(tmp_path: Path) -> None:
    """Guards models that are split: a part looks like a model with tensors missing."""
    write_gguf(tmp_path / "part.gguf", tiny_model("llama"), more={"split.count": 3})
    with pytest.raises(ValueError, match=r"one of 3 parts of .* --merge"):
        read_gguf(str(tmp_path / "part.gguf"))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        read_gguf(str(tmp_path / "none.gguf"))
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ValueError, match="it has 0 bytes"):
        read_gguf(str(tmp_path / "empty.gguf"))


@pytest.mark.parametrize("size", [None, 100_000])
def test_a_file_that_changes_is_noticed(file: Path, tmp_path: Path, size: int | None) -> None:
    """Guards a download over a file that is being loaded: half of each would be a model of neither."""
    path = tmp_path / "model.gguf"
    path.write_bytes(file.read_bytes())
    found, before = read_gguf(str(path)), path.stat()
    found.bytes_of("token_embd.weight")
    with path.open("r+b") as stream:
        stream.truncate(size or before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + (0 if size else 1000)))
    with pytest.raises(ValueError, match="was changed while it was read"):
        found.bytes_of("output_norm.weight")
