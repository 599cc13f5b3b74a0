"""Which host gets or loses engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.host_spread import Host, spread

HOSTS = st.dictionaries(st.sampled_from([None, "b", "c", "d"]), st.integers(0, 6), min_size=1)


@pytest.mark.parametrize(
    ("present", "target", "most", "keep", "wanted"),
    [
        ({None: 1}, 3, None, 1, {None: 3}),
        ({None: 1, "b": 1}, 3, None, 1, {None: 2, "b": 1}),
        ({None: 2, "b": 0}, 4, None, 1, {None: 2, "b": 2}),
        ({None: 2, "b": 0}, 4, 2, 1, {None: 2, "b": 2}),
        ({None: 2, "b": 1}, 9, 2, 1, {None: 2, "b": 2}),
        ({None: 1, "b": 2}, 1, None, 1, {None: 1, "b": 0}),
        ({None: 2, "b": 2}, 3, None, 1, {None: 2, "b": 1}),
        ({None: 1, "b": 1}, 0, None, 0, {None: 0, "b": 0}),
    ],
)
def test_engines_come_where_few_are_and_go_where_many_are(
    present: dict[Host, int], target: int, most: int | None, keep: int, wanted: dict[Host, int]
) -> None:
    assert spread(present, target, most=most, keep=keep) == wanted


@given(present=HOSTS, target=st.integers(1, 20), most=st.none() | st.integers(1, 6))
def test_no_host_gets_some_while_another_loses_some(present: dict[Host, int], target: int, most: int | None) -> None:
    wanted = spread(present, target, most=most, keep=1)
    changes = [wanted[host] - present[host] for host in present]
    assert wanted.keys() == present.keys()
    assert all(change >= 0 for change in changes) or all(change <= 0 for change in changes)
    if sum(wanted.values()) != target:
        assert most is not None
        assert all(count >= most for count in wanted.values())
    assert all(count <= max(most or count, present[host]) for host, count in wanted.items())
