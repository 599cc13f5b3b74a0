"""Settings of a KV store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from shared.addresses import is_loopback
from shared.config import ServiceConfig
from shared.ids import NodeId
from shared.machine.home import expanded
from shared.machine.numa import NumaMode
from shared.settings import ByteSize, ContainerVariable, Port, UpOption


class KvStoreConfig(ServiceConfig, frozen=True, kw_only=True):
    """Settings of one node's store. Raises ValueError where TLS files are not given all together or without a port, and
    where strangers could fetch blocks."""

    node: Annotated[
        str,
        Meta(pattern="^[A-Za-z0-9_-]{1,64}$", description="Name of this node; give its engines the same name."),
        UpOption("KV store", placed=True, unset="the host's name"),
    ]
    directory: Annotated[
        str,
        Meta(
            min_length=1, description="Directory of the arenas, in shared memory; give the node's workers the same one."
        ),
    ]
    kvstore_memory: Annotated[
        ByteSize,
        Meta(description="Shared memory for KV blocks, e.g. 4GiB; with `baton up` 0 means no store."),
        UpOption("KV store", placed=True, unset="512MiB, or half of what is free"),
        ContainerVariable(default="512MiB"),
    ] = 2**30
    numa: NumaMode = "auto"
    """The arena lies on all nodes with engines in turn, as engines of each of them read it."""
    lease_seconds: Annotated[float, Meta(gt=0, description="Seconds after which a reservation or pin expires.")] = 10.0
    kv_bandwidth: Annotated[
        # Not ByteSize, which has a least value of its own: a type may say that only once.
        Annotated[int, Meta(ge=2**20, extra={"unit": "bytes"})] | None,
        Meta(
            description="Bytes per second that all copies of KV blocks on this host may take together, e.g. 2GiB; "
            "none: no limit."
        ),
        UpOption("KV store"),
        ContainerVariable(),
    ] = None
    """Saves and loads of all ranks, what goes to other nodes and comes from there, SSD and Redis. They take memory
    bandwidth and processor time from decodes."""
    kv_ssd: Annotated[
        str | None,
        Meta(min_length=1, description="Folder on a local SSD for evicted blocks; it survives restarts."),
        UpOption("KV store"),
        ContainerVariable(),
    ] = None
    kv_ssd_size: Annotated[
        ByteSize,
        Meta(description="Bytes that the files in kv-ssd may take, e.g. 64GiB."),
        UpOption("KV store"),
        ContainerVariable(),
    ] = 16 * 2**30
    redis_url: Annotated[
        str | None,
        Meta(description="URL of a Redis for evicted blocks: redis://, rediss:// or unix://."),
        UpOption("KV store", placed=True, environment="BATON_REDIS_URL"),
        ContainerVariable(),
    ] = None
    redis_ttl: Annotated[float, Meta(gt=0, description="Seconds that Redis keeps a block after its last use.")] = 3600.0
    redis_inflight: Annotated[
        ByteSize, Meta(description="Bytes of blocks on their way to Redis; above it evicted blocks are dropped.")
    ] = 64 * 2**20
    kv_tiers: Annotated[
        tuple[str, ...],
        Meta(description="URLs of tiers that installed packages bring (docs/kv_tiers.md)."),
        UpOption("KV store", name="kv_tier"),
    ] = ()
    transfer_port: Annotated[
        Port | None, Meta(description="Port where the stores of other nodes fetch blocks; 0 picks one.")
    ] = None
    transfer_tcp_port: Annotated[
        Port, Meta(description="Port where they fetch blocks by the transport tcp; 0 picks one.")
    ] = 0
    transfer_transports: Annotated[
        tuple[Literal["tcp", "grpc"], ...],
        Meta(min_length=1, description="Transports by which blocks are sent and fetched, the preferred one first."),
    ] = ("tcp", "grpc")
    transfer_host: Annotated[str, Meta(description="Address that the transfer port listens on.")] = "127.0.0.1"
    transfer_advertise: Annotated[
        str | None,
        Meta(
            description="Host name under which other nodes reach this one; default: transfer-host or the host's name."
        ),
    ] = None
    transfer_tls_cert: Annotated[
        str | None, Meta(description="PEM certificate of this node for transfers, as server and client.")
    ] = None
    transfer_tls_key: Annotated[str | None, Meta(description="PEM key of the transfer certificate.")] = None
    transfer_tls_ca: Annotated[
        str | None, Meta(description="PEM certificate of the authority that signed the certificates of all stores.")
    ] = None

    insecure: Annotated[
        bool,
        Meta(description="Send blocks without TLS to whoever reaches transfer-host."),
        UpOption(),
    ] = False

    def __post_init__(self) -> None:
        given = [f is not None for f in (self.transfer_tls_cert, self.transfer_tls_key, self.transfer_tls_ca)]
        if any(given) and not all(given):
            raise ValueError("transfer_tls_cert, transfer_tls_key, transfer_tls_ca: all three, or none")
        if any(given) and self.transfer_port is None:
            raise ValueError("transfer_tls_cert: without transfer_port there is nothing to encrypt")
        if self.transfer_port is not None and not (any(given) or self.insecure or is_loopback(self.transfer_host)):
            raise ValueError(
                f"transfer_host {self.transfer_host}: whoever reaches it could fetch every block; give "
                "transfer_tls_cert, transfer_tls_key and transfer_tls_ca, or insecure"
            )

    def tls_files(self) -> tuple[str, str, str] | None:
        """Paths of certificate, key and authority; None where TLS is off."""
        cert, key, authority = self.transfer_tls_cert, self.transfer_tls_key, self.transfer_tls_ca
        return None if cert is None or key is None or authority is None else (cert, key, authority)

    def node_id(self) -> NodeId:
        """The node's name as its engines and other stores know it."""
        return NodeId(self.node)

    def path(self) -> Path:
        """The directory of arenas, with `~` expanded."""
        return expanded(self.directory)
