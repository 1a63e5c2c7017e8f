"""How `paradraft plan` counts right guesses, predicts and writes a plan for PPD."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paradraft.drafters.ppd import PLANS, Plan, PpdDrafter, machine_of, plans_for, read_plans, write_plan
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.formats.head import read_checkpoint
from paradraft.models.runtime import Runtime
from paradraft.plan import sizes
from paradraft.plan.replay import RANKS, accuracy_of, random_trees, replayed, static_trees
from paradraft.plan.sizes import SizeTask, count_ranks, run_size_plan
from paradraft.sampling.sparse_tree import best_trees, rate
from paradraft.sampling_params import Sampling
from paradraft.sources.target_loading import load_target
from tests.support.drafts import draft_of

RUNTIME = Runtime(dtype="float32", compiled=False)
PROMPTS = ["abcabcabc", "hello", "The0quick1brown", "xyz"]


def task_for(family: Path, draft: str | None, *, temperature: float = 0.0, verify: str = "match") -> SizeTask:
    return SizeTask(
        target=str(family / "target"), speculation=Speculation(drafter="ppd", draft=draft, verify=verify),
        sizes=(2, 4, 12), prompts=PROMPTS, max_new_tokens=30, sampling=Sampling(temperature=temperature, seed=4),
    )  # fmt: skip


def copied(family: Path, folder: Path) -> str:
    folder.mkdir()
    for file in Path(str(draft_of(family, "ppd"))).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def test_replayed_independent_ranks_yield_the_rate_of_the_trees() -> None:
    """Guards both predictions against each other: where ranks are drawn independently they agree."""
    accuracy = [[0.6, 0.2], [0.4, 0.3], [0.3, 0.2]]
    generator = random.Random(1)

    def drawn() -> tuple[int, ...]:
        return tuple(generator.choices([0, 1, RANKS], [*shares, 1 - sum(shares)])[0] for shares in accuracy)

    answers = [[drawn() for _ in range(500)] for _ in range(100)]
    trees = best_trees(accuracy, 9, prompts=3)
    assert replayed(trees, answers) == pytest.approx(rate(trees, accuracy), rel=0.01)
    counted = accuracy_of(answers)
    assert counted[1][0] == pytest.approx(0.4, abs=0.02) and counted[2][1] == pytest.approx(0.2, abs=0.02)
    # Ranks that depend on each other: after a first guess that is wrong none is right, which trees do not know.
    depending = [[(0, 0, 0) if generator.random() < 0.5 else (RANKS,) * 3 for _ in range(500)] for _ in range(20)]
    trees = best_trees(accuracy_of(depending), 9, prompts=3)
    assert replayed(trees, depending) > rate(trees, accuracy_of(depending)) + 0.2


@pytest.mark.parametrize("size", [1, 4, 9, 20])
def test_static_trees_are_never_better(size: int) -> None:
    """Fig. 8a; and both have the size that was asked for."""
    accuracy = [[0.5 * 0.6**depth * 0.4**rank for rank in range(10)] for depth in range(3)]
    static = static_trees(accuracy, size, 3, 1)
    assert all(tree.size() <= size and len(set(tree.prompts)) == 1 for tree in static)
    assert rate(static, accuracy) <= rate(best_trees(accuracy, size, prompts=3), accuracy) + 1e-9


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("size", [3, 10, 40])
def test_random_trees_are_trees(size: int, copies: int) -> None:
    for seed in range(5):
        for state, tree in enumerate(random_trees(size, 3, copies, seed)):
            assert tree.size(copies) <= size and max(map(len, tree.guesses), default=0) <= state
            assert all(path[:-1] in ((), *tree.guesses[:at]) for at, path in enumerate(tree.guesses))
            assert len(set(tree.guesses)) == len(tree.guesses) and max(tree.prompts) <= 3


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_counted_ranks_are_those_that_drafts_have(family: Path, temperature: float) -> None:
    """Guards ranks that are compared with tokens of other places: predicted tokens a pass are those of decoding the
    same prompts again with these trees."""
    draft = draft_of(family, "ppd")
    task = task_for(family, draft, temperature=temperature)
    task = replace(task, prompts=[*PROMPTS, *PROMPTS], max_new_tokens=90)
    target = load_target(task.target, RUNTIME)
    found = count_ranks(task, target, read_checkpoint(str(draft)), 3)
    assert sum(map(len, found)) > 200
    trees = best_trees(accuracy_of(found), 12, prompts=3, copies=2)
    engine = load(task.target, drafter="ppd:size=12", draft=draft, runtime=RUNTIME)
    assert isinstance(engine.drafter, PpdDrafter)
    engine.drafter.use(trees)
    answers = [engine.generate([prompt], max_new_tokens=90, sampling=task.sampling)[0] for prompt in task.calibrating]
    tokens, passes = sum(len(answer.tokens) for answer in answers), sum(answer.stats.rounds for answer in answers)
    # A draft is no deeper than the answer has room for, which costs a pass at most.
    assert passes - len(answers) <= tokens / replayed(trees, found) <= passes


@pytest.mark.parametrize("verify", ["match", "rejection"])
def test_a_plan_is_made_written_and_read(
    family: Path, tmp_path: Path, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards plans that the drafter does not find again, or takes on another machine."""
    monkeypatch.setattr("paradraft.plan.costs.LEAST_S", 0.0)
    draft = copied(family, tmp_path / "draft")
    with pytest.warns(UserWarning, match="nothing is planned for draft .* passes have 24 nodes"):
        load(str(family / "target"), drafter="ppd", draft=draft, runtime=RUNTIME)
    result = run_size_plan(task_for(family, draft, verify=verify), RUNTIME, check_runs=1, report=lambda text: None)
    assert [row["size"] for row in result["sizes"]] == [2, 4, 12] and result["chosen"] in (2, 4, 12)
    assert result["checked"]["tokens_per_pass"] >= 1
    file = write_plan(draft, Plan(**result["plan"]))
    assert file == Path(draft) / PLANS
    other = replace(Plan(**result["plan"]), size=7, temperature=1.0, accuracy=[[0.9, 0.05]] * 3)
    write_plan(draft, other)
    write_plan(draft, replace(other, machine="another", size=300))
    write_plan(draft, other)
    assert len(read_plans(draft)) == 3
    engine = load(str(family / "target"), drafter="ppd", draft=draft, runtime=RUNTIME)
    assert isinstance(engine.drafter, PpdDrafter)
    for temperature, size in ((0.0, result["chosen"]), (0.2, result["chosen"]), (0.9, 7)):
        engine.generate(["abc"], max_new_tokens=6, sampling=Sampling(temperature=temperature))
        assert max(tree.size(2) for tree in engine.drafter.trees) <= size
        assert max(tree.size(2) for tree in engine.drafter.trees) > size - 2
    fixed = load(str(family / "target"), drafter="ppd:size=9", draft=draft, runtime=RUNTIME).drafter
    assert isinstance(fixed, PpdDrafter) and max(tree.size(2) for tree in fixed.trees) in (8, 9)


