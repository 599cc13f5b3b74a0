"""What the user asked for: one frozen description of a stack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from deploy.supervisor.core.plan import Counts
from shared.ids import ModelName, NodeId


class OutsideBus(Struct, frozen=True, kw_only=True):
    """A NATS server that somebody else runs. Its users and permissions are theirs."""

    urls: tuple[str, ...]
    """May hold user:password@, so they reach the services by environment, never by flag."""


class HostsSpec(Struct, frozen=True, kw_only=True):
    """For ranks on several hosts: where the first one is, and what the others need to join it."""

    master: str
    """The first host, as all can reach it: a name or an address."""
    port: int
    """Of its nats-server, unless there is one outside."""
    token: str | None = None
    """What all hosts know and nobody else; None with a NATS server outside."""


class OutsideRedis(Struct, frozen=True, kw_only=True, tag=True):
    """A Redis that somebody else runs."""

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
    name: str
    run_dir: Path
    model: Path
    """A directory with config.json, resolved."""
    served_model_name: ModelName
    host: str = "127.0.0.1"
    port: int = 8000
    """0 picks a free one."""
    counts: Counts = Counts()
    pp_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: as even as can be."""
    store: StoreSpec = StoreSpec()
    settings: Mapping[str, Mapping[str, str]] = {}
    """Service → key → value, as flags of that service. The key `*` speaks to every service."""
    api_keys: tuple[str, ...] = ()
    """What clients must show to the gateways; none: everybody is served."""
    outside_bus: OutsideBus | None = None
    hosts: HostsSpec | None = None
    """None: this one only."""
    namespace: str = "baton"
    config: Path | None = None
    """A TOML file that every service reads."""
    log_level: str = "info"
    drain_timeout: float = 30.0
    start_timeout: float = 600.0
    """Seconds until everybody must have been ready once."""
    step_limit: float = 90.0
    """Seconds after which an engine that has work and finishes no step is restarted; above the scheduler's own."""
    silence_limit: float = 15.0
    """Seconds without a word after which a process that was ready is replaced."""
