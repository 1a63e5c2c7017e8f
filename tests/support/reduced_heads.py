"""Draft models with a reduced output head, cut from whole ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paradraft.models.runtime import Runtime

RUNTIMES = {
    "eager": Runtime(device="cpu", dtype="float64", compiled=False),
    "eager int8": Runtime(device="cpu", dtype="int8", compiled=False),
    "C++": Runtime(device="cpu", dtype="float32"),
    "C++ bfloat16": Runtime(device="cpu", dtype="bfloat16"),
    "C++ int8": Runtime(device="cpu", dtype="int8"),
    "C++ int4": Runtime(device="cpu", dtype="int4"),
}
"""In each of which a row of the head must stay the same to the last bit."""


def reduced_folder(
    source: Path, folder: Path, ids: Sequence[int], *, has_t2d: bool = True, **changed: Tensor | None
) -> str:
    """Copies a model folder, with only these rows of its output head.

    Args:
        source: the model; its head may be the embedding.
        ids: of the rows, increasing.
        has_t2d: whether the optional tensor is stored.
        changed: tensors to store in place of the right ones; None stores none.
    """
    shutil.copytree(source, folder)
    weights: dict[str, Tensor | None] = dict(load_file(source / "model.safetensors"))
    embedding = weights["model.embed_tokens.weight"]
    head_VD = weights.get("lm_head.weight", embedding)
    assert head_VD is not None
    rows = torch.tensor(ids)
    weights |= {"lm_head.weight": head_VD[rows].clone(), "d2t": rows - torch.arange(len(rows))}
    if has_t2d:
        weights["t2d"] = torch.zeros(len(head_VD), dtype=torch.bool).index_fill(0, rows, True)
    stored = {name: weight for name, weight in (weights | changed).items() if weight is not None}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return str(folder)
