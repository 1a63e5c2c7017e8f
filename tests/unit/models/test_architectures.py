"""A family is one file: passes in torch and in C++, drafts and checks follow from its spec."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from paradraft.engine.loader import load
from paradraft.models import architectures
from paradraft.models.architectures import FAMILIES, families_in
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_config
from tests.conftest import VOCAB, tiny_tokenizer

FILE = """
from paradraft.models.architectures import DecoderSpec

SPECS = {"made_up": DecoderSpec(is_in_cpp=True)}
"""


class MadeUpConfig(LlamaConfig):
    model_type = "made_up"


class MadeUpForCausalLM(LlamaForCausalLM):
    config_class = MadeUpConfig


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    """A model of a family that `transformers` knows."""
    AutoConfig.register("made_up", MadeUpConfig)
    AutoModelForCausalLM.register(MadeUpConfig, MadeUpForCausalLM)
    torch.manual_seed(3)
    config = MadeUpConfig(
        vocab_size=VOCAB + 8, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    MadeUpForCausalLM(config).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    yield str(tmp_path / "target")
    del CONFIG_MAPPING._extra_content["made_up"], MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[MadeUpConfig]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The family's file beside ours."""
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "made_up.py").write_text(FILE, encoding="utf-8")
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(folder)])
    for family, spec in families_in(architectures.__path__).items():
        monkeypatch.setitem(FAMILIES, family, spec)
    yield
    del sys.modules[f"{architectures.__name__}.made_up"]


@pytest.mark.usefixtures("file")
def test_a_family_is_one_file(target: str) -> None:
    """Guards the promise: a family like Llama decodes in C++, alone and with a tree, as by its own code."""
    prompt = [token % VOCAB for token in range(1, 40)]
    texts = {}
    for compiled in (None, False):
        runtime = Runtime(device="cpu", dtype="float32", compiled=compiled)
        for draft in ({"drafter": "none"}, {"drafter": "autoregressive", "draft": target, "k": 4, "tree": 6}):
            engine = load(target, runtime=runtime, lengths="fixed", **draft)
            assert engine.target.lm.is_native is (compiled is None)
            texts[compiled, draft["drafter"]] = engine.generate(prompt, max_new_tokens=30).tokens
    expected = texts[False, "none"]
    assert len(expected) == 30 and all(text == expected for text in texts.values())


def test_without_the_file_it_is_refused(target: str) -> None:
    """The control."""
    with pytest.raises(ValueError, match=r"is a made_up model; supported architectures are gemma3_text, granite, "):
        load_config(target)
