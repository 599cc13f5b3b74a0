"""Lost, repeated and outdated messages of a numbered stream are told apart."""

from __future__ import annotations

from shared.ids import Incarnation
from shared.reliability.sequence_numbers import Arrival, SourceNumbers

A, B = Incarnation(1), Incarnation(2)


def arrivals(*messages: tuple[Incarnation, int]) -> list[Arrival]:
    numbers: SourceNumbers[str] = SourceNumbers()
    return [numbers.record("source", epoch, number) for epoch, number in messages]


def test_numbers_follow_one_another_and_a_gap_is_found() -> None:
    assert arrivals((A, 0), (A, 1), (A, 3), (A, 4), (A, 2)) == ["first", "next", "gap", "next", "repeated"]


def test_who_comes_late_to_a_stream_has_joined_it() -> None:
    assert arrivals((A, 5), (A, 6)) == ["joined", "next"]
    assert arrivals((A, 0), (B, 2), (B, 3)) == ["first", "joined", "next"]


def test_the_epoch_before_is_over() -> None:
    assert arrivals((A, 0), (B, 0), (A, 1), (B, 1)) == ["first", "new epoch", "old epoch", "next"]


def test_each_source_has_numbers_of_its_own() -> None:
    numbers: SourceNumbers[str] = SourceNumbers()
    numbers.record("x", A, 0)
    assert numbers.record("y", A, 0) == "first"
    assert numbers.record("x", A, 1) == "next"
    numbers.forget("x")
    assert numbers.record("x", A, 2) == "joined"
    assert numbers.record("y", A, 1) == "next"
