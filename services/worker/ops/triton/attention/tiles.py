"""Shapes of attention's tiles, by head size, element size and generation of the GPU. Knows no kernel; host only.

Chosen from what the compiler makes of them for sm_80 and sm_90 (no spills, shared memory for two programs on an SM
where decode needs them) and by counting; those of 128 elements in 16 bits by measuring on an H200 (2026-11-27).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from services.worker.ops.gpu import HOPPER
from services.worker.ops.interface import OpsUnavailable

MAX_HEAD_DIM = 256
"""Wider ones would spill registers, and more than 227 KiB of shared memory."""

_DECODE_BYTES = 16 * 1024
"""Keys (and as many values) of a decode's tile. With two tiles on the way, three programs fit on an SM of Hopper: at
least 96 KiB on their way to it, when 4.8 TB/s over 132 SMs at 800 ns need 29 KiB."""

_DECODES_PER_SM = 4
"""Programs of decode attention that an SM holds at once, where those are so many that they have `FEW_DECODE_STAGES`."""
_DEEP_DECODES_PER_SM = 3
"""And with `_DEEP_STAGES`, by the shared memory above."""
_DEEP_STAGES, FEW_DECODE_STAGES = 5, 3
"""Of the loop over a context: fewer of them leave room for more programs (64 sequences of 1,024 tokens with
Llama-3.1-8B's heads: 83.8 µs with 5, in two waves, 68.5 with 3, in one), while few programs need more on its way."""

_TOGETHER_WARPS, MERGING_WARPS = 2, 4
"""Warps of the tile (heads of 128 elements in 16 bits) whose few shares are merged by the last program of a sequence,
and of that: 16 sequences of 1,024 tokens with Llama-3.1-8B's heads take 22.9 µs in four shares, and 23.7 in two with a
kernel behind them, which is one launch more in a step. Merging many shares so is slower."""
_FEW_SPLITS = (2, 3)
_MAX_TOGETHER = 4
MAX_ARRIVALS = 1024
"""Key heads of all sequences whose shares are merged so."""

_FULL_ENOUGH = 0.85
"""A cut of the context that keeps this share of the GPU busy is fine enough; finer ones cost merging."""

_MIN_PREFILL_SHARE = 512
"""Tokens of a prefill's share: rows × head size in float32 are written and read again for each."""

_MERGED_TOKENS = 256
"""With so many tokens the products of a row take as long as writing and reading its share's 2 · 4 · D bytes: 512 FLOPs
a token for each 1 KiB, D = 128, at half of 990 TFLOP/s and 4.3 TB/s."""

_MANY_PREFILL_ROWS = 8192
"""From so many rows on, tiles of 256 fill the GPU: on an H200 95 µs in place of 117 for a prompt of 2,048 tokens with
Llama-3.1-8B's heads, 1,242 in place of 1,378 for 8,192."""

_MAX_WAVES = 4
"""With more waves of programs than these, an almost empty last one costs little: no finer cut is looked for."""


class Tile(NamedTuple):
    """What one program of attention works on at a time, and how the compiler is to arrange it."""

    rows: int
    """Query rows (positions × heads) of a program."""
    tokens: int
    """Cached tokens that it takes at a time."""
    num_warps: int
    num_stages: int
    """Of the loop over a context; of decodes by many programs fewer, see `decode_stages`."""


def padded(head_dim: int) -> int:
    """Tiles are powers of two, and a tensor core's product takes 16 elements at least. Raises OpsUnavailable for
    heads that no tile is made for: when a rank first tries a step, at its start."""
    if head_dim > MAX_HEAD_DIM:
        raise OpsUnavailable(
            f"Triton's attention has no tiles for heads of {head_dim} elements, only up to {MAX_HEAD_DIM}: "
            "choose ops = torch"
        )
    return max(16, 1 << (head_dim - 1).bit_length())


def packed_rows(group: int) -> int:
    """Rows for the query heads of one key head: a tensor core takes 16 at least, registers hold 64."""
    return min(64, max(16, 1 << (group - 1).bit_length()))


@cache
def decode_tile(head_dim: int, group: int, cache_itemsize: int) -> Tile:
    """The tile of decode attention, for any GPU from sm_80 on. Float8 is widened in registers, so it has no larger
    tiles."""
    width = max(64, padded(head_dim))
    tokens = max(16, min(128, _DECODE_BYTES // (width * max(2, cache_itemsize))))
    rows = packed_rows(group)
    # Float32 heads of 256 take more registers than four warps have, those of 64 more than two.
    few = rows == 16 and width * cache_itemsize == 256 and cache_itemsize <= 2
    warps = 8 if width * cache_itemsize > 512 else 2 if few else 4
    return Tile(rows, tokens, warps, _DEEP_STAGES)


def decode_stages(tile: Tile, programs: int, sms: int) -> int:
    """Of decodes that are launched as so many programs."""
    return tile.num_stages if programs <= sms * _DEEP_DECODES_PER_SM else FEW_DECODE_STAGES


def merges_together(tile: Tile, splits: int, programs: int, stages: int) -> bool:
    """Whether the last of a sequence's programs merges what the others found, instead of a kernel behind them;
    `programs`: of one share."""
    few = tile.num_warps == _TOGETHER_WARPS and stages == FEW_DECODE_STAGES
    return few and 1 < splits <= _MAX_TOGETHER and programs <= MAX_ARRIVALS


def decode_splits(sequences: int, heads: int, kv_heads: int, most_tokens: int, tile: Tile, sms: int) -> int:
    """Into how many shares decodes cut their contexts, of which the longest has `most_tokens` (or its window has).

    The fewest that fill the GPU: with two programs on each SM, or, where there are more programs than it holds at once,
    with a last wave that is not mostly empty. A context much longer than the others of a large batch so ends last, and
    alone; to cut all for its sake would cost every batch that has none.
    """
    programs = sequences * kv_heads * -(-heads // kv_heads // tile.rows)
    finest = max(1, -(-most_tokens // tile.tokens))
    splits = _splits(programs, finest, sms)
    if tile.num_warps == _TOGETHER_WARPS and splits in _FEW_SPLITS:
        finer = min(_MAX_TOGETHER, finest, sms * _DECODES_PER_SM // programs)
        if merges_together(tile, finer, programs, decode_stages(tile, programs * finer, sms)):
            return finer
    return splits


@lru_cache(maxsize=4096)
def _splits(programs: int, finest: int, sms: int) -> int:
    most = min(finest, -(-_MAX_WAVES * sms * _DECODES_PER_SM // programs))
    fullness = {splits: _fullness(programs * splits, sms) for splits in range(1, most + 1)}
    enough = _FULL_ENOUGH * max(fullness.values())
    return next(splits for splits, full in fullness.items() if full >= enough)


def prefill_splits(prefills: Sequence[tuple[int, int]], heads: int, kv_heads: int, tile: Tile, sms: int) -> int:
    """Into how many shares prefills of (rows, context) cut their contexts: what the longest then takes, in waves of one
    program on each SM and with the merging, is the least. Shares too short to be worth it are not looked at."""
    group = heads // kv_heads
    pack = min(group, tile.rows)
    tiles = sum(-(-rows // (tile.rows // pack)) for rows, _ in prefills)
    programs = kv_heads * -(-group // pack) * tiles
    longest = max(context for _, context in prefills)

    def cost(splits: int) -> float:
        """In tokens that one program attends to after the other."""
        merging = _MERGED_TOKENS * programs * splits / sms if splits > 1 else 0.0
        return -(-programs * splits // sms) * longest / splits + merging

    most = min(longest // _MIN_PREFILL_SHARE, -(-_MAX_WAVES * sms // programs))
    return min(range(1, max(1, most) + 1), key=cost)


def _fullness(programs: int, sms: int) -> float:
    """The share of the GPU that they keep busy, 1 at the most."""
    held = sms * _DECODES_PER_SM
    if programs <= held:
        return min(1.0, programs / (2 * sms))
    return programs / (-(-programs // held) * held)


@cache
def prefill_tile(
    head_dim: int,
    rows: int,
    itemsize: int,
    cache_itemsize: int,
    windowed: bool,
    generation: int,
    *,
    alibi: bool = False,
) -> Tile:
    """Of prefill attention, where sequences have up to `rows` (tokens × heads of a group) of them.

    Rows of 128 on two warp groups read keys and values half as often as rows of 64, and chunks of fewer rows than that
    fill tiles of 64. Float32 takes three products for each, and so many registers that its tiles are small. A window
    adds a loop with masks and registers with it, and `alibi` a distance for each pair: before Hopper half the keys at a
    time leave room for those.

    With five stages, tables are read two tiles ahead of keys and values, and those two ahead of their products; with
    three, one: an SM that holds a single program then waits for each tile, as it is asked for when the one before is
    done. Float8 is widened in registers, of which wide heads leave none, and less shared memory holds no more of them.
    """
    width = max(64, padded(head_dim))
    hopper = generation >= HOPPER
    if itemsize == 4:
        return _FLOAT32_PREFILLS[width]
    deep = width <= 128 or (hopper and cache_itemsize > 1)
    stages = 5 if deep else 3
    if rows <= 64 or (not hopper and width == 128 and (windowed or cache_itemsize == 1)):
        warps = 8 if width > 128 else 4
        return Tile(64, 8192 // width, warps, stages) if hopper else Tile(64, max(32, 4096 // width), warps, 3)
    if width > 128:
        return Tile(128 if deep else 64, 32, num_warps=8, num_stages=stages)
    if width == 128 and not hopper and alibi:
        return Tile(128, 32, num_warps=8, num_stages=stages)
    whole = width == 128 and hopper and not windowed
    if whole and cache_itemsize == 2 and rows >= _MANY_PREFILL_ROWS and not alibi:
        return Tile(256, 64, num_warps=8, num_stages=3)
    return Tile(128, 128 if whole else 64, num_warps=8, num_stages=stages)


_FLOAT32_PREFILLS = {
    64: Tile(16, 64, num_warps=4, num_stages=3),
    128: Tile(16, 32, num_warps=8, num_stages=3),
    256: Tile(16, 16, num_warps=8, num_stages=3),
}
"""By padded head size."""
