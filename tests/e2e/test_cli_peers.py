"""Peers and reports on the command line, with stand-ins for vLLM and llama.cpp; and once with vLLM itself, where it is
installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paradraft.models.devices import computes_bf16
from tests.conftest import tiny_model
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake
from tests.support import fake_llama_cpp, fake_vllm, installed_vllm
from tests.support.bench_result import result
from tests.support.installed_vllm import needs_vllm
from tests.support.jsonl import write_lines


@pytest.fixture
def asked(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A small benchmark, in a folder where neither vLLM nor llama.cpp is."""
    monkeypatch.chdir(tmp_path)
    for name in ("PARADRAFT_VLLM_PYTHON", "PARADRAFT_LLAMA_CPP_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "abc"}, {"prompt": "<b>"}])
    sizes = ["--num-prompts", 2, "--max-new-tokens", 8, "--runs", 1, "--no-compile", "--prompts", "prompts.jsonl"]
    return ["bench", "--target", family / "target", "--draft", family / "draft", *EXACT, *sizes]


def test_a_peer_that_is_not_there_is_skipped_and_the_rest_reported(asked: list[object], paradraft: Paradraft) -> None:
    """Guards against a whole run that fails for one peer, and a report that does not tell that it is missing."""
    methods = "ar,hf-assisted:confidence=0:k=3,hf-prompt-lookup,autoregressive:k=3,vllm-draft,llama-cpp:dtype=float32"
    outcome = paradraft(*asked, "--methods", methods, "--json", "out.json", "--report", "new/page")
    assert outcome.code == 0, outcome.err
    assert "warning: vllm-draft is skipped. vLLM is not installed" in outcome.err
    assert "warning: llama-cpp:dtype=float32 is skipped. llama.cpp is not installed" in outcome.err
    assert outcome.err.rstrip().endswith("new/page/index.html")
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert list(json.loads(outcome.out.splitlines()[-1])) == list(found["methods"]) == methods.split(",")[:-2]
    assert list(found["skipped"]) == ["vllm-draft", "llama-cpp:dtype=float32"]
    assert found["methods"]["hf-assisted:confidence=0:k=3"]["confidence"] == 0
    assert found["methods"]["hf-prompt-lookup"]["acceptance_length"] >= 1
    assert found["example"]["prompt"] == "abc"
    for spec, pieces in found["example"]["answers"].items():
        assert len(pieces) == len(found["answers"][spec]["tokens"][0]), spec
    page = Path("new/page/index.html").read_text(encoding="utf-8")
    assert "vllm-draft</strong> was not run" in page and "llama-cpp:dtype=float32</strong> was not run" in page
    assert paradraft("report", "out.json", "again").code == 0
    assert Path("again/index.html").read_text(encoding="utf-8") == page


def test_vllm_takes_its_turns(asked: list[object], paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the way from the command line to the worker and back."""
    python = fake_vllm.python(tmp_path)
    outcome = paradraft(*asked, "--methods", "ar,vllm,vllm-draft:k=3", "--vllm-python", python, "--json", "out.json")
    assert outcome.code == 0, outcome.err
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert found["machine"]["versions"]["vllm"] == "0.0.fake" and found["skipped"] == {}
    figures = found["methods"]["vllm-draft:k=3"]
    # Of the eight tokens of an answer four were drafted, so the others took a pass each.
    assert figures["acceptance_length"] == pytest.approx(16 / 8)
    assert figures["acceptance_per_position"] == [1.0, 1.0, 0.0] and figures["draft_s"] is None
    assert figures["identical_to_ar"] is False and len(figures["differing_prompts"]) == 2
    assert found["answers"]["vllm"]["tokens"][0] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert list(found["example"]["answers"]) == ["ar"]


def test_llama_cpp_takes_its_turns(asked: list[object], paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the way from the command line to the worker and back: files of both models, made once, in the precision of
    each method, also in one that is not to be had here, and what llama.cpp says of itself, in the result and its page.
    """
    python = fake_llama_cpp.python(tmp_path / "env")
    methods = "ar,llama-cpp:dtype=float32,llama-cpp-draft:k=3:dtype=float32,llama-cpp-draft:k=3:dtype=int4"
    asked += ["--methods", methods, "--llama-cpp-python", python, "--json", "out.json"]
    outcome = paradraft(*asked, "--report", "page")
    assert outcome.code == 0, outcome.err
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert found["machine"]["versions"]["llama_cpp"] == "0.fake, llama-cpp-python 0.0.fake" and found["skipped"] == {}
    plain, whole, few = (found["methods"][spec] for spec in methods.split(",")[1:])
    assert plain["engine"]["weights"] == {"target": "F32"} and plain["engine"]["passes"] == {"target": 16}
    assert few["engine"]["weights"] == {"target": "Q4_0", "draft": "Q4_0"} and few["engine"]["cache"] == "F16"
    assert whole["engine"]["threads"] == few["engine"]["threads"] >= 1 and whole["engine"]["cache"] == "F32"
    passes = whole["engine"]["passes"]
    assert whole["acceptance_length"] == 16 / passes["target"] > 1 and whole["ttft_ms"]["p50"] > 0
    assert plain["acceptance_length"] is None and found["methods"]["ar"]["engine"] is None
    answers = {spec: one["tokens"] for spec, one in found["answers"].items()}
    assert list(answers.values())[1] == list(answers.values())[2] == list(answers.values())[3] != answers["ar"]
    assert whole["identical_to_ar"] is False and len(whole["differing_prompts"]) == 2
    assert list(found["example"]["answers"]) == ["ar", *methods.split(",")[2:]]
    files = sorted((tmp_path / "env" / "gguf").iterdir())
    whole_weights = "BF16" if computes_bf16(torch.device("cpu")) else "F32"
    kinds = sorted(["F32", "F32", "Q4_0", "Q4_0", *[whole_weights] * 2 * (whole_weights == "BF16")])
    assert sorted(file.stem.rpartition("-")[2] for file in files) == kinds
    times = [file.stat().st_mtime_ns for file in files]
    text = Path("page/index.html").read_text(encoding="utf-8")
    assert "llama.cpp VSD" in text and 'class="llama-cpp"' in text
    assert "activations to 8 bits" in outcome.out
    outcome = paradraft(*asked)
    assert outcome.code == 0 and "writing" not in outcome.err
    assert [file.stat().st_mtime_ns for file in files] == times


def test_a_path_for_vllm_without_its_methods_has_no_effect(asked: list[object], paradraft: Paradraft) -> None:
    """Guards against an option that a user believes in."""
    outcome = paradraft(*asked, "--methods", "autoregressive:k=3", "--vllm-python", "nowhere", "-k", 3,
                        "--llama-cpp-python", "nowhere")  # fmt: skip
    assert outcome.code == 0
    warnings = [line for line in outcome.err.splitlines() if line.startswith("warning: ")]
    assert [line.split()[1] for line in warnings] == ["-k", "--vllm-python", "--llama-cpp-python"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--methods", "vllm,vllm-pard"], "make vllm"),
        (["--methods", "ar,vllm", "--vllm-python", "nowhere"], "'nowhere'"),
        (["--methods", "llama-cpp"], "make llama-cpp"),
        (["--methods", "ar,llama-cpp", "--llama-cpp-python", "nowhere"], "--llama-cpp-python 'nowhere'"),
        (["--methods", "llama-cpp-draft:tree=4"], "settings of llama-cpp-draft are dtype, batch, k, draft"),
        (["--methods", "ar,hf-assisted", "--batch-size", 2], "one prompt at a time"),
        (["--methods", "ar", "--report", "prompts.jsonl"], "is a file"),
        (["--methods", "ar", "--report", "prompts.jsonl/page"], "is a file"),
    ],
)
def test_bad_options(asked: list[object], paradraft: Paradraft, arguments: list[object], named: str) -> None:
    """Guards against measuring first and failing then."""
    assert_mistake(paradraft(*asked, *arguments), named)


def test_sampling_and_a_draft_that_does_not_fit(
    family: Path, asked: list[object], paradraft: Paradraft, tmp_path: Path
) -> None:
    """Guards against speeds of answers that are not the target's, and a draft that vLLM gives up on after a minute."""
    python = fake_vllm.python(tmp_path)
    outcome = paradraft(*asked, "--methods", "vllm-draft", "--vllm-python", python, "--temperature", 0.5)
    assert outcome.code == 2 and "greedy only" in outcome.err
    small = tmp_path / "small"
    small.mkdir()
    for file in (family / "target").iterdir():
        (small / file.name).write_bytes(file.read_bytes())
    tiny_model(1, rows=64).save_pretrained(small)
    outcome = paradraft(*asked, "--methods", "vllm-draft", "--vllm-python", python, "--draft", small)
    assert outcome.code == 2 and "an embedding of 64 rows" in outcome.err


def test_what_llama_cpp_cannot_be_asked(asked: list[object], paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards against another text than the target's, and random weights whose drafts nobody would accept."""
    python = fake_llama_cpp.python(tmp_path / "env")
    own = ["--llama-cpp-python", python]
    assert_mistake(paradraft(*asked, "--methods", "llama-cpp-draft", *own, "--temperature", 0.5), "greedily only")
    assert_mistake(
        paradraft(*asked, "--methods", "llama-cpp-draft", *own),
        "no weights in 'float64': use one of bfloat16, float16, float32",
    )
    shapes = ["bench", "--target", "shape:tiny-target", "--draft", "shape:tiny-draft", "--dtype", "float32"]
    few = ["--num-prompts", 2, "--prompt-tokens", 5, "--max-new-tokens", 8, "--runs", 1]
    methods = ["--methods", "ar,llama-cpp,llama-cpp-draft:k=2"]
    assert_mistake(paradraft(*shapes, *few, *methods, *own), "'llama-cpp-draft:k=2'", "add --synthetic-acceptance")
    vllm = ["--methods", "vllm-draft", "--vllm-python", fake_vllm.python(tmp_path), "--synthetic-acceptance", "0.5"]
    assert_mistake(paradraft(*shapes, *few, *vllm), "has verdicts of its own")


def test_a_report_of_what_is_no_result(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the command's own mistakes: one line, nothing written."""
    file = tmp_path / "result.json"
    assert_mistake(paradraft("report", file, tmp_path / "page"), "cannot be read")
    file.write_text("[]", encoding="utf-8")
    assert_mistake(paradraft("report", file, tmp_path / "page"), "no result of a benchmark")
    file.write_text(json.dumps(result()), encoding="utf-8")
    assert_mistake(paradraft("report", file, file), "is a file")
    assert_mistake(paradraft("report", file, tmp_path / "page", "--methods", "ar,pard"), "no method 'pard'")
    assert_mistake(paradraft("report", file, tmp_path / "page", "--plot", tmp_path / "out.pdf"), "name a .png file")
    assert not (tmp_path / "page").exists()


def test_a_result_is_shown_again(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards results that one wants to look at again: as the table with the definitions of today, or as a picture of a
    few of its methods."""
    file, picture = tmp_path / "result.json", tmp_path / "few.png"
    older = result()
    for one in older["methods"].values():
        del one["speedup_vs_fastest_ar"], one["baseline"], one["fastest_baseline"]
    file.write_text(json.dumps(older), encoding="utf-8")
    shown = paradraft("report", file, "--methods", "pard:k=4,ar")
    assert shown.code == 0, shown.err
    assert "AR+ *" in shown.out and "PARD, k=4" in shown.out and "vLLM" not in shown.out
    assert "1.00x" in shown.out and "1.50x" not in shown.out  # as fast as AR+, whatever the file says
    assert "distinct 4-grams of the answers: 25%" in shown.out
    assert paradraft("report", file, "--plot", picture, "--methods", "ar,pard:k=4").out == f"{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_vllm
def test_vllm_says_what_we_say(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the comparison with vLLM itself: PARD on the shipped weights, token for token, and as often accepted. In
    bfloat16 near-ties part, and the shipped drafter has a head that vLLM does not read."""
    draft = tmp_path / "draft"
    made = paradraft("export", "pocket", draft, "--target", "pocket", "--to", "vllm", "--no-measure")
    assert made.code == 0, made.err
    asked = ["--num-prompts", 2, "--max-new-tokens", 48, "--runs", 1, "--no-compile", "--dtype", "float32"]
    methods = ["--methods", "ar,pard:k=4,vllm,vllm-pard:k=4", "--draft", draft]
    outcome = paradraft("bench", "--target", "pocket", *methods, *asked, "--vllm-python", installed_vllm.PYTHON)
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out.splitlines()[-1])
    assert found["vllm"]["identical_to_ar"] and found["vllm-pard:k=4"]["identical_to_ar"]
    # vLLM makes one pass more for each answer: it drafts nothing before the prompt's own pass has given a token.
    ours, theirs = (96 / found[spec]["acceptance_length"] for spec in ("pard:k=4", "vllm-pard:k=4"))
    assert ours <= theirs <= ours + 4
