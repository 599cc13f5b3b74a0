"""Says how the picks of a mixture's experts fall on the ranks, and keeps how often each expert was picked."""

from __future__ import annotations

import asyncio
import logging

from services.worker import metrics
from services.worker.backend import ExpertPicks

REPORT_EVERY = 10.0
"""Seconds between two reports."""

_log = logging.getLogger(__name__)


class ExpertReporter:
    """Owns what was counted so far of what steps have picked."""

    def __init__(self, load: ExpertPicks) -> None:
        self._load = load
        self._counted: dict[int, list[float]] = {}

    async def run(self) -> None:
        """Reports for ever."""
        while True:
            await asyncio.sleep(REPORT_EVERY)
            await self.report()

    async def report(self) -> None:
        """Counts what was picked since the last report, and writes the file. A file that cannot be written is logged:
        requests do not depend on it."""
        for layer, picks in (await asyncio.to_thread(self._load.by_rank)).items():
            before = self._counted.get(layer, [0.0] * len(picks))
            for rank, (now, former) in enumerate(zip(picks, before, strict=True)):
                metrics.EXPERT_PICKS.labels(str(layer), str(rank)).inc(now - former)
            self._counted[layer] = picks
        try:
            await asyncio.to_thread(self._load.save)
        except OSError as error:
            _log.warning("how often experts are picked could not be written: %s", error)
