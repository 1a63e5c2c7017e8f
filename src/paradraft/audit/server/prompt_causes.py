"""Checks that a server has read the prompt that was sent, and names the wrong encoding that explains a difference.

Texts are encoded by the model's tokenizer, conversations by its chat template. A server may say which ids it has read,
or how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paradraft.audit.server.endpoint import Served
from paradraft.errors import one_line
from paradraft.text.chat_template import Message, ask_tokens, names, template_of
from paradraft.text.tokenization import encode_prompt

SWITCHES = ("enable_thinking", "thinking")
"""Names of the chat template variable that makes a model think before it answers."""
SYSTEMS = ("", "You are a helpful assistant.", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
"""System messages that servers add to a conversation without one."""


def expected_ids(prompt: str | list[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a prompt by the model's own tokenizer and chat template.

    Raises:
        ValueError: it has no chat template, or refuses a conversation.
    """
    if isinstance(prompt, str):
        return encode_prompt(prompt, tokenizer)
    return ask_tokens(prompt, template_of(tokenizer))


def fault_of_prompt(
    served: Served,
    prompt: str | list[Message],
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase | None,
) -> str | None:
    """The fault of the prompt that a server has read, as a clause; None if it has none, or the server does not say."""
    expected = expected_ids(prompt, tokenizer)
    if served.read is not None:
        if served.read == expected:
            return None
        for name, ids in _other_ways(prompt, expected, tokenizer, draft):
            if served.read == ids:
                return f"{name} (prompt {served.question.number})"
        start = next(
            (n for n, (a, b) in enumerate(zip(served.read, expected, strict=False)) if a != b),
            min(len(served.read), len(expected)),
        )
        theirs, ours = (one_line(tokenizer.decode(ids[start : start + 8])) for ids in (served.read, expected))
        return (
            f"of prompt {served.question.number} it reads {len(served.read)} tokens, not {len(expected)}, and from "
            f"token {start} on {theirs}, not {ours}"
        )
    if served.prompt_tokens is None or served.prompt_tokens == len(expected):
        return None
    clause = f"it reads {served.prompt_tokens} tokens of prompt {served.question.number}, not {len(expected)}"
    same = [name for name, ids in _other_ways(prompt, expected, tokenizer, draft) if len(ids) == served.prompt_tokens]
    return (
        f"{clause}, as many as with this fault: {' (or this: '.join(same[:2])}{')' * (len(same) > 1)}"
        if same
        else clause
    )


def fault_that_fits(
    served: Served,
    prompt: str | list[Message],
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase | None,
    fits: Callable[[list[int]], bool],
) -> str | None:
    """The same for a server that gives no ids; None if the prompt is right, or none of the known wrong ones.

    Args:
        fits: whether the server's log-probabilities of its answer are the model's after a prompt of these ids.
    """
    expected = expected_ids(prompt, tokenizer)
    if fits(expected):
        return None
    for name, ids in _other_ways(prompt, expected, tokenizer, draft):
        if served.prompt_tokens in (None, len(ids)) and ids and fits(ids):
            return f"its answer to prompt {served.question.number} is the one to another prompt: {name}"
    return None


def _other_ways(
    prompt: str | list[Message],
    expected: list[int],
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase | None,
) -> Iterator[tuple[str, list[int]]]:
    """Wrong encodings of a prompt, the likely ones first: each as a clause, and its ids."""
    bos = tokenizer.bos_token_id
    if bos is not None:
        yield "the beginning-of-text token stands there twice: let the server add none", [bos, *expected]
        if expected[:1] == [bos]:
            yield "the beginning-of-text token is missing", expected[1:]
    if tokenizer.eos_token_id is not None:
        yield "an end-of-text token stands after the prompt", [*expected, tokenizer.eos_token_id]
    if isinstance(prompt, str):
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            yield from _written("the chat template is put around a plain text", messages, tokenizer, {})
        return
    template = str(tokenizer.get_chat_template())
    for switch in SWITCHES:
        for value in (False, True) if names(template, switch) else ():
            yield from _written(f"the template's {switch} is {value} there", prompt, tokenizer, {switch: value})
    if draft is not None and draft.chat_template and draft.chat_template != tokenizer.chat_template:
        yield from _written("the draft's chat template is used, not the target's", prompt, draft, {})
    for system in SYSTEMS if prompt[0].get("role") != "system" else ():
        messages = [{"role": "system", "content": system}, *prompt]
        yield from _written(f"a system message is put before it, {one_line(system)}", messages, tokenizer, {})
    text = "\n".join(str(message["content"]) for message in prompt)
    yield "no chat template is used", encode_prompt(text, tokenizer)
    try:
        closed = tokenizer.apply_chat_template(prompt, tokenize=True, add_generation_prompt=False, return_dict=True)
        yield "the turn of the answer is not begun (add_generation_prompt)", list(closed["input_ids"])
    except (TemplateError, ValueError):
        return


def _written(
    name: str, messages: list[Message], tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]
) -> Iterator[tuple[str, list[int]]]:
    """An encoding by a chat template; nothing if the template refuses the conversation."""
    try:
        yield f"another chat template or flag: {name}", ask_tokens(messages, template_of(tokenizer, variables))
    except ValueError:
        return
