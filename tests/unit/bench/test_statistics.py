"""The figures of a benchmark, against their definitions and numpy's."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from services.bench.client.load import arrivals
from services.bench.client.processor_time import (
    CpuReading,
    CpuShare,
    by_actor,
    cpu_shares,
    parse_pids,
    total,
)
from services.bench.interference_figures import Window, all_streaming_at, interference_figures, token_gaps
from services.bench.report import share_lines
from services.bench.serve import found_cached, serve_lines
from services.bench.statistics import (
    BenchResult,
    RequestOutcome,
    cache_figures,
    deviation,
    mean,
    meets,
    parse_goodput,
    percentile,
    samples,
    summary,
    turn_figures,
)


def outcome(start: float, *times: float, output: int | None = None, error: str | None = None) -> RequestOutcome:
    end = times[-1] if times else start
    return RequestOutcome(start, end, 10, len(times) if output is None else output, list(times), error)


def test_percentiles_and_deviations_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    values = [Random(1).expovariate(3) for _ in range(101)] + [7.0, 7.0]
    for percent in (0, 1, 25, 50, 90, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert mean(values) == pytest.approx(numpy.mean(values))
    assert deviation(values) == pytest.approx(numpy.std(values))


def test_nothing_measured_is_zero() -> None:
    assert percentile([], 99) == mean([]) == deviation([]) == 0.0


def test_time_per_output_token_leaves_the_first_token_out() -> None:
    """As vLLM's benchmark: (end-to-end - time to first token) / (tokens - 1), tokens as the server counts them."""
    one = outcome(10.0, 10.5, 10.7, 11.5)
    assert (one.ttft, one.latency) == (0.5, 1.5)
    assert one.tpot == 0.5
    assert outcome(10.0, 10.5, 11.5, output=5).tpot == 0.25
    assert outcome(10.0, 10.5).tpot is None
    assert one.itls == [pytest.approx(0.2), pytest.approx(0.8)]


def test_single_tokens_have_no_part_in_tpot() -> None:
    completed = [outcome(0, 1), outcome(0, 1, 2)]
    assert samples(completed, "tpot") == [1.0]
    assert samples(completed, "ttft") == [1.0, 1.0]
    assert samples(completed, "itl") == [1.0]
    assert samples(completed, "e2el") == [1.0, 2.0]


def test_goodput_counts_those_that_meet_every_objective() -> None:
    objectives = parse_goodput(["ttft:500", "tpot:50.5", "e2el:2000"])
    assert objectives == {"ttft": 0.5, "tpot": 0.0505, "e2el": 2.0}
    assert meets(outcome(0, 0.4, 0.45), objectives)
    assert not meets(outcome(0, 0.6, 0.65), objectives)
    assert not meets(outcome(0, 0.4, 0.5), objectives)
    assert meets(outcome(0, 0.4), objectives)
    run = BenchResult([outcome(0, 0.4, 0.45), outcome(0, 0.6, 0.65), outcome(0, error="x")], 2.0, 3, 0.1)
    assert summary(run, [99], objectives)["request_goodput"] == 0.5
    assert summary(run, [99], {})["request_goodput"] is None


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:0", "ttft:nan", "itl:5", ":5"])
def test_a_goodput_objective_that_means_nothing_is_refused_by_name(pair: str) -> None:
    with pytest.raises(ValueError, match="METRIC:MILLISECONDS"):
        parse_goodput([pair])


def test_the_summary_has_vllms_field_names_and_units() -> None:
    run = BenchResult([outcome(0, 1, 2, 3), outcome(1, 2, 4, 6), outcome(1, error="HTTP 503")], 4.0, 2, 0.004)
    result = summary(run, [50, 99.9], {})
    assert result["completed"] == 2
    assert result["failed"] == 1
    assert result["total_input_tokens"] == 20
    assert result["total_output_tokens"] == 6
    assert result["request_throughput"] == 0.5
    assert result["output_throughput"] == 1.5
    assert result["total_token_throughput"] == 6.5
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 2
    assert result["mean_ttft_ms"] == result["median_ttft_ms"] == 1000
    assert result["mean_tpot_ms"] == 1500
    assert result["p50_e2el_ms"] == 4000
    assert result["p99.9_itl_ms"] == pytest.approx(2000)
    assert result["std_tpot_ms"] == 500
    assert result["client_cpu_us_per_token"] == pytest.approx(0.004 / 6 * 1e6)


