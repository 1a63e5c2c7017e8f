"""Figures of the documentation about losses, weights and refreshes, beside the files of the runs."""

from __future__ import annotations

from typing import Any

import yaml

from tests.support.figures import ROOT, raw, table

CELLS = {
    "`forward_kl`, as before": ("1", "control"),
    "`forward_kl`, `valid_prefix`": ("1", "prefix"),
    "`forward_kl`, `expected_length:by=text:floor=0.5`": ("1", "kl-length"),
    "`cross_entropy`, the same": ("1", "dpace"),
    "`forward_kl`, `chain`, `hard_share: 0.1`": ("1", "cat"),
    "`acceptance`": ("1", "alpha"),
    "LK's mixture": ("1", "hybrid"),
    "HASS's ten tokens": ("1", "top_k"),
    "`forward_kl`, in other batches": ("1", "other-batches"),
    "`forward_kl`, `valid_prefix`, both in other batches": ("2", "prefix"),
}
"""Rows of the losses' table, with the seed and the name in its file."""


def test_what_losses_and_weights_win_is_as_measured() -> None:
    """Guards the table of `docs/training.md`, the two losses that it leaves out, and what weights cost."""
    file = raw("weightings-smollm2-135m-dflash_epyc-avx512-1core_2026-11-30")
    rows = []
    for label, (seed, name) in CELLS.items():
        cells = []
        for temperature in ("0", "0.8"):
            own, control = (file["lengths"][seed][temperature][each] for each in (name, "control"))
            gain, error = (100 * own[each] / control["tokens_per_pass"] for each in ("gain", "gain_standard_error"))
            shown = f"{gain:+.1f}" if abs(gain) >= 0.05 else "0.0"
            cells.append(f"{own['tokens_per_pass']:.2f}" if name == "control" else f"{shown} ± {error:.1f} %")
        rows.append([label, *cells])
    shown = table("docs/training.md", "60 steps with", "T = 0", "T = 0.8")
    assert shown == rows, "\n".join(f"| {' | '.join(row)} |" for row in rows)
    page = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    (before, length), (_, apart) = (
        [f"{line['acceptance_length']:.2f}" for line in file["trainings"]["1"][name]["evaluations"]]
        for name in ("length", "tv")
    )
    assert f"({length} tokens per pass on 8 held-out prompts, {before} before training)" in page
    assert f"`total_variation` ({apart})" in page
    cases = {
        each["case"]: each
        for each in raw("training-smollm2-dflash-weighting-rates_epyc-avx512-1core_2026-11-30")["cases"]
    }
    first, later = (
        {name: case[epoch]["rows_per_cpu_s"] / cases["now"][epoch]["rows_per_cpu_s"] for name, case in cases.items()}
        for epoch in ("first epoch", "second epoch")
    )
    assert f"{first['length']:.2f} times as many in the first epoch and {later['length']:.2f} times in later" in page
    assert all(0.99 < epoch["prefix"] < 1.01 for epoch in (first, later))


