"""What FlashAttention 3 is asked for, by a stand-in that computes what its documentation says of each argument."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.interface import OpsUnavailable
from services.worker.ops.triton.attention.paged_attention import create_attention, paged_attention
from tests.support.models.attention_reference import FP8, Cached, Shape

CPU = torch.device("cpu")


def _documented(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Caches (num_blocks, page_block_size, nheads_k, headdim); the query at position i of seqlen_q sees the keys
    between i + seqlen_k - seqlen_q - window_size[0] and i + seqlen_k - seqlen_q + window_size[1], -1 being infinite."""
    assert causal
    assert softmax_scale > 0
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    page, kv_heads = k_cache.shape[1:3]
    out = torch.empty_like(q)
    for sequence, seqlen_k in enumerate(cache_seqlens.tolist()):
        first, end = cu_seqlens_q[sequence : sequence + 2].tolist()
        assert end - first <= max_seqlen_q
        where = [(page_table[sequence, token // page], token % page) for token in range(seqlen_k)]
        keys, values = (torch.stack([cache[at] for at in where]).double() for cache in (k_cache, v_cache))
        for row in range(first, end):
            at = row - first + seqlen_k - (end - first)
            left, right = window_size
            low, high = 0 if left < 0 else max(0, at - left), at if right < 0 else min(at, at + right)
            for head in range(q.shape[1]):
                of = head // (q.shape[1] // kv_heads)
                scores = keys[low : high + 1, of] @ q[row, head].double() * softmax_scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row, head] = (scores.softmax(0) @ values[low : high + 1, of]).to(q.dtype)
    return out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn_interface")
    vars(module)["flash_attn_with_kvcache"] = _documented
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (7, 5.0), (40, None)])
def test_it_is_asked_for_what_our_kernels_compute(window: int | None, softcap: float | None) -> None:
    dtype = torch.bfloat16
    cached = Cached(Shape(dtype=dtype, window=window, softcap=softcap), [(1, 33), (1, 5), (9, 20), (3, 3)], device=CPU)
    attend = create_attention("flash-attn", CPU, dtype, dtype)
    cached.check(attend(cached.q, cached.k_cache, cached.v_cache, cached.meta(), **cached.asked()))


@pytest.mark.parametrize(
    ("dtype", "cache", "reason"),
    [
        (torch.bfloat16, torch.bfloat16, "not installed"),
        (torch.float32, torch.float32, "float16 and bfloat16"),
        (torch.bfloat16, FP8, "keys and values"),
    ],
)
def test_it_is_refused_where_it_cannot_be_had(
    dtype: torch.dtype, cache: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(OpsUnavailable, match=reason):
        create_attention("flash-attn", CPU, dtype, cache)


def test_unless_asked_otherwise_our_kernels_attend() -> None:
    for name in ("auto", "triton"):
        assert create_attention(name, CPU, torch.bfloat16, FP8) is paged_attention
