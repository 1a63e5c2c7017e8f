"""How to speculate, checked before any model is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paradraft.bench.spec import Method
from paradraft.decode.lengths.draft_length import POLICIES
from paradraft.drafters import ngram
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.drafters.lookahead import Config, LookaheadDrafter
from paradraft.drafters.ngram import NgramDrafter
from paradraft.drafters.pard import PardDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import AUTO, LENGTHS, MOST_DRAFTED, MOST_NODES, Speculation
from paradraft.models.runtime import Runtime
from paradraft.tree import Tree

DEEP = Tree(paths=((0,), (0, 0), (0, 0, 0)))
ASIDE = Tree(paths=((0,), (1,), (1, 0)))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"drafter": "telepathy"}, "unknown drafter 'telepathy': use one of"),
        ({"drafter": "ngram:max_ngram=0"}, "max_ngram=0: use at least 1"),
        ({"k": 0}, "k=0: draft 1 to 256 tokens per round"),
        ({"k": MOST_DRAFTED + 1}, "k=257: draft 1 to 256 tokens per round"),
        ({"k": 2.5}, "k=2.5: use a whole number"),
        ({"k": True}, "k=True: use a whole number"),
        ({"verify": "tipical"}, "verify='tipical': use one of block, judge, match, rejection, typical"),
        ({"lengths": "short"}, "lengths='short': use one of auto, fixed, heuristic, confidence, expected"),
        ({"tree": Tree(budget=MOST_NODES + 1)}, "a tree of 1025 nodes: use at most 1024"),
        ({"tree": DEEP, "k": 2}, "a tree path is 3 tokens deep, but k=2: raise k or shorten the path"),
    ],
)
def test_a_wrong_setting_is_said_by_whoever_is_told_it(settings: dict[str, Any], complaint: str) -> None:
    """Guards against checks that differ between the library and its commands, and against those after a long load."""
    with pytest.raises(ValueError, match=complaint):
        Speculation(**settings)
    with pytest.raises(ValueError, match=complaint):
        load("/no/such/model", **settings)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("ngram:verify=tipical", "verify='tipical': use one of block, judge, match, rejection, typical"),
        ("ngram:lengths=short", "lengths='short': use one of"),
        ("hf-prompt-lookup:k=257", "k=257: draft 1 to 256"),
        ("pard:tree=1025", "a tree of 1025 nodes"),
        ("pard:gamma=4:k=8", "gamma says how many tokens are drafted, leave k out"),
        (
            "lookahead:k=4",
            "settings of lookahead are dtype, batch, target_cpus, target_stages, lengths, ngram, window, guesses",
        ),
    ],
)
def test_a_wrong_method_is_named(spec: str, complaint: str) -> None:
    """Guards benchmarks of many methods against a complaint that does not say which of them it is about."""
    with pytest.raises(ValueError, match=f"method '{spec}': {complaint}"):
        Method.parse(spec)


def test_a_method_takes_what_it_can_use_from_the_defaults() -> None:
    """Guards the options of `paradraft bench`: a tree that ngram cannot draft must not make it another method."""
    defaults = Speculation(draft="some", k=3, verify="rejection", tree=Tree(budget=6), lengths="expected")
    assert Method.parse("pard:k=5", defaults).speculation == Speculation(
        drafter="pard", draft="some", k=5, verify="rejection", tree=Tree(budget=6), lengths="expected"
    )
    ngram = Speculation(drafter="ngram", k=3, verify="rejection", lengths="expected")
    assert Method.parse("ngram", defaults).speculation == ngram
    assert Method.parse("ar", defaults).speculation == Speculation(lengths="fixed")
    lookahead = Speculation(drafter="lookahead:window=5", lengths="expected")
    assert Method.parse("lookahead:window=5", defaults).speculation == lookahead
    vllm = Speculation(drafter="ngram", k=3, lengths="fixed")
    assert Method.parse("vllm-ngram", defaults).speculation == vllm


def test_a_method_drafts_all_its_tokens_unless_it_says_otherwise() -> None:
    """Guards figures that are compared with those of other runs, and what `paradraft plan` reads: K is K."""
    for defaults in (Speculation(), Speculation(lengths="auto", k=3)):
        for spec in ("pard", "ngram:k=4", "lookahead", "pard:tree=6", "ngram:lengths=auto"):
            assert Method.parse(spec, defaults).settings["lengths"] == "fixed"
    assert Method.parse("ngram:lengths=expected").settings["lengths"] == "expected"


@pytest.mark.parametrize(
    ("settings", "is_exact", "lengths"),
    [
        ({"drafter": "ngram"}, True, "expected"),
        ({"drafter": "ngram", "k": 3}, True, "expected"),
        ({"drafter": "lookahead"}, True, "expected"),
        ({"drafter": "pard", "tree": Tree(budget=6)}, True, "expected"),
        ({"drafter": "ngram"}, False, "fixed"),
        ({"drafter": "ngram", "verify": "rejection"}, True, "fixed"),
        ({"drafter": "ngram", "verify": "typical:epsilon=0.1:delta=0.3"}, True, "fixed"),
        ({"drafter": "pard", "gamma": 4}, True, "fixed"),
        ({"drafter": "pard", "gamma": "auto"}, True, "fixed"),
        ({"drafter": "ngram", "lengths": "heuristic"}, True, "heuristic"),
        ({"drafter": "ngram", "lengths": "expected", "verify": "rejection"}, False, "expected"),
    ],
)
def test_what_pays_is_drafted_by_default_where_that_changes_no_text(
    settings: dict[str, Any], is_exact: bool, lengths: str
) -> None:
    """Guards the speed of whoever says nothing, and the seed: lengths that depend on times must not decide a text."""
    speculation = Speculation(**settings)
    assert speculation.settled(drafts=True, is_exact=is_exact) == replace(speculation, lengths=lengths)
    assert speculation.settled(drafts=False, is_exact=True).lengths in ("fixed", speculation.lengths)


@pytest.mark.parametrize(("dtype", "lengths"), [("float32", "expected"), ("float64", "fixed")])
def test_an_engine_says_which_lengths_it_drafts(family: Path, dtype: str, lengths: str) -> None:
    """Guards the default on its way: passes in C++ (float32) are the same to the last bit at any width, torch's are
    not; and what is asked for is left alone."""
    target = str(family / "target")
    assert load(target, drafter="ngram", dtype=dtype).speculation.lengths == lengths
    assert load(target, drafter="ngram", dtype=dtype, lengths="heuristic").speculation.lengths == "heuristic"
    assert load(target, drafter="none", dtype=dtype).speculation.lengths == "fixed"


def test_a_benchmark_file_says_of_a_method_what_it_has() -> None:
    """Guards the keys of benchmark files, which tables, plans and older files go by."""
    found = Method.parse("pard:tree=6:batch=2", Speculation(draft="some"), dtype="float64").settings
    assert found == {
        "dtype": "float64", "batch": 2, "k": 8, "verify": "match", "lengths": "fixed", "tree": 6, "draft": "some",
        "options": {"draft_window": None},
    }  # fmt: skip
    assert Method.parse("hf-assisted").settings == {
        "dtype": "float32", "batch": 1, "k": 8, "draft": None, "confidence": 0.4,
    }  # fmt: skip


def test_what_does_not_fit_together_is_said_before_loading(tmp_path: Path) -> None:
    """Guards minutes of loading whose end is a mistake that names alone show."""
    target = str(tmp_path / "missing")
    for settings, complaint in (
        ({"drafter": "ngram", "tree": Tree(budget=3)}, "this drafter drafts chains only: leave the tree out"),
        ({"drafter": "ngram", "draft": "some"}, "takes no draft model"),
        ({"drafter": "pard"}, "needs a draft model"),
        ({"drafter": "pard", "draft": "shape:tiny-target"}, "random weights"),
    ):
        with pytest.raises(ValueError, match=complaint):
            Speculation(**settings).check_models(target)
        with pytest.raises(ValueError, match=complaint):
            load(target, **settings)
    Speculation(drafter="pard", draft="some", tree=ASIDE).check_models(target)


def test_a_tree_must_be_one_that_the_drafter_can_draft() -> None:
    """Guards drafters whose best tokens alone branch: other paths would stay empty in every round."""
    fitting = ((None, NgramDrafter), (DEEP, AutoregressiveDrafter), (Tree(budget=4), AutoregressiveDrafter))
    for tree, drafter in (*fitting, (ASIDE, PardDrafter)):
        Speculation(tree=tree).check_drafter(drafter)
    with pytest.raises(ValueError, match="chains only"):
        Speculation(tree=DEEP).check_drafter(NgramDrafter)
    with pytest.raises(ValueError, match=r"tree path \(1, 0\): this drafter branches from its best tokens only"):
        Speculation(tree=ASIDE).check_drafter(AutoregressiveDrafter)


def test_a_tree_of_its_own_is_the_drafters() -> None:
    """Guards drafters whose settings say how large their trees are against other sizes: passes are wide enough for the
    tree, K is its depth, and a tree that is asked for beside it is refused. By name, and of a drafter built by hand."""
    by_name = Speculation(drafter="lookahead:window=20:ngram=6", k=3)
    own = Tree(budget=27 * 5, max_depth=24)
    assert (by_name.tree, by_name.k, by_name.nodes, by_name.depth, by_name.pass_width) == (own, 24, 135, 24, 136)
    drafter = LookaheadDrafter(Config(window=20, ngram=6))
    by_hand = Speculation(k=3, lengths="heuristic").fitted_to(drafter)
    assert by_hand == Speculation(k=24, tree=own, lengths="heuristic") == by_hand.fitted_to(drafter)
    assert by_name.fitted_to(drafter) == by_name
    assert Speculation(k=3).fitted_to(NgramDrafter(ngram.Config())) == Speculation(k=3)
    complaint = "^this drafter's own settings say how large its trees are: leave the tree out$"
    for tree in (Tree(budget=135), DEEP):
        with pytest.raises(ValueError, match=complaint):
            Speculation(drafter="lookahead:window=20:ngram=6", tree=tree)
        with pytest.raises(ValueError, match=complaint):
            Speculation(tree=tree).fitted_to(drafter)
    with pytest.raises(ValueError, match=r"^a tree of 1485 nodes: use at most 1024$"):
        Speculation(drafter="lookahead:window=128:ngram=12")


def test_a_drafter_that_learns_from_draws_needs_the_rule_that_tells_them(family: Path) -> None:
    """Guards a drafter that would learn nothing, and be slow without a word, under the rejection rule."""
    complaint = "^verify='rejection': .*: use verify='match'$"
    with pytest.raises(ValueError, match=complaint):
        load("/no/such/model", drafter="lookahead", verify="rejection")
    target = load(str(family / "target"), runtime=Runtime(compiled=False)).target
    with pytest.raises(ValueError, match=complaint):
        Engine(target, LookaheadDrafter(Config()), Speculation(verify="rejection"))


def test_sizes() -> None:
    """Guards the room of passes: a round is read whole while the next is drafted, a tree with its root."""
    found = [
        (asked.nodes, asked.depth, asked.pass_width)
        for asked in (
            Speculation(k=np.int64(4)),
            Speculation(k=100),
            Speculation(k=4, tree=Tree(budget=3)),
            Speculation(k=4, tree=Tree(budget=200)),
            Speculation(k=4, tree=DEEP),
        )
    ]
    assert found == [(4, 4, 64), (100, 100, 202), (3, 3, 64), (200, 4, 201), (3, 3, 64)]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tree": 4}, "tree=4: use a Tree, such as Tree(budget=12)"),
        ({"tree": [(0,)]}, "tree=[(0,)]: use a Tree, such as Tree(budget=12)"),
        ({"verify": ["match"]}, "verify=['match']: use a name"),
        ({"lengths": {}}, "lengths={}: use a name"),
        ({"drafter": None}, "drafter=None: use a name"),
    ],
)
def test_settings_of_the_wrong_type_are_said(settings: dict[str, Any], complaint: str) -> None:
    """Guards mistakes in code against an AttributeError far from them."""
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}$"):
        Speculation(**settings)


def test_names_are_those_of_what_is_there() -> None:
    """Guards the names that are checked, and listed in the help, without importing what has them."""
    assert LENGTHS == (AUTO, *POLICIES)
