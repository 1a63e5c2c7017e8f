"""A model's packed weights of few bits in the user's cache, from where later processes map them into memory.

A file is made after a model has been loaded for the first time, and holds all that its pass in C++ reads: the panels of
its matrices, and its other weights and buffers. It is a safetensors file, so tensors are views of the mapping: nothing
is read, rounded, packed or copied again, and several processes share the memory. One that is damaged, or was made of
other weights or by other code, is made anew.

To delete `weights-*.safetensors` in the cache folder is safe at any time; `paradraft.sources.packed_cache` does it with
those of models that are gone. `PARADRAFT_PACKED_FILES=0` neither reads nor writes such files.
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
from paradraft.models.quantized import ROUNDING, Format, NumberKind, QuantizedTensor
from paradraft.sources.packed_cache import LEAST_FREE, SOURCE, make_room, mark_as_read

LOG = logging.getLogger(__name__)
SETTING = "PARADRAFT_PACKED_FILES"
FORMAT = 2
"""The version of the files."""
ALIGNMENT = 64
"""Bytes of a line of a CPU's cache: tensors begin at a multiple of it, as those that torch allocates."""
NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.uint8: "U8", torch.int8: "I8", torch.int64: "I64",
}  # fmt: skip
"""What safetensors calls dtypes."""


class DamagedFileError(Exception):
    """A file is not what was written, and why."""


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """Where the packed weights of a model are or will be.

    Args:
        path: in the user's cache; one for each model and dtype.
        key: a digest of all that decides what is in it.
        name: of the model, for messages.
        source: where the model is; empty for a shape.
    """

    path: Path
    key: str
    name: str
    source: str

    @classmethod
    def of(cls, name: str, config: PretrainedConfig, *, dtype: str, computed_in: torch.dtype) -> PackedFile | None:
        """The file of a model on the CPU; None if there is to be none.

        Args:
            name: a folder, a file, a Hugging Face id or a shape.
            config: the model's.
            dtype: of the weights, as in `Runtime`.
            computed_in: the dtype of activations.

        Raises:
            ValueError: the setting in the environment is unknown.
        """
        if (setting := os.environ.get(SETTING) or "1") not in ("0", "1"):
            raise ValueError(f"{SETTING}={setting!r}: use 0, for no files of packed weights in the cache, or 1")
        if setting == "0" or (folder := cache_folder()) is None or (contents := _contents(name)) is None:
            return None
        if not is_built():
            return None
        place = repr((os.path.realpath(name) if os.path.exists(name) else name, dtype, instructions()))
        versions = FORMAT, ROUNDING, library_key(), *(version(package) for package in ("torch", "transformers"))
        key = repr((versions, dtype, str(computed_in), config.to_json_string(use_diff=False), contents))
        path = folder / f"weights-{hashlib.sha256(place.encode()).hexdigest()[:16]}.safetensors"
        source = "" if is_shape(name) else os.path.realpath(_place_of(name) or name)
        return cls(path=path, key=hashlib.sha256(key.encode()).hexdigest(), name=name, source=source)

    def read(self, model: PreTrainedModel) -> str | None:
        """Maps the weights of a model that has none.

        Args:
            model: on the meta device; it gets weights and buffers.

        Returns:
            The `probe` of its pass; None if there is no such file, and nothing is changed.
        """
        if not is_private(self.path.parent, is_folder=True) or not is_private(self.path):
            return None
        try:
            found = _mapped(self.path, self.key)
        except (OSError, SafetensorError, DamagedFileError) as error:
            self._warn(f"the file of its packed weights is damaged and made anew ({self.path}: {error})")
            return None
        if found is None:
            return None
        mark_as_read(self.path)
        description, tensors = found
        _fill(model, description, tensors)
        model.config.dtype = model.dtype  # what was loaded may have needed another than was asked for
        return str(description["probe"])

    def write(self, model: PreTrainedModel, probe: str) -> None:
        """Writes the weights of a model, if it has any of few bits and there is room for them, else says why not.

        Args:
            model: all of whose weights of few bits are packed.
            probe: of its pass.
        """
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
        """Says that what was read does not compute what it did when it was written."""
        self._warn(f"the file of its packed weights gives other logits than before and is made anew ({self.path})")

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self.name}: {what}", stacklevel=4)


def _contents(name: str) -> str | None:
    """What changes when the weights of a model do; None where that is not known."""
    if is_shape(name):
        return name
    if (place := _place_of(name)) is None:
        return None
    if (place / "adapter_config.json").exists():  # which names another model
        return None
    files = [place] if place.is_file() else [file for pattern in READ for file in place.glob(pattern)]
    known = {}
    for file in map(os.path.realpath, files):
        status = os.stat(file)
        # The time of the last change of its status is not kept by copies and archives, as that of its content is.
        known[file] = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    return repr(sorted(known.items()))


