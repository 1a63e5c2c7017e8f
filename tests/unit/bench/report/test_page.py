"""The HTML report: whole, self-contained, and true to the JSON, whatever a model says."""

from __future__ import annotations

import copy
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paradraft.bench.report.page import page, read_result, write_page
from paradraft.data.prompt_source import DEFAULT
from tests.support.bench_result import LENGTHS, UNTOLD, ahead, figures, result

ROOT = Path(__file__).parents[4]
HOSTILE = [
    "</script><script>alert(1)</script>", "<b>&amp;\"'", "</pre></style><!--", "\x1b[31m\x00\x85", "\u202egnp.exe",
    "\ud800", "tab\tand\nnewline", "<img src=https://example.com/x.png>",
]  # fmt: skip


class Reader(HTMLParser):
    """Reads a page and fails where a tag is left open or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.numbers: list[tuple[float, str]] = []
        self._data: float | None = None
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)
        if tag == "data":
            self._data = float(dict(attrs)["value"] or "nan")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._data = None if tag == "data" else self._data

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._data is not None:
            self.numbers.append((self._data, data))


def read(found: dict[str, Any]) -> Reader:
    return Reader(page(found).removeprefix("<!doctype html>"))


def test_a_page_is_whole_and_needs_nothing_else() -> None:
    """Guards a file that is mailed around: nothing is fetched, nothing runs, and a screen reader has its words."""
    found = read(result())
    tags = [tag for tag, _ in found.tags]
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(tags)
    for _, attributes in found.tags:
        assert not any(key.startswith("on") or key in ("src", "href", "action") for key in attributes)
    assert not re.search(r"https?:|url\(|@import", page(result()))
    meta = [attributes for tag, attributes in found.tags if tag == "meta"]
    assert {"charset": "utf-8"} in meta
    assert any(one.get("name") == "viewport" and "width=device-width" in (one["content"] or "") for one in meta)
    assert [one for one in meta if (one.get("content") or "").startswith("default-src 'none'")]
    chart = next(attributes for tag, attributes in found.tags if tag == "svg" and attributes.get("role") == "img")
    ids = {attributes.get("id") for tag, attributes in found.tags if tag in ("title", "desc")}
    assert set((chart["aria-labelledby"] or "").split()) <= ids
    assert "prefers-color-scheme: dark" in page(result())


def test_every_number_is_that_of_the_json() -> None:
    """Guards against a page that shows something else than what was measured."""
    given = result()
    shown = read(given).numbers
    values = [value for value, _ in shown]
    for one in given["methods"].values():
        of_method = [
            one["tokens_per_s"]["median"], min(one["tokens_per_s"]["runs"]), max(one["tokens_per_s"]["runs"]),
            one["speedup_vs_hf"], one["speedup_vs_ar"], one["speedup_vs_fastest_ar"], one["acceptance_length"],
            one["acceptance_length_first_32"], one["distinct_4grams"], one["tokens"],
            *(one["accepted_share_of_rounds"] or ()), one["peak_rss_bytes"] / 2**20,
        ]  # fmt: skip
        assert all(value in values for value in of_method if value is not None)
    assert (0.512345, "51 %") in shown and (123.4, "123.4") in shown
    # A round of PARD: 3.5 s for 512 tokens, 2.345 at a time.
    assert any(value == pytest.approx(3500 * 2.345 / 512) for value in values)


def test_every_method_is_named_and_what_was_skipped_is_said() -> None:
    """Guards against a method that is lost between the figures and the page."""
    found = read(result(skipped={"vllm": "vLLM is not installed: <nowhere>."}))
    for name in ("AR", "AR+", "PARD", "vLLM PARD"):
        assert name in found.text
    assert "vllm was not run. vLLM is not installed: <nowhere>." in found.text
    assert "python paradraft bench --methods hf,ar --prompts 'my prompts.jsonl'" in found.text
    assert "A <fast> CPU & more (AVX2)" in found.text


def test_whatever_a_model_says_is_shown_as_text() -> None:
    """Guards against answers that are read as HTML, turn the text around them, or cannot be written."""
    given = result()
    given["example"] = {
        "prompt": HOSTILE[0],
        "answers": {"pard:k=4": [[text, place] for place, text in enumerate(HOSTILE)]},
    }
    given["arguments"]["target"] = name = "<script>alert(1)<b>"  # without a slash, so that titles show all of it
    found = read(given)
    assert "script" not in [tag for tag, _ in found.tags] and "b" not in [tag for tag, _ in found.tags]
    assert found.text.count(name) == found.text.count(HOSTILE[0]) == 2
    for text in (HOSTILE[1], HOSTILE[2], "tab\tand\nnewline", "␛[31m␀⟨U+0085⟩", "⟨U+202E⟩gnp.exe", "⟨U+D800⟩"):
        assert text in found.text
    page(given).encode()


def test_tokens_are_coloured_by_how_they_came() -> None:
    """Guards the answer: its text is whole, and each token has the tint of its position."""
    pieces = [["a", 0], ["b\n", 1], ["c", 2], ["d", 12]]
    given = result(example={"prompt": "P", "answers": {"pard:k=4": pieces}})
    found = read(given)
    assert "Pab\ncd" in found.text
    assert "4 tokens in 2 passes of the target, 3 of them drafted" in found.text
    tints = [a["class"] for tag, a in found.tags if tag == "span" and (a.get("title") or "").startswith("drafted, ")]
    assert tints == ["token d1", "token d2", "token d8"]


def test_who_waits_is_drawn() -> None:
    """Guards the picture of both sides: each piece of work where and as long as it was."""
    found = read(ahead())
    pieces = [told for tag, told in found.tags if tag == "rect"]
    assert [piece["class"] for piece in pieces] == ["piece verify"] * 2 + ["piece draft"] * 2
    begin, width = (float(pieces[3][name] or "nan") - float(pieces[2][name] or "nan") for name in ("x", "width"))
    scale = float(pieces[0]["width"] or "nan") / 1.5
    assert begin == pytest.approx(2.5 * scale, abs=0.2) and width == pytest.approx(0.1 * scale, abs=0.2)
    assert "Who waits" in found.text and "at work, target 62%, draft 81% of the time" in found.text
    assert "draft: 2.60 to 4.60 ms" in found.text


def test_what_was_not_measured_is_left_out() -> None:
    """Guards against empty sections, and pages that break where a figure is missing."""
    nothing = UNTOLD | dict.fromkeys(LENGTHS) | dict.fromkeys(("speedup_vs_ar", "baseline", "fastest_baseline"))
    methods = {"vllm": figures("vllm", **nothing)}
    given = result(methods=methods)
    del given["example"], given["skipped"]
    found = read(given)
    titles = re.findall(r"<h2>(.*?)</h2>", page(given))
    assert titles == ["Tokens per second", "All figures", "Machine and command"]
    assert "–" in found.text and "None" not in found.text
    methods["vllm"] |= {"share_of_floor": 0.625, "floor_s": 2.5, "identical_to_ar": False, "differing_prompts": [{}]}
    found = read(given)
    assert (0.625, "62 %") in found.numbers and "differ from AR+: vLLM in 1." in found.text


def test_baselines_are_marked_and_missing_ones_are_said() -> None:
    """Guards a reader against ratios without a denominator, and against two denominators under one name."""
    given = result()
    methods = given["methods"]
    fast = {"dtype": "bfloat16", "baseline": "ar:dtype=bfloat16", "fastest_baseline": "ar:dtype=bfloat16"}
    methods["ar:dtype=bfloat16"] = figures("ar", **fast, accepted_share_of_rounds=[])
    for one in methods.values():
        one["fastest_baseline"] = "ar:dtype=bfloat16"
    methods["ngram:dtype=float16"] = figures("ngram", dtype="float16", baseline=None, speedup_vs_ar=None)
    badges = re.findall(r'<span class="badge">(.*?)</span>', page(given))
    assert badges == ["baseline", "fastest baseline"] * 2
    assert "No AR+ in float16 in this run, so no speedup of: n-gram, float16." in read(given).text


def test_the_chart_has_all_rounds_in_its_denominator() -> None:
    """Guards against a chart of chances, where a peer that stops drafting when unsure stands above all others."""
    given = result()
    text = page(given)
    (points,) = set(re.findall(r'<g class="series s0"><title>.*?</title><polyline points="(.*?)"', text))
    heights = [float(point.partition(",")[2]) for point in points.split()]
    shares = given["methods"]["pard:k=4"]["accepted_share_of_rounds"]
    top, bottom = 10, 240 - 38
    assert heights == pytest.approx([bottom - (bottom - top) * share for share in shares], abs=0.06)
    assert "at least 1, 2, … drafted tokens" in text and "The file does not tell" not in text
    given["methods"]["vllm-pard:k=4"]["accepted_share_of_rounds"] = None
    assert "The file does not tell of: vLLM PARD, k=4." in page(given)


def test_default_prompts_are_named() -> None:
    """Guards against figures of Python code that are taken for those of any text."""
    found = result()
    assert "Python" not in read(found).text.replace("Python 3", "")
    found["arguments"]["prompts"] = DEFAULT
    text = read(found).text
    assert "pocket, 2 Python functions to complete × 64 tokens, greedy" in text
    assert "The prompts are Python functions to complete, held-out modules of the pocket family." in text


def test_made_up_acceptance_is_in_the_title() -> None:
    """Guards against figures of no real drafter that are taken for real ones."""
    given = result()
    given["arguments"] = given["arguments"] | {"synthetic_acceptance": [0.7]}
    assert "SYNTHETIC ACCEPTANCE 0.7: pocket" in read(given).text


RESULTS = [file for file in (ROOT / "benchmarks").glob("*.json") if "methods" in json.loads(file.read_bytes())]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_older_results_have_pages(file: Path, tmp_path: Path) -> None:
    """Guards results that were written before there were pages, or before there was all that pages show now."""
    found = read_result(file)
    written = write_page(tmp_path / "new" / "folder", found)
    assert set(found["methods"]) and Reader(written.read_text(encoding="utf-8").removeprefix("<!doctype html>")).numbers


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "holds no JSON"),
        ("[]", "no result of a benchmark"),
        ('{"verdict": "PASS"}', "no result of a benchmark"),
        (json.dumps(result(methods={})), "no whole result"),
        (json.dumps(result(methods={"ar": {}})), "no whole result"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_result_is_refused(content: str | None, named: str, tmp_path: Path) -> None:
    """Guards against a traceback for a wrong file."""
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=named):
        read_result(file)


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [360, 1200])
def test_chromium_shows_it(width: int, tmp_path: Path) -> None:
    """Guards what a parser cannot see: the page is no wider than a phone, and its parts are where they belong."""
    given = result()
    given["methods"] |= {
        f"pard:draft=build/a-folder-with-a-long-name/{i}:k=4": copy.deepcopy(figures("pard")) for i in range(9)
    }
    given["example"]["prompt"] = "x" * 500 + HOSTILE[0]
    frame = f'<iframe width="{width}" height="800" style="border:0" srcdoc="{html.escape(page(given))}"></iframe>'
    inside = "document.querySelector('iframe').contentDocument"
    right = f"[...{inside}.querySelectorAll('section > :not(.scroll)')].map(e => e.getBoundingClientRect().right)"
    probe = f"document.title = [{inside}.documentElement.scrollWidth, Math.max(...{right}), {inside}.title].join('|')"
    file = tmp_path / "page.html"
    file.write_text(f"<!doctype html>{frame}<script>onload = () => {{ {probe} }}</script>", encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [str(CHROMIUM), *flags, "--dump-dom", file.as_uri()], capture_output=True, timeout=120, check=True
    ).stdout.decode()
    scroll, rightmost, title = html.unescape(re.findall("<title>(.*?)</title>", shown)[0]).split("|")
    assert float(scroll) <= width and float(rightmost) <= width
    assert title == "paradraft bench: pocket, 2 prompts × 64 tokens, greedy"
