"""What is tried, as it is typed."""

from __future__ import annotations

import pytest

from deploy.tuning.space import SearchSpace, SpaceError, default_space, parse_search


def test_settings_and_their_values_are_read() -> None:
    found = parse_search(["max-batch-tokens=512, 1024", "scheduler.run_ahead=1,2,2"])
    assert found == {"max_batch_tokens": ("512", "1024"), "scheduler.run_ahead": ("1", "2", "2")}
    space = SearchSpace(found)
    assert space.size == 4, "a value that is given twice is one"
    assert {"max_batch_tokens": "1024", "scheduler.run_ahead": "1"} in space.combinations()


@pytest.mark.parametrize("text", ["max_num_seqs", "max_num_seqs=", "=1,2", "max_num_seqs=,"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(SpaceError, match="SETTING=VALUE,VALUE is expected"):
        parse_search([text])


def test_a_setting_is_given_once() -> None:
    with pytest.raises(SpaceError, match="tp: given twice"):
        parse_search(["tp=1", "tp=2"])


def test_tensor_parallel_sizes_are_tried_where_there_are_devices_for_them() -> None:
    assert "tp" not in default_space(1)
    assert default_space(6)["tp"] == ("1", "2")
