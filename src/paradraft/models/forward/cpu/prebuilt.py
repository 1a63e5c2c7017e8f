"""The compiled libraries that a wheel of `make wheel` brings, for x86 CPUs of several levels.

They are in a folder beside this file, which an installation from sources does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "libraries"


@dataclass(frozen=True, kw_only=True)
class Level:
    """CPUs that have certain instructions.

    Args:
        name: of its library.
        needs: instructions, as `/proc/cpuinfo` writes them.
        flags: options of the compiler for them.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]

    @property
    def file(self) -> str:
        """The name of its library's file."""
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
"""A later one is faster where a CPU has several."""


def level_of(machine: str, instructions: str) -> Level | None:
    """The highest level of a CPU; None if it has none.

    Args:
        machine: as `platform.machine` says it.
        instructions: separated by spaces, as `/proc/cpuinfo` writes them.

    >>> level_of("x86_64", "flags : abm avx2 bmi1 bmi2 f16c fma movbe sse2").name
    'avx2'
    >>> level_of("aarch64", "Features : asimd") is None
    True
    """
    found = set(instructions.split())
    fitting = [level for level in LEVELS if machine == "x86_64" and level.needs <= found]
    return fitting[-1] if fitting else None
