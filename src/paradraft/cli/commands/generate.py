"""`paradraft generate`."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paradraft.cli import options
from paradraft.cli.engine_args import EngineArgs, tell_reason, warm_up
from paradraft.cli.ignored import of_drafting, warn_ignored, without_chance
from paradraft.cli.importing import importing
from paradraft.cli.options import option
from paradraft.cli.terminal import stream_answer, tell_advice
from paradraft.cli.values import variables_of
from paradraft.environment import is_main_process
from paradraft.sampling_params import Sampling
from paradraft.verify import warning_of

if TYPE_CHECKING:
    from paradraft.engine.answers import Result
    from paradraft.engine.engine import Engine
    from paradraft.text.chat_template import Message

RESULT_KEYS = {"text", "tokens", "finish_reason", "lossless", "stats"}
CHAT_NOTE = "this is an instruct model, prompts are asked as in a chat; --no-chat continues them"
CONTINUED_NOTE = (
    "prompts are continued: the model has a chat template, but its texts do not end as turns end there; --chat asks "
    "prompts through it"
)


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(EngineArgs):
    """Options of `paradraft generate`."""

    prompt: Annotated[str | None, option("One prompt; its answer is streamed.")] = None
    prompts: options.Prompts = None
    chat: Annotated[
        bool | None,
        option(
            "Ask prompts as in a chat, through the model's chat template, or continue them. By default instruct "
            "models are asked, and others continue.",
            "--chat/--no-chat",
        ),
    ] = None
    system: Annotated[str | None, option("In a chat: the system prompt.")] = None
    chat_template_kwargs: options.TemplateVariables = None
    max_new_tokens: options.NewTokens = 128
    sampling: Sampling
    stop: Annotated[list[str] | None, option("A text that ends an answer; may be repeated.")] = None
    batch_size: Annotated[int, option("With --prompts and --json: prompts answered together.", least=1)] = 8
    as_json: Annotated[bool, option("One JSON object per answer, with statistics.", "--json")] = False


@options.with_options
def generate(context: typer.Context, *, args: GenerateArgs) -> None:
    """Answer prompts. The text is the target's own, whatever the drafter, but with --verify typical."""
    with importing():
        from paradraft.data.prompts import read_prompts

    if (args.prompt is None) == (args.prompts is None):
        raise ValueError("give either --prompt or --prompts")
    records = [{"prompt": args.prompt}] if args.prompts is None else read_prompts(args.prompts)
    if args.system is not None and args.chat is False:
        raise ValueError("--system is what a chat begins with: leave it or --no-chat out")
    variables = variables_of(args.chat_template_kwargs)
    engine = args.load()
    if args.placement.tensor_parallel and not is_main_process():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # only rank 0 prints
    is_open = args.chat is None and args.system is None and any("prompt" in record for record in records)
    chat = engine.target.is_instruct if is_open else args.chat or args.system is not None
    conversations = [_messages(record, chat=chat, system=args.system) for record in records]
    texts = [
        record["prompt"] if messages is None else engine.chat_tokens(messages, variables)
        for record, messages in zip(records, conversations, strict=True)
    ]
    clashes = RESULT_KEYS.intersection(key for record in records for key in record) if args.as_json else set()
    if clashes:
        raise ValueError(f"prompts have a key {sorted(clashes)[0]!r}, which --json would overwrite: rename it")
    engine.check(texts, max_new_tokens=args.max_new_tokens, sampling=args.sampling, stop=args.stop or ())
    if is_open and engine.target.tokenizer.chat_template:
        print(f"paradraft: {CHAT_NOTE if chat else CONTINUED_NOTE}", file=sys.stderr)
    tell_reason(engine)
    warn_ignored(
        context,
        without_chance(args.sampling.is_greedy),
        *of_drafting(engine.speculation, args.placement),
        (args.prompts is None or not args.as_json, "without --prompts and --json", ["batch_size"]),
        (not any(conversations), "without conversations", ["chat_template_kwargs"]),
    )
    _answer(engine, records, texts, args)
    tell_advice(engine)


def _answer(
    engine: Engine, records: Sequence[Mapping[str, Any]], texts: Sequence[str | list[int]], args: GenerateArgs
) -> None:
    size = min(args.batch_size, len(texts)) if args.as_json else 1
    warm_up(engine, size)
    is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
    is_lossless = warning_of(args.speculation.verify) is None
    limit, sampling, stop = args.max_new_tokens, args.sampling, args.stop or ()
    for start in range(0, len(records), size):
        batch = texts[start : start + size]
        if not args.as_json:
            stream_answer(engine, batch[0], max_new_tokens=limit, sampling=sampling, stop=stop)
            continue
        results = engine.generate(batch, max_new_tokens=limit, sampling=sampling, stop=stop, batch_size=size)
        for record, result in zip(records[start:], results, strict=False):
            line = {**record, **_as_json(result, is_lossless)}
            print(json.dumps(line, ensure_ascii=not is_utf8), flush=True)


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
