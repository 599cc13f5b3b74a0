"""What the store's core has done to the arenas: the shell carries it out, in this order."""

from __future__ import annotations

from typing import NamedTuple

from shared.blocks import BlockHash


class Claimed(NamedTuple):
    """A slot is reserved for this block, of which no head counts as written."""

    layout: str
    slot: int
    generation: int
    hash: BlockHash
    parent: BlockHash
    tokens: int
    fresh: bool
    """The slot has no memory yet."""


class Shown(NamedTuple):
    """Committed: whoever asks finds it from now on."""

    layout: str
    slot: int
    hash: BlockHash
    tokens: int
    used: int


class Touched(NamedTuple):
    """Used again; `used` is the order of use."""

    layout: str
    slot: int
    used: int


class Evicted(NamedTuple):
    """Had to make room: offer it to the tiers below before the slot is used again."""

    layout: str
    slot: int
    hash: BlockHash
    tokens: int
    age: float
    """Seconds since it was last used."""


class Dropped(NamedTuple):
    """A committed block is of no use any more, or its contents are not what they were."""

    layout: str
    slot: int
    hash: BlockHash
    tokens: int


class Freed(NamedTuple):
    """A slot is free that had shown no block."""

    layout: str
    slot: int


class Retired(NamedTuple):
    """A reservation ended while its writers may still write: they see another generation, and the slot rests."""

    layout: str
    slot: int
    generation: int


class GivenBack(NamedTuple):
    """A free slot's memory is needed elsewhere. Late readers see another generation before they see zeros."""

    layout: str
    slot: int
    generation: int


Action = Claimed | Shown | Touched | Evicted | Dropped | Freed | Retired | GivenBack
