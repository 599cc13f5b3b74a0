"""Shapes of attention's tiles, by head size, element size and generation of the GPU. Knows no kernel; host only.

Chosen from what the compiler makes of them for sm_80 and sm_90 (no spills, shared memory for two programs on an SM
where decode needs them) and by counting; not yet by measuring.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

HOPPER = 9
"""Major compute capability from which products run on whole warp groups (wgmma), and shared memory has 227 KiB."""

_DECODE_BYTES = 16 * 1024
"""Keys (and as many values) of a decode's tile: two programs with two tiles on the way each are 128 KiB for an SM,
when 4.8 TB/s at 800 ns need 29 KiB."""


class Tile(NamedTuple):
    rows: int
    """Query rows (positions × heads) of a program."""
    tokens: int
    """Cached tokens that it takes at a time."""
    num_warps: int
    num_stages: int


def padded(head_dim: int) -> int:
    """Tiles are powers of two, and a tensor core's product takes 16 elements at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def packed_rows(group: int) -> int:
    """Rows for the query heads of one key head: a tensor core takes 16 at least, registers hold 64."""
    return min(64, max(16, 1 << (group - 1).bit_length()))


@cache
def decode_tile(head_dim: int, group: int, cache_itemsize: int) -> Tile:
    """Of decode attention, for any GPU from sm_80 on."""
    tokens = max(16, min(128, _DECODE_BYTES // (padded(head_dim) * cache_itemsize)))
    return Tile(packed_rows(group), tokens, num_warps=4, num_stages=3)


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of the GPU; off a GPU, as many as an H200 has, so that tests cut as it would."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
