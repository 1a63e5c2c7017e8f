"""The tables of benchmarks/README.md about files of benchmark scripts: each row is computed from its file."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from tests.support.figures import ROOT, Figures, methods, raw, table

RULES_FILE = "verification-rules-qwen2.5-coder-1.5b_epyc-avx512-2cores_2026-11-29"
RULES_FILES = {
    "T, rule of the texts": RULES_FILE,
    "pocket, PARD, K = 8: T, rule": "verification-rules-pocket-pard_epyc-avx2-2cores_2026-11-29",
    "pocket, draft model, K = 5: T, rule": "verification-rules-pocket-autoregressive_epyc-avx2-2cores_2026-11-29",
}


def compared_cells(one: Figures) -> list[str]:
    means = one["means_on_its_drafts"]
    rejection, block, gain = means["rejection"], means["block"], means["gain"]
    assert gain == pytest.approx(block - rejection)
    error, share = means["gain_standard_error"], 100 * gain / rejection
    return [f"{one['rounds']:,}", f"{rejection:.3f}", f"{block:.3f}", f"{gain:.3f} ± {error:.3f}", f"{share:.1f} %"]


@pytest.mark.parametrize("head", RULES_FILES)
def test_rules_on_the_same_drafts_are_as_measured(head: str) -> None:
    found = raw(RULES_FILES[head])["temperatures"]
    expected = [
        [f"{temperature}, {name}", *compared_cells(one)]
        for temperature, rules in found.items()
        for name, one in rules.items()
        if "means_on_its_drafts" in one
    ]
    columns = ("rounds", "tokens a pass, rejection", "tokens a pass, block", "difference", "gain")
    shown = table("benchmarks/README.md", head, *columns)
    assert shown == expected, "\n".join(f"| {' | '.join(row)} |" for row in expected)


def test_the_time_of_verdicts_is_as_measured() -> None:
    tasks = raw(RULES_FILE.replace("rules-", "rules-speed-"))["tasks"]
    expected = []
    for rule in ("match", "rejection", "block"):
        ones = [task["methods"][f"autoregressive:k=5:verify={rule}"] for task in tasks.values()]
        expected.append(
            [rule, *(f"{1000 * one['verify_s'] * one['acceptance_length'] / one['tokens']:.1f}" for one in ones)]
        )
    assert table("benchmarks/README.md", "ms of pass and verdict, T = 0.8", "HumanEval", "GSM8K") == expected


CONFIDENCE = {
    "plain": "plain",
    "best threshold of confidence": "best confidence",
    "best K of all texts (2)": "best fixed K",
    "best K of each text": "best K of each text",
    "survival by confidence": "survival by confidence",
    "survival by the margin of the drawn token": "survival by margin",
    "the text itself, as an oracle": "oracle",
}


def test_lengths_from_confidence_are_as_replayed() -> None:
    """Guards the reason for not building a policy, and its bounds: 2.4 % above counted shares, 7.3 % with an oracle."""
    found = raw("draft-confidence-qwen2.5-coder-1.5b_epyc-avx512-2cores_2026-11-28")["temperatures"]
    rates = [one["tokens_per_second"] for one in found.values()]
    rows = table("benchmarks/README.md", "tokens/s", "T = 0", "T = 0.8")
    assert rows == [[name, *(f"{rate[key]:.1f}" for rate in rates)] for name, key in CONFIDENCE.items()]
    assert all(rate["K of best fixed K"] == 2 for rate in rates)
    for best, most in (("survival by margin", 1.0245), ("oracle", 1.0735)):
        assert all(rate[best] / rate["best K of each text"] < most for rate in rates)
    depths = [depth for one in found.values() for depth in one["survival_by_depth"]]
    assert len(depths) == 16 and all(abs(depth["predicted"] - depth["counted"]) <= 0.015 for depth in depths)


BITS = {"Q4_K_M, stored": ("gguf", "auto"), "int8": ("folder", "int8"), "bfloat16": ("folder", "bfloat16")}


def test_the_best_k_by_bits_is_as_computed() -> None:
    """Guards the answer to whether the best K moves with the bits of the target."""
    day = "epyc-avx512-2cores_2026-11-29"
    shares = raw("draft-confidence-qwen2.5-coder-1.5b_epyc-avx512-2cores_2026-11-28")["temperatures"]["0"]
    survival = [depth["counted"] for depth in shares["survival_by_depth"]]
    draft_ms = raw(f"pass-costs-gguf-qwen2.5-coder-0.5b_{day}")["median_ms"]["auto"]["1"]
    expected = []
    for name, (form, dtype) in BITS.items():
        target_ms = raw(f"pass-costs-{form}-qwen2.5-coder-1.5b_{day}")["median_ms"][dtype]
        rates = [
            1000 * (1 + sum(survival[:k])) / (k * draft_ms + target_ms[str(k + 1)]) for k in range(len(survival) + 1)
        ]
        best = max(range(len(rates)), key=rates.__getitem__)
        expected.append([name, *(f"{rates[k]:.1f}" for k in (0, 2, 4, 6, 8)), str(best)])
    head = ("target, T = 0", "plain", "K = 2", "K = 4", "K = 6", "K = 8", "best K")
    assert table("benchmarks/README.md", *head) == expected


def test_the_judge_is_as_measured() -> None:
    day = "qwen2.5-coder-1.5b_epyc-avx512-2cores_2026-11-29"
    match, judge = methods(f"judge-gsm8k-{day}").values()
    (low,) = methods(f"judge-gsm8k-threshold-0.6-{day}").values()
    assert [str(one["verify"]).partition(":")[0] for one in (match, judge, low)] == ["match", "judge", "judge"]
    names = ("match", "judge, its threshold of 0.88", "judge, threshold 0.6")
    expected = [
        [name, f"{one['acceptance_length']:.2f}", f"{one['tokens_per_s']['median']:.1f}", f"{one['right']:.1%}"]
        for name, one in zip(names, (match, judge, low), strict=True)
    ]
    expected[2][2] = "–"
    rows = table("benchmarks/README.md", "rule, GSM8K", "tokens a pass", "tokens/s", "right answers")
    assert [[cell.replace(" %", "%") for cell in row] for row in rows] == expected


def test_the_head_of_the_judge_is_as_trained() -> None:
    """Guards the sentences about a head that needed an hour of labelling."""
    found = raw("judge-head-qwen2.5-coder-1.5b_epyc-avx512-2cores_2026-11-29")
    head, losses = found["head"], found["loss_by_penalty"]
    text = " ".join((ROOT / "benchmarks/README.md").read_text(encoding="utf-8").split())
    for sentence in (
        f"The head is of {head['labels']} labels",
        f"of {head['questions']} questions of the training set the target answers {found['answers_with_labels']} right",
        f"{float(head['harmless']):.0%} of the drafted tokens that are not the target's are harmless".replace(
            "%", " %"
        ),
        f"it accepts {float(head['accepted of harmless']):.0%} of these".replace("%", " %"),
        f"loss of the head is {losses[head['penalty']]:.3f} nats, that of a constant {found['loss_of_a_constant']:.3f}",
    ):
        assert sentence in text
    first, *inner, last = losses
    assert min(losses, key=losses.get) in inner, f"the best penalty is at an end of the grid, {first} or {last}"


WAYS = {
    ("chain", ""): "chain",
    ("grown", "likeliest"): "grown tree, the likeliest paths",
    ("spine", "match"): "two siblings a depth",
    ("spine", "RSD-C"): "two siblings a depth, RSD-C",
    ("spine", "greedy"): "two siblings a depth, greedy",
    ("beam", "RSD-S"): "two paths, RSD-S",
}
SIBLINGS = {
    "pocket, PARD: tokens a pass": "sibling-rules-pocket-pard",
    "pocket, draft model: tokens a pass": "sibling-rules-pocket-autoregressive",
    "Coder 1.5B, draft model: tokens a pass": "sibling-rules-qwen2.5-coder-1.5b",
}


@pytest.mark.parametrize("head", SIBLINGS)
def test_siblings_are_as_counted(head: str) -> None:
    """Guards the reasons for the one way to draw siblings: others accept less at every number of nodes."""
    cases = raw(f"{SIBLINGS[head]}_epyc-avx2-2cores_2026-11-29")["cases"]
    settings = [*dict.fromkeys((case["temperature"], case["nodes"]) for case in cases)]
    rows: dict[str, list[str]] = {}
    shares = []
    for case in cases:
        name = f"{case['rule']}, {WAYS[case['shape'], case['siblings']]}"
        rows.setdefault(name, []).append(f"{case['tokens_per_pass']:.2f} ± {case['standard_error']:.2f}")
        if "share_of_optimum" in case:
            shares.append(f"{case['share_of_optimum']:.3f}")
    columns = [f"T = {temperature:g}, {nodes} nodes" for temperature, nodes in settings]
    expected = [[name, *shown] for name, shown in rows.items()] + [
        ["share of the optimum, rejection with RSD-C", *shares]
    ]
    found = table("benchmarks/README.md", head, *columns)
    assert found == expected, "\n".join(f"| {' | '.join(row)} |" for row in expected)
    length = {
        (case["rule"], case["siblings"], case["temperature"], case["nodes"]): case["tokens_per_pass"] for case in cases
    }
    for (rule, siblings, *setting), tokens in length.items():
        if siblings in ("greedy", "RSD-S"):
            assert tokens < length[rule, "RSD-C", *setting]
        assert length["block", "", *setting] > length["block", "likeliest", *setting]
        assert length["match", "likeliest", *setting] > max(
            length["match", "", *setting], length["match", "match", *setting]
        )


def test_the_budget_of_a_batch_is_as_measured() -> None:
    """Guards the promise that a batch in which drafts do not pay is hardly slower than without them, the first too."""
    found = raw("batch-budget-qwen2.5-coder-1.5b_epyc-avx512-2cores_2026-11-29")["batches"]
    expected = []
    for rows, engines in found.items():
        speeds = [engines[name][when] for name in ("expected", "by row") for when in ("first", "later")]
        whole = [engines["expected"][f"{when}_to_last_answer"] for when in ("first", "later")]
        expected.append([rows, *(f"{value:.2f}x" for value in [*speeds, *whole])])
        assert min(speeds[:2]) >= 0.97 and all(len(one["runs"]) == 6 for one in engines.values())
    columns = ("rows", "`expected`, first batch", "second", "by row, first batch", "second")
    shown = table("benchmarks/README.md", *columns, "`expected`, whole first batch", "whole second")
    assert shown == expected, "\n".join(f"| {' | '.join(row)} |" for row in expected)


STEPS = (0, 60, 120, 180, 240, 300)
BESIDE = {"dflash": "29", "eagle_parallel": "30"}
"""Days of the files of decoding, of which that of `eagle_parallel` is from random weights."""


def test_dflash_beside_eagle_parallel_is_as_measured() -> None:
    """Guards the tables of `docs/drafters.md`: what the two learnt beside each other, and what they yield."""
    page = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    speeds = []
    for drafter, day in BESIDE.items():
        file = ROOT / "benchmarks" / f"training-smollm2-{drafter}_epyc-avx512-1core_2026-11-29.jsonl"
        history = [json.loads(line) for line in file.read_text().splitlines()]
        lengths = {each["step"]: each["acceptance_length"] for each in history if "acceptance_length" in each}
        cells = " | ".join(f"{lengths[step]:.2f}" for step in STEPS)
        assert re.search(rf"\| `{drafter}`, \w+ layers? \| {re.escape(cells)} \|", page)
        speeds.append(statistics.median(each["rows_per_s"] for each in history if "rows_per_s" in each))
        found = []
        for temperature in ("0", "0.8"):
            for task in ("chat", "humaneval", "gsm8k"):
                name = f"real-smollm2-135m-{drafter}-{task}-t{temperature}_epyc-avx512-1core_2026-11-{day}"
                method = raw(name)["methods"][f"{drafter}:k=6"]
                assert method["identical_to_ar"] and 0.66 <= method["speedup_vs_ar"] <= 0.93
                found.append(f"{method['acceptance_length']:.2f}")
        assert f"| `{drafter}` | {' | '.join(found)} |" in page
    assert f"medians of {speeds[0]:,.0f} and {speeds[1]:,.0f} rows/s" in page
    assert 1.55 < speeds[1] / speeds[0] < 1.65


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("dflash-rates", 1.48, 1.65), ("eagle_parallel-chain-rates", 1.24, 1.38)],
)
def test_rows_of_chains_are_learnt_as_fast_as_measured(name: str, first: float, second: float) -> None:
    """Guards the factors in `docs/training.md`."""
    dense, chains = raw(f"training-smollm2-{name}_epyc-avx512-1core_2026-11-29")["cases"]
    assert dense["overrides"] == ["attention=sdpa"] and chains["overrides"] == []
    for epoch, factor in (("first epoch", first), ("second epoch", second)):
        assert chains[epoch]["rows_per_s"] / dense[epoch]["rows_per_s"] == pytest.approx(factor, abs=0.006)
        text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
        assert f"{factor:.2f} times" in text


def test_what_a_head_could_win_is_as_measured() -> None:
    """Guards the sentence about recall in `docs/drafters.md`."""
    page = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    listed = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for drafter in BESIDE:
        found = raw(f"head-oracle-smollm2-135m-{drafter}_epyc-avx512-1core_2026-11-29")
        one, four, sixteen = (f"{found['length'][rank]:.2f}" for rank in ("1", "4", "16"))
        assert f"{one}, {four} and {sixteen} for `{drafter}`" in listed
        if drafter == "dflash":
            first, *_, last = found["recall"]["16"]
            assert f"{first:.2f}"[1:] + " of first\nplaces and " + f"{last:.2f}"[1:] + " of sixth ones" in page
            assert f"would give {sixteen} tokens per pass" in page


HEADS = {"previous_token": "previous_token_rank", "markov": "markov_rank", "selector": "selector_rank"}


def test_what_heads_win_and_cost_is_as_measured() -> None:
    """Guards the table and the shares in `docs/drafters.md`."""
    page = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    cells: dict[str, list[str]] = {"none": [], **{head: [] for head in HEADS}}
    for temperature in ("0", "0.8"):
        file = f"path-heads-smollm2-135m-dflash-t{temperature}_epyc-avx512-1core_2026-11-29"
        for drafts in raw(file)["temperatures"][temperature].values():
            plain = drafts["none"]["tokens_per_pass"]
            cells["none"].append(f"{plain:.2f}")
            for head in HEADS:
                assert drafts[head]["gain"] == pytest.approx(drafts[head]["tokens_per_pass"] - plain)
                gain, error = (100 * drafts[head][key] / plain for key in ("gain", "gain_standard_error"))
                cells[head].append(f"{gain:+.1f} ± {error:.1f} %")
    assert f"| no head | {' | '.join(cells['none'])} |" in page
    for head, setting in HEADS.items():
        assert f"| `{setting}: 64` | {' | '.join(cells[head])} |" in page
    cost = raw("path-head-cost-smollm2-135m-dflash_epyc-avx512-1core_2026-11-30")["temperatures"]
    selector, previous, markov = (
        [f"{100 * cost[temperature][head]['share_of_round']:.1f} %" for temperature in ("0", "0.8")]
        for head in ("selector", "previous_token", "markov")
    )
    words = " ".join(page.split())
    assert (
        f"the selector takes {selector[0]} of a round more than drawing without a head (T = 0.8: {selector[1]})"
        in words
    )
    assert f"previous-token head {previous[0]} ({previous[1]}) and the Markov head {markov[0]} ({markov[1]})" in words


def test_what_a_head_alone_wins_is_as_measured() -> None:
    """Guards the table of heads that were trained alone in `docs/drafters.md`."""
    page, rows = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8"), []
    for temperature in ("0", "0.8"):
        file = f"path-heads-alone-smollm2-135m-dflash-t{temperature}_epyc-avx512-1core_2026-11-30"
        plain, alone = [], []
        for drafts in raw(file)["temperatures"][temperature].values():
            length, head = drafts["none"]["tokens_per_pass"], drafts["previous_token"]
            gain, error = (100 * head[key] / length for key in ("gain", "gain_standard_error"))
            plain.append(f"{length:.2f}")
            alone.append(f"{head['tokens_per_pass']:.2f} ({gain:+.1f} ± {error:.1f} %)")
        rows += [f"| no head, T = {temperature} | {' | '.join(plain)} |"]
        rows += [f"| `previous_token_rank: 64`, trained alone | {' | '.join(alone)} |"]
    assert "\n".join(rows) in page


def test_runs_of_the_last_heads_are_as_measured() -> None:
    """Guards the speed and losses of a head's training in `docs/drafters.md`, and lengths on the pocket target."""
    page = " ".join((ROOT / "docs" / "drafters.md").read_text(encoding="utf-8").split())
    listed = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")

    def lines(name: str) -> list[dict[str, float]]:
        file = ROOT / "benchmarks" / f"{name}_epyc-avx512-1core_2026-11-30.jsonl"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    run = lines("training-smollm2-dflash-head")
    speed = statistics.median(line["rows_per_s"] for line in run if "rows_per_s" in line)
    _, first, second, last = (f"{line['loss']:.2f}" for line in run if "acceptance_length" in line)
    assert f"a median of {speed:,.0f} rows/s" in page
    assert f"from {first} after 500 steps to {second} and {last}," in page
    losses = [line["loss"] for line in lines("training-pocket-dflash") if "acceptance_length" in line]
    assert f"by {losses[-3] - losses[-1]:.2f} in the last 1,000 steps" in listed
    for drafter, words in (("dflash", "{} and {} at T = 0, {} and {} at"), ("eagle_parallel", "{}, {}, {}, {}.")):
        found = raw(f"lengths-pocket-{drafter}_epyc-avx512-1core_2026-11-30")["temperatures"]
        of_one = [next(iter(one.values()))["tokens_per_pass"] for both in found.values() for one in both.values()]
        assert words.format(*(f"{each:.2f}" for each in of_one)) in listed


