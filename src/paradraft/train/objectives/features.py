"""The teacher's states of texts, in files: they are computed once, not in every epoch, and not again by a run that
resumes.

Shape letters: S groups of samples, N tokens of the longest, n tokens of a sample, X size of a token's states.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paradraft.files import temporary_beside
from paradraft.formats.head import TargetIdentity
from paradraft.train.objectives.batch import Texts
from paradraft.train.objectives.teacher import Teacher

RESERVE_BYTES = 4 * 2**30
"""Space on the disk that is left free."""
NAME, SUFFIX = "states", ".safetensors"
"""Of the tensor in a file, and of the file."""


class FeatureCache:
    """A folder with a file for each sample. Files that are read again stay in the memory that the system has free.

    Args:
        layers: as in `Teacher.states`.
        folder: made for the first file.
        most_gb: capacity; further samples are not kept. 0 disables the cache; by default the teacher's `cached_gb`.
    """

    def __init__(self, target: Teacher, layers: Sequence[int], folder: Path, most_gb: float | None) -> None:
        self._target, self._layers, self._folder = target, list(layers), folder
        self._most = round(1e9 * (target.cached_gb if most_gb is None else most_gb))
        self._of = f"{TargetIdentity.of(target.model.config)} {self._layers}".encode() if self._most else b""
        self._bytes = sum(file.stat().st_size for file in folder.glob(f"*{SUFFIX}")) if self._most else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Where states are kept, in words; nothing if they are not."""
        return (f"states of texts in {self._folder}, at most {self._most / 1e9:g} GB",) if self._most else ()

    @property
    def missing_gb(self) -> float:
        """Capacity that is not in use."""
        return (self._most - self._bytes) / 1e9

    def states(self, texts: Texts) -> Tensor:
        """Returns `[S, N, X]` states of a batch's texts; one pass computes groups with unknown samples."""
        if not self._most:
            return self._target.states(texts, self._layers)
        samples = [(group, place, self._file(texts.tokens[group, place])) for group, place in texts.places()]
        known = {file: states for _, _, file in samples if (states := _read(file)) is not None}
        unknown = sorted({group for group, _, file in samples if file not in known})
        if len(unknown) == len(texts.tokens):
            whole_SNX = self._target.states(texts, self._layers)
        else:
            like = next(iter(known.values()))
            whole_SNX = torch.zeros(*texts.tokens.shape, like.shape[1], dtype=like.dtype, device=texts.tokens.device)
            for group, place, file in samples:
                if group not in unknown:
                    whole_SNX[group, place] = known[file].to(whole_SNX.device)
            if unknown:
                missing = Texts(**{name: tensor[unknown] for name, tensor in vars(texts).items()})
                whole_SNX[unknown] = self._target.states(missing, self._layers)
        for group, place, file in samples:
            if file not in known:
                self._keep(file, whole_SNX[group, place])
        return whole_SNX

    def _file(self, tokens_n: Tensor) -> Path:
        digest = hashlib.sha256(self._of + tokens_n.cpu().numpy().tobytes())
        return self._folder / f"{digest.hexdigest()[:32]}{SUFFIX}"

    def _keep(self, file: Path, states_nX: Tensor) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        size = states_nX.nbytes
        if self._bytes + size > self._most or shutil.disk_usage(self._folder).free - size < RESERVE_BYTES:
            return
        with temporary_beside(file) as new:
            save_file({NAME: states_nX.contiguous().cpu()}, new)
            os.replace(new, file)
        self._bytes += size


def _read(file: Path) -> Tensor | None:
    """The states in a file; None without it, or if a crash of the machine has left it damaged."""
    try:
        return load_file(file)[NAME] if file.exists() else None
    except SafetensorError:
        return None
