"""Paged attention on a real GPU at the sizes of served models: against float64, in captured graphs, cut anyhow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.gpu import HOPPER
from services.worker.ops.interface import OpsUnavailable
from services.worker.ops.triton.attention.decode import decode_attention
from services.worker.ops.triton.attention.paged_attention import create_attention, paged_attention
from services.worker.ops.triton.attention.tiles import prefill_splits, prefill_tile
from tests.support.models.attention_reference import FP8, Cached, Shape, assert_rows_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CUDA = torch.device("cuda")
SHAPES = {
    "Llama-3.1-8B": Shape(heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16),
    "Qwen3-30B-A3B": Shape(heads=32, kv_heads=4, dim=128, dtype=torch.bfloat16),
    "Gemma 2": Shape(heads=8, kv_heads=4, dim=256, dtype=torch.bfloat16, window=1024, softcap=50.0),
    "gpt-oss": Shape(heads=64, kv_heads=8, dim=64, dtype=torch.bfloat16, window=128),
    "Phi-3": Shape(heads=32, kv_heads=32, dim=96, dtype=torch.float16, window=2047),
    "head size 80": Shape(heads=32, kv_heads=32, dim=80, dtype=torch.float16),
    "float32": Shape(heads=32, kv_heads=8, dim=128),
}


@pytest.mark.parametrize("name", SHAPES)
def test_decodes_of_served_models_equal_float64(name: str) -> None:
    Cached(SHAPES[name], [(1, context) for context in (1, 16, 17, 500, 1024, 4097, 9000, 33)], CUDA).check()


@pytest.mark.parametrize("name", SHAPES)
def test_prefills_of_served_models_equal_float64(name: str) -> None:
    Cached(SHAPES[name], [(1, 700), (700, 700), (100, 2100), (2, 64), (1500, 1501)], CUDA).check()


@pytest.mark.parametrize("name", SHAPES)
def test_short_chunks_behind_long_contexts_equal_float64(name: str) -> None:
    """Of few rows, as drafts and the last chunks of prompts are."""
    Cached(SHAPES[name], [(3, 5000), (8, 900), (5, 5)], CUDA).check()


def test_prefills_that_would_leave_most_of_a_last_wave_empty_are_cut_and_equal_float64() -> None:
    shape = SHAPES["Llama-3.1-8B"]
    tile = prefill_tile(shape.dim, 4 * 700, 2, 2, windowed=False, generation=HOPPER)
    assert prefill_splits([(700, 5000)], shape.heads, shape.kv_heads, tile, sms=132) == 3
    Cached(shape, [(1, 50), (700, 5000)], CUDA).check()


def test_a_full_batch_equals_float64() -> None:
    Cached(SHAPES["Llama-3.1-8B"], [(1, 5 + 13 * number % 1500) for number in range(300)], CUDA).check()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no float8 before 8.9"
)
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Gemma 2", "gpt-oss"])
def test_caches_of_float8_equal_float64_of_what_they_hold(name: str) -> None:
    shape = replace(SHAPES[name], cache=FP8, k_scale=0.5, v_scale=2.0)
    Cached(shape, [(1, 3000), (1, 17), (600, 800), (9, 2000)], CUDA).check()


@pytest.mark.parametrize("splits", [1, 2, 7, 33, 128])
def test_contexts_cut_into_any_number_of_shares_give_the_same(splits: int) -> None:
    cached = Cached(SHAPES["Llama-3.1-8B"], [(1, context) for context in (1, 100, 2000, 9000)], CUDA)
    meta = cached.meta()
    cached.check(
        decode_attention(
            *(cached.q, cached.k_cache, cached.v_cache, meta.block_tables, meta.context_lens),
            splits=splits,
            **cached.asked(),
        )
    )


def test_a_captured_graph_attends_to_whatever_lies_in_its_buffers_when_it_is_replayed() -> None:
    """Captured with the longest contexts, replayed with shorter ones and with padded rows."""
    shape = SHAPES["Llama-3.1-8B"]
    cached = Cached(shape, [(1, 4000)] * 6, CUDA)
    meta = cached.meta()

    def attend() -> Tensor:
        return paged_attention(cached.q, cached.k_cache, cached.v_cache, meta, **cached.asked())

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for lengths in ([4000] * 6, [1, 17, 900, 4000, 64, 3], [250, 0, 1, 0, 0, 33]):
        meta.context_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        for row, length in enumerate(lengths):
            if length == 0:
                assert not out[row].any()
        cached.rows = [replace(rows, context=max(1, length)) for rows, length in zip(cached.rows, lengths, strict=True)]
        whole = cached.keys, cached.values
        cached.keys, cached.values = ([x[: max(1, n)] for x, n in zip(all_, lengths, strict=True)] for all_ in whole)
        seen = torch.tensor([length > 0 for length in lengths])
        assert_rows_close(out.cpu()[seen], cached.expected()[seen])
        cached.keys, cached.values = whole


def test_where_it_is_installed_flash_attention_gives_the_same() -> None:
    shape = SHAPES["Llama-3.1-8B"]
    cached = Cached(shape, [(1, 3000), (1, 17), (600, 800), (9, 2000)], CUDA)
    try:
        attend = create_attention("flash-attn", CUDA, shape.dtype, shape.dtype)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    for window, softcap in ((None, None), (300, None), (None, 30.0)):
        cached.shape = replace(shape, window=window, softcap=softcap)
        cached.check(attend(cached.q, cached.k_cache, cached.v_cache, cached.meta(), **cached.asked()))
