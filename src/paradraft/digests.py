"""Content digests of data and models: independent of path and modification time.

Data is hashed whole, model weights by a sample: training changes nearly all of them, and a teacher may have a hundred
gigabytes. Modification times would be cheaper still, but copies have others.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

READ = (
    "config.json",
    "generation_config.json",
    "*token*",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.safetensors",
    "*.bin",
)
"""Files of a model folder that decide its output."""
WHOLE_BYTES = 2**25
"""Files up to this size are hashed whole; that includes all tokenizers."""
PIECES, PIECE_BYTES = 64, 2**16
"""Of larger files, this many evenly spaced pieces of this size are hashed."""

PACKED = ".qweight"
"""Suffix of the tensor names of weights packed by GPTQ or AWQ."""
SAMPLED_BYTES = 2**10
"""Bytes hashed at the start and at the middle of a tensor."""


def file_digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def model_digest(folder: Path) -> str:
    """SHA-256 of a model folder: names and sizes of the files in `READ`, and their content or a sample of it."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in READ for file in folder.glob(pattern) if file.is_file()}):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(file_digest(file).encode() if file.stat().st_size <= WHOLE_BYTES else _sample(file))
    return digest.hexdigest()


def target_digest(path: Path) -> str:
    """`model_digest` of a folder; of a file, SHA-256 of its size and a sample of it."""
    if path.is_dir():
        return model_digest(path)
    return hashlib.sha256(f"{path.stat().st_size}\n".encode() + _sample(path)).hexdigest()


def weights_digest(name: str) -> str | None:
    """SHA-256 of a sample of a model's weights, by which a drafter recognizes its target.

    Hashed are the name, dtype and shape of every tensor, and its first and middle bytes; how tensors are split into
    files does not matter.

    Args:
        name: a folder, or a Hugging Face id in the local cache.

    Returns:
        None if there are no safetensors (a GGUF file), and for weights packed by GPTQ or AWQ: a drafter that was
        trained with the unpacked model drafts for the packed one too.
    """
    if Path(name).is_file():
        return None
    config = None if Path(name).is_dir() else try_to_load_from_cache(name, "config.json")
    folder = Path(config).parent if isinstance(config, str) else Path(name)
    pieces: dict[str, bytes] = {}
    # The folder may contain other weight files that are not loaded.
    for file in sorted(folder.glob("model-*-of-*.safetensors")) or sorted(folder.glob("model.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            tensors = json.loads(stream.read(size))
            tensors.pop("__metadata__", None)
            for tensor, entry in tensors.items():
                first, last = entry["data_offsets"]
                piece = f"{tensor} {entry['dtype']} {entry['shape']}\n".encode()
                for start in (first, (first + last) // 2):
                    stream.seek(8 + size + start)
                    piece += stream.read(min(SAMPLED_BYTES, last - start))
                pieces[tensor] = piece
    if not pieces or any(tensor.endswith(PACKED) for tensor in pieces):
        return None
    return hashlib.sha256(b"".join(pieces[tensor] for tensor in sorted(pieces))).hexdigest()


def _sample(file: Path) -> bytes:
    last = max(file.stat().st_size - PIECE_BYTES, 0)
    pieces = []
    with file.open("rb") as stream:
        for index in range(PIECES):
            stream.seek(last * index // (PIECES - 1))
            pieces.append(stream.read(PIECE_BYTES))
    return b"".join(pieces)


def revision_of(name: str) -> str | None:
    """The revision of a Hugging Face model in the local cache; None if it is not there, and for GGUF files."""
    config = None if Path(name).is_file() or ":" in name else try_to_load_from_cache(name, "config.json")
    return Path(config).parent.name if isinstance(config, str) else None
