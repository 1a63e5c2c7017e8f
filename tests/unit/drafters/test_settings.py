"""The settings of a drafter, written after its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Optional

import pytest

from paradraft import drafters
from paradraft.bench.setup import prepare
from paradraft.bench.spec import SETTINGS, Benchmark, Method
from paradraft.drafters import drafter_config, drafter_names, drafter_settings, setting_names
from paradraft.engine.loader import load, resolve
from paradraft.export.engines import vllm_config
from paradraft.plan.acceptance import acceptances
from paradraft.sampling_params import GREEDY
from paradraft.sources.load_plan import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Everything:
    draft: str
    whole: int = 1
    share: float = 0.5
    is_on: bool = False
    name: str = "a"
    kind: Literal["wide", "deep"] = "wide"
    limit: int | None = None
    other: Optional[float] = 2.0  # noqa: UP045  # both ways to write it


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    module, find = SimpleNamespace(Config=Everything), drafters.find_module
    monkeypatch.setattr(drafters, "drafter_names", lambda: ["everything", "ngram"])
    monkeypatch.setattr(
        drafters, "find_module", lambda name, *where: module if name == "everything" else find(name, *where)
    )


@pytest.mark.usefixtures("everything")
def test_values_have_the_types_of_the_fields() -> None:
    """Guards settings that arrive as texts, and colons inside a value."""
    text = "everything:whole=-3:share=1e-3:is_on=True:name=shape:x:kind=deep:limit=7:other=none"
    found = drafter_config(text, "org/model:8b")
    assert found == Everything(
        draft="org/model:8b", whole=-3, share=1e-3, is_on=True, name="shape:x", kind="deep", limit=7, other=None
    )
    assert type(found.share) is float and found.is_on is True
    assert drafter_config("everything").draft == "pocket"
    assert drafter_config("everything:limit=none:name=none") == Everything(draft="pocket", name="none")


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("whole=1.5", "drafter 'everything': whole='1.5': use a whole number"),
        ("whole=", "whole='': use a whole number"),
        ("share=much", "share='much': use a number"),
        ("is_on=1", "is_on='1': use true or false"),
        ("kind=tall", "kind='tall': use wide or deep"),
        ("limit=x", "limit='x': use a whole number or none"),
        (
            "size=3",
            "'size=3' is no setting=value of it; its settings are whole, share, is_on, .*, other, each",
        ),
        ("whole", "'whole' is no setting=value of it; its settings are whole"),
        ("whole=1:whole=2", "'whole=2' is no setting=value of it; its settings are .*, each at most once"),
        ("draft=x", "'draft=x' is no setting=value of it; .*; name the draft model by --draft, or draft="),
    ],
)
def test_wrong_settings_are_named(settings: str, complaint: str) -> None:
    """Guards against a setting that is misspelt and silently ignored."""
    with pytest.raises(ValueError, match=complaint):
        drafter_config(f"everything:{settings}")


def test_a_drafter_without_settings_says_so() -> None:
    """Guards the list of known settings where it is empty."""
    with pytest.raises(ValueError, match="drafter 'none': 'k=2' is no setting=value of it; it has no settings"):
        drafter_config("none:k=2")


def test_settings_reach_the_drafter(family: Path) -> None:
    """Guards `load`: the setting counts, its own check too, and what is wrong is said before the target is loaded."""
    target = str(family / "target")
    assert load(target, drafter="ngram:max_ngram=5", lengths="fixed").drafter.config.max_ngram == 5
    for drafter, complaint in (("ngram:max_ngram=0", "max_ngram=0: use at least 1"), ("ngram:n=2", "max_ngram")):
        with pytest.raises(ValueError, match=complaint):
            load("/no/such/model", drafter=drafter, lengths="fixed")


def test_settings_are_part_of_a_method(family: Path) -> None:
    """Guards benchmarks of one drafter with several settings: each has its own, and a file says which."""
    five, plain = Method.parse("ngram:k=4:max_ngram=5"), Method.parse("ngram:k=4")
    asked = five.speculation
    assert five != plain and (asked.k, asked.drafter, plain.speculation.drafter) == (4, "ngram:max_ngram=5", "ngram")
    assert five.settings["options"] == {"max_ngram": 5} and plain.settings["options"] == {"max_ngram": 3}
    benchmark = Benchmark(
        target=str(family / "target"), methods=[five], sampling=GREEDY, runtime=load.__kwdefaults__["runtime"], runs=1
    )
    plans = {five: resolve(Checkpoint.find(benchmark.target), [asked], benchmark.runtime)}
    assert prepare(benchmark, plans, lambda text: None).engines[five].drafter.config.max_ngram == 5
    with pytest.raises(ValueError, match=r"settings of ngram are .*lengths, max_ngram, each at most once"):
        Method.parse("ngram:n=4")
    with pytest.raises(ValueError, match="max_ngram='x': use a whole number"):
        Method.parse("ngram:max_ngram=x")
    assert Method.parse("pard:k=4:draft=shape:llama-3.2-1b").speculation.draft == "shape:llama-3.2-1b"


def test_settings_are_what_a_plan_is_about() -> None:
    """Guards plans against the acceptance of a drafter with other settings; files of before have none."""
    figures = {"method": "ngram", "verify": "match", "lengths": "fixed", "k": 1, "tree": None, "dtype": "float32"}
    figures |= {"acceptance_length": 1.5, "accepted_share_of_rounds": [0.5]}
    methods = {"old": figures, "five": figures | {"options": {"max_ngram": 5}}}
    report = {"methods": methods, "answers": {spec: {"tokens": [[1, 2, 3]]} for spec in methods}}
    for drafter, spec in (("ngram", "old"), ("ngram:max_ngram=3", "old"), ("ngram:max_ngram=5", "five")):
        (found,) = acceptances(report, "x", drafter=drafter, draft=None, verify="match", dtype="float32")
        assert found.spec == spec
    served = vllm_config({1: 4}, "ngram:max_ngram=5", "unused")
    assert served is not None and served["prompt_lookup_max"] == 5


@pytest.mark.parametrize("name", drafter_names())
def test_settings_do_not_collide_with_those_of_a_method(name: str) -> None:
    """Guards a new drafter against a setting that a method's spec has already, where it could not be reached; and each
    has a default, so that the name alone is enough."""
    assert not set(setting_names(name)) & set(SETTINGS)
    assert drafter_settings(name).keys() == set(setting_names(name))


def test_a_drafter_says_what_it_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards writers of drafters against a traceback: KeyError: 'return'."""
    module = SimpleNamespace(__name__="mine", Config=Everything, build=lambda config, target, runtime: None)
    monkeypatch.setattr(drafters, "drafter_names", lambda: ["mine"])
    monkeypatch.setattr(drafters, "find_module", lambda name, *where: module)
    with pytest.raises(ValueError, match=r"drafter .mine.: mine\.build does not say what it returns"):
        drafters.drafter_class("mine")
