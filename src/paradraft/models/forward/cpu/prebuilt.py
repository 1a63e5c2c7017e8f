"""Prebuilt libraries in wheels of `make wheel`, for several levels of x86 CPUs.

They are in a folder beside this file, which an installation from sources does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "libraries"


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level of CPU instructions.

    Args:
        name: of its library.
        needs: instructions, as in `/proc/cpuinfo`.
        flags: compiler options for them.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]

    @property
    def file(self) -> str:
        """The file name of its library."""
        return f"pass-{self.name}.so"


_AVX2 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_VNNI = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
LEVELS = (
    Level(name="avx2", needs=_AVX2, flags=("-march=x86-64-v3",)),
    Level(name="avxvnni", needs=_AVX2 | {"avx_vnni"}, flags=("-march=x86-64-v3", "-mavxvnni")),
    Level(name="avx512vnni", needs=_VNNI, flags=("-march=x86-64-v4", "-mavx512vnni")),
    Level(name="avx512bf16", needs=_BF16, flags=("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")),
    Level(
        name="amx",
        needs=_BF16 | {"amx_bf16", "amx_tile"},
        flags=("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
)
"""In ascending order of speed on a CPU that has several."""


def level_of(machine: str, instructions: str) -> Level | None:
    """The highest level of a CPU, from `platform.machine` and a line of `/proc/cpuinfo`; None if it has none.

    >>> level_of("x86_64", "flags : abm avx2 bmi1 bmi2 f16c fma movbe sse2").name
    'avx2'
    >>> level_of("aarch64", "Features : asimd") is None
    True
    """
    available = set(instructions.split())
    fitting = [level for level in LEVELS if machine == "x86_64" and level.needs <= available]
    return fitting[-1] if fitting else None