def test_what_beginnings_and_states_win_is_as_measured() -> None:
    """Guards lengths of `pard2` and `eagle_parallel` in `docs/drafters.md`, and losses in `docs/decisions.md`."""
    page, decisions = (
        " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split()) for name in ("drafters.md", "decisions.md")
    )
    runs = raw("training-pocket-pard2_epyc-avx512-1core_2026-11-30")
    ends = [
        [f"{line['acceptance_length']:.2f}" for line in runs[name] if "acceptance_length" in line]
        for name in ("with states", "without states", "at five times the rates")
    ]
    (before, _, states), (_, _, bare), (_, _, fast) = ends
    assert states == before
    words = f"{states} tokens a pass, greedy, as before training, and after the same steps without them {bare}; at five"
    assert words in page
    assert f"times the rates of the template {fast} (" in page
    smollm2 = raw("training-eagle_parallel-starts_epyc-avx512-1core_2026-11-30")[
        "smollm2-135m, 300 steps of 16 samples"
    ]
    both = [smollm2[name]["held_out"] for name in ("first", "random")]
    first, random = (held_out["300"] for held_out in both)
    for held_out in both:
        lengths = " | ".join(f"{line['tokens_per_pass']:.2f}" for line in held_out.values())
        assert f" | {lengths} |" in page
    assert f"is {first['loss']:.2f} after 300 steps from its first layer, {random['loss']:.2f} from random" in decisions


