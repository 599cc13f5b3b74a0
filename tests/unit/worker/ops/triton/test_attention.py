"""Paged attention in Triton against float64: here in its interpreter, on a GPU by `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.triton.attention import decode as decode_module
from services.worker.ops.triton.attention import prefill as prefill_module
from services.worker.ops.triton.attention.decode import decode_attention
from services.worker.ops.triton.attention.prefill import prefill_attention
from services.worker.ops.triton.attention.tiles import Tile, decode_splits, decode_tile, prefill_splits, prefill_tile
from tests.support.kernels.kernel_device import DEVICE
from tests.support.models.attention_reference import FP8, Cached, Shape, assert_rows_close

DIMS = (8, 32, 64, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _decoded(cached: Cached, splits: int) -> torch.Tensor:
    meta = cached.meta()
    tables, lengths = meta.block_tables, meta.context_lens
    return decode_attention(cached.q, cached.k_cache, cached.v_cache, tables, lengths, splits=splits, **cached.asked())


def _prefilled(cached: Cached, splits: int) -> torch.Tensor:
    meta = cached.meta()
    return prefill_attention(
        *(cached.q, cached.k_cache, cached.v_cache, meta.block_tables, meta.query_starts, meta.context_lens),
        max_query=meta.max_query,
        splits=splits,
        **cached.asked(),
        **cached.scales(),
    )


@pytest.mark.parametrize("dim", DIMS)
def test_decodes_equal_float64_for_any_head_size(dim: int) -> None:
    Cached(Shape(dim=dim), [(1, 17), (1, 40)]).check()


@pytest.mark.parametrize("dim", DIMS)
def test_prefills_equal_float64_for_any_head_size(dim: int) -> None:
    Cached(Shape(dim=dim), [(9, 9), (2, 40)]).check()


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("window", [None, 37])
def test_blocks_may_have_32_or_64_tokens(size: int, window: int | None) -> None:
    cached = Cached(Shape(dim=32, block_size=size, window=window), [(1, 130), (1, 64), (9, 70)])
    cached.check()
    decodes = Cached(Shape(dim=32, block_size=size, window=window), [(1, 130), (1, 7)])
    decodes.check(_decoded(decodes, 3))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(sinks=True),
        Shape(alibi=True),
        Shape(heads=6, dim=32, window=9, sinks=True),
        Shape(heads=6, softcap=2.0, sinks=True, alibi=True, dtype=torch.bfloat16),
    ],
)
def test_sinks_and_slopes_equal_float64_whole_and_in_shares(shape: Shape) -> None:
    Cached(shape, [(1, 40), (1, 3), (9, 70), (5, 5)]).check()
    decodes = Cached(shape, [(1, 130), (1, 7)])
    decodes.check(_decoded(decodes, 3))
    prefills = Cached(shape, [(3, 130), (4, 50)])
    prefills.check(_prefilled(prefills, 3))


@pytest.mark.parametrize("group", [1, 3, 7, 8, 71])
def test_any_number_of_query_heads_may_share_a_key_head(group: int) -> None:
    Cached(Shape(heads=2 * group), [(1, 33), (3, 19)]).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_is_as_exact_as_it_can_be(dtype: torch.dtype) -> None:
    Cached(Shape(dtype=dtype, dim=64), [(1, 100), (5, 37)]).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_caches_may_be_float8_with_scales(dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype, dim=32, cache=FP8)
    Cached(shape, [(1, 40), (1, 3), (9, 21)]).check()
    Cached(replace(shape, k_scale=0.5, v_scale=3.0), [(1, 40), (9, 21)]).check()


@pytest.mark.parametrize("splits", [1, 2, 3, 9])
@pytest.mark.parametrize("window", [None, 50])
def test_contexts_cut_into_any_number_of_shares_give_the_same(splits: int, window: int | None) -> None:
    cached = Cached(Shape(dim=64, window=window), [(1, 300), (1, 1), (1, 16), (1, 129)])
    cached.check(_decoded(cached, splits))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_a_row_of_no_context_is_padding_and_gives_zeros(splits: int, window: int | None) -> None:
    cached = Cached(Shape(window=window), [(1, 40), (1, 1)])
    meta = cached.meta()
    meta.context_lens[1] = 0
    out = decode_attention(
        *(cached.q, cached.k_cache, cached.v_cache, meta.block_tables, meta.context_lens),
        splits=splits,
        **cached.asked(),
        **cached.scales(),
    )
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert_rows_close(out[:1], cached.expected()[:1])


@pytest.mark.parametrize("window", [None, 70])
def test_the_last_program_of_a_sequence_merges_what_the_others_found(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU so small that these are many programs; and leaves the counters as they were."""
    monkeypatch.setattr(decode_module, "sm_count", lambda _: 1)
    monkeypatch.delattr(decode_module, "merge_shares")
    shape = Shape(heads=4, kv_heads=1, dim=128, dtype=torch.bfloat16, window=window)
    cached = Cached(shape, [(1, 1), (1, 200), (1, 64)])
    meta = cached.meta()
    monkeypatch.setattr(cached, "meta", lambda: meta)
    cached.check(_decoded(cached, 3))
    meta.context_lens[0] = 0
    assert not _decoded(cached, 3)[0].any(), "a padded row"
    assert not decode_module._arrivals(DEVICE).any()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have many, with and without masks, and packed heads leave rows over."""
    monkeypatch.setattr(prefill_module, "prefill_tile", lambda *_, **__: Tile(16, 16, num_warps=4, num_stages=3))


@pytest.mark.usefixtures("small_tiles")
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_prefills_of_any_lengths_windows_and_caps_equal_float64(data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))
    sequences = [(data.draw(st.integers(1, context)), context) for context in contexts]
    shape = Shape(
        heads=data.draw(st.sampled_from([1, 2, 3])),
        kv_heads=1,
        window=data.draw(st.none() | st.integers(1, 30)),
        softcap=data.draw(st.none() | st.sampled_from([1.0, 30.0])),
    )
    cached = Cached(shape, sequences, seed=data.draw(st.integers(0, 99)))
    cached.check(_prefilled(cached, data.draw(st.integers(1, 5))))


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_decodes_of_any_lengths_windows_caps_and_shares_equal_float64(data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    shape = Shape(
        heads=data.draw(st.sampled_from([1, 2, 3, 17])),
        kv_heads=1,
        dim=64,
        window=data.draw(st.none() | st.integers(1, 300)),
        softcap=data.draw(st.none() | st.sampled_from([1.0, 30.0])),
    )
    cached = Cached(shape, [(1, context) for context in contexts], seed=data.draw(st.integers(0, 99)))
    cached.check(_decoded(cached, data.draw(st.integers(1, 6))))


def test_decodes_and_prefills_of_one_step_attend_each_to_their_own() -> None:
    Cached(Shape(window=30, softcap=20.0), [(1, 5), (1, 64), (20, 33), (2, 2), (7, 90)]).check()


def test_a_few_tokens_behind_a_long_context_are_cut_beside_decodes() -> None:
    sequences = [(1, 40), (2, 1100), (3, 700)]
    cached = Cached(Shape(), sequences)
    tile = prefill_tile(16, 2 * 3, 4, 4, windowed=False, generation=9)
    assert prefill_splits(sequences[1:], heads=4, kv_heads=2, tile=tile, sms=132) == 2
    cached.check()


def test_what_an_earlier_owner_left_in_a_block_changes_no_bit() -> None:
    sequences = [(1, 21), (1, 38), (5, 19), (30, 30)]
    clean, dirty = (Cached(Shape(dim=32), sequences, dirty=dirty).attended() for dirty in (False, True))
    assert torch.equal(clean, dirty)


def test_what_lies_before_the_window_is_not_read() -> None:
    """Its blocks may be another's by then."""
    for rows in (1, 4):
        cached = Cached(Shape(window=20), [(rows, 75)])
        before = torch.tensor(cached.rows[0].blocks[: (75 - rows - 20 + 1) // 16], device=DEVICE)
        cached.k_cache[before], cached.v_cache[before] = float("nan"), float("nan")
        cached.check()


def test_contexts_are_cut_as_finely_as_fills_the_gpu_and_no_finer() -> None:
    tile = decode_tile(head_dim=128, group=4, cache_itemsize=2)

    def splits(sequences: int, tokens: int) -> int:
        return decode_splits(sequences, heads=32, kv_heads=8, most_tokens=tokens, tile=tile, sms=132)

    assert [splits(1, tokens) for tokens in (1, tile.tokens, 3 * tile.tokens)] == [1, 1, 3]
    assert splits(1, 32768) * 8 in range(132, 3 * 132 + 1)
    assert [splits(sequences, 4096) for sequences in (32, 128, 256, 512)] == [1, 1, 1, 1]
    assert splits(16, 4096) == 4, "two shares would do; four are merged by the last of their programs"
    assert splits(12, 4096) == 3, "four would still need a kernel to merge them"
    assert splits(67, 4096) > 1, "536 programs, 528 at once: the last eight would run alone"
    assert splits(256, 131072) == 1, "graphs are captured for the longest contexts there may be"


def test_prefills_are_cut_only_where_they_leave_the_gpu_empty() -> None:
    tile = prefill_tile(128, 4 * 8192, 2, 2, windowed=False, generation=9)

    def splits(*prefills: tuple[int, int]) -> int:
        return prefill_splits(prefills, heads=32, kv_heads=8, tile=tile, sms=132)

    assert splits((8192, 8192)) == splits((2048, 100_000)) == splits(*[(100, 4000)] * 16) == 1
    assert splits((16, 300)) == 1, "too short"
    assert splits((16, 30_000)) == 16, "8 programs without"
    assert splits((700, 30_000)) == 3, "176 programs without: of the second wave two thirds would be empty"
    assert splits((1100, 1100)) == 1, "280 programs: merging would cost more than the third wave"
