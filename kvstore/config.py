"""What a KV store is told at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shared.config import ByteSize, ServiceConfig
from shared.ids import NodeId


class KvStoreConfig(ServiceConfig, frozen=True, kw_only=True):
    node: Annotated[
        str,
        Meta(pattern="^[A-Za-z0-9_-]{1,64}$", description="Name of this node; its engines are given the same."),
    ]
    directory: Annotated[
        str,
        Meta(min_length=1, description="Where the arenas are, in shared memory; its workers are given the same."),
    ]
    kvstore_memory: Annotated[ByteSize, Meta(description="Memory of all arenas together.")] = 2**30
    lease_seconds: Annotated[
        float, Meta(gt=0, description="Reservations and pins end after this unless they are ended before.")
    ] = 10.0

    def node_id(self) -> NodeId:
        return NodeId(self.node)

    def path(self) -> Path:
        return Path(self.directory).expanduser()