EXITS = {
    "SmolLM2 135M": "exits-smollm2-135m_xeon-avx512-1core_2026-11-30",
    "Coder 1.5B": "exits-qwen2.5-coder-1.5b_xeon-avx512-1core_2026-11-30",
}


def test_exits_are_as_measured() -> None:
    """Guards the table of early exits, and what the text says of the best and of reused states."""
    columns = ("a drafted token, in passes", "agreement", "needed", "speed", "reused")
    shown = table("docs/drafters.md", "layers", *columns)
    page = " ".join((ROOT / "docs" / "drafters.md").read_text(encoding="utf-8").split())
    changes = []
    for model, file in EXITS.items():
        found = raw(file)
        by_layers = {f"{model}, {row['layers']} of {found['layers']}": row for row in found["exits"]}
        rows = [row for row in shown if row[0].startswith(model)]
        assert len(rows) == 5 and f"{found['by_text']:.2f}x" in page and found["by_text"] < 1
        for name, *cells in rows:
            row = by_layers[name]
            shares = [f"{row[key]:.0%}".replace("%", " %") for key in ("agreement", "needed")]
            speeds = [f"{row[key]['speed']:.2f}x" for key in ("drafts_alone", "states_reused")]
            assert cells == [f"{row['drafted']:.2f}", *shares, *speeds]
        changes += [row["states_reused"]["speed"] / row["drafts_alone"]["speed"] - 1 for row in found["exits"]]
    assert 0.045 < max(map(abs, changes)) < 0.05


