"""Which processes a stack consists of. The programs that run as these may die and be replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from msgspec import Struct

from shared.ids import EngineId, InstanceId, ModelName, NodeId
from shared.messages.lifecycle import Role, Service

Pool = Literal["engines", "prefill", "decode"]
"""Engines (a scheduler and its ranks each) of one role."""
LightService = Literal["gateway", "tokenizer", "encoder", "detokenizer", "coordinator"]
Scalable = Literal[LightService, Pool]
"""What a user counts."""
POOLS: tuple[Pool, ...] = get_args(Pool)
SCALABLE: tuple[Scalable, ...] = (*get_args(LightService), *POOLS)
OF_A_MODEL: frozenset[Scalable] = frozenset({"tokenizer", "encoder", "detokenizer", *POOLS})
"""What each model of a stack has for itself; all else serves all of them."""
MAX_COUNT = 256
"""Processes of a kind, or engines of a pool, that a stack may be scaled to anywhere."""
MAX_PREFIX = 40
"""Characters of a model's name that names of its processes begin with."""

LauncherName = Literal["local", "ray"]
StartMethod = Literal["forkserver", "spawn"]
"""forkserver: workers are forked from a process that has imported what they need. spawn: each is started by itself."""

ROLES: dict[Pool, Role] = {"engines": "mixed", "prefill": "prefill", "decode": "decode"}
ENGINE_NAMES: dict[Pool, str] = {"engines": "engine", "prefill": "prefill", "decode": "decode"}
DECODING: tuple[Pool, ...] = ("engines", "decode")
"""Pools that can finish a request; a stack has at least one engine in them."""


