"""Training samples from plain text or JSONL.

A `.jsonl` file has one sample per line: `{"text": …}`, `{"prompt": …, "response": …}` or
`{"messages": [{"role": …, "content": …}, …]}`. Any other file is one text. Of text every token is a label; of
a prompt and its response only the response is, and the end-of-text behind it; of a conversation the
assistant's turns, as the model's chat template marks them, and their ends. A record that says
`"finish_reason": "length"` was cut: nothing is learnt behind its response or its last turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Tokens, and which of them are to be predicted.

    Args:
        tokens: at least two token ids.
        is_label: for each token whether it is a label.
    """

    tokens: list[int]
    is_label: list[bool]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.is_label)


def load_samples(files: list[Path], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Sample]:
    """Reads all files; long samples are split into pieces of at most `max_length` tokens.

    Raises:
        ValueError: a file does not exist or is not text, a line is broken (named by number), or nothing in the
            files is a label.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the model's tokenizer has no end-of-text token, so the end of a text cannot be learned")
    samples: list[Sample] = []
    for file in files:
        if not file.is_file():
            raise ValueError(f"training data {str(file)!r} does not exist")
        try:
            wholes = list(_read(file, tokenizer))
        except UnicodeDecodeError as error:
            raise ValueError(f"training data {str(file)!r} is not UTF-8 text ({error.reason})") from None
        for whole in wholes:
            # Pieces overlap by one token, or the first token of a piece would be nobody's label.
            for start in range(0, max(len(whole.tokens) - 1, 1), max_length - 1):
                piece = slice(start, start + max_length)
                if any(whole.is_label[piece][1:]):
                    samples.append(Sample(tokens=whole.tokens[piece], is_label=whole.is_label[piece]))
    if not samples:
        raise ValueError(f"nothing to learn in {', '.join(map(str, files))}: no sample has a token to predict")
    return samples


def _read(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sample]:
    if file.suffix != ".jsonl":
        yield _from_text(file.read_text(encoding="utf-8"), tokenizer)
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _from_record(json.loads(line), tokenizer)
            except (ValueError, TypeError, KeyError, TemplateError) as error:
                raise ValueError(f"{file}, line {number}: {error}") from None


def _from_record(record: Any, tokenizer: PreTrainedTokenizerBase) -> Sample:
    match record:
        case {"text": str(text)}:
            return _from_text(text, tokenizer)
        case {"prompt": str(prompt), "response": str(response)}:
            return _from_response(prompt, response, tokenizer, is_cut=record.get("finish_reason") == "length")
        case {"messages": [_, *_] as messages} if all(isinstance(message, dict) for message in messages):
            return _from_messages(messages, tokenizer, is_cut=record.get("finish_reason") == "length")
    raise ValueError('expected {"text": …}, {"prompt": …, "response": …} or {"messages": […]}')


def _from_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return Sample(tokens=tokens, is_label=[True] * len(tokens))


def _from_response(prompt: str, response: str, tokenizer: PreTrainedTokenizerBase, *, is_cut: bool) -> Sample:
    question = tokenizer(prompt)["input_ids"]
    answer = tokenizer(response, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * (not is_cut)
    return Sample(tokens=question + answer, is_label=[False] * len(question) + [True] * len(answer))


def _from_messages(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, *, is_cut: bool) -> Sample:
    if not tokenizer.chat_template:
        raise ValueError("the model has no chat template, so conversations cannot be read")
    if is_cut and messages[-1]["role"] == "assistant":
        # As the target wrote it: behind the generation prompt. The template would put an end of turn behind it.
        before = _from_turns(messages[:-1], tokenizer, ask=True)
        answer = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
        return Sample(tokens=before.tokens + answer, is_label=before.is_label + [True] * len(answer))
    sample = _from_turns(messages, tokenizer, ask=False)
    if not any(sample.is_label):
        raise ValueError("the conversation has no assistant turn")
    return sample


def _from_turns(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, *, ask: bool) -> Sample:
    """Labels what the template marks, or if it marks nothing, what each assistant turn adds behind its generation
    prompt; with `ask`, a generation prompt stands at the end."""
    if not messages:
        return Sample(tokens=[], is_label=[])
    if "{% generation" in tokenizer.chat_template.replace("{%-", "{%"):
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=ask
        )
        return Sample(tokens=list(encoded["input_ids"]), is_label=[bool(flag) for flag in encoded["assistant_masks"]])

    def tokens_of(upto: int, *, ask: bool) -> list[int]:
        if upto == 0:
            return []
        encoded = tokenizer.apply_chat_template(
            messages[:upto], tokenize=True, return_dict=True, add_generation_prompt=ask
        )
        return list(encoded["input_ids"])

    whole = tokens_of(len(messages), ask=ask)
    is_label = [False] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = tokens_of(index, ask=True), tokens_of(index + 1, ask=False)
        if whole[: len(after)] != after or after[: len(before)] != before:
            raise ValueError(f"message {index + 1}: the chat template rewrites it later, so it cannot be labelled")
        is_label[len(before) : len(after)] = [True] * (len(after) - len(before))
    return Sample(tokens=whole, is_label=is_label)
