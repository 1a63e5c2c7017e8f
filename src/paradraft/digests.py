"""What data and models on this disk hold, as digests: they change with the content, and not with name, place or time.

Data is read as a whole. Of a model's weights a sample is: training changes nearly all of them, and a
teacher may have a hundred gigabytes. Times of change would be cheaper still, but copies have others.
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
"""What of a model folder decides what the model says."""
WHOLE_BYTES = 2**25
"""Files up to this size are read as a whole, all tokenizers among them."""
PIECES, PIECE_BYTES = 64, 2**16
"""Of larger files this many pieces of this size are read, evenly spaced."""

PACKED = ".qweight"
"""How the names of weights end that GPTQ or AWQ has packed."""
SAMPLED_BYTES = 2**10
"""How much of a tensor is read, twice."""


def file_digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def model_digest(folder: Path) -> str:
    """SHA-256 of a model folder: of names and sizes of the files in `READ`, and of what they hold or a sample of it."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in READ for file in folder.glob(pattern) if file.is_file()}):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(file_digest(file).encode() if file.stat().st_size <= WHOLE_BYTES else _sample(file))
    return digest.hexdigest()


def weights_digest(name: str) -> str | None:
    """SHA-256 of a sample of a model's weights, by which a drafter knows its target again.

    Of every tensor its name, type and shape count, and the first and the middle bytes; how they are cut into files does
    not.

    Args:
        name: a folder, or a Hugging Face id that was loaded from here.

    Returns:
        None where there are no safetensors, as of a GGUF file, and of weights that others have packed: a drafter that
        was trained beside the model before that drafts for this one too.
    """
    if Path(name).is_file():
        return None
    found = None if Path(name).is_dir() else try_to_load_from_cache(name, "config.json")
    folder = Path(found).parent if isinstance(found, str) else Path(name)
    pieces: dict[str, bytes] = {}
    # Other files of weights may lie beside those that are loaded.
    for file in sorted(folder.glob("model-*-of-*.safetensors")) or sorted(folder.glob("model.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            tensors = json.loads(stream.read(size))
            tensors.pop("__metadata__", None)
            for tensor, told in tensors.items():
                first, last = told["data_offsets"]
                piece = f"{tensor} {told['dtype']} {told['shape']}\n".encode()
                for start in (first, (first + last) // 2):
                    stream.seek(8 + size + start)
                    piece += stream.read(min(SAMPLED_BYTES, last - start))
                pieces[tensor] = piece
    if not pieces or any(tensor.endswith(PACKED) for tensor in pieces):
        return None
    return hashlib.sha256(b"".join(pieces[tensor] for tensor in sorted(pieces))).hexdigest()


def _sample(file: Path) -> bytes:
    last = file.stat().st_size - PIECE_BYTES
    pieces = []
    with file.open("rb") as stream:
        for index in range(PIECES):
            stream.seek(last * index // (PIECES - 1))
            pieces.append(stream.read(PIECE_BYTES))
    return b"".join(pieces)


def revision_of(name: str) -> str | None:
    """The revision of a Hugging Face model that was loaded from here; None if none was, and of its GGUF files."""
    found = None if Path(name).is_file() or ":" in name else try_to_load_from_cache(name, "config.json")
    return Path(found).parent.name if isinstance(found, str) else None
