"""A queue is served in the order of its keys."""

from __future__ import annotations

import pytest

from services.scheduler.core.queue.sequence_queues import RequestQueue
from services.scheduler.core.sequence import QueueKey, Sequence
from tests.support.engines.checking_worker import generate


def sequence(name: str, ticket: int, priority: int = 0, arrival: float = 0.0) -> Sequence:
    return Sequence(generate(name, [4]), QueueKey(priority, arrival, ticket), 10, frozenset(), 16)


def test_a_queue_is_served_in_the_order_of_its_keys() -> None:
    queue = RequestQueue()
    late, urgent, early = sequence("late", 1, 0, 9.0), sequence("urgent", 2, -1, 9.0), sequence("early", 3)
    for member in (late, urgent, early):
        queue.add(member)
    assert queue == [urgent, early, late]
    assert (queue.first, queue.last) == (urgent, late)
    queue.remove(early)
    with pytest.raises(ValueError, match="early is not in this queue"):
        queue.remove(early)
    assert len(queue) == 2
