"""`paradraft simulate`."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paradraft.bench.report.folding import FoldingTable, columns
from paradraft.cli.importing import importing
from paradraft.cli.json_output import JsonOutput, json_option
from paradraft.cli.options import option, with_options
from paradraft.cli.terminal import console
from paradraft.files import check_outputs

if TYPE_CHECKING:
    from paradraft.plan.simulate import Mirror, RoundTimes

LEAST_MS, MOST_MS = 1e-6, 1e9
LEAST = {"transport_ms": 0.0, "rest_ms": 0.0, "contention": 1.0, "branch_cost": 1.0}
"""Least values of options, besides `LEAST_MS`."""


@dataclass(frozen=True, kw_only=True)
class SimulateArgs:
    """Options of `paradraft simulate`."""

    target_ms: Annotated[float, option("A pass of the target over one token.")]
    draft_ms: Annotated[float, option("A pass of the draft model over one token.")]
    acceptance: Annotated[
        str,
        option(
            "For each position the share of drafts that are accepted that far (accepted_share_of_rounds of a "
            "benchmark's file), with commas between them; or one number, the chance of every token after accepted ones."
        ),
    ]
    verify_ms: Annotated[float | None, option("A pass of the target over a draft; by default the same.")] = None
    window_ms: Annotated[
        float | None, option("A pass of a parallel drafter (PARD); by default that of the draft model.")
    ] = None
    parallel_acceptance: Annotated[
        str | None, option("Acceptance of a parallel drafter; without it PARD is left out.")
    ] = None
    transport_ms: Annotated[float, option("From one side to the other and back.")] = 0.0
    rest_ms: Annotated[float, option("What a round takes besides.")] = 0.0
    contention: Annotated[float, option("How many times as long passes take while the other side works too.")] = 1.0
    exit_share: Annotated[float | None, option("Mirror-SD: share of a pass of the target before the early exit.")] = (
        None
    )
    named_share: Annotated[
        float | None, option("Mirror-SD: share of rounds whose next token is among those that the exit names.")
    ] = None
    branch_cost: Annotated[
        float, option("Mirror-SD: how many times as long the drafts after all named tokens take as one draft.")
    ] = 1.0
    json_file: Annotated[Path | None, json_option("the predictions")] = None

    def __post_init__(self) -> None:
        for name in ("target_ms", "draft_ms", "verify_ms", "window_ms", *LEAST):
            value, least = getattr(self, name), LEAST.get(name, LEAST_MS)
            if value is not None and not least <= value <= MOST_MS:
                option_name = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option_name} {value:g}: use a number from {least:g} to {MOST_MS:g}")
        for name in ("exit_share", "named_share"):
            value, option_name = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{option_name} {value:g}: use a share from 0 to 1")
        if (self.exit_share is None) != (self.named_share is None):
            raise ValueError("Mirror-SD needs both --exit-share and --named-share")

    def times(self) -> RoundTimes:
        """The options in seconds."""
        from paradraft.plan.simulate import RoundTimes

        return RoundTimes(
            target_s=self.target_ms / 1e3, draft_s=self.draft_ms / 1e3, transport_s=self.transport_ms / 1e3,
            rest_s=self.rest_ms / 1e3, verify_s=None if self.verify_ms is None else self.verify_ms / 1e3,
            window_s=None if self.window_ms is None else self.window_ms / 1e3, contention=self.contention,
        )  # fmt: skip

    def mirror(self) -> Mirror | None:
        """The early exit of Mirror-SD, if there is one."""
        from paradraft.plan.simulate import Mirror

        if self.exit_share is None or self.named_share is None:
            return None
        return Mirror(exit_share=self.exit_share, named_share=self.named_share, branch_cost=self.branch_cost)


@with_options
def simulate(*, args: SimulateArgs) -> None:
    """Predict speeds from the times of passes: of AR+, VSD, PARD, PEARL and Mirror-SD, on any machine."""
    rates = _rates("--acceptance", args.acceptance)
    shares = args.parallel_acceptance
    parallel = None if shares is None else _rates("--parallel-acceptance", shares)
    output = JsonOutput(args.json_file)
    check_outputs(output.file)
    if args.branch_cost > 1 and args.exit_share is None:
        print("warning: --branch-cost has no effect without --exit-share", file=sys.stderr)
    if args.window_ms is not None and parallel is None:
        print("warning: --window-ms has no effect without --parallel-acceptance", file=sys.stderr)
    with importing():
        from paradraft.plan.simulate import simulate

    predictions = simulate(args.times(), rates, parallel, args.mirror())
    table = FoldingTable(
        f"predicted: target {args.target_ms:g} ms, draft {args.draft_ms:g} ms",
        columns("method", "K or gamma", "tok/s", "vs AR+"),
        legend=[
            "AR+: without a drafter · VSD: an ordinary draft model · K, gamma: tokens drafted per round, as many as "
            "yield most · in turn: VSD, PARD · ahead, each side on its own device: PEARL, Mirror-SD"
        ],
    )
    for each in predictions:
        tokens = "" if each.tokens is None else str(each.tokens)
        table.add_row(each.method, tokens, f"{each.tokens_per_s:.1f}", f"{each.speedup:.2f}x")
    console().print(table)
    whole = [asdict(each) for each in predictions]
    output.write({"predicted": whole})
    output.end_with(whole)


def _rates(option: str, text: str) -> list[float]:
    """Parses acceptance rates by position; a single rate r becomes r, r², ...

    >>> _rates("--acceptance", "0.9,0.8"), len(_rates("--acceptance", "0.5"))
    ([0.9, 0.8], 64)
    """
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: write shares as in 0.79,0.57,0.40, or one number") from None
    if not all(0 <= rate <= 1 for rate in rates) or any(b > a for a, b in pairwise(rates)):
        raise ValueError(f"{option} {text}: use shares of all drafts from 0 to 1, none larger than the one before")
    if len(rates) > 1:
        return rates
    from paradraft.plan.simulate import MOST_TOKENS

    return [rates[0] ** (position + 1) for position in range(MOST_TOKENS)]
