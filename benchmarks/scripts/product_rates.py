"""How many products a second one core makes with weights of 8 and 4 bits that stay in its second cache.

python benchmarks/scripts/product_rates.py --json FILE.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from paradraft.bench.report.summary import write_json
from paradraft.environment import describe_machine
from paradraft.models.forward.cpu.build import kernel_names
from paradraft.models.forward.cpu.matrix import PackedMatrix
from paradraft.models.quantized import rounded_to_4_bits, rounded_to_8_bits

OUTPUTS, INPUTS, PRODUCTS, TURNS = 768, 960, 50, 200
"""A matrix of 0.7 MB in 8 bits, products of a turn, and turns."""


def rate(matrix: PackedMatrix, rows: int) -> float:
    """Products of two numbers a second, in one thread; inputs are rounded too in that time."""
    inputs, outputs = torch.randn(rows, INPUTS), torch.empty(rows, OUTPUTS)
    begun_s = time.perf_counter()
    for _ in range(PRODUCTS):
        matrix.multiply(inputs, outputs, threads=1)
    return OUTPUTS * INPUTS * rows * PRODUCTS / (time.perf_counter() - begun_s)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,5,9,12,16")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    weights = torch.randn(OUTPUTS, INPUTS)
    matrices = {
        name: PackedMatrix([rounded(weights)])
        for name, rounded in (("int8", rounded_to_8_bits), ("int4", rounded_to_4_bits))
    }
    sizes = [int(number) for number in given.rows.split(",")]
    turns = [
        {name: {rows: rate(matrix, rows) for rows in sizes} for name, matrix in matrices.items()} for _ in range(TURNS)
    ]
    median = {
        name: {str(rows): statistics.median(turn[name][rows] for turn in turns) for rows in sizes} for name in matrices
    }
    for name, rates in median.items():
        print(name, *(f"{rows} rows: {found / 1e9:.0f} G/s" for rows, found in rates.items()))
    if given.json:
        machine = describe_machine("cpu") | {"kernels": kernel_names()}
        write_json(given.json, {"outputs": OUTPUTS, "inputs": INPUTS, "products_per_s": median, "machine": machine})


if __name__ == "__main__":
    main()
