"""`paradraft export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.options import option
from paradraft.cli.terminal import console, news
from paradraft.engine.speculation import MOST_DRAFTED
from paradraft.models.runtime import Runtime
from paradraft.signals import sigterm_raises

if TYPE_CHECKING:
    from paradraft.export.acceptance import MeasuredAcceptance


DRAFT_DTYPE = (
    "The dtype of the drafter when it is measured; with --to gguf that of the file: bfloat16, float16, float32, int8 "
    "(Q8_0) or int4 (Q4_0), by default that of the checkpoint."
)


@options.with_options
def export(
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="The drafter: a folder, a Hugging Face id, or pocket.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it is empty or does not exist.")],
    *,
    target: options.Target,
    engine: Annotated[str, option("vllm, sglang, tensorrt-llm, transformers or gguf.", "--to")],
    k: Annotated[int, option("Tokens drafted per round.", "-k", least=1, most=MOST_DRAFTED)] = 8,
    measure: Annotated[
        bool, option("Decode with the folder, and say in its card what it yields.", "--measure/--no-measure")
    ] = True,
    prompts: options.MeasuredPrompts = None,
    num_prompts: Annotated[int | None, options.num_prompts_option(options.FEW)] = None,
    max_new_tokens: options.NewTokens = 128,
    runtime: Annotated[Runtime, options.Offer(without=("compiled",), helps={"draft_dtype": DRAFT_DTYPE})],
) -> None:
    """Write a drafter as an engine that serves loads it.

    The folder has the target's tokenizer, as many rows as the target, and a model card with the command that starts the
    engine.
    """
    with importing():
        from paradraft.bench.setup import held_out_prompts
        from paradraft.export.handoff import hand_off
        from paradraft.sources.load_plan import plan_of

    texts = held_out_prompts(num_prompts, prompts, target, runtime.tokenizer, usual=options.FEW) if measure else []
    with news(console(stderr=True), f"writing {out}"), sigterm_raises():
        done = hand_off(
            draft, target, engine, out, k=k, prompts=texts, max_new_tokens=max_new_tokens,
            runtime=plan_of(target, runtime).runtime,
        )  # fmt: skip
    print(f"written to {out}")
    for note in done.notes:
        print(f"note: {note}")
    if done.measured is not None:
        print(_in_words(done.measured))
    print(f"\n{done.launch}")


def _in_words(measured: MeasuredAcceptance) -> str:
    shares = " ".join(f"{share:.2f}".removeprefix("0") for share in measured.by_position)
    same = "" if measured.is_lossless else "; TEXTS DIFFER from plain decoding, run paradraft audit"
    return f"{measured.length:.2f} tokens per target pass here, accepted by position {shares}{same}"
