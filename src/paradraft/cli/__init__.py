"""Entry point of the command line; its commands are in [commands/](commands)."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import NoReturn

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def main() -> None:
    """Runs the command line: user mistakes and out-of-memory errors are one line and exit code 2, warnings one line.

    In distributed training only rank 0 prints, except errors that may differ by rank: modules, files and memory.
    """
    try:
        code = _run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED and _speaks():
        print("paradraft: interrupted", file=sys.stderr)
    _leave(code)


def _run() -> int:
    import typer

    from paradraft.cli.command_list import app
    from paradraft.errors import DrafterLostError, is_out_of_memory

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A prompt or an answer may have characters that the terminal cannot encode.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's default outside __main__
            return app(sys.argv[1:] or ["--help"], prog_name="paradraft", standalone_mode=False) or 0
    except typer.TyperException as error:
        return _complain(error.format_message() + _value_of(error))
    except ValueError as error:
        return _complain(str(error))
    except DrafterLostError as error:
        return _complain(str(error), always=True)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _complain(_short_of_memory(error), always=True)
    except ModuleNotFoundError as error:
        of_train = dict.fromkeys(("train", "adapt", "regenerate", "trim", "merge"), "train")
        extra = (of_train | {"serve": "serve"}).get("".join(sys.argv[1:2]), "bench")
        return _complain(f"{error.name} is not installed: pip install 'paradraft[{extra}]'", always=True)
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), always=True)


def _value_of(error: Exception) -> str:
    """Value that pydantic rejected, which typer leaves out of its message."""
    errors = getattr(error.__cause__, "errors", None)
    return f", not {errors()[0]['input']!r}" if errors else ""


def _short_of_memory(error: Exception) -> str:
    fix = (
        "lower samples_per_pass or set gradient_checkpointing=true, the run goes on with either; or lower max_length"
        if sys.argv[1:2] == ["train"]
        else "use a smaller batch, shorter texts or smaller models"
    )
    return f"out of {'GPU ' if 'CUDA' in str(error) else ''}memory: {fix}"


def _leave(code: int) -> NoReturn:
    """Ends the process.

    Gloo's threads may still hold tensors of the last collective. Freeing one during interpreter shutdown aborts the
    process, so `os._exit` skips the shutdown.
    """
    distributed = sys.modules.get("torch.distributed")  # None in a single process
    is_distributed = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if distributed is not None and is_distributed and distributed.get_backend() == "gloo":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _speaks() -> bool:
    """Whether this process prints: rank 0 in training; other commands ignore RANK, which another launcher may set."""
    return sys.argv[1:2] != ["train"] or os.environ.get("RANK", "0") == "0"


def _complain(message: str, *, always: bool = False) -> int:
    if always or _speaks():
        print(f"paradraft: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _warn(message: Warning | str, *location: object, **line: object) -> None:
    if _speaks():
        print(f"paradraft: warning: {' '.join(str(message).split())}", file=sys.stderr)
