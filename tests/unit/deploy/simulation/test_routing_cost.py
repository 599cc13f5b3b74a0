"""`baton bench routing`: what it does is what it says, at a size for a test; its figures are none."""

from __future__ import annotations

import json

import pytest

from deploy.simulation.routing_cost import main

SMALL = ("--blocks", "64", "--prompt-blocks", "16", "--requests", "20", "--holders", "2")


def test_every_placement_report_and_event_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--engines", "2", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["blocks"], found["holders"]) == (64, 2)
    assert [run["engines"] for run in found["runs"]] == [2, 5]
    assert [run["blocks"] for run in found["runs"]] == [64, 160], "each engine holds as many, and each block is at two"
    for run in found["runs"]:
        assert 0 < run["placement_p50_us"] <= run["placement_p99_us"]
        assert run["reports_per_s"] > 0
        assert run["events_per_s"] > 0


def test_its_table_has_a_row_for_each_size_of_the_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--engines", "3", "--policy", "least-loaded"])
    out = capsys.readouterr().out
    assert "Routing Benchmark Result" in out
    assert "| 3 " in out


def test_more_holders_than_engines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--engines", "2", "--holders", "3"])
    assert ended.value.code == 2
    assert "--holders 3: there are only 2 engines" in capsys.readouterr().err
