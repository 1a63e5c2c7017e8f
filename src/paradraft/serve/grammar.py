"""Constrained decoding: masks the tokens after which an answer can no longer become JSON of a schema.

[llguidance](https://github.com/guidance-ai/llguidance) compiles schemas and computes the masks. A `Grammar` is a logits
processor: target and drafter call it for the text before every drafted position, and it is a function of that text
alone, so the seeded text is the same with any drafter and without one.

Shape letters: M texts, T tokens of each, V vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import math
import textwrap
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from paradraft.models.target import TargetFacts

MOST_SCHEMA_BYTES = 2**16
"""Size limit of a schema without whitespace: the slowest of this size takes llguidance one to four seconds."""
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""llguidance's limits at compilation and while decoding; the states take at most about 100 MB."""
SPACE = r" |\n{1,2}[ \t]{0,20}"
"""Whitespace allowed in JSON, as in llama.cpp: with unlimited whitespace some answers would never end."""
NO_WAY_ON = "NoExtensionBias"
"""llguidance's error if no text satisfies the schema."""
MOST_REASON = 200
"""Most characters of a reason quoted from llguidance."""
KEPT_TEXTS = 64
"""Masks cached per answer: enough for the texts of a round of drafting and verification."""
Forbidden = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """What an answer must be: text, JSON of a schema, text; texts that are a single token are ids."""

    begin: Sequence[str | int]
    schema: Mapping[str, Any]
    end: Sequence[str | int]


class Grammar:
    """Logits processor (`paradraft.sampling_params.LogitsProcessor`) that enforces a JSON schema.

    EOS tokens are allowed only where the answer is complete JSON of the schema. After a text that is no prefix of such
    JSON, which the target never chooses, all tokens are allowed.

    Args:
        matcher: llguidance's, before the first token; it is copied.
        prompt: length of the prompt in tokens.
        eos_ids: tokens that end a text.
        tokenizer: splits forced bytes into forced tokens, also if the last token may become a longer token with the
            bytes after it; None forces only tokens without an alternative.
    """

    def __init__(
        self, matcher: LLMatcher, *, prompt: int, eos_ids: frozenset[int], tokenizer: LLTokenizer | None = None
    ) -> None:
        self.dead_end: str | None = None
        """Why no token is allowed after some text; the answer need not have reached that text."""
        self._first = matcher
        self._matcher = matcher.deep_copy()
        self._followed: list[int] = []
        """Tokens that the matcher has consumed."""
        self._prompt = prompt
        self._eos_ids = sorted(eos_ids)
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, ...], Forbidden] = {}
        # A drafter on another device runs in another thread.
        self._lock = threading.Lock()

    def __call__(self, ids_MT: Tensor, scores_MV: Tensor) -> Tensor:
        """Sets the scores of forbidden tokens to -inf."""
        answers = ids_MT[:, self._prompt :].tolist()
        with self._lock:
            forbidden_MV = [self.forbidden(answer, scores_MV.shape[1]) for answer in answers]
        return scores_MV.masked_fill(torch.from_numpy(np.stack(forbidden_MV)).to(scores_MV.device), -math.inf)

    def forbidden(self, answer: list[int], vocab_size: int) -> Forbidden:
        """Mask `[V]` of the tokens that may not follow an answer."""
        key = (vocab_size, *answer)
        mask = self._known.pop(key, None)
        if mask is None:
            mask = self._mask(answer, vocab_size)
        self._known[key] = mask  # last, as the most recently used
        if len(self._known) > KEPT_TEXTS:
            del self._known[next(iter(self._known))]
        return mask

    def forced(self, answer: list[int], most: int, /) -> list[int]:
        """See `ForcingProcessor`: the tokens of the bytes with which all JSON of the schema goes on; [] after other
        texts.

        The same bytes can be other tokens too: a token is certain only if the mask allows no other.
        """
        with self._lock:
            is_prefix = self._follow(answer)
            matcher = self._matcher.deep_copy()  # whose errors do not change later masks
            if matcher.is_error():
                self._restart()
                return []
        if not is_prefix:
            return []
        if self._tokenizer is None:
            return matcher.compute_ff_tokens()[:most]
        return self._tokenizer.tokenize_bytes(matcher.compute_ff_bytes())[:most]

    def _mask(self, answer: list[int], vocab_size: int) -> Forbidden:
        if not self._follow(answer):
            return np.zeros(vocab_size, dtype=np.bool_)
        matcher = self._matcher
        forbidden = ~unpacked(matcher.compute_bitmask(), vocab_size)
        forbidden[[token for token in self._eos_ids if token < vocab_size]] = not matcher.is_accepting()
        if matcher.is_error():
            self.dead_end = reason_of(matcher.get_error())
            self._restart()
            return np.ones(vocab_size, dtype=np.bool_)
        if forbidden.all():
            self.dead_end = "the model has no token with which its JSON could go on"
        return forbidden

    def _restart(self) -> None:
        """Replaces the matcher, which stays in error, by a copy of the first."""
        self._matcher, self._followed = self._first.deep_copy(), []

    def _follow(self, answer: list[int]) -> bool:
        """Moves the matcher to an answer; False if the text is no prefix of any JSON of the schema."""
        matcher, same = self._matcher, min(len(self._followed), len(answer))
        while self._followed[:same] != answer[:same]:  # about a draft back, seldom more
            same -= 1
        if same < len(self._followed):
            matcher.rollback(len(self._followed) - same)
            del self._followed[same:]
        rest = answer[same:]
        consumed = matcher.try_consume_tokens(rest)
        self._followed += rest[:consumed]
        return consumed == len(rest) or matcher.is_error()


