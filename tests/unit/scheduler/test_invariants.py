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


def test_a_reference_that_nobody_has_is_noticed() -> None:
    """To a block that is free, and to one of a table."""
    engine = started(EngineLimits(max_running=10, max_batch_tokens=64))
    engine.handle(generate("a", [4] * 20), 0.0)
    state = engine.epoch_state
    assert state is not None
    pool, held = state.memory.pool, engine.requests[RequestId("a")].blocks.numbers[0]
    for block, complaint in ((pool.blank[0], "that no table"), (held, f"block {held}: references differ")):
        pool.references[block] += 1
        with pytest.raises(BrokenInvariant, match=complaint):
            check(engine)
        pool.references[block] -= 1
    check(engine)
