"""The command line: `paradraft generate`, `train`, `bench`, `audit`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from paradraft.api import Result, drafter_names, load
from paradraft.core import Sampling, Tree
from paradraft.decode.lengths import POLICIES
from paradraft.models.loading import DTYPES, Runtime
from paradraft.prompts import read_prompts
from paradraft.terminal import hide_progress_bars, stream_answer

MOST_DRAFTED = 256
"""Largest K; caches keep room for two drafts of that length."""
MOST_NODES = 1024
"""Largest tree of a draft."""
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
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens at least p times as likely as the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: what was said before becomes less likely.")]
PresencePenalty = Annotated[float, typer.Option(help="Taken off the logit of what the answer has said.")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, for each time it was said.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(help="TOKEN_ID=NUMBER, added to its logit; -inf forbids it; may be repeated.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text, with any drafter.")]
Verify = Annotated[
    str,
    typer.Option(help="match: the same tokens as without a drafter; rejection: the same distribution, sampled faster."),
]
TreeBudget = Annotated[
    int | None, typer.Option(help="Let drafts branch, up to this many tokens; by default they are chains.")
]
TreePaths = Annotated[
    str | None, typer.Option(help='A fixed tree, as ranks of candidates: "0 1 0.0 0.1 0.0.0".', show_default=False)
]
Lengths = Annotated[
    str,
    typer.Option(help=f"How many of the k tokens to draft, one of {', '.join(POLICIES)}; expected: what pays here."),
]
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
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be repeated.")] = None,
    verify: Verify = "match",
    tree_budget: TreeBudget = None,
    tree_paths: TreePaths = None,
    lengths: Lengths = "fixed",
    batch_size: Annotated[int, typer.Option(min=1, help="With --json: prompts that are answered together.")] = 8,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    compile: Compile = False,
    capacity: Capacity = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer, with statistics.")] = False,
) -> None:
    """Answer prompts. The text is the target's own, whatever the drafter."""
    if (prompt is None) == (prompts is None):
        raise ValueError("give either --prompt or --prompts")
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=dict(_bias(pair) for pair in logit_bias or []), seed=seed,
    )  # fmt: skip
    tree = _tree(tree_budget, tree_paths)
    records = [{"prompt": prompt}] if prompts is None else read_prompts(prompts)
    runtime = Runtime(device=device, dtype=dtype, compiled=compile, capacity=capacity, width=_width(k, tree=tree))
    engine = load(target, drafter=drafter, draft=draft, k=k, verify=verify, tree=tree, lengths=lengths, runtime=runtime)
    texts = [str(record["prompt"]) for record in records]
    ours = {"text", "tokens", "finish_reason", "stats"}
    taken = ours.intersection(key for record in records for key in record) if as_json else set()
    if taken:
        raise ValueError(f"prompts have a key {sorted(taken)[0]!r}, which --json would overwrite: rename it")
    engine.check(texts, max_new_tokens=max_new_tokens)
    size = min(batch_size, len(texts)) if as_json else 1
    if compile:
        with Console(stderr=True).status("compiling (a minute or two)"):
            engine.warm_up(size)
    for start in range(0, len(records), size):
        batch = texts[start : start + size]
        if not as_json:
            stream_answer(engine, batch[0], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop or ())
            continue
        results = engine.generate(
            batch, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop or (), batch_size=size
        )
        for record, result in zip(records[start:], results, strict=False):
            print(json.dumps(record | _as_json(result), ensure_ascii=False), flush=True)


def _bias(pair: str) -> tuple[int, float]:
    token, _, bias = pair.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"--logit-bias {pair}: write TOKEN_ID=NUMBER, such as 17=-2.5 or 17=-inf") from None


def _tree(budget: int | None, paths: str | None) -> Tree | None:
    if budget is not None and paths is not None:
        raise ValueError("give either --tree-budget or --tree-paths")
    if paths is None:
        return None if budget is None else Tree(budget=budget)
    try:
        ranks = tuple(tuple(int(rank) for rank in path.split(".")) for path in paths.split())
    except ValueError:
        raise ValueError(f'--tree-paths {paths!r}: write ranks with dots between them, such as "0 1 0.0"') from None
    return Tree(paths=ranks)


def _width(*ks: int, tree: Tree | None = None) -> int:
    """Room for a pass that reads a whole round and drafts the next, or reads a whole tree."""
    for k in ks:
        if not 1 <= k <= MOST_DRAFTED:
            raise ValueError(f"k={k}: draft 1 to {MOST_DRAFTED} tokens per round")
    nodes = 0 if tree is None else tree.nodes
    if nodes > MOST_NODES:
        raise ValueError(f"a tree of {nodes} nodes: use at most {MOST_NODES}")
    return max(64, 2 * max(ks) + 2, nodes + 1)


