"""The process, and how it ends."""

from __future__ import annotations

from types import FrameType

import uvicorn
from fastapi import FastAPI

from paradraft.serve.admission import Admission

LAST_S = 2
"""Seconds for what is left when time is up: telling clients of it."""


class Server(uvicorn.Server):
    """Ends when it is told to: it refuses what is new, and lets what is under way end. Told twice, it ends at once.

    Args:
        app: what it serves.
        admission: who is let in.
    """

    def __init__(self, app: FastAPI, admission: Admission) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http="h11",
                server_header=False,
                timeout_graceful_shutdown=LAST_S,
            )
        )
        self._admission = admission
        self._is_ending = False

    def end(self) -> None:
        """Tells it to end; any thread may."""
        self._is_ending = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What a signal does."""
        if self._is_ending:
            self.force_exit = self.should_exit = True
        self.end()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is over."""
        if self._is_ending and not self._admission.is_closing:
            self._admission.close()
        if self._admission.is_closing and self._admission.is_idle:
            self.should_exit = True
        return await super().on_tick(counter)
