"""Ragged KV cache: each row has its own length.

Each row writes after its length. Rollback sets the length back; compaction moves the accepted path of a tree together
by one gather. The static cache of `transformers` has one position for the whole batch and cannot roll back.

Shape letters: B rows of a batch, H key/value heads, C capacity in slots, D head size, N new tokens, S slots in use.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig

from paradraft.models.architectures import head_size
from paradraft.models.forward.cpu import tree as in_cpp
from paradraft.tree import ABSENT

Storage = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, both `[B, C, H, D]`. One tensor each, so that a compiled pass can write in place;
slots before heads, so that a token is contiguous."""


def allocate(
    config: PretrainedConfig,
    *,
    batch_size: int,
    capacity: int,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    ranks: int = 1,
) -> Storage:
    """Allocates empty storage for a causal LM.

    Args:
        config: of the model.
        batch_size: rows.
        capacity: slots of a row.
        dtype: of keys and values.
        devices: one for each layer.
        ranks: tensor-parallel processes that share the heads of a layer.

    Raises:
        ValueError: there is not enough memory for it.
    """
    shape = (batch_size, capacity, config.num_key_value_heads // ranks, head_size(config))
    for device, layers in Counter(devices).items():
        needed = 2 * layers * math.prod(shape) * dtype.itemsize
        if needed > (free := free_bytes(device)):
            raise ValueError(
                f"a cache for {batch_size} rows of {capacity} tokens needs {needed / 2**30:.1f} GiB and "
                f"{free / 2**30:.1f} GiB are free: use a smaller batch or capacity"
            )
    storage = []
    for device in devices:
        keys, values = (_zeros(shape, dtype, device) for _ in range(2))
        storage.append((_marked(keys), _marked(values)))
    return storage


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on CPUs under Linux, pages that take memory only when they are first used."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes for keys and values: {error}") from None
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def slots_of(storage: Storage) -> int:
    """Slots of a row."""
    return storage[0][0].shape[1]


def rows_of(storage: Storage, start: int, stop: int) -> Storage:
    """Rows `start` to `stop` of a storage, in the same memory."""
    parts = []
    for layer in storage:
        keys, values = (_shared(stored_BCHD, start, stop) for stored_BCHD in layer)
        parts.append((keys, values))
    return parts


def move_rows(storage: Storage, rows_b: Tensor, used: Sequence[int]) -> None:
    """Compaction of rows, in place: row `rows_b[i]` becomes row i, at least its first `used[rows_b[i]]` slots."""
    moves = {to: row for to, row in enumerate(rows_b.tolist()) if to != row}
    to_m, from_m = list(moves), list(moves.values())
    is_downwards = all(row > to for to, row in moves.items())
    for stored_BCHD in (each for layer in storage for each in layer):
        if is_downwards:  # no row is written before it is read; eight times as fast as indexing with lists of rows
            for to, row in moves.items():
                stored_BCHD[to, : used[row]] = stored_BCHD[row, : used[row]]
        else:
            stored_BCHD[to_m, : max(used)] = stored_BCHD[from_m, : max(used)]


def copied(storage: Storage, row: int, used: int) -> Storage:
    """A copy of the first `used` slots of a row, `[S, H, D]` each."""
    return [(keys[row, :used].clone(), values[row, :used].clone()) for keys, values in storage]


def restore(storage: Storage, row: int, copy: Storage, used: int) -> None:
    """Writes the first `used` slots of a copy into a row."""
    for stored, saved in zip(storage, copy, strict=True):
        for stored_BCHD, saved_SHD in zip(stored, saved, strict=True):
            stored_BCHD[row, :used] = saved_SHD[:used]


def _shared(stored_BCHD: Tensor, start: int, stop: int) -> Tensor:
    # Not a view, because torch.compile guards on the base of a view.
    part = torch.empty(0, dtype=stored_BCHD.dtype, device=stored_BCHD.device)
    shape, stride = (stop - start, *stored_BCHD.shape[1:]), stored_BCHD.stride()
    part.set_(stored_BCHD.untyped_storage(), start * stride[0], shape, stride)
    return _marked(part)