def _as_json(result: Result) -> dict[str, object]:
    stats = result.stats
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
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
    verify: Verify = "match",
    tree_budget: TreeBudget = None,
    lengths: Lengths = "fixed",
    batch_sizes: Annotated[
        str, typer.Option("--batch-size", help="Prompts answered together; several sizes with commas between them.")
    ] = "1",
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
    specs = _with_batches([spec.strip() for spec in methods.split(",")], batch_sizes)
    chosen = [
        Method.parse(spec, k=k, tree=tree_budget, verify=verify, lengths=lengths, dtype=dtype, draft=draft)
        for spec in specs
    ]
    if threads is not None:
        torch.set_num_threads(threads)
    most = max((method.tree or 0 for method in chosen), default=0)
    width = _width(*(method.k for method in chosen), tree=Tree(budget=most) if most else None)
    runtime = Runtime(device=device, dtype=dtype, compiled=compile, capacity=capacity, width=width)
    texts = held_out_prompts(num_prompts, prompts)
    for file in (json_file, plot_file):
        _check_writable(file)
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


def _with_batches(specs: list[str], sizes: str) -> list[str]:
    """Every method with every batch size; a single size of 1 need not be said."""
    numbers = [size.strip() for size in sizes.split(",")]
    for size in numbers:
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"--batch-size {sizes}: use whole numbers of at least 1 with commas between them")
    if numbers == ["1"]:
        return specs
    return [f"{spec}:batch={size}" for size in numbers for spec in specs]


@app.command()
def audit(
    target: Target,
    drafter: Annotated[str, typer.Option(help=f"One of {', '.join(drafter_names())}.")],
    draft: Draft = None,
    k: K = 8,
    prompts: Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="How many prompts of the file to use.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Answers per prompt, when sampling.")] = 4,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    verify: Verify = "match",
    tree_budget: TreeBudget = None,
    tree_paths: TreePaths = None,
    lengths: Lengths = "fixed",
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together with the drafter.")] = 4,
    shape_invariant: Annotated[
        bool, typer.Option("--shape-invariant", help="Let plain decoding run through passes as wide as the drafter's.")
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    compile: Compile = False,
    capacity: Capacity = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every finding to this file.")] = None,
) -> None:
    """Check that a drafter changes nothing: same tokens, or same distribution.

    Says PASS, PASS UP TO NUMERICAL TIES, or FAIL; the exit code of FAIL is 1. The last line is JSON.
    """
    from paradraft.bench.audit import FAIL, audit
    from paradraft.bench.machine import describe_machine
    from paradraft.bench.report import findings, write_json
    from paradraft.bench.run import held_out_prompts

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed,
    )  # fmt: skip
    tree = _tree(tree_budget, tree_paths)
    texts = held_out_prompts(num_prompts, prompts)
    _check_writable(json_file)
    pad_to = 1 + (k if tree is None else tree.nodes) if shape_invariant else 1
    runtime = Runtime(
        device=device, dtype=dtype, compiled=compile, capacity=capacity, width=_width(k, tree=tree), pad_to=pad_to
    )
    engine = load(target, drafter=drafter, draft=draft, k=k, verify=verify, tree=tree, lengths=lengths, runtime=runtime)
    console = Console(stderr=True, highlight=False)
    with console.status("preparing") as status:
        report = audit(
            engine, texts, sampling=sampling, seeds=seeds, max_new_tokens=max_new_tokens, batch_size=batch_size,
            report=status.update,
        )  # fmt: skip
    arguments = {
        "target": target, "drafter": drafter, "draft": draft, "k": k, "tree": None if tree is None else asdict(tree),
        "verify": verify, "lengths": lengths, "num_prompts": num_prompts, "seeds": seeds, "batch_size": batch_size,
        "max_new_tokens": max_new_tokens, "sampling": asdict(sampling), "runtime": asdict(runtime),
    }  # fmt: skip
    for line in findings(report, engine.target.tokenizer):
        print(line)
    if json_file is not None:
        write_json(json_file, report.as_json() | {"arguments": arguments, "machine": describe_machine(device)})
    print(json.dumps(report.as_json()))
    if report.verdict == FAIL:
        raise typer.Exit(1)


def _check_writable(file: Path | None) -> None:
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ValueError(f"{str(file)!r} cannot be written: it is a folder, or in a folder that does not exist")


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