def test_what_adapting_wins_is_as_measured() -> None:
    """Guards the two tables of `docs/training.md`, and the shares of the gap."""
    served = raw("adapting-smollm2-135m-dflash-chat_epyc-avx512-2cores_2026-11-30")
    lengths = raw("adapting-lengths-smollm2-135m-dflash-chat_epyc-avx512-1core_2026-11-30")["temperatures"]
    page = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())

    def cells(name: str, of: Any = lengths) -> list[str]:
        return [f"{of[temperature]['0'][name]['tokens_per_pass']:.2f}" for temperature in ("0", "0.8")]

    seen = [str(refresh["requests"]) for refresh in served["refreshes"]]
    rows = table("docs/training.md", "drafter", "requests answered", "T = 0", "T = 0.8")
    assert rows == [
        ["trained on code", "0", *cells("code")],
        ["after one refresh", seen[0], *cells("after_1")],
        ["after two", seen[1], *cells("after_2")],
        ["after three", seen[2], *cells("after_3")],
        ["trained on chats, as many steps from random weights", "", *cells("chat")],
    ]
    shares = [
        [
            lengths[temperature]["0"][name]["gain"] / lengths[temperature]["0"]["chat"]["gain"]
            for temperature in ("0", "0.8")
        ]
        for name in ("after_2", "after_3")
    ]
    assert (
        f"closes {shares[0][0]:.0%} of the gap".replace("%", " %") in page
        and f"and {shares[0][1]:.0%} at 0.8".replace("%", " %") in page
    )
    assert min(shares[1]) > 1
    late_s = served["refreshes"][2]["seconds"] - served["answered_s"]
    assert f"took {served['answered_s'] / 60:.0f} minutes" in page and f"{late_s:.0f} seconds later" in page
    rates = raw("adapting-rates-smollm2-135m-dflash_epyc-avx512-1core_2026-11-30")["drafters"]
    falls = {
        name: {
            rate: each["before"]["held_out_loss"] - each["after"]["held_out_loss"] for rate, each in rates[name].items()
        }
        for name in rates
    }
    code, mixed = falls.values()
    before, after = (
        [rates["300 steps on code, maths and chat"]["0.5"][when][key] for key in ("held_out_loss", "acceptance_length")]
        for when in ("before", "after")
    )
    lengths_of_both = f"{before[1]:.3f} to {after[1]:.3f},"
    words = (
        f"the loss from {before[0]:.3f} to {after[0]:.3f}, but the length of 32 greedy answers from {lengths_of_both}"
    )
    assert words in " ".join((ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").split())
    assert f"by {code['1'] / code['0.5'] - 1:.0%} more".replace("%", " %") in page and max(code, key=code.get) == "1"
    assert mixed["0.5"] > 5 * mixed["1"]
    tuned = raw("adapting-lengths-smollm2-135m-tuned-dflash_epyc-avx512-1core_2026-11-30")
    seen = [
        str(each["requests"])
        for each in raw("adapting-smollm2-135m-tuned-dflash_epyc-avx512-2cores_2026-11-30")["refreshes"]
    ]
    assert table("docs/training.md", "target", "drafter", "T = 0", "T = 0.8") == [
        ["before", "of 300 steps", *cells("yesterday", tuned["base"]["temperatures"])],
        ["tuned", "the same", *cells("yesterday", tuned["temperatures"])],
        ["tuned", f"after one refresh, {seen[0]} requests", *cells("refresh-0001", tuned["temperatures"])],
        ["tuned", f"after two, {seen[1]} requests", *cells("refresh-0002", tuned["temperatures"])],
    ]


def test_what_adapting_to_another_language_wins_is_as_measured() -> None:
    """Guards the table of requests in Spanish, what answers lose meanwhile, and where drafts of a log begin."""
    page = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    lengths = raw("adapting-lengths-smollm2-135m-dflash-spanish_xeon-avx512-1core_2026-11-30")["temperatures"]
    served = raw("adapting-smollm2-135m-dflash-spanish_xeon-avx512-2cores_2026-11-30")
    drafters = ["chat", "after_1", "after_2", "after_3", "spanish"]
    means = {name: [of[name]["tokens_per_pass"] for of in lengths.values()] for name in drafters}
    shown = table("docs/training.md", "drafter, requests in Spanish", "requests answered", "T = 0", "T = 0.8")
    assert [row[2:] for row in shown] == [[f"{mean:.2f}" for mean in means[name]] for name in drafters]
    assert [row[1] for row in shown] == ["0", *(str(each["requests"]) for each in served["refreshes"]), ""]
    triples = zip(means["chat"], means["after_3"], means["spanish"], strict=True)
    closed = [f"{(now - before) / (own - before):.0%}".replace("%", " %") for before, now, own in triples]
    assert f"close {closed[0]} of the gap at temperature 0 and {closed[1]} at 0.8" in page
    assert f"in {served['answered_s'] / 60:.0f} minutes" in page
    speed = raw("adapting-speed-smollm2-135m-dflash_xeon-avx512-2cores_2026-11-30")["session_is_nice"]
    seconds = {
        nice: [sum(turn["seconds"] for turn in turns if turn["is_training"] is on) for on in (True, False)]
        for nice, turns in speed.items()
    }
    slower = {nice: f"{on / off:.2f} times as long" for nice, (on, off) in seconds.items()}
    assert f"takes {slower['yes']}" in page and f"answers took {slower['no']}" in page
    anchors = raw("anchors-smollm2-135m-dflash_xeon-avx512-1core_2026-11-30")["temperatures"]
    by_places = {name: [of[name]["tokens_per_pass"] for of in anchors.values()] for name in anchors["0"]}
    for places in ("rounds", "refused"):
        pairs = zip(by_places[places], by_places["all"], strict=True)
        assert all(0.98 < some / every < 1.02 for some, every in pairs)
    (cold, warm), (cold_before, warm_before) = by_places["all"], by_places["before"]
    assert f"drafts {cold:.2f} tokens per pass" in page
    assert f"{warm:.2f} at temperature 0.8, and {cold_before:.2f} and {warm_before:.2f} before" in page


TASKS = ("humaneval", "gsm8k", "chat")
HEADS = ("HumanEval", "GSM8K", "chat")


def cells_of(lengths: dict[str, Any], control: str, name: str) -> list[str]:
    """A drafter's row of `HEADS` at T = 0 and 0.8: the control's tokens per pass, or what another one gains on it."""
    cells = []
    for task in TASKS:
        shown = []
        for temperature in ("0", "0.8"):
            own, of = lengths[task][temperature][name], lengths[task][temperature][control]["tokens_per_pass"]
            gain, error = (100 * own[key] / of for key in ("gain", "gain_standard_error"))
            shown.append(f"{of:.2f}" if name == control else f"{gain:+.1f} ± {error:.1f} %")
        cells.append(" / ".join(shown))
    return cells


def test_what_valid_prefix_wins_from_random_weights_is_as_measured() -> None:
    """Guards the table of `docs/training.md`, and the templates that have it because of these figures."""
    drafters = raw("weightings-from-random-smollm2-135m_xeon-avx512-1core_2026-11-30")["drafters"]
    other = raw("weightings-from-random-seeds-smollm2-135m_xeon-avx512-1core_2026-12-01")
    runs = {"`dflash`, first run": drafters["dflash"], "`eagle_parallel`": drafters["eagle_parallel"]}
    runs |= {f"`dflash`, {run} run": other["seeds"][seed] for run, seed in (("second", "2"), ("third", "3"))}
    rows = []
    for run, file in runs.items():
        for name, label in (("control", "`none`"), ("prefix", "`valid_prefix`")):
            rows.append([f"{run}, {label}", *cells_of(file["lengths"], "control", name)])
    assert table("docs/training.md", "120 steps from random weights", *HEADS) == rows
    for drafter in drafters:
        template = ROOT / "src" / "paradraft" / "recipes" / drafter / "generic.yaml"
        assert yaml.safe_load(template.read_text(encoding="utf-8"))["weighting"] == "valid_prefix"
    rejected = [seed["gsm8k"]["0.8"] for seed in other["rejection"].values()]
    shares = [
        [100 * each["prefix"][key] / each["control"]["tokens_per_pass"] for key in ("gain", "gain_standard_error")]
        for each in rejected
    ]
    gains = [f"{gain:.1f} ± {error:.1f} %" for gain, error in shares]
    page = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    assert f"the three runs of `dflash` win {gains[0]}, {gains[1]} and {gains[2]} on GSM8K at T = 0.8" in page


def test_what_a_gated_change_wins_is_as_measured() -> None:
    """Guards the table of `docs/drafters.md`, and what the change costs while it learns."""
    file = raw("ppd-change-smollm2-135m_xeon-avx512-1core_2026-12-01")
    rows = [
        [label, *cells_of(file["lengths"], "none", name)]
        for label, name in (("embeddings alone", "none"), ("`change_rank: 16`", "change"))
    ]
    assert table("docs/drafters.md", "`ppd` of SmolLM2", *HEADS) == rows
    page = " ".join((ROOT / "docs" / "drafters.md").read_text(encoding="utf-8").split())
    rates = file["rows_per_s"]
    assert f"it learnt {1 - rates['change'] / rates['none']:.0%}".replace("%", " % fewer rows a second") in page


def test_what_specialists_win_is_as_measured() -> None:
    """Guards the table of drafters for one kind of questions, and the sentence that draws the conclusion."""
    lengths = raw("drafter-domains-smollm2-135m-dflash_xeon-avx512-1core_2026-11-30")["lengths"]
    rows = table("docs/training.md", "trained on", *HEADS)
    found = {
        name: [[lengths[task][temperature][name]["tokens_per_pass"] for temperature in ("0", "0.8")] for task in TASKS]
        for name in ("mixed", "code", "maths", "chat", "merged")
    }
    assert [row[1:] for row in rows] == [
        [f"{greedy:.2f} / {sampled:.2f}" for greedy, sampled in each] for each in found.values()
    ]
    page = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    greedy = {name: [each[0] for each in rows] for name, rows in found.items()}
    own = {
        name: greedy[name][place] / greedy["mixed"][place] - 1 for place, name in enumerate(("code", "maths", "chat"))
    }
    words = (
        "A specialist drafts {code:.0%} more code and {maths:.0%} more maths than the drafter of all three, but only "
    )
    assert f"{words}{{chat:.0%}} more chat".format(**own).replace("%", " %") in page
    for place, name in enumerate(own):
        others = [number for number in range(3) if number != place]
        assert all(greedy[name][number] < greedy["mixed"][number] for number in others)
    assert all(merged < mixed for merged, mixed in zip(greedy["merged"], greedy["mixed"], strict=True))


def test_what_valid_prefix_wins_is_as_measured() -> None:
    """Guards the table of three runs in `docs/training.md`."""
    seeds = raw("weightings-valid-prefix-smollm2-135m-dflash_epyc-avx512-1core_2026-11-30")["seeds"]
    rows = []
    for shape, nodes in (("chain", "0"), ("tree", "8")):
        for run, seed in zip(("first run", "second", "third"), seeds.values(), strict=True):
            both = [(seed[each][nodes]["prefix"], seed[each][nodes]["control"]) for each in ("0", "0.8", "1")]
            shares = [
                [100 * own[key] / control["tokens_per_pass"] for key in ("gain", "gain_standard_error")]
                for own, control in both
            ]
            rows.append([f"{shape}, {run}", *(f"{gain:+.1f} ± {error:.1f} %" for gain, error in shares)])
    assert table("docs/training.md", "`valid_prefix`", "T = 0", "T = 0.8", "T = 1") == rows
