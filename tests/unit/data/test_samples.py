from __future__ import annotations

import json
from pathlib import Path

import pytest

from paradraft.data.dataset import load_samples
from paradraft.data.samples import Sample, hold_out
from tests.conftest import tiny_tokenizer


def samples_of(*sizes: int) -> list[Sample]:
    """Groups of so many samples, each sample with a token of its own."""
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    return [Sample(tokens=[place, 0], is_label=[True] * 2, group=group) for place, group in enumerate(groups)]


def groups_of(samples: list[Sample]) -> list[int]:
    return [sample.group for sample in samples]


def test_groups_are_never_on_both_sides() -> None:
    """Guards the evidence: a drafter that knows a text, or other answers to the prompt, looks better than it is."""
    samples = samples_of(*[8] * 100)
    learnt, held_out = hold_out(samples, None)
    assert len(held_out) == 800 // 20 and len(learnt) == 800 - 5 * 8
    assert groups_of(held_out[:5]) == [10, 30, 50, 70, 90] and set(groups_of(held_out)).isdisjoint(groups_of(learnt))
    assert [sample.tokens[0] % 8 for sample in held_out[:5]] == [0, 1, 2, 3, 4], "not all are beginnings"
    assert hold_out(samples, None) == (learnt, held_out)


def test_samples_of_their_own_groups_are_spread_over_the_data() -> None:
    """Guards against losing more than what is measured on, and against measuring on one file."""
    samples = samples_of(*[1] * 60)
    learnt, held_out = hold_out(samples, None)
    assert groups_of(held_out) == [10, 30, 50] and groups_of(learnt) == [n for n in range(60) if n not in (10, 30, 50)]
    assert len(hold_out(samples, 59)[0]) == 1
    with pytest.raises(ValueError, match="held_out=60 leaves nothing to learn of 60 samples: hold out fewer"):
        hold_out(samples, 60)
    assert hold_out(samples, 0) == (samples, [])
    assert hold_out(samples[:19], None) == (samples[:19], [])


@pytest.mark.parametrize("sizes", [(60,), (30, 30), (50, 1, 1, 8)])
def test_few_groups(sizes: tuple[int, ...]) -> None:
    """Guards data of one long text, or of a few, against dropping half of it, and against measuring on nothing."""
    samples = samples_of(*sizes)
    for wanted in (None, 3, 30):
        learnt, held_out = hold_out(samples, wanted)
        assert len(held_out) == (wanted or 3) and len(learnt) == 60 - len(held_out)


def test_a_large_text_is_learnt() -> None:
    """Guards against dropping most of the data to measure on a piece of it."""
    samples = samples_of(3, 500, *[1] * 60)
    learnt, held_out = hold_out(samples, 20)
    assert len(held_out) == 20 and groups_of(learnt).count(1) == 500


def test_what_makes_a_group(tmp_path: Path) -> None:
    """Guards against leaks between records of one prompt, pieces of one record, and turns of one conversation."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last else 'z' }}{% endfor %}"
    )
    talk = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    records = [
        {"prompt": "ab", "response": "c"}, {"prompt": "ab", "response": "dddd"}, {"prompt": "b", "response": "c"},
        {"text": "abcabc"}, {"text": "abcabc"}, {"text": "abcabd"}, {"messages": talk},
        {"messages": [*talk[:1], {"role": "assistant", "content": "x"}]},
    ]  # fmt: skip
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    with pytest.warns(UserWarning, match="1 pieces begin in the middle"):
        groups = groups_of(load_samples([file], tokenizer, max_length=4, long="split"))
    assert len(groups) > len(records)
    names = {group: str(number) for number, group in enumerate(dict.fromkeys(groups))}
    assert "".join(names[group] for group in groups) == "000" + "1" + "2222" + "33" + "444"
