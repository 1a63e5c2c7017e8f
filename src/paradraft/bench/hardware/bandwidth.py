"""Measures memory bandwidth and the rate of matrix products, with the threads that are in use.

Both are the best of several short tries: a floor must not be too high. Bandwidth is measured with buffers of the sizes
that passes read, because reads from a cache are faster than reads from memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paradraft.models.forward.cpu.build import CannotBuildError
from paradraft.models.forward.cpu.matrix import PackedMatrix
from paradraft.models.quantization import rounded_to_8_bits

TRIES, MOST_S = 7, 0.3
"""Most tries of a measurement, and the time after which no other begins."""
MOST_BYTES = {"cpu": 512 * 2**20, "cuda": 2**30}
"""Largest buffers: far larger than all caches, so that even larger ones are read as fast."""
LEAST_BYTES = 128 * 2**20
"""Least bytes of a try, read over and over where the buffer is smaller, so that the clock is exact enough."""
SIDES = {"cpu": (128, 512, 1024, 2048), "cuda": (1024, 8192)}
"""Rows and columns of the matrices that are multiplied; larger ones are skipped where they would take too long."""
NATIVE = (torch.float32, torch.bfloat16, torch.int8)
"""Dtypes of our own product; int8 are weights of few bits with inputs that it rounds."""
_COLUMNS = 1024


class Speeds:
    """The best speeds seen so far on a device.

    Args:
        sizes_bytes: read by passes; bandwidth is measured for each.
        dtypes: that passes compute in.
    """

    def __init__(self, device: torch.device, sizes_bytes: set[int], dtypes: set[torch.dtype]) -> None:
        self.device = device
        self._bandwidths = {self._buffer_bytes(size): 0.0 for size in [*sizes_bytes, self._most_bytes]}
        self._rates = dict.fromkeys([*dtypes, torch.float32], 0.0)

    @property
    def _most_bytes(self) -> int:
        return MOST_BYTES.get(self.device.type, MOST_BYTES["cpu"])

    def _buffer_bytes(self, size_bytes: int) -> int:
        row_bytes = _COLUMNS * torch.float32.itemsize
        return max(min(size_bytes, self._most_bytes) // row_bytes, 1) * row_bytes

    @torch.no_grad()
    def measure(self) -> None:
        """Measures everything again and keeps the best; takes a second or two."""
        for size, known in self._bandwidths.items():
            self._bandwidths[size] = max(known, self._unless_full(known, self._read, size))
        for dtype, known in self._rates.items():
            self._rates[dtype] = max(known, self._unless_full(known, self._multiply, dtype))

    def _unless_full(self, known: float, measured: Callable[[Any], float], of: Any) -> float:
        try:
            return measured(of)
        except torch.OutOfMemoryError:
            if not known:
                raise
            return known  # KV caches have taken the memory meanwhile, and a run must not end without its result

    def bytes_per_s(self, size_bytes: int) -> float:
        """The bandwidth of reading this many bytes again and again."""
        return self._bandwidths[self._buffer_bytes(size_bytes)]

    def bytes_per_s_now(self, size_bytes: int) -> float:
        """The bandwidth at this moment, not the best seen."""
        return self._read(self._buffer_bytes(size_bytes))

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Floating point operations of matrix products; a multiplication with its addition counts as two.

        Narrower dtypes can be computed in float32, which is faster where the CPU lacks instructions for them.
        """
        return max(self._rates[dtype], self._rates[torch.float32] if dtype.itemsize < 4 else 0.0)

    def as_json(self) -> dict[str, Any]:
        """Plain values; the largest buffer is that of memory."""
        return {
            "bytes_per_s": {str(size): speed for size, speed in sorted(self._bandwidths.items())},
            "flops_per_s": {str(dtype).removeprefix("torch."): rate for dtype, rate in self._rates.items()},
        }

    def _read(self, size_bytes: int) -> float:
        rows = torch.ones(size_bytes // torch.float32.itemsize, device=self.device).view(-1, _COLUMNS)
        words = rows.view(torch.int64)
        sums = torch.empty(len(rows), device=self.device)
        times = -(-LEAST_BYTES // size_bytes)
        # No reader is the fastest for every size.
        readers: tuple[Callable[[], Tensor], ...] = (lambda: torch.sum(rows, 1, out=sums), words.sum, rows.sum)
        return size_bytes / min(self._seconds(read, times) for read in readers)

    def _multiply(self, dtype: torch.dtype) -> float:
        best = 0.0
        for side in SIDES.get(self.device.type, SIDES["cpu"]):
            operations = 2 * side**3
            if best and operations / best > MOST_S:
                break
            left, right = (torch.ones(side, side, dtype=dtype, device=self.device) for _ in range(2))
            if dtype.is_floating_point:
                product = torch.empty_like(left)
                best = max(best, operations / self._seconds(partial(torch.mm, left, right, out=product), 1))
            if self.device.type == "cpu" and dtype in NATIVE:
                best = max(best, operations / self._natively(left))
        return best

    def _natively(self, weight: Tensor) -> float:
        """Least seconds of our own product; no library is the fastest on every CPU."""
        inputs = weight if weight.is_floating_point() else weight.float()
        product = torch.empty_like(inputs, dtype=torch.float32)
        try:
            matrix = PackedMatrix([weight if weight.is_floating_point() else rounded_to_8_bits(inputs)])
        except CannotBuildError:
            return float("inf")
        if not matrix.multiply(inputs, product):
            return float("inf")
        return self._seconds(partial(matrix.multiply, inputs, product), 1)

    def _seconds(self, run: Callable[[], object], times: int) -> float:
        best_s, first_s = float("inf"), time.perf_counter()
        for attempt in range(TRIES):
            if attempt >= 2 and time.perf_counter() - first_s > MOST_S:
                break
            self._wait()
            began_s = time.perf_counter()
            for _ in range(times):
                run()
            self._wait()
            best_s = min(best_s, (time.perf_counter() - began_s) / times)
        return best_s

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
