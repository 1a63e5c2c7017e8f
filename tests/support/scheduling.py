"""An engine for tests of its scheduler, and what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paradraft.core import Request
from paradraft.decode.generation import Generation
from paradraft.drafters.ngram import Config, NgramDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import ForwardOut
from paradraft.sampling_params import Sampling
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import target_of

PROMPTS = [[5, 6, 7], [8], [9, 9, 10, 9, 9], [11, 12]]
SAMPLED = Sampling(temperature=0.9, presence_penalty=0.5, seed=3)


def small_engine() -> Engine:
    """Of a tiny model that never ends a text by itself."""
    model = tiny_model(1, layers=1)
    model.generation_config.eos_token_id = None
    lm = CausalLM(model, vocab_size=VOCAB, compiled=False, width=8)
    return Engine(target_of(lm), NgramDrafter(Config()), Speculation(k=3, lengths="fixed"))


def alone(engine: Engine, prompt: list[int], limit: int, sampling: Sampling = SAMPLED) -> list[int]:
    """What an engine says to one prompt while it has nothing else to do."""
    return engine.generate([prompt], max_new_tokens=limit, sampling=sampling)[0].tokens


def generation(engine: Engine, prompt: list[int], limit: int, sampling: Sampling = SAMPLED) -> Generation:
    return engine._answers.generation(Request(tokens=prompt, sampling=sampling, max_new_tokens=limit), None)


def tokens_of(stream: Iterator[Any]) -> list[int]:
    return [token for chunk in stream for token in chunk.tokens]


@contextmanager
def passes_of(engine: Engine) -> Iterator[list[int]]:
    """The number of rows of each pass that decodes."""
    rows: list[int] = []
    forward = engine.target.lm.forward

    def counted(tokens: torch.Tensor, *rest: Any, **settings: Any) -> ForwardOut:
        rows.append(len(tokens))
        return forward(tokens, *rest, **settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.target.lm, "forward", counted)
        yield rows


class Loop:
    """An event loop that calls back in the thread that schedules the call, and slowly."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.calls = seconds, 0

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: object) -> None:
        self.calls += 1
        threading.Event().wait(self.seconds)
        function(*arguments)


def poisoned(engine: Engine, token: int) -> None:
    """Gives a token an embedding that is no number; its logits stay."""
    model = engine.target.lm.model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
