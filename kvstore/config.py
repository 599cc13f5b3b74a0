"""Settings of a KV store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shared.config import ServiceConfig
from shared.ids import NodeId
from shared.settings import ByteSize, ContainerVariable, Port, UpOption


class KvStoreConfig(ServiceConfig, frozen=True, kw_only=True):
    """Settings of one node's store. Raises ValueError where TLS files are not given all together, or without a port."""

    node: Annotated[
        str,
        Meta(pattern="^[A-Za-z0-9_-]{1,64}$", description="Name of this node; its engines are given the same."),
        UpOption("KV store", placed=True, unset="the host's name"),
    ]
    directory: Annotated[
        str,
        Meta(min_length=1, description="Where the arenas are, in shared memory; its workers are given the same."),
    ]
    kvstore_memory: Annotated[
        ByteSize,
        Meta(description="Shared memory for KV blocks, e.g. 4GiB; for `baton up` 0 is no store."),
        UpOption("KV store", placed=True, unset="512MiB, or half of what is free"),
        ContainerVariable(default="512MiB"),
    ] = 2**30
    lease_seconds: Annotated[
        float, Meta(gt=0, description="Reservations and pins end after this unless they are ended before.")
    ] = 10.0
    redis_url: Annotated[
        str | None,
        Meta(description="Redis for blocks that are evicted: redis://, rediss:// or unix://."),
        UpOption("KV store", placed=True, environment="BATON_REDIS_URL"),
        ContainerVariable(),
    ] = None
    redis_ttl: Annotated[float, Meta(gt=0, description="Seconds that Redis keeps a block after its last use.")] = 3600.0
    redis_inflight: Annotated[
        ByteSize, Meta(description="Blocks on their way to Redis; those evicted above that are dropped.")
    ] = 64 * 2**20
    transfer_port: Annotated[
        Port | None, Meta(description="Port where the stores of other nodes fetch blocks; 0 picks one.")
    ] = None
    transfer_host: Annotated[str, Meta(description="Address that the transfer port is opened on.")] = "127.0.0.1"
    transfer_advertise: Annotated[
        str | None, Meta(description="Host that other nodes reach this one by; by default transfer-host or the name.")
    ] = None
    transfer_tls_cert: Annotated[
        str | None, Meta(description="PEM certificate of this node for transfers, both ways.")
    ] = None
    transfer_tls_key: Annotated[str | None, Meta(description="Its key.")] = None
    transfer_tls_ca: Annotated[
        str | None, Meta(description="PEM of the authority that must have signed the certificates of all stores.")
    ] = None

    def __post_init__(self) -> None:
        given = [f is not None for f in (self.transfer_tls_cert, self.transfer_tls_key, self.transfer_tls_ca)]
        if any(given) and not all(given):
            raise ValueError("transfer_tls_cert, transfer_tls_key, transfer_tls_ca: all three, or none")
        if any(given) and self.transfer_port is None:
            raise ValueError("transfer_tls_cert: without transfer_port there is nothing to encrypt")

    def tls_files(self) -> tuple[str, str, str] | None:
        """Paths of certificate, key and authority; None where TLS is off."""
        cert, key, authority = self.transfer_tls_cert, self.transfer_tls_key, self.transfer_tls_ca
        return None if cert is None or key is None or authority is None else (cert, key, authority)

    def node_id(self) -> NodeId:
        """The node's name as its engines and other stores know it."""
        return NodeId(self.node)

    def path(self) -> Path:
        """The directory of arenas, with `~` expanded."""
        return Path(self.directory).expanduser()
