"""Puts the libraries that `make wheel` has compiled into a wheel; without them it has the sources in C++ only."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SETTING = "PARADRAFT_LIBRARIES"
"""Names the folder of the libraries."""


class CompiledLibraries(BuildHookInterface):
    """Adds each `*.so` of the folder, and the least version of glibc that they need to the wheel's name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        if version == "editable" or not (folder := os.environ.get(SETTING)):
            return
        if not (files := sorted(Path(folder).glob("*.so"))):
            raise ValueError(f"{SETTING}={folder!r}: there is no library in this folder, make wheel writes them")
        for file in files:
            build_data["force_include"][str(file)] = f"paradraft/models/forward/cpu/libraries/{file.name}"
        glibc = max(int(minor) for file in files for minor in re.findall(rb"\bGLIBC_2\.(\d+)", file.read_bytes()))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{glibc}_x86_64"
