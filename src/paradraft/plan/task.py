"""The task of `paradraft plan`: a drafter, batch sizes, ways to draft, prompts and sampling."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from paradraft.bench.spec import AR, Method
from paradraft.drafters import branches, drafter_class
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.plan.acceptance import Acceptance, acceptances
from paradraft.plan.predict import PLAIN, Way
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree
from paradraft.verify import warning_of

CHAINS_WITHOUT_FILE = tuple(range(1, 9))
TREES_WITHOUT_FILE = (8, 16, 32)
"""Defaults if neither the user nor a report names any."""


@dataclass(frozen=True, kw_only=True)
class PlannedAnswers:
    """The models and answers to plan for.

    Args:
        target: Hugging Face id, folder, or "pocket".
        speculation: the drafter with its settings, its checkpoint and the verification rule.
        prompts: texts.
        source: of the prompts, see `paradraft.data.prompts.counted`.
    """

    target: str
    speculation: Speculation
    prompts: list[str]
    max_new_tokens: int
    sampling: Sampling
    source: str | None = None

    def as_json(self, runtime: Runtime) -> dict[str, Any]:
        """The arguments of a plan."""
        return {
            "target": self.target,
            "drafter": self.speculation.drafter,
            "draft": self.speculation.draft,
            "verify": self.speculation.verify,
            "lossless": warning_of(self.speculation.verify) is None,
            "prompts": self.source,
            "num_prompts": len(self.prompts),
            "max_new_tokens": self.max_new_tokens,
            "sampling": asdict(self.sampling),
            "runtime": asdict(runtime),
        }


@dataclass(frozen=True, kw_only=True)
class PlanTask(PlannedAnswers):
    """Ways to draft, and prompts in the order of the report's answers.

    Args:
        ks: lengths of chains; None for all up to the longest in the report, or up to 8 without a report.
        trees: node budgets; None for those in the report, or 8, 16 and 32 without a report and `ks`.

    Raises:
        ValueError: the drafter drafts nothing, has no K to choose, or drafts no trees; a draft model is missing or has
            no weights; or the prompts do not fill whole batches.
    """

    batches: tuple[int, ...]
    ks: tuple[int, ...] | None
    trees: tuple[int, ...] | None

    def __post_init__(self) -> None:
        drafter = self.speculation.drafter
        if drafter == "none":
            raise ValueError("drafter 'none' drafts nothing, so there is nothing to plan")
        self.speculation.check_models(self.target)
        if drafter_class(drafter).traits.branching == "own":
            raise ValueError(f"drafter {drafter!r} drafts as much as its own settings say, so there is no K to plan")
        if self.trees and not branches(drafter):
            raise ValueError(f"drafter {drafter!r} drafts chains only: leave the tree budgets out")
        for batch in self.batches:
            if len(self.prompts) % batch:
                # A partial batch costs less than a full one, and would be counted as a full one.
                raise ValueError(
                    f"{len(self.prompts)} prompts cannot be dealt out in batches of {batch}: plan for batch sizes that "
                    "divide their number"
                )

    def speculate(self, way: Way) -> Speculation:
        """The speculation of a way, with fixed lengths; plain decoding ignores its k."""
        tree = None if way.tree is None else Tree(budget=way.tree)
        return replace(self.speculation, k=way.k or 1, tree=tree, lengths="fixed")

    def method(self, way: Way, batch: int, dtype: str) -> Method:
        """A way as a method of a benchmark."""
        settings = "" if way == PLAIN else f":{way.name}"
        spec = f"{AR if way == PLAIN else self.speculation.drafter}{settings}:batch={batch}"
        return Method.parse(spec, self.speculate(way), dtype=dtype)


def known_of(task: PlanTask, report: dict[str, Any], name: str, dtype: str) -> dict[Way, Acceptance]:
    """Acceptance by way, from a report.

    A chain's acceptance is that of the shortest chain in the report that is at least as long; a tree needs its own.

    Raises:
        ValueError: the report lacks a way, or has another number of answers than there are prompts.
    """
    drafter = task.speculation.drafter
    reported = acceptances(
        report, name, drafter=drafter, draft=task.speculation.draft, verify=task.speculation.verify, dtype=dtype
    )
    chains = {acceptance.k: acceptance for acceptance in reported if acceptance.tree is None}
    longest = max(chains, default=0)
    ks = tuple(range(1, longest + 1)) if task.ks is None else task.ks
    if ks and max(ks) > longest:
        raise ValueError(f"k={max(ks)}: {name} knows chains of {drafter!r} up to {longest} tokens only")
    budgets = {acceptance.tree for acceptance in reported if acceptance.tree} if task.trees is None else set(task.trees)
    known = {Way(k=k): chains[min(other for other in chains if other >= k)] for k in ks}
    for budget in sorted(budgets):
        of_budget = [acceptance for acceptance in reported if acceptance.tree == budget]
        if not of_budget:
            raise ValueError(
                f"tree budget {budget}: {name} has no such method; measure {drafter}:tree={budget} with it"
            )
        known |= {Way(k=acceptance.k, tree=budget): acceptance for acceptance in of_budget}
    if not known:
        raise ValueError(f"nothing to choose from: {name} has no chains of {drafter!r}, name some tree budgets")
    for acceptance in known.values():
        if len(acceptance.answers) != len(task.prompts):
            raise ValueError(
                f"{name}: {acceptance.spec!r} has {len(acceptance.answers)} answers, but there are "
                f"{len(task.prompts)} prompts"
            )
    return known


def doubts(task: PlanTask, known: dict[Way, Acceptance], report: dict[str, Any], name: str) -> list[str]:
    """Warnings about differences between a report and the task, which may be intended or mistakes."""
    warnings = []
    if (target := report["arguments"]["target"]) != task.target:
        warnings.append(f"{name} is about target {target}, not {task.target}")
    planned = task.speculation.draft
    for draft in {acceptance.draft: None for acceptance in known.values() if acceptance.draft != planned}:
        warnings.append(f"{name} is about draft {draft or 'of the pocket family'}, not {planned or 'that'}")
    example = report.get("example")
    if isinstance(example, dict) and example.get("prompt") != task.prompts[0]:
        warnings.append(f"{name} answers other prompts than those that costs are measured on: give the same --prompts")
    if any(acceptance.is_synthetic for acceptance in known.values()):
        warnings.append(f"{name} has synthetic acceptance: this plan is for a drafter that has not been measured")
    return warnings


def ways_of(task: PlanTask, max_k: int | None = None) -> list[Way]:
    """The ways to try without a report; raises ValueError for a chain longer than the drafter's `max_k`, if any."""
    if task.ks is not None and max_k is not None and max(task.ks) > max_k:
        raise ValueError(f"k={max(task.ks)}: this drafter drafts at most {max_k} tokens per round")
    ks, trees = task.ks, task.trees
    if ks is None and trees is None and branches(task.speculation.drafter):
        trees = TREES_WITHOUT_FILE
    ks = tuple(k for k in CHAINS_WITHOUT_FILE if max_k is None or k <= max_k) if ks is None else ks
    return [Way(k=k) for k in ks] + [Way(k=max(ks), tree=budget) for budget in trees or ()]
