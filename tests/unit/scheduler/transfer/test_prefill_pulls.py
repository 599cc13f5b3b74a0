"""When a prefill engine asks for prompts."""

from __future__ import annotations

from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.sequence import QueueKey, Sequence
from services.scheduler.core.transfer.prefill_pulls import PrefillPulls
from tests.support.engines.checking_worker import generate


def held(*tokens: int) -> list[Sequence]:
    return [
        Sequence(generate(f"r{number}", [1] * count), QueueKey(0, 0.0, number), 1000, frozenset(), 16)
        for number, count in enumerate(tokens)
    ]


def test_an_engine_wants_two_full_steps_and_says_so_again_while_it_does() -> None:
    pulls = PrefillPulls(EngineLimits(max_batch_tokens=100, max_running=8))
    assert pulls.due(held(), 0.0) == 200
    assert pulls.due(held(), 0.1) is None
    assert pulls.due(held(), 0.6) == 200, "the message may have been lost"
    assert pulls.due(held(90), 0.7) is None, "what it was given it does not ask for again"
    assert pulls.due(held(), 0.8) == 200, "a step's half is free again"


def test_a_full_engine_takes_its_pull_back_once() -> None:
    pulls = PrefillPulls(EngineLimits(max_batch_tokens=100, max_running=8))
    pulls.due(held(), 0.0)
    assert pulls.due(held(150, 90), 0.1) == 0
    assert pulls.due(held(150, 90), 9.0) is None
    assert pulls.due(held(150), 9.1) == 50
