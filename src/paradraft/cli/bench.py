"""`paradraft bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from paradraft.cli import options
from paradraft.cli.ignored import warn_ignored, without_chance
from paradraft.core import Sampling
from paradraft.models.loading import Runtime
from paradraft.models.shapes import is_shape
from paradraft.output import check_outputs

DEFAULTS = {
    "k": "k",
    "tree_budget": "tree",
    "verify": "verify",
    "lengths": "lengths",
    "dtype": "dtype",
    "draft": "draft",
}
"""The parameters that are settings of all methods, and what a method calls them."""


def bench(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Option(help="Hugging Face id, folder, pocket, or shape:NAME with random weights."),
    ],
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: ar (AR+), a drafter, or a peer: hf (AR), hf-assisted, hf-prompt-lookup, vllm, "
            "vllm-draft, vllm-pard, vllm-ngram; with settings behind colons, as in pard:k=12. By default hf, ar and "
            "every drafter.",
            show_default=False,
        ),
    ] = "hf,ar,autoregressive,pard,ngram",
    num_prompts: options.NumPrompts = 16,
    max_new_tokens: options.NewTokens = 128,
    prompts: options.Prompts = None,
    draft: options.Draft = None,
    k: options.K = 8,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    verify: options.Verify = "match",
    tree_budget: options.TreeBudget = None,
    lengths: options.Lengths = "fixed",
    batch_sizes: Annotated[
        str, typer.Option("--batch-size", help="Prompts answered together; several sizes with commas between them.")
    ] = "1",
    runs: Annotated[int, typer.Option(min=1, help="How often everything is repeated.")] = 3,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    compile: options.Compile = True,
    capacity: options.Capacity = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's choice.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, for a shape as the target.")] = 128,
    synthetic_acceptance: Annotated[
        str | None,
        typer.Option(
            help="Rates such as 0.79,0.57,0.40, as acceptance_per_position in a file has them: verdicts are drawn by "
            "them, to time models that nobody has trained yet."
        ),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time of a round goes.")] = False,
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            envvar="PARADRAFT_VLLM_PYTHON",
            help="The Python of vLLM's environment, for the methods vllm…; by default the one that make vllm makes.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every raw number to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a PNG.")] = None,
    page_folder: Annotated[Path | None, typer.Option("--report", help="Write an HTML page into this folder.")] = None,
) -> None:
    """Compare methods on the same prompts, interleaved. The last line of the output is JSON."""
    from paradraft.bench.methods import Method
    from paradraft.bench.page import check_folder, write_page
    from paradraft.bench.peers import is_vllm
    from paradraft.bench.profile import profile_table
    from paradraft.bench.prompt_choice import prompts_for
    from paradraft.bench.report import plot, table, write_json
    from paradraft.bench.run import run_bench
    from paradraft.bench.synthetic import SyntheticAcceptance
    from paradraft.bench.vllm_methods import without_vllm

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    specs = _with_batches([spec.strip() for spec in methods.split(",")], batch_sizes)
    chosen = [
        Method.parse(spec, k=k, tree=tree_budget, verify=verify, lengths=lengths, dtype=dtype, draft=draft)
        for spec in specs
    ]
    if threads is not None:
        torch.set_num_threads(threads)
    most = max((method.tree or 0 for method in chosen), default=0)
    width = options.width_of(*(method.k for method in chosen), nodes=most)
    runtime = Runtime(device=device, dtype=dtype, compiled=compile, capacity=capacity, width=width)
    acceptance = None if synthetic_acceptance is None else SyntheticAcceptance.parse(synthetic_acceptance)
    texts = prompts_for(target, num_prompts, tokens=prompt_tokens, file=prompts)
    check_outputs(json_file, plot_file)
    check_folder(page_folder)
    if plot_file is not None and plot_file.suffix != ".png":
        raise ValueError(f"--plot {plot_file}: name a .png file")
    taken = frozenset[str]().union(*(method.left_out for method in chosen))
    unused = [name for name, setting in DEFAULTS.items() if setting not in taken]
    asks_vllm = any(is_vllm(method.name) for method in chosen)
    chosen, skipped = without_vllm(chosen, vllm_python)
    plain = all(method.name in ("hf", "ar") for method in chosen)
    warn_ignored(
        context,
        without_chance(sampling.is_greedy and acceptance is None),
        (True, "on any of these methods", unused + ["vllm_python"] * (not asks_vllm)),
        (not is_shape(target), "on a model with texts", ("prompt_tokens",)),
        (plain, "on methods that draft nothing", ("synthetic_acceptance",)),
    )
    for spec, why in skipped.items():
        print(f"warning: {spec} is skipped. {why}", file=sys.stderr)
    console = Console(stderr=True, highlight=False)
    with console.status("preparing") as status:
        result = run_bench(
            target, chosen, texts, max_new_tokens=max_new_tokens, sampling=sampling, runtime=runtime, runs=runs,
            report=status.update if console.is_terminal else console.print, acceptance=acceptance,
            profiled=profile, vllm_python=vllm_python,
        )  # fmt: skip
    result["skipped"] = skipped
    title = "" if acceptance is None else acceptance.title
    title += f"{target}, {num_prompts} prompts x {max_new_tokens} tokens, "
    title += "greedy" if sampling.is_greedy else f"temperature {temperature:g}"
    Console().print(table(result["methods"], title))
    if compile:
        first = ", ".join(f"{spec} {figures['warm_up_s']:.0f} s" for spec, figures in result["methods"].items())
        console.print(f"first answers, with what had to be compiled: {first}")
    if profile:
        Console().print(profile_table(result["profile"], f"where a round's time goes: {title}"))
    if json_file is not None:
        write_json(json_file, {"title": title} | result)
    if plot_file is not None:
        plot(result["methods"], title, plot_file)
    if page_folder is not None:
        console.print(f"report: {write_page(page_folder, result)}")
    print(json.dumps(result["methods"]))


def _with_batches(specs: list[str], sizes: str) -> list[str]:
    """Every method with every batch size; a single size of 1 need not be said."""
    numbers = [size.strip() for size in sizes.split(",")]
    for size in numbers:
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"--batch-size {sizes}: use whole numbers of at least 1 with commas between them")
    if numbers == ["1"]:
        return specs
    if any(":batch=" in spec for spec in specs):
        raise ValueError(f"--batch-size {sizes}: a method has a batch of its own; give one or the other")
    return [f"{spec}:batch={size}" for size in numbers for spec in specs]
