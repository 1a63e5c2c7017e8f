"""`paradraft serve`."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from typing import Annotated

import typer

from paradraft.cli import options
from paradraft.cli.terminal import console
from paradraft.loader import load_engine
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement
from paradraft.serve.app import new_app
from paradraft.serve.limits import Limits
from paradraft.serve.server import Server, bound, key_of, url_of
from paradraft.speculation import Speculation


@options.with_options
def serve(
    context: typer.Context,
    *,
    target: options.Target,
    speculation: Speculation,
    host: Annotated[str, typer.Option(help="Where to listen; another one than this machine's own wants a key.")] = (
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
    kept_rows: Annotated[
        int, typer.Option(min=0, help="Of how many answers the caches are kept, for the next turn of a conversation.")
    ] = 0,
    runtime: Runtime,
    placement: Annotated[Placement, options.Offer(without=("tensor_parallel",))],
) -> None:
    """Answer requests over HTTP, as OpenAI's servers do; a page at / lets you try it.

    Requests are decoded together. Ctrl-C ends the server when those under way have ended, a second one at once.
    """
    key = key_of(api_key_env, host)
    with closing(bound(host, port)) as listening:
        with console(stderr=True).status("loading; the first time passes are built for this CPU"):
            runtime = replace(runtime, width=speculation.pass_width)
            engine = load_engine(target, speculation, kept_rows=kept_rows, runtime=runtime, placement=placement)
        options.warn_ignored(
            context,
            options.without_drafter(speculation),
            options.with_own_tree(speculation),
            options.with_gamma(speculation),
            options.without_process(placement),
        )
        with engine:
            if engine.target.lm.warm_up_rounds:
                with console(stderr=True).status("compiling (a minute or two)"):
                    engine.warm_up(limits.max_batch)
            app, admission = new_app(engine, model=served_model_name or target, limits=limits, key=key)
            print(f"paradraft: serving {target} at {url_of(listening)}; Ctrl-C ends it", file=sys.stderr, flush=True)
            Server(app, admission).run(sockets=[listening])
