"""Which rows go to which expert, on the device, and the shapes of the tiles that their products are computed in.

A *pick* is one of a row's chosen experts: pick p is that of row p // chosen; where its number is -1, another rank has
the expert, and nothing here computes it. Picks are laid out expert by expert, each expert's padded to whole tiles of
rows, so that every tile of a product has one matrix (Gale et al., "MegaBlocks", arXiv:2211.15841). Nothing is counted
on the host: launches are as large as the worst case, see `most_tiles`.

Bytes of `route`, n rows: n · (E · logit itemsize + chosen · 8). `sort_picks` reads the picks twice for each expert,
from the caches.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import HOPPER
from services.worker.ops.interface import Picks
from services.worker.ops.quantized import Code
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs

AT_ONCE = (512, 4096)
"""Picks that a program looks at in one go: where there are no more, and where there are. Each is compiled anew."""


class SortedPicks(NamedTuple):
    """Picks by expert. Behind the tiles that are used, contents are undefined."""

    picks: Tensor
    """int32 [tiles * rows of a tile]; in padding, the number of picks."""
    tile_experts: Tensor
    """int32 [tiles] the expert of each tile."""
    tiles: Tensor
    """int32 [1]: how many are used."""


def route(logits: Tensor, *, chosen: int, renormalised: bool) -> Picks:
    """logits [n, E] → the `chosen` greatest chances of each row's softmax, in falling order, lower numbers first.

    Computed in float32; where `renormalised`, scaled to add up to 1."""
    rows, experts = logits.shape
    picks = Picks(
        torch.empty(rows, chosen, dtype=torch.float32, device=logits.device),
        torch.empty(rows, chosen, dtype=torch.int32, device=logits.device),
    )
    padded = triton.next_power_of_2(experts)
    route_kernel[(rows,)](
        *(logits, *picks),
        EXPERTS=experts,
        PADDED=padded,
        CHOSEN=chosen,
        PLACES=triton.next_power_of_2(chosen),
        RENORMALISED=renormalised,
        num_warps=max(1, min(8, padded // 256)),
        **launch_options(logits.device),
    )
    return picks


def sort_picks(experts: Tensor, count: int, tile: int, at_once: int | None = None) -> SortedPicks:
    """`experts` int32 [n, chosen] of `count` experts, for tiles of `tile` rows. `at_once`: one of AT_ONCE, None: as
    suits."""
    picks, device = experts.numel(), experts.device
    at_once = at_once or (AT_ONCE[0] if picks <= AT_ONCE[0] else AT_ONCE[1])
    tiles = most_tiles(picks, count, tile)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    found = SortedPicks(
        torch.empty(tiles * tile, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    warps = min(8, at_once // 256)
    rows, chosen = experts.shape
    dependent = launch_options(device)
    count_kernel[(count,)](experts, counts, rows, CHOSEN=chosen, AT_ONCE=at_once, num_warps=warps, **dependent)
    place_kernel[(count,)](
        *(experts, counts, *found, rows),
        EXPERTS=count,
        CHOSEN=chosen,
        PADDED=triton.next_power_of_2(count),
        TILE=tile,
        AT_ONCE=at_once,
        num_warps=warps,
        **dependent,
    )
    return found


def most_tiles(picks: int, experts: int, tile: int) -> int:
    """Tiles that so many picks can take: every expert's last one may hold a single pick."""
    return min(picks, (picks + min(picks, experts) * (tile - 1)) // tile)


@triton.jit
def route_kernel(
    logits,
    chances,
    experts,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    PLACES: tl.constexpr,
    RENORMALISED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row a program."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    number, place = tl.arange(0, PADDED), tl.arange(0, PLACES)
    left = tl.load(logits + row * EXPERTS + number, mask=number < EXPERTS, other=float("-inf")).to(tl.float32)
    most = tl.max(left, 0)
    every = tl.sum(tl.exp(left - most), 0)
    chance = tl.zeros([PLACES], tl.float32)
    expert = tl.zeros([PLACES], tl.int32)
    for taken in tl.static_range(CHOSEN):
        best, at = tl.max(left, 0, return_indices=True)
        # A row of NaNs has no greatest element; its expert must be one that there is, all the same.
        at = tl.minimum(at, EXPERTS - 1)
        chance = tl.where(place == taken, tl.exp(best - most), chance)
        expert = tl.where(place == taken, at, expert)
        left = tl.where(number == at, float("-inf"), left)
    if RENORMALISED:
        every = tl.sum(chance, 0)
    at = row * CHOSEN + place
    tl.store(chances + at, chance / every, mask=place < CHOSEN)
    tl.store(experts + at, expert, mask=place < CHOSEN)


@triton.jit(do_not_specialize=["rows"])
def count_kernel(experts, counts, rows, CHOSEN: tl.constexpr, AT_ONCE: tl.constexpr, DEPENDENT: tl.constexpr):
    """One expert a program."""
    wait_for_inputs(DEPENDENT)
    expert = tl.program_id(0)
    # Of this product the compiler knows factors, and reads several picks at a time.
    picks = rows * CHOSEN
    found = tl.zeros([AT_ONCE], tl.int32)
    for start in tl.range(0, picks, AT_ONCE):
        pick = start + tl.arange(0, AT_ONCE)
        found += (tl.load(experts + pick, mask=pick < picks, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["rows"])
def place_kernel(
    experts,
    counts,
    sorted_picks,
    tile_experts,
    tiles,
    rows,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One expert a program: its picks in their order, what pads its last tile, and its number for each of its tiles."""
    wait_for_inputs(DEPENDENT)
    expert = tl.program_id(0)
    picks = rows * CHOSEN
    number = tl.arange(0, PADDED)
    count = tl.load(counts + number, mask=number < EXPERTS, other=0)
    needed = (count + TILE - 1) // TILE
    first = tl.sum(tl.where(number < expert, needed, 0), 0)
    own = tl.sum(tl.where(number == expert, count, 0), 0)
    end = first + (own + TILE - 1) // TILE
    if expert == EXPERTS - 1:
        tl.store(tiles, end)
    for start in tl.range(first, end, TILE):
        tile = start + tl.arange(0, TILE)
        tl.store(tile_experts + tile, expert, mask=tile < end)
    placed = first * TILE
    padding = placed + own + tl.arange(0, TILE)
    tl.store(sorted_picks + padding, picks, mask=padding < end * TILE)
    for start in tl.range(0, picks, AT_ONCE):
        pick = start + tl.arange(0, AT_ONCE)
        mine = (tl.load(experts + pick, mask=pick < picks, other=-1) == expert).to(tl.int32)
        tl.store(sorted_picks + placed + tl.cumsum(mine, 0) - 1, pick, mask=mine != 0)
        placed += tl.sum(mine, 0)


# Shapes of tiles, by rows per expert, element size and generation of the GPU; host only. Chosen from what the compiler
# makes of them for sm_80 and sm_90 and by counting; not yet by measuring.


TILE_ROWS = (16, 32, 64, 128)

_LINE = 32 * 16
"""Bytes that the 32 lanes of a warp read at once, 16 each."""


class ExpertTile(NamedTuple):
    """The tile of a product of some rows with some columns of one expert."""

    rows: int
    columns: int
    depth: int
    """Elements that are summed at a time."""
    swapped: bool
    """The weights are the product's first factor: a tensor core wants 64 rows of that, and few of the second."""
    num_warps: int
    num_stages: int


class RowTile(NamedTuple):
    """The tile of a row times some columns of its own expert, by one warp, without tensor cores."""

    columns: int
    depth: int


def one_by_one(rows: int, chosen: int, experts: int) -> bool:
    """Whether so few rows meet that next to no two share an expert: then each reads its own, unsorted."""
    return rows == 1 or rows * chosen * 4 <= experts


def reads_codes(picks: int, experts: int) -> bool:
    """Whether so few picks meet that each tile of rows reads its expert's codes; else numbers are made of all first."""
    return picks <= 128 * experts


def up_row_tile(itemsize: int) -> RowTile:
    """The tile of the gates and as many ups."""
    return RowTile(columns=2, depth=_LINE // itemsize)


def down_row_tile(itemsize: int) -> RowTile:
    """The tile of all chosen experts of a row, one after the other: few columns, so that one row is work for the whole
    GPU."""
    return RowTile(columns=2, depth=_LINE // itemsize)


def tile_rows(picks: int, experts: int) -> int:
    """Rows of a tile where experts have so many picks together: twice what they have on average, or
    more, as far as there are such tiles."""
    average = picks / experts
    return next((rows for rows in TILE_ROWS if average <= rows / 2), TILE_ROWS[-1])


@cache
def expert_tile(rows: int, itemsize: int, generation: int, *, gated: bool) -> ExpertTile:
    """The tile of at most `rows` rows. `gated`: two matrices, gates and ups. `generation`: the GPU's major compute
    capability."""
    hopper = generation >= HOPPER
    if itemsize == 1:
        tile = expert_tile(rows, 2, generation, gated=gated)
        return tile._replace(depth=2 * tile.depth)
    if itemsize == 4:
        # Products of float32 are three of TF32 each, out of twice the shared memory: for correctness, not for speed.
        return ExpertTile(min(rows, 32), 64, 32, rows <= 32, num_warps=4, num_stages=3)
    if rows <= 32:
        # Two programs fit on an SM of Hopper, each with two loads of 32 KiB, or three of 16, on their way.
        depth, stages = (128, 3) if rows <= 16 else (64, 4)
        return ExpertTile(rows, 64 if gated else 128, depth, True, num_warps=4, num_stages=stages)
    if rows == 64:
        return ExpertTile(rows, 128, 64, False, num_warps=4 if hopper else 8, num_stages=3)
    columns = (256 if hopper else 128) // (2 if gated else 1)
    return ExpertTile(rows, columns, 64, False, num_warps=8, num_stages=4 if hopper else 3)


@cache
def coded_tile(rows: int, itemsize: int, generation: int, code: Code, group: int, *, gated: bool) -> ExpertTile:
    """The tile of at most `rows` rows and weights of which numbers are made: these are the first factor, which tensor
    cores take from registers from Hopper on. `group`: inputs that share a scale. Measured on an H200 (2026-11-27)."""
    deep = rows != 32 if code == "int4" else rows <= 32
    depth = min(32 if itemsize == 4 else 128 if deep else 64, group if group % 32 == 0 else 32)
    depth = 1 << (depth.bit_length() - 1)
    if itemsize == 4:
        return ExpertTile(min(rows, 32), 64, depth, True, num_warps=4, num_stages=3)
    stages = 3 if generation < HOPPER or (rows == 32 and deep) else 4
    return ExpertTile(rows, 64 if gated or generation < HOPPER else 128, depth, True, num_warps=4, num_stages=stages)
