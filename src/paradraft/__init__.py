"""Parallel drafting for language models: lossless, fast, measurable.

What is here is imported when it is first used, so that `import paradraft` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import paradraft.complaints  # noqa: F401  # before all that imports transformers

if TYPE_CHECKING:
    from paradraft.decode.stats import Stats
    from paradraft.engine import Chunk, Engine, Result
    from paradraft.errors import DrafterLostError
    from paradraft.hf_generate import custom_generate
    from paradraft.loader import load
    from paradraft.models.runtime import Runtime
    from paradraft.placement import Placement, Stage
    from paradraft.sampling_params import Sampling
    from paradraft.speculation import Speculation
    from paradraft.tree import Tree

__version__: str
__all__ = [
    "Chunk", "DrafterLostError", "Engine", "Placement", "Result", "Runtime", "Sampling", "Speculation", "Stage",
    "Stats", "Tree", "custom_generate", "load",
]  # fmt: skip
_HOMES = {
    "Chunk": "engine", "DrafterLostError": "errors", "Engine": "engine", "Placement": "placement", "Result": "engine",
    "Runtime": "models.runtime", "Sampling": "sampling_params", "Speculation": "speculation", "Stage": "placement",
    "Stats": "decode.stats", "Tree": "tree", "custom_generate": "hf_generate", "load": "loader",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("paradraft")
    elif name in _HOMES:
        found = getattr(import_module(f"paradraft.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'paradraft' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
