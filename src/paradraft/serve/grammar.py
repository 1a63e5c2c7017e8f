"""Answers that are JSON: which tokens may follow a text so that the whole can still be JSON of a schema.

[llguidance](https://github.com/guidance-ai/llguidance) reads schemas and says which tokens may follow. A `Grammar` is a
processor of logits, so target and drafter ask it about the text before every drafted position, and it is a function of
that text alone: the seeded text is the same with any drafter and without one.

Shape letters: M texts, T tokens of each, V vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import math
import textwrap
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from paradraft.models.target import TargetFacts

MOST_SCHEMA_BYTES = 2**16
"""Of a schema, without spaces between its parts: the slowest of this size takes llguidance one to four seconds."""
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""What a schema may need while it is read, and while an answer grows; of states at most about 100 MB."""
SPACE = r" |\n{1,2}[ \t]{0,20}"
"""What may stand between the parts of JSON, as in llama.cpp: with any number of spaces some answers would never end."""
NO_WAY_ON = "NoExtensionBias"
"""What llguidance says where nothing can begin a text."""
MOST_REASON = 200
"""Characters of a reason of llguidance's."""
KEPT_TEXTS = 64
"""After how many texts an answer keeps what may follow: those of a round of drafting and of its verification."""
Forbidden = NDArray[np.bool_]


class Grammar:
    """Which tokens may follow an answer; a processor of logits (`paradraft.sampling_params.LogitsProcessor`).

    Tokens that end a text may follow where the answer is JSON of the schema, and nowhere else. After a text that is not
    the beginning of any such JSON, which the target never chooses, everything may follow.

    Args:
        matcher: of llguidance, before the first token; it is copied.
        prompt: tokens before the answer.
        eos_ids: tokens that end a text.
    """

    def __init__(self, matcher: LLMatcher, *, prompt: int, eos_ids: frozenset[int]) -> None:
        self.dead_end: str | None = None
        """Why nothing may follow some text that was asked about, which the answer need not have come to."""
        self._first = matcher
        self._matcher = matcher.deep_copy()
        self._followed: list[int] = []
        """The tokens that the matcher has taken in."""
        self._prompt = prompt
        self._eos_ids = sorted(eos_ids)
        self._known: dict[tuple[int, ...], Forbidden] = {}
        # A drafter of another device is in a thread of its own.
        self._lock = threading.Lock()

    def __call__(self, ids_MT: Tensor, scores_MV: Tensor) -> Tensor:
        """Scores in which what may not follow is -inf."""
        answers = ids_MT[:, self._prompt :].tolist()
        with self._lock:
            forbidden_MV = [self.forbidden(answer, scores_MV.shape[1]) for answer in answers]
        return scores_MV.masked_fill(torch.from_numpy(np.stack(forbidden_MV)).to(scores_MV.device), -math.inf)

    def forbidden(self, answer: list[int], vocab_size: int) -> Forbidden:
        """Which tokens `[V]` may not follow an answer."""
        key = (vocab_size, *answer)
        found = self._known.pop(key, None)
        if found is None:
            found = self._find(answer, vocab_size)
        self._known[key] = found  # the last of them is the one that was asked for last
        if len(self._known) > KEPT_TEXTS:
            del self._known[next(iter(self._known))]
        return found

    def _find(self, answer: list[int], vocab_size: int) -> Forbidden:
        if not self._follow(answer):
            return np.zeros(vocab_size, dtype=np.bool_)
        matcher = self._matcher
        forbidden = ~unpacked(matcher.compute_bitmask(), vocab_size)
        forbidden[[token for token in self._eos_ids if token < vocab_size]] = not matcher.is_accepting()
        if matcher.is_error():
            # It stays in error, so another one takes its place.
            self.dead_end = reason_of(matcher.get_error())
            self._matcher, self._followed = self._first.deep_copy(), []
            return np.ones(vocab_size, dtype=np.bool_)
        if forbidden.all():
            self.dead_end = "the model has no token with which its JSON could go on"
        return forbidden

    def _follow(self, answer: list[int]) -> bool:
        """Brings the matcher to an answer; False for a text that is not the beginning of any JSON of the schema."""
        matcher, same = self._matcher, min(len(self._followed), len(answer))
        while self._followed[:same] != answer[:same]:  # it is about a draft back, and seldom more
            same -= 1
        if same < len(self._followed):
            matcher.rollback(len(self._followed) - same)
            del self._followed[same:]
        more = answer[same:]
        taken = matcher.try_consume_tokens(more)
        self._followed += more[:taken]
        return taken == len(more) or matcher.is_error()


