"""Help of a command with its options in sections, the most used first.

An option names its section as `rich_help_panel`; the default is `COMMON`. Sections are plain text, because Rich's boxes
truncate long option names on narrow terminals.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

SECTIONS = (
    ARGUMENTS, COMMON, DRAFTING, SAMPLING, HARDWARE, DEVICES, LIMITS, SERVERS, RESULTS
) = (
    "Arguments", "Common", "Drafting", "Sampling", "Hardware", "Several devices", "Limits", "Servers and other engines",
    "Results",
)  # fmt: skip
"""In the order of the help."""
FIRST = ("target", "drafter", "methods", "prompt", "prompts", "out", "max_new_tokens", "temperature")
"""Parameters that come first, in this order, whatever their section."""


class SectionedCommand(TyperCommand):
    """A command whose help has sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments and options by section; a single section is called Options."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        for parameter in sorted(self.get_params(ctx), key=_rank):
            if (record := parameter.get_help_record(ctx)) is not None:
                sections[_section(parameter)].append(record)
        shown = {name: records for name, records in sections.items() if records}
        is_single = shown.keys() <= {ARGUMENTS, COMMON}
        for name, records in shown.items():
            with formatter.section("Options" if is_single and name == COMMON else name):
                formatter.write_dl(records)


def _rank(parameter: Any) -> int:
    return FIRST.index(parameter.name) if parameter.name in FIRST else len(FIRST)


def _section(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return ARGUMENTS
    return COMMON if parameter.name in FIRST else parameter.rich_help_panel or COMMON
