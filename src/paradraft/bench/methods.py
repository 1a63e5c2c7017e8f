"""The decoding methods that a benchmark compares.

A method is written `name` or `name:setting=value:…`, such as `autoregressive:k=3` or
`pard:tree=24:verify=rejection:lengths=expected:batch=4`. `hf` is plain `generate` of `transformers`
(AR), `ar` is our decoding without a drafter (AR+), and every drafter is a method.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig

from paradraft.api import branches, drafter_names, load_drafter, takes_draft
from paradraft.bench.roofline import Passes, models_of, passes_of, plain_passes
from paradraft.core import RULES, Drafter, Sampling, Tree
from paradraft.decode.lengths import POLICIES
from paradraft.decode.stats import Stats
from paradraft.engine import Engine
from paradraft.models.loading import DTYPES, Runtime
from paradraft.models.target import Target
from paradraft.models.texts import opening

HF, AR = "hf", "ar"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answers to one batch of prompts.

    Args:
        tokens: the new tokens of each.
        total_s: from the prompts to the last token, prefill included.
        stats: counts and times of our own loop; None for `hf`.
        passes: what the models did; empty if nobody knows.
        by_round: for each answer the number of tokens that each target pass gave it; None for `hf`.
    """

    tokens: list[list[int]]
    total_s: float
    stats: Stats | None
    passes: Passes = field(default_factory=dict)
    by_round: list[list[int]] | None = None


Answerer = Callable[[list[str], int, Sampling], Answer]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to decode.

    Args:
        spec: as the user wrote it; methods that differ in nothing else are equal.
        name: `hf`, `ar` or a drafter.
        k: most tokens drafted per round, one behind the other.
        tree: nodes to grow drafts to; None for chains.
        verify: the verification rule.
        lengths: the length policy.
        dtype: of the weights and activations.
        draft: the draft model, where the drafter has one.
        batch: prompts answered together.

    Raises:
        ValueError: an unknown method or setting.
    """

    spec: str = field(compare=False)
    name: str
    k: int
    tree: int | None
    verify: str
    lengths: str
    dtype: str
    draft: str | None
    batch: int

    @classmethod
    def parse(
        cls,
        spec: str,
        *,
        k: int = 8,
        tree: int | None = None,
        verify: str = "match",
        lengths: str = "fixed",
        dtype: str = "float32",
        draft: str | None = None,
    ) -> Method:
        """Reads a method; the other arguments are the values of settings that it leaves out."""
        name, *settings = settings_of(spec)
        known = [HF, AR, *(drafter for drafter in drafter_names() if drafter != "none")]
        if name not in known:
            raise ValueError(f"unknown method {name!r}: use some of {', '.join(known)}")
        allowed = _settings(name)
        values: dict[str, str] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals or key not in allowed or key in values:
                raise ValueError(f"method {spec!r}: settings of {name} are {', '.join(allowed)}, each at most once")
            values[key] = value
        for key in ("k", "tree", "batch"):
            if not values.get(key, "1").isdigit() or int(values.get(key, 1)) < 1:
                raise ValueError(f"method {spec!r}: {key} must be a whole number of at least 1")
        if "tree" in values:
            tree = int(values["tree"])
        verify, lengths = values.get("verify", verify), values.get("lengths", lengths)
        dtype = values.get("dtype", dtype)
        for key, value, names in (("verify", verify, RULES), ("lengths", lengths, POLICIES), ("dtype", dtype, DTYPES)):
            if value not in names:
                raise ValueError(f"method {spec!r}: {key}={value!r}: use one of {', '.join(names)}")
        return cls(
            spec=spec,
            name=name,
            k=int(values.get("k", k)),
            tree=tree if "tree" in allowed else None,
            verify=verify if "verify" in allowed else "match",
            lengths=lengths if "lengths" in allowed else "fixed",
            dtype=dtype,
            draft=values.get("draft", draft) if "draft" in allowed else None,
            batch=int(values.get("batch", 1)),
        )

    @property
    def left_out(self) -> frozenset[str]:
        """The settings that it has and its spec does not name."""
        return frozenset(setting for setting in _settings(self.name) if f":{setting}=" not in self.spec)

    @property
    def drafter_name(self) -> str:
        """The drafter behind the method; `hf` has none either."""
        return "none" if self.name in (HF, AR) else self.name

    def load_drafter(self, target: Target, runtime: Runtime) -> Drafter:
        """Loads the drafter, which methods that differ in k alone can share.

        Raises:
            ValueError: see `paradraft.load`.
        """
        return load_drafter(self.drafter_name, target, draft=self.draft, runtime=runtime)

    def answerer(self, target: Target, drafter: Drafter) -> Answerer:
        """What answers prompts by this method.

        Raises:
            ValueError: the settings do not fit each other.
        """
        return _hugging_face(target) if self.name == HF else _ours(self.engine(target, drafter))

    def engine(self, target: Target, drafter: Drafter) -> Engine:
        """The engine behind a method of ours.

        Raises:
            ValueError: the settings do not fit each other.
        """
        tree = None if self.tree is None else Tree(budget=self.tree)
        return Engine(target, drafter, k=self.k, verify=self.verify, tree=tree, lengths=self.lengths)


def settings_of(spec: str) -> list[str]:
    """A method's name and its settings; the colon of a shape belongs to its name.

    >>> settings_of("pard:k=4:draft=shape:llama-3.2-1b")
    ['pard', 'k=4', 'draft=shape:llama-3.2-1b']
    """
    return re.split(r"(?<!=shape):", spec)


def _settings(name: str) -> list[str]:
    """What a method's spec may set."""
    if name in (HF, AR):
        return ["dtype", "batch"]
    own = ["tree"] * branches(name) + ["draft"] * takes_draft(name)
    return ["dtype", "batch", "k", "verify", "lengths", *own]


