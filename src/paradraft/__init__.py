"""Parallel drafting for language models: lossless, fast, measurable."""

from paradraft.engine import Engine, Result
from paradraft.loader import load
from paradraft.placement import Placement
from paradraft.sampling_params import Sampling
from paradraft.speculation import Speculation
from paradraft.tree import Tree

__all__ = ["Engine", "Placement", "Result", "Sampling", "Speculation", "Tree", "load"]
