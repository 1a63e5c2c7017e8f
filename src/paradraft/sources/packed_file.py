"""Caches a model's packed quantized weights in a file of the user's cache, which later processes map into memory.

The file is written after a model's first load, and holds everything that its C++ pass reads: the panels of its
matrices, and its other weights and buffers. It is a safetensors file, so tensors are views of the mapping: nothing is
read, rounded, packed or copied again, and processes share the memory. A file that is damaged, or was made from other
weights or by other code, is rewritten.

Deleting `weights-*.safetensors` in the cache folder is safe at any time; `paradraft.sources.packed_cache` evicts files
of models that are gone. `PARADRAFT_PACKED_FILES=0` neither reads nor writes such files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.digests import READ
from paradraft.files import sync_entries
from paradraft.models.forward.cpu.build import (
    cache_folder,
    instructions,
    is_built,
    is_made,
    is_private,
    library_key,
)
from paradraft.models.forward.cpu.matrix import PackedRows, Panels
from paradraft.models.names import is_shape
from paradraft.models.quantization import ROUNDING
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.quantized_format import Format, NumberKind
from paradraft.sources.packed_cache import LEAST_FREE, SOURCE, make_room, mark_as_read

LOG = logging.getLogger(__name__)
SETTING = "PARADRAFT_PACKED_FILES"
FORMAT = 2
"""Version of the file format."""
ALIGNMENT = 64
"""Bytes of a CPU's cache line: tensors are aligned to it, like those that torch allocates."""
NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.uint8: "U8", torch.int8: "I8", torch.int64: "I64",
}  # fmt: skip
"""Names of dtypes in safetensors."""


class DamagedFileError(Exception):
    """A file's content differs from what was written; the message says why."""


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """Location and cache key of a model's packed weights; the file may not exist yet.

    Args:
        path: in the user's cache; one for each model and dtype.
        key: a digest of everything that determines the content.
        source: path of the model; empty for a shape.
    """

    path: Path
    key: str
    name: str
    source: str

    @classmethod
    def of(cls, name: str, config: PretrainedConfig, *, dtype: str, computed_in: torch.dtype) -> PackedFile | None:
        """The file of a model on the CPU, by its weights' `dtype` as in `Runtime`; None if weights are not cached.

        Raises:
            ValueError: the environment variable has an unknown value.
        """
        if (setting := os.environ.get(SETTING) or "1") not in ("0", "1"):
            raise ValueError(f"{SETTING}={setting!r}: use 0, for no files of packed weights in the cache, or 1")
        if setting == "0" or (folder := cache_folder()) is None or (fingerprint := _fingerprint(name)) is None:
            return None
        if not is_built():
            return None
        identity = repr((os.path.realpath(name) if os.path.exists(name) else name, dtype, instructions()))
        versions = FORMAT, ROUNDING, library_key(), *(version(package) for package in ("torch", "transformers"))
        key = repr((versions, dtype, str(computed_in), config.to_json_string(use_diff=False), fingerprint))
        path = folder / f"weights-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.safetensors"
        source = "" if is_shape(name) else os.path.realpath(_path_of(name) or name)
        return cls(path=path, key=hashlib.sha256(key.encode()).hexdigest(), name=name, source=source)

    def read(self, model: PreTrainedModel) -> str | None:
        """Fills the weights and buffers of a model on the meta device with mapped tensors.

        Returns:
            The `probe` of its pass; None if there is no such file, and the model is unchanged.
        """
        if not is_private(self.path.parent, is_folder=True) or not is_private(self.path):
            return None
        try:
            contents = _mapped(self.path, self.key)
        except (OSError, SafetensorError, DamagedFileError) as error:
            self._warn(f"the file of its packed weights is damaged and made anew ({self.path}: {error})")
            return None
        if contents is None:
            return None
        mark_as_read(self.path)
        description, tensors = contents
        _fill(model, description, tensors)
        model.config.dtype = model.dtype  # the original load may have needed another dtype than was requested
        return str(description["probe"])

    def write(self, model: PreTrainedModel, probe: str) -> None:
        """Writes the weights of a model; warns if they do not fit, does nothing if it has no packed weights."""
        if (described := _described(model)) is None or not is_made(self.path.parent, "the packed weights are"):
            return
        description, tensors = described
        needed = sum(tensor.nbytes for tensor in tensors.values())
        LOG.info("%s: writing %.1f GB of packed weights for the next start", Path(self.name).name, needed / 1e9)
        try:
            make_room(self.path, needed)
            free = shutil.disk_usage(self.path.parent).free
            if free < needed + LEAST_FREE:
                room = f"{needed / 2**30:.1f} GiB, and 1 that stays free, do not fit into {free / 2**30:.1f}"
                return self._warn(f"its packed weights are not kept for the next start: {room} in {self.path.parent}")
            with _locked(self.path.with_suffix(".new")) as new:
                if new is not None:
                    _write(new, self.key, self.source, description | {"probe": probe}, tensors)
                    os.replace(self.path.with_suffix(".new"), self.path)
            sync_entries(self.path.parent)
        except OSError as error:
            self._warn(f"its packed weights are not kept for the next start: {error}")

    def warn_of_other_logits(self) -> None:
        """Warns that the weights just read give other logits than when they were written."""
        self._warn(f"the file of its packed weights gives other logits than before and is made anew ({self.path})")

    def _warn(self, message: str) -> None:
        warnings.warn(f"{self.name}: {message}", stacklevel=4)


