"""The invariants notice what is broken."""

from __future__ import annotations

import pytest

from services.scheduler.core.invariants import BrokenInvariant, check
from services.scheduler.core.limits import EngineLimits
from shared.ids import RequestId
from tests.support.engines.checking_worker import generate
from tests.support.engines.single_engine import started


def test_a_broken_pool_is_noticed() -> None:
    engine = started(EngineLimits(max_running=10, max_batch_tokens=64))
    engine.handle(generate("a", [4] * 20), 0.0)
    check(engine)
    engine.requests[RequestId("a")].blocks.numbers.pop()
    with pytest.raises(BrokenInvariant):
        check(engine)
