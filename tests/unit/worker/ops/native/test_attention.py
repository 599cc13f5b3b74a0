"""Native rotation, KV writing and paged attention against float64, and the same to the last bit in every batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from services.worker.models.rope import PlainRope, cos_sin_table
from services.worker.ops.drafts import SlotCopies
from services.worker.ops.interface import OpsUnavailable
from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.native.native_ops import NativeOps
from tests.support.worker.native_batches import (
    Rows,
    attention_reference,
    meta_of,
    native,
    random,
    rope_reference,
    scattered_blocks,
)

DTYPES = (torch.float32, torch.bfloat16)
FP8 = torch.float8_e4m3fn
CODES = (FP8, torch.int8)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Kind:
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    distances: int = 0

    def of_heads(self, heads: int) -> dict[str, Tensor]:
        """The arguments that have a number for each head."""
        number = torch.arange(1, heads + 1)
        found = {"sinks": number * 0.7 - 1.0} if self.sinks else {}
        if self.alibi:
            found["alibi_slopes"] = 2.0 ** (-0.7 * number)
        if self.distances:
            found["distance_biases"] = random(heads, self.distances, seed=3)
        return found


class Cached:
    """Sequences of given lengths, whose queries, keys and values are written step by step."""

    def __init__(self, ops: NativeOps, shape: Shape, contexts: list[int], norms: bool = False) -> None:
        self.ops, self.shape, self.contexts = ops, shape, contexts
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.qkv = [random(context, width, seed=10 + number) for number, context in enumerate(contexts)]
        self.cos_sin = cos_sin_table(PlainRope(10000.0), shape.dim, max(contexts))
        self.norms = (random(shape.dim, seed=1) + 1, random(shape.dim, seed=2) + 1) if norms else (None, None)
        self.blocks = scattered_blocks(contexts, block_size=ops.block_size)
        self.caches = ops.allocate_kv(sum(map(len, self.blocks)) + 1, shape.kv_heads, shape.dim)

    def step(
        self, counts: dict[int, tuple[int, int]], kind: Kind, copies: SlotCopies | None = None
    ) -> dict[int, Tensor]:
        """Sequences' (first, end) positions in one step → the attention's rows of each."""
        sequences = [Rows(end - first, end, self.blocks[number]) for number, (first, end) in counts.items()]
        meta = replace(meta_of(sequences, self.ops.block_size), copies=copies)
        qkv = torch.cat([self.qkv[number][first:end] for number, (first, end) in counts.items()])
        heads, (q_norm, k_norm) = self.shape.heads, self.norms
        queries = self.ops.rope_and_store(
            qkv, meta, self.cos_sin, *self.caches, heads=heads, q_norm=q_norm, k_norm=k_norm, eps=1e-6
        )
        out = self.ops.paged_attention(
            *(queries, *self.caches, meta),
            scale=self.shape.dim**-0.5,
            window=kind.window,
            softcap=kind.softcap,
            **kind.of_heads(heads),
        )
        return dict(zip(counts, out.split([rows.count for rows in sequences]), strict=True))

    def expected(self, number: int, first: int, end: int, kind: Kind) -> Tensor:
        shape, dtype = self.shape, self.ops.dtype
        qkv = self.qkv[number][:end].view(end, -1, shape.dim)
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if self.norms[0] is not None:
            q, k = (_normed(x, norm) for x, norm in zip((q, k), self.norms, strict=True))
        q, k_exact = (rope_reference(x, self.cos_sin[:end]) for x in (q, k))
        q, k = q.to(dtype), k_exact.to(dtype)
        scale = shape.dim**-0.5
        window, softcap = kind.window, kind.softcap
        v = v.to(dtype)
        if self.ops.cache_dtype == FP8:
            k, v = (x.float().clamp(-448, 448).to(FP8).float() for x in (k_exact, qkv[:, -shape.kv_heads :]))
        elif self.ops.cache_dtype == torch.int8:
            k, v = map(_in_whole_steps, (k_exact, qkv[:, -shape.kv_heads :]))
        return attention_reference(
            *(q[first:], k, v), scale=scale, window=window, softcap=softcap, **kind.of_heads(shape.heads)
        )


def _in_whole_steps(x: Tensor) -> Tensor:
    """[tokens, heads, dim], each head of a token rounded to 127 steps to its largest element."""
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    return (x.float() * (127 / largest)).round().double() * (largest / 127)


def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None
    x = x.double()
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def _check(cached: Cached, kind: Kind) -> None:
    """Prefills all but two tokens of each sequence in one step, then two steps of decodes."""
    contexts = dict(enumerate(cached.contexts))
    bounds = (
        {number: (0, context - 2) for number, context in contexts.items()},
        {number: (context - 2, context - 1) for number, context in contexts.items()},
        {number: (context - 1, context) for number, context in contexts.items()},
    )
    tolerance = TOLERANCE[cached.ops.dtype]
    for counts in bounds:
        for number, rows in cached.step(counts, kind).items():
            expected = cached.expected(number, *counts[number], kind)
            torch.testing.assert_close(rows.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 32, 64, 80, 96, 128, 256])
def test_equals_float64_for_any_head_size(dtype: torch.dtype, dim: int) -> None:
    _check(Cached(native(dtype), Shape(6, 2, dim), [5, 18, 64, 130, 300]), Kind())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 71])
def test_equals_float64_for_any_group_of_query_heads(dtype: torch.dtype, group: int) -> None:
    _check(Cached(native(dtype), Shape(2 * group, 2, 32), [4, 33, 290], norms=True), Kind())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", [Kind(window=1), Kind(window=20), Kind(window=256), Kind(softcap=5.0), Kind(window=300, softcap=2.0)]
)
def test_windows_and_soft_caps_equal_float64(dtype: torch.dtype, kind: Kind) -> None:
    _check(Cached(native(dtype), Shape(4, 2, 64), [19, 255, 258, 700]), kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    [
        Kind(sinks=True),
        Kind(alibi=True),
        Kind(distances=129),
        Kind(window=20, sinks=True, distances=3),
        Kind(softcap=3.0, sinks=True, alibi=True),
    ],
)
def test_sinks_slopes_and_biases_equal_float64(dtype: torch.dtype, kind: Kind) -> None:
    _check(Cached(native(dtype), Shape(6, 2, 64), [19, 258, 700]), kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 64])
def test_blocks_of_any_size_give_the_same_bits(dtype: torch.dtype, size: int) -> None:
    shape, kind, contexts = Shape(6, 2, 80), Kind(window=300), [5, 18, 64, 130, 700]
    _check(Cached(native(dtype, block_size=size), shape, contexts), kind)
    whole = dict(enumerate((0, context) for context in contexts))
    small, large = (Cached(native(dtype, block_size=each), shape, contexts).step(whole, kind) for each in (16, size))
    assert all(torch.equal(small[number], large[number]) for number in whole)


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_of_instructions_computes_the_same_function(level: Level, dtype: torch.dtype) -> None:
    _check(Cached(native(dtype, level=level), Shape(6, 2, 48), [21, 300]), Kind(window=200, softcap=10.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Kind(), Kind(window=100), Kind(sinks=True, alibi=True)])
def test_neither_chunks_of_a_prompt_nor_its_batch_change_a_bit(dtype: torch.dtype, kind: Kind) -> None:
    contexts = [600, 17, 64, 5, 2, 333]
    whole = Cached(native(dtype), Shape(6, 2, 64), contexts)
    alone = {number: whole.step({number: (0, context)}, kind)[number] for number, context in enumerate(contexts)}
    together = Cached(native(dtype), Shape(6, 2, 64), contexts).step(
        dict(enumerate((0, end) for end in contexts)), kind
    )
    for number in alone:
        assert torch.equal(together[number], alone[number])
    for size in (1, 7, 16, 250):
        chunked = Cached(native(dtype), Shape(6, 2, 64), contexts)
        parts = [chunked.step({0: (first, min(first + size, 600))}, kind)[0] for first in range(0, 600, size)]
        assert torch.equal(torch.cat(parts), alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_equal_their_rows_of_a_prefill_in_batches_of_any_size(dtype: torch.dtype) -> None:
    contexts = [3 + 13 * number for number in range(64)]
    cached = Cached(native(dtype), Shape(4, 2, 32), contexts)
    prefilled = cached.step(dict(enumerate((0, end) for end in contexts)), Kind())
    for count in (1, 2, 5, 17, 64):
        last = cached.step({number: (contexts[number] - 1, contexts[number]) for number in range(count)}, Kind())
        for number, row in last.items():
            assert torch.equal(row, prefilled[number][-1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_cut_for_several_threads_equals_one_thread_bit_for_bit(dtype: torch.dtype) -> None:
    results, kind = [], Kind(sinks=True, alibi=True)
    for threads in (1, 4):
        cached = Cached(native(dtype, threads), Shape(2, 1, 32), [1500])
        cached.step({0: (0, 1499)}, kind)
        results.append(cached.step({0: (1499, 1500)}, kind)[0])
    assert torch.equal(results[0], results[1])
    expected = cached.expected(0, 1499, 1500, kind)
    torch.testing.assert_close(results[0].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_earlier_owner_left_in_a_block_does_not_reach_its_next(dtype: torch.dtype) -> None:
    """Infinities and NaNs behind a sequence's last token change nothing."""
    clean, dirty = (Cached(native(dtype), Shape(4, 2, 32), [21, 38]) for _ in range(2))
    for cache in dirty.caches:
        cache.fill_(float("nan"))
    for counts in ({0: (0, 20), 1: (0, 37)}, {0: (20, 21), 1: (37, 38)}):
        expected = clean.step(counts, Kind())
        for number, rows in dirty.step(counts, Kind()).items():
            assert torch.equal(rows, expected[number])


