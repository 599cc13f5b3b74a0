"""The invariants notice what is broken."""

from __future__ import annotations

import pytest

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import (
    WorkersReady,
)
from services.scheduler.core.invariants import BrokenInvariant, check
from services.scheduler.core.limits import EngineLimits
from shared.ids import EngineId, Incarnation, RequestId
from tests.support.engines.checking_worker import card, generate

ENGINE = EngineId("e")

CARD = card()


def started(limits: EngineLimits) -> EngineCore:
    engine = EngineCore(ENGINE, Incarnation(1), limits)
    engine.handle(WorkersReady(CARD, 64, max_running=3, max_batch_tokens=40), 0.0)
    return engine


def test_a_broken_pool_is_noticed() -> None:
    engine = started(EngineLimits(max_running=10, max_batch_tokens=64))
    engine.handle(generate("a", [4] * 20), 0.0)
    check(engine)
    engine.requests[RequestId("a")].blocks.numbers.pop()
    with pytest.raises(BrokenInvariant):
        check(engine)
