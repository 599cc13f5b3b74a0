"""One frozen description of a stack, with every choice made."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from deploy.supervisor.core.plan import MAX_COUNT, Counts, ProcessSpec, StartMethod, all_process_specs
from shared.ids import ClusterName, ModelName, NodeId
from shared.machine.gpu_topology import GpuTopology


class OutsideBus(Struct, frozen=True, kw_only=True):
    """An external NATS server. Its users and permissions are its operator's."""

    urls: tuple[str, ...]
    """One or more URLs. They may hold user:password@, so services get them by environment, never by flag."""


class TlsFiles(Struct, frozen=True, kw_only=True):
    """TLS of the first host's nats-server: paths of PEM files, absolute."""

    authority: str
    """What every host checks the server's certificate with."""
    certificate: str | None = None
    """On the first host; it names the host as the others reach it."""
    key: str | None = None
    """On the first host."""


class HostsSpec(Struct, frozen=True, kw_only=True):
    """Settings for ranks on several hosts: the address of the first host, and what the others need to join it."""

    master: str
    """Name or address of the first host, reachable from all others."""
    port: int
    """Port of the first host's nats-server; unused with an external NATS server."""
    token: str | None = None
    """A secret that all hosts share; None with an external NATS server."""
    tls: TlsFiles | None = None
    """None: the bus between the hosts is not encrypted."""


class ClusterSpec(Struct, frozen=True, kw_only=True):
    """This host's part in a stack of several hosts, each with engines of its own. Certificates and secrets lie in the
    folder `cluster` of the run directory."""

    node: NodeId
    """The host's name."""
    address: str
    """Where the other hosts reach it."""
    route_port: int
    """Where the hosts' nats-servers meet."""
    model_port: int = 0
    """Where the other hosts get its model; 0: nowhere."""
    join_port: int | None = None
    """On the first host: where others ask to join."""
    routes: tuple[str, ...] = ()
    """HOST:PORT of the nats-servers of the hosts that were there before; none on the first host."""
    first: str | None = None
    """The first host's name and address, for people; None on that one."""


FEDERATION_FOLDER = "federation"
"""In the run directory: certificates, the server's configuration, and whether the cluster is drained."""


class FederationSpec(Struct, frozen=True, kw_only=True):
    """This stack's part in a federation of several, each with a name and a bus of its own."""

    cluster: ClusterName
    host: str
    """Address where other clusters reach this one's federation server."""
    port: int
    others: tuple[str, ...] = ()
    """HOST:PORT of some of the other clusters; through each the rest are found."""
    secret: str
    """What all clusters share: by it they let each other in."""
    model: str
    """Fingerprint of the model's files, in hexadecimal."""
    of: str | None = None
    """On a host that joined: `address` of the first host's server, by which the cluster is known. None: its own."""

    @property
    def cluster_address(self) -> str:
        """HOST:PORT, by which the cluster is known to the others, on all its hosts."""
        return self.of or self.address

    @property
    def address(self) -> str:
        """HOST:PORT, by which this host's server is known to the others."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RaySpec(Struct, frozen=True, kw_only=True):
    """The Ray cluster that runs everything but gateways and servers."""

    address: str | None = None
    """HOST:PORT of its head; None: the one of this machine."""
    cpus_per_rank: int = 1
    """Of each worker rank, which computes with as many threads."""
    gpus_per_rank: Literal[0, 1, "auto"] = "auto"
    """auto: 1 if the cluster has any."""


class OutsideRedis(Struct, frozen=True, kw_only=True, tag=True):
    """A Redis server that is not the stack's own."""

    url: str
    """It may hold a password, so the store gets it by environment, never by flag."""


class EmbeddedRedis(Struct, frozen=True, kw_only=True, tag=True):
    """A redis-server of the stack's own, for this run only."""

    memory: int
    """Maximum bytes; when they are in use the least recently used entries are evicted."""


class StoreSpec(Struct, frozen=True, kw_only=True):
    """The KV store of this host."""

    node: NodeId = NodeId("here")
    memory: int = 512 * 2**20
    """Bytes of shared memory."""
    redis: OutsideRedis | EmbeddedRedis | None = None
    """The lower tier; None without Redis."""


