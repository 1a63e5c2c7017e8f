"""The text the pocket family learns: Python's standard library, and packages that paradraft installs.

Every installation has both, so nothing is downloaded. Whole modules of the library are held out; the
prompts that benchmarks and the demo use come from those modules alone, so no model of the family has
seen them.
"""

from __future__ import annotations

import ast
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = (
    "bisect.py", "calendar.py", "colorsys.py", "configparser.py", "fnmatch.py", "fractions.py",
    "getopt.py", "graphlib.py", "heapq.py", "netrc.py", "queue.py", "reprlib.py", "sched.py",
    "shelve.py", "shlex.py", "statistics.py", "string.py", "textwrap.py", "timeit.py", "zipapp.py",
)  # fmt: skip
SKIPPED = ("test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "site-packages", "__pycache__")
PACKAGES = (
    "networkx", "numpy", "matplotlib", "huggingface_hub", "jinja2", "fsspec", "PIL", "rich", "typer", "click",
    "packaging", "tqdm", "filelock", "anyio", "hypothesis", "_pytest", "transformers",
)  # fmt: skip
SKIPPED_IN_PACKAGES = ("test", "tests", "testing", "models", "_vendor")
MAX_FILE_BYTES = 200_000


@dataclass(frozen=True, kw_only=True)
class Document:
    """One source file."""

    name: str
    text: str


def read_library() -> tuple[list[Document], list[Document]]:
    """All modules of the running Python's standard library.

    Returns:
        (training documents, held-out documents), each sorted by file name.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = _read(root, root, SKIPPED)
    train = [document for document in documents if document.name not in HELD_OUT]
    return train, [document for document in documents if document.name in HELD_OUT]


def read_packages() -> list[Document]:
    """The modules of `PACKAGES`, package by package.

    Raises:
        FileNotFoundError: one is not installed.
    """
    root = Path(sysconfig.get_paths()["purelib"])
    documents = []
    for package in PACKAGES:
        if not (root / package).is_dir():
            raise FileNotFoundError(f"{package} is not installed: `make setup` installs what the pocket family learns")
        documents += _read(root / package, root, SKIPPED_IN_PACKAGES)
    return documents


def _read(folder: Path, root: Path, skipped: tuple[str, ...]) -> list[Document]:
    """All readable modules in a folder, sorted by file name; names are relative to `root`."""
    documents = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(root)
        if any(part in skipped for part in name.parts) or not 200 < path.stat().st_size < MAX_FILE_BYTES:
            continue
        try:
            documents.append(Document(name=str(name), text=path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return documents


def function_prompts(document: Document, *, max_chars: int = 500) -> list[dict[str, str]]:
    """Prompts of the task "finish this function" from one module.

    A prompt is the module's text up to and including a function's signature and docstring, cut at
    the front to whole lines of at most `max_chars` characters. Functions with a body of fewer than
    four lines are passed over.

    Returns:
        Dictionaries with `prompt`, `module` and `function`.
    """
    lines = document.text.splitlines(keepends=True)
    prompts = []
    for node in ast.walk(ast.parse(document.text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not body or node.end_lineno - body[0].lineno < 3:
            continue
        head = lines[: body[0].lineno - 1]
        while head and sum(map(len, head)) > max_chars:
            head = head[1:]
        if len("".join(head)) >= max_chars // 2:
            # Without the last newline: the tokenizer joins it with the indentation that follows.
            prompts.append({"prompt": "".join(head).rstrip("\n"), "module": document.name, "function": node.name})
    return prompts
