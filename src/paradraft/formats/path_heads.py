"""Entries and weights of heads that let a drafted token depend on the one before, in a checkpoint.

A checkpoint has at most one; which one is said by the entry with its rank. See `paradraft.drafters.parts.path_heads`.
"""

from __future__ import annotations

PREVIOUS_TOKEN_RANK, MARKOV_RANK, SELECTOR_RANK = "previous_token_rank", "markov_rank", "selector_rank"
RANKS = (PREVIOUS_TOKEN_RANK, MARKOV_RANK, SELECTOR_RANK)
"""The entries; the recipes' settings have these names too."""
PREFIXES = {PREVIOUS_TOKEN_RANK: "previous", MARKOV_RANK: "markov", SELECTOR_RANK: "selector"}
"""How the names of their weights begin, before a point, by entry."""
MOST_RANK = 2**14
"""Largest rank; a head must be much smaller than the model."""
MARKOV_EMBEDDING, MARKOV_OUTPUT = "markov.embedding.weight", "markov.output.weight"
"""Weights of the Markov head: A `[V, X]` and B `[U, X]`."""
SELECTOR_EMBEDDING, SELECTOR_OUTPUT, SELECTOR_STATE = (
    f"selector.{name}.weight" for name in ("embedding", "output", "state")
)
"""Weights of the selector: A `[V, X]`, B `[U, X]` and H `[X, D]`."""
SELECTED = 16
"""Likeliest tokens between which a selector decides, as in DFlash 2."""
