"""The engines and detokenizers as one coordinator sees them: which are alive, which have room, what each has to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import Moment, Placement
from services.coordinator.core.engine_pool import (
    DECODING,
    PREFILLING,
    Candidate,
    EngineLoad,
    EnginePool,
    blocks_of,
    nothing_of,
    requests_of,
    share,
)
from services.coordinator.core.engine_slowdowns import EngineSlowdowns, Slowdown
from services.coordinator.core.outliers import ACCUSED, UNHEARD, UNHEARD_SECONDS, RatedEngine, choose_ejected
from services.coordinator.core.reservations import Reservations, ReservedWork
from shared.ids import DetokenizerId, EngineId, InstanceId, LoraId, ModelName
from shared.messages.coordinator import PlacementMade
from shared.messages.generation import Generation, KeptPrompt
from shared.messages.lifecycle import EngineHealth, Lifecycle
from shared.messages.model_card import ModelCard
from shared.registry import Registry

SETTLE_SECONDS = 0.1
"""A placement younger than this, when an engine's report comes in, may not be counted in it yet."""
HAND_OVER_SECONDS = 1.0
"""How long a request is assumed to stay on its prefill engine before its decode engine reports it."""
ACCUSED_SECONDS = 2.0
"""How long an engine that was told that it fails is ejected without its own word."""

Purpose = Literal["decode", "prefill"]


def is_fair(generation: Generation) -> bool:
    """Whether a request competes with those of other API keys."""
    return bool(generation.key)


def fits(generation: Generation, max_model_len: int) -> bool:
    """Whether the prompt and the requested tokens (one at least) fit into a context of that many tokens."""
    output = 0 if generation.pooling is not None else max(generation.stopping.max_tokens or 1, 1)
    return generation.prompt_length + output <= max_model_len


def serves(generation: Generation, card: ModelCard) -> bool:
    """Whether an engine with this card can compute the request: it fits, its adapter is there, and its embeddings are
    of the model's size."""
    has_lora = generation.lora is None or any(each.id == generation.lora for each in card.loras)
    takes = generation.prompt_embeds is None or card.takes_rows(generation.prompt_embeds.size)
    return has_lora and takes and fits(generation, card.max_model_len)


