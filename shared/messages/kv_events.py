"""Messages about cached blocks to coordinators: numbered changes, and whole dumps on request."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import Incarnation, InstanceId, ModelName, NodeId


class KvSource(Struct, frozen=True, array_like=True, kw_only=True):
    """Who holds the blocks: an engine on its device, or a node's KV store for the engines there.

    Equal prompts have equal hashes under every model, so a source is of one model: a store numbers each apart.
    """

    instance: InstanceId
    model: ModelName
    node: NodeId | None
    store: bool = False


class KvEvents(Struct, frozen=True, array_like=True, kw_only=True):
    """What changed since the event before, in this order: `cleared`, `removed`, `stored`."""

    source: KvSource
    epoch: Incarnation
    number: int
    """Consecutive within the epoch, from 0. Who finds a gap, or an epoch begun, asks for a dump."""
    stored: bytes = b""
    """16-byte hashes."""
    removed: bytes = b""
    cleared: bool = False


class KvDumpRequest(Struct, frozen=True, array_like=True):
    """coordinator → engine, KV store: send a dump of everything that you hold."""

    coordinator: InstanceId
    """Where the dump is sent to."""


class KvDump(Struct, frozen=True, array_like=True, kw_only=True):
    """Everything that a source held right after event `number` (-1: before the first), in `parts` messages."""

    source: KvSource
    epoch: Incarnation
    number: int
    part: int
    parts: int
    hashes: bytes