class Grammars:
    """Compiles schemas in one thread, so that a slow schema delays only other schemas."""

    def __init__(self, target: TargetFacts) -> None:
        self._target = target
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="schemas")
        self._tokenizer: LLTokenizer | None = None
        self._refusal: str | None = None

    async def read(self, schema: Mapping[str, Any] | CallGrammar, *, is_compact: bool) -> LLMatcher:
        """`matcher` for an event loop, with its errors."""
        compile_schema = partial(self.matcher, schema, is_compact=is_compact)
        return await asyncio.get_running_loop().run_in_executor(self._thread, compile_schema)

    def grammar(self, matcher: LLMatcher, *, prompt: int, is_compact: bool) -> Grammar:
        """The processor of an answer to a prompt of `prompt` tokens, for a matcher compiled with the same `is_compact`.

        Only in compact JSON the last forced token is guessed: with optional whitespace models write another token.
        """
        tokenizer = self._tokenizer if is_compact else None
        return Grammar(matcher, prompt=prompt, eos_ids=self._target.eos_ids, tokenizer=tokenizer)

    def matcher(self, schema: Mapping[str, Any] | CallGrammar, *, is_compact: bool = False) -> LLMatcher:
        """Compiles a schema for `Grammar`.

        Args:
            schema: a JSON schema, maybe with texts around it.
            is_compact: whether JSON has no whitespace between its parts; else it has as much as `SPACE` allows.

        Raises:
            ValueError: the schema is too large, invalid, unsupported by llguidance or unsatisfiable, or the target's
                tokenizer cannot be used.
        """
        call, given = (schema, schema.schema) if isinstance(schema, CallGrammar) else (None, schema)
        # That key has llguidance's own options, which may allow answers that are no JSON of the schema.
        plain = {key: value for key, value in given.items() if key != "x-guidance"}
        options: Any = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": SPACE}
        try:
            text = json.dumps(plain if call is None else {"x-guidance": options, **plain}, separators=(",", ":"))
        except RecursionError:
            raise ValueError("the schema is nested too deeply") from None
        if len(text) > MOST_SCHEMA_BYTES:
            raise ValueError(f"the schema has {len(text)} bytes, use at most {MOST_SCHEMA_BYTES}")
        tokenizer = self._cached_tokenizer()
        try:
            if call is None:
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=options)
            else:
                begin, end = (" ".join(map(_as_lark, parts)) for parts in (call.begin, call.end))
                grammar = LLMatcher.grammar_from_lark(f"start: {begin} json {end}\njson: %json {text}")
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
            trial = Grammar(matcher, prompt=0, eos_ids=self._target.eos_ids)
            trial.forbidden([], self._target.vocab_size)
        except BaseException as error:
            raise _mistake(error) from None
        if matcher.is_error() or trial.dead_end is not None:
            raise ValueError(reason_of(matcher.get_error()) or trial.dead_end)
        return matcher

    def _cached_tokenizer(self) -> LLTokenizer:
        """llguidance's form of the tokenizer, cached: with 150,000 tokens it takes a second to build."""
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


def _as_lark(part: str | int) -> str:
    """A text or a token in llguidance's form of Lark."""
    return f"<[{part}]>" if isinstance(part, int) else json.dumps(part)


def unpacked(packed: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """Unpacks a token bitmask, lowest bit of each byte first, to booleans `[V]`; missing bits are False.

    >>> unpacked(bytes([0b101]), 4).tolist(), unpacked(bytes([0b101, 255]), 2).tolist()
    ([True, False, True, False], [True, False])
    """
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little").view(np.bool_)
    return bits[:vocab_size] if vocab_size <= len(bits) else np.pad(bits, (0, vocab_size - len(bits)))


def reason_of(message: str) -> str:
    """One short line of llguidance's message.

    >>> reason_of("regex parse error:\\n    (\\n    ^\\nerror: unclosed group\\n<non-verbose/>")
    'regex parse error: ( ^ error: unclosed group'
    """
    reason = textwrap.shorten(message.replace("<non-verbose/>", ""), MOST_REASON, placeholder=" …")
    return 'no JSON fits the schema: does a "$ref" lead back to itself?' if reason == NO_WAY_ON else reason


def _mistake(error: BaseException) -> ValueError:
    """Converts an error of llguidance, or a panic of its Rust code, which is no `Exception`."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ValueError(reason_of(str(error)))
    raise error
