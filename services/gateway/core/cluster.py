"""What the gateway knows of the other services: which models are served, and whether requests can be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from services.gateway.core.remote_clusters import Room
from shared.ids import InstanceId, ModelName
from shared.messages.dialects import Dialect
from shared.messages.lifecycle import EngineReport, Lifecycle, Service
from shared.messages.model_card import LoraCard, ModelCard
from shared.registry import InstanceGone, Registry

REQUIRED_SERVICES: tuple[Service, ...] = ("tokenizer", "coordinator", "scheduler", "detokenizer")
MODEL_MEMORY_S = 600.0
"""Seconds that a model stays known after its last engine's last heartbeat: requests for it wait, or get 503 and not
404."""

ServiceKind = tuple[Service, ModelName | None]
"""A service, and the model that it works for; None: all, as coordinators do."""


class ModelUnavailable(NamedTuple):
    """That requests for a model cannot be served, and have not been for longer than they are to wait."""

    reason: str
    since: float
    """Until when they could be served, in seconds; -inf: never yet."""
    asleep: bool = False
    """Whether it is only because engines sleep."""


class ClusterView:
    """Owns the registry of instances and the models' cards, and until when each kind of service was ready."""

    def __init__(self, wait_s: float = 0.0) -> None:
        """`wait_s`: seconds that new requests wait for what is missing."""
        self._wait_s = wait_s
        self._registry = Registry()
        self._cards: dict[ModelName, tuple[ModelCard, float]] = {}
        self._dialects: dict[ModelName, Dialect] = {}
        """The dialect of each model, from its tokenizers' lifecycles; kept as long as the model's card."""
        self._loras: dict[ModelName, dict[InstanceId, tuple[LoraCard, ...]]] = {}
        """The adapters of each live engine, by model. Engines need not have the same."""
        self._united: dict[ModelName, tuple[LoraCard, ...]] = {}
        """The adapters of all of them."""
        self._ended: set[InstanceId] = set()
        """Engines in `_loras` that serve no longer: only where no other engine of their model does."""
        self._ready: Counter[ServiceKind] = Counter()
        """How many instances of each kind are ready, kept up to date: each of many engines says every second how it is,
        and to look at all of them then would cost their square."""
        self._lacking: dict[ModelName | None, list[Service]] = {}
        """What `_missing` has found since `_ready` changed last: every request asks."""
        self._served_until: dict[ServiceKind, float] = {}
        """Until when each was known to be ready: until its next heartbeat was due, or until it said otherwise."""

    def record_lifecycle(self, message: Lifecycle, now: float) -> InstanceGone | None:
        """Takes an instance's lifecycle message. Returns the instance that it ends or replaces, if any."""
        if message.engine is not None:
            self._cards[message.engine.model.name] = (self._merged(message.instance, message.engine.model), now)
        elif message.sleep is not None and (card := message.sleep.model) is not None:
            self._cards[card.name] = (self._cards.get(card.name, (card, now))[0], now)
        if message.tokenizer is not None:
            self._dialects[message.tokenizer.model] = message.tokenizer.dialect
        before = self._registry.get(message.service, message.instance)
        gone = self._registry.record_lifecycle(message, now)
        if message.service == "scheduler" and (message.engine is None or message.phase in ("stopped", "failed")):
            self._end_loras(message.instance)
        self._count_ready(self._registry.get(message.service, message.instance), 1)
        self._count_ready(before, -1)
        if before is not None and before.phase == "ready" and not self._ready[_kind(before)]:
            self._served_until[_kind(before)] = now
        if message.phase == "ready":
            self._served_until[_kind(message)] = now + message.keep_alive
        return gone

    def expire(self, now: float, served_elsewhere: Callable[[ModelName], bool] = lambda _: False) -> list[InstanceGone]:
        """Forgets instances that were silent for too long, and returns them; models, too, but those that another
        cluster serves."""
        old = [name for name, (_, heard) in self._cards.items() if now - heard > MODEL_MEMORY_S]
        old = [name for name in old if not served_elsewhere(name)]
        for name in old:
            del self._cards[name]
            self._dialects.pop(name, None)
            for service in REQUIRED_SERVICES:
                self._served_until.pop((service, name), None)
        gone = self._registry.expire(now)
        for each in gone:
            self._count_ready(each.last, -1)
            self._end_loras(each.last.instance)
        return gone

    def _merged(self, engine: InstanceId, card: ModelCard) -> ModelCard:
        """The card with the adapters of all live engines of the model."""
        loras = self._loras.setdefault(card.name, {})
        if loras.get(engine) != card.loras or engine in self._ended:
            self._ended.discard(engine)
            loras[engine] = card.loras
            self._unite(card.name)
        united = self._united[card.name]
        return card if united == card.loras else replace(card, loras=united)

    def _end_loras(self, engine: InstanceId) -> None:
        """The engine serves no longer. What the last one of a model had stays known: its requests wait."""
        for model, loras in self._loras.items():
            if engine in loras:
                self._ended.add(engine)
                self._unite(model)

    def _unite(self, model: ModelName) -> None:
        loras = self._loras[model]
        if not self._ended.issuperset(loras):
            for engine in self._ended.intersection(loras):
                del loras[engine]
                self._ended.discard(engine)
        first = next(iter(loras.values()))
        named = {lora.name: lora for each in loras.values() for lora in each}
        same = all(each == first for each in loras.values())
        self._united[model] = first if same else tuple(named[name] for name in sorted(named))

    def ready_engines(self) -> list[EngineReport]:
        """Returns what the engines that are ready reported last."""
        return [life.engine for life in self._registry.all("scheduler", "ready") if life.engine is not None]

    def engines(self) -> list[Lifecycle]:
        """Returns what the engines that live said last, in the order of their names."""
        lives = [life for life in self._registry.all("scheduler") if life.engine is not None]
        return sorted(lives, key=lambda life: life.instance)

    def instances(self) -> list[InstanceId]:
        """Returns the names of all services that live."""
        return [life.instance for life in self._registry.all()]

    def _count_ready(self, life: Lifecycle | None, change: int) -> None:
        if life is not None and life.phase == "ready":
            kind = _kind(life)
            self._lacking.clear()
            self._ready[kind] += change
            if not self._ready[kind]:
                del self._ready[kind]

    def absence(self, model: ModelName | None, now: float) -> ModelUnavailable | None:
        """Returns why new requests for `model` are refused; None where they can be served, or could be a moment ago, so
        that they wait. Without a `model`: why those for any model are."""
        if model is None and self._cards:
            absences = [self.absence(name, now) for name in self._cards]
            return None if None in absences else absences[0]
        if not (missing := self._missing(model)):
            return None
        since = min((self._was_served_until(service, model) for service in missing), default=math.inf)
        if now - since <= self._wait_s:
            return None
        reason = f"no {' and no '.join(missing)} is ready"
        sleeping = any(life.sleep is not None for life in self._registry.all("scheduler"))
        if "scheduler" in missing and sleeping:
            reason += "; engines are asleep, until POST /wake_up"
        return ModelUnavailable(reason, since, asleep=sleeping and missing == ["scheduler"])

    def _missing(self, model: ModelName | None) -> list[Service]:
        """The services of which no instance is ready that works for `model`, or (None) for any."""
        if (missing := self._lacking.get(model)) is None:
            ready = [kind for kind, number in self._ready.items() if number]
            found = (each for each in REQUIRED_SERVICES if not any(_works_for(kind, each, model) for kind in ready))
            missing = self._lacking[model] = list(found)
        return missing

    def _was_served_until(self, service: Service, model: ModelName | None) -> float:
        times = (at for kind, at in self._served_until.items() if _works_for(kind, service, model))
        return max(times, default=-math.inf)

    def rooms(self) -> dict[ModelName, Room]:
        """Returns how many more requests the ready engines of each model would run at once; those that only prefill
        left out, where there are others. Nothing where they cannot be used for want of another service."""
        served = {name for name in self._cards if not self._missing(name)}
        rooms: dict[ModelName, Room] = {}
        for message in self._registry.all("scheduler", "ready") if served else ():
            engine = message.engine
            if engine is not None and engine.model.name in served and engine.role != "prefill" and not engine.suspect:
                room = rooms.get(engine.model.name, Room(0, 0))
                free = max(0, engine.max_running - engine.running - engine.waiting)
                loras = room.loras.union(each.id for each in engine.model.loras)
                rooms[engine.model.name] = Room(room.free + free, room.places + engine.max_running, loras)
        return rooms

    def takes_media(self) -> bool:
        """Whether any known model's chats may have images, videos or sounds."""
        return any(card.images or card.shown_videos or card.sounds for card, _ in self._cards.values())

    def models(self) -> list[ModelCard]:
        """Returns the cards of all known models."""
        return [card for card, _ in self._cards.values()]

    def counted_as(self, name: str) -> str:
        """Returns the name that metrics have for what clients call so: a model's own in place of its alias."""
        if ModelName(name) in self._cards:
            return name
        return next((card.name for card, _ in self._cards.values() if name in card.aliases), name)

    def max_model_len(self, card: ModelCard) -> int:
        """Returns the longest context of any engine of the model; that of `card` where none is known."""
        engines = (message.engine for message in self._registry.all() if message.engine is not None)
        return max([card.max_model_len, *(e.model.max_model_len for e in engines if e.model.name == card.name)])

    def dialect(self, name: ModelName) -> Dialect:
        """Returns in which formats the model writes tool calls and reasoning; none until a tokenizer has reported
        them."""
        return self._dialects.get(name, Dialect())

    def model(self, name: ModelName) -> ModelCard | None:
        """Returns a model's card; None where it is unknown."""
        entry = self._cards.get(name)
        return entry[0] if entry else None


def _kind(message: Lifecycle) -> ServiceKind:
    return message.service, message.model


def _works_for(kind: ServiceKind, service: Service, model: ModelName | None) -> bool:
    """Whether an instance of that kind is of the service and works for `model`, or (None) for any. A tokenizer or
    detokenizer that does not say for which counts for all."""
    return kind[0] == service and (model is None or kind[1] == model or (kind[1] is None and service != "scheduler"))
