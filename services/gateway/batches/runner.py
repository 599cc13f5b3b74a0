"""Looks for batches that nobody works on, and runs some of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.gateway.batches.batch_run import BatchRun
from services.gateway.batches.batch_store import BATCHES, BatchObject, batch_of
from services.gateway.database.records import Database, DatabaseUnavailable

log = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two looks for batches of gateways that have stopped."""
MAX_RUNS = 4
"""Batches that one gateway works on; further ones wait for it or another."""


class BatchRunner:
    """Owns the batches that this gateway works on."""

    def __init__(
        self, database: Database, holder: str, lease: float, run_of: Callable[[BatchObject], BatchRun]
    ) -> None:
        """`holder`: a name of this process that no other has. `lease`: seconds. `run_of`: how a batch is run."""
        self._database, self._holder, self._lease, self._run_of = database, holder, lease, run_of
        self._runs: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._accepting = True

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled; then `stop` is still to be called."""
        while True:
            while self._accepting and len(self._runs) < MAX_RUNS and (batch := await self._claimed()) is not None:
                run = asyncio.create_task(self._run_of(batch).run())
                self._runs.add(run)
                run.add_done_callback(self._ended)
            self._wake.clear()
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def stop(self) -> None:
        """Gives its batches to other gateways, and takes no more until `resume`."""
        self._accepting = False
        runs = list(self._runs)
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    def resume(self) -> None:
        """Takes batches again."""
        self._accepting = True
        self.wake()

    async def _claimed(self) -> BatchObject | None:
        if self._database.untouched:
            return None
        try:
            record = await self._database.claim(BATCHES, self._holder, self._lease)
        except DatabaseUnavailable as error:
            log.warning("no look for batches", extra={"error": str(error)})
            return None
        return None if record is None else batch_of(record)

    def _ended(self, run: asyncio.Task[None]) -> None:
        self._runs.discard(run)
        if not run.cancelled() and (error := run.exception()) is not None:
            log.error("bug in a batch", exc_info=error)
        self.wake()
