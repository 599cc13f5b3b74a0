"""The engines and detokenizers as one coordinator sees them: which are alive, which have room, what each has to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import Moment, Placement
from services.coordinator.core.outliers import ACCUSED, RatedEngine, choose_ejected
from services.coordinator.core.reservations import Reservations, ReservedWork
from shared.blocks import BLOCK_SIZE
from shared.ids import DetokenizerId, EngineId, InstanceId, ModelName, NodeId
from shared.messages.coordinator import PlacementMade
from shared.messages.generation import Generation
from shared.messages.lifecycle import EngineReport, Lifecycle, Phase, Role
from shared.registry import Registry

DECODING: frozenset[Role] = frozenset(("mixed", "decode"))
PREFILLING: frozenset[Role] = frozenset(("prefill",))

SETTLE_SECONDS = 0.1
"""A placement younger than this, when an engine's report comes in, may not be counted in it yet."""
HAND_OVER_SECONDS = 1.0
"""How long a request is assumed to stay on its prefill engine before its decode engine reports it."""
MIN_BACKLOG = 8
"""Requests that may wait in an engine although its batch is small: a few have only just arrived there."""
ACCUSED_SECONDS = 2.0
"""How long an engine that was told that it fails is ejected without its own word."""
WAITING_WEIGHT = 4
"""A waiting request is work that has yet to begin; a running one shares each step with the others."""


def room(report: EngineReport, fill: float | None) -> int:
    """Requests that the engine can take beyond those it reported; never negative. `fill`: see `engine_fill` of
    `CoordinatorConfig`.

    Where something waits already, a free place in the running batch is no room: blocks may be what is short.
    """
    free = 0 if report.waiting else report.max_running - report.running
    by_bounds = report.max_waiting - report.waiting + free
    if fill is None:
        return max(0, by_bounds)
    by_fill = int(fill * report.max_running) - report.waiting - report.running
    return max(0, min(by_bounds, by_fill))


def fair_room(report: EngineReport, fill: float) -> int:
    """Requests of API keys that the engine can take beyond those it reported; never negative. `fill`: see `fair_fill`
    of `CoordinatorConfig`.

    In an engine they wait in the order of their arrival, and in the coordinator's queue in a fair one. So an engine
    gets no more than it needs until its next report.
    """
    backlog = max(MIN_BACKLOG, int((fill - 1) * report.running))
    return 0 if report.waiting >= backlog else room(report, fill)


def is_fair(generation: Generation) -> bool:
    """Whether a request competes with those of other API keys."""
    return bool(generation.key)


def share(whole: int, parts: int, turn: int) -> int:
    """One of `parts` shares of `whole`, which add up to it over `turn` = t, t + 1, …, t + parts - 1."""
    return whole // parts + (1 if turn % parts < whole % parts else 0)


def cost(report: EngineReport, placed: int) -> int:
    """Requests on the engine once `placed` more have reached it: they fill the running batch first."""
    free = 0 if report.waiting else max(0, report.max_running - report.running)
    running = min(placed, free)
    return WAITING_WEIGHT * (report.waiting + placed - running) + report.running + running


def fits(generation: Generation, max_model_len: int) -> bool:
    """Whether the prompt and the requested tokens (one at least) fit into a context of that many tokens."""
    return generation.prompt_length + max(generation.stopping.max_tokens or 1, 1) <= max_model_len


class EngineLoad(NamedTuple):
    """One engine as its last report shows it, with values that each placement needs computed once."""

    id: EngineId
    instance: InstanceId
    phase: Phase
    progress: int
    """Its count of heartbeats, which all coordinators see alike."""
    report: EngineReport
    room: int
    """Requests that it takes beyond those reported."""
    fair_room: int
    """The same for requests of API keys."""
    prefill: float
    """Blocks that it has yet to compute before it gets to one more request."""
    used: int
    """Blocks of KV memory in use."""

    @classmethod
    def of(cls, life: Lifecycle, report: EngineReport, config: CoordinatorConfig) -> EngineLoad:
        """The engine that sent `life` with this `report` in it."""
        return cls(
            id=EngineId(life.instance),
            instance=life.instance,
            phase=life.phase,
            progress=life.progress,
            report=report,
            room=room(report, config.engine_fill),
            fair_room=min(room(report, config.engine_fill), fair_room(report, config.fair_fill)),
            prefill=report.prefill_tokens / BLOCK_SIZE,
            used=report.blocks_total - report.blocks_free,
        )


