"""How an instruct model is told from a base model, which may have the same template: by what ends its texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sources.target_loading import load_target
from tests.conftest import tiny_model, tiny_tokenizer
from tests.support import gguf_files

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %} z\n{% endif %}{% endfor %}"
REFUSES = "{{ raise_exception('only the user speaks') }}"
ENDLESS = "{% for m in messages %}{{ m.content }}{% endfor %}"
SILENT = "{% for m in messages %}{{ m.role }}{% endfor %}"
Z = tiny_tokenizer().convert_tokens_to_ids("z")


def target_of(folder: Path, template: str | None, ends: object) -> Target:
    """A folder whose template ends the assistant's turns with the token z."""
    tiny_model(1, rows=64).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load_target(str(folder), Runtime(dtype="float64", compiled=False))


@pytest.mark.parametrize(
    ("template", "ends", "is_instruct"),
    [
        (TURNS, [0, Z], True),
        (TURNS, Z, True),
        (TURNS.replace("z", "<|eos|>"), 0, True),
        (TURNS, 0, False),
        (TURNS, None, False),
        (None, [0, Z], False),
        (REFUSES, Z, False),
        (ENDLESS, Z, False),
        (SILENT, Z, False),
        ("{% if", Z, False),
    ],
)
def test_folders(tmp_path: Path, template: str | None, ends: object, is_instruct: bool) -> None:
    """Guards base models with a template, whose texts another token ends, and templates that show no end of a turn."""
    assert target_of(tmp_path / "instruct", template, ends).is_instruct == is_instruct


@pytest.mark.parametrize(
    ("more", "is_instruct"),
    [({}, False), ({"tokenizer.ggml.eos_token_id": 1}, True), ({"tokenizer.ggml.eot_token_id": 1}, True)],
)
def test_gguf_files(tmp_path: Path, more: dict[str, object], is_instruct: bool) -> None:
    """Guards files of base models: the end of a turn, which is in their vocabulary, ends their texts too, but they do
    not name it."""
    file = tmp_path / "chat-instruct.gguf"
    gguf_files.write_gguf(file, gguf_files.tiny_model("llama"), more=more)
    target = load_target(str(file), Runtime(compiled=False))
    assert target.is_instruct == is_instruct and 1 in target.eos_ids