class Counts(Struct, frozen=True, kw_only=True):
    """How many processes of each kind a stack shall have."""

    gateway: int = 1
    tokenizer: int = 1
    encoder: int = 0
    """Only models that take images have any."""
    detokenizer: int = 1
    coordinator: int = 1
    engines: int = 1
    """Engines that both prefill and decode."""
    ranks: int = 1
    """Worker processes of each engine of the pool `engines`."""
    stages: int = 1
    """Pipeline stages of each engine of the pool `engines`."""
    data_parallel: int = 1
    """So many engines of the pool `engines` are a data-parallel group each: those whose numbers follow each other."""
    context_parallel: int = 1
    """So many ranks of each engine that computes prompts share their rows, and have all weights each."""
    prefill: int = 0
    prefill_ranks: int = 1
    prefill_stages: int = 1
    decode: int = 0
    decode_ranks: int = 1
    decode_stages: int = 1
    hands_over: bool = True
    """Whether engines may hand requests over: not where the model attends to an encoder's rows, or is an encoder."""
    standby: int = 0
    """Engines of each pool that has any which are kept loaded beside those that serve."""
    kvstore: int = 0
    """KV stores on this host: 1 or 0."""
    colocate: bool = False
    """Whether an engine's processes are one, which is a coordinator and a detokenizer as well: see
    `ProcessSpec.colocated`."""
    engine_stores: bool = False
    """Whether each engine has a KV store of its own, as engines do that run on other machines."""
    hosts: int = 1
    """Number of hosts that the ranks of each engine are spread over."""
    host: int = 0
    """The index of this host. Host 0 runs all services; the others run ranks, when host 0 requests them."""
    joined: NodeId | None = None
    """The name of this host where it joined another host's stack: its processes' names begin with it. None: the first
    host, or the only one."""
    model: ModelName | None = None
    """Which of several models all of these work for: their names begin with its name. None: there is one model, or
    these are what several share."""

    def of(self, what: Scalable) -> int:
        """The number of instances of a light service, or of engines of a pool."""
        return int(getattr(self, what))

    def pool_refusal(self, what: Scalable) -> str | None:
        """Why there can be no such pool; None where there can."""
        if self.hands_over or what not in ("prefill", "decode"):
            return None
        return f"{what}: an encoder reads the model's prompts, and engines hand nothing over; engines can be scaled"

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

    def group_size_of(self, pool: Pool) -> int:
        """Engines of each data-parallel group of a pool as the stack is started; 1: each shares nothing with others."""
        return self.data_parallel if pool == "engines" else 1

    def context_parallel_of(self, pool: Pool) -> int:
        """Ranks of each engine of a pool that share the rows of prompts; 1: each shares layers, or is alone."""
        return 1 if pool == "decode" else self.context_parallel

    def ranks_here(self, pool: Pool) -> range:
        """The ranks of each engine of a pool that run on this host: consecutive, and as evenly spread as possible."""
        ranks = self.ranks_of(pool)
        return range(self.host * ranks // self.hosts, (self.host + 1) * ranks // self.hosts)

    def named(self, name: str) -> InstanceId:
        """The name of a process or an engine of this host, like no other host's, and no other model's."""
        prefix = self.joined if self.model is None else name_prefix(self.model)
        return InstanceId(name if prefix is None else f"{prefix}-{name}")

    @property
    def leads(self) -> bool:
        """Whether this host decides where its engines' ranks meet: not one that only runs ranks for the first host."""
        return self.host == 0

    def standby_of(self, pool: Pool) -> int:
        """Engines of a pool that stand by; none where the stack starts without any of its kind."""
        return self.standby if self.of(pool) else 0

    @property
    def all_engines(self) -> int:
        """Engines of all pools, and those that stand by."""
        return sum(self.of(pool) + self.standby_of(pool) for pool in POOLS)

    @property
    def all_ranks(self) -> int:
        """Worker processes on this host."""
        return sum((self.of(pool) + self.standby_of(pool)) * len(self.ranks_here(pool)) for pool in POOLS)


class ProcessSpec(NamedTuple):
    """The identity of one process of the stack; it stays the same over restarts."""

    service: Service
    instance: InstanceId
    number: int
    """Index among the processes of its kind, from 1; the newest has the highest."""
    kind: Scalable | None
    """The kind that `baton scale` counts it by; None if it cannot be scaled."""
    engine: EngineId | None = None
    pool: Pool | None = None
    """The pool of its engine; None for a service that belongs to no engine."""
    rank: int | None = None
    """The rank of a worker; None for other services."""
    model: ModelName | None = None
    """Which of several models it works for; None: there is one, or it serves all of them."""
    colocated: bool = False
    """Of a scheduler: whether its process also runs the actors that `hosted` lists."""
    group: EngineId | None = None
    """The first engine of its engine's data-parallel group, whose ranks start and end together; its own engine where
    that shares nothing with others. None for a service that belongs to no engine."""
    group_size: int = 1
    """Engines of that group."""
    group_index: int = 0
    """The number of its engine in the group, from 0."""

    @property
    def imports_torch(self) -> bool:
        """Whether it is forked from what has PyTorch, which no other process is to carry about."""
        return self.service in ("worker", "encoder") or self.colocated

    @property
    def hosted(self) -> tuple[ProcessSpec, ...]:
        """What else runs in this process: the engine's rank, and a coordinator and a detokenizer of its own. None of
        them is started, ended or counted by itself."""
        if not self.colocated:
            return ()
        rank = self._replace(service="worker", instance=InstanceId(f"{self.engine}-rank0"), rank=0, colocated=False)
        coordinator = InstanceId(f"{self.engine}-coordinator")
        detokenizer = InstanceId(f"{self.engine}-detokenizer")
        return (
            rank,
            ProcessSpec("coordinator", coordinator, self.number, None),
            ProcessSpec("detokenizer", detokenizer, self.number, None, model=self.model),
        )


def name_prefix(model: ModelName) -> str:
    """What the names of a model's processes begin with: its own, as far as it can be part of a subject."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", model)[:MAX_PREFIX]


def process_specs(what: Scalable, number: int, counts: Counts) -> list[ProcessSpec]:
    """The processes of the `number`-th instance of a kind: one for a light service, a scheduler, its ranks and its
    store, if it has one, for an engine."""
    match what:
        case "engines" | "prefill" | "decode":
            process_specs = _engine_processes(what, number, counts)
            return process_specs if counts.leads else process_specs[1:]
        case _:
            return [ProcessSpec(what, counts.named(f"{what}-{number}"), number, what, model=counts.model)]


def _engine_processes(pool: Pool, number: int, counts: Counts) -> list[ProcessSpec]:
    named, ranks = ENGINE_NAMES[pool], counts.ranks_here(pool)
    engine = EngineId(counts.named(f"{named}-{number}"))
    size = counts.group_size_of(pool)
    index = (number - 1) % size
    group = EngineId(counts.named(f"{named}-{number - index}"))
    scheduler = ProcessSpec(
        *("scheduler", InstanceId(engine), number, pool, engine, pool),
        model=counts.model,
        group=group,
        group_size=size,
        group_index=index,
    )
    if counts.colocate:
        return [scheduler._replace(colocated=True)]
    workers = (scheduler._replace(service="worker", instance=InstanceId(f"{engine}-rank{r}"), rank=r) for r in ranks)
    stores = [InstanceId(f"{engine}-kvstore")] if counts.engine_stores else []
    return [
        scheduler,
        *workers,
        *(scheduler._replace(service="kvstore", instance=store) for store in stores),
    ]


def all_process_specs(counts: Counts, models: Iterable[Counts] = ()) -> list[ProcessSpec]:
    """Every process of this host, those that take longest to start first. `models`: what each of several models has."""
    if own := [process for each in models for process in all_process_specs(each)]:
        return [*own, *all_process_specs(counts)]
    if not counts.leads:
        return _counted(POOLS, counts)
    light: tuple[Scalable, ...] = ("gateway", "tokenizer", "coordinator", "detokenizer")
    return [
        *_counted(POOLS, counts),
        *_counted(("encoder",), counts),
        *(ProcessSpec("kvstore", counts.named(f"kvstore-{n}"), n, None) for n in range(1, counts.kvstore + 1)),
        *_counted(light, counts),
    ]


def _counted(kinds: tuple[Scalable, ...], counts: Counts) -> list[ProcessSpec]:
    return [
        process for what in kinds for n in range(1, counts.of(what) + 1) for process in process_specs(what, n, counts)
    ]


STOP_ORDER: tuple[frozenset[Service], ...] = (
    frozenset({"gateway"}),
    frozenset({"tokenizer", "encoder", "coordinator", "scheduler", "detokenizer"}),
    frozenset({"worker"}),
    frozenset({"kvstore"}),
)
"""Groups of services in the order in which they stop. Gateways stop first: to finish their requests they need all the
others."""


def stop_stage(service: Service) -> int:
    """The index of the service's group in STOP_ORDER."""
    return next(i for i, services in enumerate(STOP_ORDER) if service in services)
