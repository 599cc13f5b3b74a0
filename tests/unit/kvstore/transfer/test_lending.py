"""How blocks that are lent are put together to be sent."""

from __future__ import annotations

import pytest

from kvstore.transfer.lending import groups
from tests.support.kv.random_blocks import SHAPE, chain

SIZE = SHAPE.payload_bytes


@pytest.mark.parametrize(
    ("blocks", "size", "lengths"),
    [(0, SIZE, []), (3, 0, [1, 1, 1]), (5, 2 * SIZE, [2, 2, 1]), (4, 2 * SIZE - 1, [1, 1, 1, 1]), (3, 9 * SIZE, [3])],
)
def test_groups_are_as_large_as_allowed_and_of_one_block_at_least(blocks: int, size: int, lengths: list[int]) -> None:
    run = chain(blocks)
    made = list(groups(run, size))
    assert [len(group) for group in made] == lengths
    assert [block for group in made for block in group] == run
