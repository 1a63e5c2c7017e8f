"""Parallel drafting for language models: lossless, fast, measurable.

Names are imported on first use, so that `import paradraft` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import paradraft.complaints  # noqa: F401  # before all that imports transformers

if TYPE_CHECKING:
    from paradraft.decode.stats import Stats
    from paradraft.engine.answers import Chunk, Result
    from paradraft.engine.engine import Engine
    from paradraft.engine.hf_generate import custom_generate
    from paradraft.engine.loader import load
    from paradraft.engine.speculation import Speculation
    from paradraft.errors import DrafterLostError
    from paradraft.models.runtime import Runtime
    from paradraft.placement import Placement, Stage
    from paradraft.sampling_params import Sampling
    from paradraft.tree import Tree

__version__: str
__all__ = [
    "Chunk", "DrafterLostError", "Engine", "Placement", "Result", "Runtime", "Sampling", "Speculation", "Stage",
    "Stats", "Tree", "custom_generate", "load",
]  # fmt: skip
_HOMES = {
    "Chunk": "engine.answers", "DrafterLostError": "errors", "Engine": "engine.engine", "Placement": "placement",
    "Result": "engine.answers", "Runtime": "models.runtime", "Sampling": "sampling_params",
    "Speculation": "engine.speculation", "Stage": "placement", "Stats": "decode.stats", "Tree": "tree",
    "custom_generate": "engine.hf_generate", "load": "engine.loader",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("paradraft")
    elif name in _HOMES:
        value = getattr(import_module(f"paradraft.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'paradraft' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
