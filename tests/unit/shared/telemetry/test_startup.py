"""Stages of a start are measured one by one."""

from __future__ import annotations

import sys
import time

import pytest
from prometheus_client import REGISTRY

from shared.telemetry.startup import StartupStages, process_age


def test_a_stage_is_measured_and_can_be_read_as_a_metric() -> None:
    stages = StartupStages()
    began = time.perf_counter()
    with stages.stage("test_weights"):
        time.sleep(0.01)
    assert 0.01 <= stages.seconds["test_weights"] <= time.perf_counter() - began
    read = REGISTRY.get_sample_value("baton_startup_seconds", {"stage": "test_weights"})
    assert read == pytest.approx(stages.seconds["test_weights"], abs=1e-3)


def test_a_stage_that_fails_is_none() -> None:
    stages = StartupStages()
    with pytest.raises(LookupError), stages.stage("test_failing"):
        raise LookupError
    assert stages.seconds == {}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own record of a process's start")
def test_the_total_counts_from_the_start_of_the_process() -> None:
    stages = StartupStages()
    before = process_age()
    stages.finish()
    assert before is not None
    assert round(before, 4) <= stages.seconds["total"]
    assert stages.seconds["processor"] > 0
