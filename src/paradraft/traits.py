"""Facts of a drafter's class, known before it is built: how it drafts, and how serving engines use its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paradraft.tree import Tree

INSTEAD = "serve it with paradraft, or train a PARD drafter"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """How a drafter drafts, and its name in reports.

    Args:
        label: its name in tables and plots, which is accepted in place of the name; None is the name.
        words: explanation of the label in plots.
        branching: chains, trees that branch only along the best path, any trees, or trees whose shape the drafter
            decides.
        needs_drawn: whether it learns from `Committed.drawn`. Then its rule draws "noise", as match does, and
            `depends_on_rounds`.
        depends_on_rounds: whether its drafts also depend on how the committed tokens were split into rounds; on nothing
            else, if the length policy knows no times.
        estimates: whether its drafts have `Draft.values`. Then it draws no token (a union may), so that every rule is
            exact for its unions too.
        can_run_ahead: whether it can propose before the verdict on its last draft (PEARL).
        drafts_one_by_one: whether it runs one pass per drafted token, so that half a draft takes half the time.
        has_own_tokens: whether its draft model may have another vocabulary than the target.
        needs_grammar: whether it drafts only for requests with a `ForcingProcessor`, such as a grammar.
        parts: number of drafters whose drafts it merges into one tree; 1 for all but unions.
        has_drawing_part: of a union: whether a part may draw its tokens, which the rejection rule cannot merge.
    """

    label: str | None = None
    words: str | None = None
    branching: Literal["chain", "spine", "tree", "own"] = "chain"
    needs_drawn: bool = False
    depends_on_rounds: bool = False
    estimates: bool = False
    can_run_ahead: bool = False
    drafts_one_by_one: bool = False
    has_own_tokens: bool = False
    needs_grammar: bool = False
    parts: int = 1
    has_drawing_part: bool = False

    def shape(self, tree: Tree | None, k: int) -> Tree | None:
        """The shape of its drafts of depth K: a requested tree, K nodes for each part of a union; None for a chain."""
        return Tree(budget=self.parts * k, max_depth=k) if tree is None and self.parts > 1 else tree


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How other engines draft with a drafter's checkpoints; by default none can.

    Args:
        vllm: the `method` of vLLM's `--speculative-config`; None if vLLM has no such drafter.
        options: further entries of this config.
        settings: entries that are settings of the drafter, by their names in vLLM.
        as_exported: whether vLLM reads the checkpoint only as `paradraft export` writes it.
        one_k: whether vLLM drafts one K at every batch size.
        refusal: why vLLM cannot load a checkpoint, and what to do instead; None for a drafter of another kind.
        tensorrt: the `decoding_type` of TensorRT-LLM, which can then vary the draft length; None without one.
        passes: how an engine drafts with it, after "It drafts K tokens a round".
        role: of the shipped draft model, as in `paradraft.sources.loading.locate`; None is the drafter's name.
    """

    vllm: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    as_exported: bool = False
    one_k: bool = False
    refusal: str | None = None
    tensorrt: str | None = None
    passes: str = ", one a pass."
    role: str | None = None
