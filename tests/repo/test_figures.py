"""The figures that README.md and benchmarks/README.md print are those of the files they name.

A table is found by its heading row, and each of its rows by the name in the first cell. After a new measurement, put
the new file's name below and run this: a row that does not fit is printed as it has to be.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from PIL import Image

from paradraft.bench.report.plot import description
from tests.support.figures import ROOT, Figures, methods, table

DAY, REAL_DAY = "epyc-avx512-2cores_2026-11-22", "epyc-avx512-2cores_2026-11-25"
GREEDY = f"cpp-greedy_{DAY}"
AMX = "xeon-amx-2cores_2026-11-23"
NEW_GREEDY, NEW_SAMPLED, NEW_GREEDY_K8, NEW_SAMPLED_K8 = (
    f"{theme}_{AMX}" for theme in ("greedy", "t0.8", "k8-greedy", "k8-t0.8")
)
EXPECTED = "expected-batches-greedy_xeon-avx512-2cores_2026-11-22"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def length(value: float | None, one: Figures) -> str:
    if one["method"] in ("hf", "ar", "vllm", "llama-cpp"):
        return "1"
    return "–" if value is None else f"{value:.2f}"


def ms(*parts: str) -> Callable[[Figures], str]:
    """Milliseconds of a round."""
    return lambda one: "{:.2f}".format(
        1000 * sum(one[part] for part in parts) * one["acceptance_length"] / one["tokens"]
    ).replace("0.00", "0")


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "tokens/s": lambda one: f"{one['tokens_per_s']['median']:.0f}",
    "against `generate`": lambda one: times(one["speedup_vs_hf"]),
    "against AR+": lambda one: times(one["speedup_vs_ar"]),
    "against the fastest AR+": lambda one: times(one["speedup_vs_fastest_ar"]),
    "tokens per target pass": lambda one: length(one["acceptance_length"], one),
    "first 32 tokens": lambda one: length(one["acceptance_length_first_32"], one),
    "draft": ms("draft_s"),
    "target's pass and verdict": ms("verify_s"),
    "rest": ms("other_s"),
    "tokens": lambda one: length(one["acceptance_length"], one),
}
NAMES = {
    "AR: `generate` of `transformers`": "hf",
    "`generate`": "hf",
    "assisted generation of `transformers`, K = 3": "hf-assisted:k=3",
    "assisted generation, K = 3, its own confidence of 0.4": "hf-assisted:k=3",
    "prompt lookup": "hf-prompt-lookup",
    "vLLM": "vllm",
    "vLLM with the same PARD drafter, K = 6": "vllm-pard:k=6",
    "vLLM, draft model, K = 3": "vllm-draft:k=3",
    "vLLM, PARD, K = 6": "vllm-pard:k=6",
    "vLLM, n-gram, K = 8": "vllm-ngram:k=8",
    "AR+: ours without a drafter": "ar",
    "AR+": "ar",
    "AR+ in bf16": "ar:dtype=bfloat16",
    "AR+, bf16": "ar:dtype=bfloat16",
    "AR+, int8, which is another target": "ar:dtype=int8",
    "VSD: an ordinary draft model, K = 5": "autoregressive:k=5",
    **{f"VSD, K = {k}": f"autoregressive:k={k}" for k in range(1, 9)},
    "VSD, K = 5, bf16": "autoregressive:k=5:dtype=bfloat16",
    **{f"PARD, K = {k}": f"pard:k={k}" for k in (*range(1, 9), 12)},
    "PARD, K = 8, in bf16": "pard:k=8:dtype=bfloat16",
    "PARD, K = 8, tree of 12": "pard:k=8:tree=12",
    "n-gram, K = 8": "ngram:k=8",
    **{f"PARD, K = {k}, bf16": f"pard:k={k}:dtype=bfloat16" for k in (3, 4, 5, 8)},
    "VSD, K = 3, bf16": "autoregressive:k=3:dtype=bfloat16",
    "eagle_parallel, one layer on the target's states, K = 5": "eagle_parallel:k=5",
    "eagle_parallel, K = 3": "eagle_parallel:k=3",
    "eagle_parallel, K = 3, bf16": "eagle_parallel:k=3:dtype=bfloat16",
}
SPEEDS = ("tokens/s", "against AR+", "against the fastest AR+", "tokens per target pass", "first 32 tokens")
TABLES = {
    ("docs/pocket.md", "method", *SPEEDS): NEW_GREEDY,
    (
        "benchmarks/README.md",
        "T = 0.8, with the head",
        "tokens/s",
        "against AR+",
        "tokens per target pass",
        "first 32 tokens",
    ): NEW_SAMPLED,
    ("benchmarks/README.md", "greedy", "tokens/s", "against `generate`", *SPEEDS[1:]): GREEDY,
    ("benchmarks/README.md", "a round, ms", "draft", "target's pass and verdict", "rest", "tokens"): GREEDY,
    (
        "benchmarks/README.md",
        "one H100, uncompiled",
        "tokens/s",
        "against `generate`",
        "against AR+",
        "tokens per target pass",
    ): "llama-shapes-uncompiled_h100_2026-11-26",
}


REAL = {
    "Qwen2.5-Coder 1.5B, `Q4_K_M`": "qwen2.5-coder-1.5b",
    "Qwen2.5-Coder 0.5B, `Q4_K_M`": "qwen2.5-coder-0.5b",
    "SmolLM2 135M, `Q4_1`": "smollm2-135m",
}
GREEDY_TASKS = {"HumanEval, greedy": "humaneval-t0", "GSM8K, greedy": "gsm8k-t0"}
REAL_TASKS = GREEDY_TASKS | {"HumanEval, T = 0.8": "humaneval-t0.8", "GSM8K, T = 0.8": "gsm8k-t0.8"}
REAL_METHODS = {
    "llama.cpp": "llama-cpp",
    "llama.cpp, the 0.5B file drafts, K = 5": "llama-cpp-draft:k=5",
    "paradraft, no drafter": "ar",
    **{f"the 0.5B file drafts, K = {k}": f"autoregressive:k={k}" for k in (3, 5, 8)},
    "the 0.5B file drafts, `expected`": "autoregressive:k=8:lengths=expected",
    "n-gram": "ngram",
    "n-gram, `expected`": "ngram:lengths=expected",
}
FIRST_METHODS = ("llama.cpp", "paradraft, no drafter", "the 0.5B file drafts, K = 3", "n-gram, `expected`")
"""The methods on the 1.5B file that the README shows."""
FOLDERS = {
    "Qwen2.5-Coder 1.5B": "qwen2.5-coder-1.5b-folder",
    "Qwen2.5-Coder 0.5B": "qwen2.5-coder-0.5b-folder",
    "SmolLM2 135M": "smollm2-135m-folder",
}
FOLDER_METHODS = {"`generate` of `transformers`": "hf:dtype=bfloat16", "paradraft, no drafter": "ar"}


def real(model: str, task: str) -> dict[str, Figures]:
    return methods(f"real-{model}-{task}_{REAL_DAY}")


@pytest.mark.parametrize(("document", "head", "file"), [(key[0], key[1:], file) for key, file in TABLES.items()])
def test_rows_are_those_of_the_file(document: str, head: tuple[str, ...], file: str) -> None:
    """Guards against tables and files that part ways: 1.32x in the file of 1.44x in the table."""
    wrong = []
    rows = table(document, *head)
    for name, *shown in rows:
        one = methods(file)[NAMES[name]]
        wanted = [COLUMNS[column](one) for column in head[1:]]
        if shown != wanted:
            wrong.append(f"| {' | '.join([name, *wanted])} |")
    assert rows and not wrong, f"{document}, by {file}.json:\n" + "\n".join(wrong)


@pytest.mark.parametrize("document", ["docs/pocket.md", "benchmarks/README.md"])
def test_lengths_are_reported_three_ways(document: str) -> None:
    """Guards against lengths from a target that repeats itself alone: K = 8 on all prompts, greedy, greedy over the
    first 32 tokens, and at temperature 0.8, and PARD's share of the ordinary draft's."""
    greedy, sampled = methods(NEW_GREEDY_K8), methods(NEW_SAMPLED_K8)

    def lengths(spec: str) -> list[float]:
        both = (greedy[spec]["acceptance_length"], greedy[spec]["acceptance_length_first_32"])
        return [*both, sampled[spec]["acceptance_length"]]

    vsd, pard = lengths("autoregressive:k=8"), lengths("pard:k=8")
    repeated, varied = (found["pard:k=8"]["distinct_4grams"] for found in (greedy, sampled))
    assert table(document, "tokens per target pass, K = 8", "greedy", "first 32 tokens", "T = 0.8") == [
        ["VSD", *(f"{value:.2f}" for value in vsd)],
        ["PARD", *(f"{value:.2f}" for value in pard)],
        ["PARD / VSD", *(f"{ours / theirs:.2f}" for ours, theirs in zip(pard, vsd, strict=True))],
        ["distinct 4-grams", f"{repeated:.0%}".replace("%", " %"), "", f"{varied:.0%}".replace("%", " %")],
    ]


def test_batches_are_those_of_the_file() -> None:
    """Guards the table of batch sizes, whose rows are against AR+ of the same batch and dtype."""
    sizes = (1, 2, 4, 8, 16)

    def row(name: str, spec: str, show: Callable[[Figures], str]) -> list[str]:
        return [name, *(show(found[f"{spec}:batch={size}"]) for size in sizes)]

    speed, speedup = COLUMNS["tokens/s"], COLUMNS["against AR+"]
    found = methods(EXPECTED)
    assert table("benchmarks/README.md", "batch, on the Xeon", *map(str, sizes)) == [
        row("AR+, tokens/s", "ar", speed),
        row("PARD, K = 8 at most, `expected`", "pard:k=8:lengths=expected", speedup),
        row("its tokens per pass", "pard:k=8:lengths=expected", lambda one: f"{one['acceptance_length']:.2f}"),
    ]


def sentences() -> list[tuple[str, str]]:
    """What prose says, with its numbers from the files."""
    drawn, gain = methods(NEW_SAMPLED), "speedup_vs_ar"
    new = methods(NEW_GREEDY)
    return [
        ("docs/pocket.md", f"{new['ar']['distinct_4grams']:.0%} of the 4-grams"),
        ("docs/pocket.md", f"{drawn['ar']['distinct_4grams']:.0%} at temperature 0.8"),
        (
            "docs/pocket.md",
            "it makes {}, {}, {}, {} and {} times the tokens of AR+ in batches of 1, 2, 4, 8 and 16".format(
                *(
                    f"{methods(EXPECTED)[f'pard:k=8:lengths=expected:batch={size}'][gain]:.2f}"
                    for size in (1, 2, 4, 8, 16)
                )
            ),
        ),
        (
            "docs/pocket.md",
            f"PARD with K = 4 is {drawn['pard:k=4'][gain]:.2f} times as fast as AR+ in float32 and "
            f"{drawn['pard:k=4:dtype=bfloat16'][gain]:.2f} times in bf16",
        ),
    ]


@pytest.mark.parametrize(("document", "wanted"), sentences())
def test_prose_has_the_numbers_of_the_files(document: str, wanted: str) -> None:
    """Guards numbers in sentences, which are forgotten when a table is made anew."""
    text = " ".join((ROOT / document).read_text(encoding="utf-8").split())
    assert wanted.replace("%", " %") in text


def test_the_picture_is_that_of_the_file() -> None:
    """Guards the picture of the pocket family: six to eight rows, with the numbers of the table, none of them old."""
    text = (ROOT / "docs/pocket.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"!\[[^\]]*\]\(\.\./benchmarks/(.*?)\.png\)", text)
    assert name == NEW_GREEDY
    with Image.open(ROOT / "benchmarks" / f"{name}.png") as picture:
        picture.load()
        drawn = picture.text["Description"].splitlines()
    assert 6 <= len(drawn) <= 8
    assert set(drawn) <= set(description(methods(name)).splitlines())
    in_table = {NAMES[row[0]] for row in table("docs/pocket.md", "method", *SPEEDS)}
    assert set(drawn) <= set(description({spec: methods(name)[spec] for spec in in_table}).splitlines())


def three_digits(one: Figures, key: str) -> str:
    """The median in milliseconds; of more than three digits all that are whole."""
    value = one[key]["p50"]
    return f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def rows_of_real_models(
    tasks: dict[str, str],
    cells_of: Callable[[Figures | None], list[str]],
    models: dict[str, str] = REAL,
    specs: dict[str, str] = REAL_METHODS,
) -> list[list[str]]:
    """A heading for each model, and below it a row for each method that was measured on one of the tasks."""
    rows = []
    for model, name in models.items():
        of_tasks = [real(name, task) for task in tasks.values()]
        rows.append([model, *[""] * len(tasks) * len(cells_of(None))])
        for method, spec in specs.items():
            if any(spec in figures for figures in of_tasks):
                rows.append([method, *(cell for figures in of_tasks for cell in cells_of(figures.get(spec)))])
    return rows


def speed_of(one: Figures | None) -> list[str]:
    if one is None:
        return [""]
    gain = one["speedup_vs_ar"] if one["method"] not in ("hf", "ar") else None
    return [f"{one['tokens_per_s']['median']:.0f}" + (f" ({times(gain)})" if gain else "")]


def speed_beside_generate(one: Figures | None) -> list[str]:
    if one is None:
        return [""] * 3
    gain = f" ({times(one['speedup_vs_hf'])})" if one["method"] != "hf" else ""
    return [f"{one['tokens_per_s']['median']:#.3g}".rstrip(".") + gain, *latencies_of(one)[:2]]


def latencies_of(one: Figures | None) -> list[str]:
    if one is None:
        return [""] * 3
    return [*(three_digits(one, key) for key in ("ttft_ms", "tpot_ms")), length(one["acceptance_length"], one)]


def test_tables_of_real_models() -> None:
    """Guards the first figures that a user sees: each is that of its file."""
    speeds = rows_of_real_models(REAL_TASKS, speed_of)
    expected = {
        ("README.md", "tokens/s, prompts included", *REAL_TASKS): [
            row for row in speeds[: 1 + len(REAL_METHODS)] if row[0] in FIRST_METHODS
        ],
        ("benchmarks/README.md", "tokens/s, prompts included", *REAL_TASKS): speeds,
        (
            "benchmarks/README.md", "ms, greedy", "HumanEval: first token", "each after it", "tokens a pass",
            "GSM8K: first token", "each after it", "tokens a pass",
        ): rows_of_real_models(GREEDY_TASKS, latencies_of),
        (
            "benchmarks/README.md", "bfloat16, greedy", "HumanEval: tokens/s", "first token, ms", "each after it",
            "GSM8K: tokens/s", "first token, ms", "each after it",
        ): rows_of_real_models(GREEDY_TASKS, speed_beside_generate, FOLDERS, FOLDER_METHODS),
    }  # fmt: skip
    for place, rows in expected.items():
        assert table(*place) == rows, "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_first_picture_is_that_of_the_file() -> None:
    """Guards the README's picture against tables that have been measured again."""
    (name,) = re.findall(r"!\[[^\]]*\]\(benchmarks/(.*?)\.png\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    with Image.open(ROOT / "benchmarks" / f"{name}.png") as picture:
        picture.load()
        assert picture.text["Description"].splitlines() == description(methods(name)).splitlines()


DRAFT = "draft=build/train/pard15"
TRAINED = {
    "llama.cpp": "llama-cpp",
    "paradraft, no drafter": "ar",
    "the 0.5B file drafts, K = 3": "autoregressive:k=3:draft=build/real/qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf",
    "PARD, K = 4": f"pard:k=4:{DRAFT}",
    "PARD, K = 6, `expected`": f"pard:k=6:lengths=expected:{DRAFT}",
    "`suffix+recycle`, `expected`": "suffix+recycle:lengths=expected",
    "`suffix+pard`, K = 6, `expected`": f"suffix+pard:k=6:lengths=expected:{DRAFT}",
}
TRAINED_HEAD = (
    "greedy", "HumanEval: tokens/s", "ms of each after the first", "GSM8K: tokens/s", "ms of each after the first",
    "chat: tokens/s", "ms of each after the first",
)  # fmt: skip


def trained_cells(name: str) -> list[str]:
    """A row of the table of the trained draft; each ratio is to plain decoding in the same file."""
    shown = []
    for task, has_all in (("humaneval", False), ("gsm8k", True), ("chat", False)):
        theme = f"union-{task}" if name.startswith("suffix") and not has_all else task
        found = methods(f"real-qwen2.5-coder-1.5b-pard-{theme}-t0_epyc-avx512-2cores_2026-11-27")
        one, plain = found[name], found["ar"]
        speed, ms = one["tokens_per_s"]["median"], one["tpot_ms"]["p50"]
        ratios = speed / plain["tokens_per_s"]["median"], plain["tpot_ms"]["p50"] / ms
        brackets = ["" if name == "ar" else f" ({times(ratio)})" for ratio in ratios]
        shown += [f"{speed:.1f}{brackets[0]}", f"{ms:.1f}{brackets[1]}"]
    return shown


UNION_DRAFT = "draft=build/d"
UNION = {
    "the 0.5B file drafts, K = 3": TRAINED["the 0.5B file drafts, K = 3"],
    "PARD, K = 6, `expected`": f"pard:k=6:lengths=expected:{UNION_DRAFT}",
    "`suffix+recycle`, `expected`": "suffix+recycle:lengths=expected",
    "`suffix+recycle+pard`, K = 6, `expected`": f"suffix+recycle+pard:k=6:lengths=expected:{UNION_DRAFT}",
}
UNION_TASKS = {
    f"{name}, T = {temperature}": f"{task}-t{temperature}"
    for temperature in ("0", "0.8")
    for name, task in (("HumanEval", "humaneval"), ("GSM8K", "gsm8k"), ("chat", "chat"))
}


def union_cell(task: str, name: str) -> str:
    found = methods(f"real-qwen2.5-coder-1.5b-auto-{task}_epyc-avx512-2cores_2026-11-28")
    if name not in found:
        return "–"
    one, plain = found[name], found["ar"]
    assert one["identical_to_ar"]
    whole = one["tokens_per_s"]["median"] / plain["tokens_per_s"]["median"]
    return f"{times(whole)} ({times(plain['tpot_ms']['p50'] / one['tpot_ms']['p50'])})"


def test_the_union_with_the_trained_draft_is_as_measured() -> None:
    """Guards what users get without an option."""
    rows = table("benchmarks/README.md", "times plain decoding", *UNION_TASKS)
    expected = [[name, *(union_cell(task, UNION[name]) for task in UNION_TASKS.values())] for name, *_ in rows]
    assert rows == expected and len(rows) == len(UNION)


def test_the_trained_draft_is_as_measured() -> None:
    """Guards the figures of a shipped draft against those of another one."""
    rows = table("benchmarks/README.md", *TRAINED_HEAD)
    assert [[name, *trained_cells(TRAINED[name])] for name, *_ in rows] == rows and len(rows) == len(TRAINED)


TO_TAKE: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "Qwen2.5-Coder 1.5B, `Q4_K_M`, two cores": (
        "_epyc-avx512-2cores_2026-11-",
        {
            "`auto`: `suffix+recycle+pard` with the shipped draft": (
                "qwen2.5-coder-1.5b-auto-{}28", "suffix+recycle+pard:k=6:lengths=expected:draft=build/d"
            ),
            "`suffix+recycle`": ("qwen2.5-coder-1.5b-auto-{}28", "suffix+recycle:lengths=expected"),
            "`pard` alone": ("qwen2.5-coder-1.5b-auto-{}28", "pard:k=6:lengths=expected:draft=build/d"),
            "the 0.5B file as it is, K = 3": (
                "qwen2.5-coder-1.5b-pard-{}27",
                "autoregressive:k=3:draft=build/real/qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf",
            ),
        },
    ),
    "Qwen2.5-Coder 1.5B, `Q4_K_M`, two cores of a Xeon": (
        "_xeon-avx512-2cores_2026-11-",
        {
            "`translated`: SmolLM2's file as it is, K = 5": (
                "qwen2.5-coder-1.5b-translated-{}30",
                "translated:k=5:lengths=expected:draft=build/real/smollm2-135m-instruct.Q4_1.gguf",
            ),
        },
    ),
    "SmolLM2 135M, `Q4_1`, one core": (
        "_epyc-avx512-1core_2026-11-",
        {
            "`dflash`, 300 steps, K = 6": ("smollm2-135m-dflash-{}29", "dflash:k=6"),
            "`eagle_parallel`, 300 steps, K = 6": ("smollm2-135m-eagle_parallel-{}30", "eagle_parallel:k=6"),
        },
    ),
}  # fmt: skip
"""By model: what is the same in the names of its files, and by drafter the name of its file and its method in it."""


