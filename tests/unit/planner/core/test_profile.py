"""Measured tables, and what is read between and behind their places."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from services.planner.core.profile import REACH, EngineProfile, ProfileMismatch, measured_profile
from shared.ids import EngineId
from shared.messages.lifecycle import WorkerReport
from tests.support.engines.coordinator_events import card
from tests.support.engines.planner_profiles import PROFILE, PROFILE_FILE, report

WORKER = WorkerReport(
    engine=EngineId("engine-1"), rank=0, world_size=2, model=card(), num_blocks=100, device="sim", max_batch_tokens=2048
)
ENGINE = replace(report(0), model=replace(card(), name="m"), max_running=16, blocks_total=1000)


def measured(**worker: Any) -> EngineProfile:
    return measured_profile(PROFILE_FILE, ENGINE, replace(WORKER, **worker))


def test_between_two_places_it_is_linear() -> None:
    assert PROFILE.prefill(520) == pytest.approx(0.02)
    assert PROFILE.itl(1, 2112) == pytest.approx(0.0055)
    assert PROFILE.itl(32.5, 2112) == pytest.approx((0.0055 + 0.014) / 2)


def test_before_the_first_place_nothing_changes_and_behind_the_last_it_goes_on() -> None:
    assert PROFILE.prefill(1) == 0.005
    assert PROFILE.prefill(4096 + 1024) == pytest.approx(0.155)
    assert PROFILE.itl(0, 0) == PROFILE.step_seconds == 0.005
    assert PROFILE.itl(127, 128) == pytest.approx(0.011)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt_lengths": (16, 16, 4096)}, "prompt_lengths"),
        ({"prompt_lengths": (16,)}, "prompt_lengths"),
        ({"prefill_seconds": (0.1, 0.2)}, "3 values are needed"),
        ({"itl_seconds": ((0.1, 0.2),)}, "2 rows of 2"),
        ({"itl_seconds": ((0.1, -0.2), (0.1, 0.1))}, "must not be negative"),
        ({"kv_tokens": 0}, "kv_tokens"),
    ],
)
def test_tables_that_cannot_be_read_between_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(PROFILE, **fields)


def test_a_measured_profile_has_the_files_tables_and_the_running_engines_room() -> None:
    profile = measured()
    assert (profile.gpus, profile.max_num_seqs, profile.max_batch_tokens, profile.kv_tokens) == (2, 16, 2048, 16000)
    assert profile.prefill(1024) == pytest.approx(0.035)
    assert profile.itl(1, 1088) == pytest.approx(0.0055)
    assert profile.source == "measured"


def test_more_work_is_never_quicker_whatever_a_measurement_says() -> None:
    profile = measured()
    assert profile.prefill(128) == profile.prefill(16) == 0.006
    assert profile.itl(8, 128) == profile.itl(1, 128) == 0.005
    rows = profile.itl_seconds
    assert all(list(row) == sorted(row) for row in (*rows, *zip(*rows, strict=True), profile.prefill_seconds))


def test_what_did_not_fit_is_continued_by_the_slope_of_the_smaller_batch() -> None:
    profile = measured()
    assert profile.itl(8, 4096) == pytest.approx(0.016 + 8 * 0.002)
    assert profile.itl(64, 2048) == pytest.approx(0.02 + 8 * (0.016 - 0.005))


def test_lengths_beyond_the_reach_are_named_and_batches_beyond_it_do_not_happen() -> None:
    profile = measured()
    assert profile.unknown(4096 * REACH, 4096 * REACH) == ""
    assert profile.unknown(7000, 9) == "prompts of 7,000 tokens: measured up to 4,096, continued up to 6,144"
    assert profile.unknown(9, 7000).startswith("contexts of 7,000 tokens")
    assert PROFILE.unknown(1e9, 1e9) == ""
    assert profile.most_sequences == 16
    assert replace(profile, max_num_seqs=1000).most_sequences == 64 * REACH


@pytest.mark.parametrize(
    ("worker", "complaint"),
    [
        ({"device": "cuda"}, "device: sim was profiled, cuda runs"),
        ({"world_size": 1}, "devices of an engine: 2 was profiled, 1 runs"),
        ({"max_batch_tokens": 512}, "tokens of a step: 2048 was profiled, 512 runs"),
    ],
)
def test_a_profile_of_other_engines_is_refused(worker: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProfileMismatch, match=complaint):
        measured(**worker)
    with pytest.raises(ProfileMismatch, match="model: m was profiled, "):
        measured_profile(PROFILE_FILE, report(0), WORKER)
