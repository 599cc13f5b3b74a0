"""`baton simulate`: its report, its comparison, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.app import loaded
from deploy.errors import CommandError

LOAD = ("--duration", "4", "--request-rate", "5", "--output-len", "12", "--num-prefixes", "2", "--engines", "2")


def simulated(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    loaded("simulate").main(list(argv), standalone_mode=False)
    return capsys.readouterr().out


def test_its_report_is_that_of_the_serving_benchmark_and_the_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    out = simulated(capsys, *LOAD, "--goodput", "ttft:1000", "--by-engine")
    for title in ("Successful requests:", "P99 TTFT (ms):", "Cache hit rate", "GPU-hours:", "SLO attainment, all (%):"):
        assert title in out
    assert "| engine-2 |" in out


def test_json_has_the_settings_and_is_the_same_each_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def figures() -> dict[str, Any]:
        result = json.loads(simulated(capsys, *LOAD, "--json", "--output-json", str(tmp_path / "result.json")))
        assert json.loads((tmp_path / "result.json").read_text()) == result
        return {key: value for key, value in result.items() if key not in ("date", "machine")}

    first = figures()
    assert first == figures()
    assert first["failed"] == 0
    assert first["model_id"] == "llama-3.1-8b"
    assert first["router_policy"] == "kv"
    assert [each["engine"] for each in first["by_engine"]] == ["engine-1", "engine-2"]


def test_pools_are_simulated_with_a_store_to_hand_over_by(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--duration", "4", "--request-rate", "3", "--output-len", "12", "--input-len", "900")
    result = json.loads(simulated(capsys, *load, "--prefill", "1", "--decode", "2", "--json"))
    assert result["failed"] == 0
    assert result["pools"] == {"mixed": 0, "prefill": 1, "decode": 2}
    assert result["kvstore_memory"] == 64 * 2**30
    assert [each["steps"] > 0 for each in result["by_engine"]] == [True, True, True]
    pulled = json.loads(simulated(capsys, *load, "--prefill", "1", "--decode", "2", "--prefill-queue", "--json"))
    assert (pulled["failed"], pulled["completed"]) == (0, result["completed"])


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--slow-engines", "5:0.5"), "0 to 4 engines"),
        (("--slow-engines", "1:0"), "0.01 to 100"),
        (("--slow-engines", "two"), "COUNT:SPEED"),
        (("--prefill", "1"), "--decode N"),
        (("--pd-order", "decode-first"), "needs pools"),
        (("--prefill-queue",), "--prefill N"),
        (("--prefill", "1", "--decode", "1", "--prefill-queue", "--pd-order", "decode-first"), "prefill-first"),
        (("--prefill", "1", "--decode", "1", "--kvstore-memory", "0"), "hand over through a KV store"),
        (("--kvstore-memory", "4GiB", "--processes", "2"), "--processes"),
    ],
)
def test_what_does_not_go_with_a_store_is_refused(argv: tuple[str, ...], named: str) -> None:
    with pytest.raises(CommandError, match=named):
        loaded("simulate").main(list(argv), standalone_mode=False)


def test_policies_are_compared_row_by_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulated(capsys, *LOAD, "--compare", "kv,round-robin").splitlines()
    assert [row.split()[1] for row in rows[2:]] == ["kv", "round-robin"]


def test_a_static_fleet_and_one_that_follows_the_load_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    scaled = ("--scale-interval", "1", "--start-s", "0.5", "--scale-down-s", "0", "--target-requests", "1")
    out = simulated(capsys, *LOAD, *scaled, "--max-engines", "3", "--compare", "static,queue-length", "--json")
    runs = json.loads(out)["runs"]
    assert runs["static"]["engines"] == runs["static"]["peak_engines"] == 2
    assert runs["queue-length"]["mean_engines"] != 2
    assert runs["queue-length"]["peak_engines"] <= 3


def test_a_planner_is_compared_with_the_other_scalings(capsys: pytest.CaptureFixture[str]) -> None:
    targets = ("--goodput", "ttft:500", "--goodput", "tpot:20")
    out = simulated(capsys, *LOAD, *targets, "--scale-interval", "1", "--compare", "static,planner,planner-seasonal")
    assert [row.split()[1] for row in out.splitlines()[2:]] == ["static", "planner", "planner-seasonal"]


def test_a_load_without_a_period_of_its_own_has_the_usual_season(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--concurrency", "2", "--num-prompts", "6", "--input-len", "40", "--engines", "2")
    planned = ("--scaling", "planner-seasonal", "--goodput", "tpot:20")
    assert "Successful requests:" in simulated(capsys, *load, *planned)


def test_settings_of_the_services_have_their_effect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "slow.toml"
    config.write_text("[worker]\nsim_step_ms = 40\n")
    slow = json.loads(simulated(capsys, *LOAD, "--json", "--config", str(config)))
    fast = json.loads(simulated(capsys, *LOAD, "--json", "--set", "worker.sim_step_ms=10"))
    assert slow["median_itl_ms"] == pytest.approx(40, rel=0.01)
    assert fast["median_itl_ms"] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--set", "gateway.port=1"), "only coordinator, scheduler, worker are simulated"),
        (("--set", "worker.nonsense=1"), "nonsense"),
        (("--hops", "way=1"), "--hops: 'way' is no hop"),
        (("--compare", "kv,best"), "--compare best"),
        (("--goodput", "ttft"), "--goodput"),
        (("--trace", "nowhere"), "--trace nowhere: "),
        (("--trace", "nowhere", "--concurrency", "2"), "one load is expected"),
        (("--swing", "0.5", "--concurrency", "2"), "--swing: has no effect with --concurrency"),
        (("--request-rate", "0"), "--request-rate 0.0: "),
        (("--min-engines", "9", "--max-engines", "2"), "--max-engines 2"),
        (("--engines", "0"), "--engines 0"),
        (("--scaling", "planner"), "--scaling planner: needs its targets"),
        (
            ("--scaling", "planner-seasonal", "--goodput", "ttft:9", "--season-s", "60"),
            "--season-s 60: season = 4 intervals: at least 10 are needed",
        ),
        (("--model", "no-such-shape"), "no-such-shape"),
    ],
)
def test_bad_input_is_explained_in_one_line(argv: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(CommandError) as failed:
        loaded("simulate").main([*argv], standalone_mode=False)
    assert complaint in str(failed.value)
    assert "\n" not in str(failed.value)
