"""The file of `paradraft record`: which tokens a model thinks likely after one token and after two.

Shape letters: K keys, C tokens of a key.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from paradraft.files import write_output

COUNTS = ("answers", "tokens")
"""Facts that are numbers."""
FORMAT = "paradraft-likely-table-1"
Pair = tuple[int, int]


def key_of(pair: Pair, matched: int) -> int:
    """The key of a pair of tokens, or of its last token (`matched` 1).

    >>> key_of((2, 5), 1), key_of((2, 5), 2) == 4 * 2**32 + 5
    (5, True)
    """
    before, last = pair
    return (before + 2) << 32 | last if matched == 2 else last  # -1 is the token before the first


@dataclass(frozen=True, kw_only=True)
class LikelyTable:
    """The likeliest tokens by key.

    Args:
        keys: `[K]` int64, sorted, see `key_of`.
        tokens: `[K, C]` int32, the best first; -1 after the last.
        shares: `[K, C]` float32: sums of their probabilities over the places where the key was read.
        facts: `target`, a digest of the model; `answers` and `tokens`, the number of those that were read.
    """

    keys: np.ndarray
    tokens: np.ndarray
    shares: np.ndarray
    facts: dict[str, str] = field(default_factory=dict)

    def find(self, pair: Pair, matched: int) -> tuple[list[int], list[float]] | None:
        """The likeliest tokens after a pair, or after its last token, and the logarithms of their shares."""
        key = key_of(pair, matched)
        at = int(self.keys.searchsorted(key))
        if at == len(self.keys) or self.keys[at] != key:
            return None
        pairs = zip(self.tokens[at].tolist(), self.shares[at].tolist(), strict=True)
        known = [(token, math.log(share)) for token, share in pairs if share]
        return [token for token, _ in known], [share for _, share in known]

    def write(self, file: Path) -> None:
        """Writes the file, atomically, for this user alone: it holds pieces of answers."""
        arrays = {"keys": self.keys, "tokens": self.tokens, "shares": self.shares}
        write_output(file, save(arrays, {"format": FORMAT, **self.facts}))
        file.chmod(0o600)

    def is_sound(self) -> bool:
        """Whether types, shapes and numbers are those of a table."""
        keys, tokens, shares = self.keys, self.tokens, self.shares
        if [each.dtype.name for each in (keys, tokens, shares)] != ["int64", "int32", "float32"] or keys.ndim != 1:
            return False
        if tokens.shape != shares.shape or tokens.ndim != 2 or len(tokens) != len(keys) or not tokens.shape[1]:
            return False
        has_shares = np.isfinite(shares).all() and (shares >= 0).all() and (shares[:, 0] > 0).all()
        is_known = (tokens >= 0).all(where=shares > 0) and (np.diff(keys) > 0).all()
        return bool(has_shares and is_known) and all(self.facts.get(name, "").isdecimal() for name in COUNTS)


def read_table(file: Path) -> LikelyTable:
    """Reads a file of `LikelyTable.write`; raises ValueError if it is no such file."""
    try:
        with safe_open(file, "np") as opened:
            facts = dict(opened.metadata() or {})
            if facts.pop("format", None) != FORMAT:
                raise ValueError
            table = LikelyTable(**{name: opened.get_tensor(name) for name in ("keys", "tokens", "shares")}, facts=facts)
            if not table.is_sound():
                raise ValueError
    except (OSError, ValueError, SafetensorError) as error:
        missing = "does not exist" if isinstance(error, FileNotFoundError) else "is no table"
        raise ValueError(f"table={str(file)!r} {missing}: name a file that paradraft record has written") from None
    return table


class LikelyCounts:
    """Sums of the shares of likely tokens, which grow as texts are read.

    >>> counts = LikelyCounts(most=2)
    >>> counts.add((3, 4), [7, 8], [math.log(3), 0.0])
    >>> counts.add((5, 4), [7, 9], [math.log(3), 0.0])
    >>> table = counts.table({})
    >>> table.find((3, 4), 2)[0], table.find((6, 4), 2), [round(math.exp(each), 2) for each in table.find((6, 4), 1)[1]]
    ([7, 8], None, [1.5, 0.25])
    """

    def __init__(self, *, most: int, known: LikelyTable | None = None) -> None:
        self.most = most
        """C."""
        self._shares: defaultdict[int, dict[int, float]] = defaultdict(dict)
        if known is not None:
            rows = zip(known.keys.tolist(), known.tokens.tolist(), known.shares.tolist(), strict=True)
            for key, tokens, shares in rows:
                self._shares[key] = {token: share for token, share in zip(tokens, shares, strict=True) if share}

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._shares)

    def add(self, pair: Pair, tokens: list[int], logits: list[float]) -> None:
        """Adds the tokens that were likely after two tokens, and their logits; nothing if these are no numbers."""
        if not math.isfinite(logits[0]):
            return
        weights = [math.exp(logit - logits[0]) for logit in logits]
        for matched in (1, 2):
            shares = self._shares[key_of(pair, matched)]
            for token, weight in zip(tokens, weights, strict=True):
                shares[token] = shares.get(token, 0.0) + weight / sum(weights)

    def table(self, facts: dict[str, str]) -> LikelyTable:
        """The table so far."""
        keys = sorted(self._shares)
        tokens = np.full((len(keys), self.most), -1, np.int32)
        shares = np.zeros((len(keys), self.most), np.float32)
        for row, key in enumerate(keys):
            best = sorted(self._shares[key].items(), key=lambda item: -item[1])[: self.most]
            tokens[row, : len(best)] = [token for token, _ in best]
            shares[row, : len(best)] = [share for _, share in best]
        return LikelyTable(keys=np.array(keys, np.int64), tokens=tokens, shares=shares, facts=facts)
