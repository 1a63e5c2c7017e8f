"""Parallel drafting for language models: lossless, fast, measurable."""

from paradraft.api import Engine, Result, load
from paradraft.core import Sampling, Tree

__all__ = ["Engine", "Result", "Sampling", "Tree", "load"]
