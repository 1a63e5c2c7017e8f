"""Documents and examples say what the code does.

Four conventions for code blocks in README.md, CONTRIBUTING.md and docs/:

- ```` ```python run ````: executed; the blocks of a document share their names. Blocks with `>>>` run as doctests.
  A block with the word "pocket" needs the shipped models.
- ```` ```python from PATH ````: an excerpt; it stands in that file, literally. A line `...` leaves lines out.
- ```` ```yaml ````: a recipe of a training; ```` ```yaml for SERVER ```` is a file of another server.
- any other block is only read.
"""

from __future__ import annotations

import doctest
import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from examples import new_drafter, quickstart

from paradraft import drafters
from paradraft.drafters import drafter_names
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.export.engines import vllm_fixed
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.train.drafters.pard_recipe import PardRecipe
from tests.contract import test_every_drafter as contract

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/README.md"), *ROOT.glob("recipes/*/README.md")]
)
BLOCK = re.compile(r"^```(?P<tag>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)(?P<file>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
PATH = re.compile(r"`(?P<path>[\w.-]+(?:/[\w.-]+)+\.(?:py|md|toml|yaml))`")
PLACEHOLDER = re.compile(r"\bTBD\b|(?<!`)\b(?!Q\d_K_[SML]\b)[A-Z][A-Z0-9]*_[A-Z_]+\b(?![^`\n]*`)")
"""What looks like a name to be filled in, but for types of GGUF files."""
OTHERS = "yaml for "
PLACES = (ROOT, ROOT / "src" / "paradraft", ROOT / "docs")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Compiling takes longer than everything else here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def blocks(document: Path) -> list[tuple[str, str]]:
    return [(match["tag"].strip(), match["text"]) for match in BLOCK.finditer(document.read_text(encoding="utf-8"))]


def run_block(text: str, names: dict[str, object], title: str) -> None:
    if ">>>" not in text:
        exec(compile(text, title, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(text, {}, title, title, 0)
    test.globs = names
    report: list[str] = []
    failed = doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False).failed
    assert not failed, "".join(report)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ +(.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_nothing_is_left_to_fill_in(document: Path) -> None:
    """Guards against a document that was published before its numbers were."""
    assert not PLACEHOLDER.search(document.read_text(encoding="utf-8"))


def test_a_placeholder_is_caught() -> None:
    """Control: words in capitals that stand for text, but not names of settings between backticks."""
    assert all(map(PLACEHOLDER.search, ("see RESULTS_HERE", "T08_LINE Why", "TBD")))
    assert not PLACEHOLDER.search("set `MALLOC_MMAP_THRESHOLD_=4` for GSM8K, and `DEMO_ARGS`")


@each_document
def test_runnable_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against code in a document that worked once."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, (tag, text) in enumerate(blocks(document), start=1):
        if tag == "python run":
            run_block(text, names, f"{document.name}, block {number}")


@each_document
def test_excerpts_stand_in_the_code(document: Path) -> None:
    """Guards against excerpts of code that has been changed since."""
    for tag, text in blocks(document):
        if tag.startswith("python from "):
            code = (ROOT / tag.removeprefix("python from ")).read_text(encoding="utf-8")
            lines = [line.strip() for line in code.splitlines()]
            for part in re.split(r"^ *\.\.\.\n", text, flags=re.MULTILINE):
                wanted = [line.strip() for line in part.strip().splitlines()]
                starts = range(len(lines) - len(wanted) + 1)
                assert any(lines[i : i + len(wanted)] == wanted for i in starts), f"{tag}: not there:\n{part}"


@each_document
def test_links_and_paths_exist(document: Path) -> None:
    """Guards against documents that name files which were moved."""
    prose = BLOCK.sub("", document.read_text(encoding="utf-8"))
    for link in LINK.finditer(prose):
        file = (document.parent / link["file"]).resolve() if link["file"] else document
        assert file.exists(), f"{document.name} links to {link['file']}"
        assert not link["anchor"] or link["anchor"] in anchors(file), f"{document.name}: no heading {link[0]}"
    for match in PATH.finditer(prose):
        path = match["path"]
        assert path.startswith("build/") or any((place / path).exists() for place in PLACES), (
            f"{document.name} names {path}"
        )


@each_document
def test_make_targets_exist(document: Path) -> None:
    """Guards against instructions to make what the Makefile does not know."""
    for name in re.findall(r"(?:^|`)(?:\$ )?make ([a-z][a-z-]*)", document.read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), f"make {name}"


def test_conventions_catch_what_they_should(tmp_path: Path) -> None:
    """Control: a wrong output, a made-up excerpt, and a link to nowhere must fail."""
    document = tmp_path / "wrong.md"
    run = "```python run\n>>> 1 + 1\n3\n```\n"
    excerpt = "```python from examples/quickstart.py\nimport nothing\n```\n"
    document.write_text(f"{run}{excerpt}[x](nowhere.md)\n")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        test_runnable_blocks_run(document, tmp_path, patch)
    with pytest.raises(AssertionError):
        test_excerpts_stand_in_the_code(document)
    with pytest.raises(AssertionError):
        test_links_and_paths_exist(document)


def test_quickstart_runs(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first code that a newcomer copies."""
    quickstart.main(["--target", str(family / "target"), "--draft", str(family / "pard"), "--max-new-tokens", "24"])
    assert "with and without a drafter are equal: True" in capsys.readouterr().out


def test_new_drafter_runs(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the example that a newcomer starts from; it compares itself with plain decoding."""
    new_drafter.main(["--target", str(family / "target"), "--max-new-tokens", "40"])
    assert "equal plain decoding" in capsys.readouterr().out


@pytest.fixture
def in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the contract in C++, where equality is exact and passes are several times faster than torch's."""
    monkeypatch.setattr(contract, "current", contract.RUNTIMES["compiled, float32"])


@pytest.mark.usefixtures("in_cpp")
def test_new_drafter_is_lossless(family: Path) -> None:
    """Guards the example at every K and with both of its settings."""
    plain = load(str(family / "target"), runtime=contract.current)
    for k, min_count in ((1, 1), (4, 1), (8, 2)):
        drafter = new_drafter.build(new_drafter.Config(min_count=min_count), plain.target, Runtime())
        drafted = Engine(plain.target, drafter, Speculation(k=k, lengths="fixed"))
        accepted = 0
        for sampling in (Sampling(), Sampling(temperature=0.9, seed=3)):
            expected = plain.generate("abcabcabcabc", max_new_tokens=60, sampling=sampling).tokens
            answer = drafted.generate("abcabcabcabc", max_new_tokens=60, sampling=sampling)
            assert answer.tokens == expected
            accepted += sum(answer.stats.accepted)
        assert accepted, "nothing was ever accepted, so the equality shows nothing"


@pytest.mark.usefixtures("in_cpp")
def test_new_drafter_drops_into_the_package(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the promise of one file: found by its name, and the contract holds for it, no other file changed."""
    shutil.copy(ROOT / "examples" / "new_drafter.py", tmp_path / "bigram.py")
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    assert "bigram" in drafter_names()
    contract.test_text_equals_plain_decoding(family, contract.answers(family, contract.current), "bigram", 5)
    for varying in (False, True):
        contract.test_state_is_a_function_of_the_committed_tokens(family, "bigram", varying)
    contract.test_rounds_without_a_draft_lose_nothing(family, "bigram")
    contract.test_ragged_batch_equals_single_rows(family, "bigram", None)


def test_recipes_in_documents_are_recipes() -> None:
    """Guards recipes that a reader copies: every key exists and fits the others."""
    found = [
        (document.name, yaml.safe_load(text))
        for document in DOCUMENTS
        for tag, text in blocks(document)
        if tag.startswith("yaml") and not tag.startswith(OTHERS)
    ]
    assert "training.md" in {name for name, _ in found}
    for _, recipe in found:
        PardRecipe.model_validate(recipe)


def test_settings_of_other_servers_are_those_of_the_engine() -> None:
    """Guards files for Ray Serve and llm-d: their speculative configuration is the one that the page has for vLLM."""
    (serving,) = (document for document in DOCUMENTS if document.name == "serving.md")
    ray, llm_d = (yaml.safe_load(text) for tag, text in blocks(serving) if tag.startswith(OTHERS))
    (config,) = ray["applications"][0]["args"]["llm_configs"]
    (argument,) = (word for word in llm_d["args"] if word.startswith("--speculative-config="))
    assert config["engine_kwargs"]["speculative_config"] == json.loads(argument.partition("=")[2])
    chain = vllm_fixed(8, "pard", "/models/for-vllm")
    assert config["engine_kwargs"]["speculative_config"] == chain


def test_scripts_of_the_pocket_family_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `make pocket`, which takes two hours and which nobody starts at every change: what its scripts take from
    the library is still there."""
    folder = ROOT / "recipes" / "pocket"
    names = sorted(file.stem for file in folder.glob("*.py"))
    monkeypatch.syspath_prepend(folder)
    try:
        for name in names:
            assert Path(str(importlib.import_module(name).__file__)).parent == folder
    finally:
        for name in names:
            sys.modules.pop(name, None)
