"""Cache of the target's hidden states of training texts, for the next epoch.

Shape letters: S groups of samples, N tokens of the longest, X size of a token's states (layers * D).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.train.objectives.batch import Texts
from paradraft.train.objectives.rows import FILLING
from paradraft.train.objectives.teacher import Teacher


class FeatureCache:
    """LRU cache of hidden states in host memory.

    Args:
        layers: as in `Teacher.states`.
        most_bytes: capacity; 0 disables the cache.
    """

    def __init__(self, target: Teacher, layers: Sequence[int], most_bytes: int) -> None:
        self._target, self._layers, self._most = target, list(layers), most_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0

    def states(self, texts: Texts) -> Tensor:
        """Returns `[S, N, X]` states of a batch's texts; computes the missing ones in one pass."""
        if not self._most:
            return self._target.states(texts, self._layers)
        lengths = (texts.documents != FILLING).sum(1).tolist()
        keys = [_key(texts, group, length) for group, length in enumerate(lengths)]
        unknown = [group for group, key in enumerate(keys) if key not in self._kept]
        new: dict[bytes, Tensor] = {}
        if unknown:
            missing = Texts(**{name: tensor[unknown] for name, tensor in vars(texts).items()})
            for group, states_NX in zip(unknown, self._target.states(missing, self._layers), strict=True):
                new[keys[group]] = states_NX[: lengths[group]]
        known = [new[key] if key in new else self._kept[key] for key in keys]
        for key, states_nX in zip(keys, known, strict=True):
            self._keep(key, states_nX)
        whole = torch.nn.utils.rnn.pad_sequence([each.to(texts.tokens.device) for each in known], batch_first=True)
        return torch.nn.functional.pad(whole, (0, 0, 0, texts.tokens.shape[1] - whole.shape[1]))

    def _keep(self, key: bytes, states_nX: Tensor) -> None:
        if key not in self._kept:
            self._kept[key] = states_nX.to("cpu", copy=True)
            self._bytes += self._kept[key].nbytes
        self._kept.move_to_end(key)
        while self._bytes > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes


def _key(texts: Texts, group: int, length: int) -> bytes:
    key = torch.stack([texts.tokens[group, :length], texts.documents[group, :length]])
    return key.cpu().numpy().tobytes()
