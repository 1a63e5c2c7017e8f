"""GGUF, the file format of llama.cpp: metadata, vocabulary, and tensors that may be quantized.

The header is parsed here and not by the `gguf` package, which takes 7 seconds for a vocabulary of 150,000 tokens: every
command reads it several times. Numbers are little-endian; a tensor's sizes are stored innermost first.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from paradraft.formats.gguf_blocks import KINDS, NAMES, row_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SUFFIX = ".gguf"
PARD_TOKEN, PARD_MASKS = "paradraft.pard_token", "paradraft.pard_masks"
"""Metadata keys of a PARD drafter: its first mask token id, and the count of consecutive mask ids."""
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_VOCABULARY = "tokenizer."
_ALIGNMENT = 32
_MOST_SIZES = 4

T = TypeVar("T", int, float, str, bool)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Type, shape and offset of a tensor in a GGUF file.

    Args:
        kind: ggml's id of its type, in `gguf_blocks.NAMES` if it is known.
        shape: outermost size first, as in torch.
        start: byte offset in the file.
    """

    kind: int
    shape: tuple[int, ...]
    start: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape[:-1]) * row_bytes(self.kind, self.shape[-1])


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """The parsed header of a GGUF file.

    Args:
        state: size and modification time in ns when the header was read.
        metadata: by key; arrays are lists.
    """

    path: Path
    state: tuple[int, int]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def find(self, key: str, kind: type[T]) -> T | None:
        """A metadata value, None if missing; raises ValueError for another type, except an int instead of a float."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise ValueError(f"{str(self.path)!r}: {key} is {str(value)[:40]!r}, where a {kind.__name__} belongs")
        return value

    def get(self, key: str, kind: type[T]) -> T:
        """A required metadata value; raises ValueError if it is missing or of another type."""
        if (value := self.find(key, kind)) is None:
            raise ValueError(f"{str(self.path)!r} has no {key}: it is no whole model, get the file again")
        return value

    def bytes_of(self, name: str, rows: Iterable[int] | None = None) -> Tensor:
        """Reads a tensor's bytes, `[rows, bytes of a row]`; a vector has one row.

        Args:
            rows: indices of the rows to read; None for all.

        Raises:
            ValueError: the file has changed since the header was read.
        """
        tensor = self.tensors[name]
        size = row_bytes(tensor.kind, tensor.shape[-1])
        pieces = [(0, tensor.size_bytes)] if rows is None else [(row * size, size) for row in rows]
        data = bytearray()
        with self.path.open("rb") as stream:
            for start, length in pieces:
                stream.seek(tensor.start + start)
                data += stream.read(length)
            if _state_of(stream) != self.state:
                raise ValueError(f"{str(self.path)!r} was changed while it was read: load it again when it is whole")
        return torch.frombuffer(data, dtype=torch.uint8).view(-1, size)


def is_gguf(name: str) -> bool:
    """Whether a model's name is an existing file, or ends in ".gguf" and is no folder.

    >>> is_gguf("model.gguf"), is_gguf("Qwen/Qwen3-8B")
    (True, False)
    """
    return Path(name).is_file() or (name.endswith(SUFFIX) and not Path(name).is_dir())


def read_gguf(name: str, *, vocabulary: bool = False) -> GgufFile:
    """Reads the header of a GGUF file; with `vocabulary` the metadata includes the lists of tokens and merges.

    Raises:
        ValueError: the file does not exist, is no GGUF file, has an unsupported version or type, or is damaged.
    """
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"unknown model {name!r}: there is no such file")
    if path.stat().st_size < len(MAGIC) + 20:
        raise ValueError(f"{name!r} is no GGUF file: it has {path.stat().st_size} bytes")
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            state = _state_of(stream)
            metadata, tensors = _Header(data, vocabulary).read()
    except (struct.error, OverflowError):  # a length beyond the end of the file
        raise ValueError(f"cannot read {name!r}: it ends inside of its header, so it is cut off or damaged") from None
    except (_DamagedError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"cannot read {name!r}: {error}") from None
    file = GgufFile(path=path, state=state, metadata=metadata, tensors=tensors)
    _check_whole(file)
    return file


def _state_of(stream: BinaryIO) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


def _check_whole(file: GgufFile) -> None:
    if (parts := file.find("split.count", int) or 1) > 1:
        raise ValueError(
            f"{str(file.path)!r} is one of {parts} parts of a model: join them with `llama-gguf-split --merge`"
        )
    for name, tensor in file.tensors.items():
        if tensor.kind not in KINDS:
            type_name = NAMES.get(tensor.kind, f"number {tensor.kind}")
            known = ", ".join(NAMES[kind] for kind in KINDS)
            raise ValueError(
                f"{str(file.path)!r}: the tensor {name!r} is of the type {type_name}, which is not supported: use a "
                f"file of the types {known}, such as Q8_0 or Q4_K_M"
            )
        if tensor.shape[-1] % KINDS[tensor.kind].weights:
            raise ValueError(
                f"{str(file.path)!r} is damaged: rows of {name!r} are no whole blocks of {NAMES[tensor.kind]}"
            )
        if tensor.start + tensor.size_bytes > file.state[0]:
            raise ValueError(f"{str(file.path)!r} ends before its tensor {name!r}: it is cut off, get the file again")


class _DamagedError(Exception):
    """A damaged header; the message is shown to the user."""


class _Header:
    """Parser of a header."""

    def __init__(self, data: mmap.mmap, vocabulary: bool) -> None:
        self._data, self._vocabulary, self._at = data, vocabulary, 0

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        if (magic := self._data[:4]) != MAGIC:
            raise _DamagedError(f"it begins with {magic!r} and not with {MAGIC!r}, so it is no GGUF file")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            description = "of a big-endian machine" if version & 0xFFFF == 0 else f"of version {version}"
            raise _DamagedError(
                f"it is a GGUF file {description}, and only versions 2 and 3 of little-endian ones are read"
            )
        tensor_count, pair_count = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            value = self._value(self._number("I"), is_wanted=self._vocabulary or not key.startswith(_VOCABULARY))
            if value is not None:
                metadata[key] = value
        return metadata, self._tensors(tensor_count, metadata.get("general.alignment", _ALIGNMENT))

    def _tensors(self, count: int, alignment: object) -> dict[str, StoredTensor]:
        if type(alignment) is not int or alignment < 1:
            raise _DamagedError(f"its general.alignment is {alignment!r}, so it is damaged")
        entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(count):
            name, dimensions = self._string(), self._number("I")
            if not 1 <= dimensions <= _MOST_SIZES or name in entries:
                raise _DamagedError(f"its tensor {name!r} is there twice or has {dimensions} sizes, so it is damaged")
            sizes = tuple(self._number("Q") for _ in range(dimensions))
            if 0 in sizes or math.prod(sizes) > len(self._data) * 256:
                raise _DamagedError(f"its tensor {name!r} has the sizes {sizes}, so it is damaged")
            entries[name] = self._number("I"), sizes[::-1], self._number("Q")
        first = -(-self._at // alignment) * alignment
        return {
            name: StoredTensor(kind=kind, shape=shape, start=first + start)
            for name, (kind, shape, start) in entries.items()
        }

    def _number(self, kind: str) -> Any:
        (number,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return number

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8")

    def _bytes(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise _DamagedError("it ends inside of its header, so it is cut off or damaged")
        self._at += size
        return self._data[self._at - size : self._at]

    def _value(self, kind: int, *, is_wanted: bool) -> Any:
        """A metadata value; None for an array that is not wanted."""
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"), is_wanted=is_wanted)
        if kind == _STRING:
            return self._string()
        if kind not in _NUMBERS:
            raise _DamagedError(f"its header has a value of the type {kind}, which there is not, so it is damaged")
        return self._number(_NUMBERS[kind])

    def _array(self, kind: int, count: int, *, is_wanted: bool) -> list[Any] | None:
        if kind in _NUMBERS:
            size = struct.calcsize(f"<{_NUMBERS[kind]}")
            numbers = self._bytes(count * size)
            return list(struct.unpack(f"<{count}{_NUMBERS[kind]}", numbers)) if is_wanted else None
        if kind != _STRING or count > len(self._data):
            raise _DamagedError(f"its header has an array of the type {kind}, so it is damaged")
        # The hot loop of a header, hundreds of thousands of iterations: written out without calls to other methods.
        strings, at, data, lengths = [], self._at, self._data, struct.Struct("<Q")
        for _ in range(count):
            (length,) = lengths.unpack_from(data, at)
            at += 8 + length
            if is_wanted:
                strings.append(data[at - length : at].decode("utf-8"))
        if at > len(data):
            raise _DamagedError("it ends inside of its header, so it is cut off or damaged")
        self._at = at
        return strings if is_wanted else None
