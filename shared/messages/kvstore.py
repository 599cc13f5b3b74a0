"""Requests to a node's KV store and its replies: block hashes and slots, never KV data.

The data lies in arenas, files in shared memory that the ranks map themselves; see `kvstore/core/layout.py`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.ids import ArenaId, Incarnation, InstanceId, LeaseId, ModelName, NodeId
from shared.messages.kv_events import ResetPrefixCache

KEEP_SECONDS = 120.0
"""For which a store keeps the blocks of a prompt that a client fetches later; see `Find.keep`."""


class KvLayout(Struct, frozen=True, array_like=True, kw_only=True):
    """What must be equal for two ranks to share blocks. Its fingerprint, as in `AttachReply`, is part of every key."""

    model: str
    """Hex digest of configuration and weights."""
    dtype: str
    """The data type of keys and values, as torch spells it ("bfloat16")."""
    layers: int
    kv_heads: int
    """The model's KV heads, regardless of how many a rank holds."""
    head_dim: int
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens of a block."""
    value_dim: int | None = None
    """Elements of a head's values; None: `head_dim`, that of its keys. Of latent attention these are the rotated key,
    and the keys are the latent."""


class LeaseOwner(Struct, frozen=True, array_like=True):
    """The process that holds leases. They end with it: the store receives its lifecycle."""

    instance: InstanceId
    incarnation: Incarnation


class Attach(Struct, frozen=True, array_like=True, tag=True):
    """Make room for blocks of this layout. Answered by `AttachReply` or `KvStoreRefusal`."""

    layout: KvLayout
    model: ModelName
    """The name by which coordinators know the model."""


class Find(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Requests the longest run of `hashes` from the first on. What is found is pinned under `lease`. Answered by
    `FindReply`."""

    layout: str
    owner: LeaseOwner
    lease: LeaseId
    hashes: bytes
    """16 bytes each, in the order of the chain."""
    deadline: float
    """Seconds that the reply may take; lower tiers and other nodes are searched only within it."""
    source: NodeId | None = None
    """A node whose store probably holds the blocks; None if none is known."""
    block_seconds: float = 0.0
    """Seconds that the engine takes to compute one of the blocks; `source` is not asked where its blocks are known to
    take longer. 0: not measured."""
    keep: bool = False
    """Whether the lease lasts for KEEP_SECONDS; nothing is found where too much is kept already."""


class FindAny(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Asks which of `hashes` are here, whatever else is: a `Find` under the same lease follows. Nothing is pinned.
    Answered by `FindAnyReply`."""

    layout: str
    owner: LeaseOwner
    lease: LeaseId
    hashes: bytes
    """16 bytes each, in any order."""


class Reserve(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Requests slots to write blocks to, under `lease`. Answered by `ReserveReply`."""

    layout: str
    owner: LeaseOwner
    lease: LeaseId
    hashes: bytes
    parents: bytes
    """16 bytes each: the hash of the block before it in the chain; zeros for a first block."""
    tokens: bytes
    """One byte each: the tokens in the block. 16 for a full block, fewer for a partial block of a hand-over."""


class Commit(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Every rank has written its heads of all slots of `lease`: they can be found from now on. Ends the lease. Answered
    by `CommitReply`."""

    layout: str
    owner: LeaseOwner
    lease: LeaseId


class Release(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Ends a lease: its blocks are unpinned, its uncommitted slots are free again. It has no reply."""

    layout: str
    owner: LeaseOwner
    lease: LeaseId
    drop: bytes = b""
    """Hashes (16 bytes each) of pinned blocks that nobody needs any more, such as a partial block that was handed
    over."""


class Prefetch(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """prefill engine → the KV store of the node where its request will be decoded: `source` is about to compute these
    blocks. The store copies each as soon as `source` has committed it, while the others are still being computed. It
    has no reply: whatever is not there when the request comes is looked up then."""

    layout: str
    source: NodeId
    hashes: bytes
    """16 bytes each, in the order of the chain; the last may be that of a partial block."""


KvStoreRequest = Attach | Find | Reserve | Commit | FindAny
"""The requests of schedulers that a store replies to; each message's docstring names its reply."""
KvStoreQuestion = KvStoreRequest | ResetPrefixCache
"""And those of coordinators."""


class AttachReply(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `Attach`: where the blocks of a layout lie."""

    layout: str
    """The fingerprint of the layout, which every other request names."""
    arena: ArenaId
    """Random for each file: a rank that has another file mapped maps the arena again."""
    path: str
    """The file's name inside the store's directory."""
    slots: int
    """Number of slots in the arena."""
    lease_seconds: float
    """A lease that is neither committed nor released runs out after this."""


class KvStoreRefusal(Struct, frozen=True, array_like=True, tag=True):
    """The layout is unknown (attach again), does not fit, or the store is stopping."""

    reason: str


class FindReply(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Reply to `Find`: the blocks that are here, pinned under the request's lease."""

    arena: ArenaId
    slots: bytes
    """Packed uint32, for the leading hashes."""
    generations: bytes
    """Packed uint64, one for each slot: as long as a slot has it, its contents are these."""
    from_lower: int = 0
    """How many of them came from a lower tier or another node for this request."""


class FindAnyReply(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `FindAny`."""

    here: bytes
    """A byte for each hash: 1 where its block is in the arena, whole, else 0."""


class ReserveReply(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Reply to `Reserve`: the slots that may be written to under the request's lease."""

    arena: ArenaId
    slots: bytes
    """Packed uint32, one for each hash; NO_SLOT where the block is there, is being written, or finds no room."""
    generations: bytes


class CommitReply(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `Commit`: what became of the lease's blocks."""

    blocks: int
    """How many are visible now; fewer than reserved where a rank's heads were missing or the lease had run out."""


KvStoreReply = AttachReply | KvStoreRefusal | FindReply | ReserveReply | CommitReply | FindAnyReply

NO_SLOT = 0xFFFFFFFF
"""The entry of `ReserveReply.slots` for a block without a slot."""


class TransferEndpoint(Struct, frozen=True, array_like=True):
    """Where the stores of other nodes fetch blocks by one transport. A transport that they do not know is ignored."""

    transport: str
    """Such as "tcp"."""
    address: str
    """Host and port."""


class LinkReport(Struct, frozen=True, array_like=True, kw_only=True):
    """How fast blocks come from the store of one other node, as the store that fetched them measured it."""

    source: NodeId
    bytes_per_second: Annotated[float, Meta(gt=0)]
    latency: float
    """Seconds from a request to its first block."""
