"""The actions on arenas that the store's core decides; the node store carries them out in order."""

from __future__ import annotations

from typing import NamedTuple

from shared.blocks import BlockHash


class ReserveSlot(NamedTuple):
    """A slot is reserved for this block, of which no head counts as written."""

    layout: str
    slot: int
    generation: int
    hash: BlockHash
    parent: BlockHash
    tokens: int
    fresh: bool
    """The slot has no memory yet."""


class CommitSlot(NamedTuple):
    """The block is written: it can be found from now on."""

    layout: str
    slot: int
    hash: BlockHash
    tokens: int
    used: int


class TouchSlot(NamedTuple):
    """The block was used again; `used` is the order of use."""

    layout: str
    slot: int
    used: int


class EvictBlock(NamedTuple):
    """The block had to make room: offer it to the lower tier before the slot is used again."""

    layout: str
    slot: int
    hash: BlockHash
    tokens: int
    age: float
    """Seconds since it was last used."""


class DropBlock(NamedTuple):
    """A committed block is of no use any more, or its checksums do not match."""

    layout: str
    slot: int
    hash: BlockHash
    tokens: int


class FreeSlot(NamedTuple):
    """The slot is free; its block was never committed."""

    layout: str
    slot: int


class RetireSlot(NamedTuple):
    """A reservation ended while its writers may still write: they see another generation, and the slot rests."""

    layout: str
    slot: int
    generation: int


class GiveMemoryBack(NamedTuple):
    """A free slot's memory is needed elsewhere. Late readers see another generation before they see zeros."""

    layout: str
    slot: int
    generation: int


Action = ReserveSlot | CommitSlot | TouchSlot | EvictBlock | DropBlock | FreeSlot | RetireSlot | GiveMemoryBack
