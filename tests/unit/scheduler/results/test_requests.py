"""Requests end when no client waits for them any more."""

from __future__ import annotations

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import (
    GatewayGone,
    SendTokens,
    WorkersReady,
)
from services.scheduler.core.limits import EngineLimits
from shared.ids import EngineId, Incarnation
from tests.support.engines.checking_worker import GATEWAY, card, generate

ENGINE = EngineId("e")

CARD = card()


def started(limits: EngineLimits) -> EngineCore:
    engine = EngineCore(ENGINE, Incarnation(1), limits)
    engine.handle(WorkersReady(CARD, 64, max_running=3, max_batch_tokens=40), 0.0)
    return engine


def test_a_gateway_that_is_gone_takes_its_requests_along() -> None:
    engine = started(EngineLimits(max_running=10, max_batch_tokens=64))
    engine.handle(generate("a", [4] * 20), 0.0)
    (tokens,) = engine.handle(GatewayGone(GATEWAY), 0.0)
    assert isinstance(tokens, SendTokens)
    assert [a.request for a in tokens.batch.abandoned] == ["a"]
    assert not engine.requests
