"""What attention must move and multiply, counted row by row and token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.measure.roofline.kernel_traffic import decode_bytes, decode_flops, prefill_bytes, prefill_flops

PREFILLS = st.integers(1, 40).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context)))
WINDOWS = st.none() | st.integers(1, 50)


def _seen(rows: int, context: int, window: int | None) -> list[set[int]]:
    """The tokens that each of the context's last rows sees."""
    positions = range(context - rows, context)
    return [set(range(0 if window is None else max(0, at - window + 1), at + 1)) for at in positions]


@given(prefills=st.lists(PREFILLS, min_size=1, max_size=3), window=WINDOWS)
def test_prefills_multiply_what_rows_see_and_move_what_some_row_sees_once(
    prefills: list[tuple[int, int]], window: int | None
) -> None:
    seen = [_seen(*prefill, window) for prefill in prefills]
    pairs = sum(len(tokens) for rows in seen for tokens in rows)
    assert prefill_flops(prefills, heads=6, head_dim=16, window=window) == 4 * 6 * 16 * pairs
    cached = sum(len(set().union(*rows)) for rows in seen)
    rows = sum(map(len, seen))
    moved = prefill_bytes(prefills, heads=6, kv_heads=2, head_dim=16, itemsize=2, cache_itemsize=1, window=window)
    assert moved == 2 * cached * 2 * 16 * 1 + 2 * rows * 6 * 16 * 2


@given(contexts=st.lists(st.integers(1, 60), min_size=1, max_size=4), window=WINDOWS)
def test_a_decode_is_a_prefill_of_its_last_token(contexts: list[int], window: int | None) -> None:
    alone = [(1, context) for context in contexts]
    shape = {"heads": 8, "kv_heads": 4, "head_dim": 64, "itemsize": 2, "cache_itemsize": 2, "window": window}
    assert decode_bytes(contexts, **shape) == prefill_bytes(alone, **shape)
    flops = decode_flops(contexts, heads=8, head_dim=64, window=window)
    assert flops == prefill_flops(alone, heads=8, head_dim=64, window=window)