def _ours(engine: Engine) -> Answerer:
    models = models_of(engine.target.lm, engine.drafter)

    def answer(prompts: list[str], max_new_tokens: int, sampling: Sampling) -> Answer:
        results = engine.generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling, batch_size=len(prompts))
        stats = engine.clock.stats
        return Answer(
            tokens=[result.tokens for result in results],
            total_s=stats.total_s,
            stats=stats,
            passes=passes_of(models),
            by_round=[engine.clock.tokens_by_round(row) for row in range(len(results))],
        )

    return answer


def _hugging_face(target: Target) -> Answerer:
    model, tokenizer = target.lm.model, target.tokenizer
    eos_ids = sorted(target.eos_ids)

    def answer(prompts: list[str], max_new_tokens: int, sampling: Sampling) -> Answer:
        chosen: dict[str, object] = {"do_sample": False}
        if not sampling.is_greedy:
            chosen = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        torch.manual_seed(sampling.seed)
        rows = [opening(prompt, tokenizer) for prompt in prompts]
        width = max(map(len, rows))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        began_s = time.perf_counter()
        answered = model.generate(
            tokens,
            attention_mask=mask,
            generation_config=GenerationConfig(
                max_new_tokens=max_new_tokens, eos_token_id=eos_ids or None, pad_token_id=0, **chosen
            ),
        )[:, width:].tolist()
        total_s = time.perf_counter() - began_s
        passes = plain_passes(len(rows), width, len(answered[0]))
        return Answer(tokens=[up_to_end(row, eos_ids) for row in answered], total_s=total_s, stats=None, passes=passes)

    return answer


def up_to_end(tokens: list[int], eos_ids: list[int]) -> list[int]:
    """An answer without the filling behind its end.

    >>> up_to_end([5, 6, 2, 0, 0], [2])
    [5, 6, 2]
    """
    ends = [place + 1 for place, token in enumerate(tokens) if token in eos_ids]
    return tokens[: ends[0]] if ends else tokens
