"""Tiny random models of one family, in float64, where equality of texts is exact."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paradraft.train.run import curves

VOCAB = 64
"""Token ids of the tiny tokenizer; the embedding has eight more rows."""

END_S = 120.0
"""The longest that what a test has used may take to end."""


def pytest_configure() -> None:
    """Has Ctrl-C heard, by the programs that tests start too: in the background of a script it is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Ends the process with a traceback of all threads if it hangs after a test that failed; pytest's own limit, in
    pyproject.toml, no longer holds there."""
    faulthandler.dump_traceback_later(END_S, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = ["<|eos|>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+"]
    vocab = {token: index for index, token in enumerate(alphabet[:VOCAB])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="+"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")


def tiny_model(seed: int, *, llama: bool = False, layers: int = 2, rows: int = VOCAB + 8) -> torch.nn.Module:
    torch.manual_seed(seed)
    kind, config = (LlamaForCausalLM, LlamaConfig) if llama else (Qwen3ForCausalLM, Qwen3Config)
    model = kind(
        config(
            vocab_size=rows,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            initializer_range=0.3,
        )
    )
    return model.to(torch.float64).eval()


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target`, `draft` (the target's weights, disturbed, so that some drafts are accepted) and `pard`."""
    root = tmp_path_factory.mktemp("family")
    target = tiny_model(1)
    draft = tiny_model(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    for name, model in (("target", target), ("draft", draft), ("pard", draft)):
        if name == "pard":
            model.config.pard_token = model.config.mask_token_id = VOCAB + 1
            model.config.spd_type = "pard"
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture(autouse=True)
def quick_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the speeds of the machine be measured in no time."""
    monkeypatch.setattr("paradraft.bench.hardware.bandwidth.MOST_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("paradraft.bench.hardware.bandwidth.LEAST_BYTES", 2**18)
    monkeypatch.setattr("paradraft.bench.hardware.bandwidth.SIDES", {"cpu": (64,)})


@pytest.fixture(autouse=True)
def no_packed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the weights of tests out of the user's cache."""
    monkeypatch.setenv("PARADRAFT_PACKED_FILES", "0")


@pytest.fixture
def drawn() -> None:
    """What tests ask for in which runs of training draw their curves."""


@pytest.fixture(autouse=True)
def quick_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs of training write what their curves show where the picture would be: drawing takes as long as a run."""

    def told(folder: Path) -> None:
        shown = [
            {name: value for name, value in asdict(report).items() if name not in ("rows_per_s", "left_s")}
            for report in curves.read_history(folder)
        ]
        (folder / curves.PICTURE).write_bytes(b"\x89PNG" + repr(shown).encode())

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(curves, "draw", told)


@pytest.fixture(autouse=True)
def no_known_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the places of drafters that tests train out of the user's cache: all tests have the same tiny target, so
    another test would draft with them."""
    monkeypatch.setattr("paradraft.sources.recorded.remember_drafter", lambda *trained: False)
