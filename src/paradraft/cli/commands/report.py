"""`paradraft report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.terminal import console
from paradraft.cli.values import check_png


def report(
    result: Annotated[Path, typer.Argument(metavar="FILE.json", help="What paradraft bench --json wrote.")],
    out: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", help="Where the page goes.")] = None,
    methods: Annotated[
        str | None, options.option("Only these methods of the file, in this order, with commas between them.")
    ] = None,
    plot_file: options.Plot = None,
) -> None:
    """Show a result of paradraft bench again: as an HTML page, as a picture, or without either as the table."""
    with importing():
        from paradraft.bench.report.page import check_folder, read_result, write_page
        from paradraft.bench.report.plot import plot
        from paradraft.bench.report.summary import title_of
        from paradraft.bench.result_file import selected
        from paradraft.files import check_outputs

    check_folder(out)
    check_outputs(plot_file)
    check_png(plot_file)
    content = read_result(result)
    if methods is not None:
        content = selected(content, [spec.strip() for spec in methods.split(",")])
    if plot_file is not None:
        plot(content, plot_file)
        print(plot_file)
    if out is not None:
        print(write_page(out, content))
    if out is None and plot_file is None:
        print_methods(content["methods"], title_of(content))


def print_methods(methods: dict[str, Any], title: str) -> None:
    """Prints the figures of methods with notes, and their latencies if there are any."""
    from paradraft.bench.report.summary import latency_table, notes, table

    console().print(table(methods, title))
    print("\n".join(notes(methods)))
    if (latencies := latency_table(methods)) is not None:
        print()
        console().print(latencies)
