"""Which batch sizes are captured, and which of them a batch is padded to. Pure."""

from __future__ import annotations

from bisect import bisect_left

MOST_ROWS = 512
"""Beyond that a step computes for so long that launching it costs nothing."""
_SMALL = (1, 2, 4)
_FINE, _COARSE, _COARSE_FROM = 8, 16, 256


def capture_sizes(most: int) -> tuple[int, ...]:
    """Rising, `most` or MOST_ROWS the last: 1, 2, 4, then every 8th, from 256 on every 16th. So a batch is padded by an
    eighth of its rows at the most, but for the smallest, which cost what a single row costs."""
    last = min(most, MOST_ROWS)
    sizes = [*_SMALL, *range(_FINE, _COARSE_FROM, _FINE), *range(_COARSE_FROM, MOST_ROWS + 1, _COARSE)]
    return (*(size for size in sizes if size < last), last)


def padded_size(rows: int, sizes: tuple[int, ...]) -> int | None:
    """The least of `sizes` that `rows` fit into; None where none is large enough."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None