def _place_of(name: str) -> Path | None:
    """The folder or file of a model; None of a Hugging Face id that was not loaded before."""
    if (place := Path(name)).exists():
        return place
    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _described(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """A model's tensors, and what makes weights of them; None if it has no packed weights of few bits, or others."""
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
            number, _ = panels.setdefault(id(rows.panels), (len(panels), rows.panels))
            weights[name] = {
                "panels": number, "first": rows.first, "outputs": rows.count, "group": weight.group,
                "dtype": _name(weight.dtype),
            }  # fmt: skip
        else:
            return None
    if not panels:
        return None
    tensors |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    for number, each in panels.values():
        tensors[f"panels.{number}"] = each.numbers
        if each.scales is not None:
            tensors[f"scales.{number}"] = each.scales
    shapes = [{"outputs": each.outputs, "inputs": each.inputs, "format": each.format} for _, each in panels.values()]
    return {"panels": shapes, "weights": weights}, tensors


def _fill(model: PreTrainedModel, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    panels = [
        Panels(
            outputs=each["outputs"],
            inputs=each["inputs"],
            numbers=tensors[f"panels.{number}"],
            dtype=torch.int8,
            scales=tensors.get(f"scales.{number}"),
            format=Format(*each["format"][:2], *map(NumberKind, each["format"][2:])),
        )
        for number, each in enumerate(description["panels"])
    ]
    made: dict[str, nn.Parameter] = {}
    for name, _ in [*model.named_parameters(remove_duplicate=False)]:
        stored = description["weights"].get(name, {})
        if "same" in stored:
            made[name] = made[stored["same"]]
        elif stored:
            made[name] = nn.Parameter(_rows_of(panels[stored["panels"]], stored), requires_grad=False)
        else:
            made[name] = nn.Parameter(tensors[name])
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, made[name])
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
    """What `_write` wrote; None if it has another key.

    Raises:
        DamagedFileError: it is something else.
        OSError: it cannot be read.
        SafetensorError: it is cut off.
    """
    with safe_open(file, framework="pt") as opened:
        told = opened.metadata() or {}
        if not {"key", "description", "digest"} <= told.keys():
            raise DamagedFileError("something is missing")
        if told["key"] != key:
            return None
        if told["digest"] != _digest(key, told["description"]):
            raise DamagedFileError("its description has changed")
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
    description = json.loads(told["description"])
    if description["sums"] != _sums(tensors):
        raise DamagedFileError("its numbers have changed")
    return description, tensors


def _digest(key: str, description: str) -> str:
    return hashlib.sha256(f"{key}\n{description}".encode()).hexdigest()


def _sums(tensors: dict[str, Tensor]) -> list[Any]:
    """What tells whether tensors are what they were, as fast as memory is read: against damage, not against malice."""
    return [[name, _name(each.dtype), list(each.shape), _sum(each)] for name, each in sorted(tensors.items())]


def _sum(tensor: Tensor) -> int:
    """The sum of a tensor's bytes as whole numbers of 64 bits, without what carries over."""
    data = _bytes(tensor).numpy()  # whose sums take a tenth of the time of torch's
    whole = len(data) // 8 * 8
    return int(data[:whole].view(numpy.int64).sum()) ^ int(data[whole:].sum())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _write(stream: BinaryIO, key: str, source: str, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file without a copy of the tensors in memory, and waits until it is on the disk."""
    text = json.dumps(description | {"sums": _sums(tensors)})
    metadata = {"format": "pt", "key": key, SOURCE: source, "description": text, "digest": _digest(key, text)}
    header: dict[str, Any] = {"__metadata__": metadata}
    # Those that would shift others away from a multiple of `ALIGNMENT` or of their numbers come last.
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT != 0, -item[1].itemsize))
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    told = json.dumps(header).encode()
    told += b" " * (-(8 + len(told)) % ALIGNMENT)
    stream.write(len(told).to_bytes(8, "little") + told)
    for _, tensor in ordered:
        stream.write(memoryview(_bytes(tensor).numpy()))  # type: ignore[arg-type]  # arrays are buffers
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO | None]:
    """An empty new file of this user's alone; None while another process writes it.

    It has a fixed name, so that what a process leaves that is killed is written over by the next one.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not _is_at(stream, path):  # the other process has just ended, and the file is in its place
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
