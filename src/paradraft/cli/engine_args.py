"""Options of the commands that decode with an engine, and its loading."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.terminal import console
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement

if TYPE_CHECKING:
    from paradraft.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Options of an engine; its target, drafter and placement."""

    has_grammars: ClassVar[bool] = False
    """Whether requests may have grammars."""
    target: options.Target
    speculation: Annotated[Speculation, options.AUTOMATIC]
    runtime: Runtime
    placement: Placement
    rounds: options.Rounds = None

    def load(self, *, kept_rows: int = 0) -> Engine:
        """Loads the engine; see `load_engine`."""
        with importing():
            from paradraft.engine.loader import load_engine

        with console(stderr=True).status("loading; the first time passes are built for this CPU"):
            engine = load_engine(
                self.target, self.speculation, kept_rows=kept_rows, runtime=self.runtime, placement=self.placement,
                tries_plain=True, has_grammars=self.has_grammars,
            )  # fmt: skip
        if self.rounds is not None:
            engine.log_rounds(self.rounds)
        return engine


def tell_reason(engine: Engine) -> None:
    """Says which drafter "auto" chose, and why."""
    if engine.speculation.reason is not None:
        print(f"paradraft: {engine.speculation.reason}", file=sys.stderr)


def warm_up(engine: Engine, batch_size: int) -> None:
    """Compiles and records the engine's passes, where they are compiled or recorded."""
    if engine.target.lm.warm_up_rounds:
        with console(stderr=True).status("first passes (a minute or two where they are compiled)"):
            engine.warm_up(batch_size)
