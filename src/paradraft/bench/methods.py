"""The decoding methods that a benchmark compares.

A method is written `name` or `name:setting=value:…`, such as `autoregressive:k=3` or
`hf:dtype=bfloat16`. `hf` is plain `generate` of `transformers` (AR), `ar` is our decoding without a
drafter (AR+), and every drafter is a method.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from paradraft.api import Engine, drafter_names, load_drafter, takes_draft
from paradraft.core import Drafter, Sampling
from paradraft.decode.stats import Stats
from paradraft.models.loading import Runtime
from paradraft.models.target import Target

HF, AR = "hf", "ar"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered prompt.

    Args:
        tokens: the new tokens.
        total_s: from the prompt to the last token, prefill included.
        stats: counts and times of our own loop; None for `hf`.
    """

    tokens: list[int]
    total_s: float
    stats: Stats | None


Answerer = Callable[[str, int, Sampling], Answer]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to decode.

    Args:
        spec: as the user wrote it.
        name: `hf`, `ar` or a drafter.
        k: tokens drafted per round.
        dtype: of the weights and activations.
        draft: the draft model, where the drafter has one.

    Raises:
        ValueError: an unknown method or setting.
    """

    spec: str
    name: str
    k: int
    dtype: str
    draft: str | None

    @classmethod
    def parse(cls, spec: str, *, k: int, dtype: str, draft: str | None) -> Method:
        """Reads a method; the arguments are the values of settings that it leaves out."""
        name, *settings = spec.split(":")
        known = [HF, AR, *(drafter for drafter in drafter_names() if drafter != "none")]
        if name not in known:
            raise ValueError(f"unknown method {name!r}: use some of {', '.join(known)}")
        allowed = ["dtype"]
        if name not in (HF, AR):
            allowed += ["k", "draft"] if takes_draft(name) else ["k"]
        values: dict[str, str] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals or key not in allowed:
                raise ValueError(f"method {spec!r}: settings of {name} are {', '.join(allowed)}")
            values[key] = value
        if not values.get("k", "1").isdigit():
            raise ValueError(f"method {spec!r}: k must be a whole number")
        return cls(
            spec=spec,
            name=name,
            k=int(values.get("k", k)),
            dtype=values.get("dtype", dtype),
            draft=values.get("draft", draft),
        )

    @property
    def drafter_name(self) -> str:
        """The drafter behind the method; `hf` has none either."""
        return "none" if self.name in (HF, AR) else self.name

    def load_drafter(self, target: Target, runtime: Runtime) -> Drafter:
        """Loads the drafter, which methods that differ in k alone can share.

        Raises:
            ValueError: see `paradraft.load`.
        """
        draft = self.draft if takes_draft(self.drafter_name) else None
        return load_drafter(self.drafter_name, target, draft=draft, runtime=runtime)

    def answerer(self, engine: Engine) -> Answerer:
        """What answers prompts by this method, with this target and drafter."""
        return _hugging_face(engine.target) if self.name == HF else _ours(engine)


def _ours(engine: Engine) -> Answerer:

    def answer(prompt: str, max_new_tokens: int, sampling: Sampling) -> Answer:
        result = engine.generate(prompt, max_new_tokens=max_new_tokens, sampling=sampling)
        return Answer(tokens=result.tokens, total_s=result.stats.total_s, stats=result.stats)

    return answer


def _hugging_face(target: Target) -> Answerer:
    model, tokenizer = target.lm.model, target.tokenizer
    eos_ids = sorted(target.eos_ids)

    def answer(prompt: str, max_new_tokens: int, sampling: Sampling) -> Answer:
        chosen: dict[str, object] = {"do_sample": False}
        if not sampling.is_greedy:
            chosen = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        torch.manual_seed(sampling.seed)
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]], device=model.device)
        began_s = time.perf_counter()
        answered = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=GenerationConfig(
                max_new_tokens=max_new_tokens, eos_token_id=eos_ids or None, pad_token_id=0, **chosen
            ),
        )[0, tokens.shape[1] :].tolist()
        return Answer(tokens=answered, total_s=time.perf_counter() - began_s, stats=None)

    return answer
