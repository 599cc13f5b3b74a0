"""What is tried, as it is typed."""

from __future__ import annotations

import pytest

from deploy.tuning.space import PoolSizes, SearchSpace, SpaceError, default_space, parse_search, pools_at


def test_settings_and_their_values_are_read() -> None:
    found = parse_search(["max-batch-tokens=512, 1024", "scheduler.run_ahead=1,2,2"])
    assert found == {"max_batch_tokens": ("512", "1024"), "scheduler.run_ahead": ("1", "2", "2")}
    space = SearchSpace(found)
    assert space.size == 4, "a value that is given twice is one"
    assert {"max_batch_tokens": "1024", "scheduler.run_ahead": "1"} in space.combinations()


def test_a_json_object_is_one_value() -> None:
    few, more = (f'{{"method": "ngram", "num_speculative_tokens": {count}}}' for count in (2, 4))
    assert parse_search([f"speculative={few}, {more}"]) == {"speculative": (few, more)}


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


@pytest.mark.parametrize(
    ("ratio", "engines", "pools"),
    [
        ("mixed", 4, PoolSizes(4, 0, 0)),
        ("1:3", 4, PoolSizes(0, 1, 3)),
        ("1:3", 8, PoolSizes(0, 2, 6)),
        ("1:1", 5, PoolSizes(0, 2, 3)),
        ("9:1", 2, PoolSizes(0, 1, 1)),
    ],
)
def test_a_ratio_of_pools_divides_a_fixed_number_of_engines(ratio: str, engines: int, pools: PoolSizes) -> None:
    assert pools_at(ratio, engines) == pools


@pytest.mark.parametrize(
    ("ratio", "engines", "complaint"),
    [
        ("1:0", 4, "pd_ratio=1:0: mixed, or P:D as in 1:3, is expected"),
        ("half", 4, "pd_ratio=half: mixed, or P:D"),
        ("1:1", 1, "two pools need two engines, there is 1"),
    ],
)
def test_a_ratio_that_is_none_or_has_too_few_engines_is_refused(ratio: str, engines: int, complaint: str) -> None:
    with pytest.raises(SpaceError, match=complaint):
        pools_at(ratio, engines)
