"""A text in the tokens of two tokenizers: what one model has written, for a draft model of another family to read, and
what that drafts, for the first to verify (Timor et al. 2025, 2502.05202, string-level exact match).

Only text is translated, and special tokens that both tokenizers have under the same name, as those of ChatML. A wrong
or unusual translation costs a draft: verification is on the ids of the first tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from paradraft.text.tokenization import REPLACEMENT, Detokenizer, continuation_encoder, encode_prompt, exact_text

LONGEST, KEPT = 32, 8
"""Characters after which a text without spaces is cut, and tokens that stay in the tail then."""
CONTEXT = 8
"""Tokens before a draft that decide its text: the space before a word, and the bytes of an incomplete character."""
WORD = re.compile(r"(?<=\S) (?=\S)")
"""The beginning of a word after a space, where tokenizers cut a text before they make tokens."""


class Translator:
    """Translates between the tokenizers of a target and of a draft model.

    Args:
        ends: of the draft model's tokens that end a text, each with that of the target.

    Example:
        >>> from transformers import PreTrainedTokenizerFast
        >>> from tokenizers import Tokenizer, decoders, models
        >>> def of(*vocabulary):
        ...     ids = {token: number for number, token in enumerate(["<end>", *"abc", *vocabulary])}
        ...     raw = Tokenizer(models.BPE(ids, [tuple(token) for token in vocabulary], fuse_unk=True))
        ...     raw.decoder = decoders.Fuse()
        ...     return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
        >>> text = Translator(target=of("ab"), draft=of("bc"), ends={}).begin()
        >>> text.add([4, 3]), text.tail  # "ab", "c"; "a", "bc"
        ([], [1, 4])
        >>> text.translated([1, 2, 1, 0])  # "a", "b", "a", the end
        [4, 1, 0]
    """

    def __init__(
        self, *, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, ends: Mapping[int, int]
    ) -> None:
        self.target, self.draft = target, draft
        self.encode_target, self.encode_draft = continuation_encoder(target), continuation_encoder(draft)
        self.texts, self.drafts = Detokenizer(target), Detokenizer(draft)
        shared = self.texts.special.keys() & self.drafts.special.keys()
        self.specials = {self.texts.special[name]: self.drafts.special[name] for name in shared}
        self.special_ids, self.draft_special_ids = (
            frozenset(each.special.values()) for each in (self.texts, self.drafts)
        )
        self.leading = encode_prompt("", draft)
        """What the draft model's tokenizer puts before a text."""
        self.anything = next(token for token in (draft.bos_token_id, draft.eos_token_id, 0) if token is not None)
        self.ends = {**ends, **{there: here for here, there in self.specials.items()}}

    def begin(self) -> Translation:
        """An empty text."""
        return Translation(self)


class Translation:
    """A growing text of a target, in the tokens of a draft model.

    Attributes:
        settled: the draft model's tokens that no later text changes, in whatever pieces it comes.
    """

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self.settled = list(translator.leading)
        self._growing = translator.texts.after([])
        self._text = ""
        """Of the tail."""
        self._tail: list[int] | None = None
        self._tokens: list[tuple[int, int]] = []
        """The target's tokens of the tail, each with the index in its text at which it begins."""

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Takes in tokens of the target, one by one; returns the draft model's that are settled now."""
        before = len(self.settled)
        for token in tokens:
            if token in self._translator.special_ids:
                self._add_special(token)
                continue
            self._tokens.append((token, len(self._text)))
            self._text, self._tail = self._text + self._growing.add(token), None
            if words := [match.start() for match in WORD.finditer(self._text)]:
                self._settle(self._encoded(self._text[: words[-1]]), words[-1])
            elif len(self._text) > LONGEST:
                self._cut()
        return self.settled[before:]

    def begin(self, prompt: Sequence[int]) -> list[int]:
        """`add` for a prompt; returns all tokens that are settled then, at least one: the first one, if the prompt is
        a part of a word, and some token, if it has no text."""
        self.add(prompt)
        if not self.settled:
            growing = self._translator.drafts.after([])
            first = self.tail[:1] or [self._translator.anything]
            text = "".join(map(growing.add, first))
            is_whole = 0 < len(text) <= len(self._text) and self._text.startswith(text)
            self._settle(first if is_whole else self.tail or first, len(text) if is_whole else len(self._text) + 1)
        return self.settled

    def _add_special(self, token: int) -> None:
        translator = self._translator
        self._text, self._tail = self._text + self._growing.end(), None
        self._settle(self.tail, len(self._text) + 1)
        known = translator.specials.get(token)
        is_there = self.settled == translator.leading and translator.leading[-1:] == [known]
        if known is not None and not is_there:
            self.settled.append(known)

    @property
    def _shown(self) -> str:
        """The text of the tail with what later bytes may still change."""
        return self._text + self._growing.rest

    @property
    def tail(self) -> list[int]:
        """The draft model's tokens of the rest, from the last word on, which more text may change."""
        if self._tail is None:
            self._tail = self._encoded(self._shown)
        return self._tail

    def translated(self, drafted: Sequence[int]) -> list[int]:
        """Tokens of the target for tokens that are drafted after the tail."""
        translator, new, end = self._translator, "", []
        growing = translator.drafts.after([*self.settled[-CONTEXT:], *self.tail])
        for token in drafted:
            if token in translator.ends or token in translator.draft_special_ids:
                end = [translator.ends[token]] if token in translator.ends else []
                break
            new += growing.add(token)
        return [*self._continued(new + growing.rest), *end]

    def _continued(self, new: str) -> list[int]:
        """The target's tokens of a text after its own: those of both together, where they begin with its own."""
        if not new:
            return []
        translator, own = self._translator, [token for token, _ in self._tokens]
        both = translator.encode_target(self._shown + new)
        if both[: len(own)] == own:
            return both[len(own) :]
        is_half = exact_text(own, translator.target).endswith(REPLACEMENT)
        return [] if is_half else translator.encode_target(new)

    def _encoded(self, text: str) -> list[int]:
        translator = self._translator
        if len(self.settled) > len(translator.leading):
            return translator.encode_draft(text)
        return encode_prompt(text, translator.draft)[len(translator.leading) :] if text else []

    def _settle(self, tokens: Sequence[int], end: int) -> None:
        """Settles `tokens`, which have the text before `end`."""
        self.settled += tokens
        self._text, self._tail = self._text[end:], None
        self._tokens = [(token, start - end) for token, start in self._tokens if start >= end]

    def _cut(self) -> None:
        """Settles all but the last tokens of the tail, where that does not change these; else all of it."""
        texts, tail = self._translator.drafts, self._encoded(self._text)
        for count in range(len(tail) - KEPT, 0, -1):
            growing = texts.after(self.settled[-CONTEXT:])
            rest = self._text.removeprefix("".join(map(growing.add, tail[:count])))
            if len(rest) < len(self._text) and self._translator.encode_draft(rest) == tail[count:]:
                self._settle(tail[:count], len(self._text) - len(rest))
                return
        self._settle(tail, len(self._text) + 1)
