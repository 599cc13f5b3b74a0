"""Generations of a KV store's slots on the wire: packed little-endian uint64. Slot numbers are packed as tokens are."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

_SWAP = sys.byteorder == "big"


def pack_generations(generations: Iterable[int]) -> bytes:
    """Raises OverflowError for one below 0 or above 2**64 - 1."""
    packed = array("Q", generations)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_generations(packed: bytes) -> list[int]:
    """What :func:`pack_generations` packed. Raises ValueError where the length is not a multiple of eight."""
    generations = array("Q")
    generations.frombytes(packed)
    if _SWAP:
        generations.byteswap()
    return generations.tolist()
