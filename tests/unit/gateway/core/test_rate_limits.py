"""Limits of keys: what one gateway admits, what several do together, and by how much that can be too much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.api_keys import ApiKey, KeyName
from services.gateway.core.rate_limits import PEER_SILENCE, LimitExceeded, RateLimits, TokenBucket
from shared.ids import GatewayId, Incarnation

KEY = ApiKey(name=KeyName("alice"), requests_per_minute=6, tokens_per_minute=600, concurrent_requests=3)
RATED = ApiKey(name=KeyName("bob"), requests_per_minute=6)


def gateway(name: str = "a", incarnation: int = 1) -> RateLimits:
    return RateLimits(GatewayId(name), Incarnation(incarnation))


def exchange(now: float, *gateways: RateLimits, everything: bool = False) -> None:
    for sender in gateways:
        report = sender.report(now, everything=everything)
        for receiver in gateways:
            receiver.record_report(report, now)


def test_a_bucket_holds_a_minutes_worth_and_fills_evenly() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(60, 0.0)
    assert (bucket.level(0.0), bucket.level(1.5), bucket.level(1000.0)) == (0.0, 1.5, 60.0)
    assert bucket.seconds_until(2, 1.5) == 0.5
    bucket.take(70, 60.0)
    assert bucket.seconds_until(1, 60.0) == 11.0
    bucket.resize(120, 60.0)
    assert bucket.level(60.0) == 50.0


def test_concurrent_requests_end_where_the_limit_is() -> None:
    limits = gateway()
    assert [limits.start(KEY, 0.0) for _ in range(3)] == [None] * 3
    assert limits.start(KEY, 0.0) == LimitExceeded("concurrent requests", 3, 1.0)
    limits.finish(KEY, 0, 0, 0.0)
    assert limits.start(KEY, 0.0) is None


def test_a_refused_request_costs_nothing() -> None:
    limits = gateway()
    for _ in range(6):
        assert limits.start(RATED, 0.0) is None
        limits.finish(RATED, 0, 0, 0.0)
    for second in range(1, 10):
        refused = limits.start(RATED, float(second))
        assert isinstance(refused, LimitExceeded)
        assert refused.retry_after == pytest.approx(10.0 - second)
    assert limits.start(RATED, 10.0) is None


def test_tokens_are_set_aside_and_settled() -> None:
    limits = gateway()
    limits.start(KEY, 0.0)
    assert limits.reserve(KEY, 500, 0.0) == 500
    limits.start(KEY, 0.0)
    assert limits.reserve(KEY, 200, 0.0) == LimitExceeded("tokens per minute", 600, 10.0)
    limits.finish(KEY, 0, 0, 0.0)
    limits.finish(KEY, 500, 20, 0.0)
    state = limits.state(KEY, 0.0)
    assert (state.open, state.requests and state.requests.remaining) == (0, 4)
    assert state.tokens
    assert (state.tokens.limit, state.tokens.remaining, round(state.tokens.reset, 6)) == (600, 580, 2.0)


def test_a_request_larger_than_a_minutes_worth_waits_for_a_full_bucket_and_no_longer() -> None:
    limits = gateway()
    limits.start(KEY, 0.0)
    assert limits.reserve(KEY, 10**9, 0.0) == 600
    limits.finish(KEY, 600, 900, 0.0)  # 300 more than were there
    refused = limits.reserve(KEY, 10**9, 60.0)
    assert isinstance(refused, LimitExceeded)
    assert refused.retry_after == 30.0
    assert limits.reserve(KEY, 10**9, 90.0) == 600


def test_limits_hold_across_gateways() -> None:
    a, b = gateway("a"), gateway("b")
    exchange(0.0, a, b)
    for turn in range(6):
        taker = (a, b)[turn % 2]
        assert taker.start(RATED, 0.0) is None
        exchange(0.0, a, b)
    assert isinstance(a.start(RATED, 0.0), LimitExceeded)
    assert isinstance(b.start(RATED, 0.0), LimitExceeded)
    assert a.state(RATED, 0.0).open == b.state(RATED, 0.0).open == 6
    assert b.start(RATED, 10.0) is None


def test_open_requests_elsewhere_count_until_their_gateway_falls_silent() -> None:
    a, b = gateway("a"), gateway("b")
    exchange(0.0, a, b)
    for _ in range(3):
        a.start(KEY, 0.0)
    exchange(0.0, a, b)
    assert b.start(KEY, 1.0) == LimitExceeded("concurrent requests", 3, 1.0)
    b.expire(PEER_SILENCE)
    assert b.start(KEY, 1.0) == LimitExceeded("concurrent requests", 3, 1.0)
    b.expire(PEER_SILENCE + 0.1)
    assert b.start(KEY, PEER_SILENCE + 0.1) is None


def test_a_new_gateway_begins_with_what_the_others_have_left() -> None:
    a = gateway("a")
    for _ in range(6):
        a.start(RATED, 0.0)
        a.finish(RATED, 0, 0, 0.0)
    a.report(0.0)
    late = gateway("b")
    late.record_report(a.report(5.0, everything=True), 5.0)
    assert late.start(RATED, 5.0) == LimitExceeded("requests per minute", 6, 5.0)
    again = gateway("b", 2)  # one that knew the key before it heard of the others
    assert again.start(RATED, 5.0) is None
    again.record_report(a.report(5.0, everything=True), 5.0)
    assert isinstance(again.start(RATED, 5.0), LimitExceeded)


def test_a_lost_report_is_made_good_by_the_next_one() -> None:
    a, b = gateway("a"), gateway("b")
    exchange(0.0, a, b)
    b.state(KEY, 0.0)
    for _ in range(3):
        a.start(KEY, 0.0)
    a.report(0.0)  # lost
    exchange(1.0, a, b, everything=True)
    assert b.start(KEY, 1.0) == LimitExceeded("concurrent requests", 3, 1.0)
    state = b.state(KEY, 1.0)
    assert (state.open, state.requests and state.requests.remaining) == (3, 3)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 20), st.booleans()), max_size=200),
    st.integers(1, 30),
)
def test_what_gateways_admit_too_much_never_adds_up(steps: list[tuple[int, float, bool]], limit: int) -> None:
    """Over any run: the limit, a bucket for the start, and a bucket for each further gateway, however late reports
    are."""
    key = ApiKey(name=KeyName("k"), requests_per_minute=limit)
    gateways = [gateway(name) for name in "abc"]
    exchange(0.0, *gateways)
    now, admitted = 0.0, 0
    for chosen, pause, reports in steps:
        now += pause
        admitted += gateways[chosen].start(key, now) is None
        if reports:
            exchange(now, *gateways)
        assert admitted <= limit * (now / 60 + 1) + 2 * limit + 1e-6
    exchange(now, *gateways)
    exchange(now, *gateways)
    levels = {round(each.state(key, now).open) for each in gateways}
    assert levels == {admitted}
