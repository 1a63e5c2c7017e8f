"""`paradraft generate`."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.terminal import console, stream_answer, tell_advice
from paradraft.engine.speculation import Speculation
from paradraft.environment import is_main_process
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement
from paradraft.sampling_params import Sampling
from paradraft.verify import warning_of

if TYPE_CHECKING:
    from paradraft.engine.engine import Result
    from paradraft.text.chat_template import Message

CHAT_NOTE = "this is an instruct model, prompts are asked as in a chat; --no-chat continues them"
CONTINUED_NOTE = (
    "prompts are continued: the model has a chat template, but its texts do not end as turns end there; --chat asks "
    "prompts through it"
)


@options.with_options
def generate(
    context: typer.Context,
    *,
    target: options.Target,
    speculation: Speculation,
    prompt: Annotated[str | None, typer.Option(help="One prompt; its answer is streamed.")] = None,
    prompts: options.Prompts = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Ask prompts as in a chat, through the model's chat template, or continue them. By default instruct "
            "models are asked, and others continue.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="In a chat: what the model reads first.")] = None,
    chat_template_kwargs: options.TemplateVariables = None,
    max_new_tokens: options.NewTokens = 128,
    sampling: Sampling,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be repeated.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="With --prompts and --json: prompts answered together.")] = 8,
    runtime: Runtime,
    placement: Placement,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer, with statistics.")] = False,
) -> None:
    """Answer prompts. The text is the target's own, whatever the drafter, but with --verify typical."""
    with importing():
        from paradraft.data.prompts import read_prompts
        from paradraft.data.records import read_object
        from paradraft.engine.loader import load_engine

    if (prompt is None) == (prompts is None):
        raise ValueError("give either --prompt or --prompts")
    records = [{"prompt": prompt}] if prompts is None else read_prompts(prompts)
    if system is not None and chat is False:
        raise ValueError("--system is what a chat begins with: leave it or --no-chat out")
    variables = read_object(chat_template_kwargs or "{}", "--chat-template-kwargs", '{"enable_thinking": false}')
    with console(stderr=True).status("loading; the first time passes are built for this CPU"):
        runtime = replace(runtime, width=speculation.pass_width)
        engine = load_engine(target, speculation, runtime=runtime, placement=placement, tries_plain=True)
    if placement.tensor_parallel and not is_main_process():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # only rank 0 prints
    is_open = chat is None and system is None and any("prompt" in record for record in records)
    chat = engine.target.is_instruct if is_open else chat or system is not None
    conversations = [_messages(record, chat=chat, system=system) for record in records]
    texts = [
        record["prompt"] if messages is None else engine.chat_tokens(messages, variables)
        for record, messages in zip(records, conversations, strict=True)
    ]
    is_lossless = warning_of(speculation.verify) is None
    result_keys = {"text", "tokens", "finish_reason", "lossless", "stats"}
    clashes = result_keys.intersection(key for record in records for key in record) if as_json else set()
    if clashes:
        raise ValueError(f"prompts have a key {sorted(clashes)[0]!r}, which --json would overwrite: rename it")
    engine.check(texts, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop or ())
    if is_open and engine.target.tokenizer.chat_template:
        print(f"paradraft: {CHAT_NOTE if chat else CONTINUED_NOTE}", file=sys.stderr)
    options.warn_ignored(
        context,
        options.without_chance(sampling.is_greedy),
        options.without_drafter(speculation),
        options.with_own_tree(speculation),
        options.with_gamma(speculation),
        options.without_process(placement),
        (prompts is None or not as_json, "without --prompts and --json", ["batch_size"]),
        (not any(conversations), "without conversations", ["chat_template_kwargs"]),
    )
    size = min(batch_size, len(texts)) if as_json else 1
    if engine.target.lm.warm_up_rounds:
        with console(stderr=True).status("compiling (a minute or two)"):
            engine.warm_up(size)
    is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
    for start in range(0, len(records), size):
        batch = texts[start : start + size]
        if not as_json:
            stream_answer(engine, batch[0], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop or ())
            continue
        results = engine.generate(
            batch, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop or (), batch_size=size
        )
        for record, result in zip(records[start:], results, strict=False):
            print(json.dumps(record | _as_json(result, is_lossless), ensure_ascii=not is_utf8), flush=True)
    tell_advice(engine)


def _messages(record: Mapping[str, Any], *, chat: bool, system: str | None) -> list[Message] | None:
    """Conversation of a record; None for a prompt that is continued as it is."""
    if "prompt" not in record:
        return list(record["messages"])
    prefix = [] if system is None else [{"role": "system", "content": system}]
    return [*prefix, {"role": "user", "content": record["prompt"]}] if chat else None


def _as_json(result: Result, is_lossless: bool) -> dict[str, object]:
    stats = result.stats
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "lossless": is_lossless,
        "stats": vars(stats) | {"total_s": stats.total_s, "acceptance_length": stats.acceptance_length},
    }