class ModelSpec(Struct, frozen=True, kw_only=True):
    """One of several models that a stack serves, and the processes that work for it alone."""

    name: ModelName
    model: Path
    """A directory with config.json, resolved."""
    counts: Counts
    pp_layers: tuple[int, ...] = ()
    settings: Mapping[str, Mapping[str, str]] = {}
    """As in the stack's, with what was said of this model alone."""


class StackSpec(Struct, frozen=True, kw_only=True):
    """A whole stack with every choice made; the supervisor runs it."""

    name: str
    run_dir: Path
    model: Path
    """A directory with config.json, resolved."""
    served_model_name: ModelName
    host: str
    """Address of the HTTP port."""
    port: int
    """0 picks a free one."""
    counts: Counts = Counts()
    max_instances: int = MAX_COUNT
    """Processes of a kind, or engines of a pool, that it may be scaled to."""
    models: tuple[ModelSpec, ...] = ()
    """Each of several. `model` and `served_model_name` are then those of the first, and `counts` what all share."""
    pp_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: spread evenly."""
    store: StoreSpec = StoreSpec()
    settings: Mapping[str, Mapping[str, str]] = {}
    """Service → key → value, passed as flags to that service. The key `*` stands for every service."""
    api_keys: tuple[str, ...] = ()
    """Keys of which every client must send one; empty: clients need no key."""
    outside_bus: OutsideBus | None = None
    """An external NATS server; None: the supervisor starts its own."""
    hosts: HostsSpec | None = None
    """How hosts connect that the ranks of each engine are spread over; None if there is only this one."""
    cluster: ClusterSpec | None = None
    """None: no other host can join."""
    federation: FederationSpec | None = None
    """None: in no federation."""
    ray: RaySpec | None = None
    """None: all processes run on this machine."""
    gpus: GpuTopology | None = None
    """How this host's GPUs are joined; None: not known, and ranks get them in the order of their numbers."""
    numa_nodes: tuple[int, ...] = ()
    """The NUMA nodes that engines without GPUs are spread over; fewer than two: they are not."""
    namespace: str
    config: Path | None = None
    """A TOML file that every service reads; None without one."""
    log_level: str
    """Log level of the supervisor itself."""
    drain_timeout: float
    """Seconds that requests get to finish at the end."""
    orphan_timeout: float = 300.0
    """Seconds that everything goes on without a supervisor before it drains and ends."""
    start_timeout: float
    """Seconds within which every process must become ready."""
    step_limit: float = 90.0
    """Seconds without a finished step after which an engine that has work is restarted; longer than the scheduler's own
    limit."""
    start_method: StartMethod = "forkserver"
    ksm: bool = False
    """Whether the kernel may keep equal pages of its processes once."""
    silence_limit: float = 6.0
    """Seconds without a lifecycle message after which a process that was ready is replaced."""

    @property
    def forks(self) -> bool:
        """Whether processes of this host are forked from templates."""
        return self.start_method == "forkserver" and sys.platform == "linux" and self.ray is None

    @property
    def wants_certificates(self) -> bool:
        """Whether gateways ask their clients for a certificate."""
        return "ssl_ca_certs" in self.settings.get("gateway", {})

    @property
    def names(self) -> tuple[ModelName, ...]:
        """Of all models, for clients."""
        return tuple(each.name for each in self.models) or (self.served_model_name,)

    @property
    def model_counts(self) -> tuple[Counts, ...]:
        """What each of several models has."""
        return tuple(each.counts for each in self.models)

    def planned(self) -> list[ProcessSpec]:
        """Every process of this host, as the stack starts."""
        return all_process_specs(self.counts, self.model_counts)

    def of(self, process: ProcessSpec) -> StackSpec:
        """The stack as a process sees it: where it works for one of several models, with that one only."""
        own = next((each for each in self.models if each.name == process.model), None)
        if own is None:
            return self
        return replace(
            self,
            model=own.model,
            served_model_name=own.name,
            counts=own.counts,
            models=(),
            pp_layers=own.pp_layers,
            settings=own.settings,
        )
