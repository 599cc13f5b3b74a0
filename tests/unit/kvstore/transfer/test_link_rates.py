"""What is measured of links: rates without the wait for the first block, the newest first, and none that is old."""

from __future__ import annotations

import pytest

from kvstore.transfer import link_rates
from kvstore.transfer.link_rates import LinkRate, LinkRates

A, B = "10.0.0.1:7700", "10.0.0.2:7700"
MEBIBYTE = 2**20


def measured(blocks: int = 10, seconds: float = 0.01, at: float = 1.0) -> LinkRates:
    rates = LinkRates()
    rates.record(A, MEBIBYTE, 0.5, at, first=True)
    for _ in range(blocks):
        rates.record(A, MEBIBYTE, seconds, at, first=False)
    return rates


def test_the_first_block_says_the_latency_and_the_others_the_rate() -> None:
    rate = measured().rate(A, 1.0)
    assert rate is not None
    assert rate.bytes_per_second == pytest.approx(100 * MEBIBYTE)
    assert rate.latency == pytest.approx(0.5)
    assert rate.seconds(200 * MEBIBYTE) == pytest.approx(2.5)


def test_one_block_says_nothing_of_a_rate_and_nothing_of_other_links() -> None:
    rates = measured(blocks=0)
    assert rates.rate(A, 1.0) is None
    assert measured().rate(B, 1.0) is None


def test_a_link_that_becomes_slow_is_soon_known_to_be() -> None:
    rates = measured(blocks=1000)
    for _ in range(100):
        rates.record(A, MEBIBYTE, 0.1, 2.0, first=False)
    rate = rates.rate(A, 2.0)
    assert rate is not None
    assert rate.bytes_per_second < 15 * MEBIBYTE


def test_a_link_that_was_not_used_for_long_is_unknown_and_begins_anew() -> None:
    rates, later = measured(), 1.0 + link_rates.MEMORY_SECONDS + 1
    assert rates.rate(A, later) is None
    rates.record(A, MEBIBYTE, 0.02, later, first=False)
    assert rates.rate(A, later) == LinkRate(MEBIBYTE / 0.02, 0.0)


def test_the_links_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rates, "MAX_LINKS", 1)
    rates = measured()
    rates.record(B, MEBIBYTE, 0.01, 1.0, first=False)
    assert rates.rate(A, 1.0) is None
    assert rates.rate(B, 1.0) is not None
