"""What a node's KV store hears, and what it answers: short questions by block hashes and slots, never KV data.

The data lies in arenas, files in shared memory that the ranks map themselves; see `kvstore/core/layout.py`.
"""

from __future__ import annotations

from msgspec import Struct

from shared.ids import ArenaId, Incarnation, InstanceId, LeaseId, ModelName, NodeId


class KvLayout(Struct, frozen=True, array_like=True, kw_only=True):
    """What must be equal for two ranks to share blocks. Its fingerprint, as in `Attached`, is part of every key."""

    model: str
    """Hex digest of configuration and weights."""
    dtype: str
    """Of keys and values, as torch spells it ("bfloat16")."""
    layers: int
    kv_heads: int
    """All of them, whatever share a rank holds."""
    head_dim: int


class Owner(Struct, frozen=True, array_like=True):
    """Whoever holds leases. They end with its process: the store hears lifecycles."""

    instance: InstanceId
    incarnation: Incarnation


class Attach(Struct, frozen=True, array_like=True, tag=True):
    """Make room for blocks of this layout. Answered by `Attached` or `NotServed`."""

    layout: KvLayout
    model: ModelName
    """For the coordinators, who know blocks by model."""


class Find(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The longest run of `hashes` from the first on; what is found is pinned under `lease`. Answered by `Found`."""

    layout: str
    owner: Owner
    lease: LeaseId
    hashes: bytes
    """16 bytes each, in the order of the chain."""
    deadline: float
    """Seconds that the answer may take; lower tiers and other nodes are asked only as long as it lasts."""
    source: NodeId | None = None
    """A node that is likely to hold them."""


class Reserve(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Slots to write blocks to, under `lease`. Answered by `Reserved`."""

    layout: str
    owner: Owner
    lease: LeaseId
    hashes: bytes
    parents: bytes
    """16 bytes each: the hash before it in the chain; zeros where there is none."""
    tokens: bytes
    """One byte each: 16 for a full block, fewer for one handed over by request."""


class Commit(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Every rank has written its heads of all slots of `lease`: show them. Ends the lease. Answered by `Committed`."""

    layout: str
    owner: Owner
    lease: LeaseId


class Release(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """One way. Ends a lease: pins are taken off, what was reserved and not committed is free again. With `drop` the
    pinned blocks are of no use to anybody any more (a partial block that was handed over)."""

    layout: str
    owner: Owner
    lease: LeaseId
    drop: bytes = b""
    """Hashes."""


KvStoreQuestion = Attach | Find | Reserve | Commit
"""What a store answers; see each."""


class Attached(Struct, frozen=True, array_like=True, tag=True):
    layout: str
    """The fingerprint, which every other question names."""
    arena: ArenaId
    """Drawn anew for each file: whoever mapped another maps it again."""
    path: str
    """The file's name inside the store's directory."""
    slots: int
    lease_seconds: float
    """A lease that is neither committed nor released runs out after this."""


class NotServed(Struct, frozen=True, array_like=True, tag=True):
    """The layout is unknown (attach again), does not fit, or the store is stopping."""

    reason: str


class Found(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    arena: ArenaId
    slots: bytes
    """Packed uint32, for the leading hashes."""
    generations: bytes
    """Packed uint64, one for each slot: as long as a slot has it, its contents are these."""
    from_lower: int = 0
    """How many of them came from a lower tier or another node for this question."""


class Reserved(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    arena: ArenaId
    slots: bytes
    """Packed uint32, one for each hash; NO_SLOT where the block is there, is being written, or finds no room."""
    generations: bytes


class Committed(Struct, frozen=True, array_like=True, tag=True):
    blocks: int
    """How many are visible now; fewer than reserved where a rank's heads were missing or the lease had run out."""


KvStoreAnswer = Attached | NotServed | Found | Reserved | Committed

NO_SLOT = 0xFFFFFFFF
"""In `Reserved.slots`."""