def _fingerprint(name: str) -> str | None:
    """A string that changes whenever a model's weights change; None if that cannot be determined."""
    if is_shape(name):
        return name
    if (path := _path_of(name)) is None:
        return None
    if (path / "adapter_config.json").exists():  # an adapter of another model, whose files are elsewhere
        return None
    files = [path] if path.is_file() else [file for pattern in READ for file in path.glob(pattern)]
    known = {}
    for file in map(os.path.realpath, files):
        status = os.stat(file)
        # The change time too, because copies and archives can preserve the modification time.
        known[file] = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    return repr(sorted(known.items()))


def _path_of(name: str) -> Path | None:
    """The folder or file of a model; None for a Hugging Face id that is not in the cache."""
    if (path := Path(name)).exists():
        return path
    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _described(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """A description of a model's weights, and the tensors to rebuild them from.

    None if it has no packed weights, or quantized weights that are not packed.
    """
    tensors: dict[str, Tensor] = {}
    panels: dict[int, tuple[int, Panels]] = {}
    weights: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        first_name = names.setdefault(id(weight), name)
        if first_name != name:
            weights[name] = {"same": first_name}
        elif not isinstance(weight, QuantizedTensor):
            tensors[name] = weight.detach()
        elif isinstance(rows := weight.source, PackedRows):
            index, _ = panels.setdefault(id(rows.panels), (len(panels), rows.panels))
            weights[name] = {
                "panels": index, "first": rows.first, "outputs": rows.count, "group": weight.group,
                "dtype": _name(weight.dtype),
            }  # fmt: skip
        else:
            return None
    if not panels:
        return None
    tensors |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    for index, matrix in panels.values():
        tensors[f"panels.{index}"] = matrix.numbers
        if matrix.scales is not None:
            tensors[f"scales.{index}"] = matrix.scales
    shapes = [
        {"outputs": matrix.outputs, "inputs": matrix.inputs, "format": matrix.format} for _, matrix in panels.values()
    ]
    return {"panels": shapes, "weights": weights}, tensors


def _fill(model: PreTrainedModel, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    panels = [
        Panels(
            outputs=shape["outputs"],
            inputs=shape["inputs"],
            numbers=tensors[f"panels.{index}"],
            dtype=torch.int8,
            scales=tensors.get(f"scales.{index}"),
            format=Format(*shape["format"][:2], *map(NumberKind, shape["format"][2:])),
        )
        for index, shape in enumerate(description["panels"])
    ]
    parameters: dict[str, nn.Parameter] = {}
    for name, _ in [*model.named_parameters(remove_duplicate=False)]:
        stored = description["weights"].get(name, {})
        if "same" in stored:
            parameters[name] = parameters[stored["same"]]
        elif stored:
            parameters[name] = nn.Parameter(_rows_of(panels[stored["panels"]], stored), requires_grad=False)
        else:
            parameters[name] = nn.Parameter(tensors[name])
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, parameters[name])
    for name, _ in [*model.named_buffers()]:
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, tensors[name])


def _rows_of(panels: Panels, stored: dict[str, Any]) -> QuantizedTensor:
    assert panels.format is not None
    outputs = stored["outputs"]
    return QuantizedTensor.elsewhere(
        PackedRows(panels=panels, first=stored["first"], count=outputs),
        (outputs, panels.inputs),
        format=panels.format,
        group=stored["group"],
        dtype=getattr(torch, stored["dtype"]),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mapped(file: Path, key: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Description and mapped tensors of a file that `_write` wrote; None if it has another key.

    Raises:
        DamagedFileError: the content has changed.
        OSError: the file cannot be read.
        SafetensorError: it is cut off.
    """
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
        if not {"key", "description", "digest"} <= metadata.keys():
            raise DamagedFileError("something is missing")
        if metadata["key"] != key:
            return None
        if metadata["digest"] != _digest(key, metadata["description"]):
            raise DamagedFileError("its description has changed")
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
    description = json.loads(metadata["description"])
    if description["sums"] != _sums(tensors):
        raise DamagedFileError("its numbers have changed")
    return description, tensors


def _digest(key: str, description: str) -> str:
    return hashlib.sha256(f"{key}\n{description}".encode()).hexdigest()


def _sums(tensors: dict[str, Tensor]) -> list[Any]:
    """Checksums of tensors, as fast as memory is read: they detect damage, not tampering."""
    return [[name, _name(tensor.dtype), list(tensor.shape), _sum(tensor)] for name, tensor in sorted(tensors.items())]


def _sum(tensor: Tensor) -> int:
    """The sum of a tensor's bytes as 64-bit integers, modulo 2**64."""
    data = _bytes(tensor).numpy()  # NumPy's sum takes a tenth of torch's time
    whole = len(data) // 8 * 8
    return int(data[:whole].view(numpy.int64).sum()) ^ int(data[whole:].sum())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _write(stream: BinaryIO, key: str, source: str, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file without copying the tensors, and syncs it to the disk."""
    text = json.dumps(description | {"sums": _sums(tensors)})
    metadata = {"format": "pt", "key": key, SOURCE: source, "description": text, "digest": _digest(key, text)}
    header: dict[str, Any] = {"__metadata__": metadata}
    # Tensors that would misalign the next one, by `ALIGNMENT` or by item size, come last.
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT != 0, -item[1].itemsize))
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-(8 + len(header_bytes)) % ALIGNMENT)
    stream.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
    for _, tensor in ordered:
        stream.write(memoryview(_bytes(tensor).numpy()))  # type: ignore[arg-type]  # arrays are buffers
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO | None]:
    """An empty, locked file that only this user can read; None while another process writes it.

    Its name is fixed, so that the leftover of a killed process is overwritten by the next one.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not _is_at(stream, path):  # the other process has just finished and moved the file
            yield None
            return
        stream.truncate(0)
        try:
            yield stream
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _is_at(stream: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.lstat()) and is_private(path)
    except OSError:
        return False