# ---- keys and values in eight bits


@pytest.mark.parametrize("position", [38, 39])
@pytest.mark.parametrize(
    ("dtype", "codes"),
    [*((dtype, None) for dtype in DTYPES), (torch.bfloat16, FP8), *((dtype, torch.int8) for dtype in DTYPES)],
)
def test_a_branch_sees_what_is_copied_to_its_block(
    dtype: torch.dtype, codes: torch.dtype | None, position: int
) -> None:
    """Two tokens follow a sequence, each in a block of its own, but for the full ones before."""
    size, ops = 16, native(dtype, cache_dtype=codes)
    alone, branched = (Cached(ops, Shape(4, 2, 32), [position + 1, position + 1]) for _ in range(2))
    for cached in (alone, branched):
        cached.qkv[1][:position] = cached.qkv[0][:position]
        for cache in cached.caches:
            cache.fill_(float("nan") if codes is None else 1)
    before, token = (0, position), dict.fromkeys(range(2), (position, position + 1))
    alone.step({0: before, 1: before}, Kind())
    expected = alone.step(token, Kind())
    branched.step({0: before}, Kind())
    branched.blocks[1] = (*branched.blocks[0][:2], branched.blocks[1][2])
    offsets = torch.arange(position % size, dtype=torch.int32)
    copies = SlotCopies(*(offsets + branched.blocks[number][2] * size for number in range(2)))
    rows = branched.step(token, Kind(), copies)
    for number in range(2):
        assert torch.equal(rows[number], expected[number])
        exact = alone.expected(number, position, position + 1, Kind())
        torch.testing.assert_close(rows[number].double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_numbers_are_rounded_to_eight_bits_as_pytorch_rounds_them() -> None:
    """To the nearest, ties to even; what is too large becomes the largest."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    codes = codes[codes.isfinite()]
    ties = (codes[1:127] + codes[:126]) / 2
    odd = torch.tensor([1e30, -1e30, 460.0, 1e-30, -1e-10, float("inf"), float("-inf")])
    numbers = torch.cat((codes, ties, -ties, odd, random(4096 - len(codes) - 2 * len(ties) - len(odd)) * 20))
    ops = native(torch.float32, cache_dtype=FP8)
    cached = Cached(ops, Shape(1, 1, 256), [16])
    cached.qkv[0][:, -256:] = numbers.view(16, 256)
    cached.step({0: (0, 16)}, Kind())
    kept = cached.caches[1][cached.blocks[0][0], 0]
    assert torch.equal(kept.float(), numbers.clamp(-448, 448).to(FP8).float().view(16, 256))


def test_heads_without_numbers_become_finite_steps() -> None:
    """What is no number, or too large, is as large as can be: a step times the weight 0 is 0."""
    cached = Cached(native(torch.float32, cache_dtype=torch.int8), Shape(1, 1, 8), [3])
    nan, infinity = float("nan"), float("inf")
    rows = [[0.0] * 8, [nan, 1, -1, infinity, -infinity, 0, 1e38, -1e-38], [254, -254, 127, 1, 3, 5, -1, -3]]
    cached.qkv[0][:, -8:] = torch.tensor(rows)
    cached.step({0: (0, 3)}, Kind())
    kept = cached.caches[1][cached.blocks[0][0], 0, :3, :12].contiguous()
    steps = kept[:, 8:].contiguous().view(torch.float32).flatten()
    assert torch.allclose(steps, torch.tensor([0.0, 1e30 / 127, 2.0]))
    assert kept[:, :8].tolist() == [[0] * 8, [127, 0, 0, 127, -127, 0, 127, 0], [127, -127, 64, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dim", [8, 32, 64, 80, 256])
def test_attention_is_that_of_rounded_keys_and_values(dtype: torch.dtype, dim: int, codes: torch.dtype) -> None:
    ops = native(dtype, cache_dtype=codes)
    stored = dim if codes == FP8 else dim + 4
    assert ops.kv_block_bytes(2, dim) == 2 * 2 * 16 * -(-stored // 16) * 16
    _check(
        Cached(ops, Shape(6, 2, dim), [5, 18, 64, 130, 300], norms=dim == 64), Kind(window=100 if dim == 80 else None)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("level", runnable_levels())
def test_eight_bits_give_the_same_bits_in_every_batch_block_and_thread(
    level: Level, dtype: torch.dtype, codes: torch.dtype
) -> None:
    contexts, kind = [600, 17, 64, 5, 2, 333], Kind(sinks=True)
    alone: dict[int, Tensor] = {}
    for threads, size in ((1, 16), (4, 64)):
        ops = native(dtype, threads, level, size, codes)
        cached = Cached(ops, Shape(6, 2, 48), contexts)
        for first in range(0, 600, 250):
            here = {number: (first, min(first + 250, end)) for number, end in enumerate(contexts) if first < end}
            for number, rows in cached.step(here, kind).items():
                expected = alone.setdefault(number * 1000 + first, rows)
                assert torch.equal(rows, expected)


def test_heads_that_do_not_fill_words_are_refused() -> None:
    with pytest.raises(OpsUnavailable, match="heads of 6 elements are no multiple of 4"):
        native(torch.float32, cache_dtype=FP8).allocate_kv(4, 1, 6)
