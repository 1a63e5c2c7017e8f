"""What a report says of how far drafts are accepted, and what follows for shorter drafts."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paradraft.bench.result_file import read_result_file
from paradraft.plan.acceptance import PARTS, Acceptance, acceptances, arguments_of
from paradraft.sampling_params import Sampling

SEEN = Acceptance(
    spec="pard:k=4", k=4, tree=None, length=2.0, shares=(0.5, 0.25, 0.25, 0.0), answers=(8,), by_round=None
)


def rounds_of(is_right: list[bool], k: int) -> list[int]:
    """The tokens of each round of a drafter that is right at the same places wherever a round begins."""
    found, place = [], 0
    while place < len(is_right):
        accepted = 0
        while accepted < k and place + accepted < len(is_right) - 1 and is_right[place + accepted]:
            accepted += 1
        found.append(accepted + 1)
        place += accepted + 1
    return found


def test_shorter_drafts_take_the_passes_that_a_drafter_takes_that_is_right_at_the_same_places() -> None:
    """Guards the count of passes against a simulation of every k: cutting each round alone is up to a third off."""
    generator = random.Random(0)
    for _ in range(20):
        is_right = [generator.random() < 0.8 for _ in range(200)]
        rounds = rounds_of(is_right, 8)
        place = 0
        for tokens in rounds:  # nobody guessed the token after a draft that was accepted whole
            place += tokens
            is_right[place - 1] |= tokens == 9
        seen = replace(SEEN, k=8, answers=(200,), by_round=(tuple(rounds),))
        assert seen.passes(8) == (len(rounds),)
        for k in range(1, 8):
            assert seen.passes(k) == (len(rounds_of(is_right, k)),)


def test_without_rounds_all_answers_have_the_mean_acceptance() -> None:
    """Guards reports of earlier versions: at the k that was measured its acceptance length holds, cut ends and all."""
    seen = replace(SEEN, length=1.9, answers=(19, 38))
    assert seen.passes(4) == pytest.approx((10, 20))
    assert seen.passes(1) == pytest.approx((10 * 2.0 / 1.5, 20 * 2.0 / 1.5))


def method(**given: Any) -> dict[str, Any]:
    figures = {
        "method": "pard", "k": 8, "tree": None, "verify": "match", "lengths": "fixed", "dtype": "float32",
        "draft": None, "acceptance_length": 2.0, "acceptance_per_position": [0.5, 0.5],
    }  # fmt: skip
    return {**figures, **given}


def test_what_a_round_yields_is_over_all_rounds() -> None:
    """Guards plans for drafters that often draft nothing: their chance at a position is not what a round yields."""
    content = report(a=method(accepted_share_of_rounds=[0.25, 0.125]), b=method(k=4))
    first, second = acceptances(content, "x", drafter="pard", draft=None, verify="match", dtype="float32")
    assert first.shares == (0.25, 0.125) and second.shares == (0.5, 0.5)


def report(**methods: dict[str, Any]) -> dict[str, Any]:
    answers = {spec: {"tokens": [[1, 2, 3, 4]], "by_round": [[3, 1]]} for spec in methods}
    return {"methods": methods, "answers": answers, "arguments": {}}


def found(content: dict[str, Any], **given: Any) -> list[str]:
    wanted = {"drafter": "pard", "draft": None, "verify": "match", "dtype": "float32"} | given
    return [one.spec for one in acceptances(content, "bench.json", **wanted)]


def test_only_what_the_plan_is_about_is_read() -> None:
    """Guards against the acceptance of another drafter, rule or policy, and of the same k twice."""
    content = report(
        ar=method(method="ar"), a=method(), b=method(k=4), tree=method(tree=12), again=method(k=4),
        grows=method(lengths="expected", k=3), loose=method(verify="rejection", k=2),
    )  # fmt: skip
    assert found(content) == ["a", "b", "tree"]
    assert found(content, verify="rejection") == ["loose"]
    with pytest.raises(ValueError, match=r"no method with drafter 'ngram'.*it has ar, a, b, tree, again, grows, loose"):
        found(content, drafter="ngram")


def test_of_several_drafts_or_dtypes_the_plans_own_is_read() -> None:
    """Guards against another draft's acceptance, and against refusing the only one because its folder was moved."""
    assert found(report(a=method(draft="there/x"))) == ["a"]
    content = report(a=method(draft="x"), b=method(draft="y"), c=method(draft="y", dtype="bfloat16", k=4))
    assert found(content, draft="y") == ["b"]
    with pytest.raises(ValueError, match="draft 'z'"):
        found(content, draft="z")


def test_drawn_verdicts_are_known_as_such() -> None:
    """Guards against a plan from synthetic acceptance that does not say so."""
    content = report(a=method(), b=method(k=4, synthetic_acceptance=[0.9, 0.5, 0.4, 0.3], draft="x"))
    content["methods"]["a"]["draft"] = "x"
    read = acceptances(content, "bench.json", drafter="pard", draft="x", verify="match", dtype="float32")
    assert [(one.draft, one.is_synthetic) for one in read] == [("x", False), ("x", True)]


@pytest.mark.parametrize(
    "damage",
    [
        {"k": "eight"}, {"acceptance_length": None}, {"acceptance_per_position": None}, {"acceptance_length": 0.5},
        {"k": 0}, {"tree": 0}, {"tree": "wide"}, {"acceptance_length": math.nan}, {"acceptance_length": 99.0},
        {"acceptance_per_position": [0.5] * 99},
        {"acceptance_per_position": [1.5] * 8}, {"acceptance_per_position": [math.nan] * 8},
    ],
)  # fmt: skip
def test_damaged_methods_are_named(damage: dict[str, Any]) -> None:
    """Guards against a traceback for a report that somebody has edited."""
    with pytest.raises(ValueError, match=r"bench\.json: method 'a' is damaged"):
        found(report(a=method(**damage)))
    content = report(a=method())
    content["answers"]["a"]["by_round"] = [[3, 2]]
    with pytest.raises(ValueError, match="its rounds are not those of its answers"):
        found(content)
    tokens = sum(content["answers"]["a"]["by_round"][0])
    content["answers"]["a"] = {"tokens": [[1] * tokens], "by_round": [[tokens + 1, -1]]}
    with pytest.raises(ValueError, match="damaged: rounds of other than 1 to"):
        found(content)


def test_files_that_are_no_reports(tmp_path: Path) -> None:
    """Guards against a traceback for the wrong file."""
    file = tmp_path / "x.json"
    with pytest.raises(ValueError, match="cannot be read"):
        read_result_file(file, PARTS)
    for text, complaint in (
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"tasks": {}}', "with one --task"),
        ("[]", "no result"),
        ('{"methods": {}}', "no result"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=complaint):
            read_result_file(file, PARTS)
    with pytest.raises(ValueError, match=r"x\.json does not say what was asked for"):
        arguments_of({"arguments": {"target": "pocket"}}, "x.json")


def test_what_was_asked_for_is_read_back() -> None:
    """Guards against a plan for greedy answers from a report of sampled ones."""
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3, logit_bias={5: -1.0})
    written = json.loads(json.dumps(sampling.__dict__))
    arguments = {"target": "t", "num_prompts": 4, "max_new_tokens": 9, "sampling": written}
    asked = arguments_of({"arguments": arguments}, "x.json")
    assert (asked.target, asked.num_prompts, asked.max_new_tokens, asked.sampling) == ("t", 4, 9, sampling)
