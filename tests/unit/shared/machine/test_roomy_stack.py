"""What is called with room maps no memory anew for each call, however deep it is."""

from __future__ import annotations

import resource
from collections.abc import Callable
from threading import Thread

from shared.machine.roomy_stack import call_with_room

CALLS = 300
DEPTHS = range(1, 300)
"""More frames than a chunk of Python's own size has room for."""


def wide() -> list[int]:
    a = b = c = d = e = f = g = h = i = j = k = m = n = o = p = q = 0
    return [a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q]


def pages_taken(depth: int) -> int:
    """By calls from so many frames below."""
    if depth:
        return pages_taken(depth - 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        wide()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def look(found: list[int]) -> None:
    found.extend(map(pages_taken, DEPTHS))


def in_a_thread(call: Callable[[], None]) -> None:
    """Which has chunks of its own: those of this thread may have room."""
    thread = Thread(target=call)
    thread.start()
    thread.join()


def test_no_call_takes_a_page_of_its_own() -> None:
    found: list[int] = []
    in_a_thread(lambda: call_with_room(lambda: look(found)))
    assert len(found) == len(DEPTHS)
    assert max(found) < CALLS


def test_else_there_is_a_depth_where_each_call_takes_one() -> None:
    """Where this fails, Python has mended it, and the module may go."""
    found: list[int] = []
    in_a_thread(lambda: look(found))
    assert max(found) >= CALLS
