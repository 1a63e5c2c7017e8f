"""The rules `rejection` and `block` end to end: every drafter's sampled text has the target's distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from paradraft.audit.audit import audit
from paradraft.audit.verdict import PASS
from paradraft.drafters import branches, drafter_class, drafter_names
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree
from tests.contract.test_every_drafter import PROMPTS, engine
from tests.support.quick import mostly_slow

DRAFTERS = [name for name in drafter_names() if name != "none" and not drafter_class(name).traits.needs_drawn]
DRAFTERS += ["ngram+suffix", "suffix+recycle"]
DRAFTING = [name for name in DRAFTERS if not drafter_class(name).traits.needs_grammar]
"""Those that draft for the requests of the audit."""
RULES = ("rejection", "block")
SPINE = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
TREES = {
    "chain": None, "grown": Tree(budget=7), "fixed": Tree(paths=SPINE), "fork": Tree(paths=(*SPINE, (1, 0), (1, 1))),
}  # fmt: skip


def can_draft(name: str, shape: str) -> bool:
    """Whether a drafter can draft this shape."""
    return shape == "chain" or (branches(name) and (shape != "fork" or drafter_class(name).traits.branching == "tree"))


CASES = [(rule, name, shape) for rule in RULES for name in DRAFTING for shape in TREES if can_draft(name, shape)]


def is_quick(rule: str, name: str, shape: str) -> bool:
    """Whether `make test` runs it: the rules differ by what they read, which few drafters show."""
    return name == "pard" or (shape == "chain" and (rule == "rejection" or name == "autoregressive"))


@pytest.mark.parametrize(
    ("rule", "name", "shape"), mostly_slow(CASES, quick=[case for case in CASES if is_quick(*case)])
)
def test_the_distribution_is_the_targets(family: Path, rule: str, name: str, shape: str) -> None:
    """Guards numbers that are used twice, wrong positions and a q that is not what was drawn from, which the
    enumeration of single rounds does not see (false alarm 1e-6). The audit contains a control that must be caught."""
    chains = engine(family, name)
    drafted = Engine(chains.target, chains.drafter, Speculation(k=3, verify=rule, tree=TREES[shape], lengths="fixed"))
    sampling = Sampling(temperature=0.7, top_k=20, frequency_penalty=0.1, seed=10)
    report = audit(
        drafted, PROMPTS, sampling=sampling, seeds=24, max_new_tokens=24, batch_size=24, report=lambda _: None
    )
    assert report.verdict == PASS, report.reason
    assert report.acceptance_length > 1.02


@pytest.mark.parametrize(
    ("rule", "name"),
    [("rejection", name) for name in DRAFTERS] + [("block", name) for name in ("pard", "eagle", "ngram+suffix")],
)
def test_greedy_text_equals_plain_decoding(family: Path, rule: str, name: str) -> None:
    """Guards temperature 0 under these rules, where all distributions are one-hot; in a batch with others."""
    plain, chains = engine(family, "none"), engine(family, name)
    tree = Tree(budget=6) if branches(name) else None
    sampling = [Sampling(), Sampling(temperature=1.0), Sampling(), Sampling(presence_penalty=1.0)]
    for shape in (None, tree):
        drafted = Engine(chains.target, chains.drafter, Speculation(k=4, verify=rule, tree=shape, lengths="fixed"))
        found = drafted.generate(PROMPTS, max_new_tokens=30, sampling=sampling)
        for row in (0, 2, 3):
            expected = plain.generate(PROMPTS[row], max_new_tokens=30, sampling=sampling[row])
            assert found[row].tokens == expected.tokens


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", TREES)
def test_the_same_seed_gives_the_same_text(family: Path, shape: str, rule: str) -> None:
    """Guards reproducibility: under these rules too, a row's text depends on its seed and not on its batch."""
    chains = engine(family, "pard")
    drafted = Engine(chains.target, chains.drafter, Speculation(k=4, verify=rule, tree=TREES[shape], lengths="fixed"))
    sampling = [Sampling(temperature=0.9, seed=seed) for seed in range(4)]
    limits = [30, 22, 5, 30]
    together = drafted.generate(PROMPTS, max_new_tokens=limits, sampling=sampling)
    for prompt, limit, chosen, answer in zip(PROMPTS, limits, sampling, together, strict=True):
        assert drafted.generate(prompt, max_new_tokens=limit, sampling=chosen).tokens == answer.tokens
