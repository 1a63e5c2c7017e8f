"""Prompt files: one JSON object per line, with a prompt or a conversation; further keys are kept.

`{"prompt": "some text"}` is continued as it is; `{"messages": [{"role": "user", "content": "some text"}]}` goes
through the model's chat template.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from paradraft.data.prompt_source import STDIN
from paradraft.sources.records import read_object
from paradraft.text.chat_template import ChatTemplate, ask_text, check_questions, template_of

EXAMPLE = '{"prompt": "some text"}'


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Reads a prompt file once, so it may be a pipe; "-" is the standard input.

    Raises:
        ValueError: the file does not exist, is a folder or a device, is empty or is not UTF-8, or a line (named by
            its number) is no JSON object, has a lone surrogate, or has neither a prompt nor messages that can be
            answered.
    """
    records = []
    for location, record in _records(file):
        if "messages" in record and "prompt" not in record:
            try:
                check_questions(record["messages"])
            except ValueError as error:
                raise ValueError(f"{location}: {error}") from None
        elif not isinstance(record.get("prompt"), str) or not record["prompt"]:
            raise ValueError(f'{location}: expected {EXAMPLE} or {{"messages": […]}}')
        records.append(record)
    return records


def first_prompts(file: Path, count: int | None, usual: int) -> list[dict[str, Any]]:
    """Reads the first `count` prompts of a file; by default `usual`, or all if the file has fewer.

    Raises:
        ValueError: as `read_prompts`; or the file has fewer than `count`.
    """
    records = read_prompts(file)
    if count is None:
        return records[:usual]
    if not 1 <= count <= len(records):
        raise ValueError(f"num_prompts={count}: use 1 to {len(records)}, which is how many {file.name} has")
    return records[:count]


def as_conversations(records: Sequence[Mapping[str, Any]], system: str | None = None) -> list[dict[str, Any]]:
    """Turns prompts into conversations with one user turn; keeps conversations as they are.

    >>> as_conversations([{"prompt": "Why?"}], "Be brief.")[0]["messages"]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Why?'}]
    """
    first = [] if system is None else [{"role": "system", "content": system}]
    return [
        {"messages": [*first, {"role": "user", "content": record["prompt"]}]} if "prompt" in record else dict(record)
        for record in records
    ]


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the JSON objects of a file, each with its location, such as "prompts.jsonl, line 3"."""
    is_stdin = str(file) == STDIN
    if not is_stdin and not (file.is_file() or file.is_fifo()):
        state = "is neither a file nor a pipe" if file.exists() else "does not exist"
        raise ValueError(f"prompt file {str(file)!r} {state}")
    try:
        text = (sys.stdin.buffer.read() if is_stdin else file.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {str(file)!r} is not UTF-8 text ({error.reason})") from None
    if not text.strip():
        source = "standard input" if is_stdin else f"prompt file {str(file)!r}"
        raise ValueError(f"{source} is empty")
    # Not splitlines(): JSON strings may contain U+2028 and similar characters unescaped.
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        location = f"{file}, line {line_number}"
        yield location, read_object(line, location, EXAMPLE)


def texts_of(
    records: Sequence[Mapping[str, Any]],
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    variables: Mapping[str, Any] | None = None,
) -> list[str]:
    """Prompt text of each record; conversations are rendered up to the generation prompt.

    Args:
        tokenizer: loads the model's; called only if there are conversations.

    Raises:
        ValueError: the model has no chat template, or it refuses a conversation.
    """
    template: ChatTemplate | None = None
    texts = []
    for record in records:
        if "prompt" in record:
            texts.append(str(record["prompt"]))
            continue
        template = template or template_of(tokenizer(), variables)
        texts.append(ask_text(record["messages"], template))
    return texts
