"""Numbers packed on the wire: token, block and slot ids as little-endian uint32, slots' generations as uint64. Structs
that are packed as arrays, unpacked for people."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

_SWAP = sys.byteorder == "big"
TOKEN_BYTES = 4
NOT_DECODED = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What msgspec raises for bytes that are not of the expected type. Its own error is not all: text that is no UTF-8 and
what is nested without end have Python's."""


def pack(ids: Iterable[int]) -> bytes:
    """Token (or block) ids as packed uint32. Raises OverflowError for an id below 0 or above 2**32 - 1."""
    packed = array("I", ids)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> list[int]:
    """The ids that :func:`pack` packed. Raises ValueError where the length is not a multiple of four."""
    ids = array("I")
    ids.frombytes(packed)
    if _SWAP:
        ids.byteswap()
    return ids.tolist()


def count(packed: bytes) -> int:
    """How many ids `packed` holds."""
    return len(packed) // TOKEN_BYTES


def pack_generations(generations: Iterable[int]) -> bytes:
    """Generations of slots as packed uint64. Raises OverflowError for one below 0 or above 2**64 - 1."""
    packed = array("Q", generations)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_generations(packed: bytes) -> list[int]:
    """The generations that :func:`pack_generations` packed. Raises ValueError where the length is not a multiple of
    eight."""
    generations = array("Q")
    generations.frombytes(packed)
    if _SWAP:
        generations.byteswap()
    return generations.tolist()


def to_plain(value: Any) -> Any:
    """Structs as dictionaries with their fields' names, also those that are packed as arrays, for people and scripts;
    so within tuples."""
    if isinstance(value, tuple):
        return [to_plain(each) for each in value]
    if isinstance(value, Struct):
        return {name: to_plain(each) for name, each in msgspec.structs.asdict(value).items()}
    return value
