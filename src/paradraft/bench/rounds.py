"""Answers that only their length ends, round by round, under any rule: what the library's users cannot ask for."""

from __future__ import annotations

from collections.abc import Iterator

from paradraft.core import Sampling, Step
from paradraft.decode.sequential import Verify, decode
from paradraft.decode.stats import Clock
from paradraft.decode.stops import Stops
from paradraft.engine import Engine
from paradraft.request import requests_of


def rounds(
    engine: Engine, prompts: list[str], max_new_tokens: int, samplings: list[Sampling], verify: Verify, clock: Clock
) -> Iterator[Step]:
    """Answers one batch with the engine's target, drafter and lengths.

    Args:
        engine: how to draft.
        prompts: texts.
        max_new_tokens: tokens of each answer.
        samplings: for each prompt.
        verify: the rule, which need not be the engine's.
        clock: takes the times.

    Raises:
        ValueError: a prompt and its answer do not fit into the model.
    """
    requests = requests_of(engine.target, prompts, max_new_tokens, samplings)
    stops = Stops(limits=[max_new_tokens] * len(requests), eos_ids=frozenset())
    prompt = engine.prompt([request.tokens for request in requests], tuple(samplings))
    clock.skip()
    return decode(engine.target, engine.drafter, prompt, verify, stops=stops, lengths=engine.lengths, clock=clock)
