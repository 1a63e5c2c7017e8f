"""The tokens that a run learns are the same when it goes on, whatever day it is."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from paradraft.data.dataset import load_samples
from paradraft.data.samples import Sample
from paradraft.train.run import launch, provenance
from paradraft.train.run.provenance import difference, learnt_of
from tests.conftest import tiny_model, tiny_tokenizer
from tests.support.jsonl import write_lines
from tests.support.training import train_pard
from tests.unit.train.run.test_trainer import StoppedError, recipe_for, stop_after

TALK = "{% for m in messages %}{{ '+' if m.role == 'user' else '' }}{{ m.content }}{% endfor %}"
LLAMA = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}{% set date_string = strftime_now('%d%b%Y') %}"
    "{% else %}{% set date_string = '26Jul2024' %}{% endif %}{% endif %}{{ date_string }}" + TALK
)
"""Llama 3.2's rule."""
MISTRAL = "{{ strftime_now('%Y') }}{% set today = strftime_now('%d') %}{{ today }}" + TALK
"""A template that asks the clock and takes no date."""
MONDAY, TUESDAY = date(2026, 11, 23), date(2026, 11, 24)


class Clock(date):
    """Stands for the day that it is."""

    now = MONDAY

    @classmethod
    def today(cls) -> date:
        return cls.now


def data_of(folder: Path) -> Path:
    file = folder / "data.jsonl"
    talk = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "helloworld"}]
    write_lines(file, [{"messages": talk}] * 4)
    return file


def text_of(folder: Path, template: str, **settings: Any) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    samples = load_samples([data_of(folder)], tokenizer, max_length=99, **settings)
    return tokenizer.decode(list(samples[0].tokens)).partition("+")[0]


def model_of(folder: Path, template: str) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tiny_model(1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("template", "given", "written"),
    [
        (LLAMA, {"day": MONDAY}, "23Nov2026"),
        (LLAMA, {"day": MONDAY, "date_string": "1May2025"}, "1May2025"),
        (LLAMA, {"day": MONDAY, "chat_template_kwargs": {"date_string": "x"}}, "x"),
        (MISTRAL, {"day": MONDAY}, "202623"),
        (MISTRAL, {"day": MONDAY, "date_string": "1"}, "11"),
        (MISTRAL, {"date_string": "1"}, "11"),
        (TALK, {"day": MONDAY}, ""),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_the_template_writes_as_the_date(
    tmp_path: Path, template: str, given: dict[str, Any], written: str
) -> None:
    """Guards `date_string`, and the day on which a run began: the tokens of both are the same on every day."""
    assert text_of(tmp_path, template, **given) == written


def test_a_date_that_is_not_written_is_named(tmp_path: Path) -> None:
    """Guards against a setting that does nothing, and against two dates."""
    with pytest.warns(UserWarning, match="date_string=1 is ignored: the model's chat template writes no date"):
        text_of(tmp_path, TALK, date_string="1")
    (tmp_path / "some.txt").write_text("abc")
    with pytest.warns(UserWarning, match="date_string=1 is ignored: there are no conversations in the data"):
        load_samples([tmp_path / "some.txt"], tiny_tokenizer(), max_length=9, date_string="1")
    with pytest.raises(ValueError, match="date_string: chat_template_kwargs sets it too, give it once"):
        recipe_for(tmp_path, tmp_path, date_string="1", chat_template_kwargs={"date_string": "1"})
    with pytest.raises(ValueError, match="'strftime_now' is not for you to set"):
        text_of(tmp_path, LLAMA, chat_template_kwargs={"strftime_now": "1"})


@pytest.mark.parametrize("template", [LLAMA, MISTRAL])
def test_a_run_that_goes_on_tomorrow_learns_the_same(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """Guards runs of several days: Llama 3.2's template writes the date into every sample, so a run that went on the
    next day learnt other tokens. It keeps the day on which it began, and the record says which that was."""
    monkeypatch.setattr(launch, "date", Clock)
    model = model_of(tmp_path, template)
    given = {"model": str(model), "data": [data_of(tmp_path)], "max_length": 64}
    losses: dict[str, list[float]] = {}
    for name, days in (("whole", [MONDAY]), ("over night", [MONDAY, TUESDAY]), ("tuesday", [TUESDAY])):
        recipe = recipe_for(family, tmp_path, out=tmp_path / name, **given)
        Clock.now = days[0]
        if len(days) > 1:
            with pytest.raises(StoppedError):
                train_pard(recipe, stop_after(3))
        Clock.now = days[-1]
        losses[name] = []
        train_pard(recipe, lambda report, name=name: losses[name].append(report.loss))
    assert losses["over night"] == losses["whole"][2:]
    assert losses["tuesday"] != losses["whole"], "control: the day does make other tokens"
    assert '"began": "2026-11-23"' in (tmp_path / "over night" / "train_command.json").read_text()


def test_other_tokens_are_refused(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one run on two data sets: what reads the data may change though recipe and files do not."""
    recipe = recipe_for(family, tmp_path)
    with pytest.raises(StoppedError):
        train_pard(recipe, stop_after(3))
    real = learnt_of
    monkeypatch.setattr(
        "paradraft.train.run.setup.learnt_of",
        lambda samples, tokenizer: replace(real(samples[:-1], tokenizer), transformers="9.9"),
    )
    with pytest.raises(
        ValueError, match=r"began with other training tokens, 6 samples of \d+ tokens .* 5 samples.*transformers was 5"
    ):
        train_pard(recipe, lambda report: None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokenizer": "x", "chat_template": "x", "transformers": "x"}, "the model's tokenizer is another one"),
        ({"chat_template": "x", "transformers": "x"}, "the model's chat template is another one"),
        ({"transformers": "x"}, "transformers was 1 and is x"),
        ({}, "a data set or model on Hugging Face must have changed"),
    ],
)
def test_the_likeliest_reason_is_told(change: dict[str, str], why: str) -> None:
    """Guards the one line: it says what to bring back. Where the tokens are the same, nothing else matters."""
    parts = {"chat_template": "a", "tokenizer": "b", "transformers": "1"}
    before = provenance.Learnt(samples=3, tokens=9, sha256="d", **parts)
    found = difference(before, provenance.Learnt(samples=2, tokens=8, sha256="e", **(parts | change)))
    assert found is not None and found.startswith("3 samples of 9 tokens were learnt, and now there are 2 samples of 8")
    assert found.endswith(why)
    assert difference(before, replace(before, **change)) is None


def test_the_digest_sees_tokens_labels_and_borders() -> None:
    """Guards the digest: each of these is another thing to learn."""
    samples = [
        [Sample(tokens=[1, 2, 3], is_label=[True] * 3)],
        [Sample(tokens=[1, 2, 4], is_label=[True] * 3)],
        [Sample(tokens=[1, 2, 3], is_label=[False, True, True])],
        [Sample(tokens=[1, 2], is_label=[True] * 2), Sample(tokens=[3], is_label=[True])],
    ]
    found = [learnt_of(some, tiny_tokenizer()).sha256 for some in samples]
    assert len(set(found)) == len(samples)
