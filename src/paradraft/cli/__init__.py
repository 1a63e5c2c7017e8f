"""The command line: `paradraft generate`, `regenerate`, `init-draft`, `train`, `bench`, `report`, `plan`, `audit`."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import NoReturn

import typer
from torch import distributed

from paradraft.cli.audit import audit
from paradraft.cli.bench import bench
from paradraft.cli.generate import generate
from paradraft.cli.init_draft import init_draft
from paradraft.cli.plan import plan
from paradraft.cli.regenerate import regenerate
from paradraft.cli.report import report
from paradraft.cli.simulate import simulate
from paradraft.cli.terminal import hide_progress_bars
from paradraft.cli.train import train_drafter
from paradraft.decode.remote import DrafterLostError
from paradraft.environment import is_main_process
from paradraft.errors import is_out_of_memory

INTERRUPTED = 130
"""What typer makes of Ctrl-C."""

# Without rich's boxes, which cut the names of long options off where a terminal is narrow.
app = typer.Typer(
    add_completion=False,
    help="Speculative decoding with parallel drafters: train, decode, prove, measure, plan.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(generate)
app.command()(init_draft)
app.command()(regenerate)
app.command("train")(train_drafter)
app.command()(bench)
app.command()(report)
app.command()(plan)
app.command()(simulate)
app.command()(audit)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, and so is memory that has run out; a warning is one
    line.

    Of several processes that train together one says so, but for what others may have: modules, files and memory.
    """
    hide_progress_bars()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A prompt or an answer may have characters that the terminal's encoding has not.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's default: it is for developers
            code = app(sys.argv[1:] or ["--help"], prog_name="paradraft", standalone_mode=False) or 0
    except typer.TyperException as error:
        code = _complain(error.format_message())
    except ValueError as error:
        code = _complain(str(error))
    except DrafterLostError as error:
        code = _complain(str(error), always=True)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        code = _complain(_short_of_memory(error), always=True)
    except ModuleNotFoundError as error:
        code = _complain(f"{error.name} is not installed: pip install 'paradraft[train,bench]'", always=True)
    except OSError as error:
        code = _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), always=True)
    if code == INTERRUPTED and _speaks():
        print("paradraft: interrupted", file=sys.stderr)
    _leave(code)


def _short_of_memory(error: Exception) -> str:
    fix = (
        "lower samples_per_pass or set gradient_checkpointing=true, the run goes on with either; or lower max_length"
        if sys.argv[1:2] == ["train"]
        else "use a smaller batch, shorter texts or smaller models"
    )
    return f"out of {'GPU ' if 'CUDA' in str(error) else ''}memory: {fix}"


def _leave(code: int) -> NoReturn:
    """Ends the process.

    Gloo's threads may still hold tensors of the last exchange between processes. Letting go of one after the
    interpreter has begun to end aborts the process, so it ends without that.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _speaks() -> bool:
    """Whether this process speaks: only training knows of others, elsewhere their numbers are somebody else's."""
    return sys.argv[1:2] != ["train"] or is_main_process()


def _complain(message: str, *, always: bool = False) -> int:
    if always or _speaks():
        print(f"paradraft: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _warn(message: Warning | str, *place: object, **line: object) -> None:
    if _speaks():
        print(f"paradraft: warning: {' '.join(str(message).split())}", file=sys.stderr)
