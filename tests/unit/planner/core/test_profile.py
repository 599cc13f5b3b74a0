"""Measured tables, and what is read between and behind their places."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.engines.planner_profiles import PROFILE


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
