"""Recipe templates; the base install reads them too."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path


def templates_of(name: str) -> dict[str, Path]:
    """Files of the shipped recipe templates of a training, by template name."""
    folder = Path(str(resources.files("paradraft"))) / "recipes" / name
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def template_text(name: str, template: str, file: Path, settings: Mapping[str, object] | None = None) -> str:
    """Fills in a recipe template.

    Args:
        file: where the recipe will be written, for the commands in its comments.
        settings: replace those of the template; new ones are appended.

    Raises:
        ValueError: there is no such template.
    """
    known = templates_of(name)
    if template not in known:
        listed = f"use {', '.join(known)}" if known else "there is none; --settings lists what a recipe may say"
        raise ValueError(f"--template {template}: no such recipe for {name}: {listed}")
    text = known[template].read_text(encoding="utf-8").replace("THIS_FILE", shlex.quote(str(file)))
    for key, value in (settings or {}).items():
        line, new = re.compile(rf"(?m)^{key}: [^#\n]*?(?= *(?:#|$))"), f"{key}: {json.dumps(value)}"
        text = line.sub(new.replace("\\", r"\\"), text) if line.search(text) else f"{text}{new}\n"
    return text


def write_template(name: str, template: str, file: Path) -> None:
    """Writes a recipe from a template.

    Raises:
        ValueError: there is no such template, or the file exists.
    """
    text = template_text(name, template, file)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError:
        raise ValueError(f"{file} exists: name another file after {name}") from None