class Candidate(NamedTuple):
    """An engine that takes one more request, and its work with that counted which its report does not show yet."""

    engine: EngineLoad
    node: NodeId | None
    reserved: ReservedWork
    requests: int
    """Waiting and running, in all."""
    prefill: float
    """Blocks that it computes before it gets to one more request."""
    used: int
    """Blocks of KV memory in use, which every decode step reads."""


class EngineFleet:
    """Owns the registry, what was placed since the last reports, and which instances turned out to be unreachable.

    `turn` is where the rotation among equals starts; it should differ between coordinators, so that they do not
    all begin with the same engine.
    """

    def __init__(self, instance: InstanceId, config: CoordinatorConfig, turn: int) -> None:
        self.registry = Registry()
        self.turn = turn
        """Goes up by one with each placement."""
        self.peers: list[InstanceId] = []
        """The other coordinators that place requests at the moment."""
        self._instance = instance
        self._rank = 0
        """The place of this coordinator among all of them, by name."""
        self._config = config
        self._reservations = Reservations(SETTLE_SECONDS)
        self._unreachable: set[InstanceId] = set()
        """Engines to which a request could not be delivered."""
        self._accused: dict[InstanceId, float] = {}
        """Engines that were just told that they fail, and until when their own word for it is awaited."""
        self._engines: dict[InstanceId, EngineLoad] = {}
        """Every engine that is alive and has published what it serves."""
        self._ready: dict[ModelName, list[EngineLoad]] = {}
        """The engines by model that may take requests, computed on demand after each change; see `_contexts`."""
        self._contexts: dict[ModelName, int | None] = {}
        """The context length of each model, None while it is unknown; computed on demand after each change."""
        self._detokenizers: list[Lifecycle] = []
        """The detokenizers that are ready."""

    # ---- what is seen of them

    def record_lifecycle(self, life: Lifecycle, at: Moment) -> InstanceId | None:
        """Records a heartbeat. Returns the instance if the heartbeat shows that its former process has ended. An
        unreachable instance counts as reachable again from its next heartbeat on."""
        gone = self.registry.record_lifecycle(life, at.alive)
        if gone is not None:
            self._reservations.forget(life.instance)
        self._unreachable.discard(life.instance)
        match life.service:
            case "scheduler":
                self._end_accusation(life, at)
                self._record_engine(life.instance)
                self._reservations.reported(life.instance, at.now)
            case "detokenizer":
                self._list_detokenizers()
                self._reservations.reported(life.instance, at.now)
            case "coordinator":
                self._count_coordinators()
        return gone.last.instance if gone is not None else None

    def expire(self, at: Moment) -> list[InstanceId]:
        """Forgets the instances that were silent for too long, and answers with them."""
        silent = [gone.last.instance for gone in self.registry.expire(at.alive)]
        for instance in silent:
            self._reservations.forget(instance)
            self._unreachable.discard(instance)
            self._accused.pop(instance, None)
            self._engines.pop(instance, None)
        if silent:
            self._clear_engine_caches()
            self._list_detokenizers()
            self._count_coordinators()
        return silent

    def mark_unreachable(self, engine: EngineId) -> None:
        """The engine has no subscriber: nothing goes to it until its next heartbeat."""
        self._unreachable.add(InstanceId(engine))
        self._clear_engine_caches()
        self._reservations.forget(InstanceId(engine))

    def accuse(self, engine: EngineId, at: Moment) -> bool:
        """Ejects an engine on which requests fail, until it says so itself. False where that is of no use: it is a
        suspect already, is not ready, or is of a release that does not know of it."""
        load = self._engines.get(InstanceId(engine))
        if load is None or load.phase != "ready" or load.report.health is None or load.report.suspect:
            return False
        if self._accused.get(load.instance, -math.inf) > at.now:
            return False
        self._accused[load.instance] = at.now + ACCUSED_SECONDS
        self._clear_engine_caches()
        return True

    # ---- what is placed

    def record_placement(self, placement: Placement, at: Moment) -> None:
        """Counts a placement of this coordinator, until the receivers' reports do."""
        add, reuse, blocks = self._reservations.add, placement.reuse, placement.blocks
        add(InstanceId(placement.engine), at.now, prefill=blocks - reuse.blocks, blocks=blocks - reuse.device)
        if placement.decode_on is not None:
            add(InstanceId(placement.decode_on), at.now, blocks=blocks, delay=HAND_OVER_SECONDS)
        add(InstanceId(placement.detokenizer), at.now)
        self.turn += 1

    def record_announcement(self, made: PlacementMade, at: Moment) -> None:
        """Counts what another coordinator has placed, until reports do: so only on instances that report."""
        work = [
            (made.engine, made.blocks - made.reused, made.blocks - made.on_device, 0.0),
            (made.detokenizer, 0, 0, 0.0),
        ]
        if made.decode_on is not None:
            work.append((made.decode_on, 0, made.blocks, HAND_OVER_SECONDS))
        detokenizers = {life.instance for life in self._detokenizers}
        for receiver, prefill, blocks, delay in work:
            if (instance := InstanceId(receiver)) in self._engines or instance in detokenizers:
                self._reservations.add(instance, at.now, own=False, prefill=prefill, blocks=blocks, delay=delay)

    # ---- queries

    def max_model_len(self, model: ModelName) -> int | None:
        """Tokens that the longest context among the model's engines holds; None where no engine of it is known."""
        if model not in self._contexts:
            models = [engine.report.model for engine in self._engines.values()]
            self._contexts[model] = max((card.max_model_len for card in models if card.name == model), default=None)
        return self._contexts[model]

    def ready(self, model: ModelName) -> list[EngineLoad]:
        """The engines that may take requests for `model`, full or not, by name: without those that are ejected."""
        ready = self._ready.get(model)
        if ready is None:
            ejected = self.ejected(model)
            ready = [engine for engine in self._serving(model) if engine.instance not in ejected]
            ready.sort(key=lambda engine: engine.id)
            self._ready[model] = ready
        return ready

    def ejected(self, model: ModelName) -> frozenset[InstanceId]:
        """The engines of `model` that are ready, and get no requests because they fail."""
        rated = [
            RatedEngine(engine.instance, ACCUSED if engine.instance in self._accused else engine.report.health)
            for engine in self._serving(model)
        ]
        return choose_ejected(rated, self._config.max_ejected_share)

    def suspicion_of(self, engine: InstanceId) -> str | None:
        """Why an engine is taken to fail, for people; None where it is not."""
        if engine in self._accused:
            return ACCUSED.suspect
        load = self._engines.get(engine)
        return None if load is None else load.report.suspect

    def models(self) -> set[ModelName]:
        """The models that engines serve at the moment."""
        return {engine.report.model.name for engine in self._engines.values()}

    def _serving(self, model: ModelName) -> list[EngineLoad]:
        """The engines of `model` that are ready, and can be reached."""
        return [
            engine
            for engine in self._engines.values()
            if engine.phase == "ready"
            and engine.report.model.name == model
            and engine.instance not in self._unreachable
        ]

    def missing(self, model: ModelName) -> str | None:
        """What a request for `model` cannot do without and is not ready, for people; None where all is there."""
        if not self.ready(model):
            return f"no engine for the model {model!r} is ready"
        return None if self._detokenizers else "no detokenizer is ready"

    def has_room(self, model: ModelName, *, fair: bool) -> bool:
        """Whether some engine of `model` takes one more, that is `fair` (of an API key, and competes with those of
        others) or not; a quick no for a long queue."""
        ready = self.ready(model)
        able = [engine for engine in ready if engine.report.role in DECODING] or ready
        return bool(self._detokenizers) and any(
            self._room(engine, self._reservations.on(engine.instance), fair=fair) > 0 for engine in able
        )

    def decode_candidates(self, generation: Generation) -> list[Candidate]:
        """The engines that may take the whole of a request, by name; none where all are full.

        Prefill engines decode where there is no other. Engines to be avoided count only where there is no other
        engine, full ones included.
        """
        fitting = [e for e in self.ready(generation.model) if fits(generation, e.report.model.max_model_len)]
        preferred = [engine for engine in fitting if engine.id not in generation.avoid] or fitting
        able = [engine for engine in preferred if engine.report.role in DECODING] or preferred
        return self._candidates(able, fair=is_fair(generation))

    def prefill_candidates(self, generation: Generation) -> list[Candidate]:
        """The prefill engines that may take a request and hand it over; none that is to be avoided."""
        able = (
            engine
            for engine in self.ready(generation.model)
            if engine.report.role in PREFILLING
            and engine.id not in generation.avoid
            and fits(generation, engine.report.model.max_model_len)
        )
        return self._candidates(able, fair=is_fair(generation))

    def choose_detokenizer(self) -> DetokenizerId | None:
        """One with the least work, with rotation among equals; None where there is none."""
        loads = [
            (life.load + self._reservations.on(life.instance).requests, life.instance) for life in self._detokenizers
        ]
        if not loads:
            return None
        least = min(loads)[0]
        equals = sorted(instance for load, instance in loads if load == least)
        return DetokenizerId(equals[self.turn % len(equals)])

    # ---- parts

    def _candidates(self, engines: Iterable[EngineLoad], *, fair: bool) -> list[Candidate]:
        """The engines that have room for another request."""
        candidates = []
        for engine in engines:
            reserved, report = self._reservations.on(engine.instance), engine.report
            if self._room(engine, reserved, fair=fair) > 0:
                requests = report.waiting + report.running + reserved.requests
                prefill, used = engine.prefill + reserved.prefill, engine.used + reserved.blocks
                candidates.append(Candidate(engine, report.node, reserved, requests, prefill, used))
        return candidates

    def _room(self, engine: EngineLoad, reserved: ReservedWork, *, fair: bool) -> int:
        """This coordinator's share of the engine's room, less what it has placed there since the report. There are
        shares because two coordinators, which receive each other's placements a moment late, would both take the last
        place.

        The remainder of the division rotates among the coordinators with the engine's heartbeats.
        """
        room = engine.fair_room if fair else engine.room
        if not self.peers:
            return room - reserved.own
        return share(room, len(self.peers) + 1, self._rank + engine.progress) - reserved.own

    def _record_engine(self, instance: InstanceId) -> None:
        alive = self.registry.get("scheduler", instance)
        if alive is not None and alive.engine is not None:
            self._engines[instance] = EngineLoad.of(alive, alive.engine, self._config)
        else:
            self._engines.pop(instance, None)
        self._clear_engine_caches()

    def _end_accusation(self, life: Lifecycle, at: Moment) -> None:
        """Its own word counts again, once it calls itself a suspect or has not done so for long."""
        until = self._accused.get(life.instance)
        suspect = life.engine is not None and life.engine.suspect is not None
        if until is not None and (suspect or at.now >= until):
            del self._accused[life.instance]

    def _clear_engine_caches(self) -> None:
        self._ready.clear()
        self._contexts.clear()

    def _list_detokenizers(self) -> None:
        self._detokenizers = list(self.registry.all("detokenizer", "ready"))

    def _count_coordinators(self) -> None:
        """This coordinator is counted even before it receives its own lifecycle message."""
        ready = {life.instance for life in self.registry.all("coordinator", "ready")} | {self._instance}
        self._rank = sorted(ready).index(self._instance)
        self.peers = sorted(ready - {self._instance})
