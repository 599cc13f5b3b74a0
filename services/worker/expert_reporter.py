"""Says how the picks of a mixture's experts fall on the ranks, and keeps how often each expert was picked."""

from __future__ import annotations

import asyncio
import logging

from services.worker import metrics
from services.worker.backend import ExpertPicks
from services.worker.models.expert_parallel.expert_balance import balance_of
from shared.messages.lifecycle import ExpertReport, LayerExpertLoad

REPORT_EVERY = 10.0
"""Seconds between two reports."""

_log = logging.getLogger(__name__)


class ExpertReporter:
    """Owns what was counted so far of what steps have picked."""

    def __init__(self, load: ExpertPicks) -> None:
        self._load = load
        self._counted: dict[int, list[float]] = {}
        self.recent: dict[int, list[float]] = {}
        """By layer, what each rank's experts were picked between the last two reports that had some."""

    async def run(self) -> None:
        """Reports for ever."""
        while True:
            await asyncio.sleep(REPORT_EVERY)
            await self.report()

    async def report(self) -> None:
        """Counts what was picked since the last report, and writes the file. A file that cannot be written is logged:
        requests do not depend on it."""
        balances: dict[int, float] = {}
        for layer, picks in (await asyncio.to_thread(self._load.by_rank)).items():
            before = self._counted.get(layer, [0.0] * len(picks))
            new = [max(0.0, now - former) for now, former in zip(picks, before, strict=True)]
            for rank, count in enumerate(new):
                metrics.EXPERT_PICKS.labels(str(layer), str(rank)).inc(count)
            self._counted[layer] = picks
            if any(new):
                self.recent[layer] = new
                balances[layer] = balance_of(new)
                metrics.EXPERT_BALANCE.labels(str(layer)).set(balances[layer])
        self._tell(balances)
        try:
            await asyncio.to_thread(self._load.save)
        except OSError as error:
            _log.warning("how often experts are picked could not be written: %s", error)

    @property
    def latest(self) -> ExpertReport | None:
        """What lifecycle messages say of it; None before the first report with picks."""
        if not self.recent:
            return None
        layers = tuple(
            LayerExpertLoad(layer, tuple(round(100 * len(picks) * each / sum(picks)) for each in picks))
            for layer, picks in sorted(self.recent.items())
        )
        moves = self._load.moves
        return ExpertReport(layers) if moves is None else ExpertReport(layers, moves.rearrangements, moves.experts)

    def _tell(self, balances: dict[int, float]) -> None:
        moves = self._load.moves
        if moves is not None:
            metrics.EXPERT_REARRANGEMENTS.labels("completed").set(moves.rearrangements)
            metrics.EXPERT_REARRANGEMENTS.labels("failed").set(moves.failures)
            metrics.EXPERTS_MOVED.set(moves.experts)
            metrics.EXPERT_REARRANGEMENT_SECONDS.set(moves.seconds)
        if balances and self._load.logs_balance:
            least = min(balances, key=balances.__getitem__)
            _log.info(
                "picks of experts: mean over maximum of the ranks %.2f, in layer %d %.2f",
                *(sum(balances.values()) / len(balances), least, balances[least]),
            )
