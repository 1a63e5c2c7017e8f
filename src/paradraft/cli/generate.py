"""`paradraft generate`."""

from __future__ import annotations

import codecs
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from paradraft.cli import options
from paradraft.cli.options import warn_ignored, without_chance, without_drafter
from paradraft.cli.terminal import stream_answer
from paradraft.data.records import read_prompts
from paradraft.engine import Result, load_engine
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.speculation import Speculation


def generate(
    context: typer.Context,
    target: options.Target,
    drafter: options.Drafter = "none",
    draft: options.Draft = None,
    k: options.K = 8,
    prompt: Annotated[str | None, typer.Option(help="One prompt; its answer is streamed.")] = None,
    prompts: options.Prompts = None,
    max_new_tokens: options.NewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be repeated.")] = None,
    verify: options.Verify = "match",
    tree_budget: options.TreeBudget = None,
    tree_paths: options.TreePaths = None,
    lengths: options.Lengths = "fixed",
    batch_size: Annotated[
        int, typer.Option(min=1, help="With --prompts and --json: prompts that are answered together.")
    ] = 8,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    compile: options.Compile = None,
    capacity: options.Capacity = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer, with statistics.")] = False,
) -> None:
    """Answer prompts. The text is the target's own, whatever the drafter."""
    if (prompt is None) == (prompts is None):
        raise ValueError("give either --prompt or --prompts")
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias or []), seed=seed,
    )  # fmt: skip
    tree = options.tree_of(tree_budget, tree_paths)
    speculation = Speculation(drafter=drafter, draft=draft, k=k, verify=verify, tree=tree, lengths=lengths)
    records = [{"prompt": prompt}] if prompts is None else read_prompts(prompts)
    runtime = Runtime(device=device, dtype=dtype, compiled=compile, capacity=capacity, width=speculation.pass_width)
    with Console(stderr=True).status("loading; the first time passes are built for this CPU"):
        engine = load_engine(target, speculation, runtime=runtime)
    texts = [str(record["prompt"]) for record in records]
    ours = {"text", "tokens", "finish_reason", "stats"}
    taken = ours.intersection(key for record in records for key in record) if as_json else set()
    if taken:
        raise ValueError(f"prompts have a key {sorted(taken)[0]!r}, which --json would overwrite: rename it")
    engine.check(texts, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop or ())
    warn_ignored(
        context,
        without_chance(sampling.is_greedy),
        without_drafter(drafter),
        (prompts is None or not as_json, "without --prompts and --json", ["batch_size"]),
    )
    size = min(batch_size, len(texts)) if as_json else 1
    if engine.target.lm.warm_up_rounds:
        with Console(stderr=True).status("compiling (a minute or two)"):
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
            print(json.dumps(record | _as_json(result), ensure_ascii=not is_utf8), flush=True)


def _biases(pairs: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            number, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias {pair}: write TOKEN_ID=NUMBER, such as 17=-2.5 or 17=-inf") from None
        if number in biases:
            raise ValueError(f"--logit-bias {pair}: token {number} has a bias already, give it one")
        biases[number] = value
    return biases


def _as_json(result: Result) -> dict[str, object]:
    stats = result.stats
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": vars(stats) | {"total_s": stats.total_s, "acceptance_length": stats.acceptance_length},
    }