def test_a_run_in_which_everything_failed_has_figures_too() -> None:
    result = summary(BenchResult([outcome(0, error="x")], 0.0, 1, 0.0), [99], {"ttft": 1.0})
    assert result["completed"] == result["output_throughput"] == result["p99_itl_ms"] == 0
    assert "Failed requests:" in "\n".join(serve_lines(result, [99]))


def test_the_table_shows_each_metric_and_the_hungriest_process_first() -> None:
    result = summary(BenchResult([outcome(0, 1, 2)], 2.0, 1, 0.1), [90], {})
    before = {"a": CpuReading("x", 1.0, 7), "b": CpuReading("y", 1.0, 0), "gone": CpuReading("y", 0.0, 0)}
    after = {"a": CpuReading("x", 1.5, 57), "b": CpuReading("y", 3.0, 100), "new": CpuReading("y", 9.0, 0)}
    spent = cpu_shares(before, after, tokens=500, duration=2.0)
    assert spent == [CpuShare("b", "y", 2.0, 4000.0, 1.0, 200.0), CpuShare("a", "x", 0.5, 1000.0, 0.25, 100.0)]
    assert total(spent) == CpuShare("all", "all", 2.5, 5000.0, 1.25, 300.0)
    table = [*serve_lines({**result, "max_concurrency": 4}, [90]), *share_lines(spent)]
    lines = [line.replace("|", " ").split() for line in table]
    assert ["Mean", "TTFT", "(ms):", "1000.00"] in lines
    assert ["P90", "E2EL", "(ms):", "2000.00"] in lines
    assert ["Maximum", "request", "concurrency:", "4"] in lines
    assert lines.index(["y", "2.00", "4000.0", "1.00", "200.0"]) < lines.index(["x", "0.50", "1000.0", "0.25", "100.0"])


def test_processes_of_one_kind_are_added_up() -> None:
    parts = [CpuShare(f"gateway-{n}", "gateway", 1.0, 10.0, 0.5, 3.0) for n in (1, 2)]
    parts.insert(1, CpuShare("engine-1", "scheduler", 1.5, 15.0, 0.75, 1.0))
    assert by_actor(parts) == [
        CpuShare("gateway × 2", "gateway", 2.0, 20.0, 1.0, 6.0),
        parts[1]._replace(name="scheduler"),
    ]


def test_gaps_are_parted_by_when_long_prompts_came() -> None:
    """Two streams from second 100 on; long prompts from 103, the end at 106."""
    window = Window(100.0, 103.0, 106.0)
    one, other = outcome(100, 101, 102, 104, 105), outcome(100, 101.5, 102.5, 105.5, 107)
    gaps = token_gaps([one, other], window)
    assert sorted(gaps) == [(2.0, 1.0), (2.5, 1.0), (4.0, 2.0), (5.0, 1.0), (5.5, 3.0)]
    assert all_streaming_at([one, other]) == 101.5
    late = outcome(104, 105.5)
    figures = interference_figures([one, other, late], all_streaming_at([one, other]), window, [50.0])
    assert (figures["quiet"]["tokens_per_second"], figures["disturbed"]["tokens_per_second"]) == (2 / 1.5, 1.0)
    assert (figures["streams_begun_meanwhile"], figures["max_stream_ttft_ms"]) == (1, 1500)
    assert (figures["quiet"]["tokens"], figures["quiet"]["p50_itl_ms"]) == (2, 1000)
    assert (figures["disturbed"]["tokens"], figures["disturbed"]["p50_itl_ms"]) == (3, 2000)
    assert figures["disturbed"]["max_itl_ms"] == 3000
    assert figures["p99_itl_ratio"] == pytest.approx(2.98)
    assert figures["timeline"][0] == {"second": 2.0, "median_itl_ms": 1000, "max_itl_ms": 1000}