def test_a_plan_for_other_threads_or_fewer_prompt_tokens(family: Path, tmp_path: Path) -> None:
    """Guards a plan that was made with --threads and is then not found, one that says nothing of the third prompt token
    and is then not missed, and one that has no room for the copies."""
    target, draft = str(family / "target"), copied(family, tmp_path / "draft")
    lm = load_target(target, RUNTIME).lm
    plan = Plan(machine=machine_of(lm), threads=77, rule="match", temperature=0.0, size=7, accuracy=[[0.9]] * 3)
    write_plan(draft, plan)
    engine = load(target, drafter="ppd", draft=draft, runtime=RUNTIME)
    assert isinstance(engine.drafter, PpdDrafter) and max(tree.size(2) for tree in engine.drafter.trees) in (6, 7)
    with pytest.warns(UserWarning, match="no more than ppd:prompts=3 is planned for draft"):
        load(target, drafter="ppd:prompts=4", draft=draft, runtime=RUNTIME)
    own = replace(plan, threads=lm.threads, size=1)
    assert plans_for(lm, [plan, own]) == [own] and plans_for(lm, [replace(plan, machine="another")]) == []
    write_plan(draft, own)
    with pytest.raises(ValueError, match="size=1: each prompt token has 2 copies, use at least 2"):
        load(target, drafter="ppd", draft=draft, runtime=RUNTIME)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[{}]",
        '[{"machine": "a", "rule": "match", "temperature": 0, "size": 0}]',
        "[3]",
        '[{"machine": "a", "threads": 1, "rule": "match", "temperature": 0, "size": 513, "accuracy": [[0.5]]}]',
    ],
)
def test_damaged_plans_are_one_line(family: Path, tmp_path: Path, content: str) -> None:
    draft = copied(family, tmp_path / "draft")
    (tmp_path / "draft" / PLANS).write_text(content)
    with pytest.raises(ValueError, match=r"plans\.json' is not what .* writes: delete it, then plan again") as error:
        load(str(family / "target"), drafter="ppd", draft=draft, runtime=RUNTIME)
    assert "\n" not in str(error.value)
    load(str(family / "target"), drafter="ppd:size=4", draft=draft, runtime=RUNTIME)  # which needs no plan


def test_prompts_are_halved(family: Path) -> None:
    task = task_for(family, draft_of(family, "ppd"))
    assert task.calibrating == PROMPTS[:2] and task.checking == PROMPTS[2:]
    with pytest.raises(ValueError, match="give at least 2"):
        replace(task, prompts=["a"])
    assert task.of_size(5).drafter == "ppd:size=5" and task.of_size(5).nodes == 5
    kept = replace(task, speculation=replace(task.speculation, drafter="ppd:size=3:prompts=2", tree=None)).of_size(9)
    assert kept.drafter == "ppd:size=9:prompts=2"
    assert sizes.SIZES == tuple(sorted(sizes.SIZES)) and json.dumps(sizes.SIZES)
