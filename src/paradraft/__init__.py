"""Parallel drafting for language models: lossless, fast, measurable."""

from paradraft import quiet as quiet

# isort: split
from paradraft.api import load
from paradraft.core import Sampling, Tree
from paradraft.engine import Engine, Result

__all__ = ["Engine", "Result", "Sampling", "Tree", "load"]
