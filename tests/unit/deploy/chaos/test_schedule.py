"""The schedule of faults: the same for a seed, every case once in each pass."""

from __future__ import annotations

from itertools import islice

from deploy.chaos.schedule import MAX_DELAY, Case, Strike, cases_of, strikes

CASES = cases_of({"kill": ["tokenizer", "rank 0", "rank 1"], "stop": ["tokenizer"]})


def first(count: int, seed: int) -> list[Strike]:
    return list(islice(strikes(CASES, seed), count))


def test_a_seed_is_a_schedule() -> None:
    assert first(40, 3) == first(40, 3)
    assert [strike.case for strike in first(40, 3)] != [strike.case for strike in first(40, 4)]


def test_each_pass_has_every_case_once_in_an_order_of_its_own() -> None:
    drawn = [strike.case for strike in first(40, 0)]
    passes = [drawn[at : at + len(CASES)] for at in range(0, 40, len(CASES))]
    assert all(sorted(each) == sorted(CASES) for each in passes)
    assert len({tuple(each) for each in passes}) > 1
    assert [strike.number for strike in first(40, 0)] == list(range(40))


def test_delays_and_victims_are_within_bounds() -> None:
    drawn = first(200, 1)
    assert all(0 <= strike.delay <= MAX_DELAY for strike in drawn)
    assert {strike.victim(["b", "a", "c"]) for strike in drawn} == {"a", "b", "c"}
    assert Strike(0, CASES[0], 0.0, 0.99).victim(["only"]) == "only"


def test_without_cases_there_is_no_round() -> None:
    assert list(strikes([], 0)) == []


def test_a_case_without_a_target_has_no_trailing_space() -> None:
    assert [str(Case("kill", "rank 0")), str(Case("scale", ""))] == ["kill rank 0", "scale"]
