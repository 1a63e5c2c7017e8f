"""What `paradraft plan` is asked: a drafter, batch sizes, ways to draft, and the answers it is about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paradraft.bench.spec import AR, Method
from paradraft.drafters import branches, drafter_class
from paradraft.engine.speculation import Speculation
from paradraft.plan.acceptance import Acceptance, acceptances
from paradraft.plan.predict import PLAIN, Way
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree

CHAINS_WITHOUT_FILE = tuple(range(1, 9))
TREES_WITHOUT_FILE = (8, 16, 32)
"""What is tried where neither the user nor a report says."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is planned, and for which answers.

    Args:
        target: Hugging Face id, folder, or "pocket".
        speculation: how ways to draft are alike: the drafter, its draft model and the verification rule.
        batches: batch sizes.
        ks: lengths of chains; None for all up to the longest in the report, or up to 8 without one.
        trees: budgets of trees; None for those in the report, or 8, 16 and 32 if nothing is named.
        prompts: texts, in the order of the report's answers.
        max_new_tokens: most tokens of an answer.
        sampling: how they are chosen.
        source: where the prompts are from, see `paradraft.data.prompts.counted`.

    Raises:
        ValueError: the drafter drafts nothing, as much as its own settings say, or no trees, a draft model is missing
            or has no weights, or the prompts cannot be dealt out in whole batches.
    """

    target: str
    speculation: Speculation
    batches: tuple[int, ...]
    ks: tuple[int, ...] | None
    trees: tuple[int, ...] | None
    prompts: list[str]
    max_new_tokens: int
    sampling: Sampling
    source: str | None = None

    def __post_init__(self) -> None:
        drafter = self.speculation.drafter
        if drafter == "none":
            raise ValueError("drafter 'none' drafts nothing, so there is nothing to plan")
        self.speculation.check_models(self.target)
        if drafter_class(drafter).branching == "own":
            raise ValueError(f"drafter {drafter!r} drafts as much as its own settings say, so there is no K to plan")
        if self.trees and not branches(drafter):
            raise ValueError(f"drafter {drafter!r} drafts chains only: leave the tree budgets out")
        for batch in self.batches:
            if len(self.prompts) % batch:
                # A part of a batch costs less than a whole one, and would pass for it.
                raise ValueError(
                    f"{len(self.prompts)} prompts cannot be dealt out in batches of {batch}: plan for batch sizes that "
                    "divide their number"
                )

    def speculate(self, way: Way) -> Speculation:
        """How a way drafts, all its tokens in every round, and verifies; plain decoding has no use for its k."""
        tree = None if way.tree is None else Tree(budget=way.tree)
        return replace(self.speculation, k=way.k or 1, tree=tree, lengths="fixed")

    def method(self, way: Way, batch: int, dtype: str) -> Method:
        """A way as a method of a benchmark."""
        settings = "" if way == PLAIN else f":{way.name}"
        spec = f"{AR if way == PLAIN else self.speculation.drafter}{settings}:batch={batch}"
        return Method.parse(spec, self.speculate(way), dtype=dtype)


def known_of(task: Task, report: dict[str, Any], name: str, dtype: str) -> dict[Way, Acceptance]:
    """For each way to draft what a report tells of it.

    A chain is known from the shortest chain in the report that is as long; a tree from itself alone.

    Raises:
        ValueError: the report does not tell enough, or of other prompts.
    """
    drafter = task.speculation.drafter
    found = acceptances(
        report, name, drafter=drafter, draft=task.speculation.draft, verify=task.speculation.verify, dtype=dtype
    )
    chains = {one.k: one for one in found if one.tree is None}
    longest = max(chains, default=0)
    ks = tuple(range(1, longest + 1)) if task.ks is None else task.ks
    if ks and max(ks) > longest:
        raise ValueError(f"k={max(ks)}: {name} knows chains of {drafter!r} up to {longest} tokens only")
    trees = {one.tree for one in found if one.tree} if task.trees is None else set(task.trees)
    known = {Way(k=k): chains[min(other for other in chains if other >= k)] for k in ks}
    for budget in sorted(trees):
        of_budget = [one for one in found if one.tree == budget]
        if not of_budget:
            raise ValueError(
                f"tree budget {budget}: {name} has no such method; measure {drafter}:tree={budget} with it"
            )
        known |= {Way(k=one.k, tree=budget): one for one in of_budget}
    if not known:
        raise ValueError(f"nothing to choose from: {name} has no chains of {drafter!r}, name some tree budgets")
    for one in known.values():
        if len(one.answers) != len(task.prompts):
            raise ValueError(
                f"{name}: {one.spec!r} has {len(one.answers)} answers, but there are {len(task.prompts)} prompts"
            )
    return known


def doubts(task: Task, known: dict[Way, Acceptance], report: dict[str, Any], name: str) -> list[str]:
    """What a report was made with that is not what is planned, in a sentence each: it may be right, or a mistake.

    Args:
        task: what is planned.
        known: from `known_of`.
        report: a result of `paradraft bench`.
        name: how to call it.
    """
    found = []
    if (target := report["arguments"]["target"]) != task.target:
        found.append(f"{name} is about target {target}, not {task.target}")
    planned = task.speculation.draft
    for draft in {one.draft: None for one in known.values() if one.draft != planned}:
        found.append(f"{name} is about draft {draft or 'of the pocket family'}, not {planned or 'that'}")
    example = report.get("example")
    if isinstance(example, dict) and example.get("prompt") != task.prompts[0]:
        found.append(f"{name} answers other prompts than those that costs are measured on: give the same --prompts")
    if any(one.is_synthetic for one in known.values()):
        found.append(f"{name} has synthetic acceptance: this plan is for a drafter that has not been measured")
    return found


def ways_of(task: Task, max_k: int | None = None) -> list[Way]:
    """What is tried where there is no report.

    Args:
        task: what to plan.
        max_k: the most tokens that the drafter can draft; None for any number.

    Raises:
        ValueError: a longer chain was asked for.
    """
    if task.ks is not None and max_k is not None and max(task.ks) > max_k:
        raise ValueError(f"k={max(task.ks)}: this drafter drafts at most {max_k} tokens per round")
    ks, trees = task.ks, task.trees
    if ks is None and trees is None and branches(task.speculation.drafter):
        trees = TREES_WITHOUT_FILE
    ks = tuple(k for k in CHAINS_WITHOUT_FILE if max_k is None or k <= max_k) if ks is None else ks
    return [Way(k=k) for k in ks] + [Way(k=max(ks), tree=budget) for budget in trees or ()]