class Grammars:
    """Reads schemas, one after the other in a thread of their own, so that a hard one keeps nothing else waiting.

    Args:
        target: whose answers they are for.
    """

    def __init__(self, target: TargetFacts) -> None:
        self._target = target
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="schemas")
        self._tokenizer: LLTokenizer | None = None
        self._refusal: str | None = None

    async def read(self, schema: Mapping[str, Any]) -> LLMatcher:
        """`matcher` for an event loop.

        Raises:
            ValueError: see `matcher`.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.matcher, schema)

    def matcher(self, schema: Mapping[str, Any]) -> LLMatcher:
        """What a `Grammar` is made of.

        Raises:
            ValueError: the schema is too large, is none, has something that llguidance does not know, or has no JSON;
                or it cannot be used with this target.
        """
        # Options of llguidance's own, with which answers might be no JSON of the schema, would stand there.
        plain = {key: value for key, value in schema.items() if key != "x-guidance"}
        try:
            text = json.dumps(plain, separators=(",", ":"))
        except RecursionError:
            raise ValueError("the schema is nested too deeply") from None
        if len(text) > MOST_SCHEMA_BYTES:
            raise ValueError(f"the schema has {len(text)} bytes, use at most {MOST_SCHEMA_BYTES}")
        tokenizer = self._known_tokenizer()
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACE})
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
            trial = Grammar(matcher, prompt=0, eos_ids=self._target.eos_ids)
            trial.forbidden([], self._target.vocab_size)
        except BaseException as error:
            raise _mistake(error) from None
        if matcher.is_error() or trial.dead_end is not None:
            raise ValueError(reason_of(matcher.get_error()) or trial.dead_end)
        return matcher

    def _known_tokenizer(self) -> LLTokenizer:
        """The target's tokenizer as llguidance knows it: of one with 150,000 tokens that takes a second."""
        if self._tokenizer is None and self._refusal is None:
            tokenizer = self._target.tokenizer
            ends = sorted(self._target.eos_ids & set(tokenizer.get_vocab().values()))
            try:
                self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=ends)
            except BaseException as error:
                self._refusal = str(_mistake(error)) if ends else "no token ends its texts"
        if self._tokenizer is None:
            raise ValueError(f"this model's tokenizer cannot be used for it: {self._refusal}")
        return self._tokenizer


def unpacked(packed: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """Bits of tokens, the lowest of each byte first, as booleans `[V]`; tokens that have none may not follow.

    >>> unpacked(bytes([0b101]), 4).tolist(), unpacked(bytes([0b101, 255]), 2).tolist()
    ([True, False, True, False], [True, False])
    """
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little").view(np.bool_)
    return bits[:vocab_size] if vocab_size <= len(bits) else np.pad(bits, (0, vocab_size - len(bits)))


def reason_of(message: str) -> str:
    """What llguidance says, in one line that is not too long.

    >>> reason_of("regex parse error:\\n    (\\n    ^\\nerror: unclosed group\\n<non-verbose/>")
    'regex parse error: ( ^ error: unclosed group'
    """
    reason = textwrap.shorten(message.replace("<non-verbose/>", ""), MOST_REASON, placeholder=" …")
    return 'no JSON fits the schema: does a "$ref" lead back to itself?' if reason == NO_WAY_ON else reason


def _mistake(error: BaseException) -> ValueError:
    """An error of llguidance's, or a panic of its code in Rust, which is no `Exception`, as one of ours."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ValueError(reason_of(str(error)))
    raise error
