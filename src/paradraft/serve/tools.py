"""Tools: functions that a model may ask a client to call, in the format of Hermes and Qwen.

The chat template lists the functions. The model writes each call as `<tool_call>`, JSON with a name and arguments, and
`</tool_call>`; before it there may be text. `tool_choice` "required", or one function, makes the answer a single call,
by a grammar.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field
from transformers import PreTrainedTokenizerBase

from paradraft.serve.grammar import CallGrammar
from paradraft.serve.schemas import STRICT

BEGIN, END = "<tool_call>", "</tool_call>"
BLOCK, BLOCK_END = "```json", "```"
NAME = "^[a-zA-Z0-9_.-]{1,64}$"


class Function(BaseModel):
    """A function; `parameters` is the JSON schema of its arguments."""

    model_config = STRICT
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that a model may use."""

    model_config = STRICT
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    """Names a function."""

    model_config = STRICT
    name: str


class NamedTool(BaseModel):
    """Chooses a function."""

    model_config = STRICT
    type: Literal["function"]
    function: FunctionName


class CalledFunction(BaseModel):
    """A call's function, and its arguments in JSON."""

    model_config = STRICT
    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call in a message of the assistant."""

    model_config = STRICT
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


def call_grammar(functions: Sequence[Function], tokenizer: PreTrainedTokenizerBase) -> CallGrammar:
    """The grammar of a call of one of some functions."""
    calls, parts = [], {}
    for number, function in enumerate(functions):
        parts[str(number)] = _moved({"type": "object", **(function.parameters or {})}, f"#/$defs/{number}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": {"$ref": f"#/$defs/{number}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    begin, end = (tokenizer.get_added_vocab().get(tag, tag) for tag in (BEGIN, END))
    return CallGrammar(begin=[begin, "\n"], schema={"$defs": parts, "anyOf": calls}, end=["\n", end])


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references to its parts follow it to another place.

    >>> _moved({"items": {"$ref": "#/$defs/A"}, "not": {"$ref": "#"}}, "#/$defs/0")
    {'items': {'$ref': '#/$defs/0/$defs/A'}, 'not': {'$ref': '#/$defs/0'}}
    """
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, to) for key, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def _without_block(text: str) -> str:
    """The text of a code block; other texts as they are.

    >>> _without_block("```json\\n{}\\n```\\n").strip(), _without_block("{}")
    ('{}', '{}')
    """
    text = text.strip()
    is_block = text.startswith(BLOCK) and text.endswith(BLOCK_END)
    return text[len(BLOCK) : -len(BLOCK_END)] if is_block else text


class CallReader:
    """Separates the text and the calls of an answer that comes in pieces.

    Small models leave out the tags: an answer that is nothing but JSON, maybe in a code block, with the name of one of
    the `functions` is a call too. So an answer that begins like one comes as a whole.
    """

    def __init__(self, functions: Iterable[str] = ()) -> None:
        self._functions = frozenset(functions)
        self._may_be_bare = bool(self._functions)
        self._rest = ""
        self._is_after_call = False
        """Whether no text has followed the last call, but perhaps whitespace, which is left out."""

    def read(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text and the calls that a piece completes.

        >>> reader = CallReader()
        >>> reader.read("Sure. <tool", is_last=False)
        ('Sure.', [])
        >>> reader.read("s>", is_last=True)
        (' <tools>', [])
        """
        self._rest += text
        if self._may_be_bare:
            answer = self._rest.lstrip()
            self._may_be_bare = any(each.startswith(answer) or answer.startswith(each) for each in (BLOCK, "{"))
            if self._may_be_bare and not is_last:
                return "", []
            if self._may_be_bare and (call := self._call(_without_block(answer), self._functions)) is not None:
                self._rest = ""
                return "", [call]
        self._strip()
        texts, calls = list[str](), list[dict[str, Any]]()
        while (begin := self._rest.find(BEGIN)) >= 0:
            call, after = self._first_call(begin + len(BEGIN), is_last=is_last)
            if call is None and not is_last:
                break
            texts.append(self._rest[:after] if call is None else self._rest[:begin].rstrip())
            if call is not None:
                calls.append(call)
            self._rest, self._is_after_call = self._rest[after:], call is not None
            self._strip()
        sure = self._sure if begin < 0 else len(self._rest[:begin].rstrip())
        sure = len(self._rest) if is_last else sure
        texts.append(self._rest[:sure])
        self._rest = self._rest[sure:]
        return "".join(texts), calls

    @property
    def _sure(self) -> int:
        """Characters that are no beginning of a call, nor whitespace before one."""
        lengths = range(min(len(BEGIN) - 1, len(self._rest)), 0, -1)
        held = next((length for length in lengths if self._rest.endswith(BEGIN[:length])), 0)
        return len(self._rest[: len(self._rest) - held].rstrip())

    def _first_call(self, begin: int, *, is_last: bool) -> tuple[dict[str, Any] | None, int]:
        """The call that begins here, and where the text goes on after it; the end tag may be part of a string in it."""
        ends = [match.start() for match in re.finditer(END, self._rest[begin:])]
        for end in [begin + each for each in ends] + [len(self._rest)] * is_last:
            if (call := self._call(self._rest[begin:end])) is not None:
                return call, min(end + len(END), len(self._rest))
        return None, begin + ends[0] + len(END) if ends else len(self._rest)

    def _strip(self) -> None:
        if self._is_after_call:
            self._rest = self._rest.lstrip()
            self._is_after_call = not self._rest

    def _call(self, text: str, known: Collection[str] | None = None) -> dict[str, Any] | None:
        """The call that a text describes, of a `known` function; None for other texts."""
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or not isinstance(value.get("name"), str):
                return None
            arguments = value.get("arguments", {})
            is_written = isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
            written = arguments if is_written else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return None
        if known is not None and (value["name"] not in known or value.keys() != {"name", "arguments"}):
            return None
        function = {"name": value["name"], "arguments": written}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
