"""One engine as its last report shows it, with what is asked of that for each request worked out once."""

from __future__ import annotations

from typing import NamedTuple

from services.coordinator.core.load import room
from shared.blocks import BLOCK_SIZE
from shared.ids import EngineId
from shared.messages.lifecycle import EngineReport, Lifecycle, Phase


class Engine(NamedTuple):
    life: Lifecycle
    report: EngineReport
    id: EngineId
    phase: Phase
    room: int
    """Requests that it takes beyond those reported."""
    prefill: float
    """Blocks that it has yet to compute before it gets to one more request."""
    used: int
    """Blocks of KV memory in use."""

    @classmethod
    def of(cls, life: Lifecycle, report: EngineReport, fill: float | None) -> Engine:
        return cls(
            life=life,
            report=report,
            id=EngineId(life.instance),
            phase=life.phase,
            room=room(report, fill),
            prefill=report.prefill_tokens / BLOCK_SIZE,
            used=report.blocks_total - report.blocks_free,
        )
