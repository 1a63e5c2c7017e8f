"""The command line: `paradraft generate`, `train`, `bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from paradraft.api import Result, drafter_names, load
from paradraft.core import Sampling
from paradraft.models.loading import DTYPES, Runtime
from paradraft.prompts import read_prompts
from paradraft.terminal import hide_progress_bars, stream_answer

MOST_DRAFTED = 256
"""Largest K; caches keep room for two drafts of that length."""
INTERRUPTED = 130
"""What typer makes of Ctrl-C."""

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
train_app = typer.Typer(help="Train a drafter from a recipe.")
app.add_typer(train_app, name="train")

Target = Annotated[str, typer.Option("--target", help="Hugging Face id, folder, or pocket (the shipped family).")]
Draft = Annotated[str | None, typer.Option("--draft", help="Draft model; the pocket target brings its own.")]
K = Annotated[int, typer.Option("-k", help=f"Tokens drafted per round, 1 to {MOST_DRAFTED}.")]
NewTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens that together reach p.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text, with any drafter.")]
Prompts = Annotated[Path | None, typer.Option(help='JSONL file with one {"prompt": …} per line.')]
Device = Annotated[str, typer.Option(help="A torch device, such as cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Compile = Annotated[
    bool, typer.Option(help="Compile decoding passes: takes a minute or two, pays off after thousands of tokens.")
]
Capacity = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer; by default the model's limit.")]


@app.command()
def generate(
    target: Target,
    drafter: Annotated[str, typer.Option(help=f"One of {', '.join(drafter_names())}.")] = "none",
    draft: Draft = None,
    k: K = 8,
    prompt: Annotated[str | None, typer.Option(help="One prompt; its answer is streamed.")] = None,
    prompts: Prompts = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    compile: Compile = False,
    capacity: Capacity = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer, with statistics.")] = False,
) -> None:
    """Answer prompts. The text is the target's own, whatever the drafter."""
    if (prompt is None) == (prompts is None):
        raise ValueError("give either --prompt or --prompts")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    records = [{"prompt": prompt}] if prompts is None else read_prompts(prompts)
    runtime = Runtime(device=device, dtype=dtype, compiled=compile, capacity=capacity, width=_width(k))
    engine = load(target, drafter=drafter, draft=draft, k=k, runtime=runtime)
    texts = [str(record["prompt"]) for record in records]
    taken = {"text", "tokens", "stats"}.intersection(key for record in records for key in record) if as_json else set()
    if taken:
        raise ValueError(f"prompts have a key {sorted(taken)[0]!r}, which --json would overwrite: rename it")
    engine.check(texts, max_new_tokens=max_new_tokens)
    if compile:
        with Console(stderr=True).status("compiling (a minute or two)"):
            engine.warm_up()
    for record, text in zip(records, texts, strict=True):
        if as_json:
            result = engine.generate(text, max_new_tokens=max_new_tokens, sampling=sampling)
            print(json.dumps(record | _as_json(result), ensure_ascii=False), flush=True)
        else:
            stream_answer(engine, text, max_new_tokens=max_new_tokens, sampling=sampling)


def _width(*ks: int) -> int:
    """Room for a pass that reads a whole round and drafts the next."""
    for k in ks:
        if not 1 <= k <= MOST_DRAFTED:
            raise ValueError(f"k={k}: draft 1 to {MOST_DRAFTED} tokens per round")
    return max(64, 2 * max(ks) + 2)


def _as_json(result: Result) -> dict[str, object]:
    stats = result.stats
    return {
        "text": result.text,
        "tokens": result.tokens,
        "stats": vars(stats) | {"total_s": stats.total_s, "acceptance_length": stats.acceptance_length},
    }


@train_app.command()
def pard(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings that replace the recipe's.")] = None,
) -> None:
    """Adapt a draft model into a PARD drafter. Run the same command again to resume."""
    from paradraft.train.recipe import load_recipe
    from paradraft.train.run import run_with_display

    run_with_display(load_recipe(recipe, overrides or []))


@app.command()
def bench(
    target: Target,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: hf (AR), ar (AR+) or a drafter, with settings behind colons, as in "
            "pard:k=12. By default hf, ar and every drafter.",
            show_default=False,
        ),
    ] = "hf,ar,autoregressive,pard,ngram",
    num_prompts: Annotated[int, typer.Option(help="How many prompts of the file to use.")] = 16,
    max_new_tokens: NewTokens = 128,
    prompts: Prompts = None,
    draft: Draft = None,
    k: K = 8,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    runs: Annotated[int, typer.Option(min=1, help="How often everything is repeated.")] = 3,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    compile: Compile = True,
    capacity: Capacity = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's choice.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every raw number to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a PNG.")] = None,
) -> None:
    """Compare methods on the same prompts, interleaved. The last line of the output is JSON."""
    from paradraft.bench.methods import Method
    from paradraft.bench.report import plot, table, write_json
    from paradraft.bench.run import held_out_prompts, run_bench

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    chosen = [Method.parse(spec.strip(), k=k, dtype=dtype, draft=draft) for spec in methods.split(",")]
    if threads is not None:
        torch.set_num_threads(threads)
    width = _width(*(method.k for method in chosen))
    runtime = Runtime(device=device, dtype=dtype, compiled=compile, capacity=capacity, width=width)
    texts = held_out_prompts(num_prompts, prompts)
    for file in (json_file, plot_file):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ValueError(f"{str(file)!r} cannot be written: it is a folder, or in a folder that does not exist")
    if plot_file is not None and plot_file.suffix != ".png":
        raise ValueError(f"--plot {plot_file}: name a .png file")
    console = Console(stderr=True, highlight=False)
    with console.status("preparing") as status:
        result = run_bench(
            target, chosen, texts, max_new_tokens=max_new_tokens, sampling=sampling, runtime=runtime, runs=runs,
            report=status.update if console.is_terminal else console.print,
        )  # fmt: skip
    title = f"{target}, {num_prompts} prompts x {max_new_tokens} tokens, " + (
        "greedy" if sampling.is_greedy else f"temperature {temperature:g}"
    )
    Console().print(table(result["methods"], title))
    if json_file is not None:
        write_json(json_file, result)
    if plot_file is not None:
        plot(result["methods"], title, plot_file)
    print(json.dumps(result["methods"]))


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2."""
    hide_progress_bars()
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="paradraft", standalone_mode=False) or 0
    except typer.TyperException as error:
        code = _complain(error.format_message())
    except ValueError as error:
        code = _complain(str(error))
    except ModuleNotFoundError as error:
        code = _complain(f"{error.name} is not installed: pip install 'paradraft[train,bench]'")
    except OSError as error:
        code = _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    if code == INTERRUPTED:
        print("paradraft: interrupted", file=sys.stderr)
    raise SystemExit(code)


def _complain(message: str) -> int:
    print(f"paradraft: {' '.join(message.split())}", file=sys.stderr)
    return 2