def test_what_adapters_and_skipped_sublayers_win_is_as_measured() -> None:
    """Guards what `docs/drafters.md` says of Kangaroo and SWIFT; control: the whole model drafts for itself."""
    page = " ".join((ROOT / "docs" / "drafters.md").read_text(encoding="utf-8").split())
    adapter = raw("exit-adapter-smollm2-135m_xeon-avx512-1core_2026-12-01")
    agreement, whole, few = adapter["agreement"], adapter["whole_head"], adapter["few_rows"]
    shown = f"predicts {agreement:.0%} of the tokens and needs {whole['needed']:.0%}".replace("%", " %")
    assert f"{shown}: {whole['speed']:.2f}x, and at most {few['speed']:.2f}x with 8,192 rows of the head" in page
    rows = raw("skipped-sublayers-smollm2-135m_xeon-avx512-1core_2026-12-01")["skipped"]
    some, many = (next(row for row in rows if row["sublayers"] == count) for count in (18, 33))
    shares = [f"{row[key]:.0%}".replace("%", " %") for row in (some, many) for key in ("agreement", "left")]
    wholes, fews = ([f"{row[name]['speed']:.2f}x" for row in (some, many)] for name in ("whole_head", "few_rows"))
    assert "predicts {} of its tokens with {} of the layers' weights and {} with {}: ".format(*shares) in page
    assert f"{wholes[0]} and {wholes[1]}. With 8,192 rows of the head the bounds are {fews[0]} and {fews[1]}" in page
    assert f"but {rows[0]['few_rows']['speed']:.2f}x with all sublayers" in page
    assert all(row["whole_head"]["speed"] < 1 for row in rows)
    assert rows[0]["few_rows"]["speed"] == max(row["few_rows"]["speed"] for row in rows)
