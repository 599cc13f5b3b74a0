"""Generated loads: the rates, patterns, lengths and shared beginnings that they promise."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from deploy.simulation.hops import HopDelays, parse_hops
from deploy.simulation.prompts import PromptSegment, block_names
from deploy.simulation.workloads import ConcurrentLoad, GeneratedLoad
from shared.blocks import HASH_BYTES, split_hashes


def variation(load: GeneratedLoad) -> float:
    """Deviation of the gaps between requests over their mean: 1 for a Poisson process."""
    gaps = [later.at - earlier.at for earlier, later in pairwise(load.requests())]
    return pstdev(gaps) / fmean(gaps)


def test_steady_arrivals_are_a_poisson_process_of_their_rate() -> None:
    load = GeneratedLoad(rate=20, seconds=500)
    requests = list(load.requests())
    assert len(requests) == pytest.approx(10_000, rel=0.05)
    assert all(0 <= request.at < 500 for request in requests)
    assert variation(load) == pytest.approx(1.0, rel=0.05)


def test_bursty_arrivals_have_the_rate_and_vary_more() -> None:
    load = GeneratedLoad(rate=20, seconds=500, arrivals="bursty", burstiness=0.25)
    assert len(list(load.requests())) == pytest.approx(10_000, rel=0.1)
    assert variation(load) == pytest.approx(2.0, rel=0.1)


def test_diurnal_arrivals_are_a_wave_that_begins_at_its_lowest() -> None:
    load = GeneratedLoad(rate=50, seconds=400, arrivals="diurnal", period=400, swing=0.8)
    times = [request.at for request in load.requests()]
    at_night = sum(time < 20 or time >= 380 for time in times) / 40
    by_day = sum(180 <= time < 220 for time in times) / 40
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert at_night == pytest.approx(50 * 0.2, rel=0.15)
    assert by_day == pytest.approx(50 * 1.8, rel=0.05)


def test_the_same_seed_is_the_same_load_and_another_is_not() -> None:
    first, again, other = (list(GeneratedLoad(rate=5, seconds=20, seed=seed).requests()) for seed in (1, 1, 2))
    assert first == again != other


def test_lengths_vary_as_far_as_they_may() -> None:
    requests = list(GeneratedLoad(rate=50, seconds=100, input_len=100, output_len=10, range_ratio=0.5).requests())
    assert {min(r.prompt_tokens for r in requests), max(r.prompt_tokens for r in requests)} == {50, 150}
    assert {min(r.output_tokens for r in requests), max(r.output_tokens for r in requests)} == {5, 15}


def test_outputs_of_concurrent_clients_are_normal_between_20_and_500_tokens() -> None:
    lengths = [request.output_tokens for request in ConcurrentLoad(concurrency=64, count=5000).requests()]
    assert min(lengths) >= 20
    assert max(lengths) <= 500
    assert fmean(lengths) == pytest.approx(260, rel=0.02)
    assert pstdev(lengths) == pytest.approx(80, rel=0.05)


def test_blocks_have_equal_names_as_far_as_prompts_begin_alike() -> None:
    shared = PromptSegment(1, 40)
    one, two = (list(split_hashes(block_names((shared, PromptSegment(name, 30)), 16))) for name in (2, 3))
    assert len(one) == len(two) == 70 // 16
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])
    assert len({name[: HASH_BYTES // 2] for name in (*one, *two)}) == 6


def test_hops_are_typed_in_milliseconds() -> None:
    assert parse_hops("request=3, place=0.25") == HopDelays(request=0.003, place=0.00025)
    assert parse_hops("") == HopDelays()


@pytest.mark.parametrize(
    ("typed", "complaint"), [("way=1", "known are request, place"), ("plan=x", "milliseconds"), ("plan=0", "> 0")]
)
def test_a_bad_hop_is_explained(typed: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_hops(typed)


@pytest.mark.parametrize(("prefixes", "others"), [(5, {1, 2, 3, 4}), (1, {None})])
def test_a_hot_beginning_has_its_share_and_the_others_the_rest(prefixes: int, others: set[int | None]) -> None:
    load = GeneratedLoad(rate=50, seconds=100, prefixes=prefixes, prefix_len=32, popularity=0, hot_share=0.8)
    names = [request.segments[0].name if len(request.segments) > 1 else None for request in load.requests()]
    assert names.count(0) / len(names) == pytest.approx(0.8, abs=0.02)
    assert set(names) - {0} == others
    counts = [names.count(each) for each in others]
    assert max(counts) < 1.3 * min(counts)
