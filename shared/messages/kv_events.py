"""Messages about cached blocks to coordinators: numbered changes, and whole dumps on request."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import Count, Incarnation, InstanceId, ModelName, NodeId

KV_EVENT_SECONDS = 0.025
"""For which an engine or a KV store gathers changes of its blocks: steps may come faster, but coordinators need not
know sooner."""


class KvSource(Struct, frozen=True, array_like=True, kw_only=True):
    """The holder of the blocks: an engine on its device, or a node's KV store for the engines there.

    Equal prompts have equal hashes under every model, so a source belongs to one model; a store numbers each model's
    events separately.
    """

    instance: InstanceId
    model: ModelName
    node: NodeId | None
    store: bool = False


class KvEvents(Struct, frozen=True, array_like=True, kw_only=True):
    """What changed since the event before. Order of effect: `cleared`, `removed`, `stored`."""

    source: KvSource
    epoch: Incarnation
    number: Count
    """Consecutive within the epoch, from 0. A receiver that finds a gap or a new epoch requests a dump."""
    stored: bytes = b""
    """Hashes of blocks that can now be found, 16 bytes each."""
    removed: bytes = b""
    """Hashes of blocks that can no longer be found, 16 bytes each."""
    cleared: bool = False
    """The source dropped every block it held."""


class KvDumpRequest(Struct, frozen=True, array_like=True):
    """coordinator → engine, KV store: send a dump of everything that you hold."""

    coordinator: InstanceId
    """The instance that the dump is sent to."""


class KvDump(Struct, frozen=True, array_like=True, kw_only=True):
    """Everything that a source held right after event `number` (-1: before the first), in `parts` messages."""

    source: KvSource
    epoch: Incarnation
    number: int
    part: Count
    parts: Count
    hashes: bytes
    """Hashes of this part's blocks, 16 bytes each."""


class ResetPrefixCache(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → scheduler, KV store: forget which blocks hold what, so that nothing is found there that was
    computed until now. Answered by a `PrefixCacheReset`."""


class PrefixCacheReset(Struct, frozen=True, array_like=True, tag=True):
    """Reply to `ResetPrefixCache`: so many blocks held something."""

    blocks: int