def test_what_to_take_is_as_measured() -> None:
    """Guards the table by which users choose: each cell is that of its file, beside plain decoding in the same run."""
    tasks, rows = {"HumanEval": "humaneval-t0", "GSM8K": "gsm8k-t0", "chat": "chat-t0"}, []
    for model, (day, drafters) in TO_TAKE.items():
        rows.append([model, "", "", ""])
        for drafter, (file, spec) in drafters.items():
            found = [methods("real-" + file.format(task + day))[spec] for task in tasks.values()]
            rows.append(
                [drafter, *(f"{one['acceptance_length']:.2f} ({times(one['speedup_vs_ar'])})" for one in found)]
            )
    run = methods("real-qwen2.5-coder-1.5b-translated-humaneval-t0_xeon-avx512-2cores_2026-11-30")
    ways = ("translated:k=5:lengths=expected:draft=", "autoregressive:k=3:draft=")
    other, own = (times(one["speedup_vs_ar"]) for way in ways for name, one in run.items() if name.startswith(way))
    assert f"gives {other}, the 0.5B of the target's family {own}." in (ROOT / "docs/drafters.md").read_text()
    shown = table("docs/drafters.md", "tokens per target pass (speed)", *tasks)
    assert shown == rows, "\n".join(f"| {' | '.join(row)} |" for row in rows)
