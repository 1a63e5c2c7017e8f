"""`paradraft serve`."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from paradraft.cli import options
from paradraft.cli.engine_args import EngineArgs, tell_reason, warm_up
from paradraft.cli.ignored import of_drafting, refuse, warn_ignored
from paradraft.cli.importing import importing
from paradraft.cli.model_sampling import GenerationConfig, asked_by, expect_penalty
from paradraft.cli.options import option
from paradraft.cli.sections import DRAFTING, SERVERS
from paradraft.cli.terminal import tell_advice
from paradraft.cli.values import use_threads
from paradraft.placement import Placement
from paradraft.serve.address import bound, key_of, listen, url_of
from paradraft.serve.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from paradraft.serve.adapting import Adapting
    from paradraft.serve.vllm import VllmServer

PARADRAFT, VLLM = ENGINES = ("paradraft", "vllm")
LOSSY_ON_CPUS = (
    "on CPUs vLLM (0.32) loses sampling parameters where it drafts: at a temperature above 0 its texts are not the "
    "target's"
)
Processes = Annotated[int, option("With --engine vllm: passed on to it.", section=SERVERS, least=1)]


def check_engine(name: str) -> None:
    """Raises ValueError for an unknown engine."""
    if name not in ENGINES:
        raise ValueError(f"--engine {name}: use one of {', '.join(ENGINES)}")


@dataclass(frozen=True, kw_only=True)
class ServeArgs(EngineArgs):
    """Options of `paradraft serve`."""

    has_grammars: ClassVar[bool] = True
    host: Annotated[str, option("Address to listen on. Other than localhost requires --api-key-env.")] = "127.0.0.1"
    port: Annotated[int, option("Where to listen; 0 is one that is free.", least=0, most=65535)] = 8000
    limits: Limits
    api_key_env: Annotated[
        str | None, option("Variable of the environment that has the key which requests must send.")
    ] = None
    served_model_name: Annotated[
        str | None, option("How requests name the model; by default its file's name, or as --target does.")
    ] = None
    generation_config: GenerationConfig = "auto"
    adapt: Annotated[
        Path | None,
        option(
            "Let the drafter learn from the answers, in a second process at the lowest priority, and draft with what "
            "is better. This folder keeps drafters and answers, which hold what users wrote; a restart goes on there.",
            section=DRAFTING,
        ),
    ] = None
    kept_rows: Annotated[int, option("Finished requests whose KV cache is kept for prefix reuse.", least=0)] = 0
    threads: options.Threads = None
    placement: Annotated[Placement, options.Offer(without=("tensor_parallel",))]
    engine: Annotated[
        str,
        option(
            "What decodes: paradraft, or vllm, whose own server is started with these settings.",
            section=SERVERS, check=check_engine,
        ),
    ] = PARADRAFT  # fmt: skip
    plan: Annotated[
        Path | None,
        option("With --engine vllm: the K of each batch size, by a file of `paradraft plan --json`.", section=SERVERS),
    ] = None
    tensor_parallel_size: Processes = 1
    pipeline_parallel_size: Processes = 1
    data_parallel_size: Processes = 1
    vllm_python: options.VllmPython = None
    dry_run: Annotated[
        bool, option("With --engine vllm: print the command that starts it, and end.", "--dry-run", section=SERVERS)
    ] = False


@options.with_options
def serve(context: typer.Context, *, args: ServeArgs) -> None:
    """Answer requests over HTTP, as OpenAI's servers do; a page at / lets you try it.

    Requests are decoded together. Ctrl-C ends the server when those under way have ended, a second one at once.
    """
    with importing():
        from paradraft.cli.commands.serve_vllm import ONLY_VLLM, command_of

    use_threads(args.threads)
    if args.engine == VLLM:
        _become(command_of(context, args), args)
        return
    refuse(context, ONLY_VLLM, "is for --engine vllm: add that, or leave it out")
    key = key_of(args.api_key_env, args.host)
    from paradraft.serve.admission import Server
    from paradraft.serve.app import new_app

    with closing(bound(args.host, args.port)) as listening:
        expect_penalty(args.generation_config)
        adaptation = None
        if args.adapt is not None:
            args, adaptation = _adapted(args, args.adapt)
        engine = args.load(kept_rows=args.kept_rows)
        defaults = asked_by(engine.target, args.target, args.generation_config)
        tell_reason(engine)
        warn_ignored(context, *of_drafting(engine.speculation, args.placement, has_grammars=args.has_grammars))
        with engine:
            warm_up(engine, args.limits.max_batch)
            app, admission = new_app(engine, names=names_of(args), limits=args.limits, key=key, defaults=defaults)
            with nullcontext() if adaptation is None else adaptation(engine, _say):
                listen(listening)
                if defaults:
                    listed = ", ".join(f"{name}={value:g}" for name, value in defaults.items())
                    _say(f"requests that do not say otherwise have {listed}, as the model asks")
                _say(f"serving {args.target} at {url_of(listening)}; Ctrl-C ends it")
                Server(app, admission).run(sockets=[listening])
            tell_advice(engine)


def _adapted(args: ServeArgs, folder: Path) -> tuple[ServeArgs, Callable[..., Adapting]]:
    """The options with the newest drafter of an adaptation, and what adapts an engine."""
    if find_spec("accelerate") is None:
        raise ValueError(f"--adapt {folder}: this trains, pip install 'paradraft[train]'")
    from paradraft.serve.adapting import Adapting, adaptation_of

    adaptation, speculation = adaptation_of(args.target, args.speculation, folder, log=args.rounds)
    return replace(args, speculation=speculation, rounds=None), partial(Adapting, adaptation)


def names_of(args: ServeArgs) -> list[str]:
    """The model's names in requests: the one that was given; else that of its file, and its path."""
    if args.served_model_name is not None:
        return [args.served_model_name]
    path = Path(args.target)
    return [path.resolve().name.removesuffix(".gguf"), args.target] if path.exists() else [args.target]


def _say(text: str) -> None:
    print(f"paradraft: {text}", file=sys.stderr, flush=True)


def _become(server: VllmServer, args: ServeArgs) -> None:
    """Replaces this process by vLLM's server, or prints its command."""
    from paradraft.export.vllm import NOT_INSTALLED, installed_python

    if args.dry_run:
        print(server.line)
        return
    if installed_python(args.vllm_python) is None:
        raise ValueError(NOT_INSTALLED)
    name = server.check(args.runtime.device)
    bound(args.host, args.port).close()  # a port in use raises ValueError now; vLLM would fail after a minute
    if server.speculative is not None and "cpu" in name:
        print(f"warning: {LOSSY_ON_CPUS}", file=sys.stderr)
    _say(f"starting {name}; Ctrl-C ends it")
    server.become()
