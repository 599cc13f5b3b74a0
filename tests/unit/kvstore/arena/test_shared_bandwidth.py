"""The file by which the processes of a host share their bandwidth for copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.arena.shared_bandwidth import FILE, BandwidthShare, SharedBandwidth
from kvstore.core.copy_budget import MIN_BURST
from tests.support.kv.arenas import new_directory, remove

RATE = 2**20
"""So low that the time that passes within a test is worth few bytes."""


@pytest.fixture
def directory() -> Iterator[Path]:
    made = new_directory()
    yield made
    remove(made)


def test_what_one_takes_the_others_wait_for(directory: Path) -> None:
    store = SharedBandwidth.publish(directory, RATE)
    one, other = BandwidthShare(directory), SharedBandwidth(directory / FILE)
    assert one.take(MIN_BURST) == 0.0
    waits = [store.take(RATE), other.take(RATE), one.take(RATE)]
    assert waits == pytest.approx([1.0, 2.0, 3.0], abs=0.9)
    assert waits == sorted(waits)


def test_without_a_limit_or_a_store_nothing_waits(directory: Path) -> None:
    share = BandwidthShare(directory)
    assert share.take(2**40) == 0.0
    SharedBandwidth.publish(directory, 0)
    assert share.take(2**40) == 0.0


def test_a_store_that_starts_anew_changes_the_rate_for_all(directory: Path) -> None:
    share = BandwidthShare(directory)
    SharedBandwidth.publish(directory, 0)
    assert share.take(2**40) == 0.0
    SharedBandwidth.publish(directory, RATE)
    share.take(MIN_BURST)
    assert share.take(4 * RATE) > 3.0
    SharedBandwidth.publish(directory, 0)
    assert share.take(2**40) == 0.0


def test_half_a_file_limits_nothing(directory: Path) -> None:
    (directory / FILE).write_bytes(b"x")
    assert BandwidthShare(directory).take(2**40) == 0.0
    assert SharedBandwidth.publish(directory, RATE).take(MIN_BURST) == 0.0


def test_every_process_has_the_same_clock(directory: Path) -> None:
    """That of the system, as one process writes what another one reads."""
    shared = SharedBandwidth.publish(directory, RATE)
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    shared.take(RATE)
    full_at = memoryview((directory / FILE).read_bytes()).cast("d")[1]
    assert before + 1.0 <= full_at <= time.clock_gettime(time.CLOCK_MONOTONIC) + 1.0
