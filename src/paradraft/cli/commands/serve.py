"""`paradraft serve`."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.model_sampling import GenerationConfig, asked_by, expect_penalty
from paradraft.cli.sections import SERVERS
from paradraft.cli.terminal import console, tell_advice
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement
from paradraft.serve.address import bound, key_of, listen, url_of
from paradraft.serve.limits import Limits

PARADRAFT, VLLM = ENGINES = ("paradraft", "vllm")
LOSSY_ON_CPUS = (
    "on CPUs vLLM (0.32) loses sampling parameters where it drafts: at a temperature above 0 its texts are not the "
    "target's"
)
Processes = Annotated[int, typer.Option(min=1, rich_help_panel=SERVERS, help="With --engine vllm: passed on to it.")]


def check_engine(name: str) -> None:
    """Raises ValueError for an unknown engine."""
    if name not in ENGINES:
        raise ValueError(f"--engine {name}: use one of {', '.join(ENGINES)}")


@options.with_options
def serve(
    context: typer.Context,
    *,
    target: options.Target,
    speculation: Speculation,
    host: Annotated[str, typer.Option(help="Address to listen on. Other than localhost requires --api-key-env.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 is one that is free.")] = 8000,
    limits: Limits,
    api_key_env: Annotated[
        str | None, typer.Option(help="Variable of the environment that has the key which requests must send.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="How requests name the model; by default as --target does.")
    ] = None,
    generation_config: GenerationConfig = "auto",
    kept_rows: Annotated[
        int, typer.Option(min=0, help="Finished requests whose KV cache is kept for prefix reuse.")
    ] = 0,
    runtime: Runtime,
    threads: options.Threads = None,
    placement: Annotated[Placement, options.Offer(without=("tensor_parallel",))],
    engine: Annotated[
        str,
        typer.Option(
            callback=options.checked(check_engine),
            rich_help_panel=SERVERS,
            help="What decodes: paradraft, or vllm, whose own server is started with these settings.",
        ),
    ] = PARADRAFT,
    plan: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=SERVERS,
            help="With --engine vllm: the K of each batch size, by a file of `paradraft plan --json`.",
        ),
    ] = None,
    tensor_parallel_size: Processes = 1,
    pipeline_parallel_size: Processes = 1,
    data_parallel_size: Processes = 1,
    vllm_python: options.VllmPython = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", rich_help_panel=SERVERS, help="With --engine vllm: print the command that starts it, and end."
        ),
    ] = False,
) -> None:
    """Answer requests over HTTP, as OpenAI's servers do; a page at / lets you try it.

    Requests are decoded together. Ctrl-C ends the server when those under way have ended, a second one at once.
    """
    with importing():
        from paradraft.cli.commands.serve_vllm import command_of, refuse_others
        from paradraft.engine.loader import load_engine
        from paradraft.export.vllm import NOT_INSTALLED, installed_python

    options.use_threads(threads)
    if engine == VLLM:
        server = command_of(
            context, target=target, speculation=speculation, plan=plan, host=host, port=port, limits=limits,
            api_key_env=api_key_env, served_model_name=served_model_name, runtime=runtime, threads=threads,
            placement=placement, python=vllm_python, generation_config=generation_config,
            sizes={
                "--tensor-parallel-size": tensor_parallel_size, "--pipeline-parallel-size": pipeline_parallel_size,
                "--data-parallel-size": data_parallel_size,
            },
        )  # fmt: skip
        if dry_run:
            print(server.line)
            return
        if installed_python(vllm_python) is None:
            raise ValueError(NOT_INSTALLED)
        name = server.check(runtime.device)
        bound(host, port).close()  # a port in use raises ValueError now; vLLM would fail after a minute
        if server.speculative is not None and "cpu" in name:
            print(f"warning: {LOSSY_ON_CPUS}", file=sys.stderr)
        print(f"paradraft: starting {name}; Ctrl-C ends it", file=sys.stderr)
        server.become()
    refuse_others(context)
    key = key_of(api_key_env, host)
    from paradraft.serve.app import new_app
    from paradraft.serve.server import Server

    with closing(bound(host, port)) as listening:
        expect_penalty(generation_config)
        with console(stderr=True).status("loading; the first time passes are built for this CPU"):
            runtime = replace(runtime, width=speculation.pass_width)
            loaded = load_engine(
                target, speculation, kept_rows=kept_rows, runtime=runtime, placement=placement, tries_plain=True
            )
        defaults = asked_by(loaded.target, target, generation_config)
        options.warn_ignored(
            context,
            options.without_drafter(speculation),
            options.with_own_tree(speculation),
            options.with_gamma(speculation),
            options.without_process(placement),
        )
        with loaded:
            if loaded.target.lm.warm_up_rounds:
                with console(stderr=True).status("compiling (a minute or two)"):
                    loaded.warm_up(limits.max_batch)
            app, admission = new_app(
                loaded, model=served_model_name or target, limits=limits, key=key, defaults=defaults
            )
            listen(listening)
            if defaults:
                listed = ", ".join(f"{name}={value:g}" for name, value in defaults.items())
                print(
                    f"paradraft: requests that do not say otherwise have {listed}, as the model asks", file=sys.stderr
                )
            print(f"paradraft: serving {target} at {url_of(listening)}; Ctrl-C ends it", file=sys.stderr, flush=True)
            Server(app, admission).run(sockets=[listening])
            tell_advice(loaded)
