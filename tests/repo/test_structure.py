"""The structure of the source: a name has one meaning, and a kind of thing has one room."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from paradraft.drafters import drafter_names
from paradraft.models.architectures import FAMILIES
from paradraft.verify import rule_names

PACKAGE = Path(__file__).parents[2] / "src" / "paradraft"
BY_DESIGN = {"Config"}
"""Class names that every drafter has."""
NAMING_FAMILIES = {
    "models/architectures/": "the families",
    "sources/presets.py": "shapes of known models",
    "sources/gguf_tokenizer.py": "names of tokenizers",
    "drafters/parts/draft_layers.py": "vLLM's EAGLE heads are Mistral's layers",
    "drafters/parts/block_layers.py": "DFlash's layers are Qwen3's",
    "formats/published_block.py": "and so is the config of its folders",
}
"""Files that may name model families."""


def parsed() -> dict[str, ast.Module]:
    """All modules, by their paths inside the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def shared_classes(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Public names of several classes, with the files that define them."""
    homes = defaultdict(list)
    for name, module in modules.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in BY_DESIGN:
                homes[node.name].append(name)
    return {name: files for name, files in homes.items() if len(files) > 1}


def compared(modules: dict[str, ast.Module], names: set[str]) -> Iterator[str]:
    """Places where a value is compared with one of some names, or looked up among them."""
    for file, module in modules.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Compare):
                parts: list[ast.AST] = list(ast.walk(node))
            elif isinstance(node, ast.Dict):
                parts = [key for key in node.keys if key is not None]
            else:
                continue
            if {each.value for each in parts if isinstance(each, ast.Constant)} & names:
                yield f"{file}:{node.lineno}"


def unwaited(modules: dict[str, ast.Module]) -> Iterator[str]:
    """Copies that the host does not wait for, unless they go from pinned memory to a GPU."""
    for file, module in modules.items():
        for node in ast.walk(module):
            is_unwaited = isinstance(node, ast.Call) and "non_blocking" in {each.arg for each in node.keywords}
            if is_unwaited and "pin_memory" not in ast.unparse(node):
                yield f"{file}:{node.lineno}"


def families_named(modules: dict[str, ast.Module]) -> Iterator[str]:
    """Places where a text is the name of a model family, or a family's class of `transformers` is imported."""
    classes = tuple(family.partition("_")[0] for family in FAMILIES)
    for file, module in modules.items():
        for node in ast.walk(module):
            is_name = isinstance(node, ast.Constant) and node.value in FAMILIES
            is_import = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
            if is_name or (is_import and any(each.name.lower().startswith(classes) for each in node.names)):
                yield f"{file}:{node.lineno}"


def test_only_uploads_are_not_waited_for() -> None:
    """Guards a stage on a CPU, which read what a GPU had not yet written: other tokens, or an index out of range."""
    assert not list(unwaited(parsed()))


def test_an_unwaited_copy_is_seen() -> None:
    """Control: the form that there was, and one that is safe."""
    copies = ["a.to(device, non_blocking=True)", "a.pin_memory().to(device, non_blocking=True)"]
    modules = {f"{index}.py": ast.parse(copy) for index, copy in enumerate(copies)}
    assert list(unwaited(modules)) == ["0.py:1"]


def test_a_class_name_has_one_meaning() -> None:
    """Guards readers, who met four classes `Asked` and three `Endpoint`."""
    assert not shared_classes(parsed())


def test_only_a_rule_knows_its_name() -> None:
    """Guards new verification rules against branches elsewhere, which would take them for another."""
    outside = {file: module for file, module in parsed().items() if not file.startswith("verify/")}
    assert not list(compared(outside, set(rule_names())))


def test_only_their_files_name_families() -> None:
    """Guards new families against tables and branches elsewhere, which would take them for another."""
    named = list(families_named(parsed()))
    assert not [line for line in named if not line.startswith(tuple(NAMING_FAMILIES))]
    for file in NAMING_FAMILIES:  # no exception is out of date
        assert any(line.startswith(file) for line in named), file


@pytest.mark.parametrize(
    "text", ['config.model_type == "granite"', 'A = ("qwen2", "x")', "from transformers import A, Gemma3TextConfig"]
)
def test_a_family_name_is_seen(text: str) -> None:
    """Control: the forms that there were."""
    assert list(families_named({"a.py": ast.parse(text)})) == ["a.py:1"]


OPENAIS = "serve/schemas.py"
"""Has OpenAI's parameters, one of which is called `suffix`."""


def test_only_a_drafter_knows_its_name() -> None:
    """Guards new drafters against branches and tables elsewhere, in which they would be missing."""
    own = ("drafters/", "train/drafters/", "formats/")
    outside = {file: module for file, module in parsed().items() if not file.startswith(own)}
    assert not list(compared(outside, {*drafter_names()} - {"none", "suffix"}))
    elsewhere = {file: module for file, module in outside.items() if file != OPENAIS}
    assert not list(compared(elsewhere, {"suffix"}))


@pytest.mark.parametrize(
    "text",
    ['a.verify == "match"', 'x = 1 if rule in ("match", "rejection") else 2', 'labels = {"match": "the same tokens"}'],
)
def test_a_comparison_is_seen(text: str) -> None:
    """Control: the forms that there were."""
    assert list(compared({"a.py": ast.parse(text)}, {"match"})) == ["a.py:1"]


def test_a_shared_class_is_seen() -> None:
    """Control: of two classes of one name both files are named."""
    modules = {file: ast.parse("class Task: ...") for file in ("a.py", "b.py")}
    assert shared_classes(modules) == {"Task": ["a.py", "b.py"]}
