"""Uvicorn server with a graceful shutdown."""

from __future__ import annotations

from types import FrameType

import uvicorn
from fastapi import FastAPI

from paradraft.serve.admission import Admission

LAST_S = 2
"""Seconds after the drain time for sending the last errors to clients."""


class Server(uvicorn.Server):
    """Server whose first signal drains running requests and rejects new ones; a second signal ends it at once."""

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
        """Starts the shutdown; thread-safe."""
        self._is_ending = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM."""
        if self._is_ending:
            self.force_exit = self.should_exit = True
        self.end()

    async def on_tick(self, counter: int) -> bool:
        """Runs ten times a second: drains, then exits when idle."""
        if self._is_ending and not self._admission.is_closing:
            self._admission.close()
        if self._admission.is_closing and self._admission.is_idle:
            self.should_exit = True
        return await super().on_tick(counter)
