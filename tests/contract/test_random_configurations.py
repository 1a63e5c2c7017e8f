"""Everything together: random drafters, trees, lengths, batches, settings and stops against plain decoding, row by row.

Each number is one configuration and its own random seed, so a failure names what to run again. 50 run in C++
and by torch in `make test`, 10,000 more of both in `make test-long`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paradraft.audit.uniformity import accept_all
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.decode.lengths.draft_length import POLICIES
from paradraft.drafters import branches
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree
from paradraft.verify import match
from tests.support.drafts import DRAFTERS, draft_of
from tests.support.quick import mostly_slow
from tests.support.rules import replace_rule

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
RUNTIMES = {
    "eager": Runtime(dtype="float64", width=40),
    "compiled": Runtime(dtype="bfloat16", compiled=True, width=40),
}
"""Where equality is exact; of compiled passes, those with the coarsest numbers."""


BLOCKS = range(8)
QUICK = BLOCKS[:2]
"""Blocks of 25 that `make test` tries; more than the first 40 configurations, which the control catches faults in."""


@pytest.fixture(scope="module", params=RUNTIMES)
def engines(family: Path, request: pytest.FixtureRequest) -> dict[str, Engine]:
    return {
        name: load(
            str(family / "target"),
            drafter=name,
            draft=draft_of(family, name),
            runtime=RUNTIMES[request.param],
            lengths="fixed",
        )
        for name in DRAFTERS
    }


def never_twice(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that reads the text: the last token may not be said again."""
    return scores.scatter(1, ids[:, -1:], -torch.inf)


def random_sampling(chooser: random.Random) -> Sampling:
    return Sampling(
        temperature=chooser.choice([0.0, 0.0, 0.5, 0.9, 1.5]),
        top_k=chooser.choice([0, 0, 1, 5, 30]),
        top_p=chooser.choice([1.0, 1.0, 0.9, 0.5]),
        min_p=chooser.choice([0.0, 0.0, 0.1]),
        repetition_penalty=chooser.choice([1.0, 1.0, 1.0, 1.3]),
        presence_penalty=chooser.choice([0.0, 0.0, 0.0, 0.7]),
        frequency_penalty=chooser.choice([0.0, 0.0, 0.0, 0.4]),
        logit_bias=chooser.choice([{}, {}, {chooser.randrange(64): chooser.choice([-5.0, 3.0, float("-inf")])}]),
        processors=chooser.choice([(), (), (), (never_twice,)]),
        seed=chooser.randrange(-(2**63), 2**63),
    )


def random_tree(chooser: random.Random, k: int, *, side_branches: bool) -> Tree | None:
    kind = chooser.choice(["chain", "budget", "paths"])
    if kind == "chain":
        return None
    if kind == "budget":
        return Tree(budget=chooser.randint(1, 30))
    paths: list[tuple[int, ...]] = [(0,)]
    for _ in range(chooser.randint(0, 10)):
        parent = chooser.choice([(), *(path for path in paths if len(path) < k and (side_branches or not any(path)))])
        path = (*parent, chooser.randrange(4))
        if path not in paths:
            paths.append(path)
    return Tree(paths=tuple(paths))


def check(number: int, engines: dict[str, Engine]) -> None:
    """Decodes one random configuration twice; raises AssertionError where the two part."""
    chooser = random.Random(number)
    name = chooser.choice([name for name in engines if name != "none"])
    loaded, k = engines[name], chooser.randint(1, 9)
    branching = loaded.drafter.traits.branching
    tree = random_tree(chooser, k, side_branches=branching == "tree") if branches(name) else None
    lengths = chooser.choice(list(POLICIES))
    drafted = Engine(loaded.target, loaded.drafter, Speculation(k=k, tree=tree, lengths=lengths))
    rows = chooser.choice([1, 1, 2, 3, 6])
    prompts = ["".join(chooser.choices(LETTERS, k=chooser.choice([1, 2, 7, 30]))) for _ in range(rows)]
    samplings = [random_sampling(chooser) for _ in range(rows)]
    if chooser.random() < 0.5:
        samplings = [samplings[0]] * rows
    limits = [chooser.choice([1, 2, 5, 12, 24]) for _ in range(rows)]
    stop = ["".join(chooser.choices(LETTERS, k=chooser.choice([1, 1, 2]))) for _ in range(chooser.choice([0, 0, 1, 3]))]
    batch_size = chooser.choice([rows, rows, 2])

    plain = engines["none"]
    together = drafted.generate(prompts, max_new_tokens=limits, sampling=samplings, stop=stop, batch_size=batch_size)
    for prompt, limit, sampling, answer in zip(prompts, limits, samplings, together, strict=True):
        alone = plain.generate(prompt, max_new_tokens=limit, sampling=sampling, stop=stop)
        assert answer.tokens == alone.tokens
        assert (answer.text, answer.finish_reason) == (alone.text, alone.finish_reason)
        assert not any(string in answer.text for string in stop)
    # A stream says the same, and nothing that it takes back.
    chunks = list(drafted.stream(prompts[0], max_new_tokens=limits[0], sampling=samplings[0], stop=stop))
    assert "".join(chunk.text for chunk in chunks) == together[0].text
    assert [token for chunk in chunks for token in chunk.tokens] == together[0].tokens


@pytest.mark.parametrize(
    ("engines", "block"),
    mostly_slow(itertools.product(RUNTIMES, BLOCKS), quick=[*itertools.product(RUNTIMES, QUICK)]),
    indirect=["engines"],
)
def test_random_configurations(engines: dict[str, Engine], block: int) -> None:
    """Guards losslessness where features meet: 25 of the configurations in each block."""
    for number in range(block * 25, block * 25 + 25):
        check(number, engines)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_ten_thousand_random_configurations(engines: dict[str, Engine], block: int) -> None:
    """Guards losslessness where features meet: all 10,000 configurations."""
    for number in range(1000 + block * 100, 1000 + block * 100 + 100):
        check(number, engines)


def shifted_noise(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Counts positions from the start of the round."""
    kept, sampler.lengths_B = sampler.lengths_B, sampler.lengths_B * 0
    verdict = match.verify(draft, out, sampler)
    sampler.lengths_B = kept
    return verdict


def forgotten_text(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Shows penalties and processors the committed text without the drafted tokens."""
    empty = Draft(tokens=torch.full_like(draft.tokens, -1), parents=draft.parents)
    texts = match.texts_before
    try:
        match.texts_before = lambda tokens, parents: texts(empty.tokens, parents)
        return match.verify(draft, out, sampler)
    finally:
        match.texts_before = texts


@pytest.mark.parametrize("wrong", [accept_all, shifted_noise, forgotten_text])
def test_wrong_rules_are_caught(
    engines: dict[str, Engine], wrong: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: configurations that these rules pass would not guard losslessness."""
    replace_rule(monkeypatch, "match", wrong)

    def check_all() -> None:
        for number in range(40):
            check(number, engines)

    with pytest.raises(AssertionError):
        check_all()
