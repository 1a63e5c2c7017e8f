"""The C++ on CPUs of another kind, emulated: ARM's, with and without products of bytes.

Needs Debian's `g++-aarch64-linux-gnu` and `qemu-user`.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paradraft.models.forward.cpu import build
from paradraft.models.forward.cpu.matrix import PackedMatrix
from paradraft.models.quantization import stored_parts
from paradraft.models.quantized import QuantizedTensor, plain_product
from tests.unit.models.test_quantized import FORMATS, product, random_inputs, random_weight, shapes_of

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = build.NATIVE
KERNELS = ("-march=armv8-a", "-march=armv8.2-a+dotprod", "-march=armv8.6-a")
FLAGS = (*(flag for flag in build.FLAGS if not flag.startswith("-m")), "-Wall", "-Wextra", "-Werror")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}"
    ),
]


@pytest.fixture(scope="module", params=KERNELS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program for such a CPU that multiplies."""
    made = tmp_path_factory.mktemp("aarch64") / "products"
    main = Path(__file__).parents[3] / "support" / "products.cpp"
    files = [main, *(SOURCES / name for name in build.SOURCES if name.endswith(".cpp"))]
    command = [COMPILER, *FLAGS, request.param, "-Wno-unknown-pragmas", "-static", f"-I{SOURCES}", *files, "-o", made]
    subprocess.run(command, check=True)
    return made


def asked(weight: Tensor, inputs: Tensor) -> bytes:
    """What the program reads of one product."""
    outputs, width = weight.shape
    parts = [weight.detach()]
    settings = [0, 0, 0, 0]
    if isinstance(weight, QuantizedTensor):
        settings = [int(setting) for setting in weight.format]
        parts = stored_parts(weight)
        parts = parts if weight.format.group else [parts[0], parts[1].float()]
    sizes = struct.pack("8q", outputs, width, len(inputs), parts[0].element_size(), *settings)
    return sizes + b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in (*parts, inputs))


def emulated(program: Path, weights: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """What the program makes of weights and inputs."""
    pairs = list(zip(weights, inputs, strict=True))
    done = subprocess.run(
        [EMULATOR, "-cpu", "max", program],
        input=b"".join(asked(*pair) for pair in pairs),
        capture_output=True,
        check=True,
    )
    numbers = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32)
    sizes = [len(rows) * len(weight) for weight, rows in pairs]
    return [part.view(len(rows), len(weight)) for part, (weight, rows) in zip(numbers.split(sizes), pairs, strict=True)]


def test_whole_numbers_give_the_same_bits(program: Path) -> None:
    """Guards the texts of quantized models on ARM: they are those of x86, to the last bit of each product."""
    formats = [format for format in FORMATS for _ in range(3)]
    weights: list[Tensor] = [random_weight(format, shapes_of(format)[0]) for format in formats]
    inputs = [
        random_inputs(rows, weight.shape[1]) for weight, rows in zip(weights, (1, 9, 26) * len(FORMATS), strict=True)
    ]
    for weight, rows, found in zip(weights, inputs, emulated(program, weights, inputs), strict=True):
        assert isinstance(weight, QuantizedTensor)
        assert torch.equal(found, plain_product(rows, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_added_in_the_order_of_other_cpus(program: Path, dtype: torch.dtype) -> None:
    """Guards NEON's vectors: CPUs that fuse add in the same order, and get the same bits."""
    weight = torch.randn(70, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    inputs = [random_inputs(rows, 100) for rows in (1, 9)]
    for rows, found in zip(inputs, emulated(program, [weight, weight], inputs), strict=True):
        assert torch.equal(found, product(PackedMatrix([weight]), rows))
