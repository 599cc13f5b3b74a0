"""The operators' endpoints: a NATS micro service, JSON in and out. `nats req baton.admin.list ''`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from services.coordinator.engine_admin import EngineAdmin
from services.coordinator.operator_requests import parse
from services.coordinator.prefix_tree import PrefixNode
from shared import topics
from shared.bus import Bus, Endpoint, EndpointError, NoResponders, ReplyError, ReplyTimeout
from shared.ids import InstanceId, ModelName, NodeId, checked_instance
from shared.messages.lifecycle import (
    Drain,
    EngineReport,
    InstanceControl,
    Lifecycle,
    Role,
    Service,
    StoreReport,
    Undrain,
)
from shared.messages.supervisor import (
    ProcessStruck,
    Scale,
    ScaleRefusal,
    ScaleReply,
    ScaleResult,
    StrikeProcess,
    StrikeRefusal,
    StrikeReply,
    SupervisorOrder,
)
from shared.packing import to_plain
from shared.registry import Registry
from shared.topics import Topic

NAME = "baton-admin"
VERSION = "1.0.0"
DESCRIPTION = "Operates a Baton cluster: list, drain, undrain, scale, strike, reset_prefix_cache, pause, sleep."

MAX_INSTANCES = 256
"""The most instances of one service that an operator can request."""

MIN_PAUSE, MAX_PAUSE = 0.1, 60.0
"""Seconds that an operator can have a process stand still."""

Scalable = Literal["tokenizer", "encoder", "detokenizer", "gateway", "coordinator", "engines", "prefill", "decode"]
POOLS: dict[str, Role] = {"engines": "mixed", "prefill": "prefill", "decode": "decode"}
"""Names for all engines of a role, where an instance is expected."""


class ListRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.list`: everything, or one service."""

    service: str | None = None


class PrefixesRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.prefixes`."""


class DrainRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.drain`; `force` drains the last of its kind, too."""

    instance: str
    force: bool = False


class UndrainRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.undrain`."""

    instance: str


class ScaleRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.scale`: how many of a service there shall be on a host; without one, on the first. `model`:
    for which of several models."""

    service: Scalable
    count: int
    host: str | None = None
    model: ModelName | None = None
    data_parallel_size: int | None = None
    """Engines of each data-parallel group from now on; None: as many as before."""
    one_group: bool = False
    """Where engines share experts: all of them are to be one group."""


class StrikeRequest(Struct, forbid_unknown_fields=True):
    """The body of `admin.strike`: what is done to a process of a host; without one, of that which has it."""

    instance: str
    fault: Literal["kill", "pause"]
    seconds: float = 5.0
    host: str | None = None


class Admin:
    """Answers operators from the registry, which the coordinator's core owns, and sends what they ask for."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        scale_timeout: float,
        prefixes: Callable[[], Sequence[PrefixNode]] = lambda: (),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`prefixes`: the tree of the prompts that this coordinator placed last."""
        self._prefixes = prefixes
        self._bus = bus
        self._registry = registry
        self._engines = EngineAdmin(bus, registry)
        self._scale_timeout = scale_timeout
        self._wall_clock = wall_clock

    def endpoints(self) -> dict[str, Endpoint]:
        """By subject, without the namespace. Each raises EndpointError for what it refuses, with an HTTP status."""
        return {
            f"{topics.ADMIN}.list": self.list,
            f"{topics.ADMIN}.drain": self.drain,
            f"{topics.ADMIN}.undrain": self.undrain,
            f"{topics.ADMIN}.scale": self.scale,
            f"{topics.ADMIN}.strike": self.strike,
            f"{topics.ADMIN}.prefixes": self.prefixes,
            **self._engines.endpoints(),
        }

    async def list(self, body: bytes) -> bytes:
        """`{}` or `{"service": "scheduler"}` → `{"instances": [...]}`, everything that is known of each."""
        request = parse(body, ListRequest)
        if request.service is not None and request.service not in get_args(Service):
            raise EndpointError(400, f"service: {request.service!r} is none of {', '.join(get_args(Service))}")
        now = self._wall_clock()
        shown = [life for life in self._registry.all() if request.service in (None, life.service)]
        shown.sort(key=lambda life: (life.service, life.instance))
        return msgspec.json.encode({"instances": [_describe(life, now) for life in shown]})

    async def prefixes(self, body: bytes) -> bytes:
        """`{}` → `{"prefixes": [...]}`: what the prompts that this coordinator placed last have in common, the heaviest
        first and each behind its parent, and which engines and KV stores hold it."""
        parse(body, PrefixesRequest)
        return msgspec.json.encode({"prefixes": [node._asdict() for node in self._prefixes()]})

    async def drain(self, body: bytes) -> bytes:
        """`{"instance": "engine-1", "force": false}`: it finishes what it has and takes no more. Also of a whole pool,
        `{"instance": "prefill"}`."""
        request = parse(body, DrainRequest)
        found = self._find(request.instance)
        refused = drain_refusal(self._registry, found)
        if refused is not None and not request.force:
            raise EndpointError(409, refused)
        return await self._control(request.instance, found, Drain(), "drain")

    async def undrain(self, body: bytes) -> bytes:
        """`{"instance": "engine-1"}`: it takes requests again. Also of a whole pool."""
        instance = parse(body, UndrainRequest).instance
        return await self._control(instance, self._find(instance), Undrain(), "undrain")

    async def scale(self, body: bytes) -> bytes:
        """`{"service": "tokenizer", "count": 2, "host": "gpu-2"}` → what that host's supervisor starts and stops for
        it."""
        request = parse(body, ScaleRequest)
        if not 0 <= request.count <= MAX_INSTANCES:
            raise EndpointError(400, f"count: {request.count} is not allowed; 0 to {MAX_INSTANCES} are")
        size = request.data_parallel_size
        if size is not None and not 1 <= size <= MAX_INSTANCES:
            raise EndpointError(400, f"data_parallel_size: {size} is not allowed; 1 to {MAX_INSTANCES} are")
        order = Scale(request.service, request.count, request.model, size, request.one_group)
        answer: ScaleReply = await self._ask_supervisor(request.host, order, ScaleReply)
        match answer:
            case ScaleResult():
                return msgspec.json.encode({"service": request.service, **msgspec.structs.asdict(answer)})
            case ScaleRefusal(message):
                raise EndpointError(409, message)

    async def strike(self, body: bytes) -> bytes:
        """`{"instance": "engine-1-rank0", "fault": "pause", "seconds": 5, "host": "gpu-2"}`: the process is killed, or
        stands still for so long, to see what follows."""
        request = parse(body, StrikeRequest)
        if not MIN_PAUSE <= request.seconds <= MAX_PAUSE:
            allowed = f"{MIN_PAUSE:g} to {MAX_PAUSE:g} are"
            raise EndpointError(400, f"seconds: {request.seconds:g} is not allowed; {allowed}")
        order = StrikeProcess(InstanceId(request.instance), request.fault, request.seconds)
        hosts = _hosts_of(request.instance) if request.host is None else [request.host]
        refused: EndpointError | None = None
        for host in hosts:
            try:
                answer: StrikeReply = await self._ask_supervisor(host, order, StrikeReply)
            except EndpointError as error:  # there is no such host, or it is gone: another may have the process
                refused = refused or error
                continue
            match answer:
                case ProcessStruck(pid):
                    return msgspec.json.encode({"instance": request.instance, "fault": request.fault, "pid": pid})
                case StrikeRefusal(message):
                    refused = refused or EndpointError(404, message)
        assert refused is not None, "at least one host is asked"
        raise refused

    async def _ask_supervisor(self, host: str | None, order: SupervisorOrder, reply_type: Any) -> Any:
        """The answer of that host's supervisor, or of the first host's. Raises EndpointError."""
        try:
            return await self._bus.request(_scaling_of(host), order, reply_type, self._scale_timeout)
        except NoResponders:
            if host is not None:
                raise EndpointError(404, f"host: no supervisor of a host {host!r} is there") from None
            raise EndpointError(503, "no supervisor listens; scale where the processes were started") from None
        except (ReplyTimeout, ReplyError) as error:
            raise EndpointError(503, f"the supervisor did not answer: {error}") from None

    def _find(self, name: str) -> Sequence[Lifecycle]:
        """The instance of that name, or the engines of the pool."""
        everyone = list(self._registry.all())
        found = [life for life in everyone if life.instance == name] or _of_pool(everyone, POOLS.get(name))
        if not found:
            known = ", ".join(sorted({life.instance for life in everyone})) or "none"
            raise EndpointError(404, f"instance: {name!r} is not known; known are {known}")
        return found

    async def _control(self, name: str, found: Sequence[Lifecycle], message: InstanceControl, verb: str) -> bytes:
        """`phase` is that of the first, `load` the requests of all of them."""
        for instance in {life.instance for life in found}:
            await self._bus.publish(topics.instance_control(InstanceId(instance)), message)
        return msgspec.json.encode(
            {
                "instance": name,
                "instances": sorted({life.instance for life in found}),
                "service": found[0].service,
                "asked": verb,
                "phase": found[0].phase,
                "load": sum(life.load for life in found),
            }
        )


def _of_pool(everyone: Sequence[Lifecycle], role: Role | None) -> list[Lifecycle]:
    """Without those that stand by, of which a pool has as many as were wished for."""
    engines = [life for life in everyone if life.engine is not None and not life.standby]
    return [life for life in engines if role is not None and life.engine is not None and life.engine.role == role]


def _hosts_of(instance: str) -> list[str | None]:
    """The hosts that may have a process of this name. None, the first host: names of all others' processes begin with
    their hosts' names, which may have hyphens of their own."""
    parts = instance.split("-")
    return [None, *("-".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))]


def _scaling_of(host: str | None) -> Topic[SupervisorOrder]:
    if host is None:
        return topics.scaling()
    try:
        return topics.host_scaling(NodeId(checked_instance(host)))
    except ValueError:
        raise EndpointError(400, f"host: {host!r} is no host; 1 to 64 of A-Z a-z 0-9 _ - are allowed") from None


def _describe(life: Lifecycle, now: float) -> dict[str, Any]:
    """`life` as JSON with field names, for people and scripts."""
    return {
        "service": life.service,
        "instance": life.instance,
        "pid": life.pid,
        "host": life.host,
        "phase": life.phase,
        "standby": life.is_standby,
        "load": life.load,
        "uptime": round(max(0.0, now - life.started), 1),
        "progress": life.progress,
        "metrics_port": life.metrics_port,
        "role": life.engine.role if life.engine is not None else None,
        "node": _node_of(life),
        "engine": to_plain(life.engine),
        "worker": to_plain(life.worker),
        "store": _describe_store(life.store),
    }


def _node_of(life: Lifecycle) -> NodeId | None:
    """Where an engine finds its KV store, or where a KV store is."""
    report = life.engine or life.store
    return report.node if report is not None else None


def _describe_store(report: StoreReport | None) -> dict[str, Any] | None:
    """With two shares: of its slots that hold a block, and of the blocks that were looked up and found."""
    if report is None:
        return None
    lookups = report.hits + report.misses
    return {
        **to_plain(report),
        "occupancy": round(report.committed / report.slots, 4) if report.slots else 0.0,
        "hit_rate": round(report.hits / lookups, 4) if lookups else None,
    }


# Which drains are refused unless they are forced.


def drain_refusal(registry: Registry, leaving: Sequence[Lifecycle]) -> str | None:
    """Why draining all of `leaving` would stop the serving; None where it would not."""
    return next(filter(None, (_refusal(registry, life, leaving) for life in leaving)), None)


def _refusal(registry: Registry, life: Lifecycle, leaving: Sequence[Lifecycle]) -> str | None:
    if life.worker is not None:
        return f"{life.instance} is a rank of {life.worker.engine}; drain that engine instead"
    if life.phase != "ready" or (life.engine is not None and not _decodes(life.engine)):
        return None
    alike, gone = _alike(life), {each.instance for each in leaving}
    if any(alike(other) for other in registry.all(life.service, "ready") if other.instance not in gone):
        return None
    if len(gone) == 1:
        return f"{life.instance} is the last ready {_kind_of(life)}; start another one first, or force it"
    return f"no {_kind_of(life)} would be ready without {', '.join(sorted(gone))}; start another one first, or force it"


def _kind_of(life: Lifecycle) -> str:
    if life.engine is None:
        kind = "engine" if life.service == "scheduler" else life.service
        return kind if life.model is None else f"{kind} of model {life.model}"
    return f"engine of model {life.engine.model.name} that decodes"


def _decodes(engine: EngineReport) -> bool:
    """Prefill engines are never the last: the others compute prompts, too."""
    return engine.role != "prefill"


def _alike(life: Lifecycle) -> Callable[[Lifecycle], bool]:
    """Whether another instance of the same service could take over from `life`."""
    if life.engine is None:
        return lambda other: life.model is None or other.model in (life.model, None)
    model = life.engine.model.name
    return lambda other: other.engine is not None and other.engine.model.name == model and _decodes(other.engine)
