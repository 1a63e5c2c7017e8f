"""A server of the tiny family, in float64, and one of a family that can write JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from tests.support import json_models
from tests.support.serving import Serving, serving

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
    "{% if loud is defined and loud %}X{% endif %}a"
)


@pytest.fixture(scope="package")
def engine(family: Path) -> Engine:
    folder = str(family / "target")
    loaded = load(
        folder, drafter="pard", draft=str(family / "pard"), k=4, runtime=Runtime(dtype="float64"), lengths="fixed"
    )
    loaded.target.tokenizer.chat_template = TEMPLATE
    return loaded


@pytest.fixture(scope="package")
def running(engine: Engine) -> Iterator[Serving]:
    with serving(engine, max_batch=3, max_queue=40, max_body_bytes=20_000, max_new_tokens=100) as found:
        yield found


@pytest.fixture(scope="package")
def json_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("json")
    json_models.write(root)
    return root


@pytest.fixture(scope="package")
def json_engine(json_family: Path) -> Engine:
    runtime = Runtime(dtype="float64", compiled=False)
    return load(
        str(json_family / "target"),
        drafter="pard",
        draft=str(json_family / "pard"),
        k=4,
        runtime=runtime,
        lengths="fixed",
    )


@pytest.fixture(scope="package")
def json_running(json_engine: Engine) -> Iterator[Serving]:
    with serving(json_engine, max_batch=3, max_queue=40, max_body_bytes=100_000, max_new_tokens=200) as found:
        yield found
