"""One frozen description of a stack, with every choice made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from deploy.supervisor.core.plan import Counts
from shared.ids import ModelName, NodeId


class OutsideBus(Struct, frozen=True, kw_only=True):
    """An external NATS server. Its users and permissions are its operator's."""

    urls: tuple[str, ...]
    """May hold user:password@, so they reach the services by environment, never by flag."""


class HostsSpec(Struct, frozen=True, kw_only=True):
    """For ranks on several hosts: where the first one is, and what the others need to join it."""

    master: str
    """The first host, as all can reach it: a name or an address."""
    port: int
    """Of its nats-server, unless there is one outside."""
    token: str | None = None
    """A secret of all hosts; None with a NATS server outside."""


class OutsideRedis(Struct, frozen=True, kw_only=True, tag=True):
    """An external Redis."""

    url: str
    """May hold a password, so it reaches the store by environment, never by flag."""


class EmbeddedRedis(Struct, frozen=True, kw_only=True, tag=True):
    """A redis-server of the stack's own, for this run only."""

    memory: int
    """Bytes; what was used least goes when they are full."""


class StoreSpec(Struct, frozen=True, kw_only=True):
    """The KV store of this host, for stacks that count one."""

    node: NodeId = NodeId("here")
    memory: int = 512 * 2**20
    """Bytes of shared memory."""
    redis: OutsideRedis | EmbeddedRedis | None = None


class StackSpec(Struct, frozen=True, kw_only=True):
    """A whole stack, with every choice made: what the supervisor runs."""

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
    pp_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: as even as can be."""
    store: StoreSpec = StoreSpec()
    settings: Mapping[str, Mapping[str, str]] = {}
    """Service → key → value, as flags of that service. The key `*` is for every service."""
    api_keys: tuple[str, ...] = ()
    """Keys of which clients must send one; none: every client is served."""
    outside_bus: OutsideBus | None = None
    hosts: HostsSpec | None = None
    """None: this one only."""
    namespace: str
    config: Path | None = None
    """A TOML file that every service reads."""
    log_level: str
    """Of the supervisor's own log."""
    drain_timeout: float
    """Seconds that requests get to finish at the end."""
    start_timeout: float
    """Seconds within which every process must become ready."""
    step_limit: float = 90.0
    """Seconds after which an engine that has work and finishes no step is restarted; above the scheduler's own."""
    silence_limit: float = 15.0
    """Seconds without a word after which a process that was ready is replaced."""
