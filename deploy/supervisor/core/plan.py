"""Which processes a stack consists of. The programs that run as these may die and be replaced."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from msgspec import Struct

from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import Role, Service

Pool = Literal["engines", "prefill", "decode"]
"""Engines (a scheduler and its ranks each) of one role."""
LightService = Literal["gateway", "tokenizer", "detokenizer", "coordinator"]
Scalable = Literal[LightService, Pool]
"""What a user counts."""
POOLS: tuple[Pool, ...] = get_args(Pool)
SCALABLE: tuple[Scalable, ...] = (*get_args(LightService), *POOLS)
MAX_COUNT = 256

ROLES: dict[Pool, Role] = {"engines": "mixed", "prefill": "prefill", "decode": "decode"}
ENGINE_NAMES: dict[Pool, str] = {"engines": "engine", "prefill": "prefill", "decode": "decode"}
DECODING: tuple[Pool, ...] = ("engines", "decode")
"""Pools that can see a request to its end; a stack has at least one engine of these."""


class Counts(Struct, frozen=True, kw_only=True):
    """How many of each there shall be."""

    gateway: int = 1
    tokenizer: int = 1
    detokenizer: int = 1
    coordinator: int = 1
    engines: int = 1
    """Those that do everything."""
    ranks: int = 1
    """Worker processes of each of `engines`."""
    stages: int = 1
    """Pipeline stages that they form."""
    prefill: int = 0
    prefill_ranks: int = 1
    prefill_stages: int = 1
    decode: int = 0
    decode_ranks: int = 1
    decode_stages: int = 1
    kvstore: int = 0
    """One for the host, or none."""
    hosts: int = 1
    """Those that the ranks of each engine are spread over."""
    host: int = 0
    """Which of them this one is. The first runs everything; the others run ranks, when the first one says so."""

    def of(self, what: Scalable) -> int:
        """How many of what a user counts: instances of a light service, engines of a pool."""
        return int(getattr(self, what))

    def ranks_of(self, pool: Pool) -> int:
        """Worker processes per engine."""
        match pool:
            case "engines":
                return self.ranks
            case "prefill":
                return self.prefill_ranks
            case "decode":
                return self.decode_ranks

    def stages_of(self, pool: Pool) -> int:
        """Pipeline stages per engine."""
        match pool:
            case "engines":
                return self.stages
            case "prefill":
                return self.prefill_stages
            case "decode":
                return self.decode_stages

    def ranks_here(self, pool: Pool) -> range:
        """Those of each engine that run on this host: as even as can be, neighbours together."""
        ranks = self.ranks_of(pool)
        return range(self.host * ranks // self.hosts, (self.host + 1) * ranks // self.hosts)

    @property
    def leads(self) -> bool:
        """Whether this is the first host."""
        return self.host == 0

    @property
    def all_engines(self) -> int:
        """Engines of all pools."""
        return sum(self.of(pool) for pool in POOLS)

    @property
    def all_ranks(self) -> int:
        """On this host."""
        return sum(self.of(pool) * len(self.ranks_here(pool)) for pool in POOLS)


class ProcessSpec(NamedTuple):
    """What one process of the stack is, whatever becomes of the program that runs as it: a restart changes nothing
    here."""

    service: Service
    instance: InstanceId
    number: int
    """Counts the processes of a kind from 1; the newest has the highest."""
    kind: Scalable | None
    """What a user counts it by; None for what he does not count."""
    engine: EngineId | None = None
    pool: Pool | None = None
    """Of its engine."""
    rank: int | None = None


def process_specs(what: Scalable, number: int, counts: Counts) -> list[ProcessSpec]:
    """The processes of the `number`-th of a kind: one for a light service, 1 + its ranks for an engine."""
    match what:
        case "engines" | "prefill" | "decode":
            process_specs = _engine_processes(what, number, counts.ranks_here(what))
            return process_specs if counts.leads else process_specs[1:]
        case _:
            return [ProcessSpec(what, InstanceId(f"{what}-{number}"), number, what)]


def _engine_processes(pool: Pool, number: int, ranks: range) -> list[ProcessSpec]:
    engine = EngineId(f"{ENGINE_NAMES[pool]}-{number}")
    scheduler = ProcessSpec("scheduler", InstanceId(engine), number, pool, engine, pool)
    return [
        scheduler,
        *(ProcessSpec("worker", InstanceId(f"{engine}-rank{r}"), number, pool, engine, pool, r) for r in ranks),
    ]


def all_process_specs(counts: Counts) -> list[ProcessSpec]:
    """Slowest starters first."""
    if not counts.leads:
        return _counted(POOLS, counts)
    light: tuple[Scalable, ...] = ("gateway", "tokenizer", "coordinator", "detokenizer")
    return [
        *_counted(POOLS, counts),
        *(ProcessSpec("kvstore", InstanceId(f"kvstore-{n}"), n, None) for n in range(1, counts.kvstore + 1)),
        *_counted(light, counts),
    ]


def _counted(kinds: tuple[Scalable, ...], counts: Counts) -> list[ProcessSpec]:
    return [
        process for what in kinds for n in range(1, counts.of(what) + 1) for process in process_specs(what, n, counts)
    ]


STOP_ORDER: tuple[frozenset[Service], ...] = (
    frozenset({"gateway"}),
    frozenset({"tokenizer", "coordinator", "scheduler", "detokenizer"}),
    frozenset({"worker"}),
    frozenset({"kvstore"}),
)
"""Gateways first: they finish their requests, for which they need all the others."""


def stop_stage(service: Service) -> int:
    """When in STOP_ORDER the service ends."""
    return next(i for i, services in enumerate(STOP_ORDER) if service in services)