def free_bytes(device: torch.device) -> float:
    """Free memory of a device; infinite where it is unknown."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch keeps of a smaller cache is free too
        return float(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if device.type == "cpu" and info.exists() else []
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), math.inf)


def _marked(stored_BCHD: Tensor) -> Tensor:
    # Else torch.compile may take two sizes that are equal by chance, such as 64 slots and a head size of 64, for one
    # variable, and compile again when they differ. Only the number of rows changes.
    torch._dynamo.mark_static(stored_BCHD, [1, 2, 3])
    return stored_BCHD


class SlotCache(Cache):
    """The storage as the `Cache` of one forward pass of a `transformers` model.

    Args:
        storage: from `allocate`.
        slots_BN: slots of the new tokens.
        used: S; attention reads the first S slots only.
    """

    def __init__(self, storage: Storage, slots_BN: Tensor, used: int) -> None:
        super().__init__(layers=[])
        self.storage = storage
        self.slots_BN = slots_BN
        self.used = used
        self.is_finite_BN = torch.ones_like(slots_BN).bool()
        """`[B, N]` whether all keys and values of each new token are finite."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Writes `[B, H, N, D]` keys and values, returns `[B, H, S, D]` views of all in use.

        NaN and infinity are replaced by zeros and noted in `is_finite_BN`. Attention multiplies the values of masked
        slots by 0, and 0 times NaN is NaN: one such token would change texts that do not see it.
        """
        views = []
        for stored_BCHD, new_BHND in zip(self.storage[layer_idx], (key_states, value_states), strict=True):
            is_finite_BN = new_BHND.isfinite().all(3).all(1)
            self.is_finite_BN = self.is_finite_BN & is_finite_BN
            new_BNHD = new_BHND.transpose(1, 2)
            write(stored_BCHD, self.slots_BN, new_BNHD.where(is_finite_BN[:, :, None, None], 0.0))
            views.append(stored_BCHD[:, : self.used].transpose(1, 2))
        return views[0], views[1]


def compact(storage: Storage, first_slot_B: Tensor, path_BN: Tensor) -> None:
    """Compaction of an accepted path, in place: moves its slots to the front of those that its pass has written.

    Args:
        storage: of all rows.
        first_slot_B: slot of node 0.
        path_BN: nodes to keep in order, then `ABSENT`.

    Worked example: node 0 is in slot 10 and the path is 0, 2, 3. Slots 10, 12, 13 move to 10, 11, 12.
    """
    stored_on: dict[torch.device, list[Tensor]] = {}
    for stored_BCHD in (each for layer in storage for each in layer):
        stored_on.setdefault(stored_BCHD.device, []).append(stored_BCHD)
    for device, stored in stored_on.items():
        _compact(stored, first_slot_B.to(device), path_BN.to(device))


def _compact(stored: list[Tensor], first_slot_B: Tensor, path_BN: Tensor) -> None:
    if path_BN.device.type == "cpu" and in_cpp.compact(stored, first_slot_B, path_BN):
        return
    to_BN = first_slot_B[:, None] + torch.arange(path_BN.shape[1], device=path_BN.device)
    from_BN = torch.where(path_BN == ABSENT, to_BN, first_slot_B[:, None] + path_BN)
    rows_B1 = torch.arange(len(path_BN), device=path_BN.device)[:, None]
    for stored_BCHD in stored:
        write(stored_BCHD, to_BN, stored_BCHD[rows_B1, from_BN])


def write(stored_BCHD: Tensor, slots_BN: Tensor, new_BNHD: Tensor) -> None:
    """Writes new entries into each row's slots, in place."""
    rows_B1 = torch.arange(len(slots_BN), device=slots_BN.device)[:, None]
    stored_BCHD.index_put_((rows_B1, slots_BN), new_BNHD)