class _PoolKey(NamedTuple):
    """Which engines a pool holds."""

    model: ModelName
    purpose: Purpose
    fair: bool
    """Whether they have room for requests of API keys, which compete with those of others."""


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
        self._heard: dict[InstanceId, float] = {}
        """When each engine has reported last."""
        self._unheard: set[InstanceId] = set()
        """Engines that may hang: see `doubt`."""
        self._work_of = {"kv": blocks_of, "least-loaded": requests_of}.get(config.router_policy, nothing_of)
        self._slowdowns = EngineSlowdowns()
        self._compares = config.router_policy == "kv" and config.router_step_times
        """Whether engines are compared by how long their steps take."""
        self._engines: dict[InstanceId, EngineLoad] = {}
        """Every engine that is alive and has published what it serves."""
        # What follows is computed on demand after each change of what engines are, and only kept up to date where an
        # engine reports another load: reports come all the time.
        self._ready: dict[ModelName, list[InstanceId]] = {}
        """The engines by model that may take requests, by name."""
        self._ejected: dict[ModelName, frozenset[InstanceId]] = {}
        self._all_ejected: frozenset[InstanceId] | None = None
        self._contexts: dict[ModelName, tuple[int, int] | None] = {}
        """The shortest and the longest context of a model's engines, None while none is known."""
        self._loras: dict[ModelName, frozenset[LoraId]] = {}
        """The adapters that all engines of a model serve."""
        self._pools: dict[_PoolKey, EnginePool] = {}
        self._detokenizers: list[Lifecycle] = []
        """The detokenizers that are ready."""
        self._detokenizers_of: dict[ModelName, list[Lifecycle]] = {}
        """Those of each model, computed on demand."""

    # ---- what is seen of them

    def record_lifecycle(self, life: Lifecycle, at: Moment) -> InstanceId | None:
        """Records a heartbeat. Returns the instance if the heartbeat shows that its former process has ended. An
        unreachable instance counts as reachable again from its next heartbeat on."""
        gone = self.registry.record_lifecycle(life, at.alive)
        if gone is not None:
            self._reservations.forget(life.instance)
            self._slowdowns.forget(life.instance)
        if life.instance in self._unreachable:
            self._unreachable.discard(life.instance)
            self._clear_engine_caches()
        match life.service:
            case "scheduler":
                self._end_accusation(life, at)
                self._heard[life.instance] = at.now
                if life.instance in self._unheard:
                    self._unheard.discard(life.instance)
                    self._clear_engine_caches()
                self._reservations.reported(life.instance, at.now)
                self._record_engine(life.instance, at.now)
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
            self._heard.pop(instance, None)
            self._unheard.discard(instance)
            self._engines.pop(instance, None)
            self._slowdowns.forget(instance)
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
        """Ejects an engine on which requests fail, until it reports that itself. Returns False if that would have no
        effect: it is a suspect already, is not ready, or is of a release that does not know of it."""
        load = self._engines.get(InstanceId(engine))
        if load is None or load.phase != "ready" or load.report.health is None or load.report.suspect:
            return False
        if self._accused.get(load.instance, -math.inf) > at.now:
            return False
        self._accused[load.instance] = at.now + ACCUSED_SECONDS
        self._clear_engine_caches()
        return True

    def doubt(self, engine: EngineId, placed: float, at: Moment) -> bool:
        """A request comes again that was placed on the engine at `placed`. If nothing was heard of the engine since
        then, for longer than a gateway needs to report a failed request, it gets no requests until its next report: in
        a large fleet that is due only seconds later, and it may be dead. Returns whether it is so."""
        load, instance = self._engines.get(InstanceId(engine)), InstanceId(engine)
        heard = self._heard.get(instance, math.inf)
        if load is None or heard > placed or at.now - placed < UNHEARD_SECONDS or instance in self._unheard:
            return False
        self._unheard.add(instance)
        self._clear_engine_caches()
        return True

    # ---- what is placed

    def record_placement(self, placement: Placement, at: Moment) -> None:
        """Counts a placement of this coordinator, until the receivers' reports do."""
        add, reuse, blocks = self._reservations.add, placement.reuse, placement.blocks
        decode_first = placement.prefill_on is not None
        first = placement.prefill_on or placement.engine
        then = placement.engine if decode_first else placement.decode_on
        add(InstanceId(first), at.now, prefill=blocks - reuse.blocks, blocks=blocks - reuse.device)
        self._update_pools(InstanceId(first))
        if then is not None:
            # Decode-first it is there at once, until it is passed on, and then its blocks are kept.
            add(InstanceId(then), at.now, blocks=blocks, delay=HAND_OVER_SECONDS)
            self._update_pools(InstanceId(then))
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
                self._update_pools(instance)

    # ---- queries

    def max_model_len(self, model: ModelName) -> int | None:
        """Tokens that the longest context among the model's engines holds; None where no engine of it is known."""
        context = self._context(model)
        return None if context is None else context[1]

    def lacks_lora(self, generation: Generation) -> bool:
        """Whether engines of the model are ready, but none that is known serves the request's adapter."""
        lora, model = generation.lora, generation.model
        if lora is None or not self._ready_names(model) or lora in self._common_loras(model):
            return False
        cards = (engine.report.model for engine in self._engines.values())
        return not any(each.id == lora for card in cards if card.name == model for each in card.loras)

    def ready(self, model: ModelName) -> list[EngineLoad]:
        """The engines that may take requests for `model`, full or not, by name: without those that are ejected."""
        return [self._engines[instance] for instance in self._ready_names(model)]

    def ejected(self, model: ModelName) -> frozenset[InstanceId]:
        """The engines of `model` that are ready, and get no requests because they fail."""
        ejected = self._ejected.get(model)
        if ejected is None:
            rated = [RatedEngine(engine.instance, self._health_of(engine)) for engine in self._serving(model)]
            ejected = self._ejected[model] = choose_ejected(rated, self._config.max_ejected_share)
        return ejected

    def all_ejected(self) -> frozenset[InstanceId]:
        """Those of every model."""
        if self._all_ejected is None:
            models = {engine.report.model.name for engine in self._engines.values()}
            self._all_ejected = frozenset[InstanceId]().union(*(self.ejected(model) for model in models))
        return self._all_ejected

    @property
    def slowdowns(self) -> Mapping[InstanceId, Slowdown]:
        """The slowdowns of those engines that are slower or faster than the median engine of their model."""
        return self._slowdowns.unlike

    def keeps(self, kept: KeptPrompt) -> bool:
        """Whether the engine and node exist that a client names as those which keep its prompt."""
        load = self._engines.get(InstanceId(kept.engine))
        return load is not None and load.report.node == kept.node

    def suspicion_of(self, engine: InstanceId) -> str | None:
        """Why an engine is suspected of failing, for people; None if it is not."""
        load = self._engines.get(engine)
        health = None if load is None else self._health_of(load)
        return None if health is None else health.suspect

    def _health_of(self, engine: EngineLoad) -> EngineHealth | None:
        """The engine's health as it reports it, unless this coordinator has seen worse since."""
        if engine.instance in self._accused:
            return ACCUSED
        return UNHEARD if engine.instance in self._unheard else engine.report.health

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
        """Which services a request for `model` needs that are not ready, for people; None if all are ready."""
        if not self._ready_names(model):
            return f"no engine for the model {model!r} is ready"
        return None if self._of_model(model) else "no detokenizer is ready"

    def has_room(self, model: ModelName, *, fair: bool) -> bool:
        """Whether some engine of `model` takes one more request, which is `fair` (of an API key, so that it competes
        with those of others) or not. Answers fast if the queue is long and there is no room."""
        return bool(self._of_model(model)) and len(self._pool(_PoolKey(model, "decode", fair))) > 0

    def decode_candidates(self, generation: Generation) -> EnginePool:
        """The engines that may take the whole of a request; none where all are full.

        Prefill engines decode where there is no other. Engines to be avoided count only where there is no other
        engine, full ones included.
        """
        if not generation.avoid and self._served_everywhere(generation):
            return self._pool(_PoolKey(generation.model, "decode", is_fair(generation)))
        fitting = [e for e in self.ready(generation.model) if serves(generation, e.report.model)]
        preferred = [engine for engine in fitting if engine.id not in generation.avoid] or fitting
        return self._new_pool(_able_to_decode(preferred), fair=is_fair(generation))

    def prefill_candidates(self, generation: Generation) -> EnginePool:
        """The prefill engines that may take a request and hand it over, by the KV store of their node; none that is to
        be avoided."""
        if not generation.avoid and self._served_everywhere(generation):
            return self._pool(_PoolKey(generation.model, "prefill", is_fair(generation)))
        able = (
            engine
            for engine in self.ready(generation.model)
            if _hands_over(engine) and engine.id not in generation.avoid and serves(generation, engine.report.model)
        )
        return self._new_pool(able, fair=is_fair(generation))

    def choose_detokenizer(self, model: ModelName) -> DetokenizerId | None:
        """One of that model with the least work, with rotation among equals; None where there is none."""
        loads = [
            (life.load + self._reservations.on(life.instance).requests, life.instance) for life in self._of_model(model)
        ]
        if not loads:
            return None
        least = min(loads)[0]
        equals = sorted(instance for load, instance in loads if load == least)
        return DetokenizerId(equals[self.turn % len(equals)])

    # ---- parts

    def _context(self, model: ModelName) -> tuple[int, int] | None:
        if model not in self._contexts:
            models = [engine.report.model for engine in self._engines.values()]
            lengths = [card.max_model_len for card in models if card.name == model]
            self._contexts[model] = (min(lengths), max(lengths)) if lengths else None
        return self._contexts[model]

    def _served_everywhere(self, generation: Generation) -> bool:
        context = self._context(generation.model)
        if context is None or generation.prompt_embeds is not None or not fits(generation, context[0]):
            return False
        return generation.lora is None or generation.lora in self._common_loras(generation.model)

    def _common_loras(self, model: ModelName) -> frozenset[LoraId]:
        """The adapters that every engine of the model serves."""
        common = self._loras.get(model)
        if common is None:
            cards = [engine.report.model for engine in self._engines.values()]
            sets = [frozenset(each.id for each in card.loras) for card in cards if card.name == model]
            common = self._loras[model] = frozenset.intersection(*sets) if sets else frozenset()
        return common

    def _ready_names(self, model: ModelName) -> list[InstanceId]:
        ready = self._ready.get(model)
        if ready is None:
            ejected = self.ejected(model)
            ready = [engine.instance for engine in self._serving(model) if engine.instance not in ejected]
            ready.sort()
            self._ready[model] = ready
        return ready

    def _pool(self, key: _PoolKey) -> EnginePool:
        """The pool of that key, kept up to date from now on."""
        pool = self._pools.get(key)
        if pool is None:
            ready = self.ready(key.model)
            if key.purpose == "decode":
                able = _able_to_decode(ready)
            else:
                able = [engine for engine in ready if _hands_over(engine)]
            pool = self._new_pool(able, fair=key.fair)
            pool.eligible = frozenset(engine.id for engine in able)
            self._pools[key] = pool
        return pool

    def _new_pool(self, engines: Iterable[EngineLoad], *, fair: bool) -> EnginePool:
        """Those of the engines that have room for another request."""
        candidates = (self._candidate(engine, fair=fair) for engine in engines)
        return EnginePool(self._work_of, (each for each in candidates if each is not None))

    def _candidate(self, engine: EngineLoad, *, fair: bool) -> Candidate | None:
        """None where it is full."""
        reserved = self._reservations.on(engine.instance)
        return Candidate.of(engine, reserved) if self._room(engine, reserved, fair=fair) > 0 else None

    def _update_pools(self, instance: InstanceId) -> None:
        """The engine's load, or what was placed there, is another one."""
        engine = self._engines.get(instance)
        if engine is None:
            return
        for key, pool in self._pools.items():
            if engine.id in pool.eligible:
                candidate = self._candidate(engine, fair=key.fair)
                if candidate is None:
                    pool.drop(engine.id)
                else:
                    pool.put(candidate)

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

    def _record_engine(self, instance: InstanceId, now: float) -> None:
        alive = self.registry.get("scheduler", instance)
        before = self._engines.get(instance)
        if alive is None or alive.engine is None:
            if self._engines.pop(instance, None) is not None:
                self._clear_engine_caches()
            return
        if self._compares:
            self._slowdowns.record(instance, alive.engine, now)
            for changed in self._slowdowns.compare(now):
                if (other := self._engines.get(changed)) is not None:
                    self._engines[changed] = other._replace(slowdown=self._slowdowns.of(changed))
                    self._update_pools(changed)
        load = EngineLoad.of(alive, alive.engine, self._config, self._slowdowns.of(instance))
        self._engines[instance] = load
        if before is not None and load.is_like(before):
            self._update_pools(instance)
        else:
            self._clear_engine_caches()

    def _end_accusation(self, life: Lifecycle, at: Moment) -> None:
        """The engine's own report counts again, once it calls itself a suspect or has not done so for long."""
        until = self._accused.get(life.instance)
        suspect = life.engine is not None and life.engine.suspect is not None
        if until is not None and (suspect or at.now >= until):
            del self._accused[life.instance]
            self._clear_engine_caches()

    def _clear_engine_caches(self) -> None:
        self._ready.clear()
        self._ejected.clear()
        self._all_ejected = None
        self._contexts.clear()
        self._loras.clear()
        self._pools.clear()

    def _list_detokenizers(self) -> None:
        self._detokenizers = list(self.registry.all("detokenizer", "ready"))
        self._detokenizers_of.clear()

    def _of_model(self, model: ModelName) -> list[Lifecycle]:
        """The detokenizers that are ready and work for `model`; one of a release that does not say so works for all."""
        found = self._detokenizers_of.get(model)
        if found is None:
            found = [life for life in self._detokenizers if life.model in (model, None)]
            self._detokenizers_of[model] = found
        return found

    def _count_coordinators(self) -> None:
        """This coordinator is counted even before it receives its own lifecycle message."""
        ready = {life.instance for life in self.registry.all("coordinator", "ready")} | {self._instance}
        names = sorted(ready)
        peers = [name for name in names if name != self._instance]
        if peers != self.peers or self._rank != names.index(self._instance):
            self._rank, self.peers = names.index(self._instance), peers
            self._pools.clear()  # the shares of engines' room are others


def _able_to_decode(engines: list[EngineLoad]) -> list[EngineLoad]:
    """Prefill engines only where there is no other."""
    return [engine for engine in engines if engine.report.role in DECODING] or engines


def _hands_over(engine: EngineLoad) -> bool:
    return engine.report.role in PREFILLING and engine.report.node is not None
