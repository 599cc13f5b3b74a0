"""How long requests waited at the engines of each pool: histograms of those that count by the same bounds."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from services.gateway.console.document import pools_of
from shared.messages.lifecycle import LATENCY_BOUNDS, LatencySums, Lifecycle, Role
from tests.support.engines.coordinator_events import engine

BUCKETS = len(LATENCY_BOUNDS) + 1


def counts(bucket: int, number: int) -> tuple[int, ...]:
    return tuple(number if index == bucket else 0 for index in range(BUCKETS))


def life(name: str, role: Role, latency: LatencySums | None) -> Lifecycle:
    found = engine(name)
    assert found.engine is not None
    return replace(found, engine=replace(found.engine, role=role, latency=latency))


def pools(*lives: Lifecycle) -> dict[str, Any]:
    return {pool["role"]: pool for pool in pools_of(lives).values()}


def test_engines_of_a_pool_are_counted_together() -> None:
    one = LatencySums(1, 0.2, 3, 0.03, counts(7, 1), counts(3, 3))
    other = LatencySums(2, 3.0, 1, 0.1, counts(10, 2), counts(6, 1))
    found = pools(life("a", "decode", one), life("b", "decode", other), life("c", "prefill", one))
    assert found["decode"]["engines"] == 2
    assert found["decode"]["first"]["total"] == 3.2
    assert found["decode"]["first"]["counts"] == [a + b for a, b in zip(counts(7, 1), counts(10, 2), strict=True)]
    assert sum(found["decode"]["later"]["counts"]) == found["decode"]["later_tokens"] == 4
    assert found["prefill"]["first"]["counts"] == list(counts(7, 1))


def test_a_release_that_does_not_count_by_bounds_leaves_the_means() -> None:
    old = LatencySums(2, 3.0, 1, 0.1)
    found = pools(
        life("a", "decode", LatencySums(1, 0.2, 0, 0.0, counts(7, 1), counts(3, 0))), life("b", "decode", old)
    )
    assert (found["decode"]["first"], found["decode"]["first_tokens"]) == (None, 3)
