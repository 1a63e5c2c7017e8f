"""`paradraft report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    result: Annotated[Path, typer.Argument(metavar="FILE.json", help="What paradraft bench --json wrote.")],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the page goes.")],
) -> None:
    """Make an HTML page of a result of paradraft bench."""
    from paradraft.bench.page import check_folder, read_result, write_page

    check_folder(out)
    print(write_page(out, read_result(result)))
