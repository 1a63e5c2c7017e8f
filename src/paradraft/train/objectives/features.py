"""A cache of the teacher's states of texts, so that they are computed once and not in every epoch.

Shape letters: S groups of samples, N tokens of the longest, n tokens of a sample, X size of a token's states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paradraft.train.objectives.batch import Texts
from paradraft.train.objectives.teacher import Teacher


class FeatureCache:
    """LRU cache of the states of samples in host memory.

    Args:
        layers: as in `Teacher.states`.
        most_gb: capacity; 0 disables the cache; by default the teacher's `cached_gb`.
    """

    def __init__(self, target: Teacher, layers: Sequence[int], most_gb: float | None) -> None:
        self._target, self._layers = target, list(layers)
        self._most = round(1e9 * (target.cached_gb if most_gb is None else most_gb))
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0

    def states(self, texts: Texts) -> Tensor:
        """Returns `[S, N, X]` states of a batch's texts; one pass computes groups with unknown samples."""
        if not self._most:
            return self._target.states(texts, self._layers)
        samples = list(_samples(texts))
        unknown = sorted({group for group, _, key in samples if key not in self._kept})
        if len(unknown) == len(texts.tokens):
            whole_SNX = self._target.states(texts, self._layers)
        else:
            whole_SNX = self._filled(texts, samples, unknown)
        for group, place, key in samples:
            self._keep(key, whole_SNX[group, place])
        return whole_SNX

    def _filled(self, texts: Texts, samples: list[tuple[int, slice, bytes]], unknown: list[int]) -> Tensor:
        like = next(iter(self._kept.values()))
        whole_SNX = torch.zeros(*texts.tokens.shape, like.shape[1], dtype=like.dtype, device=texts.tokens.device)
        for group, place, key in samples:
            if group not in unknown:
                whole_SNX[group, place] = self._kept[key].to(whole_SNX.device)
        if unknown:
            missing = Texts(**{name: tensor[unknown] for name, tensor in vars(texts).items()})
            whole_SNX[unknown] = self._target.states(missing, self._layers)
        return whole_SNX

    def _keep(self, key: bytes, states_nX: Tensor) -> None:
        if key not in self._kept:
            self._kept[key] = states_nX.to("cpu", copy=True)
            self._bytes += self._kept[key].nbytes
        self._kept.move_to_end(key)
        while self._bytes > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes


def _samples(texts: Texts) -> Iterator[tuple[int, slice, bytes]]:
    """Group, place and key of each sample."""
    for group, place in texts.places():
        yield group, place, texts.tokens[group, place].cpu().numpy().tobytes()