def told(prompt: int, cached: int | None, ttft: float, turn: int = 0) -> RequestOutcome:
    return RequestOutcome(0.0, ttft + 1, prompt, 2, [ttft, ttft + 1], cached_tokens=cached, turn=turn)


def test_a_hit_rate_is_cached_tokens_of_all_prompt_tokens() -> None:
    outcomes = [told(100, 80, 0.1), told(300, 0, 0.4), told(100, 49, 0.2), told(50, None, 9.0)]
    figures = cache_figures(outcomes, [99.0])
    assert (figures["total_cached_tokens"], figures["cache_hit_rate"]) == (129, 129 / 500)
    assert (figures["cached_requests"], figures["uncached_requests"]) == (1, 2)
    assert (figures["mean_cached_ttft_ms"], figures["mean_uncached_ttft_ms"]) == (100, pytest.approx(300))
    assert cache_figures([told(50, None, 9.0)], [99.0]) == {}
    assert cache_figures([told(50, 0, 1.0)], [99.0])["median_cached_ttft_ms"] is None


def test_turns_have_figures_of_their_own() -> None:
    outcomes = [told(40, 0, 0.4), told(100, 50, 0.1, turn=1), told(60, 0, 0.6), told(100, 70, 0.3, turn=1)]
    first, second = turn_figures(outcomes, [50.0])
    assert (first["turn"], first["completed"], first["mean_input_tokens"]) == (1, 2, 50)
    assert (first["cache_hit_rate"], second["cache_hit_rate"]) == (0.0, 0.6)
    assert (second["mean_ttft_ms"], second["p50_ttft_ms"]) == (pytest.approx(200), pytest.approx(200))


def test_the_table_tells_of_the_cache_where_the_server_does() -> None:
    outcomes = [told(100, 80, 0.1), told(100, 0, 0.4, turn=1)]
    result = summary(BenchResult(outcomes, 2.0, 1, 0.1), [90], {}) | cache_figures(outcomes, [90])
    table = serve_lines(result | {"turns": turn_figures(outcomes, [90])}, [90])
    lines = [line.replace("|", " ").split() for line in table]
    assert ["Cache", "hit", "rate", "(%", "of", "prompt", "tokens):", "40.00"] in lines
    assert ["1", "1", "100", "80.0", "100.0", "100.0"] in lines
    untold = serve_lines(summary(BenchResult([told(9, None, 1.0)], 2.0, 1, 0.1), [90], {}), [90])
    assert not any("Prefix cache" in line for line in untold)
    assert any("Prefix cache" in line for line in table)


def test_random_prompts_that_were_cached_are_named() -> None:
    assert found_cached([told(100, 49, 0.1), told(100, None, 0.1)]) is None
    warning = found_cached([told(100, 96, 0.1), told(100, 0, 0.4), told(100, 50, 0.2)])
    assert warning is not None
    assert "for 2 of 3 requests" in warning
    assert "--seed" in warning


def test_pids_are_named() -> None:
    assert parse_pids("engine-1=12, gateway=7") == {"engine-1": 12, "gateway": 7}
    assert parse_pids("") == {}
    for wrong in ("12", "=12", "a=b", "a=-1"):
        with pytest.raises(ValueError, match="NAME=PID"):
            parse_pids(wrong)


def test_an_infinite_rate_starts_everything_at_once() -> None:
    assert arrivals(3, float("inf"), 1.0, Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_mean_and_the_burstiness_asked_for(burstiness: float, variation: float) -> None:
    starts = arrivals(20_001, 50.0, burstiness, Random(3))
    gaps = [b - a for a, b in pairwise(starts)]
    assert starts[0] == 0.0
    assert mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert deviation(gaps) / mean(gaps) == pytest.approx(variation, rel=0.05)


def test_arrivals_repeat_for_a_seed() -> None:
    assert arrivals(50, 2.0, 1.0, Random(5)) == arrivals(50, 2.0, 1.0, Random(5))
